"""What a micro-batch adds to the mean loss of its window. This is the one owner of the divisor:

    mean loss of the window = sum over its micro-batches of (mean loss x targets of the micro-batch) / targets of the window

and, for a head whose loss is a sum of several means, the same for each of them. The proof, training and evaluation call the same
functions.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import LossFunction, head_loss, own_loss
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.router import Router, flat_counts
from hf_ga.exact.sums_of_means import KINDS

Sums = tuple[Tensor | float, ...]


def _count_shifted_labels(batch: Batch, num_samples: int) -> int:
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())  # a causal head predicts column 1 first


def _count_labels(batch: Batch, num_samples: int) -> int:
    return int((batch["labels"] != IGNORED_LABEL).sum())


def _count_samples(batch: Batch, num_samples: int) -> int:
    return num_samples


def _count_attended(batch: Batch, num_samples: int) -> int:
    return int(batch["attention_mask"].sum())  # tokens that are not padding, whatever their labels


# How a head may count its targets: (collated batch on the host, samples) -> targets.
COUNTING_RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": _count_shifted_labels,
    "labels": _count_labels,
    "samples": _count_samples,
    "attended tokens": _count_attended,
}


class Loss(Hook):
    """One way to split a loss over micro-batches.

    Attributes:
        name: how reports call it.
        num_means: means that the loss is a sum of.
        one_width: the counts depend on the padded width, so all micro-batches of a window need the same width.
        counts_in_forward: targets are known only after the forward, not on the host.
        has_own_count: the number of targets is the user's, weights included, so it need not be that of the loader's
            `target_counts`.
    """

    name = ""
    num_means = 1
    one_width = False
    counts_in_forward = False
    has_own_count = False

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Targets of a collated batch on the host, one number for each mean."""
        raise NotImplementedError

    def contributes(self, counts: Counts) -> bool:
        """Whether a micro-batch with these counts adds anything. Without targets, its own mean would be 0 / 0."""
        return any(counts)

    def prepare(
        self,
        calls: Iterable[Call],
        forward: Callable[[Call], Any],
        all_reduce: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """A first pass over this rank's calls, for losses that need one. all_reduce: sums a tensor over the ranks."""

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """For each mean, the loss summed over the targets (a scalar of at least float32; 0.0 without targets), and their number.

        Args:
            outputs: of the model on `call.batch`.

        Raises:
            LossNotAdditive: the model returned no loss.
        """
        raise NotImplementedError

    def term(self, outputs: Any, call: Call, totals: Counts) -> tuple[Tensor | float, Counts]:
        """What the micro-batch adds to the mean loss of its window, a scalar, and its targets.

        Args:
            totals: targets of the window, over all ranks.
        """
        sums, counts = self.sums(outputs, call)
        return sum((s / total for s, n, total in zip(sums, counts, totals, strict=True) if n), start=0.0), counts

    def tally(self, outputs: Any, call: Call) -> Tensor:
        """Sums and counts in one float64 vector on the device, which adds up over micro-batches; see `mean_of`."""
        sums, counts = self.sums(outputs, call)
        device = next(s.device for s in (*sums, *call.batch.values()) if isinstance(s, Tensor))
        dtype = sum_dtype(device)
        values = (
            value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)  # no transfer
            for value in (*sums, *counts)
        )
        return torch.stack([*values])

    def mean_of(self, tally: Tensor) -> Tensor:
        """The mean loss of all that was added to `tally`; NaN without targets."""
        sums, counts = tally[: self.num_means], tally[self.num_means : 2 * self.num_means]
        counted = counts > 0
        return (sums[counted] / counts[counted]).sum() if bool(counted.any()) else counts.new_tensor(float("nan"))

    def targets_of(self, tally: Tensor) -> float:
        """The targets of all that was added to `tally`."""
        return float(tally[self.num_means : 2 * self.num_means].detach().sum())


class HeadMean(Loss):
    """A head whose loss is one mean over its targets. name: a key of `COUNTING_RULES`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return (COUNTING_RULES[self.name](batch, num_samples),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        (number,) = call.counts
        return (head_loss(outputs) * number if number else 0.0,), call.counts


class SumOfMeans(Loss):
    """A head whose loss is a sum of several means, each recomputed from the logits. name: a key of `KINDS`."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, KINDS[name]
        self.num_means, self.one_width = len(self.kind.means), self.kind.one_width

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return tuple(mean.count(batch) for mean in self.kind.means)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        means = zip(self.kind.means, call.counts, strict=True)
        return tuple(mean.total(outputs, call.batch) if number else 0.0 for mean, number in means), call.counts


class OwnSum(Loss):
    """The user's `loss_fn(outputs, batch) -> (sum of the loss, number of targets)`.

    A `loss_fn` with a method `count_targets(batch) -> number` has its targets counted on the host, before any forward.
    """

    name = "loss_fn"
    has_own_count = True

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self.counts_in_forward = not hasattr(loss_fn, "count_targets")

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return (self.loss_fn.count_targets(batch),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        total, number = own_loss(self.loss_fn, outputs, call.batch)
        return (total,), call.counts or (float(number),)


class WithRouter(Loss):
    """Another loss plus a router's balancing loss, whose shares are those of the whole window."""

    def __init__(self, loss: Loss, router: Router) -> None:
        self.loss, self.router = loss, router
        self.name, self.num_means, self.one_width = loss.name, loss.num_means, loss.one_width
        self._window_counts: Tensor | None = None

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.router.patched()

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return self.loss.count(batch, num_samples)

    def contributes(self, counts: Counts) -> bool:
        return True  # its tokens are routed

    @torch.no_grad()
    def prepare(
        self,
        calls: Iterable[Call],
        forward: Callable[[Call], Any],
        all_reduce: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """Count the choices of the whole window, by forwards that are repeated with gradients: the same dropout."""
        own = torch.zeros(sum(self.router.sizes), dtype=sum_dtype(device), device=device)
        for call in calls:
            forward(call)
            own += flat_counts(self.router.take()) * call.weight
        self._window_counts = all_reduce(own)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        return self.loss.sums(outputs, call)

    def term(self, outputs: Any, call: Call, totals: Counts) -> tuple[Tensor | float, Counts]:
        value, counts = self.loss.term(outputs, call, totals)
        return value + self.router.term(self.router.take(), self._window_counts), counts

    def tally(self, outputs: Any, call: Call) -> Tensor:
        return torch.cat([self.loss.tally(outputs, call), flat_counts(self.router.take())])

    def mean_of(self, tally: Tensor) -> Tensor:
        return self.loss.mean_of(tally) + self.router.mean(tally[2 * self.num_means :])
