"""The result of the proof for a model: how the engine must split its loss, dropout and batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import Batch, structure_of
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import module_modes
from hf_ga.exact.hooks import Call, Hook, SpeedUp
from hf_ga.exact.loss import Loss


@dataclass(frozen=True)
class Rule:
    """How the micro-batches of one model add up to the loss and the gradient of their window.

    Made by `hf_ga.prepare` and `hf_ga.prove_targets`, which test it on the model (the proof).

    Attributes:
        loss: How to split the model's loss into terms of micro-batches that sum to the window's
            mean loss.
        dropout: The model's keyed dropout (`KeyedDropout`), or a no-op `Hook` if the model draws no
            random numbers.
        pad_to_window: Whether all micro-batches of a window must be padded to the same length,
            because the loss of a sample depends on its padded length.
        width_matters: Whether the loss changed in the test with more padding. None if that could
            not be tested (all samples have the same shape, or the collate function is random);
            padded lengths are then kept equal, too.
        residual: The largest relative error in the tests of additivity (see `proof.targets`).
        modes: For each module in the order of `model.modules()`, whether it was in training mode.
        unused: Names of trainable parameters that got no gradient in the proof.
        speed_ups: The speed-ups in use, none of which changed the loss or the gradient.
        left_out: {name of a speed-up that is not in use: reason}.
        structure: Structure of the batch that the speed-ups were tested on (see `structure_of`).
            Micro-batches of another structure are computed without speed-ups. None: the speed-ups
            apply to all structures.
    """

    loss: Loss
    dropout: KeyedDropout | Hook
    pad_to_window: bool = False
    width_matters: bool | None = None
    residual: float = 0.0
    modes: tuple[bool, ...] = ()
    unused: frozenset[str] = frozenset()
    speed_ups: Sequence[SpeedUp] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    structure: frozenset | None = None

    @property
    def name(self) -> str:
        """Name of what the model's loss is averaged over, as the proof found it.

        One of "shifted labels", "labels", "samples", "attended tokens" and "positive labels"; else
        the name of a head whose loss is a sum of several means, or "loss_fn" for the user's own
        loss function.
        """
        return self.loss.name

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks to run around a micro-batch's forward: keyed dropout, then the speed-ups."""
        return (self.dropout, *self.speed_ups)

    def speed_ups_for(self, call: Call, arguments: Batch) -> list[SpeedUp]:
        """Return the speed-ups that may be used for a micro-batch without changing its result.

        Empty if the structure of the micro-batch differs from the one that was tested.

        Args:
            call: The micro-batch, on the host.
            arguments: The entries of its batch that the model's forward accepts.
        """
        if self.structure is not None and structure_of(arguments) != self.structure:
            return []
        return [speed_up for speed_up in self.speed_ups if speed_up.fits(call)]

    def check_fits(self, model: nn.Module) -> None:
        """Check, before a window, that the model is in the state in which the rule for splitting
        its loss was proven.

        Args:
            model: The prepared model.

        Raises:
            ConfigError: If the model is in evaluation mode, if any module's training mode differs
                from that in the proof, or if the model was compiled and hf_ga cannot key the
                dropout of the compiled layers.
        """
        if not model.training:
            raise ConfigError(
                "the model is in evaluation mode: call model.train() before a training step."
            )
        if self.modes != module_modes(model):
            raise ConfigError(
                "the modules of the model, or their training modes, differ from those in the "
                "proof: for example, a BatchNorm that was in evaluation mode may be in training "
                "mode now. Set the modes as in training, then call hf_ga.prepare (or "
                "prove_targets)."
            )
        self.dropout.check_compiled(model)

    def __str__(self) -> str:
        """Summarize in one line for logs how micro-batches add up to a window's loss: what it is
        averaged over, padding, speed-ups.
        """
        padding = {
            True: "micro-batches padded to the window's longest sample (the loss depends on it)",
            False: "loss independent of padding",
            None: "micro-batches padded to the window's longest sample (effect of padding not "
            "tested)",
        }[self.width_matters]
        speed_ups = "".join(f", {speed_up.name}" for speed_up in self.speed_ups)
        return (
            f"targets counted as {self.name} (residual {self.residual:.0e}), {padding}{speed_ups}"
        )
