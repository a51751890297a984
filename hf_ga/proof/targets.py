"""Proves on a model itself what its loss averages over.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is
one mean over its targets, if targets are counted as in the head. The counting rule is proven on
losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.

A head whose loss is a sum of several means has one count for each (`exact/sums_of_means.py`); the
balancing loss of a mixture of experts is computed over the whole window (`exact/router.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_ga.errors import ConfigError
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import LossFunction, is_compiled, module_modes
from hf_ga.exact.hooks import Hook, SpeedUp
from hf_ga.exact.loss import Loss
from hf_ga.proof.identity import identity_of, same
from hf_ga.proof.prover import Prover


@dataclass(frozen=True)
class ProvenLoss:
    """The result of the proof of a model.

    Attributes:
        loss: how the terms of micro-batches sum to the loss of their window.
        dropout: the model's keyed dropout.
        speed_ups: those in use, which change neither loss nor gradient. left_out: names of the
            others, and why.
        pad_to_window: the loss of a sample depends on the padding width, so all micro-batches of a
            window need one width.
        width_matters: result of the probe; None if unknown (samples of one shape, a random collate
            function): then padding is equal too.
        residual: the largest measured relative residual of the identity above.
        modes: whether each module was in training mode.
        unused: names of trainable parameters without a gradient in the proof.
    """

    loss: Loss
    dropout: KeyedDropout
    pad_to_window: bool
    width_matters: bool | None
    residual: float
    modes: tuple[bool, ...]
    unused: frozenset[str] = frozenset()
    speed_ups: Sequence[SpeedUp] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The counting rule: "shifted labels", "labels", "samples", "attended tokens", a sum of
        means, or "loss_fn".
        """
        return self.loss.name

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Keyed dropout, then the speed-ups."""
        return (self.dropout, *self.speed_ups)

    def check_fits(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        """Check that the proof fits the current state of the model, and this loss.

        Raises:
            ConfigError: another loss function, other training modes, or compiled layers that draw
                dropout.
        """
        if loss_fn is not None and not same(
            identity_of(loss_fn), identity_of(getattr(self.loss, "loss_fn", None))
        ):
            raise ConfigError(
                "loss_fn differs from the one of the proof, and would not be used: pass it to "
                "prove_targets, or omit `targets`."
            )
        if not model.training:
            raise ConfigError(
                "the model is in evaluation mode: call model.train() before a training step."
            )
        if self.modes != module_modes(model):
            raise ConfigError(
                "the training modes (or the modules) of the model differ from those of the proof: "
                "a frozen BatchNorm may be "
                "in training mode now. Prove the model again in the mode of training, or omit "
                "`targets`."
            )
        if self.dropout.sites and is_compiled(model):
            raise ConfigError(
                "the model is compiled and draws dropout: compiled code cannot draw keyed dropout "
                "masks. Set "
                "its dropout to 0, or do not compile it."
            )

    def __str__(self) -> str:
        width = {
            True: "micro-batches padded to the window's width (the loss depends on it)",
            False: "loss independent of padding",
            None: "micro-batches padded to the window's width (effect of padding not tested)",
        }[self.width_matters]
        used = "".join(f", {speed_up.name}" for speed_up in self.speed_ups)
        return f"targets counted as {self.name} (residual {self.residual:.0e}), {width}{used}"


def prove(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_split_dependent_randomness: bool = False,
    speed_ups: Sequence[SpeedUp] = (),
) -> ProvenLoss:
    """See `hf_ga.prove_targets`, which chooses the speed-ups. Unused speed-ups keep no reference to
    the model.
    """
    prover = Prover(model, samples, collate_fn, loss_fn)
    with prover.untouched():
        modes = module_modes(prover.model)
        with prover.keyed(allow_split_dependent_randomness):
            prover.find_router()
            with prover.with_speed_ups(speed_ups):
                residual = prover.prove_loss()
                width_matters = prover.width_matters()
                if width_matters:
                    prover.check_unpadded()
    return ProvenLoss(
        loss=prover.loss,
        dropout=prover.dropout,
        pad_to_window=width_matters is not False or prover.loss.one_width,
        width_matters=width_matters,
        residual=residual,
        modes=modes,
        unused=frozenset(prover.unused),
        speed_ups=tuple(prover.speed_ups),
        left_out=prover.left_out,
    )
