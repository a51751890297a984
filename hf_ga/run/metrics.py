"""Metrics as `evaluate.Metric` objects that need neither a hub nor scikit-learn, and what they are computed from."""

from typing import Any

import datasets
import evaluate
import numpy as np

from hf_ga.exact.batches import IGNORED_LABEL

_INTEGER, _NUMBER = datasets.Value("int64"), datasets.Value("float32")


class _Metric(evaluate.Metric):
    """A metric whose description is its documentation string."""

    value: Any = _INTEGER

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": self.value, "references": self.value})
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", features=features)


class Accuracy(_Metric):
    """Share of predictions that equal their reference.

    >>> Accuracy().compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666}
    """

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class F1(_Metric):
    """Macro F1: the plain mean over the classes that occur in predictions or references of 2 TP / (2 TP + FP + FN).

    >>> F1().compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'f1': 0.6666666666666666}
    """

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        classes, codes = np.unique(np.concatenate([predicted, true]), return_inverse=True)
        predicted, true = np.split(codes, 2)
        hits = np.bincount(true[predicted == true], minlength=len(classes))
        sizes = np.bincount(predicted, minlength=len(classes)) + np.bincount(true, minlength=len(classes))
        return {"f1": float(np.mean(2 * hits / sizes))}


class ExactMatch(_Metric):
    """Share of samples whose whole set of labels is right; sets as rows of 0 and 1.

    >>> ExactMatch().compute(predictions=[[0, 1], [1, 1]], references=[[0, 1], [1, 0]])
    {'exact_match': 0.5}
    """

    value = datasets.Sequence(_INTEGER)

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        return {"exact_match": float(np.mean((np.asarray(predictions) == np.asarray(references)).all(-1)))}


class MicroF1(_Metric):
    """2 TP / (2 TP + FP + FN) over all samples and labels together; sets as rows of 0 and 1. Nothing true or predicted: 0.

    >>> MicroF1().compute(predictions=[[0, 1], [1, 1]], references=[[0, 1], [1, 0]])
    {'micro_f1': 0.8}
    """

    value = datasets.Sequence(_INTEGER)

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        predicted, true = np.asarray(predictions, bool), np.asarray(references, bool)
        size = int(predicted.sum() + true.sum())
        return {"micro_f1": float(2 * (predicted & true).sum() / size) if size else 0.0}


class MeanAbsoluteError(_Metric):
    """Mean of |prediction - reference|, in the units of the label.

    >>> MeanAbsoluteError().compute(predictions=[1.0, 3.0], references=[1.0, 2.0])
    {'mae': 0.5}
    """

    value = _NUMBER

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"mae": float(np.mean(np.abs(np.asarray(predictions, float) - np.asarray(references, float))))}


class Pearson(_Metric):
    """Pearson's correlation of predictions and references; 0 where one of them does not vary.

    >>> Pearson().compute(predictions=[1.0, 2.0, 3.0], references=[2.0, 4.0, 6.0])
    {'pearson': 1.0}
    """

    value = _NUMBER

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        x, y = (np.asarray(v, float) - np.mean(v) for v in (predictions, references))
        size = float(np.sqrt((x @ x) * (y @ y)))
        return {"pearson": float(x @ y) / size if size else 0.0}


METRICS: dict[str, type[evaluate.Metric]] = {
    "accuracy": Accuracy,
    "f1": F1,
    "exact_match": ExactMatch,
    "micro_f1": MicroF1,
    "mae": MeanAbsoluteError,
    "pearson": Pearson,
}


def is_lower_better(name: str) -> bool:
    """Whether a metric (or the loss) is better the smaller it is."""
    return name in ("loss", "perplexity", "mae")


def predictions_and_references(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What metrics compare, by the shapes and types of a head's labels.

    Args:
        logits: (samples, classes), (samples, width, classes) or, for a regression, (samples, 1).
        labels: integers of shape (samples,) or (samples, width), -100 ignored: classes, the largest logit is the prediction.
            Floats of shape (samples,): numbers. Floats of shape (samples, classes): sets, a logit above 0 is predicted.
    """
    if labels.dtype.kind == "f":
        if labels.ndim == 1:
            return logits.reshape(labels.shape), labels
        return (logits > 0).astype(np.int64), labels.astype(np.int64)
    counted = labels != IGNORED_LABEL
    return logits.argmax(-1)[counted], labels[counted]


def entries_per_sample(labels: np.ndarray) -> np.ndarray:
    """How many predictions of `predictions_and_references` each sample has: int64, shape (samples,).

    >>> entries_per_sample(np.array([[-100, 2, 0], [-100, -100, 1]]))
    array([2, 1])
    """
    if labels.dtype.kind == "f":
        return np.ones(len(labels), np.int64)
    return (labels != IGNORED_LABEL).reshape(len(labels), -1).sum(axis=1)
