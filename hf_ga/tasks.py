"""One small Task per kind of head: which rows it reads, how they become samples, samples a batch, outputs metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_ga import collation, tokenization
from hf_ga.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """What is special about a kind of head.

    Attributes:
        auto_class: the transformers class that loads the model.
        labels: what a row's label is: "none", one "class", a "number", a set of "classes", or "tags" (a class for each word).
        tokenize: a function of `tokenization`.
        collator: (tokenizer, number of labels, share of tokens that a masked LM predicts) -> collate function.
        small_config: (tokenizer, max_length) -> configuration of the model that is built where none is named.
        problem_type: what transformers calls the loss of a sequence classifier.
        metrics: names of the metrics beside the loss.
        pipeline: the transformers pipeline that a trained model serves. lora_type: what PEFT calls the head, where it has a name.
    """

    auto_class: Any
    labels: str
    tokenize: Callable[[dict[str, list], PreTrainedTokenizerBase, int | None], dict[str, list]]
    collator: Callable[[PreTrainedTokenizerBase, int, float], Callable]
    small_config: Callable[[PreTrainedTokenizerBase, int], PretrainedConfig]
    problem_type: str | None = None
    metrics: tuple[str, ...] = ()
    pipeline: str = "text-classification"
    lora_type: str | None = "SEQ_CLS"


def small_gpt(tokenizer: PreTrainedTokenizerBase, max_length: int) -> PretrainedConfig:
    """A GPT-2 of about 1.3 million parameters."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = {"n_positions": max(256, max_length), "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2Config(vocab_size=len(tokenizer), **size, **special)


def small_bert(tokenizer: PreTrainedTokenizerBase, max_length: int) -> PretrainedConfig:
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


def _padding(collate: Callable) -> Callable[[PreTrainedTokenizerBase, int, float], Callable]:
    return lambda tokenizer, num_labels, probability: partial(collate, pad_token_id=tokenizer.pad_token_id)


def _masking(tokenizer: PreTrainedTokenizerBase, num_labels: int, probability: float) -> Callable:
    if tokenizer.mask_token_id is None:
        raise ConfigError("masked-lm needs a tokenizer with a mask token, which this one lacks: take a BERT-like model.")
    return partial(
        collation.collate_masked,
        pad_token_id=tokenizer.pad_token_id,
        special_ids=tuple(tokenizer.all_special_ids),
        mask_token_id=tokenizer.mask_token_id,
        vocab_size=len(tokenizer),
        probability=probability,
    )


def _label_sets(tokenizer: PreTrainedTokenizerBase, num_labels: int, probability: float) -> Callable:
    return partial(collation.collate_label_sets, pad_token_id=tokenizer.pad_token_id, num_labels=num_labels)


def _of_texts(labels: str, collator: Callable, problem_type: str, metrics: tuple[str, ...]) -> Task:
    """A head with one prediction for a text or a pair of texts."""
    tokenize = tokenization.tokenize_texts
    return Task(AutoModelForSequenceClassification, labels, tokenize, collator, small_bert, problem_type, metrics)


TASKS: dict[str, Task] = {
    "causal-lm": Task(
        AutoModelForCausalLM,
        "none",
        tokenization.tokenize_causal,
        _padding(collation.collate_causal),
        small_gpt,
        pipeline="text-generation",
        lora_type="CAUSAL_LM",
    ),
    "masked-lm": Task(
        AutoModelForMaskedLM, "none", tokenization.tokenize_masked, _masking, small_bert, None, (), "fill-mask", None
    ),
    "text-classification": _of_texts(
        "class", _padding(collation.collate_classes), "single_label_classification", ("accuracy", "f1")
    ),
    "regression": _of_texts("number", _padding(collation.collate_numbers), "regression", ("mae", "pearson")),
    "multi-label": _of_texts("classes", _label_sets, "multi_label_classification", ("exact_match", "micro_f1")),
    "token-classification": Task(
        AutoModelForTokenClassification,
        "tags",
        tokenization.tokenize_words,
        _padding(collation.collate_tags),
        small_bert,
        metrics=("accuracy", "f1"),
        pipeline="token-classification",
        lora_type="TOKEN_CLS",
    ),
}
