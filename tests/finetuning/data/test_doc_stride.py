"""A context in overlapping windows: by hand, and the best answer over windows against a search over
all of their spans. In the letters' tokenizer a to j are 3 to 12; <cls> 13, <sep> 14.
"""

import math

import numpy as np
import pytest
import torch
from test_data import letter_tokenizer, prepared, write
from test_spans import asked
from test_tokenization import byte_level, encoder_tokenizer

from hf_ga import ConfigError
from hf_ga.finetuning.data.encoding.spans import (
    Span,
    best_answer,
    best_span,
    by_question,
    tokenize_questions,
)

CONTEXT = "c d e f g"


def windows(rows, max_length=8, doc_stride=1):
    return tokenize_questions(rows, encoder_tokenizer(), max_length, doc_stride)


def joined(*rows):
    """One batch of several rows."""
    return {name: [value for row in rows for value in row[name]] for name in rows[0]}


def test_windows_by_hand():
    """<cls> a b <sep> leaves 3 tokens of the context beside <sep>: c d e, and from the shared e on
    e f g. The answer f g is in the second window only: the first learns that it has none.
    """
    columns = windows(asked(CONTEXT, "f g"))
    assert columns["input_ids"] == [[13, 3, 4, 14, 5, 6, 7, 14], [13, 3, 4, 14, 7, 8, 9, 14]]
    assert columns["token_type_ids"] == [[0, 0, 0, 0, 1, 1, 1, 1]] * 2
    assert list(zip(columns["start_positions"], columns["end_positions"], strict=True)) == [
        (0, 0),
        (5, 6),
    ]
    assert [list(starts) for starts in columns["starts"]] == [
        [-1, -1, -1, -1, 0, 2, 4, -1],
        [-1, -1, -1, -1, 4, 6, 8, -1],  # characters of the whole context
    ]
    assert columns["window_index"] == [0, 1]
    assert columns["context"] == [CONTEXT] * 2
    assert columns["answers"] == [["f g"]] * 2
    assert columns["num_targets"] == [1, 1]
    assert columns["was_truncated"] == columns["answer_is_lost"] == [False, False]
    cut = windows(asked(CONTEXT, "f g"), doc_stride=None)  # the control: truncated, it is lost
    assert (cut["start_positions"], cut["answer_is_lost"], cut["window_index"]) == (
        [0],
        [True],
        [0],
    )


@pytest.mark.parametrize(
    ("answer", "places", "is_lost"),
    [
        ("e", [(6, 6), (4, 4)], False),  # in both
        ("c d", [(4, 5), (0, 0)], False),
        ("d e f", [(0, 0), (0, 0)], True),  # in neither as a whole
        (None, [(0, 0), (0, 0)], False),
    ],
)
def test_places_of_an_answer(answer, places, is_lost):
    columns = windows(asked(CONTEXT, answer))
    found = zip(columns["start_positions"], columns["end_positions"], strict=True)
    assert list(found) == places
    assert columns["answer_is_lost"] == [is_lost, False]


def test_a_wider_overlap_has_more_windows():
    """c d e, d e f, e f g share two tokens each; d e f is in the second."""
    columns = windows(asked(CONTEXT, "d e f"), doc_stride=2)
    assert [ids[4:7] for ids in columns["input_ids"]] == [[5, 6, 7], [6, 7, 8], [7, 8, 9]]
    assert columns["start_positions"] == [0, 4, 0]
    assert columns["answer_is_lost"] == [False] * 3


def test_rows_of_one_window_and_of_none():
    rows = joined(asked("c", "c"), asked(CONTEXT, question=""), asked(CONTEXT, "g"), asked("d"))
    columns = windows(rows)
    assert columns["window_index"] == [0, 0, 0, 1, 0]
    assert columns["length"] == [6, 0, 8, 8, 6]
    assert columns["num_targets"] == [1, 0, 1, 1, 1]
    assert by_question(columns["window_index"], columns["length"]) == [[6], [0], [8, 8], [6]]


def test_from_the_left_all_tokens_are_in_a_window_too():
    tokenizer = encoder_tokenizer()
    tokenizer.truncation_side = "left"
    columns = tokenize_questions(asked(CONTEXT, "c d"), tokenizer, 8, 1)
    assert [ids[4:7] for ids in columns["input_ids"]] == [[7, 8, 9], [5, 6, 7]]
    assert columns["start_positions"] == [0, 4]
    assert columns["answer_is_lost"] == [False, False]


def test_a_question_that_leaves_too_little_room():
    """Of 8 tokens, 3 are special and 4 the question's."""
    message = r"doc_stride 1 is not below the 1 tokens that max_length 8 .*'a b c d' \(4 tokens\)"
    with pytest.raises(ConfigError, match=message):
        windows(asked(CONTEXT, question="a b c d"))
    assert windows(asked("c", question="a b c d"))["length"] == [8]  # its context fits
    with pytest.raises(ConfigError, match="max_length 3 leaves no room"):
        windows(asked(CONTEXT), max_length=3)
    with pytest.raises(ConfigError, match="doc_stride 5 is not below the 5 tokens"):
        windows(asked("c"), doc_stride=5)  # transformers would refuse it for the short one, too


