"""May a model's layers be computed on packed tokens? Decided on its own samples, padded against packed, with dropout on."""

from typing import Any

import numpy as np
from torch import nn

from hf_ga.exact.batches import Batch
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, Probe, off
from hf_ga.proof.proof import Prover
from hf_ga.speed.packing import Packing

# Settings by which attention sees a part of the sample only; samples that are shorter than it would not show it.
WINDOWS = ("sliding_window", "attention_window", "attention_chunk_size", "local_attention", "window_size")
# Settings by which a training forward leaves layers out, or hands out what is inside of them.
NEVER_PACKED = ("is_encoder_decoder", "output_hidden_states", "output_attentions", "layerdrop", "encoder_layerdrop")


def prove_packing(prover: Prover, one_width: bool) -> tuple[Packing | None, str]:
    """Compare loss and gradients of some samples padded and packed, in training mode with keyed dropout.

    Args:
        prover: its places are found and active, its tolerance is measured. one_width: whether padding matters to the model.

    Returns:
        (how to pack the model, "") or (None, why it is not packed).
    """
    layers = find_stack(prover.model)
    if layers is None or (reason := _obstacle(prover, one_width)):
        return None, reason if layers is not None else "it has no stack of equal layers"
    packing, batch = Packing(prover.places, layers), prover._rows_with_targets()
    with packing.active():
        padded = _probe(prover, packing, batch, gain=np.inf)
        try:
            packed = _probe(prover, packing, batch, gain=1.0)
        except Exception as error:  # whatever a forward raises that cannot take packed tokens
            return None, f"its layers cannot take packed tokens ({type(error).__name__}: {error})"
        if prover.places.packed is None:
            return None, "its batches have no padding that an attention mask tells and no target needs"
        if not (distance := off(packed, padded)) <= prover.tolerance:
            return None, f"packed tokens change its loss or gradient by {distance:.0e}, relative"
        packing.tried = set()
        try:
            is_same = off(_probe(prover, packing, batch, gain=1.0), padded) <= prover.tolerance and not _has_window(prover.model)
        except Exception:  # heads that these ways cannot take
            is_same = False
        packing.plain, packing.dropped = (is_same and way in packing.tried for way in ("plain", "dropped"))
    packing.tried = packing.gain = None
    return packing, ""


def find_stack(model: nn.Module) -> nn.ModuleList | None:
    """The list of equal layers that holds most parameters, not one inside a layer; None if there is none."""
    stacks = {}
    for name, module in model.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
        if is_stack and not any(name.startswith(f"{outer}.") for outer in stacks):
            stacks[name] = module
    return max(stacks.values(), key=lambda stack: sum(p.numel() for p in stack.parameters()), default=None)


def _obstacle(prover: Prover, one_width: bool) -> str:
    """What rules packing out without trying; empty if nothing does."""
    if one_width:
        return "padding matters to it"
    if prover.router is not None:
        return "its router's balancing loss looks at padded batches"
    if prover.places.unkeyed:
        return "it draws random numbers that are not tied to samples"
    config = getattr(prover.model, "config", None)
    if settings := [name for name in NEVER_PACKED if getattr(config, name, None)]:
        return f"its configuration has {settings[0]}"
    return ""


def _probe(prover: Prover, packing: Packing, batch: Batch, gain: float) -> Probe:
    packing.gain = gain
    packing.set_batch(batch, prover.device)
    return prover._probe(batch, np.arange(NUM_PROBE_SAMPLES))


def _has_window(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    return any(getattr(config, name, None) for name in WINDOWS)
