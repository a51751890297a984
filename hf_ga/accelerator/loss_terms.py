"""Turns the loss that a loop passes to `accelerator.backward` into the backward of the
micro-batch's term of the window's mean loss.

the model's own loss        a mean over targets that hf_ga counts in the batch
a sum with num_targets      a sum over targets that the loop counts
a mean of a torch criterion a mean whose divisor follows from the criterion's arguments
"""

from torch import Tensor

from hf_ga.accelerator.loss_checks import LossChecks
from hf_ga.accelerator.loss_comparison import MicroBatchRecord, SumPassedByLoop
from hf_ga.accelerator.outputs import ForwardRecorder, model_loss_of
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.engine import Engine
from hf_ga.exact.loss import HeadMean, Loss, WithRouter
from hf_ga.speed.packing import Packing

LOSS_CHANGED = (
    "the loop passed the model's own loss before, and now another one, whose outputs were computed "
    "without the window's padding: use one loss from the first batch on."
)


class LossTerms:
    """Runs the backward of each micro-batch's loss in a user's loop, scaled to its part of the
    window's mean loss.

    Args:
        checks: Finds out what a loss of the loop is: the model's own, the mean of a torch loss
            function, or a sum over targets.

    Attributes:
        passes_own_loss: Whether the loop passed, for the last micro-batch, the very tensor that the
            model returned as its loss.
        model_loss: For a model that was proven in its first forward and returns a loss: counts the
            targets of that loss.
    """

    def __init__(self, checks: LossChecks) -> None:
        """Start before the first window of a user's loop with `hf_ga.Accelerator`.

        Args:
            checks: Finds out what a loss of the loop is: the model's own, the mean of a torch loss
                function, or a sum over targets.
        """
        self.checks = checks
        self.passes_own_loss = False
        self.model_loss: Loss | None = None
        self._loss_kind: str | None = None  # of the current window's losses, for errors

    def begin_window(self) -> None:
        """Record that a window begins: count it, and let the user's loop choose again which kind of
        loss all its micro-batches have.
        """
        self.checks.num_windows += 1
        self._loss_kind = None

    def backward(
        self,
        engine: Engine,
        recorder: ForwardRecorder,
        record: MicroBatchRecord,
        loss: Tensor,
        num_targets: float | Tensor | None,
    ) -> None:
        """Check the loss that a user's loop passed for a micro-batch, and run the backward of its
        term of the window's mean loss: the sum of the micro-batch's losses divided by the targets
        of the window.

        Args:
            engine: The engine of the window.
            recorder: The recorder of the micro-batch's forward.
            record: The record of the micro-batch.
            loss: What the user's loop passed to `accelerator.backward`, a tensor with one element.
            num_targets: What the loop passed with it: the number of targets that the loss is summed
                over, or None for a mean.

        Raises:
            ConfigError: If the loss is of another kind than those of earlier micro-batches.
            LossNotAdditive: If it is a loss that is not known to add up over micro-batches.
        """
        self._note_own_loss(engine, record, loss)
        loss = loss.reshape(()) if loss.dim() else loss
        if num_targets is not None:
            count = float(num_targets)
            self.checks.check_sum(loss, record)
            self.checks.check_num_targets(loss, count, record.num_samples)
            self._use_sums_of_loop(engine, "num_targets")
            engine.backward((loss, count))
        elif self.checks.is_model_loss(loss, record):
            self._backward_of_model_loss(engine, recorder, loss)
        else:
            mean = self.checks.criterion_mean_of(loss, record)
            self._use_sums_of_loop(engine, "a criterion")
            _backward_of_mean(engine, loss, mean.compute_divisor())

    def _note_own_loss(self, engine: Engine, record: MicroBatchRecord, loss: Tensor) -> None:
        """Record whether the user's loop passed the very loss that the model returned: only then
        may the next window be packed (computed without padding).

        Args:
            engine: The engine of the window.
            record: The record of the micro-batch.
            loss: The loss that the user's loop passed to `accelerator.backward`.

        Raises:
            ConfigError: If the loop passed another loss although this window is packed.
        """
        self.passes_own_loss = loss is model_loss_of(record.outputs)
        is_packed = any(isinstance(hook, Packing) for hook in engine.rule.speed_ups)
        if is_packed and not self.passes_own_loss:
            raise ConfigError(LOSS_CHANGED)

    def _backward_of_model_loss(
        self, engine: Engine, recorder: ForwardRecorder, loss: Tensor
    ) -> None:
        """Run the backward for a micro-batch for which the user's loop passed the model's own loss,
        possibly plus a penalty on the weights: that of its term of the window's mean loss.

        Args:
            engine: The engine of the window.
            recorder: The recorder of the micro-batch's forward.
            loss: The loss that the user's loop passed to `accelerator.backward`.

        Raises:
            ConfigError: If the window has micro-batches with another kind of loss.
        """
        self._check_loss_kind("the model's loss")
        if isinstance(engine.loss, SumPassedByLoop):  # the model was proven in its first forward
            (num_targets,) = self.model_loss.count(recorder.arguments, recorder.num_samples)
            _backward_of_mean(engine, loss, num_targets)
            return
        returned_loss = model_loss_of(recorder.outputs)
        without_router = engine.loss.loss if isinstance(engine.loss, WithRouter) else engine.loss
        if isinstance(without_router, HeadMean):
            engine.backward(loss, is_recomputable=loss is returned_loss)
            return
        # A loss that is a sum of means is computed again from the outputs. If the loop added a
        # penalty on the weights, the difference of the two losses is this penalty.
        term, counts = engine.loss_term(recorder.outputs)
        if loss is not returned_loss and returned_loss is not None:
            share = len(engine.call.micro_batch) / engine.window.num_samples
            term = term + (loss - returned_loss) * share
        engine.backward_term(term, counts)

    def _check_loss_kind(self, kind: str) -> None:
        """Check that the user's loop passes the same kind of loss for all micro-batches of a
        window, and store the kind of the first one.

        Args:
            kind: The kind of the current micro-batch's loss, as an error calls it.

        Raises:
            ConfigError: If an earlier micro-batch had another kind.
        """
        if self._loss_kind not in (None, kind):
            raise ConfigError(
                f"the losses of one window come from {self._loss_kind} and from {kind}: use one "
                "of them for all micro-batches."
            )
        self._loss_kind = kind

    def _use_sums_of_loop(self, engine: Engine, kind: str) -> None:
        """Let the engine divide the window's gradient by the targets that the micro-batches' sums
        come with, because the user's loop computes its own loss.

        Later windows are padded to one length, as the loop's loss may average over the padding.

        Args:
            engine: The engine of the window.
            kind: The kind of the current micro-batch's loss, as an error calls it.

        Raises:
            ConfigError: If the window was begun for the model's own loss, or if the model has a
                router's balancing loss, which the loop's own loss would lose.
        """
        self._check_loss_kind(kind)
        engine.window.state.pad_to_window = True
        if not engine.window.request.pad_to_window:
            raise ConfigError(LOSS_CHANGED)
        if isinstance(engine.loss, SumPassedByLoop):
            return
        if isinstance(engine.loss, WithRouter):
            raise ConfigError(
                f"{kind}: the loss of this model has a router's balancing loss, which would be "
                "lost. Pass the model's own loss, or set output_router_logits=False."
            )
        engine.count_in_forward(SumPassedByLoop())


def check_has_one_element(loss: object) -> None:
    """Check that the loss that a user's loop passed to `accelerator.backward` is a tensor with one
    element.

    Raises:
        LossNotAdditive: If it is not a tensor, or has another number of elements.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    received = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        received = f"a tensor of shape {list(loss.shape)}"
    raise LossNotAdditive(
        f"accelerator.backward needs one number, the loss of the micro-batch, got {received}."
    )


def _backward_of_mean(engine: Engine, mean: Tensor, divisor: float) -> None:
    """Run the backward of a mean that a user's loop passed to `accelerator.backward`: as a loss
    sum, mean x divisor, over `divisor` targets.

    A micro-batch without targets, whose mean is 0 / 0, contributes 0.

    Args:
        engine: The engine of the window.
        mean: The mean loss of the micro-batch, a scalar.
        divisor: What the mean was divided by: a number of targets, or a sum of class weights.
    """
    loss_sum = mean * divisor if divisor else 0.0
    engine.backward((loss_sum, divisor))
