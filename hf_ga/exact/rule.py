"""What a proof found out about a model, and what the engine needs to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import Batch
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import module_modes
from hf_ga.exact.hooks import Call, Hook, SpeedUp
from hf_ga.exact.loss import Loss


def structure_of(arguments: Batch) -> frozenset:
    """Return names, dtypes and numbers of dimensions of the entries of a batch."""
    entries = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            entries.append((name, value.dtype, value.dim()))
        else:
            entries.append((name, type(value).__name__, 0))
    return frozenset(entries)


@dataclass(frozen=True)
class Rule:
    """How the micro-batches of one model add up to the loss and the gradient of their window.

    `hf_ga.prepare` and `hf_ga.prove_targets` make it.

    Attributes:
        loss: How the terms of micro-batches sum to the loss of their window.
        dropout: The model's keyed dropout. A plain `Hook` where nothing is drawn.
        pad_to_window: The loss of a sample depends on the padded width, so all micro-batches of a
            window need one width.
        width_matters: Result of the test with padding. None if unknown (samples of one shape, a
            random collate function): then padding is kept equal, too.
        residual: The largest relative residual of the tested identity (see `proof.targets`).
        modes: Whether each module was in training mode.
        unused: Names of trainable parameters without a gradient in the proof.
        speed_ups: Those in use. They change neither loss nor gradient.
        left_out: Names of the other speed-ups, and why they are not used.
        structure: The entries of the batch that the speed-ups were tested on (`structure_of`). A
            micro-batch with other entries is computed without them. None: any entries.
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
        """The counting rule: "shifted labels", "labels", "samples", "attended tokens",
        "positive labels", a sum of means, or "loss_fn".
        """
        return self.loss.name

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Keyed dropout, then the speed-ups."""
        return (self.dropout, *self.speed_ups)

    def speed_ups_for(self, call: Call, arguments: Batch) -> list[SpeedUp]:
        """Choose the speed-ups that change nothing for a micro-batch.

        Args:
            call: The micro-batch, on the host.
            arguments: Its entries that the model takes.
        """
        if self.structure is not None and structure_of(arguments) != self.structure:
            return []
        return [speed_up for speed_up in self.speed_ups if speed_up.fits(call)]

    def check_fits(self, model: nn.Module) -> None:
        """Check that the rule was proven for the current state of the model.

        Args:
            model: As it was prepared.

        Raises:
            ConfigError: If the model is in evaluation mode or in other training modes than in the
                proof, or if compiled layers draw dropout that cannot be keyed.
        """
        if not model.training:
            raise ConfigError(
                "the model is in evaluation mode: call model.train() before a training step."
            )
        if self.modes != module_modes(model):
            raise ConfigError(
                "the training modes (or the modules) of the model differ from those of the proof: "
                "a frozen BatchNorm may be in training mode now. Call hf_ga.prepare (or "
                "prove_targets) in the mode of training."
            )
        self.dropout.check_compiled(model)

    def __str__(self) -> str:
        width = {
            True: "micro-batches padded to the window's width (the loss depends on it)",
            False: "loss independent of padding",
            None: "micro-batches padded to the window's width (effect of padding not tested)",
        }[self.width_matters]
        used = "".join(f", {speed_up.name}" for speed_up in self.speed_ups)
        return f"targets counted as {self.name} (residual {self.residual:.0e}), {width}{used}"
