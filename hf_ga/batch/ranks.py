"""What ranks agree on before each of them computes a batch of its own."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_ga.batch.collated import CollatedBatch, Row, joined
from hf_ga.batch.padding import TokenEntries, refined
from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.backend import Backend, RankStatus

# Keeps the lower 63 bits: a non-negative int64.
MASK63 = (1 << 63) - 1


class Share(NamedTuple):
    """What a rank tells the others of its batch, in integers below 2**63.

    Attributes:
        has_failed: 1 if it has no batch because of an error.
        size: Number of samples.
        seed: Its seed of the dropout masks.
        step: Number of the call.
        setup: Fingerprint of what must be the same on all ranks.
        token_entries: Fingerprint of the entries from which padding may be cut.
        widths: Fingerprint of their widths.
        is_padded: 1 if some sample has padding.
    """

    has_failed: int
    size: int = 0
    seed: int = 0
    step: int = 0
    setup: int = 0
    token_entries: int = 0
    widths: int = 0
    is_padded: int = 0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a global batch that lies on them in parts.

    Attributes:
        sizes: Number of samples on each rank.
        seed: The seed of the dropout masks, rank 0's.
        is_padded: Whether any rank's batch has padding that may be cut.
        has_one_width: Whether the batches of all ranks have the same width.
        kind: The kind of the batches: a proof holds for all batches of one kind.
        rank_of_proof: The rank on whose samples it is made.
    """

    sizes: tuple[int, ...]
    seed: int
    is_padded: bool
    has_one_width: bool
    kind: tuple[int, ...]
    rank_of_proof: int

    @property
    def num_samples(self) -> int:
        """Number of samples of the global batch."""
        return sum(self.sizes)

    def first_of(self, rank: int) -> int:
        """Return the offset of a rank's first sample in the global batch."""
        return sum(self.sizes[:rank])


def agree(
    backend: Backend,
    batch: CollatedBatch | None,
    failure: Exception | None,
    *,
    seed: int,
    step: int,
    setup: Iterable[object],
) -> Agreement:
    """Exchange what ranks must know of each other's batches, by one small all-gather.

    Args:
        backend: How ranks communicate.
        batch: This rank's batch. None: it could not be made. The token entries of all ranks become
            the same.
        failure: The error because of which there is no batch.
        seed: This rank's seed of the dropout masks.
        step: Number of the call, which must be the same on all ranks.
        setup: What else must be the same, of any type that prints the same on all ranks.

    Raises:
        ConfigError: If ranks differ in what they should not.
        DataError: If the batch cannot be used, or no rank has any sample.
        ProcessFailed: If another rank's batch cannot be used.
    """
    own = Share(has_failed=1)
    if batch is not None:
        own = Share(
            has_failed=0,
            size=batch.num_samples,
            seed=seed & MASK63,
            step=step,
            setup=_fingerprint([*setup, *batch.structure]),
            token_entries=_fingerprint(batch.token_entries),
            widths=_fingerprint(batch.widths),
            is_padded=int(batch.is_padded),
        )
    shares = [Share(*numbers) for numbers in all_gather(backend, own)]
    if any(share.has_failed for share in shares):
        raise_on_all_ranks(backend, failure)
    _check_steps([share.step for share in shares])
    ranks = [rank for rank, share in enumerate(shares) if share.size]
    if not ranks:
        raise DataError("the batch has no samples: leave it out.")
    first = shares[ranks[0]]
    _check_setups([share.setup for share in shares], ranks)
    token_entries = first.token_entries
    if any(shares[rank].token_entries != token_entries for rank in ranks):
        token_entries = _fingerprint(agree_on_token_entries(backend, batch))
    is_padded = any(share.is_padded for share in shares)

    def worth_for_proof(rank: int) -> tuple[int, int]:
        return shares[rank].is_padded, shares[rank].size

    return Agreement(
        sizes=tuple(share.size for share in shares),
        seed=shares[0].seed,
        is_padded=is_padded,
        has_one_width=len({shares[rank].widths for rank in ranks}) == 1,
        kind=(first.setup, token_entries, int(is_padded)),
        rank_of_proof=max(ranks, key=worth_for_proof),
    )


def agree_on_token_entries(backend: Backend, batch: CollatedBatch) -> tuple[TokenEntries, ...]:
    """Split the token entries of all ranks where they have the same width on some ranks only."""
    own = batch.token_entries if batch.num_samples else None
    of_ranks: list[Any] = [None] * backend.num_processes
    dist.all_gather_object(of_ranks, own)
    agreed = reduce(refined, [entries for entries in of_ranks if entries is not None])
    if batch.num_samples:
        batch.cut_padding_of(agreed)
    return agreed


def gather(backend: Backend, batch: CollatedBatch) -> CollatedBatch:
    """Gather the global batch: the samples of all ranks, one rank after the other.

    Raises:
        DataError: If their tensors have different shapes, apart from padding.
    """
    of_ranks: list[Any] = [None] * backend.num_processes
    dist.all_gather_object(of_ranks, (batch.num_samples, batch.entries, batch.token_entries))
    parts = [entries for number, entries, _ in of_ranks if number]
    token_entries = next(groups for number, _, groups in of_ranks if number)
    of_tokens = [name for group in token_entries for name in group.names]
    whole = CollatedBatch(joined(parts, batch.of_samples, of_tokens))
    whole.cut_padding_of(token_entries)
    return whole


def proof_samples(
    backend: Backend, batch: CollatedBatch, agreement: Agreement, most: int
) -> list[Row]:
    """Return at most `most` samples of one rank's batch, the same on all ranks, which then prove
    the same.
    """
    samples = batch.samples(most)
    if backend.num_processes == 1:
        return samples
    shared = [samples]
    dist.broadcast_object_list(shared, agreement.rank_of_proof, device=backend.device)
    return shared[0]


def all_gather(backend: Backend, numbers: Sequence[int]) -> list[list[int]]:
    """Gather integers below 2**63 in size: one list for each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=backend.device)
    if backend.num_processes == 1:
        return [own.tolist()]
    gathered = [torch.empty_like(own) for _ in range(backend.num_processes)]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).tolist()


def raise_on_all_ranks(backend: Backend, failure: Exception | None) -> None:
    """Raise this rank's failure, or ProcessFailed where another rank has one."""
    loss = torch.zeros((), device=backend.device)
    backend.all_reduce_status(RankStatus(loss, counts=(), failure=failure))


def _check_steps(steps: Sequence[int]) -> None:
    """Raise ConfigError if ranks are at different steps."""
    if len(set(steps)) > 1:
        raise ConfigError(
            f"ranks are at different steps ({', '.join(map(str, steps))}), so they would draw "
            "other dropout masks: call hf_ga.backward on all ranks, with the same step."
        )


def _check_setups(setups: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ConfigError if two ranks that have samples differ in their fingerprints.

    Args:
        setups: The fingerprint of each rank.
        ranks: The ranks that have samples.
    """
    different = [rank for rank in ranks if setups[rank] != setups[ranks[0]]]
    if different:
        raise ConfigError(
            f"the batches of ranks {ranks[0]} and {different[0]} have other entries, or their "
            "models other training modes or loss functions: call hf_ga.backward with the same "
            "kind of batch on all ranks."
        )


def _fingerprint(values: Iterable[object]) -> int:
    """Hash values to a number below 2**63 that is the same in every process."""
    text = "\n".join(map(str, values))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MASK63
