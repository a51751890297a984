"""One small Task per kind of head: which columns it reads, how rows become samples, samples a batch, outputs metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_ga.batches import IGNORED_LABEL


@dataclass(frozen=True)
class Task:
    """What is special about a kind of head.

    Attributes:
        auto_class: the transformers class that loads the model.
        needs_labels: whether rows have a label column.
        tokenize: (rows with `text` and maybe `label`, tokenizer, max_length) -> columns of samples, with `length` (tokens),
            `num_targets` and `was_cut`.
        collate: samples -> model arguments (right-padded).
        small_config: (vocabulary size, tokenizer, labels) -> configuration of the model that is built where none is named.
        metrics: names of the metrics beside the loss.
    """

    auto_class: Any
    needs_labels: bool
    tokenize: Callable[[dict[str, list], PreTrainedTokenizerBase, int], dict[str, list]]
    collate: Callable[[list[dict[str, Any]], int], dict[str, Tensor]]
    small_config: Callable[[PreTrainedTokenizerBase, int, list[str]], PretrainedConfig]
    metrics: tuple[str, ...] = ()


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Right-pad lists of integers. Returns int64 of shape (rows, longest)."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def tokenize_causal(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list]:
    """Text, then the end-of-text token; cut at `max_length`. Every token but the first is a target."""
    texts = [text or "" for text in rows["text"]]
    end = tokenizer.eos_token_id
    ended = [[*ids, end] if end is not None and ids[-1:] != [end] else ids for ids in tokenizer(texts, verbose=False)["input_ids"]]
    whole = [ids if text else [] for ids, text in zip(ended, texts, strict=True)]
    return _columns(whole, [ids[:max_length] for ids in whole], lambda ids: max(0, len(ids) - 1))


def tokenize_classification(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list]:
    """Text between the tokenizer's special tokens, cut at `max_length` (the special tokens stay). One target a sample."""
    texts = [text or "" for text in rows["text"]]
    whole = tokenizer(texts, verbose=False)["input_ids"]
    cut = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    empty = [not text for text in texts]
    cut = [[] if nothing else ids for ids, nothing in zip(cut, empty, strict=True)]
    whole = [[] if nothing else ids for ids, nothing in zip(whole, empty, strict=True)]
    return {**_columns(whole, cut, lambda ids: int(bool(ids))), "label": rows["label"]}


def collate_causal(samples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels` (the ids themselves, padding ignored), each int64 of shape (samples, longest)."""
    batch = _collate_ids(samples, pad_token_id)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
    return {**batch, "labels": labels}


def collate_classification(samples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` of shape (samples, longest), `labels` of shape (samples,); all int64."""
    return {**_collate_ids(samples, pad_token_id), "labels": torch.tensor([sample["label"] for sample in samples])}


def small_gpt(tokenizer: PreTrainedTokenizerBase, max_length: int, labels: list[str]) -> PretrainedConfig:
    """A GPT-2 of about 1.3 million parameters."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = {"n_positions": max(256, max_length), "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2Config(vocab_size=len(tokenizer), **size, **special)


def small_bert(tokenizer: PreTrainedTokenizerBase, max_length: int, labels: list[str]) -> PretrainedConfig:
    """A BERT of about 1.3 million parameters."""
    return BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=max(256, max_length),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        pad_token_id=tokenizer.pad_token_id,
    )


TASKS: dict[str, Task] = {
    "causal-lm": Task(AutoModelForCausalLM, False, tokenize_causal, collate_causal, small_gpt),
    "text-classification": Task(
        AutoModelForSequenceClassification,
        True,
        tokenize_classification,
        collate_classification,
        small_bert,
        metrics=("accuracy", "f1"),
    ),
}


def _collate_ids(samples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    return {"input_ids": pad(rows, pad_token_id), "attention_mask": pad([[1] * len(row) for row in rows], 0)}


def _columns(whole: list[list[int]], cut: list[list[int]], num_targets: Callable[[list[int]], int]) -> dict[str, list]:
    return {
        "input_ids": cut,
        "length": [len(ids) for ids in cut],
        "num_targets": [num_targets(ids) for ids in cut],
        "was_cut": [len(short) < len(full) for short, full in zip(cut, whole, strict=True)],
    }
