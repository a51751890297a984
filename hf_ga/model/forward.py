"""One forward of any model on one batch: which entries of the batch it gets, and its loss. Also the
state of a model around a forward: training modes, buffers, gradients and torch.compile.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_pre_hook

from hf_ga.errors import ConfigError, NoLoss
from hf_ga.model.loaded import loaded_class
from hf_ga.model.precision import at_least_float32

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Modules that wrap a model or its layers after a trial of its loss.
PARALLEL = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
WRAPPERS = (*PARALLEL, CheckpointWrapper)
OF_TORCH = frozenset(vars(nn.Module()))  # attributes that torch gives each module
PLAIN_TYPES = frozenset([bool, int, float, str, tuple, type(None), torch.Size, Tensor])
Batch = Mapping[str, Any]  # the arguments of the forward, by name
# (outputs of the model, batch) -> (sum of the loss over its targets, number of targets)
LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor | int | float]]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside the wrappers of DDP, FSDP and Accelerate. Accelerate's
    mixed-precision wrapper of its forward is kept.
    """
    if _is_wrapper(model):
        return extract_model_from_parallel(model, keep_fp32_wrapper=True)
    # Accelerate's function looks for compiled modules among all of them, in every window.
    while isinstance(model, PARALLEL):
        model = model.module
    return model


def innermost(model: nn.Module) -> nn.Module:
    """Return the user's module inside all wrappers, also that of torch.compile."""
    while _is_wrapper(model) or isinstance(model, PARALLEL):
        model = model._orig_mod if _is_wrapper(model) else model.module
    return model


def callable_module(model: nn.Module) -> nn.Module:
    """Return the module that the engine calls for the forwards of a window: the module inside DDP,
    or the model itself under FSDP or without a wrapper.

    The forward of DDP would broadcast buffers and prepare its own gradient all-reduce, which all
    ranks would have to do equally often. The forward of FSDP is needed: it gathers the parameters.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is a `PreTrainedModel` of transformers."""
    return isinstance(model, loaded_class("transformers.modeling_utils", "PreTrainedModel"))


def argument_filter(model: nn.Module) -> Callable[[Batch], dict[str, Any]]:
    """Return a function that drops the entries of a batch that the model's forward does not accept.

    A forward with `**kwargs` accepts all entries, except in a transformers model, whose `**kwargs`
    are for settings: it accepts the parameters that its forward names and, as long as each forward
    passes `**kwargs` on, also those that the forwards of its base classes name.

    Args:
        model: The model, with or without wrappers.
    """
    model = unwrapped(model)
    # Accelerate's mixed precision replaces the forward, and keeps the original.
    forwards = [getattr(model, "_original_forward", model.forward)]
    if is_of_transformers(model):
        bases = [vars(base) for base in type(model).__mro__]
        forwards += [base["forward"] for base in bases if "forward" in base]
    accepted_names: set[str] = set()

    def keep_accepted(batch: Batch) -> dict[str, Any]:
        """Return the entries of a collated batch that the model's forward accepts."""
        return {name: value for name, value in batch.items() if name in accepted_names}

    for forward in forwards:
        parameters = inspect.signature(forward).parameters.values()
        accepted_names |= {
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        has_kwargs = any(p.kind == p.VAR_KEYWORD for p in parameters)
        if not has_kwargs:
            return keep_accepted
    return dict  # every forward has **kwargs: nothing is dropped


def transformers_configs(model: nn.Module) -> "list[PretrainedConfig]":
    """Return the configs of the transformers models in a model."""
    return [module.config for module in model.modules() if is_of_transformers(module)]


@contextmanager
def without_cache(configs: "Sequence[PretrainedConfig]") -> Iterator[None]:
    """Let transformers models return no cache for generation in the block: it costs memory, it is
    no output of samples, and compiled layers compile again for it.

    Args:
        configs: Those of the models.
    """
    # Not `override`: some configs map this name to another attribute.
    with_cache = [config for config in configs if getattr(config, "use_cache", False)]
    for config in with_cache:
        config.use_cache = False
    try:
        yield
    finally:
        for config in with_cache:
            config.use_cache = True


def get_output(outputs: Any, name: str) -> Any:
    """Return the item of a model's outputs from which a loss is computed, by its name ("loss",
    "logits"): an entry of a dict, or an attribute of another object. None if it does not exist.
    """
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return getattr(outputs, name, None)


def head_loss(outputs: Any) -> Tensor:
    """Return the loss that a model computed itself, from its outputs: a scalar of at least float32.

    Args:
        outputs: What the model returned. The loss is `outputs.loss`, `outputs["loss"]`, the first
            item of a tuple, or a tensor that was returned alone.

    Raises:
        NoLoss: If the outputs contain no loss, or it does not have exactly one element.
    """
    first = outputs[0] if type(outputs) is tuple and outputs else outputs
    loss = first if isinstance(first, Tensor) else get_output(first, "loss")
    if loss is not None and loss.numel() == 1:
        return at_least_float32(loss.reshape(()))
    if loss is None:
        found = f"a {type(outputs).__name__} without one"
    else:
        found = f"shape {list(loss.shape)}"
    raise NoLoss(
        f"the model's loss must be one number, got {found}. Let it return a dict with a loss, give "
        "it labels, or pass loss_fn(outputs, batch) -> (sum of the loss, number of targets)."
    )


def call_loss_fn(loss_fn: LossFunction, outputs: Any, batch: Batch) -> tuple[Tensor, float]:
    """Call the user's loss function, and check what it returns.

    Waits for the device if the number of targets is a tensor there.

    Args:
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets).
        outputs: What the model returned.
        batch: The batch, on the device.

    Returns:
        The sum, a scalar of at least float32, and the number of targets.

    Raises:
        ConfigError: If it returns something other than a scalar tensor and a number.
    """
    returned = loss_fn(outputs, batch)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], Tensor) or returned[0].dim():
        raise ConfigError(
            "loss_fn must return (sum of the loss as a scalar tensor, number of targets), got "
            f'{returned!r:.80}: sum the loss (reduction="sum"), and count what it is summed over.'
        )
    total, num_targets = returned
    return at_least_float32(total), float(num_targets)


