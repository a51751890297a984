"""Audits: the additivity of the loss, by which a rule was proven, is checked on training data, too.

A proof sees a few samples. What they do not show (a rare class with a weight, a row without a
label, a column that switches another loss on) is found here, before the update of the window in
which it first matters:

    n L = n1 L1 + n2 L2

for a micro-batch of n targets with mean loss L and two parts of it, by forwards without gradients
and with the same keyed dropout. A micro-batch is audited in windows 1, 2, 4, 8, ..., and whenever
some of its rows have a data pattern that no earlier audit covered. A loss function of the user's on
small outputs is audited in every window, by calling it once more on the joined outputs of all
micro-batches.
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

# Maximum number of audits because of new values of one integer entry, which may be token ids of a
# large vocabulary.
MAX_AUDITS_PER_ENTRY = 16
MAX_ELEMENTS_PER_SAMPLE = 4096  # float entries with more elements per sample are not inspected
# Rows are told apart by the order of magnitude of their largest number, between these two.
SMALLEST_MAGNITUDE = 2.0**-4
LARGEST_MAGNITUDE = 2.0**10
# Outputs of a micro-batch are kept until the end of the window if they have at most this many
# elements.
MAX_KEPT_ELEMENTS = 2**16
# Relative error of additivity that rounding may cause, for each dtype of the forward.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Also tolerated: this many times the relative error that reversing the order of the samples causes.
ROUNDING_FACTOR = 20.0

# What occurs in some rows of a batch: (name of the batch entry, description of its content or an
# integer value), such as ("attention_mask", "left padding") or ("labels", 2).
Pattern = tuple[str, Any]
# The first item of the pattern that stands for the names of all entries of a batch.
ENTRY_NAMES = "entries"


@dataclass(frozen=True)
class ChosenCall:
    """A micro-batch that is chosen for an audit.

    Attributes:
        call: The planned forward of the micro-batch, one of this rank's, with its batch on the
            host.
        new_patterns: The data patterns of its rows that no earlier audit covered.
        is_uniform: Whether all of its rows have the same new pattern, so that a split of this
            micro-batch alone would not show its effect.
    """

    call: Call
    new_patterns: frozenset[Pattern] = frozenset()
    is_uniform: bool = False


@dataclass
class Audits:
    """Decides on which micro-batches of a training run the additivity of the loss is checked (an
    audit), and records which data patterns the audits have covered.

    Attributes:
        num_windows: How many windows have begun.
        num_audits: How many micro-batches have been audited.
        covered: The data patterns that occurred in audited micro-batches.
    """

    num_windows: int = 0
    num_audits: int = 0
    covered: set[Pattern] = field(default_factory=set)
    # For each batch entry, how many audits a new integer value of it has caused.
    _audits_by_value: Counter[str] = field(default_factory=Counter)

    def choose(self, calls: Sequence[Call]) -> list[ChosenCall]:
        """Choose the micro-batches of the next window on which the additivity of the loss is
        checked.

        They are the first ones that together have all data patterns of the window that no earlier
        audit covered. If there are none, one micro-batch is chosen in windows 1, 2, 4, 8, ...

        Args:
            calls: The planned forwards of this rank, with their batches on the host.
        """
        self.num_windows += 1
        chosen = []
        covered = set(self.covered)
        for call in calls:
            if not call.weight:  # only there because other ranks make a forward (FSDP)
                continue
            num_samples = len(call.micro_batch)
            patterns = count_patterns(call.micro_batch.batch, num_samples)
            new_patterns = frozenset(
                pattern
                for pattern in patterns
                if self._is_worth_an_audit(pattern) and pattern not in covered
            )
            if new_patterns:
                is_uniform = any(patterns[pattern] == num_samples for pattern in new_patterns)
                chosen.append(ChosenCall(call, new_patterns, is_uniform))
                covered |= new_patterns
        if not chosen and is_power_of_two(self.num_windows):
            return self.choose_more(calls, 1)
        return chosen

    def choose_more(self, calls: Sequence[Call], num_audits: int) -> list[ChosenCall]:
        """Choose micro-batches for additivity checks (audits) that no new data pattern requires:
        for the schedule, or because other ranks make more audits than this one.

        Consecutive windows choose different micro-batches, round-robin.

        Args:
            calls: The planned forwards of this rank.
            num_audits: How many to choose; the same may be chosen again. None are chosen on a rank
                without samples.
        """
        calls = [call for call in calls if call.weight] or list(calls)
        if not calls:
            return []  # a rank without samples
        return [ChosenCall(calls[(self.num_windows + i) % len(calls)]) for i in range(num_audits)]

    def record(self, chosen: ChosenCall) -> None:
        """Record that the additivity of the loss was checked on a micro-batch, so that its data
        patterns count as covered.
        """
        micro_batch = chosen.call.micro_batch
        self.num_audits += 1
        self.covered |= count_patterns(micro_batch.batch, len(micro_batch)).keys()
        self._audits_by_value.update(
            {entry for entry, content in chosen.new_patterns if isinstance(content, int)}
        )

    def _is_worth_an_audit(self, pattern: Pattern) -> bool:
        """Whether a data pattern that is new requires an audit. It does, unless it is an integer
        value of a batch entry whose values have caused `MAX_AUDITS_PER_ENTRY` audits (token ids).
        """
        entry, content = pattern
        is_integer_value = isinstance(content, int)
        return not is_integer_value or self._audits_by_value[entry] < MAX_AUDITS_PER_ENTRY


def is_power_of_two(number: int) -> bool:
    """Whether a positive integer is 1, 2, 4, 8, ...: the numbers of those windows in which the
    additivity of the loss is checked even without new data patterns.
    """
    return number & (number - 1) == 0


def count_patterns(batch: Batch, num_samples: int) -> dict[Pattern, int]:
    """Find the data patterns that a loss may treat in a special way (labels, NaN, padding, ...), as
    the additivity of the loss must be checked on a micro-batch with each of them (an audit).

    Inspects every CPU tensor with one row per sample. The names of all entries are a pattern, too.

    Args:
        batch: The batch that the collate function returned, on the host.
        num_samples: Its number of samples.

    Returns:
        The number of rows that have each pattern, for patterns that occur.

    >>> count_patterns({"labels": torch.tensor([0, 2])}, 2)[("labels", 2)]
    1
    """
    patterns: dict[Pattern, int] = {(ENTRY_NAMES, frozenset(batch)): 1}
    for name, value in batch.items():
        has_rows = isinstance(value, Tensor) and value.dim() and len(value) == num_samples
        if not has_rows or value.device.type != "cpu":
            continue
        for content, num_rows in _count_patterns_of_entry(name, value).items():
            if num_rows:
                patterns[name, content] = num_rows
    return patterns


def _count_patterns_of_entry(name: str, value: Tensor) -> dict[Any, int]:
    """Count the rows of one batch entry that have each data pattern of its type (the additivity of
    the loss is checked on micro-batches with new patterns).

    Inspects floats (unless a sample has very many), masks (2-D tensors of bool, or with "mask" in
    their name) and labels (other 1-D integers, or with "label" in their name). Returns {} for other
    entries.

    Args:
        name: Name of the entry.
        value: Its tensor on the CPU, one row per sample.
    """
    if value.is_floating_point():
        if value[0].numel() > MAX_ELEMENTS_PER_SAMPLE:
            return {}
        return _count_float_patterns(value.float().numpy().reshape(len(value), -1))
    rows = value.numpy().reshape(len(value), -1)
    if value.dim() == 2 and (value.dtype == torch.bool or "mask" in name):
        return _count_mask_patterns(rows != 0)
    if value.dim() == 1 or "label" in name:
        return _count_label_patterns(rows)
    return {}


def _count_float_patterns(rows: np.ndarray) -> dict[str, int]:
    """Count the rows of a float batch entry that contain special numbers (NaN, 0, negative, ...),
    and the rows of each order of magnitude: data patterns on which a loss may not be additive.

    Args:
        rows: float32, shape (samples, elements).

    Returns:
        The description of each pattern with the number of rows that have it.
    """
    is_nan = np.isnan(rows)
    is_zero = rows == 0
    special_numbers = {
        "NaN": is_nan,
        "infinite": np.isinf(rows),
        "0": is_zero,
        "1": rows == 1,
        "negative": rows < 0,
        "positive": (rows > 0) & (rows != 1),
    }
    patterns = {name: int(holds.any(1).sum()) for name, holds in special_numbers.items()}
    largest = np.nan_to_num(np.abs(rows), posinf=0.0).max(1)
    largest = np.clip(largest, SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE)
    exponents = np.ceil(np.log2(largest)).astype(int)
    for exponent, num_rows in zip(*np.unique(exponents, return_counts=True), strict=True):
        patterns[f"at most {2.0**exponent:g}"] = int(num_rows)
    patterns["only NaN"] = int(is_nan.all(1).sum())
    patterns["only 0"] = int(is_zero.all(1).sum())
    return patterns


def _count_mask_patterns(mask: np.ndarray) -> dict[str, int]:
    """Count the rows of an attention mask with each kind of padding, and the rows of each length,
    rounded up to a power of two: data patterns on which a loss may not be additive.

    Args:
        mask: bool, shape (samples, padded length), True at real tokens.

    Returns:
        The description of each pattern with the number of rows that have it.
    """
    lengths = mask.sum(1)
    token_before_padding = (mask[:, :-1] & ~mask[:, 1:]).any(1)
    padding_before_token = (~mask[:, :-1] & mask[:, 1:]).any(1)
    patterns = {
        "only padding": int((lengths == 0).sum()),
        "no padding": int((lengths == mask.shape[1]).sum()),
        "right padding": int((token_before_padding & ~padding_before_token).sum()),
        "left padding": int((padding_before_token & ~token_before_padding).sum()),
        "padding on both sides or between tokens": int(
            (padding_before_token & token_before_padding).sum()
        ),
    }
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    for exponent, num_rows in zip(*np.unique(exponents, return_counts=True), strict=True):
        patterns[f"at most {2**exponent} tokens"] = int(num_rows)
    return patterns


def _count_label_patterns(labels: np.ndarray) -> dict[Any, int]:
    """Find the label values in a micro-batch, for the choice of those to audit before a window's
    update: with class weights, the loss of a new label value may not be additive.

    If rows have several labels, the rows of each value are not counted: the count is 1 for every
    value that occurs. Rows whose labels are all -100 (ignored) are counted as well.

    Args:
        labels: Integers, shape (samples, labels per sample).

    Returns:
        The number of rows by label value, and by "a row without targets" if rows have several
        labels.
    """
    has_one_per_row = labels.shape[1] == 1
    values, num_occurrences = np.unique(labels, return_counts=True)
    patterns: dict[Any, int] = dict(zip(values.tolist(), num_occurrences.tolist(), strict=True))
    if not has_one_per_row:
        patterns = dict.fromkeys(patterns, 1)
        patterns["a row without targets"] = int((labels == IGNORED_LABEL).all(1).sum())
    return patterns


def uneven_part(num_samples: int) -> np.ndarray:
    """Split a micro-batch into two parts to check the additivity of its loss before the update of
    its window. Return the rows of the first part: about half of them, evenly spread.

    The number of rows in the part has no common divisor with the number of all rows. Otherwise two
    different sample weights might be equally frequent in both parts, and the check would miss their
    effect.

    >>> uneven_part(8)
    array([0, 4, 7])
    """
    size = max((k for k in range(1, num_samples // 2 + 1) if gcd(k, num_samples) == 1), default=0)
    return np.linspace(0, num_samples - 1, size).round().astype(int)


# The sums of a loss over some samples, then their numbers of targets; detached tensors.
SumsAndCounts = list[Tensor]


def sums_and_counts(sums: Sequence[Tensor | float], counts: Counts) -> SumsAndCounts:
    """Join the loss sums and target counts of some samples of a window to one list of detached
    tensors: the values whose additivity is checked before the update.
    """
    return [torch.as_tensor(value).detach() for value in (*sums, *counts)]


def additivity_error(whole: SumsAndCounts, parts: Sequence[SumsAndCounts]) -> float:
    """Return how far a loss is from being additive on training data: the largest relative
    difference between the sums and counts of some samples and the total over parts of them.

    It is infinite if a part is not finite (a mean over no targets) but the whole is. Values of the
    whole that are not finite are skipped, as the optimizer step checks for them and names the
    cause.

    Args:
        whole: Loss sums and target counts of some samples, computed in one batch.
        parts: Those of disjoint groups of the same samples, computed separately.
    """
    largest_error = 0.0
    for whole_value, *part_values in zip(*_to_host_float64([whole, *parts]), strict=True):
        if not whole_value.isfinite().all():
            continue
        scale = max(float(whole_value.norm()), sum(float(part.norm()) for part in part_values))
        difference = float((sum(part_values) - whole_value).norm())
        error = difference / max(scale, 1e-12)
        largest_error = max(largest_error, error if np.isfinite(error) else np.inf)
    return largest_error


def _to_host_float64(groups: Sequence[SumsAndCounts]) -> list[SumsAndCounts]:
    """Copy the loss sums and target counts of several groups of samples to the host as 1-D float64
    tensors, in a single transfer, so that an additivity check waits for the device only once.
    """
    values = [value for group in groups for value in group]
    device = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
    dtype = sum_dtype(device)
    flat = torch.cat([value.reshape(-1).to(device, dtype) for value in values]).cpu().double()
    vectors = iter(flat.split([value.numel() for value in values]))
    return [[next(vectors) for _ in group] for group in groups]


@dataclass(frozen=True)
class KeptOutputs:
    """The arguments and the result of the user's loss function for one micro-batch, kept until the
    end of the window, where the function is called once more on all micro-batches joined.

    Attributes:
        outputs: What the model returned.
        batch: The batch on the device.
        num_samples: Samples in the micro-batch.
        result: The sum of the loss and the number of targets.
    """

    outputs: Any
    batch: Batch
    num_samples: int
    result: SumsAndCounts


def join_outputs(kept: Sequence[KeptOutputs]) -> tuple[Any, Batch] | None:
    """Concatenate the outputs and the batches of several micro-batches of a window, as if they were
    one, to check that the user's loss function is additive over them.

    Returns:
        (outputs, batch) for the user's loss function, or None if there are fewer than two
        micro-batches, or if their shapes differ (tokens padded to different lengths).
    """
    if len(kept) < 2:
        return None
    sizes = [micro_batch.num_samples for micro_batch in kept]
    try:
        outputs = concatenate_rows([micro_batch.outputs for micro_batch in kept], sizes)
        batch = concatenate_rows([micro_batch.batch for micro_batch in kept], sizes)
    except ValueError:
        return None
    return outputs, batch


def concatenate_rows(structures: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate a model's outputs for several micro-batches of a window (or their batches) along
    the first dim.

    Args:
        structures: For each micro-batch, a tensor, or equally nested dicts, lists and tuples of
            tensors. Tensors and lists with one value per sample are concatenated. For a scalar or
            anything else, the first micro-batch's value is returned.
        sizes: The number of samples of each micro-batch.

    Raises:
        ValueError: If a tensor does not have one row per sample, or rows have different shapes in
            different micro-batches (tokens padded to different lengths).
    """
    first = structures[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return first
        has_rows = [len(value) for value in structures] == list(sizes)
        if not has_rows or len({tuple(value.shape[1:]) for value in structures}) > 1:
            raise ValueError("rows of different shapes, or not one row per sample")
        return torch.cat(list(structures))
    if isinstance(first, Mapping):
        joined = {
            name: concatenate_rows([structure[name] for structure in structures], sizes)
            for name in first
        }
        is_model_output = hasattr(first, "to_tuple")  # of transformers
        return type(first)(**joined) if is_model_output else joined
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        if len(first) == sizes[0] and not any(isinstance(value, Tensor) for value in first):
            return [value for structure in structures for value in structure]
        return type(first)(
            concatenate_rows(list(items), sizes) for items in zip(*structures, strict=True)
        )
    return first


def is_small(outputs: Any) -> bool:
    """Whether a model's outputs for a micro-batch are small enough to be kept until the end of the
    window: tensors with at most `MAX_KEPT_ELEMENTS` elements in all, and nothing else.
    """
    return _num_elements(outputs) <= MAX_KEPT_ELEMENTS


def _num_elements(outputs: Any) -> float:
    """Count the elements of all tensors in a model's nested outputs for a micro-batch, to decide
    whether they are kept until the end of the window.

    Infinite if they contain anything other than tensors, dicts, lists, tuples and None.
    """
    if isinstance(outputs, Tensor):
        return outputs.numel()
    if isinstance(outputs, Mapping):
        return sum(map(_num_elements, outputs.values()))
    if isinstance(outputs, list | tuple):
        return sum(map(_num_elements, outputs))
    return 0 if outputs is None else float("inf")


def failed_audit(
    where: str,
    relative_error: float,
    counting_rule: str,
    new_patterns: Collection[Pattern] = (),
) -> LossNotAdditive:
    """Build the LossNotAdditive exception for a failed additivity check on training data.

    Args:
        where: Names the window, and the samples if they are known.
        relative_error: How far the loss of the samples is from the sum over their two parts.
        counting_rule: Name of the rule by which the model was proven, or "whole_batch" if the
            model's outputs were checked instead of its loss.
        new_patterns: Data patterns of these samples that no earlier audit covered: likely causes.
    """
    shown = sorted(f"{entry} {content}" for entry, content in new_patterns if entry != ENTRY_NAMES)
    patterns = f" New in this data: {', '.join(shown[:4])}." if shown else ""
    if counting_rule == "whole_batch":
        return LossNotAdditive(
            f"{where}: the model's outputs for these samples differ from those for two parts of "
            f"them (relative error {relative_error:.1e}), although they did not for the samples of "
            f"the proof. No parameter was updated.{patterns} Likely cause: the model normalises "
            "over its batch, or compares samples. Remedy: move this into whole_batch, which gets "
            "all samples of a window."
        )
    return LossNotAdditive(
        f"{where}: the loss of these samples is not the weighted mean of the losses of two parts "
        f"of them (targets counted as {counting_rule}, relative error {relative_error:.1e}), "
        f"although it was for the samples of the proof. No parameter was updated.{patterns} Likely "
        "cause: the loss averages over something other than its targets: class weights, sample "
        "weights, valid entries only, the hardest samples. Remedy: return the sum of the loss and "
        "its divisor, loss_fn(outputs, batch) -> ((weights * losses).sum(), weights.sum()); with "
        "the Accelerator, accelerator.backward((weights * losses).sum(), "
        "num_targets=weights.sum()). A loss that is not a sum over samples divided by another sum "
        "over samples: pass it as whole_batch=, which gets all samples of a window."
    )
