"""Does a copy of a model's modules compute what the model does? Asked on its own samples, before lanes are used (`lanes.py`)."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_ga.exact.batches import Batch
from hf_ga.exact.costs import LANES
from hf_ga.exact.forward import accepted_arguments, gradients_apart, head_loss
from hf_ga.exact.keyed import sample_keys, window_key
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, off
from hf_ga.proof.proof import Prover
from hf_ga.speed.lanes import Lane, copied, obstacle

if TYPE_CHECKING:
    from hf_ga.proof.targets import TargetRule


def prove_copies(prover: Prover, rule: "TargetRule") -> tuple[bool, str]:
    """Compare loss and gradients of the model and of a copy, in training mode with keyed dropout. On a CPU with several threads.

    Returns:
        (whether copies do the same, why they do not); (False, "") where lanes would not be used anyway.
    """
    if prover.device.type != "cpu" or prover.loss_fn is not None or torch.get_num_threads() < LANES:
        return False, ""
    if reason := obstacle(prover.model, rule):
        return False, reason
    original, batch = Lane(prover.model, rule), prover._rows_with_targets()
    before = _versions(prover.model.buffers())
    with gradients_apart(prover.parameters):
        own = _gradients(original, batch)
        if _versions(prover.model.buffers()) != before:
            return False, "its forward changes its buffers"
        try:
            others = _gradients(copied(original), batch)
        except Exception as error:  # whatever modules raise that cannot be copied
            return False, f"its modules cannot be copied ({type(error).__name__}: {error})"
        finally:
            leaked = any(p.grad is not None for p in prover.parameters)
            for parameter in prover.parameters:
                parameter.grad = None
    if leaked:
        return False, "a copy of its modules computes with modules of the model itself"
    distance = off(others, own)
    return distance <= prover.tolerance, "" if distance <= prover.tolerance else f"a copy of its modules is {distance:.0e} off"


def _gradients(lane: Lane, batch: Batch) -> tuple[float, float, Sequence[Tensor]]:
    """Loss and gradients of the probe samples; the model is left without gradients."""
    places = lane.rule.places
    places.set_keys(sample_keys(0, 0, np.arange(NUM_PROBE_SAMPLES)), window_key(0, 0, 0))
    with places.active(), lane.rule.active():  # as in a step: without full logits, which would take more memory than training
        loss = head_loss(lane.model(**accepted_arguments(lane.model, batch)))
        if loss.requires_grad:
            loss.backward()
    parameters = [p for p in lane.model.parameters() if p.requires_grad]
    kept = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return float(loss.detach()), 0.0, kept


def _versions(buffers: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Which tensors they are, and how often each was written to."""
    return [(id(buffer), buffer._version) for buffer in buffers]
