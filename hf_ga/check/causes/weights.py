"""With which weights a training step summed its micro-batches, and the mistakes behind them.

The gradient of a window is the sum over its micro-batches of u_k g_k, with g_k the gradient of
micro-batch k's own mean loss. Correct is u_k = n_k / N: what the loss divides by in the micro-batch
and in the window, both read from the loss. The usual mistakes are other weights from the same
numbers: `list_hypotheses` is their table. A step is a black box, so its gradient tells which of
them it has. On several processes micro-batch k belongs to process k mod num_processes; DDP and FSDP
average the processes' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.causes.divisors import LABELS, SHIFTED_LABELS, Divisors, format_numbers
from hf_ga.check.gradients import relative_error
from hf_ga.check.verdict.rows import Cause

_UNDIVIDED = "the loss is divided by the micro-batch's own count and not by the accumulation steps"


@dataclass(frozen=True)
class Hypothesis:
    """The weights with which a step may have summed the micro-batches' gradients.

    Attributes:
        weights: Weight of each micro-batch's gradient, shape (micro-batches,).
        causes: The mistakes that lead to them; none for the correct weights.
        max_norm: L2 norm to which `.grad` is clipped after each micro-batch. inf: no clipping.
    """

    weights: np.ndarray
    causes: tuple[Cause, ...] = ()
    max_norm: float = float("inf")

    def gradient(self, micro_batch_gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient that a step with these weights leaves, as a float64 vector."""
        result = torch.zeros_like(micro_batch_gradients[0], dtype=torch.float64)
        for gradient, weight in zip(micro_batch_gradients, self.weights, strict=True):
            result += gradient.double() * float(weight)
            if self.max_norm < float("inf"):
                result *= min(1.0, self.max_norm / (float(result.norm()) + 1e-6))
        return result

    def clipped(self, max_norm: float) -> "Hypothesis":
        """Return the same mistakes with clipping after every micro-batch."""
        return Hypothesis(self.weights, (*self.causes, clipping_cause(max_norm)), max_norm)


def clipping_cause(max_norm: float) -> Cause:
    """Return the cause that a step clips after every micro-batch."""
    return Cause(
        "clipping per micro-batch",
        f"the gradient is clipped to a norm of {max_norm:.3g} after every micro-batch",
    )


