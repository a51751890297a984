"""Which wrong weights explain an arm's gradient: match it against weighted sums of the
micro-batches' correct gradients.

The gradient of a window is the sum over its micro-batches of u_k g_k, with g_k the gradient of
micro-batch k's own mean loss. Correct is u_k = n_k / N (targets of the micro-batch / targets of the
window). The usual mistakes are other u, or clipping. On several processes micro-batch k belongs to
process k mod processes; DDP and FSDP average the processes' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.gradients import relative_error
from hf_ga.check.rows import Cause

_UNDIVIDED = "the loss is divided by the micro-batch's own count and not by the accumulation steps"


@dataclass(frozen=True)
class Hypothesis:
    """Weights of the micro-batches' mean gradients, and the mistakes that lead to them.

    Attributes:
        weights: Of each micro-batch.
        causes: The mistakes; none for the correct weights.
        max_norm: `.grad` is clipped to this norm after each micro-batch. inf: no clipping.
    """

    weights: np.ndarray
    causes: tuple[Cause, ...] = ()
    max_norm: float = float("inf")

    def gradient(self, parts: Sequence[Tensor]) -> Tensor:
        """Compute the gradient that an arm with these weights would leave, in float64.

        Args:
            parts: The gradients of the micro-batches' own mean losses.
        """
        result = torch.zeros_like(parts[0], dtype=torch.float64)
        for part, weight in zip(parts, self.weights, strict=True):
            if weight:  # the mean over no targets is NaN, with weight 0
                result += part.double() * float(weight)
            if self.max_norm < float("inf"):
                result *= min(1.0, self.max_norm / (float(result.norm()) + 1e-6))
        return result

    def clipped(self, norm: float) -> "Hypothesis":
        """Return the same weights, with the gradient clipped after every micro-batch."""
        cause = Cause(
            "clipping per micro-batch",
            f"the gradient is clipped to a norm of {norm:.3g} after every micro-batch",
        )
        return Hypothesis(self.weights, (*self.causes, cause), norm)


def hypotheses(
    counts: dict[str, np.ndarray], right: str, accumulation_steps: int, num_processes: int = 1
) -> list[Hypothesis]:
    """List the weights that an arm may have: the correct ones first, then single mistakes, then
    pairs of them.

    Args:
        counts: For each counting rule, the targets of each micro-batch.
        right: The rule of the loss.
        accumulation_steps: Micro-batches of a full window (GA x processes).
        num_processes: Micro-batch k belongs to process k mod num_processes.
    """
    found = _of_each_once(counts, right, accumulation_steps, num_processes)
    num = len(counts[right])
    num_repeated = -num % num_processes
    if not num_repeated:
        return found
    order = np.arange(num + num_repeated) % num
    even = Cause(
        "even_batches",
        f"Accelerate repeats the first {num_repeated} of {num} micro-batches, so that all "
        "processes have as many",
    )
    repeated = {name: count[order] for name, count in counts.items()}
    for each in _of_each_once(repeated, right, accumulation_steps, num_processes):
        weights = np.bincount(order, each.weights)  # a repeated micro-batch counts twice
        found.append(Hypothesis(weights, (*each.causes, even)))
    return found


def _of_each_once(
    counts: dict[str, np.ndarray], right: str, accumulation_steps: int, num_processes: int
) -> list[Hypothesis]:
    """List the weights where each micro-batch is computed once; see `hypotheses`."""
    n = counts[right]
    wrong_counts = _wrong_counts(counts, right)
    correct = Hypothesis(n / n.sum())
    undivided = _undivided(n, num_processes)
    the_sum = _wrong(
        n / num_processes,
        f"x{n.sum() / num_processes:.4g}: the loss is a sum, not divided by a count",
    )
    process = np.arange(len(n)) % num_processes
    of_processes = np.bincount(process, n, num_processes)
    if len(set(of_processes)) == 1:
        found = [correct, *undivided, the_sum, *wrong_counts]
    else:
        text = (
            "the processes' mean losses count the same, although the processes have different "
            "numbers of targets"
        )
        averaged = Cause("average of local means", text, _listed(of_processes))
        local = {
            name: np.maximum(np.bincount(process, count), 1)[process] * num_processes
            for name, count in counts.items()
        }
        others = [name for name in counts if name != right]
        found = [
            correct,
            Hypothesis(n / local[right], (averaged,)),
            *(Hypothesis(each.weights, (*each.causes, averaged)) for each in undivided),
            the_sum,
            *wrong_counts,
        ]
        for name, wrong in zip(others, wrong_counts[::2], strict=True):
            found.append(Hypothesis(n / local[name], (*wrong.causes, averaged)))
    return [*found, *_of_short_window(found, len(n), accumulation_steps, num_processes)]


def _undivided(n: np.ndarray, num_processes: int) -> list[Hypothesis]:
    """List the weights of means that are averaged equally, or summed.

    Args:
        n: Targets of each micro-batch.
        num_processes: Micro-batch k belongs to process k mod num_processes.
    """
    process = np.arange(len(n)) % num_processes
    num_of_process = np.bincount(process)  # micro-batches
    equal = 1 / num_of_process[process] / num_processes
    text = "mean of means: equal weights of micro-batches with different numbers of targets"
    differ = [len(set(n[rank::num_processes])) > 1 for rank in range(num_processes)]
    mean_of_means = Hypothesis(equal)
    if num_processes == 1 or any(differ):
        mean_of_means = _wrong(equal, text, seen=_listed(n))
    return [
        mean_of_means,
        _wrong(np.full(len(n), 1 / num_processes), f"x{num_of_process[0]:.2f}: {_UNDIVIDED}"),
        _wrong(
            np.ones(len(n)),
            f"x{len(n):.2f}: {_UNDIVIDED}, and summed over the processes instead of averaged",
        ),
    ]


def _of_short_window(
    found: list[Hypothesis], num_micro_batches: int, accumulation_steps: int, num_processes: int
) -> list[Hypothesis]:
    """List the same weights where a short last window is divided by the full accumulation steps."""
    steps = -(-num_micro_batches // num_processes)
    full = -(-accumulation_steps // num_processes)
    if steps >= full:
        return []
    factor = steps / full
    text = (
        f"x{factor:.3g}: the last window has {steps} of {full} micro-batches, but is divided by "
        "the full GA"
    )
    short = Cause("last window", text)
    return [Hypothesis(base.weights * factor, (*base.causes, short)) for base in found]


def best_match(
    vector: Tensor, parts: Sequence[Tensor], candidates: Sequence[Hypothesis]
) -> tuple[Hypothesis, float]:
    """Find the hypothesis with the smallest relative error; if several are about as close, the
    first.

    Args:
        vector: The arm's gradient.
        parts: The gradients of the micro-batches' own mean losses.
        candidates: The hypotheses.

    Returns:
        The hypothesis, and its relative error.
    """
    errors = [relative_error(candidate.gradient(parts), vector) for candidate in candidates]
    close = 3 * min(errors) + 1e-7
    first = next(i for i, error in enumerate(errors) if error <= close)
    return candidates[first], errors[first]


def fitted_weights(vector: Tensor, parts: Sequence[Tensor]) -> tuple[np.ndarray, float]:
    """Fit weights to a gradient by least squares.

    Returns:
        The weights, and the relative error that they leave.
    """
    matrix = torch.stack(list(parts)).double()
    gram = (matrix @ matrix.T).cpu()
    right = (matrix @ vector.double()).cpu()
    weights = torch.linalg.lstsq(gram, right, driver="gelsd").solution.numpy()
    return weights, relative_error(Hypothesis(weights).gradient(parts), vector)


def half_precision(vector: Tensor) -> str | None:
    """Return the half-precision type that can hold every element, so that the vector was probably
    summed in it; None if neither can.
    """
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in types.items():
        if torch.equal(vector, vector.to(dtype).to(vector.dtype)):
            return name
    return None


def _listed(numbers: np.ndarray) -> str:
    """Format numbers, `8, 3, 5 targets`; of more than six the first."""
    shown = [f"{number:g}" for number in numbers[:6]]
    if len(numbers) > 6:
        shown.append("...")
    return f"{', '.join(shown)} targets"


def _wrong(
    weights: np.ndarray, text: str, name: str = "normalisation", seen: str = ""
) -> Hypothesis:
    return Hypothesis(weights, (Cause(name, text, seen),))


def _wrong_counts(counts: dict[str, np.ndarray], right: str) -> list[Hypothesis]:
    """List two mistakes for each count that is not the loss's own: the loss is divided by it, or
    the micro-batches are weighted by it.
    """
    n = counts[right]
    found = []
    for name, other in counts.items():
        if name == right:
            continue
        is_unshifted = (right, name) == ("shifted labels", "labels")
        label = "labels counted unshifted" if is_unshifted else "normalisation"
        column = "; column 0 is never predicted" * is_unshifted
        ratio = f"x{n.sum() / other.sum():.4g}"
        seen = (
            f"the window has {n.sum():g} targets ({right}), but {other.sum():g} are counted "
            f"({name})"
        )
        found.append(_wrong(n / other.sum(), f"{ratio}: {seen}{column}", label))
        found.append(
            _wrong(
                other / other.sum(),
                f"micro-batches are weighted by {name} instead of {right}{column}",
                label,
            )
        )
    return found
