"""Question answering: answers -> tokens by hand and against the tokenizer's own count of
characters, tokens -> answers again.
"""

import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from test_data import letter_tokenizer
from test_tokenization import byte_level, encoder_tokenizer, metaspace, piece_tokenizer

from hf_ga import DataError
from hf_ga.finetuning.data.encoding.collation import collate_samples
from hf_ga.finetuning.data.encoding.spans import (
    best_answer,
    best_span,
    encode_answers,
    tokenize_questions,
)

NONE = {"text": [], "answer_start": []}


def asked(context, text=None, start=None, question="a b"):
    """A batch of one row, its answer the first place of the text unless told."""
    found = [] if text is None else [(text, context.index(text) if start is None else start)]
    return {
        "question": [question],
        "context": [context],
        "answers": [[{"text": t, "answer_start": s} for t, s in found]],
    }


def tokenized(rows, tokenizer=None, max_length=None):
    columns = tokenize_questions(rows, tokenizer or encoder_tokenizer(), max_length)
    return {name: values[0] for name, values in columns.items()}


def test_answer_by_hand():
    """<cls> a b <sep> c d e f <sep>: d and e are tokens 5 and 6; a context's characters count from
    its own beginning.
    """
    sample = tokenized(asked("c d e f", "d e"))
    assert sample["input_ids"] == [13, 3, 4, 14, 5, 6, 7, 8, 14]
    assert sample["token_type_ids"] == [0] * 4 + [1] * 5
    assert (sample["start_positions"], sample["end_positions"], sample["no_answer"]) == (5, 6, 0)
    assert list(sample["starts"]) == [-1, -1, -1, -1, 0, 2, 4, 6, -1]
    assert list(sample["ends"]) == [-1] * 4 + [1, 3, 5, 7, -1]
    assert (
        sample["length"],
        sample["num_targets"],
        sample["was_truncated"],
        sample["answer_is_lost"],
    ) == (9, 1, False, False)
    assert sample["answers"] == ["d e"]
    assert sample["context"] == "c d e f"


LOST = (0, 0)


@pytest.mark.parametrize(
    ("side", "kept", "places"),
    [
        ("right", [5, 6, 7], {"c d": (4, 5), "d e": (5, 6), "e f": LOST, "f": LOST}),
        ("left", [6, 7, 8], {"c d": LOST, "d": (4, 4), "e f": (5, 6)}),
    ],
)
def test_a_cut_takes_an_end_of_the_context_only(side, kept, places):
    """At 8 tokens the question is whole and f or c is gone: an answer that lost a part has no
    place.
    """
    tokenizer = encoder_tokenizer()
    tokenizer.truncation_side = side
    for text, place in places.items():
        sample = tokenized(asked("c d e f", text), tokenizer, max_length=8)
        assert sample["input_ids"] == [13, 3, 4, 14, *kept, 14]
        assert sample["was_truncated"]
        assert (sample["start_positions"], sample["end_positions"]) == place
        assert sample["answer_is_lost"] == (place == LOST)


def test_rows_without_answer_question_or_context():
    sample = tokenized(asked("c d e f"))
    assert (
        sample["start_positions"],
        sample["end_positions"],
        sample["answer_is_lost"],
        sample["num_targets"],
    ) == (0, 0, False, 1)
    for rows in (asked("c d", question=""), asked("", question="a"), asked("c d", question=None)):
        sample = tokenized(rows)
        assert sample["input_ids"] == []
        assert sample["length"] == sample["num_targets"] == 0


def test_a_tokenizer_without_cls_has_no_answer_at_0():
    sample = tokenized(asked("c d"), letter_tokenizer())
    assert sample["input_ids"] == [3, 4, 5, 6]
    assert sample["no_answer"] == sample["start_positions"] == 0


