"""What a user's loop gets in each iteration of a window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_ga.engine.rehearsal import rehearsal_parts, rehearsed_offsets
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.window import Window


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


def plan_slots(window: Window, *, num_processes: int, is_rehearsed: bool) -> list[Slot]:
    """Plan the iterations of a window on this process: the same number on all processes.

    A rehearsed window has as many iterations as it would have without a rehearsal: the window
    itself follows in one micro-batch less. A window of one micro-batch has one iteration more on
    several processes, and no rehearsal on a single one, where it is the full batch.

    Args:
        window: The window.
        num_processes: Number of processes.
        is_rehearsed: Whether to begin with a rehearsal.
    """
    num_planned = window.request.max_micro_batches
    is_full_batch = num_planned == 1 and num_processes == 1
    if not is_rehearsed or is_full_batch:
        return plain_slots(window)
    own = window.request.micro_batches
    if not len(own):
        return _with_fillers([], window, max(2, num_planned))
    spare = np.setdiff1d(window.offsets, np.concatenate(own))
    rehearsed, parts = rehearsal_parts(own, max(1, num_planned - 1), spare)
    first, *others = window.split([rehearsed, *parts]).micro_batches
    slots = [Slot(first, is_rehearsal=True), *(Slot(micro_batch) for micro_batch in others)]
    return _with_fillers(slots, window, max(2, num_planned))


def plain_slots(window: Window) -> list[Slot]:
    """Return the iterations of a window without a rehearsal, the same number on all processes."""
    slots = [Slot(micro_batch) for micro_batch in window.micro_batches]
    return _with_fillers(slots, window, window.request.max_micro_batches)


def extra_rehearsal(window: Window, *, num_processes: int) -> Slot | None:
    """Return a rehearsal for a loop that can be given one micro-batch more than the window has.

    Args:
        window: The window, which follows as it was planned.
        num_processes: Number of processes.

    Returns:
        The rehearsal; None if the window is one micro-batch of a single process, so the full batch.
    """
    own = window.request.micro_batches
    if window.request.max_micro_batches == 1 and num_processes == 1:
        return None
    if not len(own):
        return _with_fillers([], window, 1)[0]
    spare = np.setdiff1d(window.offsets, np.concatenate(own))
    rehearsed = rehearsed_offsets(own, spare)
    (micro_batch,) = window.split([rehearsed]).micro_batches
    return Slot(micro_batch, is_rehearsal=True)


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


def slots_in_other_company(window: Window, number: int) -> list[Slot]:
    """Split a window into this many iterations, which take its samples in turn."""
    planned = window.request.micro_batches
    own = np.concatenate(planned) if len(planned) else np.empty(0, np.int64)
    parts = [own[start::number] for start in range(number)]
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
