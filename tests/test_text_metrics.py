"""Metrics of texts: worked by hand, and against slow, obviously right versions."""

from itertools import combinations

import datasets
import evaluate
import numpy as np
import pytest

from hf_ga.run.text_metrics import ANSWER_METRICS, TEXT_METRICS, common_subsequence, normalised_words, rouge_l, word_f1


@pytest.fixture(autouse=True)
def metrics_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("The Theory of an Apple.", ["theory", "of", "apple"]),  # articles as whole words only
        ("U.S.A.", ["usa"]),  # punctuation leaves no space behind; so "a" is no word of its own here
        ("a b  a\tc\n", ["b", "c"]),
        ("1,000 $", ["1000"]),
        ("«Größe»", ["«größe»"]),  # ASCII punctuation alone
        ("the a an", []),
        ("", []),
    ],
)
def test_words_that_count(answer, words):
    assert normalised_words(answer) == words


@pytest.mark.parametrize(
    ("predicted", "true", "f1"),
    [
        ("x y", "x y", 1.0),
        ("x", "y", 0.0),
        ("x x x", "x", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # a word counts as often as it is in both
        ("x y z w", "z x", 2 * 0.5 * 1 / 1.5),
        ("", "", 1.0),
        ("x", "", 0.0),
        ("", "x", 0.0),
    ],
)
def test_f1_of_words_by_hand(predicted, true, f1):
    assert word_f1(predicted.split(), true.split()) == pytest.approx(f1, rel=1e-12)


def longest_by_trying_all(first, second):
    """Every way of leaving words of the first out, the longest first: is what is left found in the second, in order?"""
    for size in range(len(first), 0, -1):
        for kept in combinations(first, size):
            rest = iter(second)
            if all(word in rest for word in kept):
                return size
    return 0


def test_common_subsequence_against_trying_all():
    rng = np.random.default_rng(0)
    found = set()
    for _ in range(300):
        first, second = ("".join(rng.choice(list("abc"), rng.integers(0, 8))) for _ in range(2))
        assert common_subsequence(first, second) == longest_by_trying_all(first, second), (first, second)
        found.add(common_subsequence(first, second))
    assert len(found) > 4  # the control: not one number throughout


def test_rouge_l_by_hand():
    """Lin's example of 2004: the same words in another order count less, which words without their order cannot tell."""
    true, ordered, reordered = "police killed the gunman", "police kill the gunman", "the gunman kill police"
    assert rouge_l(ordered, true) == 0.75 and rouge_l(reordered, true) == 0.5
    assert word_f1(ordered.split(), true.split()) == word_f1(reordered.split(), true.split())
    assert rouge_l("Police, KILLED: the gunman!", true) == 1.0
    assert rouge_l("", true) == rouge_l(true, "...") == rouge_l("", "") == 0.0
    assert rouge_l("a b", "a b c d e f") == pytest.approx(2 * 1 * (1 / 3) / (4 / 3))  # precision 1, recall 1/3


def test_metrics_are_means_over_all_texts():
    """In batches as at once; the best of several right answers counts."""
    predictions, answers = ["the cat", "big dog", "", "x"], [["a dog", "Cat!"], ["dog"], [], []]
    expected = {"exact_match": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4}
    texts = ["return the list", "x  y", "return", ""]
    references = ["return a list", "x y", "the", "y"]
    expected_of_texts = {"exact_match": 1 / 4, "rouge_l": (4 / 6 + 1 + 0 + 0) / 4}
    cases = ((ANSWER_METRICS, predictions, answers, expected), (TEXT_METRICS, texts, references, expected_of_texts))
    for table, given, right, results in cases:
        for name, metric in table.items():
            assert metric().compute(predictions=given, references=right) == {name: pytest.approx(results[name])}
            parts = metric()
            for start, end in ((0, 1), (1, 4)):
                parts.add_batch(predictions=given[start:end], references=right[start:end])
            assert parts.compute() == {name: pytest.approx(results[name])}
            assert metric().compute(predictions=given[::-1], references=right)[name] != pytest.approx(results[name])
