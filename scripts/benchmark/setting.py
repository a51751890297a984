"""The setting of a benchmark: model, samples, batch sizes and precision, as plain values that can
be sent to other processes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import common
import torch
from accelerate import Accelerator
from common import Sample, Shape
from transformers import PreTrainedModel

# `base` is GPT-2-small and, except for its vocabulary, BERT-base.
SIZES = {
    "tiny": Shape("gpt", layers=2, width=32, heads=2, words=4000),
    "small": Shape("gpt", layers=4, width=256, heads=4, words=4000),
    "base": Shape("gpt"),
}
SEED = 0  # of weights, order of samples and dropout


@dataclass(frozen=True)
class Setting:
    """The setting that all arms (ways of training) of a benchmark share: model, data, batch sizes.

    Attributes:
        model: "gpt" (a causal language model) or "bert" (a classifier).
        size: A key of `SIZES`.
        device: "cpu" or "cuda".
        num_threads: Number of torch's threads.
        mixed_precision: "no" or "bf16".
        dropout: Dropout probability at all sites.
        max_length: Maximum number of tokens of a sample.
        window_size: Samples of an optimizer step.
        micro_batch_size: Samples of a micro-batch.
        epochs: Number of measured epochs, after one that is not measured.
        samples: The tokenized samples of an epoch, see `common.SAMPLES`.
    """

    model: str = "gpt"
    size: str = "small"
    device: str = "cpu"
    num_threads: int = 1
    mixed_precision: str = "no"
    dropout: float = 0.1
    max_length: int = 256
    window_size: int = 64
    micro_batch_size: int = 8
    epochs: int = 3
    samples: list[Sample] = field(default_factory=list, repr=False)

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return replace(SIZES[self.size], kind=self.model)

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches of an optimizer step."""
        return self.window_size // self.micro_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch."""
        return len(self.samples) // self.window_size

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sample."""
        return [len(sample["input_ids"]) for sample in self.samples]

    @property
    def real_tokens(self) -> int:
        """Number of tokens of an epoch, without padding."""
        return sum(self.lengths)


def build_model(setting: Setting) -> PreTrainedModel:
    """Build the model of a benchmark's setting, in training mode on its device, with random weights
    that are the same in every process. Seeds torch's global generator.
    """
    torch.manual_seed(SEED)
    arguments: dict[str, Any] = {}
    if setting.model == "bert":
        arguments["num_labels"] = common.NUM_CLASSES
    model = common.build_model(setting.shape, setting.dropout, setting.max_length, **arguments)
    return model.to(setting.device)


def make_accelerator(setting: Setting) -> Accelerator:
    """Make Accelerate's accelerator for the device and precision of a setting."""
    return Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