def list_hypotheses(
    targets: np.ndarray,
    counts: dict[str, np.ndarray],
    accumulation_steps: int,
    num_processes: int = 1,
) -> list[Hypothesis]:
    """List the weights that a step may have used: the correct ones first, then those of mistakes,
    the most plausible first; then the same with repeated micro-batches, and in a short last window.

    Args:
        targets: What the loss divides by in each micro-batch, shape (micro-batches,).
        counts: What a step may count instead, by name; the same shape.
        accumulation_steps: Micro-batches of a full window over all processes.
        num_processes: Micro-batch k belongs to process k mod num_processes.
    """
    found = _table_of_weights(targets, counts, num_processes)
    num = len(targets)
    num_repeated = -num % num_processes
    if num_repeated:
        even_batches = Cause(
            "even_batches",
            f"Accelerate repeats the first {num_repeated} of {num} micro-batches, so that all "
            "processes have as many",
        )
        # Accelerate's loader repeats the first ones until all processes have the same number. The
        # weight of a repeated micro-batch is the sum of both its weights.
        order = np.arange(num + num_repeated) % num
        counts_with_repeated = {name: count[order] for name, count in counts.items()}
        found += [
            Hypothesis(np.bincount(order, h.weights), (*h.causes, even_batches))
            for h in _table_of_weights(targets[order], counts_with_repeated, num_processes)
        ]
    steps = -(-num // num_processes)
    full = -(-accumulation_steps // num_processes)
    if steps < full:
        factor = steps / full
        last_window = Cause(
            "last window",
            f"x{factor:.3g}: the last window has {steps} of {full} micro-batches, but is divided "
            "by the full GA",
        )
        found += [Hypothesis(h.weights * factor, (*h.causes, last_window)) for h in found]
    return found


def _table_of_weights(
    targets: np.ndarray, counts: dict[str, np.ndarray], num_processes: int
) -> list[Hypothesis]:
    """List the weights of a full window whose micro-batches are computed once.

    n_k: targets of a micro-batch, N: of the window, N_p: of a process, K_p: its micro-batches,
    P: processes, c_k, C and C_p: another count.
    """
    n = targets
    ones = np.ones(len(n))
    process = np.arange(len(n)) % num_processes

    def of_process(count: np.ndarray) -> np.ndarray:
        """Return, for each micro-batch, the sum of a count over those of its process."""
        return np.bincount(process, count)[process]

    targets_of_process = of_process(n)[:num_processes]
    is_same = np.allclose(targets_of_process, targets_of_process[0])
    averaged = Cause(
        "average of local means",
        "the processes' mean losses count the same, although the processes have different "
        "numbers of targets",
        f"{format_numbers(targets_of_process)} targets",
    )
    averaging = () if is_same else (averaged,)
    mean_of_means = _normalisation(
        "mean of means: equal weights of micro-batches with different numbers of targets",
        f"{format_numbers(n)} targets",
    )
    # Of micro-batches with equal numbers on each of several processes, averaging is the mistake.
    is_uneven = any(len(set(n[rank::num_processes])) > 1 for rank in range(num_processes))
    means = (mean_of_means,) if is_uneven else ()
    num_of_first = of_process(ones)[0]
    undivided = _normalisation(f"x{num_of_first:.2f}: {_UNDIVIDED}")
    summed = _normalisation(
        f"x{len(n):.2f}: {_UNDIVIDED}, and summed over the processes instead of averaged"
    )
    a_sum = _normalisation(
        f"x{n.sum() / num_processes:.4g}: the loss is a sum, not divided by a count"
    )
    table = [
        (n / n.sum(), ()),  # n_k / N
        (n / of_process(n) / num_processes, averaging),  # n_k / (N_p P)
        (1 / of_process(ones) / num_processes, (*means, *averaging)),  # 1 / (K_p P)
        (ones / num_processes, (undivided, *averaging)),  # 1 / P
        (ones, (summed, *averaging)),  # 1
        (n / num_processes, (a_sum,)),  # n_k / P
    ]
    for name, count in counts.items():
        if np.allclose(count, n):
            continue
        divided = _divided_by(name, n, counts)
        text = f"micro-batches are weighted by {name}, which the loss does not divide by"
        count_of_process = np.maximum(of_process(count), 1)
        table += [
            (n / count.sum(), (divided,)),  # n_k / C
            (count / count.sum(), (Cause(divided.name, text),)),  # c_k / C
            (n / count_of_process / num_processes, (divided, *averaging)),  # n_k / (C_p P)
        ]
    return [Hypothesis(weights, causes) for weights, causes in table]


def _divided_by(name: str, targets: np.ndarray, counts: dict[str, np.ndarray]) -> Cause:
    """Return the cause that a step divides the sum of the loss by another count."""
    num_targets = targets.sum()
    num_counted = counts[name].sum()
    text = (
        f"x{num_targets / num_counted:.4g}: the window has {num_targets:g} targets, but "
        f"{num_counted:g} are counted ({name})"
    )
    shifted = counts.get(SHIFTED_LABELS)
    if name == LABELS and shifted is not None and np.allclose(shifted, targets):
        return Cause("labels counted unshifted", f"{text}; column 0 is never predicted")
    return _normalisation(text)


def _normalisation(text: str, evidence: str = "") -> Cause:
    """Return the cause that micro-batches have wrong weights."""
    return Cause("normalisation", text, evidence)


def best_match(
    gradient: Tensor, micro_batch_gradients: Sequence[Tensor], hypotheses: Sequence[Hypothesis]
) -> tuple[Hypothesis, float]:
    """Find the hypothesis that explains the gradient of a step best.

    Args:
        gradient: The gradient that the step left, as a flat vector.
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss.
        hypotheses: The hypotheses, the most plausible first.

    Returns:
        Of those whose relative error is at most three times the smallest one plus 1e-7, the first
        with the fewest mistakes; and its relative error.
    """
    errors = [
        relative_error(hypothesis.gradient(micro_batch_gradients), gradient)
        for hypothesis in hypotheses
    ]
    limit = 3 * min(errors) + 1e-7
    close = [index for index, error in enumerate(errors) if error <= limit]
    best = min(close, key=lambda index: len(hypotheses[index].causes))
    return hypotheses[best], errors[best]


def fitted_weights(
    gradient: Tensor, micro_batch_gradients: Sequence[Tensor], divisors: Divisors
) -> Hypothesis:
    """Fit weights to the gradient of a step by least squares, where no known mistake explains it.

    The cause shows them as factors of the correct weights.
    """
    matrix = torch.stack(list(micro_batch_gradients)).double()
    # Normal equations: (G G^T) weights = G gradient, with the micro-batch gradients as rows of G.
    gram = (matrix @ matrix.T).cpu()
    projections = (matrix @ gradient.double()).cpu()
    weights = torch.linalg.lstsq(gram, projections, driver="gelsd").solution.numpy()
    shares = divisors.shares
    factors = np.divide(weights, shares, out=np.zeros_like(weights), where=shares != 0)
    shown = ", ".join(f"{factor:.3g}" for factor in factors[:8])
    text = f"micro-batches are weighted by x({shown}) of n_k / N"
    return Hypothesis(weights, (_normalisation(text),))


def half_precision(gradient: Tensor) -> str | None:
    """Return "bf16" or "fp16" if that dtype represents every element of a float32 gradient exactly,
    so that the step summed it in this dtype; None if neither does.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        if torch.equal(gradient, gradient.to(dtype).to(gradient.dtype)):
            return name
    return None
