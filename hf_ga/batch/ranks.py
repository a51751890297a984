"""What ranks agree on before each of them computes its own part of a global batch, for
`hf_ga.backward`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce

import torch
import torch.distributed as dist

from hf_ga.batch.collated import CollatedBatch, concatenate_batches
from hf_ga.batch.padding import TokenEntries, groups_in_both
from hf_ga.errors import ConfigError, DataError
from hf_ga.parallel.backend import Backend, RankStatus

# Keeps the lower 63 bits: a non-negative int64.
MASK63 = (1 << 63) - 1


@dataclass(frozen=True)
class BatchSummary:
    """What a rank sends to the others about its batch: integers below 2**63, for one all-gather.

    Attributes:
        has_failed: 1 if the rank has no batch because of an error.
        num_samples: Number of samples.
        seed: The rank's seed of the dropout masks.
        step: Number of the call.
        setup: Hash of what must be the same on all ranks.
        token_entries: Hash of the groups of entries from which padding may be removed.
        padded_lengths: Hash of their padded lengths.
        is_padded: 1 if some sample has padding.
    """

    has_failed: int
    num_samples: int = 0
    seed: int = 0
    step: int = 0
    setup: int = 0
    token_entries: int = 0
    padded_lengths: int = 0
    is_padded: int = 0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know about a global batch, of which each rank holds a part.

    Attributes:
        num_samples_by_rank: Number of samples on each rank.
        seed: The seed of the dropout masks: rank 0's.
        is_padded: Whether the batch of any rank has padding that may be removed.
        has_one_padded_length: Whether the batches of all ranks have the same padded lengths.
        kind: Hashes that identify the kind of batch (its entries, the model's training modes).
    """

    num_samples_by_rank: tuple[int, ...]
    seed: int
    is_padded: bool
    has_one_padded_length: bool
    kind: tuple[int, ...]

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
    backend: Backend,
    batch: CollatedBatch | None,
    failure: Exception | None,
    *,
    seed: int,
    step: int,
    setup: Iterable[object],
) -> Agreement:
    """Exchange what the ranks that call `hf_ga.backward` must know about each other's batches, by
    one small all-gather, and check that the batches are parts of one global batch. If the ranks'
    token entries (those from which padding may be removed) differ, sets those of `batch` to the
    ones that all ranks have in common. All ranks must call it.

    Args:
        backend: How ranks communicate.
        batch: This rank's batch. None: it could not be made.
        failure: The error because of which there is no batch.
        seed: This rank's seed of the dropout masks.
        step: Number of the call, which must be the same on all ranks.
        setup: Other values that must be the same, of any type that prints the same on all ranks.

    Raises:
        ConfigError: If the ranks' steps, kinds of batches, or `setup` differ.
        DataError: If the batch cannot be used, or no rank has any sample.
        ProcessFailed: If another rank's batch cannot be used.
    """
    summary = BatchSummary(has_failed=1)
    if batch is not None:
        summary = _summarize(batch, seed, step, setup)
    gathered = all_gather_integers(backend, astuple(summary))
    summaries = [BatchSummary(*numbers) for numbers in gathered]
    if any(one.has_failed for one in summaries):
        backend.all_reduce_status(RankStatus(failure=failure))  # raises it on all ranks
    _check_same_step([one.step for one in summaries])
    ranks_with_samples = [rank for rank, one in enumerate(summaries) if one.num_samples]
    if not ranks_with_samples:
        raise DataError("the batch has no samples on any rank: skip it.")
    _check_same_setup([one.setup for one in summaries], ranks_with_samples)
    first = summaries[ranks_with_samples[0]]
    token_entries = first.token_entries
    if any(summaries[rank].token_entries != token_entries for rank in ranks_with_samples):
        token_entries = _hash63(agree_on_token_entries(backend, batch))
    is_padded = any(one.is_padded for one in summaries)
    padded_lengths = {summaries[rank].padded_lengths for rank in ranks_with_samples}

    return Agreement(
        num_samples_by_rank=tuple(one.num_samples for one in summaries),
        seed=summaries[0].seed,
        is_padded=is_padded,
        has_one_padded_length=len(padded_lengths) == 1,
        kind=(first.setup, token_entries, int(is_padded)),
    )


