"""Proves on a model itself what its loss averages over.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is
one mean over its targets, if targets are counted as in the head. The counting rule is proven on
losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.

A head whose loss is a sum of several means has one count for each (`exact/sums_of_means.py`); the
balancing loss of a mixture of experts is computed over the whole window (`exact/router.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_ga.exact.forward import LossFunction, module_modes
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.rule import Rule
from hf_ga.proof.prover import Prover


def prove(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_split_dependent_randomness: bool = False,
    speed_ups: Sequence[SpeedUp] = (),
) -> Rule:
    """Find out what a model's loss averages over, and prove it on trial batches.

    This does the work of `hf_ga.prove_targets`, which documents the errors. The model, its buffers
    and all random states are unchanged afterwards.

    Args:
        model: The model, in any mode, wrapped or not.
        samples: Some samples of the dataset.
        collate_fn: List of samples -> keyword arguments of the model.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets), in place of the head's
            own loss.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        speed_ups: Speed-ups to try. Those that fail keep no reference to the model.

    Returns:
        The rule that the engine trains by: the loss, the dropout sites, the speed-ups that passed.
    """
    prover = Prover(model, samples, collate_fn, loss_fn)
    with prover.proof_mode():
        modes = module_modes(prover.model)
        prover.find_dropout(allow_split_dependent_randomness)
        prover.find_router()
        prover.find_ignored_label()
        prover.choose_speed_ups(speed_ups)
        residual = prover.prove_loss()
        prover.cover_values()
        width_matters = prover.width_matters()
        if width_matters:
            prover.check_unpadded()
        loss = prover.loss
    return Rule(
        loss=loss,
        dropout=prover.dropout,
        pad_to_window=width_matters is not False or loss.needs_same_padded_length,
        width_matters=width_matters,
        residual=residual,
        modes=modes,
        unused=frozenset(prover.unused_parameters),
        speed_ups=tuple(prover.speed_ups),
        left_out=prover.rejected_speed_ups,
        structure=prover.structure,
    )
