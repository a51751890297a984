"""A loader's cache of proofs: a model is proven once, not in every window."""

from torch import nn

from hf_ga.exact.forward import LossFunction, module_modes, unwrapped
from hf_ga.exact.window import LoaderState
from hf_ga.proof.identity import identity_of, same
from hf_ga.proof.targets import ProvenLoss


def find_proof(state: LoaderState, model: nn.Module, loss_fn: LossFunction | None) -> ProvenLoss | None:
    """The cached proof of this model with this loss and these training modes, or None."""
    base, identity = unwrapped(model), identity_of(loss_fn)
    for known_model, known_loss, proven in state.proofs:
        if known_model is base and same(known_loss, identity) and proven.modes == module_modes(base):
            return proven
    return None


def keep_proof(state: LoaderState, model: nn.Module, loss_fn: LossFunction | None, proven: ProvenLoss) -> None:
    """Keep the last proof of each model."""
    base = unwrapped(model)
    state.proofs[:] = [proof for proof in state.proofs if proof[0] is not base] + [(base, identity_of(loss_fn), proven)]
    state.pad_to_window |= proven.pad_to_window
