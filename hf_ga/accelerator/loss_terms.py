"""From what a loop passes to `accelerator.backward` to the micro-batch's term of the window's loss.

the model's own loss       a mean over targets that are counted in the batch
a sum and num_targets      counted by the loop
a mean of torch's losses   what it divides by follows from its arguments
"""

from torch import Tensor

from hf_ga.accelerator.loss_checks import LossChecks
from hf_ga.accelerator.loss_comparison import GivenSum, Seen
from hf_ga.accelerator.outputs import ForwardWatch, loss_of
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.engine import Engine
from hf_ga.exact.loss import HeadMean, Loss, WithRouter
from hf_ga.speed.packing import Packing

OTHER_LOSS = (
    "the loop passed the model's own loss before, and now another one, whose outputs were computed "
    "without the window's padding: use one loss from the first batch on."
)


class LossTerms:
    """Makes the backward of each loss that a loop passes.

    Args:
        checks: Tells which loss it is.

    Attributes:
        passes_own_loss: The loop passes the very tensor that the model returned.
        head: Counts the targets of the own loss of a model that was proven in its first forward.
    """

    def __init__(self, checks: LossChecks) -> None:
        self.checks = checks
        self.passes_own_loss = False
        self.head: Loss | None = None
        self._kind: str | None = None  # of the losses of this window

    def begin_window(self) -> None:
        """Called when a window begins."""
        self.checks.num_windows += 1
        self._kind = None

    def backward(
        self,
        engine: Engine,
        watch: ForwardWatch,
        seen: Seen,
        loss: Tensor,
        num_targets: float | Tensor | None,
    ) -> None:
        """Make the backward of the term of one micro-batch.

        Args:
            engine: Of the window.
            watch: Saw the forward of the micro-batch.
            seen: What was seen of the micro-batch.
            loss: What the loop passed, one number.
            num_targets: What the loop passed.

        Raises:
            ConfigError: If the loss is of another kind than those before in the window.
            LossNotAdditive: If the loss is another than the one that was proven.
        """
        self._note_own_loss(engine, seen, loss)
        loss = loss.reshape(()) if loss.dim() else loss
        if num_targets is not None:
            number = float(num_targets)
            self.checks.check_sum(loss, seen)
            self.checks.check_number(loss, number, seen.num_samples)
            self._count_in_forward(engine, "num_targets")
            engine.backward((loss, number))
        elif self.checks.is_head(loss, seen):
            self._backward_of_head(engine, watch, loss)
        else:
            mean = self.checks.mean_of(loss, seen)
            self._count_in_forward(engine, "a criterion")
            _backward_of_mean(engine, loss, mean.number())

    def _note_own_loss(self, engine: Engine, seen: Seen, loss: Tensor) -> None:
        """Note whether the loop passes the very loss that the model returned: then the next window
        may be packed.

        Raises:
            ConfigError: If it is another loss, of a forward that was packed.
        """
        self.passes_own_loss = loss is loss_of(seen.outputs)
        is_packed = any(isinstance(hook, Packing) for hook in engine.rule.speed_ups)
        if is_packed and not self.passes_own_loss:
            raise ConfigError(OTHER_LOSS)

    def _backward_of_head(self, engine: Engine, watch: ForwardWatch, loss: Tensor) -> None:
        """Make the backward of the model's own loss, or of one that differs by a penalty only."""
        self._check_kind("the model's loss")
        if isinstance(engine.loss, GivenSum):  # of a model that was proven in its first forward
            (number,) = self.head.count(watch.arguments, watch.num_samples)
            _backward_of_mean(engine, loss, number)
            return
        head = loss_of(watch.outputs)
        without_router = engine.loss.loss if isinstance(engine.loss, WithRouter) else engine.loss
        if isinstance(without_router, HeadMean):
            engine.backward(loss, is_recomputable=loss is head)
            return
        # A sum of means is computed from the outputs; a penalty on the weights is in the loss only.
        term, counts = engine.loss_term(watch.outputs)
        if loss is not head and head is not None:
            share = len(engine.call.micro_batch) / engine.window.num_samples
            term = term + (loss - head) * share
        engine.backward_term(term, counts)

    def _check_kind(self, kind: str) -> None:
        """Check that all micro-batches of the window have the same kind of loss.

        Raises:
            ConfigError: If not.
        """
        if self._kind not in (None, kind):
            raise ConfigError(
                f"the losses of one window come from {self._kind} and from {kind}: use one of "
                "them for all micro-batches."
            )
        self._kind = kind

    def _count_in_forward(self, engine: Engine, kind: str) -> None:
        """Let the window's loss be a sum whose targets are counted after the forwards.

        Raises:
            ConfigError: If the window was begun for the model's own loss.
        """
        self._check_kind(kind)
        engine.window.state.pad_to_window = True
        if not engine.window.request.pad_to_window:
            raise ConfigError(OTHER_LOSS)
        if isinstance(engine.loss, GivenSum):
            return
        if isinstance(engine.loss, WithRouter):
            raise ConfigError(
                f"{kind}: the loss of this model has a router's balancing loss, which would be "
                "lost. Pass the model's own loss, or set output_router_logits=False."
            )
        engine.count_in_forward(GivenSum())


def check_is_number(loss: object) -> None:
    """Check that what a loop passes to `backward` is one number.

    Raises:
        LossNotAdditive: If not.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    found = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {list(loss.shape)}"
    raise LossNotAdditive(
        f"accelerator.backward needs one number, the loss of the micro-batch, got {found}."
    )


def _backward_of_mean(engine: Engine, loss: Tensor, number: float) -> None:
    """Make the backward of a mean over `number` targets; without any it is 0 / 0 and left out."""
    total = loss * number if number else 0.0
    engine.backward((total, number))
