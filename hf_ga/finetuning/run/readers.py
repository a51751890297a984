"""Readers of predictions and references for metrics: logits and labels, entities, answers from
spans, generated texts, and those for a `compute_metrics` of the user.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import denumpify_detensorize

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import IGNORED_LABEL, MicroBatch
from hf_ga.exact.forward import unwrapped
from hf_ga.finetuning.data.spans import Span, best_answer, by_question, read_spans
from hf_ga.finetuning.run.evaluation import Reader
from hf_ga.finetuning.run.metrics import (
    ANSWER_METRICS,
    ENTITY_METRICS,
    METRICS,
    TEXT_METRICS,
    compute,
    predictions_and_references,
)
from hf_ga.finetuning.run.run import Setup

LABELS = ("labels", "start_positions", "end_positions")


def make_reader(setup: Setup, model: nn.Module, split: str) -> Reader | None:
    """The reader for the user's `compute_metrics`, or for a task's evaluation of a split; None if
    only the loss is measured.
    """
    config, data = setup.config, setup.data

    def read_entities(*of_batch: Any) -> tuple[list[list[str]], ...]:
        return tuple(
            [np.asarray(data.labels)[ids].tolist() for ids in of_samples]
            for of_samples in read_logits(*of_batch)
        )

    def read_answers(
        outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
    ) -> tuple[list[Span], list[list[str]]]:
        samples = [data.splits[split][int(i)] for i in micro_batch.sample_ids]
        return read_spans(outputs, samples), [sample["answers"] for sample in samples]

    def generate(
        outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
    ) -> tuple[list[str], list[str]]:
        targets = [data.splits[split][int(i)]["target"] for i in micro_batch.sample_ids]
        return generated_targets(setup, model, batch), targets

    if setup.compute_metrics is not None:
        return own_reader(setup, model)
    if data.task.labels == "tags" and are_entities(data.labels):
        return Reader(partial(compute, ENTITY_METRICS), read_entities)
    if data.task.labels == "answers":
        windows = data.splits[split]["window"][:]
        return Reader(partial(answer_metrics, windows), read_answers)
    if config.predict_with_generate:
        return Reader(partial(compute, TEXT_METRICS), generate, predicts_tokens=True)
    return logits_reader(data.task.metrics) if data.task.metrics else None


def answer_metrics(
    windows: Sequence[int], spans: Sequence[Span], references: Sequence[list[str]]
) -> dict[str, float]:
    """The metrics over questions: of each question, the best answer over its windows.

    Args:
        windows: the column `window` of the split.
        spans: the best answer in each window.
        references: the correct answers of the question of each window.
    """
    found = [best_answer(of_question)["answer"] for of_question in by_question(windows, spans)]
    right = [of_question[0] for of_question in by_question(windows, references)]
    return compute(ANSWER_METRICS, found, right)


def logits_reader(metrics: Sequence[str]) -> Reader:
    """A reader for metrics of `METRICS` that compare logits and labels."""
    return Reader(partial(compute, {name: METRICS[name] for name in metrics}), read_logits)


def read_logits(
    outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """See `predictions_and_references`."""
    return predictions_and_references(
        outputs.logits.float().cpu().numpy(), micro_batch.batch["labels"].numpy()
    )


def own_reader(setup: Setup, model: nn.Module) -> Reader:
    """Passes to `compute_metrics` what Trainer does, or generated token ids, as Seq2SeqTrainer
    does.

    Its `compute` raises ConfigError for a result that is not a dict of numbers.
    """
    ignored = ("loss", *getattr(unwrapped(model).config, "keys_to_ignore_at_inference", ()))

    def read(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[Any, Any]:
        found = [
            v
            for k, v in outputs.items()
            if k not in ignored and isinstance(v, Tensor) and v.shape[:1] == (len(micro_batch),)
        ]
        logits, labels = _single(found), _single([batch[name] for name in LABELS if name in batch])
        if setup.config.predict_with_generate:
            logits = generated_ids(setup, model, batch)
        if setup.preprocess_logits_for_metrics is not None:
            logits = setup.preprocess_logits_for_metrics(logits, labels)
        return _of_samples(nested_numpify(convert_to_fp32(logits))), _of_samples(
            nested_numpify(labels)
        )

    def compute_own(predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return own_metrics(setup, EvalPrediction(_padded(predictions), _padded(references)))

    return Reader(compute_own, read, predicts_tokens=not setup.data.task.metrics)


def own_metrics(setup: Setup, prediction: EvalPrediction) -> dict[str, float]:
    """What the user's `compute_metrics` returns.

    Raises:
        ConfigError: If it is not a dict of numbers.
    """
    found = denumpify_detensorize(setup.compute_metrics(prediction))
    if not isinstance(found, dict) or not all(
        isinstance(value, int | float) for value in found.values()
    ):
        raise ConfigError(
            f"compute_metrics must return a dict of names and numbers, got {found!r:.80}."
        )
    return found


def _single(entries: list[Tensor]) -> Any:
    """As Trainer passes predictions and labels: a tensor, or a tuple of several."""
    return entries[0] if len(entries) == 1 else tuple(entries)


def _of_samples(arrays: Any) -> Sequence[Any]:
    """One entry per sample: the rows of an array, or tuples with a row of each of several
    arrays.
    """
    return (
        list(zip(*map(_of_samples, arrays), strict=True))
        if isinstance(arrays, tuple | list)
        else arrays
    )


def _padded(samples: Sequence[Any]) -> Any:
    """All samples as one array, padded with -100 on the second axis, or as a tuple of such
    arrays.
    """
    if isinstance(samples[0], tuple):
        return tuple(map(_padded, zip(*samples, strict=True)))
    widest = max(samples, key=lambda sample: sample.shape[:1])
    padded = np.full_like(widest, IGNORED_LABEL, shape=(len(samples), *widest.shape))
    for i, sample in enumerate(samples):
        padded[(i, *map(slice, sample.shape[:1]))] = sample
    return padded


def generated_ids(setup: Setup, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Generate a text for each source, without sampling. Returns token ids of shape (samples,
    longest), right-padded.

    Sources are right-padded as in training, and the attention mask hides the padding. So a text
    does not depend on the rest of its batch, except that rounding can decide between two almost
    equally likely tokens.

    Args:
        batch: `input_ids` and `attention_mask` of shape (samples, width), right-padded, on the
            model's device.
    """
    base: Any = unwrapped(model)
    tokenizer = setup.data.tokenizer
    with (
        setup.accelerator.autocast()
    ):  # for the whole generation: only the model's forward has autocast already
        return base.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=setup.config.max_new_tokens,
            num_beams=setup.config.num_beams,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=base.generation_config.eos_token_id or tokenizer.eos_token_id,
        )


def generated_targets(setup: Setup, model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """The texts of `generated_ids`."""
    made = generated_ids(setup, model, batch)
    return [
        text.strip() for text in setup.data.tokenizer.batch_decode(made, skip_special_tokens=True)
    ]


def are_entities(labels: list[str]) -> bool:
    """Whether tags mark entities by B (begin) and I (inside).

    >>> are_entities(["O", "B-PER", "I-PER"]), are_entities(["NOUN", "VERB"])
    (True, False)
    """
    return (
        "O" in labels
        and len(labels) > 1
        and all(re.fullmatch("O|[BI]-.+", label) for label in labels)
    )
