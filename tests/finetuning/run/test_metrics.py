"""Metrics against examples by hand, and what they are computed from."""

import math
from types import SimpleNamespace

import helpers as h
import numpy as np
import pytest
import torch

from hf_ga import FinetuneConfig
from hf_ga.finetuning.run.scores.metrics import (
    ANSWER_METRICS,
    ENTITY_METRICS,
    METRICS,
    TEXT_METRICS,
    compute,
)
from hf_ga.finetuning.run.scores.readers import are_entities, read_logits


def score(metric, references, predictions):
    (value,) = compute({"it": metric}, zip(predictions, references, strict=True)).values()
    assert type(value) is float
    return value


def computed(name, predictions, references):
    return score(METRICS[name], references, predictions)


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("accuracy", [1, 2, 3, 1], [1, 2, 1, 1], 0.75),
        (
            "f1",
            [0, 0, 1, 2],
            [0, 1, 1, 1],
            (2 / 3 + 1 / 2 + 0) / 3,
        ),  # the mean over classes, whatever their sizes
        ("f1", [10**9, 5, 5, 0], [10**9, 5, 0, 10**6], (1 + 2 / 3 + 0 + 0) / 4),
        ("exact_match", [[1, 0], [1, 1], [0, 0]], [[1, 0], [1, 0], [0, 0]], 2 / 3),
        ("exact_match", [[0, 0]], [[0, 0]], 1.0),  # the empty set is right where it is asked for
        ("micro_f1", [[1, 1], [1, 0]], [[1, 0], [1, 1]], 2 / 3),  # of all labels together
        ("micro_f1", [[0, 0], [0, 0]], [[0, 0], [0, 0]], 0.0),  # nothing true or predicted
        ("micro_f1", [[1, 1]], [[0, 0]], 0.0),
        ("micro_f1", [[0, 0]], [[1, 0]], 0.0),
        ("mae", [1.0, 2.0, 3.5], [2.0, 2.0, 3.0], 0.5),
        ("pearson", [1.0, 2.0, 3.0, 5.0], [2.0, 1.0, 4.0, 4.0], 5.75 / (8.75 * 6.75) ** 0.5),
        (
            "pearson",
            [0.1, 0.1, 0.1],
            [1.0, 2.0, 3.0],
            0.0,
        ),  # constant, although its mean is rounded
        ("pearson", [1.0, 2.0, 3.0], [0.7, 0.7, 0.7], 0.0),
        ("pearson", [5.0], [3.0], 0.0),
        ("pearson", [1.0, 2.0], [30.0, 20.0], -1.0),
    ],
)
def test_by_hand(name, predictions, references, expected):
    assert computed(name, predictions, references) == pytest.approx(expected, abs=1e-12)


def test_is_lower_better_as_measured():
    """Perfect predictions against wrong ones."""
    for name in METRICS:
        references = {"exact_match": [[0, 1], [1, 0]], "micro_f1": [[0, 1], [1, 0]]}.get(
            name, [0, 1]
        )
        wrong = (
            [row[::-1] for row in references]
            if isinstance(references[0], list)
            else references[::-1]
        )
        is_lower = computed(name, references, references) < computed(name, wrong, references)
        assert is_lower == FinetuneConfig(metric_for_best_model=name).lower_is_better


def test_an_entity_is_right_as_a_whole():
    """Three of four tokens right, but one of two entities predicted whole: precision and recall are
    one half.
    """
    references = [["B-PER", "I-PER", "O", "B-LOC"], []]
    predictions = [["B-PER", "O", "O", "B-LOC"], []]
    for given, right in ((predictions, references), (predictions[::-1], references[::-1])):
        values = {name: score(metric, right, given) for name, metric in ENTITY_METRICS.items()}
        assert values == {"accuracy": 0.75, "f1": 0.5}
    assert score(ENTITY_METRICS["f1"], [["O", "O"]], [["O", "O"]]) == 0.0
    assert are_entities(["O", "B-PER", "I-PER"])
    assert not are_entities(["O", "noun"])
    assert not are_entities(["O"])


