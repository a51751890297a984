"""What ranks agree on before each of them computes its own part of a global batch, for
`hf_ga.backward`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hf_ga.batch.collated import Axes, CollatedBatch, concatenate_batches, told_apart
from hf_ga.errors import ConfigError, DataError
from hf_ga.parallel.backend import Backend

# Keeps the lower 63 bits: a non-negative int64.
MASK63 = (1 << 63) - 1


@dataclass(frozen=True)
class Share:
    """What a rank tells the others about its part of the global batch.

    Attributes:
        num_samples: Number of samples.
        seed: The rank's seed of the dropout masks.
        step: Number of the call.
        setup: What must be the same on all ranks.
        axes: The token axes of its entries.
        padded_lengths: Padded length of each entry from which padding may be removed.
        is_padded: Whether some sample has padding.
    """

    num_samples: int
    seed: int
    step: int
    setup: Hashable
    axes: Axes
    padded_lengths: dict[str, int]
    is_padded: bool


@dataclass(frozen=True)
class Agreement:
    """What all ranks know about a global batch, of which each rank holds a part.

    Attributes:
        num_samples_by_rank: Number of samples on each rank.
        seed: The seed of the dropout masks: rank 0's.
        can_pad: Whether all micro-batches can have one padded length: those of all ranks have it,
            or have no padding that may be removed.
        kind: What identifies the kind of batch (its entries, the model's training modes).
    """

    num_samples_by_rank: tuple[int, ...]
    seed: int
    can_pad: bool
    kind: Hashable

    @property
    def num_samples(self) -> int:
        """Number of samples of the global batch of `hf_ga.backward`: those of all ranks."""
        return sum(self.num_samples_by_rank)

    def first_offset(self, rank: int) -> int:
        """Return the index of a rank's first sample in the global batch of `hf_ga.backward`, which
        consists of the ranks' batches in the order of the ranks.
        """
        return sum(self.num_samples_by_rank[:rank])


def agree_on_global_batch(
    backend: Backend, batch: CollatedBatch, *, seed: int, step: int, setup: Hashable
) -> Agreement:
    """Exchange what the ranks that call `hf_ga.backward` must know about each other's batches, and
    check that the batches are parts of one global batch. Sets the token axes of `batch` to those
    that the batches of all ranks tell apart. A collective.

    Args:
        backend: How ranks communicate.
        batch: This rank's batch.
        seed: This rank's seed of the dropout masks.
        step: Number of the call, which must be the same on all ranks.
        setup: Other values that must be the same on all ranks.

    Raises:
        ConfigError: If the ranks' steps, kinds of batches, or `setup` differ.
        DataError: If no rank has any sample.
    """
    share = Share(
        num_samples=batch.num_samples,
        seed=seed & MASK63,
        step=step,
        setup=(setup, batch.structure),
        axes=batch.axes,
        padded_lengths={name: batch.padded_lengths[name] for name in sorted(batch.marked_names)},
        is_padded=batch.is_padded,
    )
    shares = backend.gather_objects(share)
    _check_same_step([one.step for one in shares])
    nonempty = {rank: one for rank, one in enumerate(shares) if one.num_samples}
    if not nonempty:
        raise DataError("the batch has no samples on any rank: skip it.")
    _check_same_setup({rank: one.setup for rank, one in nonempty.items()})
    axes = told_apart([one.axes for one in nonempty.values()])
    if batch.num_samples:
        batch.set_axes(axes)
    is_padded = any(one.is_padded for one in shares)
    first, *others = nonempty.values()
    has_one_padded_length = all(one.padded_lengths == first.padded_lengths for one in others)
    return Agreement(
        num_samples_by_rank=tuple(one.num_samples for one in shares),
        seed=shares[0].seed,
        can_pad=has_one_padded_length or not is_padded,
        kind=(first.setup, tuple(axes.items()), is_padded),
    )


def gather_batches(backend: Backend, batch: CollatedBatch) -> CollatedBatch:
    """Gather the global batch of `hf_ga.backward` on every rank: the samples of all ranks, in the
    order of the ranks.
    """
    gathered = backend.gather_objects((batch.num_samples, batch.batch, batch.axes))
    nonempty = [(entries, axes) for num_samples, entries, axes in gathered if num_samples]
    _, axes = nonempty[0]
    batches = [CollatedBatch(entries) for entries, _ in nonempty]
    for one in batches:
        one.set_axes(axes)
    global_batch = CollatedBatch(concatenate_batches(batches))
    global_batch.set_axes(axes)
    return global_batch


def _check_same_step(steps: Sequence[int]) -> None:
    """Check that all ranks call `hf_ga.backward` with the same step, from which dropout masks are
    derived.
    """
    if len(set(steps)) > 1:
        raise ConfigError(
            f"ranks are at different steps ({', '.join(map(str, steps))}), so they would draw "
            "different dropout masks: call hf_ga.backward on all ranks, with the same step."
        )


def _check_same_setup(setups: dict[int, Hashable]) -> None:
    """Check that the ranks with samples (rank -> setup) have the same kind of batch, training modes
    and kind of loss.
    """
    first_rank = min(setups)
    for rank, setup in setups.items():
        if setup != setups[first_rank]:
            raise ConfigError(
                f"the batches of ranks {first_rank} and {rank} have different entries, or their "
                "models have different training modes or loss functions: call hf_ga.backward with "
                "the same kind of batch, model and loss function on all ranks."
            )