def run_forward(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None
) -> tuple[Tensor, float | None]:
    """Run the model on one collated batch, and return its own mean loss, or the sum and number of
    targets of the user's loss function.

    Args:
        model: The model.
        batch: The batch on the model's device. Entries that the forward does not accept are not
            passed.
        loss_fn: The user's loss function. None: the loss that the model returns.

    Returns:
        (the model's mean loss, None), or the (sum, number of targets) of `loss_fn`.
    """
    accepted = argument_filter(model)(batch)
    outputs = model(**accepted)
    if loss_fn is None:
        return head_loss(outputs), None
    return call_loss_fn(loss_fn, outputs, batch)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, as `model.modules()` does, in a third of the time."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or module in found:
            continue
        found[module] = None
        if module._modules:
            waiting.extend(reversed(module._modules.values()))
    return list(found)


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a model that are compiled: `Module.compile` was called for
    them, or their forward was replaced by `torch.compile(forward)`, or they are the wrapper that
    `torch.compile(module)` returns. Hooks and some speed-ups do not work inside them.
    """
    found = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        forward = vars(module).get("forward") or type(module).forward  # sooner than a bound method
        is_module_compiled = module._compiled_call_impl is not None
        if is_module_compiled or hasattr(forward, "_torchdynamo_orig_callable"):
            found.append(module)
        elif module._modules:
            if _is_wrapper(module):
                found.append(module)
            else:
                waiting.extend(child for child in module._modules.values() if child is not None)
    return found


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returns. `hasattr` would build a message."""
    return "_orig_mod" in module._modules


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a module in it is compiled, see `compiled_modules`."""
    return bool(compiled_modules(model))


def check_not_wrapped(model: nn.Module) -> None:
    """Check, before a model is trained, that neither it nor a module in it is the wrapper that
    `torch.compile(module)` returns. Modules compiled in place are accepted.

    Raises:
        ConfigError: If there is such a wrapper.
    """
    for name, module in model.named_modules():
        if _is_wrapper(module):
            raise ConfigError(
                f"{name or 'the model'} is wrapped by torch.compile, which gives its parameters "
                "other names: pass the original module, and compile it in place "
                "(hf_ga.compile_layers, or a layer's method compile())."
            )


@contextmanager
def force_eager() -> Iterator[None]:
    """Run everything in the block eagerly, also modules and functions that are compiled by
    torch.compile, which would compile again for the forwards of a trial.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def repeatable_backwards() -> AbstractContextManager[None]:
    """Return a context in which torch.compile compiles backwards that can run twice, as those of
    losses with several terms do: they do not write into what their forward saved.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch._functorch.config.patch(donated_buffer=False)


def module_modes(model: nn.Module) -> tuple[bool, ...]:
    """Return whether each module of a model is in training mode, in the order of `modules()`. What
    is known about a model's loss holds only for the same modes.

    Wrappers of DDP, FSDP and activation checkpointing are skipped, so that the result can be
    compared with that of the same model before it was wrapped.
    """
    modules = modules_of(model)
    return tuple([module.training for module in modules if not isinstance(module, WRAPPERS)])


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every module of a model at the end of the block,
    whose forwards (of a trial, or of an evaluation) need another one.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore what a model holds beside its parameters at the end of the block: additional training
    forwards in it, such as those of a trial, change running statistics (BatchNorm).
    """
    restore = snapshot_state(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def before_all_forwards(hook: Callable[[nn.Module, tuple], None]) -> Iterator[None]:
    """Call a function before the forward of any module in the block, also of those within others.

    Silences torch's warning that the wrapper of a compiled module is one more module.
    """
    handle = register_module_forward_pre_hook(hook)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def extra_forwards(model: nn.Module) -> Iterator[None]:
    """Context for additional forwards in training mode, under `no_grad`, as in a first pass.

    Restores the model's state at the end, and silences torch's warning that activation
    checkpointing gets no input with a gradient.
    """
    with restored_state(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        yield


def snapshot_state(model: nn.Module, *, with_attributes: bool = True) -> Callable[[], None]:
    """Copy what forwards may leave in a model, and return a function that restores it, for a window
    that is computed again.

    That are all buffers: the same tensors are registered again, if they were replaced, and the
    copied values are written into them. And attributes that may say what buffers hold, such as the
    length of a cache: see `plain_attributes`.

    Args:
        model: The model.
        with_attributes: Whether to restore attributes, those that the loop sets included.
    """
    modules = modules_of(model)
    saved = [
        (module, name, buffer, buffer.clone() if is_ordinary(buffer) else None)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # All of them: what is plain is sorted out if they are restored, which is rare.
    attributes = [(module, vars(module).copy()) for module in modules] if with_attributes else []
    tensors = [
        (value, value._version, value.clone())
        for _, before in attributes
        if Tensor in map(type, before.values())  # few modules have one, and this is fast
        for value in before.values()
        if type(value) is Tensor and value.grad_fn is None and is_ordinary(value)
    ]

    def restore() -> None:
        """Restore what the model held when `snapshot_state` was called."""
        with torch.no_grad():
            for module, name, buffer, value in saved:
                module._buffers[name] = buffer
                if value is not None:
                    buffer.copy_(value)
            for tensor, version, value in tensors:
                if tensor._version != version:
                    tensor.copy_(value)
        for module, before in attributes:
            for name, value in plain_attributes(module, before):
                if vars(module).get(name) is not value:
                    vars(module)[name] = value

    return restore


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that forwards may change in place. Torch cannot compare others:
    sparse, nested, quantised ones, those that repeat an element, or without values.
    """
    return not (
        tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_inference()
        or (tensor.itemsize == 1 and tensor.is_floating_point())  # float8
        or torch._debug_has_internal_overlap(tensor) == 1
    )


def plain_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return those attributes of a module that are numbers, texts or tensors; without those of
    wrappers, torch's own, and outputs of a forward, which are no state.
    """
    if isinstance(module, WRAPPERS):
        return []
    return [
        (name, value)
        for name, value in attributes.items()
        if type(value) in PLAIN_TYPES and name not in OF_TORCH
        if not isinstance(value, Tensor) or value.grad_fn is None
    ]


@contextmanager
def fresh_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set the gradients of parameters to None for the block, in which those of a new window are
    computed, and add the earlier gradients to the new ones at its end.

    If the block raises, the new gradients are dropped and the earlier ones restored.
    """
    earlier_gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, gradient in zip(parameters, earlier_gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
