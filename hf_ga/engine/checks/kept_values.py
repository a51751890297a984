"""Finds values of samples that a loop keeps for a later window: a centre, a queue of negatives,
averages of losses or rewards.

Within a window, samples of several iterations would meet different ones, which a rehearsal shows.
From window to window they all meet the same, but those of the last micro-batch, or of sums that
count a rehearsal's samples twice, and not those of the full batch. No gradient passes through them.
So in rehearsals, and in the last iteration of the first windows, it is noted of which window's
samples each storage is computed. What forwards leave in their module is restored instead.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from hf_ga.engine.checks.statistic_check import CONSTANTS
from hf_ga.errors import LossNotAdditive
from hf_ga.model.forward import force_eager
from hf_ga.model.outputs import named_tensors, tensors_in

NUM_WINDOWS = 2  # at whose end it is noted what the loop computes
# Functions that give a tensor the type or the shape of others, and none of their values.
LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
# Functions that change a tensor in place, to what does not depend on its value before.
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


class KeptValues:
    """Notes of which window's samples tensors are computed, while it is on."""

    def __init__(self) -> None:
        """Start with no tensor known."""
        self._window: tuple[int, int] | None = None
        self._num_windows = 0
        self._known: dict[int, tuple[StorageWeakRef, Hashable]] = {}  # by the storage's address
        self._batches: list[int] = []  # storages of the samples themselves
        self._is_on = False

    def begin_window(self, window: tuple[int, int], *, is_rehearsed: bool) -> None:
        """Begin a micro-batch of a window, of another one or of the same one.

        Args:
            window: The epoch, and what tells the window from others of the epoch.
            is_rehearsed: Whether it is rehearsed. After one that is not, nothing is known.
        """
        if window != self._window:  # a loop may give batches again, as itertools.cycle does
            if self._window is not None and window[0] != self._window[0]:
                self._known = {}  # an epoch later, a sample has what is kept of itself
            for key in self._batches:
                self._known.pop(key, None)
            self._batches = []
            self._num_windows += is_rehearsed
        if not is_rehearsed:
            self._known = {}
        self._window = window

    @property
    def sees_ends(self) -> bool:
        """Whether the last iteration of the current window is watched."""
        return self._num_windows <= NUM_WINDOWS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block, in which compiled functions run eagerly. Not below a mode of the
        user's (`with torch.device(...)`), which may end before the block does.
        """
        if torch._C._len_torch_function_stack():
            yield
            return
        handle = register_module_forward_hook(self._forget_state)
        self._is_on = True
        try:
            with force_eager(), _Noting(self._note):
                yield
        finally:
            self._is_on = False
            handle.remove()
            known = self._known.items()
            self._known = {key: value for key, value in known if not value[0].expired()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing in the block, which computes gradients and the loss of the window."""
        was_on = self._is_on
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = was_on

    def note_batch(self, batch: Any) -> None:
        """Note the tensors of the samples of the current micro-batch."""
        if self._is_on:
            for tensor in named_tensors(batch).values():
                self._set(tensor, self._window)
                storage = _storage_of(tensor)
                if storage is not None:
                    self._batches.append(storage._cdata)

    def check(self, loss: Tensor) -> None:
        """Check that a loss is computed from samples of its own window only.

        Raises:
            LossNotAdditive: If it is not.
        """
        if self._is_on and self._window_of(loss) not in (None, self._window):
            raise LossNotAdditive(
                "the loss is computed from a tensor that the loop keeps of the samples of an "
                "earlier window (a centre, a queue, an average of losses or rewards). It is that "
                "of some of its micro-batches only, or counts samples twice that hf_ga rehearsed, "
                "so it is not that of the full batch. Let the forward of a module add it up in a "
                "buffer over all micro-batches, which hf_ga restores after a rehearsal, and use "
                "and clear the sum after optimizer.step(), below `if accelerator.sync_gradients:`; "
                "of losses, take accelerator.window_loss."
            )

    def _note(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Note what a function of torch computed, or changed in place."""
        name = getattr(function, "__name__", "")
        if not self._is_on or not self._known or name in CONSTANTS:
            return
        out = list(tensors_in([kwargs.get("out")]))
        is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        changed = out or list(tensors_in(args[: int(is_in_place)]))
        read = list(tensors_in(args[:1] if name in LIKE else [*args, *kwargs.values()]))
        if out or name in OVERWRITES or _sets_all(name, args):
            whole = [tensor for tensor in changed if _is_whole(tensor)]
            read = [tensor for tensor in read if all(tensor is not other for other in whole)]
        windows = {self._window_of(tensor) for tensor in read} - {None}
        earlier = windows - {self._window}
        window = next(iter(earlier), self._window) if windows else None
        # A view of a constant, such as the row of a table for a label, is constant, too.
        known = {_key_of(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        new = [tensor for tensor in tensors_in([result]) if _key_of(tensor) not in known]
        for tensor in [*changed, *new]:
            self._set(tensor, window)

    def _set(self, tensor: Tensor, window: Hashable) -> None:
        """Note of which window a tensor is computed, or that it is of none; not of weights, which
        all windows change.
        """
        storage = None if isinstance(tensor, nn.Parameter) else _storage_of(tensor)
        if storage is not None:
            self._known.pop(storage._cdata, None)
            if window is not None:
                reference = StorageWeakRef(storage)
                self._known[reference.cdata] = (reference, window)

    def _window_of(self, tensor: Tensor) -> Hashable:
        """Return the window of which a tensor is computed; None if it is of none."""
        _, window = self._known.get(_key_of(tensor), (None, None))
        return window

    def _forget_state(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Forget what a forward left in its module; a forward hook of all modules."""
        with self.paused():
            for value in (*module._buffers.values(), *vars(module).values()):
                if isinstance(value, Tensor) and value.grad_fn is None:
                    self._set(value, None)


class _Noting(TorchFunctionMode):
    """Calls a function with each function of torch that ran: (it, arguments, keywords, result)."""

    def __init__(self, note: Callable[..., None]) -> None:
        """Keep the function."""
        super().__init__()
        self._call = note

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and note it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._call(function, args, kwargs, result)
        return result


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it has none, as within a transform of torch.func."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _key_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none."""
    storage = _storage_of(tensor)
    return None if storage is None else storage._cdata


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has all of its storage."""
    storage = _storage_of(tensor)
    return storage is not None and tensor.numel() * tensor.itemsize == storage.nbytes()


def _sets_all(name: str, args: Sequence[Any]) -> bool:
    """Whether a call is `tensor[:] = value` or `tensor[...] = value`."""
    if name != "__setitem__":
        return False
    return args[1] is Ellipsis or (isinstance(args[1], slice) and args[1] == slice(None))
