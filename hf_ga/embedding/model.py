"""An embedding model: a transformers encoder or decoder pooled to one unit vector per text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ga.embedding.layout import write_sentence_transformers_files
from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError
from hf_ga.model.precision import at_least_float32

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Prefixes of the batch entries of a column of texts: "input_ids_anchor", "attention_mask_anchor".
INPUT_IDS = "input_ids_"
ATTENTION_MASK = "attention_mask_"
# Prefix of the encoder's parameters in the state dict.
ENCODER = "encoder."
# The entry of the model's outputs with the logarithm of the learned temperature.
LOG_TEMPERATURE = "log_temperature"


class EmbeddingModel(nn.Module):
    """An encoder or decoder whose last hidden states are pooled to one unit vector per text.

    Args:
        encoder: A model of `AutoModel`. Its own pooler, if any, is not used, and its weights are
            frozen.
        pooling: One of `POOLINGS`.
        temperature: The initial value of a learned temperature of the loss, which is then a
            parameter of the model; None if the loss has a fixed temperature.
        max_length: The maximum number of tokens of a text, saved for those who load the model; None
            for the tokenizer's limit.

    Raises:
        ConfigError: If the pooling is unknown, or the model is an encoder-decoder.

    Example:
        model = EmbeddingModel(AutoModel.from_pretrained("bert-base-uncased"), "mean")
        outputs = model(input_ids_anchor=..., attention_mask_anchor=...)
        outputs["anchor"]      # shape (samples, hidden size)
    """

    def __init__(
        self,
        encoder: "PreTrainedModel",
        pooling: str = "mean",
        *,
        temperature: float | None = None,
        max_length: int | None = None,
    ) -> None:
        """Make an embedding model from a transformers encoder or decoder and a pooling; see the
        class for the arguments. The encoder's own pooler is frozen, as it is not used.
        """
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
            # A tensor of shape (1,), as FSDP2 cannot shard scalars.
            initial = torch.tensor([math.log(temperature)])
            self.log_temperature = nn.Parameter(initial)
        pooler = getattr(encoder, "pooler", None)
        if isinstance(pooler, nn.Module):
            pooler.requires_grad_(False)

    @property
    def config(self) -> "PretrainedConfig":
        """The configuration of the embedding model's encoder."""
        return self.encoder.config

    @property
    def temperature(self) -> float | None:
        """The current value of the embedding model's learned temperature (of its contrastive loss);
        None if it has none.
        """
        if self.log_temperature is None:
            return None
        learned = self.log_temperature.detach().exp()
        return float(learned)

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The tied weights of the embedding model: parameter name -> name of the parameter it is
        tied to, as in `PreTrainedModel`.
        """
        tied_weights = self.encoder.all_tied_weights_keys
        return {ENCODER + name: ENCODER + source for name, source in tied_weights.items()}

    @property
    def _no_split_modules(self) -> list[str] | None:
        """Class names of the layers of the embedding model's encoder that FSDP wraps, as in
        `PreTrainedModel`.
        """
        return self.encoder._no_split_modules

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Count the elements of all parameters of the embedding model, or of the trainable ones
        only, as `PreTrainedModel.num_parameters` does.
        """
        counted = [p for p in self.parameters() if p.requires_grad or not only_trainable]
        return sum(p.numel() for p in counted)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute the embedding of each text, a unit vector in at least float32: the pooled last
        hidden states of the encoder.

        Args:
            input_ids: Token ids, int64, shape (texts, sequence length).
            attention_mask: 1 for tokens and 0 for padding, shape (texts, sequence length).

        Returns:
            Shape (texts, hidden size).
        """
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = POOLINGS[self.pooling](at_least_float32(hidden), attention_mask)
        return F.normalize(pooled, dim=-1)

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """Compute the embeddings of all texts of a batch, column by column.

        Args:
            **batch: `input_ids_anchor` and `attention_mask_anchor`, shape (samples, sequence
                length), and the same for the other columns (`_positive`, `_negative`, ...). Other
                entries are ignored.

        Returns:
            The embeddings `anchor`, `positive`, ..., shape (samples, hidden size); if the
            temperature is learned, also `log_temperature`, a scalar.
        """
        names = [name for name in batch if name.startswith(INPUT_IDS)]
        columns = [name.removeprefix(INPUT_IDS) for name in names]
        outputs = {
            column: self.encode(batch[INPUT_IDS + column], batch[ATTENTION_MASK + column])
            for column in columns
        }
        if self.log_temperature is not None:
            outputs[LOG_TEMPERATURE] = self.log_temperature.reshape(())
        return outputs

    def save_pretrained(
        self, folder: Path | str, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        """Save the embedding model: its encoder, and its pooling in the files that
        sentence-transformers loads.

        A learned temperature is not saved, as it belongs to the loss.

        Args:
            folder: The folder to write to; it is created if it does not exist.
            state_dict: The weights of this `EmbeddingModel`, gathered from all ranks if they are
                sharded. Default: its own state dict.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        encoder_weights = {
            name.removeprefix(ENCODER): tensor
            for name, tensor in weights.items()
            if name.startswith(ENCODER)
        }
        self.encoder.save_pretrained(folder, state_dict=encoder_weights)
        embedding_dim = self.config.get_text_config().hidden_size
        write_sentence_transformers_files(
            Path(folder), self.pooling, embedding_dim, self.max_length
        )
