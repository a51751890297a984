"""Metrics of texts: answers as SQuAD compares them, and generated texts. Like those of `metrics`, without hub or network."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import datasets
import evaluate
import numpy as np

_TEXT = datasets.Value("string")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_words(answer: str) -> list[str]:
    """The words of an answer that count: lower case, without ASCII punctuation, then without the articles a, an, the.

    >>> normalised_words("The end-of-file marker, an int.")
    ['endoffile', 'marker', 'int']
    """
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def word_f1(predicted: Sequence[str], true: Sequence[str]) -> float:
    """2 c / (p + t) for p and t words of which c are common, a word as often as it is in both. Two empty answers: 1.

    >>> word_f1(["big", "red", "red"], ["red", "end"])  # one in common of 3 and of 2
    0.4
    """
    if not predicted or not true:
        return float(not predicted and not true)
    return 2 * (Counter(predicted) & Counter(true)).total() / (len(predicted) + len(true))


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest sequence of words that is in both in the same order, maybe with gaps.

    Row by row of the usual table: best[j] is the length for the words of `first` so far and the first j of `second`.

    >>> common_subsequence("police killed the gunman".split(), "the gunman police killed".split())
    2
    """
    best = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for j, other in enumerate(second, start=1):
            above = best[j]
            best[j] = diagonal + 1 if word == other else max(above, best[j - 1])
            diagonal = above
    return best[-1]


def rouge_l(predicted: str, true: str) -> float:
    """ROUGE-L F (Lin, 2004, beta 1): 2 L / (p + t) for texts of p and t words with a longest common subsequence of L words.

    Words are runs of a-z and 0-9 in lower case; nothing is stemmed. A text without words: 0.

    >>> rouge_l("Return the queue.", "Return an item from the queue.")  # return, the, queue: 2 x 3 / (3 + 6)
    0.6666666666666666
    """
    first, second = (re.findall("[a-z0-9]+", text.lower()) for text in (predicted, true))
    return 2 * common_subsequence(first, second) / (len(first) + len(second)) if first and second else 0.0


class _OfAnswers(evaluate.Metric):
    """A reference is a list of right answers, of which the best counts; an empty list, like "", means that there is none."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": _TEXT, "references": datasets.Sequence(_TEXT)})
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", features=features)


class AnswerExactMatch(_OfAnswers):
    """Share of answers whose normalised words are those of a right answer.

    >>> AnswerExactMatch().compute(predictions=["the end.", "red"], references=[["End", "stop"], []])
    {'exact_match': 0.5}
    """

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        hits = [any(normalised_words(given) == normalised_words(true) for true in right or [""]) for given, right in pairs]
        return {"exact_match": float(np.mean(hits))}


class AnswerF1(_OfAnswers):
    """Mean over the answers of the F1 of their normalised words, with the right answer that it is highest for.

    >>> AnswerF1().compute(predictions=["big red red"], references=[["blue", "red end"]])
    {'f1': 0.4}
    """

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        best = [max(word_f1(normalised_words(given), normalised_words(true)) for true in right or [""]) for given, right in pairs]
        return {"f1": float(np.mean(best))}


class _OfTexts(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": _TEXT, "references": _TEXT})
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", features=features)


class TextExactMatch(_OfTexts):
    """Share of texts that equal their reference, whitespace at the ends and its kind and number inside left aside.

    >>> TextExactMatch().compute(predictions=[" one  two", "One"], references=["one two", "one"])
    {'exact_match': 0.5}
    """

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [given.split() == true.split() for given, true in zip(predictions, references, strict=True)]
        return {"exact_match": float(np.mean(hits))}


class RougeL(_OfTexts):
    """Mean ROUGE-L F of texts with one reference each; see `rouge_l`.

    >>> RougeL().compute(predictions=["a b c d"], references=["a c e"])  # a, c: 2 x 2 / (4 + 3)
    {'rouge_l': 0.5714285714285714}
    """

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return {"rouge_l": float(np.mean([rouge_l(given, true) for given, true in zip(predictions, references, strict=True)]))}


ANSWER_METRICS: dict[str, type[evaluate.Metric]] = {"exact_match": AnswerExactMatch, "f1": AnswerF1}
TEXT_METRICS: dict[str, type[evaluate.Metric]] = {"exact_match": TextExactMatch, "rouge_l": RougeL}
