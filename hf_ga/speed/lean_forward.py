"""Less computation and memory in the forward of a transformers model, with the same result."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.model.forward import transformers_configs, without_cache
from hf_ga.model.loaded import loaded_class
from hf_ga.model.override import Replacement
from hf_ga.speed.speed_up import Call, SpeedUp

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LeanForward(SpeedUp):
    """Speed-up that disables the generation cache of a transformers model, and fuses GPT-2's
    activation.

    A cache copies all keys and values (transformers' Trainer disables it too). `gelu_new` in
    transformers consists of eight operations, five of which save a tensor for the backward; torch's
    kernel of the same formula, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and
    Gimpel 2016, "Gaussian Error Linear Units", section 2), saves its input only. Both are changed
    in forwards and backwards only, so the saved model equals the loaded one.
    """

    name = "lean forward"

    def __init__(self) -> None:
        """Start without a model; `attach` keeps its configs."""
        self._configs: list[PretrainedConfig] = []
        self._cache = ExitStack()  # restores the configs

    def attach(self, model: nn.Module, draws: KeyedDraws) -> str | None:
        """Keep the configs of the transformers models in a model; it fits any model."""
        self._configs = transformers_configs(model)
        return None

    def before(self, call: Call) -> None:
        """Let the models return no cache."""
        self._cache.enter_context(without_cache(self._configs))

    def replacements(self) -> Sequence[Replacement]:
        """Fuse `gelu_new`, GPT-2's activation."""
        activations = loaded_class("transformers.activations", "NewGELUActivation")
        return [(activation, "forward", _fused_gelu) for activation in activations]

    def after(self) -> None:
        """Restore the configs."""
        self._cache.close()


def _fused_gelu(self: nn.Module, input: Tensor) -> Tensor:
    """Replace `NewGELUActivation.forward` (`gelu_new`, GPT-2's activation) by torch's kernel.

    The kernel computes the same formula, and saves only its input for the backward.
    """
    return F.gelu(input, approximate="tanh")
