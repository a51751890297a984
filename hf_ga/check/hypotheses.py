"""Which wrong weights of the micro-batches explain the gradient of an arm (a training step under
test): match it against weighted sums of the micro-batches' correct gradients.

The gradient of a window is the sum over its micro-batches of u_k g_k, with g_k the gradient of
micro-batch k's own mean loss. Correct is u_k = n_k / N (targets of the micro-batch / targets of the
window). The usual mistakes are other weights u_k, or clipping. On several processes micro-batch k
belongs to process k mod num_processes; DDP and FSDP average the processes' gradients.
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
    """One possible explanation of a training step's gradient: the weights with which it sums the
    micro-batches' gradients, and the mistakes that lead to these weights.

    Attributes:
        weights: Weight of each micro-batch's gradient, shape (micro-batches,). Correct is the
            micro-batch's share of the window's targets.
        causes: The mistakes; none for the correct weights.
        max_norm: L2 norm to which `.grad` is clipped after each micro-batch. inf: no clipping.
    """

    weights: np.ndarray
    causes: tuple[Cause, ...] = ()
    max_norm: float = float("inf")

    def gradient(self, micro_batch_gradients: Sequence[Tensor]) -> Tensor:
        """Compute the gradient that a training step with these weights would leave.

        Args:
            micro_batch_gradients: For each micro-batch, the gradient of its own mean loss as one
                flat vector.

        Returns:
            The weighted sum in float64; with a `max_norm`, clipped after each micro-batch.
        """
        result = torch.zeros_like(micro_batch_gradients[0], dtype=torch.float64)
        for gradient, weight in zip(micro_batch_gradients, self.weights, strict=True):
            if weight:  # the mean over no targets is NaN, with weight 0
                result += gradient.double() * float(weight)
            if self.max_norm < float("inf"):
                result *= min(1.0, self.max_norm / (float(result.norm()) + 1e-6))
        return result

    def clipped(self, max_norm: float) -> "Hypothesis":
        """Return a hypothesis with the same weights of the micro-batches, in which the training
        step also clips the gradient to this L2 norm after every micro-batch. The clipping is added
        to its causes.
        """
        cause = Cause(
            "clipping per micro-batch",
            f"the gradient is clipped to a norm of {max_norm:.3g} after every micro-batch",
        )
        return Hypothesis(self.weights, (*self.causes, cause), max_norm)


def list_hypotheses(
    counts: dict[str, np.ndarray],
    loss_rule: str,
    accumulation_steps: int,
    num_processes: int = 1,
) -> list[Hypothesis]:
    """List the micro-batch weights that a training step may have used: the correct ones first, then
    single mistakes, then pairs of them.

    Args:
        counts: For each counting rule, the number of targets of each micro-batch, shape
            (micro-batches,).
        loss_rule: The counting rule that is correct for the loss.
        accumulation_steps: Micro-batches of a full window over all processes.
        num_processes: Micro-batch k belongs to process k mod num_processes.

    Returns:
        The hypotheses, the most plausible first. If the processes have different numbers of
        micro-batches, those in which Accelerate repeats some of them follow.
    """
    found = _hypotheses_without_repeats(counts, loss_rule, accumulation_steps, num_processes)
    num = len(counts[loss_rule])
    num_repeated = -num % num_processes
    if not num_repeated:
        return found
    # Accelerate's loader repeats the first micro-batches until all processes have the same number.
    order = np.arange(num + num_repeated) % num
    even_batches = Cause(
        "even_batches",
        f"Accelerate repeats the first {num_repeated} of {num} micro-batches, so that all "
        "processes have as many",
    )
    counts_with_repeats = {name: count[order] for name, count in counts.items()}
    for hypothesis in _hypotheses_without_repeats(
        counts_with_repeats, loss_rule, accumulation_steps, num_processes
    ):
        # The weight of a repeated micro-batch is the sum of both its weights.
        weights = np.bincount(order, hypothesis.weights)
        found.append(Hypothesis(weights, (*hypothesis.causes, even_batches)))
    return found


def _hypotheses_without_repeats(
    counts: dict[str, np.ndarray], loss_rule: str, accumulation_steps: int, num_processes: int
) -> list[Hypothesis]:
    """List the micro-batch weights that a training step may have used if it computes each
    micro-batch once.

    Args:
        counts: For each counting rule, the number of targets of each micro-batch, shape
            (micro-batches,).
        loss_rule: The counting rule that is correct for the loss.
        accumulation_steps: Micro-batches of a full window over all processes.
        num_processes: Micro-batch k belongs to process k mod num_processes.
    """
    n = counts[loss_rule]  # targets of each micro-batch
    correct = Hypothesis(n / n.sum())
    equal_weights = _equal_weight_hypotheses(n, num_processes)
    summed_loss = _mistake(
        n / num_processes,
        f"x{n.sum() / num_processes:.4g}: the loss is a sum, not divided by a count",
    )
    wrong_counts = _wrong_count_hypotheses(counts, loss_rule)

    process = np.arange(len(n)) % num_processes  # the process of each micro-batch
    targets_of_process = np.bincount(process, n, num_processes)
    if len(set(targets_of_process)) == 1:
        found = [correct, *equal_weights, summed_loss, *wrong_counts]
        return found + _short_window_hypotheses(found, len(n), accumulation_steps, num_processes)

    # The processes have different numbers of targets: averaging their mean losses is a mistake.
    averaged = Cause(
        "average of local means",
        "the processes' mean losses count the same, although the processes have different "
        "numbers of targets",
        _format_target_counts(targets_of_process),
    )
    # For each micro-batch, what its loss is divided by: its process's count x num_processes.
    divisors = {
        name: np.maximum(np.bincount(process, count), 1)[process] * num_processes
        for name, count in counts.items()
    }
    found = [
        correct,
        Hypothesis(n / divisors[loss_rule], (averaged,)),
        *(
            Hypothesis(hypothesis.weights, (*hypothesis.causes, averaged))
            for hypothesis in equal_weights
        ),
        summed_loss,
        *wrong_counts,
    ]
    other_rules = [name for name in counts if name != loss_rule]
    divided_by_wrong_count = wrong_counts[::2]  # the first of the two hypotheses for each rule
    for name, hypothesis in zip(other_rules, divided_by_wrong_count, strict=True):
        found.append(Hypothesis(n / divisors[name], (*hypothesis.causes, averaged)))
    return found + _short_window_hypotheses(found, len(n), accumulation_steps, num_processes)


def _equal_weight_hypotheses(n: np.ndarray, num_processes: int) -> list[Hypothesis]:
    """List the weights of a training step that gives all micro-batches of a process the same
    weight: the mean of means, means that are summed, and means that are summed over the processes
    too.

    Args:
        n: Number of targets of each micro-batch, shape (micro-batches,).
        num_processes: Micro-batch k belongs to process k mod num_processes.

    Returns:
        The three hypotheses in this order.
    """
    process = np.arange(len(n)) % num_processes  # the process of each micro-batch
    micro_batches_of_process = np.bincount(process)
    equal = 1 / micro_batches_of_process[process] / num_processes
    mean_of_means = Hypothesis(equal)
    has_unequal_counts = [len(set(n[rank::num_processes])) > 1 for rank in range(num_processes)]
    # With equal counts on each of several processes it is not a mistake of its own.
    if num_processes == 1 or any(has_unequal_counts):
        text = "mean of means: equal weights of micro-batches with different numbers of targets"
        mean_of_means = _mistake(equal, text, evidence=_format_target_counts(n))
    summed_means = _mistake(
        np.full(len(n), 1 / num_processes), f"x{micro_batches_of_process[0]:.2f}: {_UNDIVIDED}"
    )
    summed_over_processes = _mistake(
        np.ones(len(n)),
        f"x{len(n):.2f}: {_UNDIVIDED}, and summed over the processes instead of averaged",
    )
    return [mean_of_means, summed_means, summed_over_processes]


def _short_window_hypotheses(
    hypotheses: list[Hypothesis],
    num_micro_batches: int,
    accumulation_steps: int,
    num_processes: int,
) -> list[Hypothesis]:
    """For a short last window, list the same weights multiplied by the factor of a training step
    that divides by the accumulation steps of a full window; an empty list for a full window.

    Args:
        hypotheses: Weights without this mistake.
        num_micro_batches: Micro-batches of this window over all processes.
        accumulation_steps: Micro-batches of a full window over all processes.
        num_processes: Number of processes.
    """
    steps = -(-num_micro_batches // num_processes)
    full = -(-accumulation_steps // num_processes)
    if steps >= full:
        return []
    factor = steps / full
    cause = Cause(
        "last window",
        f"x{factor:.3g}: the last window has {steps} of {full} micro-batches, but is divided by "
        "the full GA",
    )
    return [
        Hypothesis(hypothesis.weights * factor, (*hypothesis.causes, cause))
        for hypothesis in hypotheses
    ]


def best_match(
    gradient: Tensor, micro_batch_gradients: Sequence[Tensor], hypotheses: Sequence[Hypothesis]
) -> tuple[Hypothesis, float]:
    """Find the hypothesis about a training step's micro-batch weights that explains its gradient
    best.

    Args:
        gradient: The gradient that the training step left, as a flat vector.
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss.
        hypotheses: The hypotheses, the most plausible first.

    Returns:
        The first hypothesis whose relative error is at most three times the smallest one plus 1e-7,
        and its relative error.
    """
    errors = [
        relative_error(hypothesis.gradient(micro_batch_gradients), gradient)
        for hypothesis in hypotheses
    ]
    close = 3 * min(errors) + 1e-7
    first = next(i for i, error in enumerate(errors) if error <= close)
    return hypotheses[first], errors[first]


def fit_micro_batch_weights(
    gradient: Tensor, micro_batch_gradients: Sequence[Tensor]
) -> tuple[np.ndarray, float]:
    """Find, by least squares, the micro-batch weights whose weighted sum of gradients is closest to
    a training step's gradient. Used where no known mistake explains the gradient.

    Args:
        gradient: The gradient that the training step left, shape (elements,).
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss, shape
            (elements,).

    Returns:
        The weights, float64 of shape (micro-batches,), and the relative error of their weighted
        sum.
    """
    matrix = torch.stack(list(micro_batch_gradients)).double()
    # Normal equations: (G G^T) weights = G gradient, with the micro-batch gradients as rows of G.
    gram = (matrix @ matrix.T).cpu()
    projections = (matrix @ gradient.double()).cpu()
    weights = torch.linalg.lstsq(gram, projections, driver="gelsd").solution.numpy()
    return weights, relative_error(Hypothesis(weights).gradient(micro_batch_gradients), gradient)


def half_precision(gradient: Tensor) -> str | None:
    """Return "bf16" or "fp16" if that dtype represents every element of a training step's float32
    gradient exactly, which suggests that the step summed the gradient in it; None if neither does.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        if torch.equal(gradient, gradient.to(dtype).to(gradient.dtype)):
            return name
    return None


