"""Metrics as functions of (references, predictions): scikit-learn, seqeval, rouge-score, and SQuAD's scores of answers."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import seqeval.metrics
import sklearn.metrics
from rouge_score.rouge_scorer import RougeScorer

from hf_ga.exact.batches import IGNORED_LABEL

Score = Callable[[Any, Any], float]


def _micro_f1(references: np.ndarray, predictions: np.ndarray) -> float:
    """Micro-averaged over all samples and labels."""
    return sklearn.metrics.f1_score(np.ravel(references), np.ravel(predictions), zero_division=0)


def _pearson(references: np.ndarray, predictions: np.ndarray) -> float:
    """Pearson correlation; 0 if predictions or references are constant."""
    return np.corrcoef(references, predictions)[0, 1] if np.ptp(references) and np.ptp(predictions) else 0.0


def answer_words(answer: str) -> list[str]:
    """SQuAD's normalisation: lower case, without ASCII punctuation, then without the articles a, an, the.

    >>> answer_words("The end-of-file marker, an int.")
    ['endoffile', 'marker', 'int']
    """
    return re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(str.maketrans("", "", string.punctuation))).split()


def words_f1(true: list[str], predicted: list[str]) -> float:
    """2 c / (p + t) for p and t words of which c are common (with multiplicity). Two empty answers: 1.

    >>> words_f1(["red", "end"], ["big", "red", "red"])
    0.4
    """
    if not predicted or not true:
        return float(predicted == true)
    return 2 * (Counter(predicted) & Counter(true)).total() / (len(predicted) + len(true))


def _answers(score: Callable[[list[str], list[str]], float], references: list[list[str]], predictions: list[str]) -> float:
    """The mean over samples of the best score over all correct answers; without any, the correct answer is ""."""
    pairs = zip(references, predictions, strict=True)
    return np.mean([max(score(answer_words(true), answer_words(given)) for true in right or [""]) for right, given in pairs])


def _same_texts(references: list[str], predictions: list[str]) -> float:
    """The fraction of equal texts, after normalising white space."""
    return np.mean([true.split() == given.split() for true, given in zip(references, predictions, strict=True)])


def _rouge(kind: str, references: list[str], predictions: list[str]) -> float:
    """The mean F score, without stemming."""
    scorer = RougeScorer([kind])
    return np.mean([scorer.score(true, given)[kind].fmeasure for true, given in zip(references, predictions, strict=True)])


METRICS: dict[str, Score] = {  # of arrays; see `predictions_and_references`
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": partial(sklearn.metrics.f1_score, average="macro", zero_division=0),
    "exact_match": sklearn.metrics.accuracy_score,  # sets of labels (rows of 0 and 1): the fraction of samples with the exact set
    "micro_f1": _micro_f1,
    "mae": sklearn.metrics.mean_absolute_error,
    "pearson": _pearson,
}
ENTITY_METRICS: dict[str, Score] = {  # of lists of tags such as B-PER, I-PER and O: accuracy of tokens, F1 of entities
    "accuracy": seqeval.metrics.accuracy_score,
    "f1": partial(seqeval.metrics.f1_score, zero_division=0),
}
ANSWER_METRICS: dict[str, Score] = {  # a reference is a list of correct answers
    "exact_match": partial(_answers, list.__eq__),
    "f1": partial(_answers, words_f1),
}
TEXT_METRICS: dict[str, Score] = {"exact_match": _same_texts} | {
    kind: partial(_rouge, kind) for kind in ("rouge1", "rouge2", "rougeL")
}


def compute(metrics: Mapping[str, Score], predictions: list[Any], references: list[Any]) -> dict[str, float]:
    """The metrics over all samples; NaN without predictions. Arrays, of the targets of a sample, are concatenated."""
    if isinstance(references[0], np.ndarray):
        predictions, references = np.concatenate(predictions), np.concatenate(references)
    if not len(references):
        return dict.fromkeys(metrics, math.nan)
    return {name: float(score(references, predictions)) for name, score in metrics.items()}


def predictions_and_references(logits: np.ndarray, labels: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Predictions and references by the shapes and dtypes of a head's labels: one array per sample, to be concatenated.

    Args:
        logits: (samples, classes), (samples, width, classes) or, for a regression, (samples, 1).
        labels: integers of shape (samples,) or (samples, width), -100 ignored: classes, predicted by the largest logit.
            Floats of shape (samples,): numbers. Floats of shape (samples, classes): sets of classes with a logit above 0.
    """
    if labels.dtype.kind == "f" and labels.ndim == 1:
        return list(logits.reshape(-1, 1).astype(np.float64)), list(labels.reshape(-1, 1).astype(np.float64))
    if labels.dtype.kind == "f":
        return list((logits > 0).astype(np.int64)[:, None]), list(labels.astype(np.int64)[:, None])
    labels = labels.reshape(len(labels), -1)
    predicted, counted = logits.argmax(-1).reshape(labels.shape), labels != IGNORED_LABEL
    predictions, references = ([row[own] for row, own in zip(rows, counted, strict=True)] for rows in (predicted, labels))
    return predictions, references
