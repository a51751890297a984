"""Audits: the identity that a rule was proven by, tested again on the data that is trained on.

A proof sees a few samples. What they do not show (a rare class with a weight, a row without a
label, a column that switches another loss on) is found here, before the update of the window in
which it first matters:

    n L = n1 L1 + n2 L2

for a micro-batch of n targets and two parts of it, by forwards without gradients and with the same
keyed dropout. A micro-batch is audited in windows 1, 2, 4, 8, ..., and whenever it has a kind of
row that no audit has seen. A loss function of the user's on small outputs is audited in every
window, by calling it once more on the outputs of all micro-batches together.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.precision import sum_dtype

MOST_BY_VALUE = 16  # audits because of new values of one integer entry, as a vocabulary has many
MOST_ELEMENTS = 4096  # of a float entry of one sample that is looked at
# sizes of a row's largest float that are told apart
SMALLEST = 2.0**-4
LARGEST = 2.0**10
MOST_KEPT = 2**16  # elements of a micro-batch's outputs that are kept for the end of the window
# Relative error of the identity that rounding may cause, for the numbers of a forward.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TIMES_ROUNDING = 20.0  # as many times the error of another order of the samples

Kind = tuple[str, Any]  # (entry of the batch, what is special about some of its rows)


@dataclass(frozen=True)
class Chosen:
    """A call to audit.

    Attributes:
        call: One of this rank's calls, on the host.
        new: The kinds of its rows that no audit has seen.
        is_uniform: Whether all of its rows are of one of these kinds, so that its halves would not
            differ in it.
    """

    call: Call
    new: frozenset[Kind] = frozenset()
    is_uniform: bool = False


@dataclass
class Audits:
    """Which micro-batches of a run are audited.

    Attributes:
        num_windows: Windows that were begun.
        num_audits: Audits that were made.
        seen: The kinds of rows that audits have seen.
    """

    num_windows: int = 0
    num_audits: int = 0
    seen: set[Kind] = field(default_factory=set)
    _by_value: Counter[str] = field(default_factory=Counter)

    def choose(self, calls: Sequence[Call]) -> list[Chosen]:
        """Choose the calls to audit in the next window: so many that together they have all kinds
        of rows that no audit has seen; at least one in windows 1, 2, 4, 8, ...

        Args:
            calls: This rank's calls, on the host.
        """
        self.num_windows += 1
        chosen = []
        covered = set(self.seen)
        for call in calls:
            if not call.weight:
                continue
            number = len(call.micro_batch)
            kinds = kinds_of(call.micro_batch.batch, number)
            new = frozenset(kind for kind in kinds if self._counts(kind) and kind not in covered)
            if new:
                is_uniform = any(kinds[kind] == number for kind in new)
                chosen.append(Chosen(call, new, is_uniform))
                covered |= new
        if not chosen and is_power_of_two(self.num_windows):
            return self.more(calls, 1)
        return chosen

    def more(self, calls: Sequence[Call], number: int) -> list[Chosen]:
        """Choose further calls, as the schedule or other ranks ask for them, each in its turn."""
        calls = [call for call in calls if call.weight] or list(calls)
        if not calls:
            return []  # of a rank without samples
        return [Chosen(calls[(self.num_windows + i) % len(calls)]) for i in range(number)]

    def note(self, chosen: Chosen) -> None:
        """Called when a call was audited."""
        micro_batch = chosen.call.micro_batch
        self.num_audits += 1
        self.seen |= kinds_of(micro_batch.batch, len(micro_batch)).keys()
        self._by_value.update({entry for entry, what in chosen.new if isinstance(what, int)})

    def _counts(self, kind: Kind) -> bool:
        entry, what = kind
        return not isinstance(what, int) or self._by_value[entry] < MOST_BY_VALUE


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0


def kinds_of(batch: Batch, num_samples: int) -> dict[Kind, int]:
    """Find out what is special about the rows of a batch on the host, entry by entry.

    Args:
        batch: What the collate function returned.
        num_samples: Its samples.

    Returns:
        For each kind the number of rows that are of it.

    >>> kinds_of({"labels": torch.tensor([0, 2])}, 2)[("labels", 2)]
    1
    """
    kinds: dict[Kind, int] = {("entries", frozenset(batch)): 1}
    for name, value in batch.items():
        has_rows = isinstance(value, Tensor) and value.dim() and len(value) == num_samples
        if not has_rows or value.device.type != "cpu":
            continue
        for what, number in _kinds_of_entry(name, value).items():
            if number:
                kinds[name, what] = number
    return kinds


def _kinds_of_entry(name: str, value: Tensor) -> dict[Any, int]:
    """Count the rows of each kind in one entry of a batch."""
    if value.is_floating_point():
        if value[0].numel() > MOST_ELEMENTS:
            return {}
        return _kinds_of_floats(value.float().numpy().reshape(len(value), -1))
    numbers = value.numpy().reshape(len(value), -1)
    if value.dim() == 2 and (value.dtype == torch.bool or "mask" in name):
        return _kinds_of_masks(numbers != 0)
    if value.dim() == 1 or "label" in name:
        return _kinds_of_labels(numbers)
    return {}


def _kinds_of_floats(rows: np.ndarray) -> dict[str, int]:
    """Count the rows with special numbers, and those of each order of magnitude."""
    is_nan = np.isnan(rows)
    is_zero = rows == 0
    has = {
        "NaN": is_nan,
        "infinite": np.isinf(rows),
        "0": is_zero,
        "1": rows == 1,
        "negative": rows < 0,
        "positive": (rows > 0) & (rows != 1),
    }
    kinds = {kind: int(holds.any(1).sum()) for kind, holds in has.items()}
    sizes = np.nan_to_num(np.abs(rows), posinf=0.0).max(1)
    exponents = np.ceil(np.log2(np.clip(sizes, SMALLEST, LARGEST))).astype(int)
    for exponent, number in zip(*np.unique(exponents, return_counts=True), strict=True):
        kinds[f"at most {2.0**exponent:g}"] = int(number)
    kinds["nothing but NaN"] = int(is_nan.all(1).sum())
    kinds["nothing but 0"] = int(is_zero.all(1).sum())
    return kinds


def _kinds_of_masks(mask: np.ndarray) -> dict[str, int]:
    """Count the rows padded in each way, and those of each length up to a factor of 2."""
    lengths = mask.sum(1)
    falls = (mask[:, :-1] & ~mask[:, 1:]).any(1)
    rises = (~mask[:, :-1] & mask[:, 1:]).any(1)
    kinds = {
        "an empty row": int((lengths == 0).sum()),
        "a full row": int((lengths == mask.shape[1]).sum()),
        "right padding": int((falls & ~rises).sum()),
        "left padding": int((rises & ~falls).sum()),
        "a hole": int((rises & falls).sum()),
    }
    sizes = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    for size, number in zip(*np.unique(sizes, return_counts=True), strict=True):
        kinds[f"at most {2**size} tokens"] = int(number)
    return kinds


def _kinds_of_labels(labels: np.ndarray) -> dict[Any, int]:
    """Count the rows of each label; where a row has several, note which labels there are."""
    is_alone = labels.shape[1] == 1
    values, numbers = np.unique(labels, return_counts=True)
    kinds: dict[Any, int] = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    if not is_alone:
        kinds = dict.fromkeys(kinds, 1)
        kinds["a row without targets"] = int((labels == IGNORED_LABEL).all(1).sum())
    return kinds


def uneven_part(num_samples: int) -> np.ndarray:
    """Choose the rows of the first of two parts of a micro-batch: about half of them, spread over
    it.

    Their number has no common divisor with that of all rows. Otherwise weights of two values could
    be distributed over both parts in the same way, and weigh nothing.

    >>> uneven_part(8)
    array([0, 4, 7])
    """
    size = max((k for k in range(1, num_samples // 2 + 1) if gcd(k, num_samples) == 1), default=0)
    return np.linspace(0, num_samples - 1, size).round().astype(int)


Numbers = list[Tensor]  # the sums of a loss and its counts, float64 on the host


def numbers_of(sums: Sequence[Tensor | float], counts: Counts) -> Numbers:
    """Return what must be additive: sums and counts of some samples, detached."""
    return [torch.as_tensor(value).detach() for value in (*sums, *counts)]


def residual(whole: Numbers, parts: Sequence[Numbers]) -> float:
    """Compute the largest relative error of the sum of the parts.

    It is infinite where a part is not finite (a mean over nothing), although the whole is.

    Args:
        whole: Of some samples together.
        parts: Of groups of them.
    """
    worst = 0.0
    for expected, *found in zip(*_on_host([whole, *parts]), strict=True):
        if not expected.isfinite().all():
            continue  # found, and its cause named, by the update's own check
        size = max(float(expected.norm()), sum(float(part.norm()) for part in found))
        difference = float((sum(found) - expected).norm())
        error = difference / max(size, 1e-12)
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def _on_host(groups: Sequence[Numbers]) -> list[Numbers]:
    """Bring numbers to the host, in float64, as vectors. Waits for the device once."""
    values = [value for numbers in groups for value in numbers]
    device = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
    dtype = sum_dtype(device)
    flat = torch.cat([value.reshape(-1).to(device, dtype) for value in values]).cpu().double()
    vectors = iter(flat.split([value.numel() for value in values]))
    return [[next(vectors) for _ in numbers] for numbers in groups]


@dataclass(frozen=True)
class Outputs:
    """What the user's loss function got and returned for a micro-batch.

    Attributes:
        outputs: Of the model.
        batch: On the device.
        number: Its samples.
        numbers: Sum of the loss and number of targets.
    """

    outputs: Any
    batch: Batch
    number: int
    numbers: Numbers


def together(kept: Sequence[Outputs]) -> tuple[Any, Batch] | None:
    """Join outputs and batch of several micro-batches as if they were one.

    Returns None if there are fewer than two, or if they have different shapes (tokens padded to
    different widths).
    """
    if len(kept) < 2:
        return None
    numbers = [micro_batch.number for micro_batch in kept]
    try:
        outputs = rows_together([micro_batch.outputs for micro_batch in kept], numbers)
        batch = rows_together([micro_batch.batch for micro_batch in kept], numbers)
    except ValueError:
        return None
    return outputs, batch


def rows_together(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join outputs or batches of several micro-batches as if they were one.

    Args:
        batches: Tensors, or equally nested dicts and sequences of them. They are concatenated;
            of everything else the first is taken.
        sizes: The samples of each.

    Raises:
        ValueError: If rows have different shapes, as those of tokens padded to different widths,
            or a tensor has not one row for each sample.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return first
        has_rows = [len(value) for value in batches] == list(sizes)
        if not has_rows or len({tuple(value.shape[1:]) for value in batches}) > 1:
            raise ValueError("rows of different shapes, or not one for each sample")
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        together = {
            name: rows_together([batch[name] for batch in batches], sizes) for name in first
        }
        return type(first)(**together) if hasattr(first, "to_tuple") else together
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        if len(first) == sizes[0] and not any(isinstance(value, Tensor) for value in first):
            return [value for batch in batches for value in batch]
        return type(first)(
            rows_together(list(parts), sizes) for parts in zip(*batches, strict=True)
        )
    return first


def is_small(outputs: Any) -> bool:
    """Whether outputs are nothing but a few numbers, which can be kept."""
    return _num_elements(outputs) <= MOST_KEPT


def _num_elements(outputs: Any) -> float:
    """Count the elements of all tensors in outputs; infinite where there is something else."""
    if isinstance(outputs, Tensor):
        return outputs.numel()
    if isinstance(outputs, Mapping):
        return sum(map(_num_elements, outputs.values()))
    if isinstance(outputs, list | tuple):
        return sum(map(_num_elements, outputs))
    return 0 if outputs is None else float("inf")


def not_additive(
    where: str, error: float, name: str, kinds: Collection[Kind] = ()
) -> LossNotAdditive:
    """Make the error of an audit that failed."""
    special = ""
    if kinds:
        shown = sorted(f"{entry} {what}" for entry, what in kinds if entry != "entries")[:4]
        special = f" What no audit had seen before: {', '.join(shown)}." if shown else ""
    if name == "whole_batch":
        return LossNotAdditive(
            f"{where}: the model's outputs for these samples together are not those of two parts "
            f"of them (relative error {error:.1e}), although they were for the samples of the "
            f"proof. No parameter was updated.{special} Likely cause: the model normalises over "
            "its batch, or compares samples: let whole_batch do that, which gets all samples."
        )
    return LossNotAdditive(
        f"{where}: the loss of these samples together is not that of two parts of them (targets "
        f"counted as {name}, relative error {error:.1e}), although it was for the samples of the "
        f"proof. No parameter was updated.{special} Likely cause: the loss averages over something "
        "else than its targets: class weights, sample weights, valid entries only, the hardest "
        "samples. Remedy: pass the sum and what it is to be divided by, "
        "loss_fn(outputs, batch) -> ((weights * losses).sum(), weights.sum()); with the "
        "Accelerator, accelerator.backward((weights * losses).sum(), num_targets=weights.sum()). "
        "A loss that is no such quotient of sums: whole_batch=, which gets all samples of a window."
    )
