"""Proves on a model itself what its loss averages over.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is
one mean over its targets, if targets are counted as in the head. The counting rule is proven on
losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.

A head whose loss is a sum of several means has one count for each (`exact/sums_of_means.py`); the
balancing loss of a mixture of experts is computed over the whole window (`exact/router.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from hf_ga.exact.forward import LossFunction, module_modes, restored_buffers
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.rule import Rule
from hf_ga.exact.whole_window import ProbeLoss, WholeBatchLoss
from hf_ga.proof.prover import Prover
from hf_ga.proof.whole_batch import (
    check_same_in_both_passes,
    find_used_outputs,
    prove_whole_batch,
)


def prove(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    allow_split_dependent_randomness: bool = False,
    speed_ups: Sequence[SpeedUp] = (),
) -> Rule:
    """See `hf_ga.prove_targets`, which chooses the speed-ups. Unused speed-ups keep no reference to
    the model.
    """
    prover = Prover(model, samples, collate_fn, loss_fn)
    has_buffers = isinstance(whole_batch, nn.Module)
    with prover.untouched(), restored_buffers(whole_batch) if has_buffers else nullcontext():
        modes = module_modes(prover.model)
        if whole_batch is not None:
            used = find_used_outputs(prover, whole_batch)
            prover.loss_fn = ProbeLoss(used)
        prover.find_dropout(allow_split_dependent_randomness)
        if whole_batch is not None:
            check_same_in_both_passes(prover)
        prover.find_router()
        prover.choose_speed_ups(speed_ups)
        residual = prover.prove_loss()
        prover.cover_values()
        width_matters = prover.width_matters()
        if width_matters:
            prover.check_unpadded()
        loss = prover.loss
        if whole_batch is not None:
            loss = prove_whole_batch(prover, whole_batch, used)
    return Rule(
        loss=loss,
        dropout=prover.dropout,
        pad_to_window=width_matters is not False or loss.needs_same_padded_length,
        width_matters=width_matters,
        residual=residual,
        modes=modes,
        unused=frozenset(prover.unused),
        speed_ups=tuple(prover.speed_ups),
        left_out=prover.left_out,
        structure=prover.structure,
    )
