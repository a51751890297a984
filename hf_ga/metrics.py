"""Accuracy and F1 as `evaluate.Metric` objects that need neither a hub nor scikit-learn."""

import datasets
import evaluate
import numpy as np

_FEATURES = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})


class _OfClasses(evaluate.Metric):
    """A metric of predicted and true class ids."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", features=_FEATURES)


class Accuracy(_OfClasses):
    """Share of predictions that equal their reference.

    >>> Accuracy().compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666}
    """

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class F1(_OfClasses):
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


METRICS: dict[str, type[evaluate.Metric]] = {"accuracy": Accuracy, "f1": F1}
