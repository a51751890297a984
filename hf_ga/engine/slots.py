"""What a user's loop gets in each iteration of a window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_ga.engine.look.choice import Choice, rehearsal_parts, rehearsed_offsets
from hf_ga.loading.batches import MicroBatch, row_lengths
from hf_ga.loading.window import Window

NO_POSITIONS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Slot:
    """One iteration of the loop.

    Attributes:
        micro_batch: The samples of the iteration.
        is_rehearsal: Whether its gradient is dropped: its samples come again in the window.
        is_filler: Whether it adds nothing, because this process has fewer micro-batches.
        may_be_rehearsal: Whether it turns into a rehearsal if the loop accumulates by hand.
    """

    micro_batch: MicroBatch
    is_rehearsal: bool = False
    is_filler: bool = False
    may_be_rehearsal: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether the gradient of the iteration belongs to the window."""
        return not self.is_rehearsal and not self.is_filler


def rehearsed_slots(window: Window, *, is_first: bool) -> list[Slot]:
    """Return the iterations of a rehearsed window, the same number on all processes.

    They are as many as without a rehearsal: the window itself follows in one micro-batch less. A
    window of one micro-batch has one iteration more.

    Args:
        window: The window.
        is_first: Whether no window of the run was rehearsed so far.
    """
    num_planned = window.request.max_micro_batches
    own = window.request.micro_batches
    if not len(own):
        return _with_fillers([], window, max(2, num_planned))
    choice = _choice(window, is_first=is_first)
    rehearsed, parts = rehearsal_parts(own, max(1, num_planned - 1), choice)
    slots = [Slot(micro_batch) for micro_batch in window.split(parts).micro_batches]
    if len(parts) > 1 or window.request.pad_to_window:
        rehearsed = _in_order(window, rehearsed)
    slots.insert(0, _rehearsal(window, rehearsed, pad_to_window=len(parts) > 1))
    return _with_fillers(slots, window, max(2, num_planned))


def plain_slots(window: Window, number: int = 0) -> list[Slot]:
    """Return the iterations of a window without a rehearsal, the same number on all processes.

    Args:
        window: The window.
        number: The least number of iterations: fillers follow the window.
    """
    slots = [Slot(micro_batch) for micro_batch in window.micro_batches]
    return _with_fillers(slots, window, max(number, window.request.max_micro_batches))


def slots_with_look(window: Window, *, num_processes: int, positions: np.ndarray) -> list[Slot]:
    """Return the iterations of a window as it was planned, after a rehearsal of some samples.

    Args:
        window: The window.
        num_processes: Number of processes.
        positions: See `extra_rehearsal`.
    """
    rehearsal = extra_rehearsal(
        window, num_processes=num_processes, is_first=True, positions=positions
    )
    return [*([] if rehearsal is None else [rehearsal]), *plain_slots(window)]


def extra_rehearsal(
    window: Window, *, num_processes: int, is_first: bool, positions: np.ndarray = NO_POSITIONS
) -> Slot | None:
    """Return a rehearsal for a loop that can be given one micro-batch more than the window has.

    Args:
        window: The window, which follows as it was planned.
        num_processes: Number of processes.
        is_first: Whether no window of the run was rehearsed so far.
        positions: Positions in the epoch of samples that are rehearsed in any case.

    Returns:
        The rehearsal; None if the window is one micro-batch of a single process, so the full batch.
    """
    own = window.request.micro_batches
    if window.request.max_micro_batches == 1 and num_processes == 1:
        return None
    if not len(own):
        return _with_fillers([], window, 1)[0]
    choice = _choice(window, positions, is_first=is_first)
    return _rehearsal(window, _in_order(window, rehearsed_offsets(own, choice)))


def _in_order(window: Window, offsets: np.ndarray) -> np.ndarray:
    """Return samples of a window in their order if the collate function sorts them, as the model
    may need it. Otherwise their places stay other ones than in the window.
    """
    return np.sort(offsets) if window.fetcher.sorts(window.request) else offsets


