"""What a micro-batch adds to the mean loss of its window. Only this file divides a loss by a number
of targets:

    mean loss of the window = sum over its micro-batches of (sum of the loss over the micro-batch's
    targets) / targets of the window

and, for a head whose loss is a sum of several means, the same for each of them. The proof, training
and evaluation call the same functions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import LossFunction, call_loss_fn, head_loss
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.router import Router
from hf_ga.exact.sums_of_means import SUM_OF_MEANS_HEADS
from hf_ga.exact.window import Window

# For each mean of a loss, the sum of the loss over the targets of a micro-batch.
Sums = tuple[Tensor | float, ...]
POSITIVE_LABELS = "positive labels"


def _count_shifted_labels(batch: Batch, num_samples: int) -> int:
    """Count the targets over which a causal language model's loss is averaged, by which the loss of
    a window is divided: all labels except -100 and those in the first column, which no token
    predicts.
    """
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())


def _count_labels(batch: Batch, num_samples: int) -> int:
    """Count the targets of a head that predicts every label except the ignored label -100; the loss
    of a window is divided by the sum of these numbers.
    """
    return int((batch["labels"] != IGNORED_LABEL).sum())


def _count_samples(batch: Batch, num_samples: int) -> int:
    """Count the targets of a head that has one target per sample, by which the loss of a window is
    divided.
    """
    return num_samples


def _count_attended_tokens(batch: Batch, num_samples: int) -> int:
    """Count the targets of a head whose loss averages over all real tokens, whatever their labels;
    the loss of a window is divided by the sum of these numbers.
    """
    return int(batch["attention_mask"].sum())


def _count_positive_labels(batch: Batch, num_samples: int) -> int:
    """Count the labels greater than 0, for a head to which label 0 is padding."""
    return int((batch["labels"] > 0).sum())


# How a head may count its targets: (collated batch on the host, its number of samples) -> targets.
COUNTING_RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": _count_shifted_labels,
    "labels": _count_labels,
    "samples": _count_samples,
    "attended tokens": _count_attended_tokens,
    POSITIVE_LABELS: _count_positive_labels,
}


@dataclass(frozen=True)
class FirstPass:
    """What `Loss.prepare` gets: a whole window, and the means to run forwards on it without
    gradients, before the forwards that are trained on.

    Attributes:
        window: The window.
        calls: The planned forwards of this rank, at least one. One with weight 0 is only there
            because other ranks make a forward, and must not count.
        totals: The numbers of targets of the window over all ranks.
        device: The device of the model.
        process_index: The index of this rank.
        parameters: The trainable parameters of the model.
        forward: Returns the outputs of a planned forward, without gradients. The forward that is
            trained on later returns the same, as dropout masks are the same.
        all_reduce: Sums a tensor over the ranks.
        scaled: Multiplies a tensor by the fp16 loss scale.
    """

    window: Window
    calls: Sequence[Call]
    totals: Counts
    device: torch.device
    process_index: int
    parameters: Sequence[nn.Parameter]
    forward: Callable[[Call], Any]
    all_reduce: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor], Tensor]

    def from_first_rank(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's tensor, such as a gradient of the window's loss, to all ranks,
        as they may have rounded differently: an all-reduce in which the other ranks pass zeros.
        """
        return self.all_reduce(tensor if self.process_index == 0 else torch.zeros_like(tensor))


