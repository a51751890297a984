"""Which wrong weights of the micro-batches explain the gradient of an arm (a training step under
test): match it against weighted sums of the micro-batches' correct gradients.

The gradient of a window is the sum over its micro-batches of u_k g_k, with g_k the gradient of
micro-batch k's own mean loss. Correct is u_k = n_k / N (targets of the micro-batch / targets of the
window). The usual mistakes are other weights u_k, or clipping. On several processes micro-batch k
belongs to process k mod num_processes; DDP and FSDP average the processes' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.gradients import relative_error
from hf_ga.check.rows import Cause

# What a step may count, see `divisors.count_usual`.
LABELS = "labels"
SHIFTED_LABELS = "shifted labels"  # without column 0, which causal models do not predict
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


@dataclass(frozen=True)
class Split:
    """What a training step may know of the micro-batches of a window.

    Attributes:
        targets: What the loss divides by in each micro-batch, its number of targets, shape
            (micro-batches,).
        counts: What a step may count instead, by name; the same shape.
        accumulation_steps: Micro-batches of a full window over all processes.
        num_processes: Micro-batch k belongs to process k mod num_processes.
    """

    targets: np.ndarray
    counts: dict[str, np.ndarray]
    accumulation_steps: int
    num_processes: int = 1

    @property
    def process(self) -> np.ndarray:
        """The process of each micro-batch."""
        return np.arange(len(self.targets)) % self.num_processes

    def of_process(self, count: np.ndarray) -> np.ndarray:
        """Return the sum of a count over the micro-batches of each process."""
        return np.bincount(self.process, count, self.num_processes)

    def wrong_counts(self) -> dict[str, np.ndarray]:
        """Return what a step may count, without what is the divisor of the loss."""
        return {
            name: count
            for name, count in self.counts.items()
            if not np.allclose(count, self.targets)
        }

    def repeated(self, order: np.ndarray) -> "Split":
        """Return the split with these micro-batches, some of them twice."""
        counts = {name: count[order] for name, count in self.counts.items()}
        return replace(self, targets=self.targets[order], counts=counts)


def list_hypotheses(split: Split) -> list[Hypothesis]:
    """List the micro-batch weights that a training step may have used: the correct ones first, then
    single mistakes, then pairs of them.

    Returns:
        The hypotheses, the most plausible first. If the processes have different numbers of
        micro-batches, those in which Accelerate repeats some of them follow.
    """
    found = _hypotheses_without_repeats(split)
    num = len(split.targets)
    num_repeated = -num % split.num_processes
    if not num_repeated:
        return found
    # Accelerate's loader repeats the first micro-batches until all processes have the same number.
    order = np.arange(num + num_repeated) % num
    even_batches = Cause(
        "even_batches",
        f"Accelerate repeats the first {num_repeated} of {num} micro-batches, so that all "
        "processes have as many",
    )
    for hypothesis in _hypotheses_without_repeats(split.repeated(order)):
        # The weight of a repeated micro-batch is the sum of both its weights.
        weights = np.bincount(order, hypothesis.weights)
        found.append(Hypothesis(weights, (*hypothesis.causes, even_batches)))
    return found


def _hypotheses_without_repeats(split: Split) -> list[Hypothesis]:
    """List the micro-batch weights of a step that computes each micro-batch once."""
    n = split.targets
    num_processes = split.num_processes
    correct = Hypothesis(n / n.sum())
    equal_weights = _equal_weight_hypotheses(split)
    summed_loss = _mistake(
        n / num_processes,
        f"x{n.sum() / num_processes:.4g}: the loss is a sum, not divided by a count",
    )
    wrong_counts = _wrong_count_hypotheses(split)
    targets_of_process = split.of_process(n)
    if np.allclose(targets_of_process, targets_of_process[0]):
        found = [correct, *equal_weights, summed_loss, *wrong_counts]
        return found + _short_window_hypotheses(found, split)

    # The processes have different numbers of targets: averaging their mean losses is a mistake.
    averaged = Cause(
        "average of local means",
        "the processes' mean losses count the same, although the processes have different "
        "numbers of targets",
        _format_target_counts(targets_of_process),
    )

    def averaged_means(count: np.ndarray) -> np.ndarray:
        """Return the weights of a step whose processes each divide by their own count."""
        of_process = np.maximum(split.of_process(count), 1)
        return n / of_process[split.process] / num_processes

    found = [correct, Hypothesis(averaged_means(n), (averaged,))]
    for hypothesis in equal_weights:
        found.append(Hypothesis(hypothesis.weights, (*hypothesis.causes, averaged)))
    found += [summed_loss, *wrong_counts]
    for name, count in split.wrong_counts().items():
        causes = (_divided_by_wrong_count(split, name), averaged)
        found.append(Hypothesis(averaged_means(count), causes))
    return found + _short_window_hypotheses(found, split)


def _equal_weight_hypotheses(split: Split) -> list[Hypothesis]:
    """List the weights of a training step that gives all micro-batches of a process the same
    weight: the mean of means, means that are summed, and summed over the processes too.
    """
    n = split.targets
    num_processes = split.num_processes
    micro_batches_of_process = np.bincount(split.process)
    equal = 1 / micro_batches_of_process[split.process] / num_processes
    mean_of_means = Hypothesis(equal)
    has_unequal_counts = [len(set(n[rank::num_processes])) > 1 for rank in range(num_processes)]
    # With equal counts on each of several processes it is not a mistake of its own.
    if num_processes == 1 or any(has_unequal_counts):
        text = "mean of means: equal weights of micro-batches with different numbers of targets"
        mean_of_means = _mistake(equal, text, _format_target_counts(n))
    summed_means = _mistake(
        np.full(len(n), 1 / num_processes), f"x{micro_batches_of_process[0]:.2f}: {_UNDIVIDED}"
    )
    summed_over_processes = _mistake(
        np.ones(len(n)),
        f"x{len(n):.2f}: {_UNDIVIDED}, and summed over the processes instead of averaged",
    )
    return [mean_of_means, summed_means, summed_over_processes]


def _wrong_count_hypotheses(split: Split) -> list[Hypothesis]:
    """For each wrong count, list two mistakes of a training step: it divides the sum of the loss by
    that, or weights the micro-batches by it.
    """
    found = []
    for name, count in split.wrong_counts().items():
        divided = _divided_by_wrong_count(split, name)
        found.append(Hypothesis(split.targets / count.sum(), (divided,)))
        text = f"micro-batches are weighted by {name}, which the loss does not divide by"
        found.append(Hypothesis(count / count.sum(), (Cause(divided.name, text),)))
    return found


def _divided_by_wrong_count(split: Split, name: str) -> Cause:
    """Return the cause that a step divides the sum of the loss by another count."""
    num_targets = split.targets.sum()
    num_counted = split.counts[name].sum()
    text = (
        f"x{num_targets / num_counted:.4g}: the window has {num_targets:g} targets, but "
        f"{num_counted:g} are counted ({name})"
    )
    shifted = split.counts.get(SHIFTED_LABELS)
    if name == LABELS and shifted is not None and np.allclose(shifted, split.targets):
        return Cause("labels counted unshifted", f"{text}; column 0 is never predicted")
    return Cause("normalisation", text)


def _short_window_hypotheses(hypotheses: list[Hypothesis], split: Split) -> list[Hypothesis]:
    """For a short last window, list the same weights multiplied by the factor of a training step
    that divides by the accumulation steps of a full window; an empty list for a full window.
    """
    steps = -(-len(split.targets) // split.num_processes)
    full = -(-split.accumulation_steps // split.num_processes)
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


def _mistake(weights: np.ndarray, text: str, evidence: str = "") -> Hypothesis:
    """Build the hypothesis that a training step used wrong weights because of one mistake."""
    return Hypothesis(weights, (Cause("normalisation", text, evidence),))


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


def format_numbers(numbers: np.ndarray) -> str:
    """Format what micro-batches are divided by as `8, 3, 5`, with at most six numbers."""
    shown = [f"{number:g}" for number in numbers[:6]]
    if len(numbers) > 6:
        shown.append("...")
    return ", ".join(shown)


def _format_target_counts(counts: np.ndarray) -> str:
    """Format numbers of targets for an equivalence report as `8, 3, 5 targets`."""
    return f"{format_numbers(counts)} targets"
