"""Metrics as local `evaluate.Metric` classes (no hub): scikit-learn, seqeval, rouge-score, and
SQuAD's scores of answers.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
import seqeval.metrics
import sklearn.metrics
from rouge_score.rouge_scorer import RougeScorer

from hf_ga.exact.batches import IGNORED_LABEL

_INTEGER, _NUMBER, _TEXT = (
    datasets.Value("int64"),
    datasets.Value("float64"),
    datasets.Value("string"),
)
_LIST_OF_TEXTS = datasets.Sequence(_TEXT)


def _metric(name: str, score: Callable, value: Any, reference: Any = None) -> type[evaluate.Metric]:
    """The metric `{name: score(references, predictions)}`.

    Args:
        value: type of a prediction. reference: type of a reference, if different.
    """
    features = datasets.Features({"predictions": value, "references": reference or value})

    class ScoreMetric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(description=name, citation="", features=features)

        def _compute(
            self, predictions: Sequence[Any], references: Sequence[Any]
        ) -> dict[str, float]:
            return {name: float(score(list(references), list(predictions)))}

    return ScoreMetric


def _accuracy(references: list[Any], predictions: list[Any]) -> float:
    """For sets of labels (rows of 0 and 1): the fraction of samples with the exact set."""
    return sklearn.metrics.accuracy_score(np.asarray(references), np.asarray(predictions))


def _micro_f1(references: list[list[int]], predictions: list[list[int]]) -> float:
    """Micro-averaged over all samples and labels."""
    return sklearn.metrics.f1_score(np.ravel(references), np.ravel(predictions), zero_division=0)


def _pearson(references: list[float], predictions: list[float]) -> float:
    """Pearson correlation; 0 if predictions or references are constant."""
    return (
        np.corrcoef(references, predictions)[0, 1]
        if np.ptp(references) and np.ptp(predictions)
        else 0.0
    )


def answer_words(answer: str) -> list[str]:
    """SQuAD's normalisation: lower case, without ASCII punctuation, then without the articles a,
    an, the.

    >>> answer_words("The end-of-file marker, an int.")
    ['endoffile', 'marker', 'int']
    """
    return re.sub(
        r"\b(a|an|the)\b", " ", answer.lower().translate(str.maketrans("", "", string.punctuation))
    ).split()


def words_f1(true: list[str], predicted: list[str]) -> float:
    """2 c / (p + t) for p and t words of which c are common (with multiplicity). Two empty answers:
    1.

    >>> words_f1(["red", "end"], ["big", "red", "red"])
    0.4
    """
    if not predicted or not true:
        return float(predicted == true)
    return 2 * (Counter(predicted) & Counter(true)).total() / (len(predicted) + len(true))


def _answers(
    score: Callable[[list[str], list[str]], float],
    references: list[list[str]],
    predictions: list[str],
) -> float:
    """The mean over samples of the best score over all correct answers; without any, the correct
    answer is "".
    """
    pairs = zip(references, predictions, strict=True)
    return np.mean(
        [
            max(score(answer_words(true), answer_words(given)) for true in right or [""])
            for right, given in pairs
        ]
    )


def _same_texts(references: list[str], predictions: list[str]) -> float:
    """The fraction of equal texts, after normalising white space."""
    return np.mean(
        [true.split() == given.split() for true, given in zip(references, predictions, strict=True)]
    )


def _rouge(kind: str, references: list[str], predictions: list[str]) -> float:
    """The mean F score, without stemming."""
    scorer = RougeScorer([kind])
    return np.mean(
        [
            scorer.score(true, given)[kind].fmeasure
            for true, given in zip(references, predictions, strict=True)
        ]
    )


METRICS: dict[str, type[evaluate.Metric]] = {  # see `predictions_and_references`
    "accuracy": _metric("accuracy", _accuracy, _INTEGER),
    "f1": _metric(
        "f1", partial(sklearn.metrics.f1_score, average="macro", zero_division=0), _INTEGER
    ),
    "exact_match": _metric("exact_match", _accuracy, datasets.Sequence(_INTEGER)),
    "micro_f1": _metric("micro_f1", _micro_f1, datasets.Sequence(_INTEGER)),
    "mae": _metric("mae", sklearn.metrics.mean_absolute_error, _NUMBER),
    "pearson": _metric("pearson", _pearson, _NUMBER),
}
# tags such as B-PER, I-PER and O, one list per text: accuracy of tokens, F1 of entities
ENTITY_METRICS = {
    "accuracy": _metric("accuracy", seqeval.metrics.accuracy_score, _LIST_OF_TEXTS),
    "f1": _metric("f1", partial(seqeval.metrics.f1_score, zero_division=0), _LIST_OF_TEXTS),
}
ANSWER_METRICS = {  # a reference is a list of correct answers
    "exact_match": _metric("exact_match", partial(_answers, list.__eq__), _TEXT, _LIST_OF_TEXTS),
    "f1": _metric("f1", partial(_answers, words_f1), _TEXT, _LIST_OF_TEXTS),
}
TEXT_METRICS = {"exact_match": _metric("exact_match", _same_texts, _TEXT)} | {
    kind: _metric(kind, partial(_rouge, kind), _TEXT) for kind in ("rouge1", "rouge2", "rougeL")
}


def compute(
    metrics: Mapping[str, type[evaluate.Metric]], predictions: list[Any], references: list[Any]
) -> dict[str, float]:
    """The metrics over all samples; NaN without predictions. Arrays, of the targets of a sample,
    are concatenated.
    """
    if isinstance(references[0], np.ndarray):
        predictions, references = np.concatenate(predictions), np.concatenate(references)
    if not len(references):
        return dict.fromkeys(metrics, math.nan)
    results: dict[str, float] = {}
    for metric in metrics.values():  # in memory: processes on one machine would share cache files
        results |= metric(keep_in_memory=True).compute(
            predictions=predictions, references=references
        )
    return results


def predictions_and_references(
    logits: np.ndarray, labels: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Predictions and references by the shapes and dtypes of a head's labels: one array per sample,
    to be concatenated.

    Args:
        logits: (samples, classes), (samples, width, classes) or, for a regression, (samples, 1).
        labels: integers of shape (samples,) or (samples, width), -100 ignored: classes, predicted
            by the largest logit. Floats of shape (samples,): numbers. Floats of shape (samples,
            classes): sets of classes with a logit above 0.
    """
    if labels.dtype.kind == "f" and labels.ndim == 1:
        return list(logits.reshape(-1, 1).astype(np.float64)), list(
            labels.reshape(-1, 1).astype(np.float64)
        )
    if labels.dtype.kind == "f":
        return list((logits > 0).astype(np.int64)[:, None]), list(labels.astype(np.int64)[:, None])
    labels = labels.reshape(len(labels), -1)
    predicted, counted = logits.argmax(-1).reshape(labels.shape), labels != IGNORED_LABEL
    predictions, references = (
        [row[own] for row, own in zip(rows, counted, strict=True)] for rows in (predicted, labels)
    )
    return predictions, references
