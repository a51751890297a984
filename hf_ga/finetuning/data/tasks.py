"""The tasks: for each kind of head its labels, tokenization, collation, default model, metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BertConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_ga.finetuning.data import choices, collation, pairs, spans, tokenization


@dataclass(frozen=True)
class Task:
    """The properties of one kind of head.

    Attributes:
        auto_class: The transformers class that loads the model.
        labels: The type of a row's label: "none", one "class", a "number", a set of "classes",
            "tags" (a class for each word), "answers" (spans of a context), "choice" (the index of
            one of the row's texts), "target" (a text to generate), "pairs" (texts that belong
            together, or the score of two).
        tokenize: A function of `tokenization`.
        collate: A function of `collation`; `PreparedData.collate` gives it its settings.
        small_config: A function (tokenizer, max_length) -> configuration of the default model.
        problem_type: transformers' name of the loss of a sequence classifier.
        metrics: Names of the metrics besides the loss.
        generated_metrics: Names of the metrics of generated texts.
        pipeline: The pipeline tag of the model card.
        lora_type: PEFT's task type. None: PEFT has none.
    """

    auto_class: Any
    labels: str
    tokenize: Callable[[dict[str, list], PreTrainedTokenizerBase, int | None], dict[str, list]]
    collate: Callable[..., dict[str, Tensor]]
    small_config: Callable[[PreTrainedTokenizerBase, int], PretrainedConfig]
    problem_type: str | None = None
    metrics: tuple[str, ...] = ()
    generated_metrics: tuple[str, ...] = ()
    pipeline: str = "text-classification"
    lora_type: str | None = "SEQ_CLS"


def small_gpt(tokenizer: PreTrainedTokenizerBase, max_length: int) -> PretrainedConfig:
    """Return the configuration of a GPT-2 of about 1.3 million parameters."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = {"n_positions": max(256, max_length), "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2Config(vocab_size=len(tokenizer), **size, **special)


def small_bert(tokenizer: PreTrainedTokenizerBase, max_length: int) -> PretrainedConfig:
    """Return the configuration of a BERT of about 1.3 million parameters."""
    return BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=max(256, max_length),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        pad_token_id=tokenizer.pad_token_id,
    )


def small_bart(tokenizer: PreTrainedTokenizerBase, max_length: int) -> PretrainedConfig:
    """Return the configuration of a BART of about 1.7 million parameters. (A T5 of this size, with
    initial embeddings 50 times larger, learns more slowly.)
    """
    layers = {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    return BartConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=max(256, max_length),
        d_model=128,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        attention_dropout=0.1,
        **layers,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        # BART's default is an id of BART's vocabulary.
        forced_eos_token_id=None,
    )


def _of_texts(labels: str, collate: Callable, problem_type: str, metrics: tuple[str, ...]) -> Task:
    """Return the task of a head with one prediction per text or pair of texts."""
    return Task(
        auto_class=AutoModelForSequenceClassification,
        labels=labels,
        tokenize=tokenization.tokenize_texts,
        collate=collate,
        small_config=small_bert,
        problem_type=problem_type,
        metrics=metrics,
    )


TASKS: dict[str, Task] = {
    "causal-lm": Task(
        AutoModelForCausalLM,
        "none",
        tokenization.tokenize_causal,
        collation.collate_causal,
        small_gpt,
        pipeline="text-generation",
        lora_type="CAUSAL_LM",
    ),
    "masked-lm": Task(
        AutoModelForMaskedLM,
        "none",
        tokenization.tokenize_masked,
        collation.collate_masked,
        small_bert,
        pipeline="fill-mask",
        lora_type=None,
    ),
    "text-classification": _of_texts(
        "class", collation.collate_samples, "single_label_classification", ("accuracy", "f1")
    ),
    "regression": _of_texts("number", collation.collate_samples, "regression", ("mae", "pearson")),
    "multi-label": _of_texts(
        "classes",
        collation.collate_label_sets,
        "multi_label_classification",
        ("exact_match", "micro_f1"),
    ),
    "token-classification": Task(
        AutoModelForTokenClassification,
        "tags",
        tokenization.tokenize_words,
        collation.collate_samples,
        small_bert,
        metrics=("accuracy", "f1"),
        pipeline="token-classification",
        lora_type="TOKEN_CLS",
    ),
    "question-answering": Task(
        AutoModelForQuestionAnswering,
        "answers",
        spans.tokenize_questions,
        collation.collate_samples,
        small_bert,
        metrics=("exact_match", "f1"),
        pipeline="question-answering",
        lora_type="QUESTION_ANS",
    ),
    "multiple-choice": Task(
        AutoModelForMultipleChoice,
        "choice",
        choices.tokenize_choices,
        choices.collate_choices,
        small_bert,
        metrics=("accuracy",),
        pipeline="multiple-choice",
        lora_type=None,
    ),
    "seq2seq": Task(
        AutoModelForSeq2SeqLM,
        "target",
        tokenization.tokenize_targets,
        collation.collate_samples,
        small_bart,
        generated_metrics=("exact_match", "rouge1", "rouge2", "rougeL"),
        pipeline="text2text-generation",
        lora_type="SEQ_2_SEQ_LM",
    ),
    "embedding": Task(
        AutoModel,
        "pairs",
        pairs.tokenize_pairs,
        pairs.collate_pairs,
        small_bert,
        metrics=("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10", "spearman"),
        pipeline="sentence-similarity",
        lora_type=None,
    ),
}
