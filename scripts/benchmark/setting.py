"""The setting of a benchmark: model, samples, batch and precision, as plain values for other
processes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from hf_ga.finetuning.data import corpus

Sample = dict[str, Any]
MODELS = ("gpt", "bert")  # a causal language model, and a classifier
# Layers, width, heads, words. `base` is GPT-2-small and, except for its vocabulary, BERT-base.
SIZES = {"tiny": (2, 32, 2, 4000), "small": (4, 256, 4, 4000), "base": (12, 768, 12, 50257)}


@dataclass(frozen=True)
class Setting:
    """The setting of all arms.

    Attributes:
        model: One of `MODELS`.
        size: A key of `SIZES`.
        device: "cpu" or "cuda".
        num_threads: torch's threads.
        mixed_precision: "no" or "bf16".
        dropout: Probability at all sites.
        max_length: Largest number of tokens of a sample.
        window_size: Samples in an optimizer step.
        micro_batch_size: Samples in a micro-batch.
        epochs: Measured epochs, after one that is not measured.
        seed: The seed of weights, order and dropout.
        arms: Names of the arms to measure; empty: all.
        samples: The tokenized samples of an epoch, see `documentation_strings`.
        num_labels: Number of classes of the task.
        pad_token_id: The id of the padding token.
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
    seed: int = 0
    arms: tuple[str, ...] = ()
    samples: list[Sample] = field(default_factory=list, repr=False)
    num_labels: int = 2
    pad_token_id: int = 0

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a window."""
        return self.window_size // self.micro_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """Windows of an epoch."""
        return len(self.samples) // self.window_size

    @property
    def real_tokens(self) -> int:
        """Tokens of an epoch without padding."""
        return sum(len(sample["input_ids"]) for sample in self.samples)

    @property
    def collate(self) -> Callable[[Sequence[Sample]], dict[str, Tensor]]:
        """The collate function: samples -> keyword arguments of the model."""
        return partial(_collate, pad_token_id=self.pad_token_id)


def documentation_strings(model: str, max_length: int, count: int) -> dict[str, Any]:
    """Return the first `count` training samples of the embedded corpus, as the attributes of a
    `Setting` that depend on them.
    """
    rows = corpus.stdlib_splits()["train"]
    tokenizer = corpus.load_stdlib_tokenizer()
    packages: list[str] = []
    if model == "bert":
        in_package = Counter(row["package"] for row in rows)
        packages = sorted(name for name, n in in_package.items() if n >= corpus.MIN_ROWS_PER_LABEL)
        rows = [row for row in rows if row["package"] in packages]
    samples = []
    for i, row in enumerate(rows[:count]):
        ids = tokenizer(row["text"])["input_ids"]
        if model == "gpt":
            samples.append({"id": i, "input_ids": [*ids, tokenizer.eos_token_id][:max_length]})
        else:
            ids = [tokenizer.cls_token_id, *ids][:max_length]
            samples.append({"id": i, "input_ids": ids, "label": packages.index(row["package"])})
    return {
        "samples": samples,
        "num_labels": max(len(packages), 2),
        "pad_token_id": tokenizer.pad_token_id,
    }


def _collate(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Tensor]:
    """Pad the ids of samples, and add the labels of their task."""
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
    }
    if "label" in samples[0]:
        return batch | {"labels": torch.tensor([sample["label"] for sample in samples])}
    return batch | {"labels": pad_sequence(ids, batch_first=True, padding_value=-100)}


def build_model(setting: Setting) -> PreTrainedModel:
    """Build the model in training mode on its device, with new weights that are the same in every
    process.
    """
    torch.manual_seed(setting.seed)
    layers, width, heads, words = SIZES[setting.size]
    if setting.model == "gpt":
        drops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), setting.dropout)
        sizes = {
            "n_layer": layers,
            "n_embd": width,
            "n_head": heads,
            "n_positions": setting.max_length,
        }
        special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": setting.pad_token_id}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=words, **sizes, **drops, **special))
        # transformers does not find it by GPT-2's class name, and warns.
        model.loss_type = "ForCausalLM"
    else:
        drops = dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob"), setting.dropout
        )
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
        }
        labels = {"num_labels": setting.num_labels, "pad_token_id": setting.pad_token_id}
        config = BertConfig(
            vocab_size=words, max_position_embeddings=setting.max_length, **sizes, **drops, **labels
        )
        model = BertForSequenceClassification(config)
    return model.to(setting.device).train()
