"""What a micro-batch adds to the mean loss of its window. This is the one owner of the divisor:

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
from hf_ga.exact.forward import LossFunction, head_loss, own_loss
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.router import Router
from hf_ga.exact.sums_of_means import KINDS
from hf_ga.exact.window import Window

Sums = tuple[Tensor | float, ...]
POSITIVE_LABELS = "positive labels"


def _count_shifted_labels(batch: Batch, num_samples: int) -> int:
    """Count for a causal head, which predicts column 1 first."""
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())


def _count_labels(batch: Batch, num_samples: int) -> int:
    return int((batch["labels"] != IGNORED_LABEL).sum())


def _count_samples(batch: Batch, num_samples: int) -> int:
    return num_samples


def _count_attended_tokens(batch: Batch, num_samples: int) -> int:
    """Count the tokens of the attention mask, with any labels."""
    return int(batch["attention_mask"].sum())


def _count_positive_labels(batch: Batch, num_samples: int) -> int:
    """Count the labels greater than 0, for a head to which label 0 is padding."""
    return int((batch["labels"] > 0).sum())


# How a head may count its targets: (collated batch on the host, samples) -> targets.
COUNTING_RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": _count_shifted_labels,
    "labels": _count_labels,
    "samples": _count_samples,
    "attended tokens": _count_attended_tokens,
    POSITIVE_LABELS: _count_positive_labels,
}


@dataclass(frozen=True)
class FirstPass:
    """What a loss may use to look at a whole window before its terms are computed.

    Attributes:
        window: The window.
        calls: The forwards of this rank, at least one; one with weight 0 does not count.
        totals: Targets of the window over all ranks.
        device: Of the model.
        process_index: Of this rank.
        parameters: Those of the model that are trained.
        forward: Gives the outputs of a call, without gradients. The second pass has the same.
        all_reduce: Sums a tensor over the ranks.
        scaled: Multiplies by the loss scale of fp16.
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
        """Give all ranks the bits of the first one's tensor: the others may have rounded
        differently.
        """
        return self.all_reduce(tensor if self.process_index == 0 else torch.zeros_like(tensor))


class Loss(Hook):
    """A way to split a loss over micro-batches: what `sums` returns is additive, and `mean` makes a
    loss of it.

    Attributes:
        name: How reports call it.
        num_means: How many means the loss is a sum of.
        one_width: The counts depend on the padded width, so all micro-batches of a window need the
            same width.
        counts_in_forward: Targets are known only after the forward, not on the host.
        needs_first_pass: `prepare` makes a pass over the window's micro-batches.
        is_audited: What `sums` returns can be computed again for other groups of samples.
        uses_parameters: The loss depends on parameters other than through the outputs.
        own_gradients: After `prepare`, the gradients of these parameters in this window, the same
            on all ranks and times the scale of fp16. One more term of the window's gradient.
    """

    name = ""
    num_means = 1
    one_width = False
    counts_in_forward = False
    needs_first_pass = False
    is_audited = True
    uses_parameters = False
    own_gradients: Sequence[tuple[nn.Parameter, Tensor]] = ()

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Count the targets of a collated batch on the host.

        Args:
            batch: The batch.
            num_samples: Its samples.

        Returns:
            One number for each mean; () if they are counted in the forward.
        """
        raise NotImplementedError

    def contributes(self, counts: Counts) -> bool:
        """Whether a micro-batch with these counts may add anything. Without targets, its own mean
        would be 0 / 0.
        """
        return not counts or any(counts)

    def prepare(self, first_pass: FirstPass) -> Counts:
        """Look at a whole window before its terms are computed; called where `needs_first_pass`.

        Returns:
            What `mean` divides by in this window.
        """
        return first_pass.totals

    @property
    def additive(self) -> "Loss":
        """The loss that a proof and the audits test: its sums are additive."""
        return self

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Sum the loss of a micro-batch over its targets.

        Args:
            outputs: What the model returned for `call.batch`.
            call: The micro-batch.

        Returns:
            For each mean, the sum (a scalar of at least float32; 0.0 without targets), and the
            number of targets.

        Raises:
            LossNotAdditive: If the model returned no loss.
        """
        raise NotImplementedError

    def mean(self, sums: Sums, totals: Counts) -> Tensor | float:
        """Divide sums by numbers of targets.

        Args:
            sums: Of a micro-batch.
            totals: Of the window. Then the result is what the micro-batch adds to the window's mean
                loss; with those of the micro-batch, it is the micro-batch's mean loss.

        Returns:
            A scalar.
        """
        total_loss: Tensor | float = 0.0
        for sum_of_loss, num_targets in zip(sums, totals, strict=True):
            if num_targets:
                total_loss = total_loss + sum_of_loss / num_targets
        return total_loss


