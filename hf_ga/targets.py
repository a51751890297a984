"""How many targets a batch has for a head: a few rules, one of them picked by proof on the model itself.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is one mean over its targets, if
the count is the head's own. The rule is proven on losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_ga.batches import IGNORED_LABEL, Batch
from hf_ga.forward import LossFunction, module_modes
from hf_ga.places import KeyedPlaces
from hf_ga.proof import Prover


def count_shifted_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count, without the first column: a causal head predicts column 1 first."""
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def count_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def count_samples(batch: Batch, num_samples: int) -> int:
    """Samples."""
    return num_samples


RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": count_shifted_labels,
    "labels": count_labels,
    "samples": count_samples,
}


@dataclass(frozen=True)
class TargetRule:
    """What was proven of a model: how its targets are counted, whether padding matters, where it draws dropout.

    Attributes:
        name: a key of `RULES`, or "loss_fn" (the loss function counts by itself).
        pad_to_window: the loss of a sample depends on its batch's width, so all micro-batches of a window need one width.
        width_matters: as found by the probe; None where it cannot be told (samples of one shape, a collate function that draws):
            then padding is kept equal too.
        places: where randomness is drawn.
        residual: the largest relative residual of the identity above, as measured.
        modes: of every module, whether it was in training mode.
    """

    name: str
    pad_to_window: bool
    width_matters: bool | None
    places: KeyedPlaces
    residual: float
    modes: tuple[bool, ...]

    def count(self, batch: Batch, num_samples: int) -> int:
        """Targets of a collated batch (on the host: no device is asked)."""
        return RULES[self.name](batch, num_samples)

    def __str__(self) -> str:
        width = {
            True: "micro-batches padded to the window's width, which matters",
            False: "padding width does not matter",
            None: "micro-batches padded alike, as it cannot be told whether that matters",
        }[self.width_matters]
        return f"targets counted as {self.name} (residual {self.residual:.0e}), {width}"


def prove_targets(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
) -> TargetRule:
    """Find the counting rule of a model's loss and prove it on a few samples. Weights, gradients, buffers, random states stay.

    Args:
        model: in any mode, wrapped or not; the proof runs in training mode with keyed dropout.
        samples: some samples of the dataset; the shortest and the longest tell whether padding matters.
        collate_fn: list of samples -> arguments of the model.
        loss_fn: own loss; then its own count is checked.
        allow_unkeyed: accept draws that cannot be keyed; in the proof the modules that draw them are in evaluation mode.

    Raises:
        LossNotAdditive: no rule fits, or several that differ, or no sample has a target. ConfigError: nothing is
            trainable, or not in float32. UnkeyedRandomness: a draw of the model
            cannot be tied to its sample.

    Example:
        rule = prove_targets(model, [dataset[i] for i in range(32)], collate_fn)
        rule.name        # 'shifted labels' for a GPT, 'labels' for a BERT with a masked-LM head
    """
    prover = Prover(model, samples, collate_fn, loss_fn, RULES)
    with prover.untouched():
        modes = module_modes(prover.model)
        prover.places.find(prover.forward_copies, allow_unkeyed)
        for module in prover.places.unkeyed:  # allowed to draw in training, but the proof needs equal forwards
            module.training = False
        with prover.places.active():
            name, residual = prover.prove_rule()
            width_matters = prover.width_matters()
    return TargetRule(name, width_matters is not False, width_matters, prover.places, residual, modes)
