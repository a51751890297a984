"""What the terms of a loss divide by in one micro-batch, with keys that all ranks share."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_ga.loss import StackSizes, Term, describe, read_terms
from hf_ga.parallel.backend import Backend

TermKey = Hashable
Number = float | Tensor
SMALLEST_ID = 1 << 20  # Python's ids are addresses, indices are smaller


@dataclass(frozen=True)
class Reading:
    """One term of the loss of one micro-batch.

    Attributes:
        key: What the term is, the same in every micro-batch and on every rank.
        term: The term as it was read. None: the loop passed a sum and its number of targets.
        num_samples: Number of samples of the micro-batch.
        divisor: What the term divides by.
        count: What its numerator sums over. None: unknown.
        factor: What the loss multiplies the term by.
        num_elements: Number of elements of what it sums over, without masks. None: unknown.
        num_nonzero: Number of them whose weight is not 0. None: unknown.
        class_weights: The class weights of a cross entropy, or None.
        is_zero: Whether the sum that the loop passed is 0. None: it passed a mean.
        ignores_width: Whether what it sums over depends on how wide rows are padded.
        selects: Whether it is a mean over elements that were selected.
        is_counted: Whether the micro-batch belongs to the window. False for a rehearsal.
    """

    key: TermKey
    term: Term | None
    num_samples: int
    divisor: Number
    count: Number | None
    factor: Number
    num_elements: int | None = None
    num_nonzero: Number | None = None
    class_weights: Tensor | None = None
    is_zero: Number | None = None
    ignores_width: bool = False
    selects: bool = False
    is_counted: bool = True

    @property
    def name(self) -> str:
        """The term in words, for error messages."""
        return "the sum with num_targets" if self.term is None else describe(self.term)

    @property
    def is_switched_off(self) -> bool:
        """Whether the term has no part in the loss; a factor on an accelerator is not read."""
        return isinstance(self.factor, float) and self.factor == 0.0

    def without_graph(self) -> "Reading":
        """Return what is needed after the backward."""
        return self if self.term is None else replace(self, term=self.term.without_graph())


def on_host(readings: Sequence[Reading]) -> list[Reading]:
    """Copy the numbers of readings to the host, in one transfer."""
    tensors = [
        value for reading in readings for value in _numbers(reading) if isinstance(value, Tensor)
    ]
    if not tensors:
        return list(readings)
    stacked = torch.stack([tensor.detach().double().reshape(()) for tensor in tensors])
    values = iter(stacked.tolist())

    def number(value: Number | None) -> float | None:
        """Return the value on the host."""
        return next(values) if isinstance(value, Tensor) else value

    return [
        replace(
            reading,
            divisor=number(reading.divisor),
            count=number(reading.count),
            factor=number(reading.factor),
            num_nonzero=number(reading.num_nonzero),
            is_zero=number(reading.is_zero),
        )
        for reading in readings
    ]


def _numbers(reading: Reading) -> tuple[Number | None, ...]:
    """Return what may be on the device, in the order of `on_host`."""
    return (
        reading.divisor,
        reading.count,
        reading.factor,
        reading.num_nonzero,
        reading.is_zero,
    )


class TermReader:
    """Reads the losses of a run.

    Args:
        parameters: The trainable parameters, in the same order on all ranks.

    Attributes:
        stack_sizes: What is known of losses that may be those of single samples.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start before the first loss."""
        self.stack_sizes = StackSizes()
        self._index_of = {id(p): index for index, p in enumerate(parameters)}
        self._num_merged_pairs = 0

    def read(
        self, loss: Tensor, num_samples: int, num_targets: Number | None = None
    ) -> list[Reading]:
        """Read the terms of a micro-batch's loss, those that are switched off (a factor of 0) last.

        Args:
            loss: The loss, a scalar.
            num_samples: Number of samples of the micro-batch.
            num_targets: What the loss is a sum over. None: the loss is read.

        Raises:
            LossNotAdditive: If the loss is no sum of means.
        """
        if num_targets is not None:
            number = num_targets if isinstance(num_targets, Tensor) else float(num_targets)
            is_zero = loss.detach() == 0
            return [
                Reading(("num_targets",), None, num_samples, number, None, 1.0, is_zero=is_zero)
            ]
        terms = read_terms(
            loss,
            num_samples=num_samples,
            stack_sizes=self.stack_sizes,
            with_switched_off=True,
        )
        return [
            Reading(
                key,
                term,
                num_samples,
                term.divisor,
                term.count(),
                term.factor,
                num_elements=term.num_elements,
                num_nonzero=term.num_nonzero(),
                class_weights=term.class_weights(),
                ignores_width=term.ignores_width(),
                selects=term.selects(),
            )
            for key, term in zip(self._keys_of(terms), terms, strict=True)
        ]

    def _keys_of(self, terms: Sequence[Term]) -> list[TermKey]:
        """Return keys that are the same on all ranks: parameters by index, equal terms numbered."""
        keys: list[TermKey] = []
        num_equal: dict[TermKey, int] = {}
        for term in terms:
            identity = self._with_indices(term.identity)
            number = num_equal.get(identity, 0)
            num_equal[identity] = number + 1
            keys.append((*identity, number))
        return keys

    def _with_indices(self, identity: TermKey) -> TermKey:
        """Return an identity with the indices of parameters in place of their ids, in order. Those
        that are not trained (of a teacher) count as one.
        """
        if not isinstance(identity, tuple):
            return identity
        are_ids = [isinstance(part, int) and part > SMALLEST_ID for part in identity]
        if identity and all(are_ids):
            return tuple(sorted(self._index_of.get(part, -1) for part in identity))
        return tuple(self._with_indices(part) for part in identity)

    @property
    def has_new_stacks(self) -> bool:
        """Whether this rank has seen stacks of sizes that other ranks may not know."""
        return self.stack_sizes.num_pairs != self._num_merged_pairs

    def merge_stacks(self, backend: Backend) -> bool:
        """Let all ranks know the sizes of all stacks: those of one rank may fit samples by chance.
        A collective.

        Returns:
            Whether a stack was read in another way than from now on.
        """
        own_keys = {self._with_indices(key): key for key in self.stack_sizes.pairs}
        own = {name: self.stack_sizes.pairs[key] for name, key in own_keys.items()}
        is_misread = False
        for of_rank in backend.gather_objects(own):
            known = {own_keys[name]: pairs for name, pairs in of_rank.items() if name in own_keys}
            is_misread |= self.stack_sizes.merge(known)
        self._num_merged_pairs = self.stack_sizes.num_pairs
        return is_misread
