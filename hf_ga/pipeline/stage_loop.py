"""A window in one pipeline stage: the forwards and backwards of its micro-batches, in the order of
torch's schedule.

The schedule runs the backwards, also of micro-batches before the current one. So `engine.add` reads
the loss on the last stage and lets its hooks act until the window's end, and gradients add up in
`.grad`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.slots import Slot
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.loading.window import Window
from hf_ga.model.forward import head_loss
from hf_ga.pipeline.backend import PipelineBackend
from hf_ga.pipeline.model import StageModel
from hf_ga.pipeline.trial import FullModel
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.speed.cudnn_attention import without_cudnn_attention


class StageLoop(OwnLoop):
    """Computes the gradients of windows in this rank's pipeline stage.

    Args:
        backend: How the ranks of the pipeline communicate.
        stage_model: This rank's stage.
        schedule: The class of torch's schedule.
        full_model: What is known about the model before it was split.
    """

    def __init__(
        self,
        backend: PipelineBackend,
        stage_model: StageModel,
        schedule: Callable[..., Any],
        full_model: FullModel,
    ) -> None:
        """Start before the first window."""
        engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=False)
        super().__init__(engine, stage_model.model)
        engine.rehearses = False  # the full model was tried
        engine.speed_ups.candidates = lambda model: []
        engine.draws.adopt(full_model.draws)
        engine.draws.first_draw = full_model.num_draws[backend.stage]
        self.stage_model = stage_model
        self.schedule = schedule
        self._backend = backend
        self._last_draw = full_model.num_draws[backend.stage + 1]
        self._window: Window | None = None

    def _plan_slots(self, window: Window) -> list[Slot]:
        """Return the micro-batches of this replica."""
        return [Slot(micro_batch) for micro_batch in window.micro_batches]

    def _run(self, window: Window) -> None:
        """Run torch's schedule: all forwards and backwards of a window on this rank."""
        backend = self._backend
        with backend.failing_on_all_ranks():
            hidden_shape = max_hidden_shape(self._slots, self.model.config.hidden_size)
            hash_of_batches = self._hash_of_batches()
        hashes = backend.gather_objects((backend.replica, hash_of_batches))
        if len(set(hashes)) > backend.num_replicas:
            raise ConfigError(
                "the stages of a pipeline have different batches of the same samples: dataset and "
                "collate function must return the same on all processes. Nothing was updated."
            )
        if not self._slots:
            return
        self._window = window
        draws = self.engine.draws
        num_reclassified = draws.num_reclassified
        before = random_states()
        # Backwards run here, and may compute forwards again.
        with draws.scope(), without_cudnn_attention(), backend.deferred_backwards():
            self._run_schedule(hidden_shape)
        self._note_draws_in_backwards()
        if moved := moved_generators(before):
            self._fail(_unkeyed(f"from the generator of {' and '.join(moved)}"))
        if draws.num_reclassified != num_reclassified:
            self.engine.gradient.must_repeat = "the dims of random numbers with samples were found"

    def _hash_of_batches(self) -> str:
        """Return a hash of all tensors on the host in this replica's micro-batches."""
        tensors = {}
        for number, slot in enumerate(self._slots):
            for name, value in slot.micro_batch.batch.items():
                if isinstance(value, Tensor) and value.device.type == "cpu":
                    tensors[f"{number} {name}"] = value
        return state_sha256(tensors)

    def _run_schedule(self, hidden_shape: tuple[int, ...]) -> None:
        """Run torch's pipeline schedule on the micro-batches of this replica. Raises the error of
        this stage's forward or backward.
        """
        # Tensors without data of the shapes that this stage receives and returns.
        hidden = torch.empty(hidden_shape, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        stage = PipelineStage(
            StageForward(self, hidden_shape),
            self._backend.stage,
            self._backend.num_stages,
            self._backend.device,
            input_args=() if self.stage_model.is_first else hidden,
            output_args=loss if self.stage_model.is_last else hidden,
            group=self._backend.stages,
        )
        num_micro_batches = len(self._slots)
        # 1F1B needs a micro-batch for each stage. With fewer, GPipe keeps no more activations.
        schedule_class = self.schedule
        if num_micro_batches < self._backend.num_stages:
            schedule_class = ScheduleGPipe
        # Its loss function gets what the last stage returns, the loss of a micro-batch.
        schedule = schedule_class(
            stage, num_micro_batches, loss_fn=lambda loss, index: loss, scale_grads=False
        )
        # torch splits its input into micro-batches of equal size along dim 0. Ours differ in size,
        # so its input are their indices, with which each stage looks up its own micro-batch.
        indices = torch.arange(num_micro_batches)
        try:
            schedule.step(index=indices, target=indices, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # Raise the stage's own error, without the list of shapes that torch adds.
            raise error.__cause__ from None

    def run_forward(self, index: int, hidden: Tensor | None) -> Tensor:
        """Run this stage's forward of a micro-batch.

        After an error, it goes on with zeros, because the other stages wait for this one: all ranks
        raise the error at the window's end.

        Args:
            index: The index of the micro-batch.
            hidden: The hidden states of the previous stage, padded; None on the first stage.

        Returns:
            The micro-batch's loss on the last stage, hidden states on the others.
        """
        self._note_draws_in_backwards()
        if self.engine.gradient.failure is None:
            try:
                output = self._forward(index, hidden)
            except Exception as error:
                self._fail(self.engine.error_to_report(error))
            else:
                return output
        if hidden is None:
            return torch.zeros((1, 1, self.model.config.hidden_size), device=self._backend.device)
        return hidden.sum() * 0 if self.stage_model.is_last else hidden * 0

    def _forward(self, index: int, hidden: Tensor | None) -> Tensor:
        """Run the forward, see `run_forward`, and read the loss on the last stage."""
        engine = self.engine
        slot = self._slots[index]
        with engine.micro_batch(slot, self._window.request):
            batch = self._backend.place(slot.micro_batch.batch)
            if hidden is not None:
                num_samples, num_tokens = batch["input_ids"].shape
                batch = {**batch, "inputs_embeds": hidden[:num_samples, :num_tokens]}
            with self._backend.autocast():
                outputs = self.stage_model(**batch)
            self._check_number_of_draws()
            if not self.stage_model.is_last:
                engine.draws.after_backward()  # what is drawn now is drawn in backwards
                return outputs
            loss = head_loss(outputs)
            engine.add(loss)
            return loss

    def _check_number_of_draws(self) -> None:
        """Check that this stage's forward drew the numbers of the full model, not more or fewer."""
        self.engine.draw_check.check()
        draws = self.engine.draws
        if draws.mark().place != (0, self._last_draw):
            raise _unkeyed(
                f"{draws.num_draws - draws.first_draw} numbers or masks in stage "
                f"{self._backend.stage}, where the full model drew "
                f"{self._last_draw - draws.first_draw}"
            )

    def _note_draws_in_backwards(self) -> None:
        """Let all ranks raise an error at the window's end if numbers were drawn since the last
        forward: they depend on the schedule, which runs backwards of earlier micro-batches there.
        """
        drawn = self.engine.draws.unkeyed_after_backward
        if drawn is not None:
            self._fail(_unkeyed(drawn))

    def _fail(self, error: Exception) -> None:
        """Let all ranks raise an error at the window's end."""
        gradient = self.engine.gradient
        gradient.failure = gradient.failure or error


class StageForward(nn.Module):
    """The module that torch's pipeline schedule calls for each micro-batch of a window: the forward
    of this rank's stage.

    Args:
        loop: The loop of this rank, which has begun the window.
        hidden_shape: The shape of the hidden states that stages send to each other, (samples,
            tokens, hidden size). A schedule sends one shape only, so hidden states of smaller
            micro-batches are padded to it for the transfer, and the padding is removed before a
            stage computes with them.
    """

    def __init__(self, loop: StageLoop, hidden_shape: tuple[int, ...]) -> None:
        """Store the loop, its stage, and the shape of the hidden states that stages send."""
        super().__init__()
        self.loop = loop
        self.stage_model = loop.stage_model
        self.hidden_shape = hidden_shape

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Run this pipeline stage's forward of one micro-batch; torch's schedule calls it.

        Args:
            received: The padded hidden states of the previous stage, of shape `hidden_shape`;
                nothing on the first stage.
            index: The index of the micro-batch, of shape (1,).

        Returns:
            On the last stage, the micro-batch's loss; on the others, hidden states padded to
            `hidden_shape`.
        """
        output = self.loop.run_forward(int(index), received[0] if received else None)
        return output if self.stage_model.is_last else self._padded(output)

    def _padded(self, hidden: Tensor) -> Tensor:
        """Convert hidden states (samples, tokens, hidden size) to float32 and pad them with zeros
        to `hidden_shape`, to send them to the next pipeline stage.
        """
        num_samples, num_tokens, _ = self.hidden_shape
        missing_samples = num_samples - hidden.shape[0]
        missing_tokens = num_tokens - hidden.shape[1]
        # For each dim, from the last to the first: the padding before and after.
        padding = (0, 0, 0, missing_tokens, 0, missing_samples)
        padded = F.pad(hidden.float(), padding).contiguous()
        if not padded.requires_grad:
            # The next stage also sends a gradient to a stage without trainable parameters.
            padded.requires_grad_()
        return padded


def max_hidden_shape(slots: list[Slot], hidden_size: int) -> tuple[int, int, int]:
    """Return the smallest shape into which the hidden states of every micro-batch of a window fit:
    the one shape that pipeline stages send to each other.

    Args:
        slots: The micro-batches of this replica.
        hidden_size: The model's hidden size.

    Returns:
        (maximum number of samples, maximum number of tokens, hidden size); zeros without
        micro-batches.
    """
    shapes = [slot.micro_batch.batch["input_ids"].shape for slot in slots]
    max_samples = max((num_samples for num_samples, _ in shapes), default=0)
    max_tokens = max((num_tokens for _, num_tokens in shapes), default=0)
    return max_samples, max_tokens, hidden_size


def _unkeyed(what: str) -> UnkeyedRandomness:
    """Return the error for random numbers that are not those of the full model."""
    return UnkeyedRandomness(
        f"a pipeline stage drew other random numbers than the model before it was split ({what}). "
        "Call prepare_pipeline again after a change of dropout or of training modes, and draw "
        "nothing in hooks of a backward."
    )