def _summarize(batch: CollatedBatch, seed: int, step: int, setup: Iterable[object]) -> BatchSummary:
    """Summarize this rank's batch in a few integers that the other ranks get."""
    return BatchSummary(
        has_failed=0,
        num_samples=batch.num_samples,
        seed=seed & MASK63,
        step=step,
        setup=_hash63([*setup, *batch.structure]),
        token_entries=_hash63(batch.token_entries),
        padded_lengths=_hash63(batch.padded_lengths),
        is_padded=int(batch.is_padded),
    )


def agree_on_token_entries(backend: Backend, batch: CollatedBatch) -> tuple[TokenEntries, ...]:
    """Return the groups of entries that have the same padded length in the collated batch of every
    rank with samples, so that padding may be removed, and set them on this rank's `batch` if it has
    samples. All ranks must call it.
    """
    own_groups = batch.token_entries if batch.num_samples else None
    groups_by_rank = backend.gather_objects(own_groups)
    common_groups = reduce(
        groups_in_both, [groups for groups in groups_by_rank if groups is not None]
    )
    if batch.num_samples:
        batch.set_token_entries(common_groups)
    return common_groups


def gather_batches(backend: Backend, batch: CollatedBatch) -> CollatedBatch:
    """Gather the global batch of `hf_ga.backward` on every rank: the samples of all ranks, in the
    order of the ranks.

    Raises:
        DataError: If the ranks' tensors have different shapes, apart from padding.
    """
    gathered = backend.gather_objects((batch.num_samples, batch.entries, batch.token_entries))
    # A rank without samples may have no token entries.
    nonempty = [
        (entries, token_entries) for num_samples, entries, token_entries in gathered if num_samples
    ]
    _, token_entries = nonempty[0]
    global_batch = CollatedBatch(
        concatenate_batches(
            batches=[entries for entries, _ in nonempty],
            per_sample_names=batch.per_sample_names,
            padded_names=[name for group in token_entries for name in group.names],
        )
    )
    global_batch.set_token_entries(token_entries)
    return global_batch


def all_gather_integers(backend: Backend, integers: Sequence[int]) -> list[list[int]]:
    """Gather the same number of int64 integers from each rank: the summaries of the batches that
    the ranks pass to `hf_ga.backward`.

    Returns:
        One list for each rank, in the order of the ranks.
    """
    own = torch.tensor(integers, dtype=torch.int64, device=backend.device)
    if backend.num_processes == 1:
        return [own.tolist()]
    gathered = [torch.empty_like(own) for _ in range(backend.num_processes)]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).tolist()


def _check_same_step(steps: Sequence[int]) -> None:
    """Check that all ranks call `hf_ga.backward` with the same step, from which dropout masks are
    derived.
    """
    if len(set(steps)) > 1:
        raise ConfigError(
            f"ranks are at different steps ({', '.join(map(str, steps))}), so they would draw "
            "different dropout masks: call hf_ga.backward on all ranks, with the same step."
        )


def _check_same_setup(setup_hashes: Sequence[int], ranks_with_samples: Sequence[int]) -> None:
    """Check that the ranks with samples have the same hash of the kind of batch, training modes and
    kind of loss.
    """
    first_rank = ranks_with_samples[0]
    for rank in ranks_with_samples:
        if setup_hashes[rank] != setup_hashes[first_rank]:
            raise ConfigError(
                f"the batches of ranks {first_rank} and {rank} have different entries, or their "
                "models have different training modes or loss functions: call hf_ga.backward with "
                "the same kind of batch, model and loss function on all ranks."
            )


def _hash63(values: Iterable[object]) -> int:
    """Hash the printed form of values to an integer below 2**63, for an all-gather of int64. Unlike
    Python's `hash`, the result is the same in every process.
    """
    text = "\n".join(map(str, values))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MASK63
