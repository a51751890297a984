"""Which wrong weights would make the gradient that an arm left: numbers are matched against the right parts.

The gradient of a window is sum over its micro-batches of u_k g_k, with g_k the gradient of micro-batch k's own mean loss. Right is
u_k = n_k / N (targets of the micro-batch / targets of the window). The usual mistakes are other u.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.report import Cause

UNSHIFTED = "labels counted unshifted"


@dataclass(frozen=True)
class Hypothesis:
    """Weights of the micro-batches' mean gradients, and what it would mean if an arm had them.

    Attributes:
        max_norm: `.grad` is clipped to it after each micro-batch; None: it is not.
    """

    weights: np.ndarray
    causes: tuple[Cause, ...] = ()
    max_norm: float | None = None

    def gradient(self, parts: Sequence[Tensor]) -> Tensor:
        """What an arm would leave, in float64."""
        if self.max_norm is None:
            return combined(parts, self.weights)
        return _clipped_sum(parts, self.weights, self.max_norm)


def combined(parts: Sequence[Tensor], weights: Sequence[float] | np.ndarray) -> Tensor:
    """sum of u_k g_k, in float64."""
    result = torch.zeros_like(parts[0], dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        if weight:  # the mean over no targets is NaN, and weighs nothing
            result += part.double() * float(weight)
    return result


def distance(vector: Tensor, other: Tensor) -> float:
    """||vector - other|| / ||vector||; a NaN counts as infinite."""
    off = float((vector.double() - other.double()).norm() / vector.double().norm().clamp(min=1e-300))
    return off if off == off else float("inf")


def hypotheses(counts: dict[str, np.ndarray], right: str, accumulation_steps: int) -> list[Hypothesis]:
    """Right first, then simple mistakes, then two of them together.

    Args:
        counts: name of a counting rule -> targets of each micro-batch. right: the rule that the loss really has.
        accumulation_steps: micro-batches of a full window (GA).
    """
    n = counts[right]
    k, total = len(n), n.sum()
    usual = [Hypothesis(n / total), *_wrong_divisors(n), *_wrong_counts(counts, right)]
    if k < accumulation_steps:
        factor = k / accumulation_steps
        text = f"x{factor:.3g}: the last window has {k} of {accumulation_steps} micro-batches, but is divided by the full GA"
        short = Cause("last window", text)
        usual += [Hypothesis(base.weights * factor, (*base.causes, short)) for base in usual]
    return [*usual, *_rare(n)]


def best_match(vector: Tensor, parts: Sequence[Tensor], candidates: Sequence[Hypothesis]) -> tuple[Hypothesis, float]:
    """The hypothesis whose gradient is nearest; among those that are as near, the first."""
    errors = [distance(vector, candidate.gradient(parts)) for candidate in candidates]
    near = next(i for i, error in enumerate(errors) if error <= 3 * min(errors) + 1e-7 or error == min(errors))
    return candidates[near], errors[near]


def fitted_weights(vector: Tensor, parts: Sequence[Tensor]) -> tuple[np.ndarray, float]:
    """The weights that come nearest to a gradient, by least squares, and how far off they leave it."""
    matrix = torch.stack(list(parts)).double()
    gram, right = (matrix @ matrix.T).cpu(), (matrix @ vector.double()).cpu()
    weights = torch.linalg.lstsq(gram, right, driver="gelsd").solution.numpy()
    return weights, distance(vector, combined(parts, weights))


def rounded_sum(parts: Sequence[Tensor], weights: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The same sum accumulated in a low precision."""
    result = torch.zeros_like(parts[0], dtype=dtype)
    for part, weight in zip(parts, weights, strict=True):
        result += (part * float(weight)).to(dtype)
    return result.double()


def with_clipping(candidates: Sequence[Hypothesis], max_norm: float) -> list[Hypothesis]:
    """The same weights, with the gradient clipped after every micro-batch."""
    text = f"the gradient is clipped to a norm of {max_norm:.3g} after every micro-batch"
    cause = Cause("clipping per micro-batch", text)
    return [Hypothesis(candidate.weights, (*candidate.causes, cause), max_norm) for candidate in candidates]


def _clipped_sum(parts: Sequence[Tensor], weights: np.ndarray, max_norm: float) -> Tensor:
    result = torch.zeros_like(parts[0], dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        result += part.double() * float(weight)
        result *= min(1.0, max_norm / (float(result.norm()) + 1e-6))
    return result


def _wrong_divisors(n: np.ndarray) -> list[Hypothesis]:
    k = len(n)
    own = f"x{k:.2f}: the loss is divided by the micro-batch's own count and not by GA"
    mean = "mean of means: all micro-batches weigh the same, although their targets differ"
    seen = ", ".join(f"{v:g}" for v in n[:6]) + (", ..." if k > 6 else "") + " targets"
    return [
        Hypothesis(np.full(k, 1.0), (Cause("normalisation", own),)),
        Hypothesis(np.full(k, 1.0 / k), (Cause("normalisation", mean, seen),)),
        Hypothesis(n.astype(float), (Cause("normalisation", f"x{n.sum():.4g}: the loss is a sum, divided by no count"),)),
    ]


def _wrong_counts(counts: dict[str, np.ndarray], right: str) -> list[Hypothesis]:
    """The loss is divided by, or the micro-batches weigh by, a count that is not the loss's own."""
    n, found = counts[right], []
    for name, other in counts.items():
        if name == right or not other.sum():
            continue
        is_unshifted = (right, name) == ("shifted labels", "labels")
        label = UNSHIFTED if is_unshifted else "normalisation"
        ratio = f"x{n.sum() / other.sum():.4g}"
        seen = f"{n.sum():g} targets ({right}), but {other.sum():g} are counted ({name})"
        column = "; column 0 is never predicted" * is_unshifted
        found.append(Hypothesis(n / other.sum(), (Cause(label, f"{ratio}: the window has {seen}{column}"),)))
        found.append(Hypothesis(other / other.sum(), (Cause(label, f"micro-batches weigh by {name} instead of {right}{column}"),)))
    return found


def _rare(n: np.ndarray) -> list[Hypothesis]:
    k, share = len(n), n / n.sum()
    texts = {
        f"x{k:.2f}: the right gradient is multiplied by the number of micro-batches": share * k,
        f"x{1 / k:.3g}: the right gradient is divided by GA once more": share / k,
        f"mean of means, divided by the {k} micro-batches once more": np.full(k, 1.0 / k**2),
    }
    return [Hypothesis(weights, (Cause("normalisation", text),)) for text, weights in texts.items()]
