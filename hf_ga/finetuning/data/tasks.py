"""The tasks of the fine-tuning command: for each kind of head its labels, tokenization, collation,
default model and metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

from hf_ga.finetuning.data.encoding import choices, collation, pairs, spans, tokenization

# Sizes of the default models: 1.3 million parameters, BART 1.7 million. (A T5 of this size, with
# initial embeddings 50 times larger, learns more slowly.)
SMALL_GPT = partial(GPT2Config, hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
SMALL_BERT = partial(
    BertConfig,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=512,
)
SMALL_BART = partial(
    BartConfig,
    d_model=128,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    attention_dropout=0.1,
    forced_eos_token_id=None,  # BART's default is an id of BART's vocabulary
)


@dataclass(frozen=True)
class Task:
    """A task of the fine-tuning command, such as text-classification: the properties of one kind of
    head.

    Attributes:
        auto_class: The transformers class that loads the model.
        labels: The type of a row's label: "none", one "class", a "number", a set of "classes",
            "tags" (a class for each word), "answers" (spans of a context), "choice" (the index of
            one of the row's texts), "target" (a text to generate), "pairs" (texts that belong
            together, or the score of two).
        tokenize: Function (batch of rows by column, tokenizer, max_length) -> samples by column,
            such as `tokenization.tokenize_causal`.
        collate: Function (samples, settings) -> batch, such as `collation.collate_causal`;
            `PreparedData.collate` binds its settings.
        small_config: Function (vocabulary, positions and special tokens, as keywords) ->
            configuration of the default model.
        problem_type: The `problem_type` of transformers for a sequence classifier, which selects
            its loss.
        metrics: Names of the metrics besides the loss.
        generated_metrics: Names of the metrics of generated texts.
        pipeline: The pipeline tag of the model card.
        lora_type: PEFT's `task_type` for LoRA. None: PEFT has no type for this task.
    """

    auto_class: Any
    labels: str
    tokenize: Callable[[dict[str, list], PreTrainedTokenizerBase, int | None], dict[str, list]]
    collate: Callable[..., dict[str, Tensor]] = collation.collate_samples
    small_config: Callable[..., PretrainedConfig] = SMALL_BERT
    problem_type: str | None = None
    metrics: tuple[str, ...] = ()
    generated_metrics: tuple[str, ...] = ()
    pipeline: str = "text-classification"
    lora_type: str | None = "SEQ_CLS"


TASKS: dict[str, Task] = {
    "causal-lm": Task(
        auto_class=AutoModelForCausalLM,
        labels="none",
        tokenize=tokenization.tokenize_causal,
        collate=collation.collate_causal,
        small_config=SMALL_GPT,
        pipeline="text-generation",
        lora_type="CAUSAL_LM",
    ),
    "masked-lm": Task(
        auto_class=AutoModelForMaskedLM,
        labels="none",
        tokenize=tokenization.tokenize_masked,
        pipeline="fill-mask",
        lora_type=None,
    ),
    "text-classification": Task(
        auto_class=AutoModelForSequenceClassification,
        labels="class",
        tokenize=tokenization.tokenize_texts,
        problem_type="single_label_classification",
        metrics=("accuracy", "f1"),
    ),
    "regression": Task(
        auto_class=AutoModelForSequenceClassification,
        labels="number",
        tokenize=tokenization.tokenize_texts,
        problem_type="regression",
        metrics=("mae", "pearson"),
    ),
    "multi-label": Task(
        auto_class=AutoModelForSequenceClassification,
        labels="classes",
        tokenize=tokenization.tokenize_texts,
        collate=collation.collate_label_sets,
        problem_type="multi_label_classification",
        metrics=("exact_match", "micro_f1"),
    ),
    "token-classification": Task(
        auto_class=AutoModelForTokenClassification,
        labels="tags",
        tokenize=tokenization.tokenize_words,
        metrics=("accuracy", "f1"),
        pipeline="token-classification",
        lora_type="TOKEN_CLS",
    ),
    "question-answering": Task(
        auto_class=AutoModelForQuestionAnswering,
        labels="answers",
        tokenize=spans.tokenize_questions,
        metrics=("exact_match", "f1"),
        pipeline="question-answering",
        lora_type="QUESTION_ANS",
    ),
    "multiple-choice": Task(
        auto_class=AutoModelForMultipleChoice,
        labels="choice",
        tokenize=choices.tokenize_choices,
        metrics=("accuracy",),
        pipeline="multiple-choice",
        lora_type=None,
    ),
    "seq2seq": Task(
        auto_class=AutoModelForSeq2SeqLM,
        labels="target",
        tokenize=tokenization.tokenize_targets,
        small_config=SMALL_BART,
        generated_metrics=("exact_match", "rouge1", "rouge2", "rougeL"),
        pipeline="text2text-generation",
        lora_type="SEQ_2_SEQ_LM",
    ),
    "embedding": Task(
        auto_class=AutoModel,
        labels="pairs",
        tokenize=pairs.tokenize_pairs,
        collate=pairs.collate_pairs,
        metrics=("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10", "spearman"),
        pipeline="sentence-similarity",
        lora_type=None,
    ),
}
