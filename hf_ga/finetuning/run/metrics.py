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

_INTEGER = datasets.Value("int64")
_NUMBER = datasets.Value("float64")
_TEXT = datasets.Value("string")
_LIST_OF_TEXTS = datasets.Sequence(_TEXT)


def _metric(name: str, score: Callable, value: Any, reference: Any = None) -> type[evaluate.Metric]:
    """Make the class of the metric `{name: score(references, predictions)}`.

    Args:
        name: The metric's name.
        score: A function (references, predictions) -> number.
        value: The type of a prediction.
        reference: The type of a reference. Default: that of a prediction.
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
    """Compute the fraction of correct labels; of sets of labels (rows of 0 and 1), that of samples
    with the exact set.
    """
    return sklearn.metrics.accuracy_score(np.asarray(references), np.asarray(predictions))


def _micro_f1(references: list[list[int]], predictions: list[list[int]]) -> float:
    """Compute F1, micro-averaged over all samples and labels."""
    return sklearn.metrics.f1_score(np.ravel(references), np.ravel(predictions), zero_division=0)


def _pearson(references: list[float], predictions: list[float]) -> float:
    """Compute Pearson's correlation; 0 if predictions or references are constant."""
    if not np.ptp(references) or not np.ptp(predictions):
        return 0.0
    return np.corrcoef(references, predictions)[0, 1]


def answer_words(answer: str) -> list[str]:
    """Split an answer into words with SQuAD's normalisation: lower case, without ASCII punctuation,
    then without the articles a, an, the.

    >>> answer_words("The end-of-file marker, an int.")
    ['endoffile', 'marker', 'int']
    """
    without_punctuation = answer.lower().translate(str.maketrans("", "", string.punctuation))
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return without_articles.split()


def words_f1(true: list[str], predicted: list[str]) -> float:
    """Compute F1 of words: 2 c / (p + t) for p and t words of which c are common (with
    multiplicity); 1 for two empty answers.

    >>> words_f1(["red", "end"], ["big", "red", "red"])
    0.4
    """
    if not predicted or not true:
        return float(predicted == true)
    num_common = (Counter(predicted) & Counter(true)).total()
    return 2 * num_common / (len(predicted) + len(true))


def _answers(
    score: Callable[[list[str], list[str]], float],
    references: list[list[str]],
    predictions: list[str],
) -> float:
    """Average over samples the best score over all correct answers; without any, the correct answer
    is "".
    """
    best_scores = []
    for right, given in zip(references, predictions, strict=True):
        words = answer_words(given)
        scores = [score(answer_words(true), words) for true in right or [""]]
        best_scores.append(max(scores))
    return np.mean(best_scores)


def _same_texts(references: list[str], predictions: list[str]) -> float:
    """Compute the fraction of equal texts, after normalising white space."""
    pairs = zip(references, predictions, strict=True)
    return np.mean([true.split() == given.split() for true, given in pairs])


def _rouge(kind: str, references: list[str], predictions: list[str]) -> float:
    """Compute the mean F score of a kind of ROUGE, without stemming."""
    scorer = RougeScorer([kind])
    pairs = zip(references, predictions, strict=True)
    return np.mean([scorer.score(true, given)[kind].fmeasure for true, given in pairs])


# Of labels as `predictions_and_references` returns them.
METRICS: dict[str, type[evaluate.Metric]] = {
    "accuracy": _metric("accuracy", _accuracy, _INTEGER),
    "f1": _metric(
        "f1", partial(sklearn.metrics.f1_score, average="macro", zero_division=0), _INTEGER
    ),
    "exact_match": _metric("exact_match", _accuracy, datasets.Sequence(_INTEGER)),
    "micro_f1": _metric("micro_f1", _micro_f1, datasets.Sequence(_INTEGER)),
    "mae": _metric("mae", sklearn.metrics.mean_absolute_error, _NUMBER),
    "pearson": _metric("pearson", _pearson, _NUMBER),
}
# Of tags such as B-PER, I-PER and O, one list per text: accuracy of tokens, F1 of entities.
ENTITY_METRICS = {
    "accuracy": _metric("accuracy", seqeval.metrics.accuracy_score, _LIST_OF_TEXTS),
    "f1": _metric("f1", partial(seqeval.metrics.f1_score, zero_division=0), _LIST_OF_TEXTS),
}
# A reference is a list of correct answers.
ANSWER_METRICS = {
    "exact_match": _metric("exact_match", partial(_answers, list.__eq__), _TEXT, _LIST_OF_TEXTS),
    "f1": _metric("f1", partial(_answers, words_f1), _TEXT, _LIST_OF_TEXTS),
}
TEXT_METRICS = {"exact_match": _metric("exact_match", _same_texts, _TEXT)} | {
    kind: _metric(kind, partial(_rouge, kind), _TEXT) for kind in ("rouge1", "rouge2", "rougeL")
}


def compute(
    metrics: Mapping[str, type[evaluate.Metric]], predictions: list[Any], references: list[Any]
) -> dict[str, float]:
    """Compute metrics over all samples.

    Args:
        metrics: Name -> class of the metric.
        predictions: One entry per sample. Arrays hold the targets of a sample, and are joined.
        references: One entry per sample, like the predictions.

    Returns:
        Name -> value; NaN without predictions.
    """
    if isinstance(references[0], np.ndarray):
        predictions = np.concatenate(predictions)
        references = np.concatenate(references)
    if not len(references):
        return dict.fromkeys(metrics, math.nan)
    results: dict[str, float] = {}
    for metric in metrics.values():
        # Processes on one machine would share cache files.
        in_memory = metric(keep_in_memory=True)
        results |= in_memory.compute(predictions=predictions, references=references)
    return results


def predictions_and_references(
    logits: np.ndarray, labels: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Read predictions and references by the shapes and dtypes of a head's labels.

    Args:
        logits: Shape (samples, classes), (samples, width, classes) or, for a regression, (samples,
            1).
        labels: Integers of shape (samples,) or (samples, width), -100 ignored: classes, predicted
            by the largest logit. Floats of shape (samples,): numbers. Floats of shape (samples,
            classes): sets of classes, predicted by a logit above 0.

    Returns:
        The predictions and the references: one array per sample, to be concatenated.
    """
    if labels.dtype.kind == "f" and labels.ndim == 1:
        predicted = logits.reshape(-1, 1).astype(np.float64)
        numbers = labels.reshape(-1, 1).astype(np.float64)
        return list(predicted), list(numbers)
    if labels.dtype.kind == "f":
        predicted = (logits > 0).astype(np.int64)
        sets = labels.astype(np.int64)
        return list(predicted[:, None]), list(sets[:, None])
    labels = labels.reshape(len(labels), -1)
    predicted = logits.argmax(-1).reshape(labels.shape)
    is_target = labels != IGNORED_LABEL
    predictions = [row[own] for row, own in zip(predicted, is_target, strict=True)]
    references = [row[own] for row, own in zip(labels, is_target, strict=True)]
    return predictions, references