def test_answers_by_hand():
    for predicted, true, same, f1 in [
        ("The Theory of an Apple.", "theory of apple", 1.0, 1.0),  # articles as whole words only
        (
            "U.S.A.",
            "usa",
            1.0,
            1.0,
        ),  # punctuation leaves no space behind; so "a" is no word of its own here
        (
            "x x x",
            "x",
            0.0,
            2 * (1 / 3) * 1 / (1 / 3 + 1),
        ),  # a word counts as often as it is in both
        ("the", "", 1.0, 1.0),
        ("x", "", 0.0, 0.0),
        ("", "x", 0.0, 0.0),
    ]:
        for name, value in {"exact_match": same, "f1": f1}.items():
            assert score(ANSWER_METRICS[name], [[true]], [predicted]) == pytest.approx(
                value, rel=1e-12
            )


def test_metrics_of_texts_are_means():
    """The best of several right answers counts."""
    predictions = ["the cat", "big dog", "", "x"]
    answers = [["a dog", "Cat!"], ["dog"], [], []]
    expected = {"exact_match": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4}
    texts = ["return the list", "x  y", "return", ""]
    references = ["return a list", "x y", "the", "y"]
    expected_of_texts = {
        "exact_match": 1 / 4,
        "rouge1": (4 / 6 + 1 + 0 + 0) / 4,
        "rougeL": (4 / 6 + 1 + 0 + 0) / 4,
    }
    cases = (
        (ANSWER_METRICS, predictions, answers, expected),
        (TEXT_METRICS, texts, references, expected_of_texts),
    )
    for table, given, right, results in cases:
        for name, value in results.items():
            assert score(table[name], right, given) == pytest.approx(value)
            assert score(table[name], right, given[::-1]) != pytest.approx(value)


def compared(logits, labels):
    """Of all samples together."""
    outputs = SimpleNamespace(logits=torch.from_numpy(logits))
    micro_batch = SimpleNamespace(batch={"labels": torch.from_numpy(labels)})
    pairs = read_logits(outputs, {}, micro_batch)
    assert len(pairs) == len(labels)
    predictions, references = zip(*pairs, strict=True)
    return np.concatenate(predictions), np.concatenate(references)


@pytest.mark.parametrize("shape", [(1,), (9,), (1, 7), (9, 7)])
def test_one_class_a_sample_or_token(shape):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*shape, 5)).astype(np.float32)
    labels = rng.integers(0, 5, shape)
    if shape != (1,):
        labels[rng.random(shape) < 0.5] = h.IGNORED
    predictions, references = compared(logits, labels)
    rows = zip(logits.reshape(-1, 5).tolist(), labels.flatten().tolist(), strict=True)
    pairs = [(row.index(max(row)), label) for row, label in rows if label != h.IGNORED]
    assert pairs
    assert list(zip(predictions.tolist(), references.tolist(), strict=True)) == pairs


def test_numbers():
    for size in (1, 9):
        rng = np.random.default_rng(size)
        logits = rng.normal(size=(size, 1)).astype(np.float32)
        labels = rng.normal(size=size).astype(np.float32)
        labels[0] = h.IGNORED  # a number like any other
        predictions, references = compared(logits, labels)
        assert predictions.tolist() == [row[0] for row in logits.tolist()]
        assert references.tolist() == labels.tolist()


@pytest.mark.parametrize(("size", "classes"), [(1, 1), (9, 1), (9, 3)])
def test_sets(size, classes):
    """A logit above 0 is a probability above one half."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(size, classes)).astype(np.float32)
    logits[0, 0] = 0.0  # one half: not predicted
    labels = rng.integers(0, 2, (size, classes)).astype(np.float32)
    predictions, references = compared(logits, labels)
    assert predictions.dtype.kind == references.dtype.kind == "i"
    assert predictions.tolist() == [
        [int(1 / (1 + math.exp(-v)) > 0.5) for v in row] for row in logits.tolist()
    ]
    assert references.tolist() == labels.tolist()


def test_all_ignored_is_nothing():
    for logits, labels in [((3, 4), (3,)), ((3, 5, 4), (3, 5))]:
        predictions, references = compared(np.ones(logits, np.float32), np.full(labels, h.IGNORED))
        assert predictions.shape == references.shape == (0,)