CONTEXTS = {
    "byte level": (
        byte_level,
        "What is the answer? The answer is\n  yes, or no. Grüße, 日本語 🎉 too",
    ),
    "metaspace": (metaspace, "yes no  yes answer, the question? no yes"),
    "word pieces": (piece_tokenizer, "ab ba abc aab b aba ab"),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_places_against_the_tokenizers_own_count(kind):
    """Every span of words as an answer: its first and last character's tokens, asked of the
    tokenizer one character at a time.
    """
    make, context = CONTEXTS[kind]
    tokenizer = make()
    encoded = tokenizer("a", context)
    words = [match.span() for match in re.finditer(r"\S+", context)]
    places = set()
    for first in words:
        for last in (word for word in words if word[0] >= first[0]):
            sample = tokenized(
                asked(context, context[first[0] : last[1]], first[0], question="a"), tokenizer
            )
            by_hand = [
                encoded.char_to_token(0, char, sequence_index=1) for char in (first[0], last[1] - 1)
            ]
            assert [sample["start_positions"], sample["end_positions"]] == by_hand
            places.add(tuple(by_hand))
    assert len(places) == len(words) * (len(words) + 1) // 2  # the control: all different


def test_an_answer_whose_last_character_has_no_token_of_its_own():
    """A control character vanishes: the answer ends before it. Of the two bytes of an é the last
    one is the end.
    """
    sample = tokenized(asked("ab c\x00 d", "c\x00", question="a"), piece_tokenizer())
    assert not sample["answer_is_lost"]
    assert sample["start_positions"] == sample["end_positions"] == list(sample["starts"]).index(3)
    sample = tokenized(asked("qé q", "qé", question="a"), byte_level())
    assert list(sample["ends"])[-5:] == [1, 2, 2, 3, 4]
    assert sample["end_positions"] == len(sample["ends"]) - 3


def test_batches():
    tokenizer = encoder_tokenizer()
    rows = [
        tokenized(asked("c d e f", "d e"), tokenizer),
        tokenized(asked("c", question="a"), tokenizer),
    ]
    batch = collate_samples(rows, pad_token_id=0)
    assert batch["start_positions"].tolist() == [5, 0]
    assert batch["end_positions"].tolist() == [6, 0]
    assert batch["attention_mask"].tolist() == [[1] * 9, [1] * 5 + [0] * 4]
    assert batch["input_ids"].shape == (2, 9)


def encoded(*rows):
    return encode_answers(Dataset.from_list(list(rows)), "train")


def test_answers_of_all_shapes():
    rows = [
        {
            "question": "q",
            "context": "c d e",
            "answers": {"text": ["d", "d e"], "answer_start": [2, 2]},
        },
        {"question": "q", "context": "c", "answers": NONE},
        {"question": "q", "context": None, "answers": None},
        {"question": "q", "context": "c", "answers": {"text": [""], "answer_start": [0]}},
    ]
    first = [{"text": "d", "answer_start": 2}, {"text": "d e", "answer_start": 2}]
    assert encoded(*rows)["answers"][:] == [first, [], [], []]


PLACE = "answers must be in their contexts"
SHAPE = "answers must be {"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"text": ["d"], "answer_start": [1]}, PLACE),
        ({"text": ["d"], "answer_start": [-1]}, PLACE),
        ({"text": ["e f"], "answer_start": [4]}, PLACE),
        ({"text": ["d", "d"], "answer_start": [2]}, SHAPE),
        ({"text": ["d"], "answer_start": [None]}, SHAPE),
    ],
)
def test_answers_that_are_not_where_they_should_be(answers, message):
    good = {"question": "q", "context": "c d e", "answers": {"text": ["d"], "answer_start": [2]}}
    with pytest.raises(
        DataError, match=f"{message}.*1 of 2 train rows have .*{answers['answer_start'][0]}"
    ):
        encoded(good, {"question": "q", "context": "c d e", "answers": answers})


def test_a_start_that_is_no_list_is_one_error():
    good = {"question": "q", "context": "c d e", "answers": {"text": ["d"], "answer_start": 2}}
    with pytest.raises(DataError, match=f"{SHAPE}.*1 of 1 train rows"):
        encoded(good)


def best_by_trying_all(start_logits, end_logits, sample):
    """Every pair of context tokens in two loops, and no answer; probabilities in plain Python."""
    places = [i for i, start in enumerate(sample["starts"]) if start >= 0]
    scores = {(i, j): start_logits[i] + end_logits[j] for i in places for j in places if i <= j}
    scores[None] = start_logits[sample["no_answer"]] + end_logits[sample["no_answer"]]
    best = max(scores, key=scores.get)
    total = sum(math.exp(score - scores[best]) for score in scores.values())
    text = (
        ""
        if best is None
        else sample["context"][sample["starts"][best[0]] : sample["ends"][best[1]]].strip()
    )
    return text, 1 / total


def test_best_answer_against_trying_all():
    """Random logits; the largest begin and the largest end, taken by themselves, would often end
    before they begin.
    """
    context = CONTEXTS["byte level"][1]
    rng = np.random.default_rng(1)
    sample = tokenized(asked(context, question="What is it?"), byte_level())
    width = sample["length"] + 5
    naive = 0
    empty = 0
    for _ in range(200):
        start_logits, end_logits = rng.normal(size=(2, width)) * 2
        start_logits[-5:] = end_logits[-5:] = 50  # padding, which may not be chosen
        start_logits[0] = end_logits[0] = 3
        span = best_span(torch.tensor(start_logits), torch.tensor(end_logits), sample)
        answer = best_answer([span])
        text, score = best_by_trying_all(start_logits.tolist(), end_logits.tolist(), sample)
        assert answer["answer"] == text
        assert answer["score"] == pytest.approx(score, abs=1e-6)
        assert context[answer["start"] : answer["end"]] == answer["answer"]
        naive += start_logits[:-5].argmax() > end_logits[:-5].argmax()
        empty += answer["answer"] == ""
    assert naive > 20
    assert 20 < empty < 180
