"""Readers: they take predictions and references out of a model's outputs, from which an evaluation
computes metrics. There is one for logits, entities, answers, generated texts, and one for the
user's `compute_metrics`.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import denumpify_detensorize

from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.encoding.spans import Span, best_answer, by_question, read_spans
from hf_ga.finetuning.run.run import Setup
from hf_ga.finetuning.run.scores.evaluation import Reader
from hf_ga.finetuning.run.scores.metrics import (
    ANSWER_METRICS,
    ENTITY_METRICS,
    METRICS,
    TEXT_METRICS,
    compute,
)
from hf_ga.loading.batches import IGNORED_LABEL, MicroBatch
from hf_ga.model.forward import unwrapped

# Entries of a batch that are labels, which `compute_metrics` gets.
LABEL_NAMES = ("labels", "start_positions", "end_positions")


def make_reader(setup: Setup, model: nn.Module, split: str) -> Reader | None:
    """Choose how an evaluation of a run computes metrics: by the user's `compute_metrics` if there
    is one, otherwise by the metrics of the task.

    Args:
        setup: The setup of the run.
        model: The prepared model, which generates texts.
        split: The name of the split to evaluate.

    Returns:
        The reader, or None if the evaluation computes the loss alone.
    """
    task = setup.config.task
    labels = setup.data.labels
    dataset = setup.data.splits[split]
    if setup.compute_metrics is not None:
        return user_metrics_reader(setup, model)
    if task == "question-answering":
        columns = (dataset["window_index"][:], dataset["answers"][:])
        return Reader(
            partial(answer_metrics, *columns),
            lambda outputs, batch, of: read_spans(
                outputs, [dataset[int(i)] for i in of.sample_ids]
            ),
        )
    if setup.config.predict_with_generate:
        return Reader(
            lambda texts: compute(TEXT_METRICS, zip(texts, dataset["target"][:], strict=True)),
            lambda outputs, batch, of: generated_targets(setup, model, batch),
        )
    if task == "token-classification" and are_entities(labels):
        return Reader(partial(compute, ENTITY_METRICS), partial(_read_entities, labels))
    scores = {name: METRICS[name] for name in setup.data.task.metrics}
    return Reader(partial(compute, scores), read_logits) if scores else None


def _read_entities(
    labels: list[str], outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> list[tuple[list[str], list[str]]]:
    """Read the predicted and the true tags of each text in an evaluation, as names."""
    names = np.asarray(labels)
    compared = read_logits(outputs, batch, micro_batch)
    return [(names[predicted].tolist(), names[true].tolist()) for predicted, true in compared]


def answer_metrics(
    windows: Sequence[int], correct_answers: Sequence[list[str]], spans: Sequence[Span]
) -> dict[str, float]:
    """Compute the metrics of question answering in an evaluation. A long context is split into
    overlapping windows, and the answer to a question is the best one over its windows.

    Args:
        windows: The index of each window within its question, from 0.
        correct_answers: The correct answers to the question of each window.
        spans: The best span in each window.

    Returns:
        Name of a metric in `ANSWER_METRICS` -> mean over the questions.
    """
    answers = [
        best_answer(question_spans)["answer"] for question_spans in by_question(windows, spans)
    ]
    # All windows of a question have the same correct answers.
    correct = [repeated[0] for repeated in by_question(windows, correct_answers)]
    return compute(ANSWER_METRICS, zip(answers, correct, strict=True))


def read_logits(
    outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read, in an evaluation of a run, predictions from the logits of a classification or
    regression head, and references from the labels.

    The dtype and the shape of the labels show the task:

    - floats of shape (samples,): regression; the logit is the prediction
    - floats of shape (samples, classes): multi-label classification; a logit above 0 predicts 1
    - integers of shape (samples,) or (samples, length): classes of samples or tokens; the largest
      logit is the prediction, and the label -100 is ignored

    Args:
        outputs: The model's outputs. Its logits have the shape (samples, classes), (samples,
            length, classes) or, for a regression, (samples, 1).
        batch: The batch on the device, which is not used.
        micro_batch: The same batch on the CPU, with its labels.

    Returns:
        Prediction and reference of each sample, two arrays with an entry for each of its targets.
    """
    logits = outputs.logits.float().cpu().numpy()
    labels = micro_batch.batch["labels"].numpy()
    if labels.dtype.kind == "f":
        is_regression = labels.ndim == 1
        predicted = logits[:, 0] if is_regression else logits > 0
        dtype = np.float64 if is_regression else np.int64
        arrays = (array[:, None].astype(dtype) for array in (predicted, labels))
        return list(zip(*arrays, strict=True))
    labels = labels.reshape(len(labels), -1)
    predicted = logits.argmax(-1).reshape(labels.shape)
    is_target = labels != IGNORED_LABEL
    rows = zip(predicted, labels, is_target, strict=True)
    return [(row[mask], true[mask]) for row, true, mask in rows]


def user_metrics_reader(setup: Setup, model: nn.Module) -> Reader:
    """Return the reader with which an evaluation of a run calls the user's `compute_metrics`. The
    predictions it passes are those of Trainer or, with `predict_with_generate`, generated token
    ids, as in Seq2SeqTrainer.

    Its function `compute` raises ConfigError if `compute_metrics` does not return a dict of
    numbers.

    Args:
        setup: The setup of the run.
        model: The prepared model.
    """

    def compute_of_split(samples: list[tuple[Any, Any]]) -> dict[str, float]:
        """Join the predictions and labels of all samples, and call `compute_metrics`."""
        return compute_user_metrics(setup, EvalPrediction(*_join_samples(samples)))

    return Reader(compute=compute_of_split, read=partial(_read_for_user, setup, model))


