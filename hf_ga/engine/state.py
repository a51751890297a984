"""Finds state that forwards leave in a module for the next forward, in buffers or attributes: a
window has as many forwards as micro-batches, the full batch has one.

In a rehearsal, a forward that changed some is run once more, with the same random numbers. If it
returns something else, they matter. That goes for the models, and for what else the loop calls: a
loss that keeps a moving average, a part of a model, a teacher.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import LossNotAdditive
from hf_ga.logs import get_logger
from hf_ga.model.forward import (
    WRAPPERS,
    before_all_forwards,
    extra_forwards,
    plain_attributes,
    snapshot_state,
)
from hf_ga.model.hooks import Hook
from hf_ga.model.outputs import named_tensors

logger = get_logger(__name__)

TOLERANCE = 1e-2  # relative, of the same forward run twice where that is not deterministic
NUM_NAMES = 6  # of buffers and attributes in a message


class StateCheck:
    """Repeats forwards of a rehearsal that changed what their module holds.

    Args:
        draws: The random draws of the loop.
    """

    def __init__(self, draws: KeyedDraws) -> None:
        """Start before the first rehearsal."""
        self._draws = draws
        self._is_repeating = False
        self._has_warned = False
        self._forget()

    def _forget(self) -> None:
        """Forget the forwards of a rehearsal."""
        self._running: nn.Module | None = None  # what the loop called; others run inside of it
        self._before: dict[str, Tensor] = {}
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        # What forwards changed: (module, attribute) -> its value before the first of them.
        self._changed: dict[tuple[nn.Module, str], Any] = {}
        self._restore: Callable[[], None] = lambda: None
        self._restore_all: dict[int, Callable[[], None]] = {}  # by module
        self._mark: Any = None  # where the draws stood then

    @contextmanager
    def watching(self, models: Sequence[nn.Module], *, with_others: bool) -> Iterator[None]:
        """Watch forwards in the block, and restore at its end the buffers and attributes that they
        changed; not those that the loop set.

        Args:
            models: Models, without wrappers.
            with_others: Whether to watch all modules that the loop calls: not in compiled models,
                which would be compiled again.

        Raises:
            LossNotAdditive: In the block, if what a forward left in buffers changes the next one.
        """
        with ExitStack() as stack:
            if with_others:
                stack.enter_context(before_all_forwards(self._note))
            for model in () if with_others else models:
                stack.callback(model.register_forward_pre_hook(Hook(self._note)).remove)
            stack.callback(self._undo)
            yield

    def _undo(self) -> None:
        """Restore what forwards changed."""
        for (module, name), value in self._changed.items():
            vars(module)[name] = value
        for restore in self._restore_all.values():
            restore()
        self._forget()

    def _note(self, module: nn.Module, args: tuple) -> None:
        """Copy the state before a forward that the loop calls; a forward pre-hook."""
        is_in_backward = torch._C._current_graph_task_id() != -1  # of activation checkpointing
        if self._running is not None or is_in_backward or torch.compiler.is_compiling():
            return
        if isinstance(module, (*WRAPPERS, torch.jit.ScriptModule)):  # a script has no such hooks
            return
        self._running = module
        self._before = {name: buffer.clone() for name, buffer in _states(module)}
        self._attributes = plain_attributes(module)
        self._restore = snapshot_state(module)
        self._restore_all.setdefault(id(module), snapshot_state(module, with_attributes=False))
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

    def _check(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Repeat a forward that changed buffers or attributes."""
        after = dict(_states(model))
        before = self._before
        changed = [n for n, b in after.items() if n in before and not torch.equal(b, before[n])]
        attributes = []
        for module, name, value in self._attributes:
            if vars(module).get(name) is not value:
                attributes.append(f"{type(module).__name__}.{name}")
                self._changed.setdefault((module, name), value)
        if not changed and not attributes:
            return
        names = ", ".join(changed[:NUM_NAMES])
        if self._depends_on_state(model, args, kwargs, outputs):
            all_names = ", ".join([*changed, *attributes][:NUM_NAMES])
            raise LossNotAdditive(
                f"what a forward of {type(model).__name__} leaves in {all_names} changes what the "
                "next one returns, and a window has as many forwards as micro-batches, so its "
                "gradient depends on their number. Put the modules that hold them into evaluation "
                "mode (eval()), or change them once a window, after optimizer.step()."
            )
        if changed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"hf_ga: training forwards change the buffers {names}. The update does not depend "
                "on them, but their values depend on the number of micro-batches: check that "
                "before you use them, in evaluation mode for example."
            )

    def _depends_on_state(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any
    ) -> bool:
        """Whether a forward returns something else than before, with the buffers that it left."""

        def difference() -> float:
            """Run the forward again, and return the largest relative change of its outputs."""
            with self._draws.replayed(self._mark), torch.no_grad(), extra_forwards(model):
                return _largest_change(outputs, model(*args, **kwargs))

        self._is_repeating = True
        try:
            with_new_state = difference()
            if not with_new_state:
                return False
            with extra_forwards(model):
                self._restore()
                # Where operations are not deterministic, not even this is 0.
                with_same_state = difference()
            return with_same_state == 0 or with_new_state > TOLERANCE
        finally:
            self._is_repeating = False


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


def _states(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and values of the buffers that hold more than counts of forwards."""
    return [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
