"""Pipeline stages of a transformers model.

A stage is the model itself, in which the modules of other stages are replaced by placeholders that
return their input. So it keeps the model's class and forward, and its parameters and dropout sites
have the names that they have in the full model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError
from hf_ga.model.forward import argument_filter

# Attributes of a module with its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Entries of a batch that only the embeddings read, so that only the first stage gets them.
EMBEDDING_INPUTS = ("input_ids", "token_type_ids")


@dataclass(frozen=True)
class ModulePaths:
    """The paths of those modules of a model class that are distributed over pipeline stages.

    Attributes:
        embeddings: The modules before the layers, which the first stage keeps.
        layers: The list of layers, of which each stage keeps a part.
        head: The modules after the layers, which the last stage keeps.
    """

    embeddings: tuple[str, ...]
    layers: str
    head: tuple[str, ...]


_LLAMA = ModulePaths(("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"))
# The models that can be split into pipeline stages: name of the model class -> its modules.
# Importing the classes themselves would take seconds.
SUPPORTED_MODELS = {
    "BertForMaskedLM": ModulePaths(("bert.embeddings",), "bert.encoder.layer", ("cls",)),
    "BertForSequenceClassification": ModulePaths(
        ("bert.embeddings",), "bert.encoder.layer", ("bert.pooler", "dropout", "classifier")
    ),
    "BertForTokenClassification": ModulePaths(
        ("bert.embeddings",), "bert.encoder.layer", ("dropout", "classifier")
    ),
    "GPT2LMHeadModel": ModulePaths(
        ("transformer.wte", "transformer.wpe", "transformer.drop"),
        "transformer.h",
        ("transformer.ln_f", "lm_head"),
    ),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}


class PassThrough(nn.Module):
    """A placeholder for a module of another pipeline stage: it returns the hidden states that it
    gets.
    """

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged, in place of a module of another pipeline stage:
        `inputs_embeds` if it is passed, otherwise the first argument.
        """
        if inputs_embeds is not None:
            return inputs_embeds
        return args[0]


class ZeroEmbedding(nn.Module):
    """A placeholder for an embedding of another pipeline stage. The model adds embeddings to the
    hidden states, but on this stage they contain them already.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Return a scalar zero in place of an embedding of another pipeline stage: added to the
        hidden states, it does not change them.
        """
        return torch.zeros((), device=ids.device)


class StageModel(nn.Module):
    """One pipeline stage of a model: the model with its own part of the layers, and placeholders
    for the modules of other stages.

    Args:
        model: A model of one of the classes in `SUPPORTED_MODELS`. It is changed in place: it keeps
            the modules of this stage only.
        stage: Index of the stage, from 0.
        num_stages: Number of stages. If the layers cannot be divided evenly, the first stages get
            one layer more.

    Attributes:
        model: The model. Its parameters have the names of the full model.
        is_first: Whether this stage contains the embeddings.
        is_last: Whether this stage contains the head, and computes the loss.
        tied: The embedding weight that the output layer shares with the embeddings, of which the
            first and the last stage keep a copy each. None on other stages, and if they share
            none.

    Raises:
        ConfigError: If the model cannot be split into this number of stages.

    Example:
        first = StageModel(copy.deepcopy(model), stage=0, num_stages=2)
        last = StageModel(model, stage=1, num_stages=2)
        hidden = first(**batch)
        loss = last(inputs_embeds=hidden, **batch).loss
    """

    def __init__(self, model: PreTrainedModel, stage: int, num_stages: int) -> None:
        """Check that the model can be split into pipeline stages, and replace its modules of other
        stages by placeholders, in place.
        """
        super().__init__()
        check_can_be_split(model, num_stages)
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        embedding = tied_embedding(model)
        self._replace_modules_of_other_stages(model, stage, num_stages, embedding)
        self.tied: nn.Parameter | None = None
        if embedding is not None and (self.is_first or self.is_last):
            self.tied = embedding.weight
        self.model = model
        self._accepted = argument_filter(model)  # keeps the arguments that the forward takes

    def forward(self, **batch: Any) -> Any:
        """Run the forward of this pipeline stage on one micro-batch.

        Args:
            batch: The arguments of the full model, on every stage; on all stages but the first also
                `inputs_embeds`, the hidden states of the previous stage, of shape (samples, tokens,
                hidden size).

        Returns:
            The model's outputs on the last stage, hidden states on the others.
        """
        if not self.is_first:
            batch = {name: v for name, v in batch.items() if name not in EMBEDDING_INPUTS}
        if not self.is_last:
            batch.pop("labels", None)
        arguments = self._accepted({**batch, "use_cache": False})
        outputs = self.model(**arguments)
        if self.is_last:
            return outputs
        # The placeholders of the head returned the hidden states.
        return outputs.logits

    def _replace_modules_of_other_stages(
        self, model: PreTrainedModel, stage: int, num_stages: int, tied: nn.Embedding | None
    ) -> None:
        """Replace the modules of other stages by placeholders, in place. The last stage keeps
        `tied`, the input embedding whose weight the output layer shares.
        """
        paths = SUPPORTED_MODELS[type(model).__name__]
        num_layers = len(model.get_submodule(paths.layers))
        own_layers = layers_of_stage(stage, num_stages, num_layers)
        paths_to_replace = [
            f"{paths.layers}.{layer}" for layer in range(num_layers) if layer not in own_layers
        ]
        if not self.is_first:
            paths_to_replace += paths.embeddings
        if not self.is_last:
            paths_to_replace += paths.head
        kept = tied if self.is_last else None
        for path in paths_to_replace:
            replace_module(model, path, kept)