def _read_for_user(
    setup: Setup, model: nn.Module, outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> Sequence[tuple[Any, Any]]:
    """Return, for each sample of a micro-batch of an evaluation, the prediction and the labels that
    the user's `compute_metrics` gets.
    """
    ignored = ("loss", *getattr(unwrapped(model).config, "keys_to_ignore_at_inference", ()))
    predicted = []
    for name, value in outputs.items():
        has_row_per_sample = isinstance(value, Tensor) and value.shape[:1] == (len(micro_batch),)
        if has_row_per_sample and name not in ignored:
            predicted.append(value)
    logits = _single_or_tuple(predicted)
    labels = _single_or_tuple([batch[name] for name in LABEL_NAMES if name in batch])
    if setup.config.predict_with_generate:
        logits = generated_ids(setup, model, batch)
    if setup.preprocess_logits_for_metrics is not None:
        logits = setup.preprocess_logits_for_metrics(logits, labels)
    return _split_into_samples(nested_numpify((convert_to_fp32(logits), labels)))


def compute_user_metrics(setup: Setup, prediction: EvalPrediction) -> dict[str, float]:
    """Call the user's `compute_metrics` in an evaluation of a run, and check what it returns.

    Args:
        setup: The setup of the run.
        prediction: Predictions and references of the whole split.

    Returns:
        Name of a metric -> number.

    Raises:
        ConfigError: If `compute_metrics` does not return a dict of numbers.
    """
    metrics = denumpify_detensorize(setup.compute_metrics(prediction))
    are_numbers = isinstance(metrics, dict) and all(
        isinstance(value, int | float) for value in metrics.values()
    )
    if not are_numbers:
        raise ConfigError(
            f"compute_metrics must return a dict of names and numbers, got {metrics!r:.80}."
        )
    return metrics


def _single_or_tuple(tensors: list[Tensor]) -> Any:
    """Return the tensor itself if there is one, otherwise a tuple of all of them: the form in which
    the user's `compute_metrics` gets predictions and labels, as in Trainer.
    """
    if len(tensors) == 1:
        return tensors[0]
    return tuple(tensors)


def _split_into_samples(arrays: Any) -> Sequence[Any]:
    """Split the predictions or labels of a batch, which the user's `compute_metrics` gets later,
    into one entry per sample.
    """
    if not isinstance(arrays, tuple | list):
        return arrays
    rows_of_arrays = [_split_into_samples(array) for array in arrays]
    return list(zip(*rows_of_arrays, strict=True))


def _join_samples(samples: Sequence[Any]) -> Any:
    """Stack the predictions or labels of all samples of an evaluation for the user's
    `compute_metrics`, padded with -100 to the largest length.
    """
    if isinstance(samples[0], tuple):
        return tuple(_join_samples(arrays) for arrays in zip(*samples, strict=True))
    if samples[0].ndim == 0:
        return np.stack(samples)
    tensors = [torch.tensor(sample) for sample in samples]
    return pad_sequence(tensors, batch_first=True, padding_value=IGNORED_LABEL).numpy()


def generated_ids(setup: Setup, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Generate the token ids of a text for each source text of a seq2seq batch, by greedy or beam
    search (flag `num_beams`), in an evaluation or for the rows of `predict_file`.

    Sources are right-padded as in training, and the attention mask hides the padding. So a text
    does not depend on the rest of its batch, except that rounding can decide between two almost
    equally likely tokens.

    Args:
        setup: The setup of the run.
        model: The prepared seq2seq model.
        batch: `input_ids` and `attention_mask` of shape (samples, padded length), right-padded, on
            the model's device.

    Returns:
        Token ids of shape (samples, longest generated length), right-padded.
    """
    plain_model: Any = unwrapped(model)
    tokenizer = setup.data.tokenizer
    # A prepared model has autocast around its forward only; generation calls more than that.
    with setup.accelerator.autocast():
        return plain_model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=setup.config.max_new_tokens,
            num_beams=setup.config.num_beams,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=plain_model.generation_config.eos_token_id or tokenizer.eos_token_id,
        )


def generated_targets(setup: Setup, model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """Generate a text for each source text of a seq2seq batch, in an evaluation or for the rows of
    `predict_file`, and decode it without special tokens and surrounding white space.

    Args:
        setup: The setup of the run.
        model: The prepared seq2seq model.
        batch: See `generated_ids`.
    """
    ids = generated_ids(setup, model, batch)
    texts = setup.data.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in texts]


def are_entities(labels: list[str]) -> bool:
    """Return whether the labels of token classification mark entities in the IOB format, so that an
    evaluation computes entity metrics: O, and at least one label that begins with B- (begin) or I-
    (inside), but no other labels.

    >>> are_entities(["O", "B-PER", "I-PER"]), are_entities(["NOUN", "VERB"])
    (True, False)
    """
    if "O" not in labels or len(labels) == 1:
        return False
    return all(re.fullmatch("O|[BI]-.+", label) for label in labels)