def best_by_trying_all(logits, samples, context):
    """All pairs of context tokens of all windows in plain loops; for the empty answer the window
    that believes in it least, as in transformers' example script.
    """
    scores = {}
    empty = min(
        start[sample["no_answer"]] + end[sample["no_answer"]]
        for (start, end), sample in zip(logits, samples, strict=True)
    )
    for w, ((start, end), sample) in enumerate(zip(logits, samples, strict=True)):
        places = [i for i, char in enumerate(sample["starts"]) if char >= 0]
        for i in places:
            for j in places:
                if i <= j:
                    scores[w, i, j] = start[i] + end[j]
    w, i, j = max(scores, key=scores.get)
    total = sum(map(math.exp, scores.values())) + math.exp(empty)
    if empty > scores[w, i, j]:
        return "", math.exp(empty) / total
    text = context[samples[w]["starts"][i] : samples[w]["ends"][j]].strip()
    return text, math.exp(scores[w, i, j]) / total


def test_best_answer_over_windows_against_trying_all():
    """Random logits; the empty answer of a single window would often win."""
    context = "What is the answer? The answer is\n  yes, or no. Grüße, 日本語 🎉"
    rng = np.random.default_rng(3)
    columns = tokenize_questions(asked(context, question="Why?"), byte_level(), 12, 3)
    samples = [
        {name: values[i] for name, values in columns.items()}
        for i in range(len(columns["window_index"]))
    ]
    assert len(samples) == 3
    empty = 0
    other_windows = set()
    naive = 0
    for _ in range(100):
        logits = rng.normal(size=(len(samples), 2, 12)) * 2
        logits[:, :, 0] += 3
        found = [
            best_span(*torch.tensor(of_window), sample)
            for of_window, sample in zip(logits, samples, strict=True)
        ]
        answer = best_answer(found)
        text, score = best_by_trying_all(logits.tolist(), samples, context)
        assert answer["answer"] == text
        assert answer["score"] == pytest.approx(score, abs=1e-6)
        assert context[answer["start"] : answer["end"]] == text
        empty += text == ""
        other_windows.add(max(range(len(found)), key=lambda i: found[i].score))
        naive += (max(span.empty_score for span in found) > max(s.score for s in found)) != (
            text == ""
        )
    assert 5 < empty < 95
    assert len(other_windows) == len(samples)
    assert naive > 10


def test_the_best_answer_by_hand():
    spans = [Span("red", 0, 3, 1.0, 9.0, 1.0), Span("blue", 8, 12, 2.0, 0.5, 2.0)]
    assert best_answer(spans)["answer"] == "blue"  # the first window's 9.0 says nothing of it
    assert best_answer(spans[:1]) == {
        "answer": "",
        "score": round(1 / (1 + math.exp(-8)), 6),
        "start": 0,
        "end": 0,
    }
    assert best_answer(spans[::-1]) == best_answer(spans)
    nothing = Span("", 0, 0, -math.inf, 1.0, -math.inf)  # no context token
    assert best_answer([nothing]) == {"answer": "", "score": 1.0, "start": 0, "end": 0}


def test_prepared_rows(tmp_path):
    """Flags that count rows count questions; the log says how many windows there are."""
    rows = [
        {"question": "a b", "context": context, "answers": {"text": [text], "answer_start": [at]}}
        for context, text, at in [(CONTEXT, "f g", 6), ("c d", "d", 2), (CONTEXT, "d e f", 2)] * 2
    ]
    file = write(tmp_path / "d.jsonl", rows)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    more = {"task": "question-answering", "validation_file": file, "max_length": 8}
    data = prepared(file, tokenizer, doc_stride=1, max_train_samples=3, **more)
    train = data.splits["train"]
    validation = data.splits["validation"]
    assert train["window_index"][:] == [0, 1, 0, 0, 1]
    assert len(validation) == 10
    assert train["start_positions"][:] == [0, 5, 5, 0, 0]
    assert data.notes[:2] == [
        "train: 1 of 3 rows trained as unanswerable, as no sample of max_length has their whole answer",
        "train: 5 windows of at most 8 tokens for 3 questions; a window without the answer is "
        "trained as unanswerable",
    ]
    assert set(data.samples("train").column_names) & {"window_index", "answers", "context"} == set()
    cut = prepared(file, tokenizer, max_train_samples=3, **more)
    assert cut.notes[0] == "train: 2 of 3 rows truncated to 8 tokens"
    assert len(cut.splits["train"]) == 3
    assert cut.content_hash != data.content_hash