class HeadMean(Loss):
    """A head whose loss is one mean over its targets.

    Args:
        name: How it counts them: a key of `COUNTING_RULES`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return (COUNTING_RULES[self.name](batch, num_samples),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        (number,) = call.counts
        if not number:
            return (0.0,), call.counts  # its mean is 0 / 0
        return (head_loss(outputs) * number,), call.counts


class SumOfMeans(Loss):
    """A head whose loss is a sum of several means, each recomputed from the logits.

    Args:
        name: Of the kind of head: a key of `KINDS`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.means = KINDS[name]
        self.num_means = len(self.means)
        self.one_width = any(mean.one_width for mean in self.means)

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return tuple(mean.count(batch) for mean in self.means)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        sums = [
            mean.total(outputs, call.batch) if number else 0.0
            for mean, number in zip(self.means, call.counts, strict=True)
        ]
        return tuple(sums), call.counts


class OwnSum(Loss):
    """The user's `loss_fn(outputs, batch) -> (sum of the loss, number of targets)`.

    A `loss_fn` with a method `count_targets(batch) -> number` has its targets counted on the host,
    before any forward.
    """

    name = "loss_fn"

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self.counts_in_forward = not hasattr(loss_fn, "count_targets")

    def contributes(self, counts: Counts) -> bool:
        return True  # a sum may have a gradient although its number is 0

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return () if self.counts_in_forward else (self.loss_fn.count_targets(batch),)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        total, number = own_loss(self.loss_fn, outputs, call.batch)
        if number == 0 and bool(total.isnan()):
            total = 0.0  # the mean over no targets is 0 / 0
        return (total,), call.counts or (number,)


class WithRouter(Loss):
    """Another loss plus a router's balancing loss, which is its last sum and count.

    Args:
        loss: The loss without the router's.
        router: The balancing loss, with the shares of the whole window.
    """

    needs_first_pass = True

    def __init__(self, loss: Loss, router: Router) -> None:
        self.loss = loss
        self.router = router
        self.name = loss.name
        self.num_means = loss.num_means
        self.one_width = loss.one_width

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.router.patched()

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return self.loss.count(batch, num_samples)

    def contributes(self, counts: Counts) -> bool:
        return True  # its tokens are routed

    def prepare(self, first_pass: FirstPass) -> Counts:
        """Count the choices of the whole window."""
        device = first_pass.device
        own = torch.zeros(sum(self.router.sizes), dtype=sum_dtype(device), device=device)
        for call in first_pass.calls:
            first_pass.forward(call)
            own += self.router.take().detach() * call.weight
        of_window = first_pass.all_reduce(own).float()
        return (*first_pass.totals, of_window)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        sums, counts = self.loss.sums(outputs, call)
        routed = self.router.take()
        return (*sums, routed), (*counts, routed.detach())

    def mean(self, sums: Sums, totals: Counts) -> Tensor | float:
        *other_sums, routed = sums
        *other_totals, routed_in_window = totals
        balancing_loss = self.router.loss(routed, routed_in_window)
        return self.loss.mean(tuple(other_sums), tuple(other_totals)) + balancing_loss
