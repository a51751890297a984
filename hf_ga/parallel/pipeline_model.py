"""Pipeline stages of a model of transformers, which keep its class, its forward and its names.

A stage is the model itself in which the modules of other stages are replaced by stand-ins that
return their input. So its parameters, and its dropout sites, are called as in the whole model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError
from hf_ga.exact.forward import argument_filter

# Entries of a batch that only the embeddings read.
EMBEDDED_ENTRIES = ("input_ids", "token_type_ids")


@dataclass(frozen=True)
class Parts:
    """Where the parts of a model are, as paths of its modules.

    Attributes:
        embeddings: What comes before the layers, and belongs to the first stage.
        layers: The list of layers.
        head: What comes behind the layers, and belongs to the last stage.
    """

    embeddings: tuple[str, ...]
    layers: str
    head: tuple[str, ...]


_LLAMA = Parts(("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"))
# By the name of the model's class, as importing them all takes seconds.
PARTS = {
    "BertForMaskedLM": Parts(("bert.embeddings",), "bert.encoder.layer", ("cls",)),
    "BertForSequenceClassification": Parts(
        ("bert.embeddings",), "bert.encoder.layer", ("bert.pooler", "dropout", "classifier")
    ),
    "BertForTokenClassification": Parts(
        ("bert.embeddings",), "bert.encoder.layer", ("dropout", "classifier")
    ),
    "GPT2LMHeadModel": Parts(
        ("transformer.wte", "transformer.wpe", "transformer.drop"),
        "transformer.h",
        ("transformer.ln_f", "lm_head"),
    ),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}


class PassedThrough(nn.Module):
    """A stand-in for a module of another stage: it returns the hidden states that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return `inputs_embeds`, or else the first argument."""
        if inputs_embeds is not None:
            return inputs_embeds
        return args[0]


class AddsNothing(nn.Module):
    """A stand-in for an embedding of another stage, whose vectors the hidden states contain."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return a zero, which the model adds to the hidden states."""
        return torch.zeros((), device=ids.device)


class StageModel(nn.Module):
    """One stage of a model.

    Args:
        model: A model of one of the classes in `PARTS`. It is changed: it keeps the modules of this
            stage only.
        stage: Number of the stage, from 0.
        num_stages: Number of stages. The first ones get one layer more if the layers cannot be
            shared evenly.

    Attributes:
        model: The model; `state_dict` and `named_parameters` give the names of the whole model.
        tied: The embedding weight that the output layer shares with the embeddings, on the first
            and on the last stage, which both keep a copy. None on others, and if they share none.

    Raises:
        ConfigError: If the model is of another class, or has fewer layers than stages.

    Example:
        first = StageModel(copy.deepcopy(model), stage=0, num_stages=2)
        last = StageModel(model, stage=1, num_stages=2)
        hidden = first(**batch)
        loss = last(inputs_embeds=hidden, **batch).loss
    """

    def __init__(self, model: PreTrainedModel, stage: int, num_stages: int) -> None:
        super().__init__()
        check_can_be_cut(model, num_stages)
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        tied = tied_embedding(model)
        self._cut(model, stage, num_stages, tied)
        self.tied: nn.Parameter | None = None
        if tied is not None and (self.is_first or self.is_last):
            self.tied = tied.weight
        self.model = model
        self._accepted = argument_filter(model)

    def forward(self, **batch: Any) -> Any:
        """Run this stage.

        Args:
            batch: The arguments of the whole model, on every stage; behind the first stage also
                `inputs_embeds`, the hidden states of the stage before, of shape (samples, tokens,
                width).

        Returns:
            The model's outputs on the last stage, hidden states on the others.
        """
        if not self.is_first:
            batch = {name: v for name, v in batch.items() if name not in EMBEDDED_ENTRIES}
        if not self.is_last:
            batch.pop("labels", None)
        arguments = self._accepted({**batch, "use_cache": False})
        outputs = self.model(**arguments)
        if self.is_last:
            return outputs
        # The stand-ins of the head passed the hidden states through.
        return outputs.logits

    def _cut(
        self, model: PreTrainedModel, stage: int, num_stages: int, tied: nn.Embedding | None
    ) -> None:
        """Replace the modules of other stages by stand-ins."""
        parts = PARTS[type(model).__name__]
        num_layers = len(model.get_submodule(parts.layers))
        own_layers = layers_of(stage, num_stages, num_layers)
        elsewhere = [
            f"{parts.layers}.{layer}" for layer in range(num_layers) if layer not in own_layers
        ]
        if not self.is_first:
            elsewhere += parts.embeddings
        if not self.is_last:
            elsewhere += parts.head
        kept = tied if self.is_last else None
        for path in elsewhere:
            replace_module(model, path, kept)


def layers_of(stage: int, num_stages: int, num_layers: int) -> list[int]:
    """Return the numbers of a stage's layers.

    >>> layers_of(0, 2, 5), layers_of(1, 2, 5)
    ([0, 1, 2], [3, 4])
    """
    of_stages = np.array_split(np.arange(num_layers), num_stages)
    return of_stages[stage].tolist()


def check_can_be_cut(model: nn.Module, num_stages: int) -> None:
    """Check that a model can be cut into so many stages.

    Raises:
        ConfigError: If it is of another class than those in `PARTS`, has fewer layers, or uses
            gradient checkpointing.
    """
    name = type(model).__name__
    if name not in PARTS or not type(model).__module__.startswith("transformers."):
        raise ConfigError(
            f"unsupported model for a pipeline: {name}. Supported are {', '.join(PARTS)}, without "
            "adapters or wrappers. Use FSDP for other models."
        )
    num_layers = len(model.get_submodule(PARTS[name].layers))
    if not 2 <= num_stages <= num_layers:
        raise ConfigError(
            f"num_stages must be between 2 and the number of layers, got {num_stages} stages for "
            f"{num_layers} layers of {name}."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "unsupported: gradient checkpointing in a pipeline, because a stage runs backward of "
            "one micro-batch after the forward of another, so recomputed dropout would be the "
            "other's. Call model.gradient_checkpointing_disable(), or use more stages."
        )


def tied_embedding(model: PreTrainedModel) -> nn.Embedding | None:
    """Return the input embedding if the output layer shares its weight, or else None."""
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if output is None or output.weight is not embedding.weight:
        return None
    return embedding


def replace_module(model: nn.Module, path: str, kept: nn.Embedding | None) -> None:
    """Replace a module by a stand-in.

    Args:
        model: The model that contains the module.
        path: The module's path in the model.
        kept: An embedding that stays under its name, because the head needs its weight. None:
            nothing stays.
    """
    module = model.get_submodule(path)
    if module is kept:
        return
    stand_in = AddsNothing() if isinstance(module, nn.Embedding) else PassedThrough()
    for name, child in module.named_children():
        if child is kept:
            stand_in.add_module(name, child)
    model.set_submodule(path, stand_in.train(module.training))
