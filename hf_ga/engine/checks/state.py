"""Finds state that forwards leave in a module for the next forward, in buffers or attributes: a
window has as many forwards as micro-batches, the full batch has one.

In a rehearsal, or after that of a loop by hand, a forward that changed some is run once more, with
the same random numbers. If it returns something else, they matter. That goes for the models, and
for what else the loop calls: a loss that keeps a moving average, a part of a model, a teacher.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import LossNotAdditive
from hf_ga.logs import get_logger
from hf_ga.model.forward import (
    WRAPPERS,
    before_all_forwards,
    extra_forwards,
    is_ordinary,
    modules_of,
    plain_attributes,
    snapshot_state,
)
from hf_ga.model.hooks import Hook
from hf_ga.model.outputs import named_tensors
from hf_ga.model.override import restored

logger = get_logger(__name__)

TOLERANCE = 1e-2  # relative, of the same forward run twice where that is not deterministic
NUM_NAMES = 6  # of buffers and attributes in a message


@dataclass(frozen=True)
class Buffer:
    """A buffer before a forward, or a tensor in an attribute.

    Attributes:
        holder: The mapping of the module that has it.
        name: Its name there.
        path: Its name in the module that the loop calls.
        tensor: The buffer.
        value: A copy.
        is_attribute: Whether it is no buffer. One that is replaced is seen as any attribute is.
    """

    holder: dict[str, Any]
    name: str
    path: str
    tensor: Tensor
    value: Tensor
    is_attribute: bool = False

    @property
    def place(self) -> tuple[int, str]:
        """What identifies it."""
        return id(self.holder), self.name

    @property
    def is_changed(self) -> bool:
        """Whether the module has another value now, or none."""
        now = self.holder.get(self.name)
        if self.is_attribute and now is not self.tensor:
            return False
        if now is None or now.shape != self.value.shape:
            return True
        return not torch.equal(now.nan_to_num(), self.value.nan_to_num())


class OtherModules:
    """Restores what forwards leave in modules that are no prepared models, such as a loss that
    counts, if the samples of a window come again.
    """

    def __init__(self) -> None:
        """Start with no module known."""
        self._called: list[ref[nn.Module]] = []
        self._models: Sequence[nn.Module] = ()
        self._known: set[int] = set()  # modules in this window, by identity, with the models'
        self._restore: list[Callable[[], None]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that were called so far, and still exist."""
        return [module for known in self._called if (module := known()) is not None]

    def begin_window(self, models: Sequence[nn.Module]) -> None:
        """Copy what modules hold that were called in earlier windows.

        Args:
            models: The prepared models, which are not among them.
        """
        self._models = models
        self._known = set()
        called = self.modules
        self._called = []
        self._restore = []
        for module in called:
            self._note(module, ())

    def end_window(self) -> None:
        """Forget what they held, which may keep outputs of earlier forwards."""
        self._restore = []

    def seeing(self) -> AbstractContextManager[None]:
        """Return a context, around a micro-batch, in which modules that are called are copied."""
        return before_all_forwards(self._note)

    def _note(self, module: nn.Module, args: tuple) -> None:
        """Copy what a module holds before its first forward; a forward pre-hook of all modules."""
        if torch.compiler.is_compiling():
            return
        if not self._known:
            self._known = {id(inner) for model in self._models for inner in modules_of(model)}
        if id(module) in self._known:
            return
        if isinstance(module, (*WRAPPERS, torch.jit.ScriptModule)):
            return
        self._known.update(map(id, modules_of(module)))
        self._called.append(ref(module))
        self._restore.append(snapshot_state(module))

    def restore(self) -> None:
        """Restore what they held before their first forward in the window."""
        for restore in reversed(self._restore):
            restore()


