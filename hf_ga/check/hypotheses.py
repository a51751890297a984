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

from hf_ga.check.rows import Cause

_UNDIVIDED = "the loss is divided by the micro-batch's own count and not by the accumulation steps"


@dataclass(frozen=True)
class Hypothesis:
    """Weights of the micro-batches' mean gradients, and the mistakes that lead to them.

    Attributes:
        max_norm: `.grad` is clipped to this norm after each micro-batch; inf: no clipping.
    """

    weights: np.ndarray
    causes: tuple[Cause, ...] = ()
    max_norm: float = float("inf")

    def gradient(self, parts: Sequence[Tensor]) -> Tensor:
        """The gradient that an arm with these weights would leave, in float64."""
        result = torch.zeros_like(parts[0], dtype=torch.float64)
        for part, weight in zip(parts, self.weights, strict=True):
            if weight:  # the mean over no targets is NaN, with weight 0
                result += part.double() * float(weight)
            if self.max_norm < float("inf"):
                result *= min(1.0, self.max_norm / (float(result.norm()) + 1e-6))
        return result

    def clipped(self, norm: float) -> "Hypothesis":
        """The same weights, with the gradient clipped after every micro-batch."""
        cause = Cause(
            "clipping per micro-batch",
            f"the gradient is clipped to a norm of {norm:.3g} after every micro-batch",
        )
        return Hypothesis(self.weights, (*self.causes, cause), norm)


def relative_error(vector: Tensor, reference: Tensor) -> float:
    """||vector - reference|| / ||reference||; a NaN counts as infinite."""
    error = float(
        (vector.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-300)
    )
    return error if error == error else float("inf")


def hypotheses(
    counts: dict[str, np.ndarray], right: str, accumulation_steps: int, num_processes: int = 1
) -> list[Hypothesis]:
    """The correct weights first, then single mistakes, then pairs of them.

    Args:
        counts: name of a counting rule -> targets of each micro-batch. right: the rule of the loss.
        accumulation_steps: micro-batches of a full window (GA x processes).
    """
    usual = _usual(counts, right, accumulation_steps, num_processes)
    k = len(counts[right])
    if repeats := -k % num_processes:
        order = np.arange(k + repeats) % k
        even = Cause(
            "even_batches",
            f"Accelerate repeats the first {repeats} of {k} micro-batches, so that all processes "
            "have as many",
        )
        again = _usual(
            {name: count[order] for name, count in counts.items()},
            right,
            accumulation_steps,
            num_processes,
        )
        usual += [
            Hypothesis(np.bincount(order, each.weights), (*each.causes, even)) for each in again
        ]
    return usual


def _usual(
    counts: dict[str, np.ndarray], right: str, accumulation_steps: int, num_processes: int
) -> list[Hypothesis]:
    """Those of micro-batches that are computed once."""
    n = counts[right]
    process = np.arange(len(n)) % num_processes
    own, sizes = (
        np.bincount(process, n, num_processes),
        np.bincount(process),
    )  # targets and micro-batches of each process
    k = sizes[0]
    mean = 1 / sizes[process] / num_processes
    is_uneven = num_processes == 1 or any(
        len(set(n[rank::num_processes])) > 1 for rank in range(num_processes)
    )
    wrong_counts = _wrong_counts(counts, right)
    text = "mean of means: equal weights of micro-batches with different numbers of targets"
    usual = [
        Hypothesis(n / n.sum()),
        _wrong(mean, text, seen=_listed(n)) if is_uneven else Hypothesis(mean),
        _wrong(np.full(len(n), 1 / num_processes), f"x{k:.2f}: {_UNDIVIDED}"),
        _wrong(
            np.ones(len(n)),
            f"x{len(n):.2f}: {_UNDIVIDED}, and summed over the processes instead of averaged",
        ),
        _wrong(
            n / num_processes,
            f"x{n.sum() / num_processes:.4g}: the loss is a sum, not divided by a count",
        ),
        *wrong_counts,
    ]
    if len(set(own)) > 1:
        text = (
            "the processes' mean losses count the same, although the processes have different "
            "numbers of targets"
        )
        averaged = Cause("average of local means", text, _listed(own))
        usual[1:4] = [Hypothesis(each.weights, (*each.causes, averaged)) for each in usual[1:4]]
        local = {
            name: np.maximum(np.bincount(process, c), 1)[process] * num_processes
            for name, c in counts.items()
        }
        usual.insert(1, Hypothesis(n / local[right], (averaged,)))
        others = zip([name for name in counts if name != right], wrong_counts[::2], strict=True)
        usual += [Hypothesis(n / local[name], (*wrong.causes, averaged)) for name, wrong in others]
    full = -(-accumulation_steps // num_processes)
    if k < full:
        factor = k / full
        text = (
            f"x{factor:.3g}: the last window has {k} of {full} micro-batches, but is divided by "
            "the full GA"
        )
        short = Cause("last window", text)
        usual += [Hypothesis(base.weights * factor, (*base.causes, short)) for base in usual]
    return usual


def best_match(
    vector: Tensor, parts: Sequence[Tensor], candidates: Sequence[Hypothesis]
) -> tuple[Hypothesis, float]:
    """The hypothesis with the smallest relative error; if several are about as close, the first."""
    errors = [relative_error(candidate.gradient(parts), vector) for candidate in candidates]
    near = next(i for i, error in enumerate(errors) if error <= 3 * min(errors) + 1e-7)
    return candidates[near], errors[near]


def fitted_weights(vector: Tensor, parts: Sequence[Tensor]) -> tuple[np.ndarray, float]:
    """The weights that fit a gradient best by least squares, and their residual relative error."""
    matrix = torch.stack(list(parts)).double()
    gram = (matrix @ matrix.T).cpu()
    right = (matrix @ vector.double()).cpu()
    weights = torch.linalg.lstsq(gram, right, driver="gelsd").solution.numpy()
    return weights, relative_error(Hypothesis(weights).gradient(parts), vector)


def half_precision(vector: Tensor) -> str | None:
    """The half-precision type that can hold every element: the vector was summed in it. None:
    neither can.
    """
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next(
        (
            name
            for name, dtype in types.items()
            if torch.equal(vector, vector.to(dtype).to(vector.dtype))
        ),
        None,
    )


def _listed(numbers: np.ndarray) -> str:
    return (
        ", ".join(f"{v:g}" for v in numbers[:6])
        + (", ..." if len(numbers) > 6 else "")
        + " targets"
    )


def _wrong(
    weights: np.ndarray, text: str, name: str = "normalisation", seen: str = ""
) -> Hypothesis:
    return Hypothesis(weights, (Cause(name, text, seen),))


def _wrong_counts(counts: dict[str, np.ndarray], right: str) -> list[Hypothesis]:
    """The loss is divided, or the micro-batches are weighted, by a count that is not the loss's
    own.
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
