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
    """Choose the reader for the user's `compute_metrics`, or for a task's evaluation of a split.

    Args:
        setup: What the parts of the run share.
        model: The prepared model, which generates texts.
        split: The split to evaluate.

    Returns:
        The reader. None: only the loss is measured.
    """
    data = setup.data

    def read_entities(
        outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Read predicted and true tags by name, as seqeval needs them."""
        names = np.asarray(data.labels)
        predicted, true = read_logits(outputs, batch, micro_batch)
        predicted_names = [names[ids].tolist() for ids in predicted]
        true_names = [names[ids].tolist() for ids in true]
        return predicted_names, true_names

    def read_answers(
        outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
    ) -> tuple[list[Span], list[list[str]]]:
        """Read the best answer in each window, and the correct answers to its question."""
        samples = [data.splits[split][int(i)] for i in micro_batch.sample_ids]
        return read_spans(outputs, samples), [sample["answers"] for sample in samples]

    def generate(
        outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
    ) -> tuple[list[str], list[str]]:
        """Generate a text for each source, and read the target texts."""
        targets = [data.splits[split][int(i)]["target"] for i in micro_batch.sample_ids]
        return generated_targets(setup, model, batch), targets

    if setup.compute_metrics is not None:
        return own_reader(setup, model)
    if data.task.labels == "tags" and are_entities(data.labels):
        return Reader(partial(compute, ENTITY_METRICS), read_entities)
    if data.task.labels == "answers":
        windows = data.splits[split]["window_index"][:]
        return Reader(partial(answer_metrics, windows), read_answers)
    if setup.config.predict_with_generate:
        return Reader(partial(compute, TEXT_METRICS), generate, predicts_tokens=True)
    if not data.task.metrics:
        return None
    return logits_reader(data.task.metrics)


def answer_metrics(
    windows: Sequence[int], spans: Sequence[Span], references: Sequence[list[str]]
) -> dict[str, float]:
    """Compute the metrics of answers over questions: of each question, the best answer over its
    windows.

    Args:
        windows: The column `window` of the split.
        spans: The best answer in each window.
        references: The correct answers to the question of each window.

    Returns:
        Name -> value, see `ANSWER_METRICS`.
    """
    found = [best_answer(of_question)["answer"] for of_question in by_question(windows, spans)]
    right = [of_question[0] for of_question in by_question(windows, references)]
    return compute(ANSWER_METRICS, found, right)


def logits_reader(metrics: Sequence[str]) -> Reader:
    """Return a reader for some metrics of `METRICS`, which compare logits and labels."""
    chosen = {name: METRICS[name] for name in metrics}
    return Reader(partial(compute, chosen), read_logits)


def read_logits(
    outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Read predicted and true labels, see `predictions_and_references`."""
    logits = outputs.logits.float().cpu()
    labels = micro_batch.batch["labels"]
    return predictions_and_references(logits.numpy(), labels.numpy())


def own_reader(setup: Setup, model: nn.Module) -> Reader:
    """Return a reader that passes to `compute_metrics` what Trainer does, or generated token ids,
    as Seq2SeqTrainer does.

    Its `compute` raises ConfigError for a result that is not a dict of numbers.
    """
    ignored = ("loss", *getattr(unwrapped(model).config, "keys_to_ignore_at_inference", ()))

    def is_prediction(name: str, value: Any, num_samples: int) -> bool:
        """Whether an entry of the outputs has one row for each sample, and is not ignored."""
        if name in ignored or not isinstance(value, Tensor):
            return False
        return value.shape[:1] == (num_samples,)

    def read(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Read predictions and labels, with one entry for each sample."""
        num_samples = len(micro_batch)
        found = [v for name, v in outputs.items() if is_prediction(name, v, num_samples)]
        logits = _single(found)
        labels = _single([batch[name] for name in LABELS if name in batch])
        if setup.config.predict_with_generate:
            logits = generated_ids(setup, model, batch)
        if setup.preprocess_logits_for_metrics is not None:
            logits = setup.preprocess_logits_for_metrics(logits, labels)
        predictions = nested_numpify(convert_to_fp32(logits))
        references = nested_numpify(labels)
        return _of_samples(predictions), _of_samples(references)

    def compute_own(predictions: list[Any], references: list[Any]) -> dict[str, float]:
        prediction = EvalPrediction(_padded(predictions), _padded(references))
        return own_metrics(setup, prediction)

    return Reader(compute_own, read, predicts_tokens=not setup.data.task.metrics)


def own_metrics(setup: Setup, prediction: EvalPrediction) -> dict[str, float]:
    """Call the user's `compute_metrics`.

    Args:
        setup: What the parts of the run share.
        prediction: Predictions and references of the whole split.

    Returns:
        Name -> number.

    Raises:
        ConfigError: If it returns something else.
    """
    found = denumpify_detensorize(setup.compute_metrics(prediction))
    is_fine = isinstance(found, dict)
    if is_fine:
        is_fine = all(isinstance(value, int | float) for value in found.values())
    if not is_fine:
        raise ConfigError(
            f"compute_metrics must return a dict of names and numbers, got {found!r:.80}."
        )
    return found


def _single(entries: list[Tensor]) -> Any:
    """Return a single tensor, or a tuple of several, as Trainer passes predictions and labels."""
    if len(entries) == 1:
        return entries[0]
    return tuple(entries)


def _of_samples(arrays: Any) -> Sequence[Any]:
    """Return one entry per sample: the rows of an array, or tuples with a row of each of several
    arrays.
    """
    if not isinstance(arrays, tuple | list):
        return arrays
    rows_of_arrays = [_of_samples(array) for array in arrays]
    return list(zip(*rows_of_arrays, strict=True))


def _padded(samples: Sequence[Any]) -> Any:
    """Join all samples to one array, or to a tuple of arrays if each sample is a tuple.

    Args:
        samples: The array of each sample, of shape (), (width, ...); widths may differ.

    Returns:
        Shape (samples,) or (samples, largest width, ...), padded with -100.
    """
    if isinstance(samples[0], tuple):
        return tuple(_padded(column) for column in zip(*samples, strict=True))
    widest = max(samples, key=lambda sample: sample.shape[:1])
    padded = np.full_like(widest, IGNORED_LABEL, shape=(len(samples), *widest.shape))
    for i, sample in enumerate(samples):
        if sample.ndim == 0:
            padded[i] = sample
        else:
            padded[i, : len(sample)] = sample
    return padded


def generated_ids(setup: Setup, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Generate a text for each source, without sampling.

    Sources are right-padded as in training, and the attention mask hides the padding. So a text
    does not depend on the rest of its batch, except that rounding can decide between two almost
    equally likely tokens.

    Args:
        setup: What the parts of the run share.
        model: The prepared model.
        batch: `input_ids` and `attention_mask` of shape (samples, width), right-padded, on the
            model's device.

    Returns:
        Token ids of shape (samples, longest), right-padded.
    """
    base: Any = unwrapped(model)
    tokenizer = setup.data.tokenizer
    # For the whole generation: only the model's forward has autocast already.
    with setup.accelerator.autocast():
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
    """Generate a text for each source, see `generated_ids`."""
    ids = generated_ids(setup, model, batch)
    texts = setup.data.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in texts]


def are_entities(labels: list[str]) -> bool:
    """Whether tags mark entities by B (begin) and I (inside).

    >>> are_entities(["O", "B-PER", "I-PER"]), are_entities(["NOUN", "VERB"])
    (True, False)
    """
    if "O" not in labels or len(labels) == 1:
        return False
    return all(re.fullmatch("O|[BI]-.+", label) for label in labels)