class StateCheck:
    """Repeats forwards of a rehearsal that changed what their module holds.

    Args:
        draws: The random draws of the loop.

    Attributes:
        kept: Buffers on which the loss may depend, and that no forward of the last rehearsal
            changed: (mapping, name in it, path).
    """

    def __init__(self, draws: KeyedDraws) -> None:
        """Start before the first rehearsal."""
        self._draws = draws
        self.kept: list[tuple[dict, str, str]] = []
        self._is_repeating = False
        self._has_warned = False
        self._forget()

    def _forget(self) -> None:
        """Forget the forwards of a rehearsal."""
        self._models: Sequence[nn.Module] = ()
        self._running: nn.Module | None = None  # what the loop called; others run inside of it
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._buffers: list[Buffer] = []
        self._restore: Callable[[], None] = lambda: None
        self._mark: Any = None  # where the draws stood before the forward
        # By place, as before the first forward: all buffers, those that forwards changed, and such
        # attributes.
        self._first_buffers: dict[tuple[int, str], Buffer] = {}
        self._changed_buffers: dict[tuple[int, str], Buffer] = {}
        self._watched: set[tuple[int, str]] = set()  # buffers on which the loss may depend
        self._changed_attributes: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def watching(
        self, models: Sequence[nn.Module], *, with_others: bool, restores: bool
    ) -> Iterator[None]:
        """Watch forwards in the block.

        Args:
            models: Models, without wrappers.
            with_others: Whether to watch all modules that the loop calls: not in compiled models,
                which would be compiled again.
            restores: Whether to restore at the end the buffers and attributes that forwards
                changed; not those that the loop set.

        Raises:
            LossNotAdditive: In the block, if what a forward left in buffers changes the next one.
        """
        self._models = models
        with ExitStack() as stack:
            if with_others:
                stack.enter_context(before_all_forwards(self._note))
            for model in () if with_others else models:
                stack.callback(model.register_forward_pre_hook(Hook(self._note)).remove)
            stack.callback(self._forget)
            if restores:
                stack.callback(self._undo)
            yield

    def _undo(self) -> None:
        """Restore what forwards changed."""
        for (module, name), value in self._changed_attributes.items():
            vars(module)[name] = value
        with torch.no_grad():
            for buffer in self._changed_buffers.values():
                buffer.holder[buffer.name] = buffer.tensor
                buffer.tensor.copy_(buffer.value)
        self.kept = [
            (buffer.holder, buffer.name, buffer.path)
            for place, buffer in self._first_buffers.items()
            if place in self._watched - self._changed_buffers.keys() and not buffer.is_attribute
        ]

    def _note(self, module: nn.Module, args: tuple) -> None:
        """Copy the state before a forward that the loop calls; a forward pre-hook."""
        is_in_backward = torch._C._current_graph_task_id() != -1  # of activation checkpointing
        if self._running is not None or is_in_backward or torch.compiler.is_compiling():
            return
        if isinstance(module, (*WRAPPERS, torch.jit.ScriptModule)):  # a script has no such hooks
            return
        self._running = module
        self._buffers = list(_buffers_of(module))
        for buffer in self._buffers:
            self._first_buffers.setdefault(buffer.place, buffer)
        self._attributes = [
            (inner, name, value)
            for inner in module.modules()
            for name, value in plain_attributes(inner, vars(inner))
        ]
        self._restore = snapshot_state(module)
        self._mark = self._draws.mark()

        def end(module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
            """Check what the forward left, after the module's other hooks; also after an error."""
            if self._is_repeating:
                return
            handle.remove()
            try:
                if outputs is not None:
                    self._check(module, args, kwargs, outputs)
            finally:
                self._running = None

        handle = module.register_forward_hook(end, with_kwargs=True, always_call=True)

    def _check(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Repeat a forward that changed buffers or attributes."""
        is_model = module in self._models
        if is_model or _matters(module, outputs):
            self._watched |= {buffer.place for buffer in self._buffers}
        buffers = [buffer for buffer in self._buffers if buffer.is_changed]
        for buffer in buffers:
            self._changed_buffers.setdefault(buffer.place, self._first_buffers[buffer.place])
        attributes = []
        for inner, name, value in self._attributes:
            if vars(inner).get(name) is not value:
                attributes.append(f"{type(inner).__name__}.{name}")
                self._changed_attributes.setdefault((inner, name), value)
        # Hooks may collect what the loop uses.
        has_hooks = any(inner._forward_hooks for inner in module.modules())
        can_repeat = is_model or (_matters(module, outputs) and not has_hooks)
        if not can_repeat or not (buffers or attributes):
            return
        # Counts of forwards say nothing by themselves.
        values = [buffer.path for buffer in buffers if buffer.value.is_floating_point()]
        if self._depends_on_state(module, args, kwargs, outputs):
            paths = [*values, *sorted(attributes)] or [buffer.path for buffer in buffers]
            raise LossNotAdditive(
                f"what a forward of {type(module).__name__} leaves in "
                f"{', '.join(paths[:NUM_NAMES])} changes what the next one returns, and a window "
                "has as many forwards as micro-batches, so its gradient depends on their number. "
                "Put the modules that hold them into evaluation mode (eval()), or change them once "
                "a window, after optimizer.step()."
            )
        if values and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"hf_ga: training forwards change the buffers {', '.join(values[:NUM_NAMES])}. The "
                "update does not depend on them, but their values depend on the number of "
                "micro-batches: check that before you use them, in evaluation mode for example."
            )

    def _depends_on_state(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any
    ) -> bool:
        """Whether a forward returns something else than before, with the buffers that it left."""

        def difference() -> float:
            """Run the forward again, and return the largest relative change of its outputs."""
            with ExitStack() as stack:
                for inner in module.modules():  # what a loop reads there has a graph
                    stack.enter_context(restored(vars(inner)))
                stack.enter_context(self._draws.replayed(self._mark))
                stack.enter_context(torch.no_grad())
                stack.enter_context(extra_forwards(module))
                return _largest_change(outputs, module(*args, **kwargs))

        now = [buffer.tensor for buffer in _buffers_of(module)]
        before = [buffer.tensor for buffer in self._buffers]
        self._is_repeating = True
        try:
            # They end as they are now, and the graph of a forward that counts may use them.
            with torch.autograd._unsafe_preserve_version_counter((*now, *before)):
                with_new_state = difference()
                if not with_new_state:
                    return False
                with extra_forwards(module):
                    self._restore()
                    # Where operations are not deterministic, not even this is 0.
                    with_same_state = difference()
                return with_same_state == 0 or with_new_state > TOLERANCE
        finally:
            self._is_repeating = False


def _buffers_of(module: nn.Module) -> Iterator[Buffer]:
    """Yield the buffers of a module, and the tensors in its attributes, with copies."""
    for prefix, inner in module.named_modules():
        attributes = [
            (name, value)
            for name, value in plain_attributes(inner, vars(inner))
            if isinstance(value, Tensor)
        ]
        for holder, items, is_attribute in (
            (inner._buffers, inner._buffers.items(), False),
            (vars(inner), attributes, True),
        ):
            for name, tensor in items:
                if tensor is not None and is_ordinary(tensor):
                    path = f"{prefix}.{name}".lstrip(".")
                    yield Buffer(holder, name, path, tensor, tensor.clone(), is_attribute)


def _matters(module: nn.Module, outputs: Any) -> bool:
    """Whether the loss may depend on a module beside the models: it has weights or a gradient, as
    metrics do not.
    """
    has_gradient = any(tensor.requires_grad for tensor in named_tensors(outputs).values())
    return has_gradient or next(module.parameters(), None) is not None


def _largest_change(outputs: Any, repeated: Any) -> float:
    """Return the largest relative difference between the tensors that two forwards returned."""
    others = named_tensors(repeated)
    changes = [0.0]
    for name, tensor in named_tensors(outputs).items():
        other = others.get(name)
        if other is None or not tensor.is_floating_point() or tensor.shape != other.shape:
            continue
        first = tensor.detach().float()
        change = torch.where(first == other, 0.0, first - other.float()).norm()
        changes.append(float(change / first[first.isfinite()].norm().clamp(min=1e-12)))
    return max(changes)
