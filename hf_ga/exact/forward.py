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
# (outputs of the model, batch) -> (sum of the loss over the targets of the batch, number of
# targets)
LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor | int | float]]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and the like; mixed-precision wrappers stay."""
    return extract_model_from_parallel(model, keep_fp32_wrapper=True)


def callable_module(model: nn.Module) -> nn.Module:
    """What to call in a window: the module inside DDP, whose wrapper would broadcast buffers and
    prepare its reducer, both of them collectives of all ranks in every forward. Under FSDP the
    model itself: its forward must gather the parameters.
    """
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def argument_filter(model: nn.Module) -> Callable[[Batch], dict[str, Any]]:
    """What picks the entries of a batch that the model's forward takes: those it names, or all
    where it takes `**kwargs`.

    A transformers model's `**kwargs` are for settings, so other columns are not passed. Its inputs
    are those that its forward names and, as long as each hands `**kwargs` on, the forwards of its
    base classes.
    """
    model = unwrapped(model)
    forwards = [getattr(model, "_original_forward", model.forward)]
    if isinstance(model, PreTrainedModel):
        forwards += [
            vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base)
        ]
    named: set[str] = set()
    for forward in forwards:
        parameters = inspect.signature(forward).parameters.values()
        named |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            return lambda batch: {name: value for name, value in batch.items() if name in named}
    return dict


def output_of(outputs: Any, name: str) -> Any:
    """An entry or attribute of what a model returned; None if there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def head_loss(outputs: Any) -> Tensor:
    """The loss of the model's own head (`outputs.loss`, `outputs["loss"]`, a tuple's first entry, a
    scalar), in at least float32.

    Raises:
        LossNotAdditive: there is none, or it is not one number.
    """
    loss = outputs[0] if type(outputs) is tuple and outputs else outputs
    loss = loss if isinstance(loss, Tensor) else output_of(loss, "loss")
    if loss is None or loss.numel() != 1:
        found = (
            f"a {type(outputs).__name__} without one"
            if loss is None
            else f"shape {list(loss.shape)}"
        )
        raise NoLoss(
            f"the model's loss must be one number, got {found}. Let it return a dict with a loss, "
            "give it labels, or pass "
            "loss_fn(outputs, batch) -> (sum of the loss, number of targets)."
        )
    return at_least_float32(loss.reshape(()))


def own_loss(loss_fn: LossFunction, outputs: Any, batch: Batch) -> tuple[Tensor, float]:
    """What the user's loss function returns: the sum, of at least float32, and the number of
    targets.

    A number that is a tensor on the device waits for the device.

    Raises:
        ConfigError: something else than a scalar tensor and a number.
    """
    returned = loss_fn(outputs, batch)
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2
        or not isinstance(returned[0], Tensor)
        or returned[0].dim()
    ):
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
    """Forward and loss of a batch on the model's device: (head's mean loss, None), or (sum,
    targets) of `loss_fn`.
    """
    outputs = model(**argument_filter(model)(batch))
    return (head_loss(outputs), None) if loss_fn is None else own_loss(loss_fn, outputs, batch)


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of a model for which `Module.compile` was called, or whose forward was
    given to `torch.compile`. (A module that `torch.compile` wrapped is refused:
    `check_not_wrapped`.)
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
    """Of every module, whether it is in training mode. Wrappers of DDP, FSDP and checkpointing are
    not counted: they come later.
    """
    return tuple(module.training for module in model.modules() if not isinstance(module, WRAPPERS))


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Every module gets its own training or evaluation mode back at the end."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what a training forward does to buffers (running statistics)."""
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
    """A function that puts all buffers of a model back, also those that were replaced."""
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
    """Start without gradients. At the end those that were there before are added; after an error
    only they are there again.
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
            if gradient is not None:
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