def _choice(window: Window, positions: np.ndarray = NO_POSITIONS, *, is_first: bool) -> Choice:
    """Return what decides which samples of a window are rehearsed: in any case those at
    `positions`; fewer than in the first rehearsal of the run if it is not that.
    """
    own = np.concatenate(window.request.micro_batches)
    preferred = np.flatnonzero(np.isin(window.request.positions, positions))
    return Choice(
        np.setdiff1d(window.offsets, own),
        _lengths(window),
        np.intersect1d(window.offsets, preferred),
        is_first,
    )


def _rehearsal(window: Window, offsets: np.ndarray, *, pad_to_window: bool = True) -> Slot:
    """Return a rehearsal of some samples of a window, given as offsets in it.

    Padded to the window, if its batches can be, the longest sample of a shorter micro-batch, which
    has no padding there, shows whether padding matters.
    """
    try:
        (micro_batch,) = window.split([offsets], pad_to_window=pad_to_window).micro_batches
    except Exception:  # no rows of samples, or samples that cannot be collated together
        (micro_batch,) = window.split([offsets]).micro_batches
    return Slot(micro_batch, is_rehearsal=True)


def _lengths(window: Window) -> np.ndarray:
    """Return about how long this process's samples of a window are, 0 for others: shape (samples of
    the window,).
    """
    lengths = np.zeros(window.num_samples, np.int64)
    for offsets, micro_batch in zip(
        window.request.micro_batches, window.micro_batches, strict=True
    ):
        lengths[offsets] = row_lengths(micro_batch.batch, len(micro_batch))
    return lengths


def joined(windows: Sequence[Window]) -> Window | None:
    """Return consecutive windows of a loader as one, for a loop that accumulates by hand.

    None if their samples cannot be fetched together, as those of a stream.
    """
    first = windows[0]
    if any(window.fetcher is not first.fetcher for window in windows):
        return None
    starts = np.cumsum([0, *(window.num_samples for window in windows)])
    request = replace(
        first.request,
        positions=np.concatenate([window.request.positions for window in windows]),
        sample_ids=np.concatenate([window.sample_ids for window in windows]),
        micro_batches=[
            offsets + start
            for window, start in zip(windows, starts, strict=False)
            for offsets in window.request.micro_batches
        ],
        max_micro_batches=sum(window.request.max_micro_batches for window in windows),
        lengths=None,
        chunk_tree=None,
    )
    batches = [batch for window in windows for batch in window.batches]
    return replace(first, request=request, batches=batches)


def slots_like(slots: Sequence[Slot], leading: Window, window: Window) -> list[Slot]:
    """Return the iterations of another loader's window, with samples at the same places.

    Args:
        slots: The iterations of `leading`.
        leading: The window of the loader whose windows are computed.
        window: The other loader's window, of as many samples.
    """
    result = []
    for slot in slots:
        offsets = leading.offsets_of(slot.micro_batch)
        if slot.is_rehearsal:
            micro_batch = _rehearsal(window, offsets).micro_batch
        else:
            (micro_batch,) = window.split([offsets]).micro_batches
        result.append(replace(slot, micro_batch=micro_batch))
    return result


def slots_in_other_company(window: Window, number: int) -> list[Slot]:
    """Split a window into this many iterations, which take its samples in turn, the last one first:
    with a single iteration, a sample has another place than in the loader's batch, too. The first
    sample is in the last one, so that it comes after forwards that may leave something in a model.
    """
    planned = window.request.micro_batches
    own = np.concatenate(planned)[::-1] if len(planned) else np.empty(0, np.int64)
    parts = [own[start::number] for start in reversed(range(number))]
    parts = [part for part in parts if len(part)]
    slots = [Slot(micro_batch) for micro_batch in window.split(parts).micro_batches]
    return _with_fillers(slots, window, number)


def _with_fillers(slots: Sequence[Slot], window: Window, number: int) -> list[Slot]:
    """Append fillers, up to a number of iterations: a sample that adds nothing."""
    missing = number - len(slots)
    if missing <= 0:
        return list(slots)
    own = window.request.micro_batches
    offset = own[0][:1] if len(own) else window.offsets[:1]
    (stand_in,) = window.split([np.asarray(offset)]).micro_batches
    return [*slots, *[Slot(stand_in, is_filler=True)] * missing]