def layers_of_stage(stage: int, num_stages: int, num_layers: int) -> list[int]:
    """Return the indices of the layers that a pipeline stage keeps: a contiguous part of nearly
    equal size for each stage.

    >>> layers_of_stage(0, 2, 5), layers_of_stage(1, 2, 5)
    ([0, 1, 2], [3, 4])
    """
    layers_by_stage = np.array_split(np.arange(num_layers), num_stages)
    return layers_by_stage[stage].tolist()


def first_layers(model: PreTrainedModel, num_stages: int) -> list[nn.Module]:
    """Return the first layer of each pipeline stage of a full model."""
    layers = model.get_submodule(SUPPORTED_MODELS[type(model).__name__].layers)
    return [
        layers[layers_of_stage(stage, num_stages, len(layers))[0]] for stage in range(num_stages)
    ]


def check_can_be_split(model: nn.Module, num_stages: int) -> None:
    """Check that a model can be split into `num_stages` pipeline stages.

    Raises:
        ConfigError: If the model is not of a class of transformers in `SUPPORTED_MODELS`, there are
            fewer than two stages or fewer layers than stages, or gradient checkpointing is on.
    """
    name = type(model).__name__
    if name not in SUPPORTED_MODELS or not type(model).__module__.startswith("transformers."):
        raise ConfigError(
            f"unsupported model for a pipeline: {name}. Supported are "
            f"{', '.join(SUPPORTED_MODELS)}, without adapters or wrappers. Use FSDP for other "
            "models."
        )
    num_layers = len(model.get_submodule(SUPPORTED_MODELS[name].layers))
    if not 2 <= num_stages <= num_layers:
        raise ConfigError(
            f"num_stages must be between 2 and the number of layers, got {num_stages} stages for "
            f"{num_layers} layers of {name}."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "unsupported: gradient checkpointing in a pipeline, because a stage runs the backward "
            "of one micro-batch after the forward of another, so the recomputed forward would use "
            "the dropout masks of the other. Call model.gradient_checkpointing_disable(), or use "
            "more stages."
        )


def check_no_hooks(model: PreTrainedModel) -> None:
    """Check that no hook runs in several pipeline stages, on hidden states in place of outputs.

    Args:
        model: A full model of one of the classes in `SUPPORTED_MODELS`.

    Raises:
        ConfigError: If a module that all stages keep (the model itself, its backbone) has a hook,
            or a forward of its own.
    """
    paths = SUPPORTED_MODELS[type(model).__name__]
    kept_by_all = set()
    for path in (*paths.embeddings, paths.layers, *paths.head):
        parts = path.split(".")
        kept_by_all |= {".".join(parts[:number]) for number in range(len(parts))}
    for path in sorted(kept_by_all):
        module = model.get_submodule(path)
        if any(getattr(module, name) for name in HOOKS) or "forward" in vars(module):
            raise ConfigError(
                f"unsupported in a pipeline: a hook or another forward of {type(module).__name__}, "
                "because each stage would run it, most of them on hidden states. Remove it (a "
                "model that accelerator.prepare returned has one), or put it on a module of one "
                "stage: an embedding, a layer, or the head."
            )


def tied_embedding(model: PreTrainedModel) -> nn.Embedding | None:
    """Return the input embedding of a model if its output layer shares the weight (tied
    embeddings), so that the first and the last pipeline stage both need it; otherwise None.
    """
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if output is None or output.weight is not embedding.weight:
        return None
    return embedding


def replace_module(model: nn.Module, path: str, kept: nn.Embedding | None) -> None:
    """Replace a module of another pipeline stage by a placeholder, in place. Nothing is replaced if
    the module is `kept` itself.

    Args:
        model: The model that contains the module.
        path: The module's path in the model.
        kept: An embedding that must stay, under its name, because the head uses its weight. None:
            nothing must stay.
    """
    module = model.get_submodule(path)
    if module is kept:
        return
    placeholder = ZeroEmbedding() if isinstance(module, nn.Embedding) else PassThrough()
    for name, child in module.named_children():
        if child is kept:
            placeholder.add_module(name, child)
    model.set_submodule(path, placeholder.train(module.training))
