"""One forward of any model on one batch: which arguments it gets, and the loss that comes out."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError, NoLoss
from hf_ga.exact.batches import Batch
from hf_ga.exact.precision import at_least_float32

WRAPPERS = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, CheckpointWrapper)
# (outputs of the model, batch) -> (sum of the loss over its targets, number of targets)
LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor | int | float]]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP and the like; mixed-precision wrappers stay."""
    return extract_model_from_parallel(model, keep_fp32_wrapper=True)


def callable_module(model: nn.Module) -> nn.Module:
    """Return the module to call in a window.

    That is the module inside DDP, whose wrapper would broadcast buffers and prepare its reducer,
    both of them collectives of all ranks in every forward. Under FSDP it is the model itself, whose
    forward must gather the parameters.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def argument_filter(model: nn.Module) -> Callable[[Batch], dict[str, Any]]:
    """Return a function that drops the entries of a batch that the model's forward does not accept.

    It accepts the entries that it names, or all where it takes `**kwargs`.

    A transformers model's `**kwargs` are for settings, so other columns are not passed. Its inputs
    are those that its forward names and, as long as each hands `**kwargs` on, the forwards of its
    base classes.
    """
    model = unwrapped(model)
    forwards = [getattr(model, "_original_forward", model.forward)]
    if isinstance(model, PreTrainedModel):
        bases = [vars(base) for base in type(model).__mro__]
        forwards += [base["forward"] for base in bases if "forward" in base]
    named: set[str] = set()

    def accepted(batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name in named}

    for forward in forwards:
        parameters = inspect.signature(forward).parameters.values()
        named |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        hands_others_on = any(p.kind == p.VAR_KEYWORD for p in parameters)
        if not hands_others_on:
            return accepted
    return dict


def output_of(outputs: Any, name: str) -> Any:
    """Return an entry or attribute of what a model returned; None if there is none."""
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return getattr(outputs, name, None)


def head_loss(outputs: Any) -> Tensor:
    """Return the loss of the model's own head, in at least float32.

    Args:
        outputs: What the model returned. The loss is `outputs.loss`, `outputs["loss"]`, a tuple's
            first entry, or a scalar itself.

    Raises:
        NoLoss: If there is none, or it is not one number.
    """
    first = outputs[0] if type(outputs) is tuple and outputs else outputs
    loss = first if isinstance(first, Tensor) else output_of(first, "loss")
    if loss is not None and loss.numel() == 1:
        return at_least_float32(loss.reshape(()))
    found = f"a {type(outputs).__name__} without one"
    if loss is not None:
        found = f"shape {list(loss.shape)}"
    raise NoLoss(
        f"the model's loss must be one number, got {found}. Let it return a dict with a loss, give "
        "it labels, or pass loss_fn(outputs, batch) -> (sum of the loss, number of targets)."
    )


def own_loss(loss_fn: LossFunction, outputs: Any, batch: Batch) -> tuple[Tensor, float]:
    """Call the user's loss function.

    Args:
        loss_fn: Where its number of targets is a tensor on the device, this waits for the device.
        outputs: What the model returned.
        batch: The batch, on the device.

    Returns:
        The sum, of at least float32, and the number of targets.

    Raises:
        ConfigError: If it returns something else than a scalar tensor and a number.
    """
    returned = loss_fn(outputs, batch)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], Tensor) or returned[0].dim():
        raise ConfigError(
            "loss_fn must return (sum of the loss as a scalar tensor, number of targets), got "
            f"{returned!r:.80}: sum the loss "
            '(reduction="sum"), and count what it is summed over.'
        )
    total, number = returned
    return at_least_float32(total), float(number)


def run_forward(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None
) -> tuple[Tensor, float | None]:
    """Compute the loss of a batch.

    Args:
        model: The model.
        batch: On the model's device.
        loss_fn: The user's loss function. None: the loss of the model's head.

    Returns:
        (mean loss of the head, None), or (sum, number of targets) of `loss_fn`.
    """
    arguments = argument_filter(model)(batch)
    outputs = model(**arguments)
    if loss_fn is None:
        return head_loss(outputs), None
    return own_loss(loss_fn, outputs, batch)


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a model for which `Module.compile` was called, or whose
    forward was given to `torch.compile`.

    A module that `torch.compile` wrapped is refused elsewhere (`check_not_wrapped`).
    """
    is_compiled_itself = model._compiled_call_impl is not None or hasattr(
        model.forward, "_torchdynamo_orig_callable"
    )
    if is_compiled_itself:
        return [model]
    return [found for child in model.children() for found in compiled_modules(child)]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a module in it is compiled."""
    return bool(compiled_modules(model))


def check_not_wrapped(model: nn.Module) -> None:
    """Check that neither the model nor a module in it is a wrapper that `torch.compile` returned.

    Raises:
        ConfigError: If one is.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise ConfigError(
                f"{name or 'the model'} is wrapped by torch.compile, which gives its parameters "
                "other names: pass the original module, and compile it in place with its method "
                "compile()."
            )


@contextmanager
def not_compiled() -> Iterator[None]:
    """Run the block without compiled code: everything given to torch.compile runs as written."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def module_modes(model: nn.Module) -> tuple[bool, ...]:
    """Return for every module whether it is in training mode.

    Wrappers of DDP, FSDP and checkpointing are left out, as they come later.
    """
    return tuple(module.training for module in model.modules() if not isinstance(module, WRAPPERS))


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Give every module its own training or evaluation mode back at the end of the block."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what training forwards in the block do to buffers (running statistics)."""
    restore = buffers_as_now(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def extra_forwards(model: nn.Module) -> Iterator[None]:
    """Around training forwards besides the window's own, without gradients: no buffer changes, and
    torch does not warn that checkpointing has nothing to do.
    """
    with restored_buffers(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        yield


def buffers_as_now(model: nn.Module) -> Callable[[], None]:
    """Return a function that puts all buffers of a model back, also those that were replaced."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                module._buffers[name] = buffer
                buffer.copy_(value)

    return restore


@contextmanager
def gradients_apart(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Start a block without gradients, and add those that were there before at its end.

    After an error in the block, only those that were there before are there again.
    """
    earlier = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
