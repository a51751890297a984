"""The setting of a benchmark: model, samples, batch sizes and precision, as plain values that can
be sent to other processes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
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

from hf_ga.finetuning.data.formats import corpus

Sample = dict[str, Any]
MODELS = ("gpt", "bert")  # a causal language model, and a classifier
# Layers, hidden size, attention heads, vocabulary size. `base` is GPT-2-small and, except for its
# vocabulary, BERT-base.
SIZES = {"tiny": (2, 32, 2, 4000), "small": (4, 256, 4, 4000), "base": (12, 768, 12, 50257)}


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
        seed: Seed of weights, order of samples and dropout.
        arms: Names of the arms to measure; empty: all.
        samples: The tokenized samples of an epoch, see `docstring_samples` and `random_samples`.
        num_labels: Number of classes of the classifier.
        pad_token_id: Id of the padding token.
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
        """Number of micro-batches of an optimizer step."""
        return self.window_size // self.micro_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch."""
        return len(self.samples) // self.window_size

    @property
    def real_tokens(self) -> int:
        """Number of tokens of an epoch, without padding."""
        return sum(len(sample["input_ids"]) for sample in self.samples)

    @property
    def collate(self) -> Callable[[Sequence[Sample]], dict[str, Tensor]]:
        """The function that collates samples into the keyword arguments of the model."""
        return partial(_collate, pad_token_id=self.pad_token_id)


def docstring_samples(model: str, max_length: int, count: int) -> dict[str, Any]:
    """Tokenize the first docstrings of hf_ga's corpus (Python's standard library) for a model.

    Args:
        model: "gpt": the token ids end with the end-of-text token. "bert": they begin with the
            classification token, and the label is the package that the docstring is from.
        max_length: Maximum number of tokens of a sample; longer ones are truncated.
        count: Maximum number of samples.

    Returns:
        The attributes `samples`, `num_labels` and `pad_token_id` of a `Setting`.
    """
    rows = corpus.stdlib_splits()["train"]
    tokenizer = corpus.load_stdlib_tokenizer()
    packages: list[str] = []
    if model == "bert":
        rows_of_package = Counter(row["package"] for row in rows)
        packages = sorted(
            name
            for name, num_rows in rows_of_package.items()
            if num_rows >= corpus.MIN_ROWS_PER_LABEL
        )
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


def random_samples(model: str, max_length: int, count: int) -> dict[str, Any]:
    """Make samples of random tokens, whose lengths are spread widely: log-normal, from 8 tokens to
    `max_length`. With 1,024 they have 240 tokens on average.

    Args:
        model: "gpt" or "bert", whose samples have a label of four.
        max_length: Maximum number of tokens of a sample.
        count: Number of samples.

    Returns:
        The attributes `samples`, `num_labels` and `pad_token_id` of a `Setting`.
    """
    generator = np.random.default_rng(0)
    median = 180 / 1024 * max_length
    lengths = generator.lognormal(math.log(median), 0.8, count).astype(int).clip(8, max_length)
    num_words = min(words for *_, words in SIZES.values())
    samples = []
    for i, length in enumerate(lengths):
        sample = {"id": i, "input_ids": generator.integers(5, num_words, length).tolist()}
        if model == "bert":
            sample["label"] = i % 4
        samples.append(sample)
    return {"samples": samples, "num_labels": 4, "pad_token_id": 0}


# Name of the lengths -> function that makes the samples.
SAMPLES = {"docstrings": docstring_samples, "lognormal": random_samples}


def _collate(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Tensor]:
    """Collate samples into a right-padded batch with labels: the class of each sample for a
    classifier, otherwise the token ids, -100 at padding.
    """
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    if "label" in samples[0]:
        return batch | {"labels": torch.tensor([sample["label"] for sample in samples])}
    return batch | {"labels": pad_sequence(ids, batch_first=True, padding_value=-100)}


def build_model(setting: Setting) -> PreTrainedModel:
    """Build the model of a benchmark's setting, in training mode on its device, with random weights
    that are the same in every process. Seeds torch's global generator.
    """
    torch.manual_seed(setting.seed)
    num_layers, hidden_size, num_heads, vocab_size = SIZES[setting.size]
    if setting.model == "gpt":
        config = GPT2Config(
            vocab_size=vocab_size,
            n_layer=num_layers,
            n_embd=hidden_size,
            n_head=num_heads,
            n_positions=setting.max_length,
            embd_pdrop=setting.dropout,
            resid_pdrop=setting.dropout,
            attn_pdrop=setting.dropout,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=setting.pad_token_id,
        )
        model = GPT2LMHeadModel(config)
        # transformers finds the loss by the class name, but not for GPT-2, and would warn.
        model.loss_type = "ForCausalLM"
    else:
        config = BertConfig(
            vocab_size=vocab_size,
            max_position_embeddings=setting.max_length,
            num_hidden_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            intermediate_size=4 * hidden_size,
            hidden_dropout_prob=setting.dropout,
            attention_probs_dropout_prob=setting.dropout,
            num_labels=setting.num_labels,
            pad_token_id=setting.pad_token_id,
        )
        model = BertForSequenceClassification(config)
    return model.to(setting.device).train()
