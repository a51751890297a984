"""Finds state that forwards leave in a model for the next forward, in buffers or attributes: a
window has as many forwards as micro-batches, the full batch has one.

In a rehearsal, a forward that changed some is run once more, with the same random numbers. If it
returns something else, they matter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import LossNotAdditive
from hf_ga.logs import get_logger
from hf_ga.model.forward import extra_forwards, plain_attributes, snapshot_state
from hf_ga.model.outputs import named_tensors

logger = get_logger(__name__)

TOLERANCE = 1e-2  # relative, of the same forward run twice where that is not deterministic
NUM_NAMES = 6  # of buffers and attributes in a message


class StateCheck:
    """Repeats forwards of a rehearsal that changed what the model holds.

    Args:
        draws: The random draws of the loop.
    """

    def __init__(self, draws: KeyedDraws) -> None:
        """Start before the first rehearsal."""
        self._draws = draws
        self._before: dict[str, Tensor] = {}
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        # What forwards changed: (module, attribute) -> its value before the first of them.
        self._changed: dict[tuple[nn.Module, str], Any] = {}
        self._restore: Callable[[], None] = lambda: None
        self._mark: Any = None  # where the draws stood then
        self._is_repeating = False
        self._has_warned = False

    @contextmanager
    def watching(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Watch the forwards of models (without wrappers) in the block, and restore at its end the
        attributes that they changed; not those that the loop set.

        Raises:
            LossNotAdditive: In the block, if what a forward left in buffers changes the next one.
        """
        handles = []
        for model in models:
            handles.append(model.register_forward_pre_hook(self._note))
            handles.append(model.register_forward_hook(self._check, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for (module, name), value in self._changed.items():
                vars(module)[name] = value
            self._changed = {}

    def _note(self, model: nn.Module, args: tuple) -> None:
        """Copy the state before a forward; a forward pre-hook."""
        if not self._is_repeating:
            self._before = {name: buffer.clone() for name, buffer in _states(model)}
            self._attributes = plain_attributes(model)
            self._restore = snapshot_state(model)
            self._mark = self._draws.mark()

    def _check(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Repeat a forward that changed buffers or attributes; a forward hook."""
        if self._is_repeating:
            return
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
                f"what a forward leaves in {all_names} changes what the next one returns, and a "
                "window has as many forwards as micro-batches, so its gradient depends on their "
                "number. Put the modules that hold them into evaluation mode (eval())."
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