def _format_target_counts(counts: np.ndarray) -> str:
    """Format numbers of targets for an equivalence report as `8, 3, 5 targets`, with at most six
    numbers.
    """
    shown = [f"{count:g}" for count in counts[:6]]
    if len(counts) > 6:
        shown.append("...")
    return f"{', '.join(shown)} targets"


def _mistake(
    weights: np.ndarray, text: str, cause_name: str = "normalisation", evidence: str = ""
) -> Hypothesis:
    """Build the hypothesis that a training step used `weights` because of one mistake.

    Args:
        weights: Weight of each micro-batch's gradient, shape (micro-batches,).
        text: What the training step does wrong.
        cause_name: Short name of the mistake.
        evidence: The measured values that show the mistake, or "".
    """
    return Hypothesis(weights, (Cause(cause_name, text, evidence),))


def _wrong_count_hypotheses(counts: dict[str, np.ndarray], loss_rule: str) -> list[Hypothesis]:
    """For each counting rule other than the loss's own, list two mistakes of a training step: it
    divides the loss by the targets that this rule counts, or weights the micro-batches by them.

    Args:
        counts: For each counting rule, the number of targets of each micro-batch, shape
            (micro-batches,).
        loss_rule: The counting rule that is correct for the loss.
    """
    n = counts[loss_rule]
    found = []
    for rule, wrong_n in counts.items():
        if rule == loss_rule:
            continue
        cause_name = "normalisation"
        explanation = ""
        if loss_rule == "shifted labels" and rule == "labels":
            cause_name = "labels counted unshifted"
            explanation = "; column 0 is never predicted"
        ratio = n.sum() / wrong_n.sum()
        divided = (
            f"x{ratio:.4g}: the window has {n.sum():g} targets ({loss_rule}), but "
            f"{wrong_n.sum():g} are counted ({rule}){explanation}"
        )
        weighted = f"micro-batches are weighted by {rule} instead of {loss_rule}{explanation}"
        found.append(_mistake(n / wrong_n.sum(), divided, cause_name))
        found.append(_mistake(wrong_n / wrong_n.sum(), weighted, cause_name))
    return found
