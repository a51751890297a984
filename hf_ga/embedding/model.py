"""A transformers encoder with pooling: one unit vector for each text of a sample."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from hf_ga.embedding.layout import write_layout
from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError
from hf_ga.exact.precision import at_least_float32

# + the name of a column of texts: entries of a batch.
INPUT_IDS = "input_ids_"
ATTENTION_MASK = "attention_mask_"
# Prefix of the names of the encoder's parameters.
ENCODER = "encoder."
# The entry of the outputs.
LOG_TEMPERATURE = "log_temperature"


def columns_of(batch: Mapping[str, Any]) -> list[str]:
    """List the columns of texts in a batch, such as `["anchor", "positive"]`."""
    return [name.removeprefix(INPUT_IDS) for name in batch if name.startswith(INPUT_IDS)]


class EmbeddingModel(nn.Module):
    """An encoder or decoder whose last hidden states are pooled to one unit vector a text.

    Args:
        encoder: A model of `AutoModel`. The weights of its own pooler, which is not used, are
            frozen.
        pooling: One of `POOLINGS`.
        temperature: The initial value of a learned temperature of the loss, which is then a
            parameter of the model. None: the loss has a fixed one.
        max_length: Largest number of tokens of a text, for those who load the saved model. None:
            the tokenizer's limit.

    Raises:
        ConfigError: If the pooling is unknown, or the model is an encoder-decoder.

    Example:
        model = EmbeddingModel(AutoModel.from_pretrained("bert-base-uncased"), "mean")
        outputs = model(input_ids_anchor=..., attention_mask_anchor=...)
        outputs["anchor"]      # shape (samples, hidden size)
    """

    def __init__(
        self,
        encoder: PreTrainedModel,
        pooling: str = "mean",
        *,
        temperature: float | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"unknown pooling {pooling!r}: use one of {', '.join(POOLINGS)}.")
        if encoder.config.is_encoder_decoder:
            raise ConfigError(
                f"embeddings need an encoder or a decoder, but {encoder.config.model_type} has "
                "both: use another model, or its encoder alone."
            )
        self.encoder = encoder
        self.pooling = pooling
        self.max_length = max_length
        self.log_temperature: nn.Parameter | None = None
        if temperature is not None:
            # Of one dimension, as FSDP2 shards no scalars.
            initial = torch.tensor([math.log(temperature)])
            self.log_temperature = nn.Parameter(initial)
        pooler = getattr(encoder, "pooler", None)
        if isinstance(pooler, nn.Module):
            pooler.requires_grad_(False)

    @property
    def config(self) -> PretrainedConfig:
        """The encoder's configuration."""
        return self.encoder.config

    @property
    def temperature(self) -> float | None:
        """The learned temperature now; None if there is none."""
        if self.log_temperature is None:
            return None
        learned = self.log_temperature.detach().exp()
        return float(learned)

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """Name of a parameter -> that of the one it is tied to, as in `PreTrainedModel`."""
        tied = self.encoder.all_tied_weights_keys
        return {ENCODER + name: ENCODER + source for name, source in tied.items()}

    @property
    def _no_split_modules(self) -> list[str] | None:
        """Classes of the layers that FSDP shards, as in `PreTrainedModel`."""
        return self.encoder._no_split_modules

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Count the parameters, as `PreTrainedModel.num_parameters` does."""
        chosen = [p for p in self.parameters() if p.requires_grad or not only_trainable]
        return sum(p.numel() for p in chosen)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute one unit vector for each text, in at least float32.

        Args:
            input_ids: int64, shape (texts, width).
            attention_mask: 1 for real tokens, 0 for padding, shape (texts, width).

        Returns:
            Shape (texts, hidden size).
        """
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = POOLINGS[self.pooling](at_least_float32(hidden), attention_mask)
        return F.normalize(pooled, dim=-1)

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """Compute the vectors of all texts of a batch, and the learned temperature.

        Args:
            batch: `input_ids_anchor` and `attention_mask_anchor` of shape (samples, width), and the
                same for the other columns (`_positive`, `_negative`, ...). Other entries are
                ignored.

        Returns:
            `anchor`, `positive`, ... of shape (samples, hidden size), and, if it is learned,
            `log_temperature` of shape ().
        """
        outputs = {
            column: self.encode(batch[INPUT_IDS + column], batch[ATTENTION_MASK + column])
            for column in columns_of(batch)
        }
        if self.log_temperature is not None:
            outputs[LOG_TEMPERATURE] = self.log_temperature.reshape(())
        return outputs

    def save_pretrained(
        self, folder: Path | str, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        """Save the encoder, and its pooling as sentence-transformers loads it. A learned
        temperature is not saved, as it belongs to the loss.

        Args:
            folder: Created if it does not exist.
            state_dict: The model's weights, if they are not on this rank. Default: its own.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        of_encoder = {
            name.removeprefix(ENCODER): tensor
            for name, tensor in weights.items()
            if name.startswith(ENCODER)
        }
        self.encoder.save_pretrained(folder, state_dict=of_encoder)
        size = self.config.get_text_config().hidden_size
        write_layout(Path(folder), self.pooling, size, self.max_length)
