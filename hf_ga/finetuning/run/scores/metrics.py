"""Metrics of evaluations, computed by an `evaluate.Metric` that is defined here, so that nothing is
downloaded: those of scikit-learn, seqeval and rouge-score, and SQuAD's metrics of answers.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
import seqeval.metrics
import sklearn.metrics
from rouge_score.rouge_scorer import RougeScorer

# A function (references, predictions) -> the value of a metric.
Score = Callable[[list[Any], list[Any]], float]


class _Scores(evaluate.Metric):
    """Metrics of an evaluation of a run, as a metric of the library `evaluate`.

    Args:
        scores: Name of a metric -> its function.
        features: The types of predictions and references.
    """

    def __init__(self, scores: Mapping[str, Score], features: datasets.Features) -> None:
        """Keep the functions and types, which the methods below use."""
        self._scores = scores
        self._features = features
        # By default, inputs are written to cache files that processes on one machine would share.
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        """Return the types of the inputs of metrics of evaluations. `evaluate.Metric` calls this
        method.
        """
        return evaluate.MetricInfo(description="", citation="", features=self._features)

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics of an evaluation. `evaluate.Metric` calls this method."""
        return {
            name: float(score(list(references), list(predictions)))
            for name, score in self._scores.items()
        }


def _micro_f1(references: list[list[int]], predictions: list[list[int]]) -> float:
    """Compute the metric `micro_f1` of an evaluation of multi-label classification: the F1 score,
    micro-averaged over all samples and labels.
    """
    return sklearn.metrics.f1_score(np.ravel(references), np.ravel(predictions), zero_division=0)


def pearson(references: Sequence[float], predictions: Sequence[float]) -> float:
    """Compute the metric `pearson` of an evaluation of a regression: Pearson's correlation of
    predictions and true values; 0 if either are constant, for which it is not defined.
    """
    if not np.ptp(references) or not np.ptp(predictions):
        return 0.0
    return float(np.corrcoef(references, predictions)[0, 1])


def answer_words(answer: str) -> list[str]:
    """Split an answer to a question into words, normalized as by SQuAD's metrics of question
    answering: in lower case, without ASCII punctuation and the articles a, an, the.

    >>> answer_words("The end-of-file marker, an int.")
    ['endoffile', 'marker', 'int']
    """
    without_punctuation = answer.lower().translate(str.maketrans("", "", string.punctuation))
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return without_articles.split()


def words_f1(true_words: list[str], predicted_words: list[str]) -> float:
    """Compute the F1 score of an answer's words, a metric of question answering as in SQuAD:
    2 x common words / (predicted words + true words). A word that both repeat is counted as often
    as both have it.

    Returns:
        The score. If an answer is empty: 1 if both are, else 0.

    >>> words_f1(["red", "end"], ["big", "red", "red"])
    0.4
    """
    if not predicted_words or not true_words:
        return float(predicted_words == true_words)
    num_common = (Counter(predicted_words) & Counter(true_words)).total()
    return 2 * num_common / (len(predicted_words) + len(true_words))


def _mean_answer_score(score: Score, references: list[list[str]], predictions: list[str]) -> float:
    """Compute a metric of an evaluation of question answering, as in SQuAD: the mean over questions
    of a score of the predicted answer.
    """
    best_scores = []
    for correct_answers, prediction in zip(references, predictions, strict=True):
        predicted_words = answer_words(prediction)
        scores = [
            score(answer_words(correct), predicted_words) for correct in correct_answers or [""]
        ]
        best_scores.append(max(scores))
    return np.mean(best_scores)


def _fraction_of_equal_texts(references: list[str], predictions: list[str]) -> float:
    """Compute the metric `exact_match` of an evaluation of seq2seq: the fraction of generated texts
    that are equal to their targets, where any white space counts as one space.
    """
    pairs = zip(references, predictions, strict=True)
    return np.mean([reference.split() == prediction.split() for reference, prediction in pairs])


def _mean_rouge(variant: str, references: list[str], predictions: list[str]) -> float:
    """Compute a metric of an evaluation of seq2seq: the mean ROUGE F score of generated texts,
    without stemming.
    """
    scorer = RougeScorer([variant])
    pairs = zip(references, predictions, strict=True)
    return np.mean(
        [scorer.score(reference, prediction)[variant].fmeasure for reference, prediction in pairs]
    )


# Metrics of classes, sets of classes and numbers, as `readers.read_logits` returns them.
METRICS: dict[str, Score] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": partial(sklearn.metrics.f1_score, average="macro", zero_division=0),
    "exact_match": sklearn.metrics.accuracy_score,
    "micro_f1": _micro_f1,
    "mae": sklearn.metrics.mean_absolute_error,
    "pearson": pearson,
}
# Metrics of named entities: accuracy of tags such as B-PER, I-PER and O, F1 of whole entities. A
# prediction is the list of a text's tags.
ENTITY_METRICS: dict[str, Score] = {
    "accuracy": seqeval.metrics.accuracy_score,
    "f1": partial(seqeval.metrics.f1_score, zero_division=0),
}
# Metrics of question answering. A reference is the list of the correct answers to a question.
ANSWER_METRICS: dict[str, Score] = {
    "exact_match": partial(_mean_answer_score, list.__eq__),
    "f1": partial(_mean_answer_score, words_f1),
}
# Metrics of generated texts.
TEXT_METRICS: dict[str, Score] = {
    "exact_match": _fraction_of_equal_texts,
    "rouge1": partial(_mean_rouge, "rouge1"),
    "rouge2": partial(_mean_rouge, "rouge2"),
    "rougeL": partial(_mean_rouge, "rougeL"),
}


def compute(scores: Mapping[str, Score], compared: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Compute several metrics over all samples of a split, in an evaluation of a run.

    Args:
        scores: Name of a metric -> its function.
        compared: (prediction, reference) of each sample: texts or lists, or arrays with an entry
            for each target of the sample.

    Returns:
        Name of a metric -> value, which is NaN if no sample has a target.
    """
    predictions, references = map(list, zip(*compared, strict=True))
    if isinstance(references[0], np.ndarray):
        # All targets of all samples.
        predictions = np.concatenate(predictions)
        references = np.concatenate(references)
    if not len(references):
        return dict.fromkeys(scores, math.nan)
    inputs = {"predictions": predictions, "references": references}
    return _Scores(scores, datasets.Dataset.from_dict(inputs).features).compute(**inputs)