class Loss(Hook):
    """Base class: how a loss is split over the micro-batches of a window.

    `sums` returns sums over the targets of a micro-batch, which add up over micro-batches, and
    `mean` divides them by numbers of targets.

    Attributes:
        name: Its name in reports.
        num_means: The loss is a sum of this many means.
        needs_same_padded_length: Numbers of targets depend on the padded length, so all
            micro-batches of a window must be padded to the same length.
        counts_in_forward: The number of targets is known only after the forward, not before on the
            host.
        needs_first_pass: `prepare` must be called before the window's forwards.
        is_audited: Audits can recompute `sums` for other groups of samples.
        uses_parameters: The loss depends on trainable parameters directly, not only through the
            model's outputs.
        direct_gradients: After `prepare`, the gradients of these parameters in this window,
            multiplied by the fp16 loss scale; the same on all ranks. They are added to the window's
            gradient once.
    """

    name = ""
    num_means = 1
    needs_same_padded_length = False
    counts_in_forward = False
    needs_first_pass = False
    is_audited = True
    uses_parameters = False
    direct_gradients: Sequence[tuple[nn.Parameter, Tensor]] = ()

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets of a collated batch on the host, before any forward of its window.

        Args:
            batch: The batch.
            num_samples: Its number of samples.

        Returns:
            One number for each mean; () if targets are counted in the forward.
        """
        raise NotImplementedError

    def contributes(self, counts: Counts) -> bool:
        """Whether a micro-batch with these numbers of targets may contribute to the window's loss.

        One without targets does not, and its mean would be 0 / 0. If the numbers are not known yet
        (`()`), it may.
        """
        return not counts or any(counts)

    def prepare(self, first_pass: FirstPass) -> Counts:
        """Compute what the loss needs to know about the whole window before its first training
        forward. Called only if `needs_first_pass`.

        Args:
            first_pass: The window, and functions that run forwards without gradients.

        Returns:
            The `totals` that `mean` gets in this window.
        """
        return first_pass.totals

    @property
    def additive(self) -> "Loss":
        """The loss that the proof and the audits test for whether its sums over micro-batches add
        up to that of their window: this one, unless a subclass has another.
        """
        return self

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Sum the loss of a micro-batch over its targets, and count them.

        Args:
            outputs: What the model returned for `call.batch`.
            call: The forward of the micro-batch.

        Returns:
            (sums, counts), both with one item for each mean: the sum of the loss (a scalar of at
            least float32; 0.0 without targets) and the number of targets.

        Raises:
            LossNotAdditive: If the model returned no loss.
        """
        raise NotImplementedError

    def mean(self, sums: Sums, totals: Counts) -> Tensor | float:
        """Divide loss sums of a micro-batch by numbers of targets, and add up the quotients: one
        for each mean of the loss.

        Args:
            sums: The sums of a micro-batch from `sums`.
            totals: With the numbers of targets of the window, the result is what the micro-batch
                adds to the window's mean loss; with its own, it is the micro-batch's mean loss.

        Returns:
            A scalar. Means over no targets are skipped.
        """
        total_loss: Tensor | float = 0.0
        for sum_of_loss, num_targets in zip(sums, totals, strict=True):
            if num_targets:
                total_loss = total_loss + sum_of_loss / num_targets
        return total_loss


class HeadMean(Loss):
    """The loss of a model's head that is one mean over its targets.

    Args:
        name: How the head counts its targets: a key of `COUNTING_RULES`.
    """

    def __init__(self, name: str) -> None:
        """Create the loss of a head, which is a mean over the targets that the rule of this name
        counts.
        """
        self.name = name

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets of a batch by the head's rule in `COUNTING_RULES`."""
        return (COUNTING_RULES[self.name](batch, num_samples),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Sum the loss over the targets of a micro-batch: the head's mean loss times the number of
        targets; 0.0 without targets.
        """
        (num_targets,) = call.counts
        if not num_targets:
            return (0.0,), call.counts  # the head's mean is 0 / 0
        return (head_loss(outputs) * num_targets,), call.counts


class SumOfMeans(Loss):
    """The loss of a model's head that is a sum of several means over different targets. Each mean
    is recomputed from the logits.

    Args:
        name: The kind of head: a key of `SUM_OF_MEANS_HEADS`.
    """

    def __init__(self, name: str) -> None:
        """Create the loss of the kind of head with this name: a sum of several means over different
        targets.
        """
        self.name = name
        self.means = SUM_OF_MEANS_HEADS[name]
        self.num_means = len(self.means)
        self.needs_same_padded_length = any(
            mean.count_depends_on_padded_length for mean in self.means
        )

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets in a batch separately for each mean of the head's loss."""
        return tuple(mean.count(batch) for mean in self.means)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Sum the loss over the targets of a micro-batch separately for each mean of the head's
        loss; 0.0 for a mean without targets.
        """
        sums = [
            mean.total(outputs, call.batch) if num_targets else 0.0
            for mean, num_targets in zip(self.means, call.counts, strict=True)
        ]
        return tuple(sums), call.counts


class UserLoss(Loss):
    """The user's `loss_fn(outputs, batch) -> (sum of the loss, number of targets)`.

    If `loss_fn` has a method `count_targets(batch) -> number`, targets are counted on the host
    before any forward, otherwise in the forward.
    """

    name = "loss_fn"

    def __init__(self, loss_fn: LossFunction) -> None:
        """Wrap the user's loss function, and find out whether it can count the targets of a window
        before its forwards: whether it has a method `count_targets`.
        """
        self.loss_fn = loss_fn
        self.counts_in_forward = not hasattr(loss_fn, "count_targets")

    def contributes(self, counts: Counts) -> bool:
        """Whether a micro-batch may contribute to the window's loss: always, as the sum that the
        user's `loss_fn` returns may have a gradient although its number of targets is 0.
        """
        return True

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets of a batch by the user's `loss_fn.count_targets`; () if it has no such
        method, so that they are counted in the forward.
        """
        return () if self.counts_in_forward else (self.loss_fn.count_targets(batch),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Return the sum of the loss over a micro-batch's targets and their number from the user's
        loss function. A sum that is NaN becomes 0.0 if there are no targets.
        """
        total, num_targets = call_loss_fn(self.loss_fn, outputs, call.batch)
        if num_targets == 0 and bool(total.isnan()):
            total = 0.0  # the mean over no targets is 0 / 0
        return (total,), call.counts or (num_targets,)


class WithRouter(Loss):
    """Another loss plus the load-balancing loss of a mixture of experts.

    The balancing loss has one more item, the last, in sums, counts and totals: the counts of
    `Router.take`.

    Args:
        loss: The loss without the balancing loss.
        router: Computes the balancing loss.
    """

    needs_first_pass = True

    def __init__(self, loss: Loss, router: Router) -> None:
        """Combine a loss with the load-balancing loss of a mixture of experts; the combined loss
        has the name of the first one.
        """
        self.loss = loss
        self.router = router
        self.name = loss.name
        self.num_means = loss.num_means
        self.needs_same_padded_length = loss.needs_same_padded_length

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the load-balancing loss that a mixture of experts itself adds
        to its loss is 0, so that `mean` can add that of the whole window.
        """
        return self.router.patched()

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets of the loss without the load-balancing loss (mixture of experts) in a
        batch.
        """
        return self.loss.count(batch, num_samples)

    def contributes(self, counts: Counts) -> bool:
        """Whether a micro-batch contributes to the window's loss: always, as the load-balancing
        loss of a mixture of experts counts the tokens of a micro-batch without targets, too.
        """
        return True

    def prepare(self, first_pass: FirstPass) -> Counts:
        """Count how often the router of the mixture of experts chooses each expert in the whole
        window, over all ranks, by forwards without gradients.

        Returns:
            The numbers of targets of the window, then the router's counts as the last item.
        """
        device = first_pass.device
        local_counts = torch.zeros(sum(self.router.sizes), dtype=sum_dtype(device), device=device)
        for call in first_pass.calls:
            first_pass.forward(call)
            local_counts += self.router.take().detach() * call.weight
        window_counts = first_pass.all_reduce(local_counts).float()
        return (*first_pass.totals, window_counts)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Return a micro-batch's sums and counts of the loss without load balancing, and the counts
        of the mixture of experts' router (`Router.take`) as the last item of both.
        """
        sums, counts = self.loss.sums(outputs, call)
        router_counts = self.router.take()
        return (*sums, router_counts), (*counts, router_counts.detach())

    def mean(self, sums: Sums, totals: Counts) -> Tensor | float:
        """Return what a micro-batch adds to the window's mean loss: the mean of the loss without
        load balancing, plus the load-balancing loss of the mixture of experts.
        """
        *other_sums, router_counts = sums
        *other_totals, window_router_counts = totals
        balancing_loss = self.router.loss(router_counts, window_router_counts)
        return self.loss.mean(tuple(other_sums), tuple(other_totals)) + balancing_loss
