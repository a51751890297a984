"""Extractive question answering: answers as character spans of a context -> first and last token,
and back.

A context that is too long is truncated, or split into overlapping windows. Each window, with the
question before it, is a sample.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.checks import check_values, replace_column
from hf_ga.finetuning.data.encoding.tokenization import Rows, check_fast, check_room

T = TypeVar("T")
ANSWER_KEYS = ("text", "answer_start")


def encode_answers(dataset: Dataset, split: str) -> Dataset:
    """Check the answers of question answering, and convert the column `answers` to a list of
    {"text": ..., "answer_start": ...} per row, empty if there is no answer.

    Args:
        dataset: The rows of one split, with `answers` and `context`. Answers are a dict of two
            lists, {"text": [...], "answer_start": [...]}, or, as in SQuAD's own files, a list of
            dicts.
        split: The name of the split, for errors.

    Raises:
        DataError: If answers have another format, or a text is not in its context at its
            `answer_start`.
    """
    values = dataset["answers"][:]
    rule = 'answers must be {"text": [strings], "answer_start": [whole numbers]}'
    check_values(split, values, lambda value: _read_answers(value) is not None, rule=rule)
    answers = list(map(_read_answers, values))
    texts_and_starts = [[tuple(answer.values()) for answer in row] for row in answers]
    check_values(
        split,
        list(zip(dataset["context"][:], texts_and_starts, strict=True)),
        lambda row: all(
            start >= 0 and (row[0] or "").startswith(text, start) for text, start in row[1]
        ),
        rule="answers must be in their contexts at the 0-based character answer_start",
        remedy="Fix these rows.",
    )
    feature = List({"text": Value("string"), "answer_start": Value("int64")})
    return replace_column(dataset, "answers", answers, feature)


def _read_answers(value: Any) -> list[dict[str, Any]] | None:
    """Read the answers of a question from either of SQuAD's formats, a dict of two lists or a list
    of dicts, without empty ones; None if they have another format.
    """
    value = value or []
    if isinstance(value, dict):
        texts, starts = (value.get(name) or [] for name in ANSWER_KEYS)
        if not (isinstance(texts, list) and isinstance(starts, list)):
            return None
        pairs = zip_longest(texts, starts)
        value = [dict(zip(ANSWER_KEYS, pair, strict=True)) for pair in pairs]
    if not isinstance(value, list):
        return None
    answers = []
    for answer in value:
        match answer:
            case {"text": str(text), "answer_start": int(start)}:
                answers.append({"text": text, "answer_start": start})
            case _:
                return None
    return [answer for answer in answers if answer["text"]]


def tokenize_questions(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    doc_stride: int | None = None,
) -> Rows:
    """Tokenize questions with their contexts, with special tokens. A sample has one target: the
    span of the answer.

    Without `doc_stride`, a context that is too long is truncated, and each row is one sample. With
    it, the context is split into overlapping windows, and each window, with the question, is a
    sample of at most `max_length` tokens.

    Args:
        rows: A batch of rows by column: `question`, `context` and optionally `answers`, see
            `encode_answers`.
        tokenizer: The tokenizer of the model, with offsets.
        max_length: Maximum number of tokens of a sample. None: no truncation.
        doc_stride: Number of context tokens that neighboring windows share. None: truncate.

    Returns:
        `input_ids`, `length`, `num_targets`, `was_truncated`, `token_type_ids` if the tokenizer
        returns them, and:

        - `start_positions` and `end_positions`: the first and the last token of the row's first
          answer. Without an answer, or if a part of it is not in the sample, both are `no_answer`.
        - `no_answer`: the index of the <cls> token, or 0 if there is none.
        - `starts` and `ends`: the characters [start, end) of each token in the context; -1 for
          tokens that are not of the context.
        - `context`, and `answers`, the texts of all answers of the row, for metrics.
        - `window_index`: the index of the window within its row.
        - `answer_is_lost`: true for the first sample of a row whose answer is in no sample.

        Rows with an empty question or context have one sample without tokens.

    Raises:
        ConfigError: If the tokenizer has no offsets, or windows have too little room beside a
            question. The tokenizer raises its own error if a question is longer than `max_length`.
    """
    check_fast(tokenizer)
    texts = [
        (question, context) if question and context else ("", "")
        for question, context in zip(rows["question"], rows["context"], strict=True)
    ]
    questions, contexts = map(list, zip(*texts, strict=True))
    if doc_stride is not None and max_length is not None:
        _check_windows(tokenizer, max_length, doc_stride, questions, contexts)
    else:
        check_room(tokenizer, max_length, is_pair=True)
    encoded = tokenizer(
        questions,
        contexts,
        truncation="only_second" if max_length else False,
        max_length=max_length,
        stride=doc_stride or 0,
        return_overflowing_tokens=doc_stride is not None,
        return_offsets_mapping=True,
        verbose=False,
    )
    row_of_sample = encoded.get("overflow_to_sample_mapping", range(len(texts)))
    num_windows = Counter(row_of_sample)
    samples: list[dict[str, Any]] = []
    complete_rows = set()  # those without an answer, or with their whole answer in a sample
    for i, row in enumerate(row_of_sample):
        ids = encoded["input_ids"][i] if any(texts[row]) else []
        starts, ends = _context_characters(encoded, i)
        answers = rows["answers"][row] if ids and "answers" in rows else []
        is_part = num_windows[row] > 1 or bool(encoded.encodings[i].overflowing)
        answer_tokens = _tokens_of_answer(starts, ends, is_part, **answers[0]) if answers else None
        no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        first_token, last_token = answer_tokens or (no_answer, no_answer)
        if answer_tokens or not answers:
            complete_rows.add(row)
        is_next_window = i > 0 and row_of_sample[i - 1] == row
        sample = {
            "input_ids": ids,
            "starts": starts[: len(ids)],
            "ends": ends[: len(ids)],
            "start_positions": first_token,
            "end_positions": last_token,
            "no_answer": no_answer,
            "length": len(ids),
            "num_targets": int(bool(ids)),
            "was_truncated": bool(ids) and doc_stride is None and is_part,
            "context": rows["context"][row] or "",
            "window_index": samples[-1]["window_index"] + 1 if is_next_window else 0,
        }
        if "token_type_ids" in encoded:
            sample["token_type_ids"] = encoded["token_type_ids"][i][: len(ids)]
        if "answers" in rows:
            sample["answers"] = [answer["text"] for answer in rows["answers"][row]]
        samples.append(sample)
    for row, sample in zip(row_of_sample, samples, strict=True):
        sample["answer_is_lost"] = sample["window_index"] == 0 and row not in complete_rows
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _check_windows(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    questions: list[str],
    contexts: list[str],
) -> None:
    """Check that every window of a context has room for more than the `doc_stride` tokens that it
    shares with its neighbor: otherwise windows would not advance.
    """
    num_special = check_room(tokenizer, max_length, is_pair=True)
    full_ids = tokenizer(questions, contexts, verbose=False)["input_ids"]
    question_ids = tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]
    for question, full, alone in zip(questions, full_ids, question_ids, strict=True):
        # A question whose context needs no windows does not count.
        size = len(alone) if len(full) > max_length else 0
        room = max(max_length - num_special - size, 0)
        if doc_stride >= room:
            raise ConfigError(
                f"doc_stride {doc_stride} is not below the {room} tokens that max_length "
                f"{max_length} leaves for the context besides {num_special} special tokens and the "
                f"question {question!r:.60} ({size} tokens): lower doc_stride, or raise max_length."
            )


def _context_characters(encoded: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters [start, end) of each token of a question answering sample in the
    context; -1 for tokens of the question, special tokens and tokens without characters.
    """
    offsets = np.asarray(encoded["offset_mapping"][index], np.int64).reshape(-1, 2)
    starts = offsets[:, 0]
    ends = offsets[:, 1]
    # Sequence 0 is the question, 1 the context, None a special token.
    is_context = np.array([sequence == 1 for sequence in encoded.sequence_ids(index)], bool)
    is_context &= ends > starts
    return np.where(is_context, starts, -1), np.where(is_context, ends, -1)


def _tokens_of_answer(
    starts: np.ndarray, ends: np.ndarray, is_part: bool, text: str, answer_start: int
) -> tuple[int, int] | None:
    """Return the indices of the first and the last token that overlap an answer without surrounding
    spaces; None if there is none, or if the sample has a part of the context, and of the answer.
    """
    start = answer_start + len(text) - len(text.lstrip())
    end = start + len(text.strip())
    is_context = starts >= 0
    tokens = np.flatnonzero(is_context & (starts < end) & (ends > start))
    if not len(tokens):
        return None
    # Of a whole context, the answer may begin or end with characters that have no tokens.
    if is_part and (starts[is_context].min() > start or ends.max() < end):
        return None
    return int(tokens[0]), int(tokens[-1])


@dataclass(frozen=True)
class Span:
    """The best answer in one window of a context: a span of tokens with its score.

    The score of a span is its start logit + its end logit; the empty answer is the span of the
    `no_answer` token.

    Attributes:
        answer: The text of the span of context tokens with the largest score.
        start: Its first character in the context.
        end: The character after its last one.
        score: Its score; -inf if the window has no context tokens.
        empty_score: The score of the empty answer.
        log_total: The logarithm of the sum of exp(score) over all spans of context tokens.
    """

    answer: str
    start: int
    end: int
    score: float
    empty_score: float
    log_total: float


def best_span(start_logits: Tensor, end_logits: Tensor, sample: dict[str, Any]) -> Span:
    """Find the best answer in one window of a context, from the logits of a question answering
    head.

    Args:
        start_logits: Shape (padded length,), on the CPU, right-padded.
        end_logits: Shape (padded length,), on the CPU, right-padded.
        sample: A sample of `tokenize_questions`; its columns `starts`, `ends`, `context` and
            `no_answer` are used.
    """
    starts = sample["starts"]
    no_answer = sample["no_answer"]
    is_context = torch.tensor(starts) >= 0
    num_tokens = len(is_context)
    # scores[i, j] is that of the span from the i-th to the j-th token.
    scores = start_logits.double()[:num_tokens, None] + end_logits.double()[:num_tokens]
    empty_score = float(scores[no_answer, no_answer])
    is_span = (is_context[:, None] & is_context).triu()
    scores = scores.masked_fill(~is_span, -torch.inf)
    i, j = divmod(int(scores.argmax()), num_tokens)
    start = int(starts[i])
    text = sample["context"][start : sample["ends"][j]]
    # Byte-level tokens include the preceding space.
    start += len(text) - len(text.lstrip())
    return Span(
        answer=text.strip(),
        start=start,
        end=start + len(text.strip()),
        score=float(scores[i, j]),
        empty_score=empty_score,
        log_total=float(scores.flatten().logsumexp(0)),
    )


def best_answer(windows: Sequence[Span]) -> dict[str, Any]:
    """Choose the best answer to a question over the windows of its context: the span with the
    largest score, or the empty answer if its score is larger.

    As in transformers' example script for SQuAD 2.0, the score of the empty answer is the minimum
    over the windows: that one window lacks the answer says nothing about the others. Probabilities
    are the softmax over all spans of all windows and the empty answer.

    Args:
        windows: The best answer in each window of the context.

    Returns:
        `answer`, its text; `score`, its probability; `start` and `end`, its characters [start, end)
        in the context (0 for the empty answer).

    >>> spans = [Span("red", 0, 3, 1.0, 9.0, 1.0), Span("blue", 8, 12, 2.0, 0.0, 2.0)]
    >>> best_answer(spans)
    {'answer': 'blue', 'score': 0.665241, 'start': 8, 'end': 12}
    """
    best = max(windows, key=lambda window: window.score)
    empty_score = min(window.empty_score for window in windows)
    log_total = np.logaddexp.reduce([empty_score, *(window.log_total for window in windows)])
    probability = math.exp(max(best.score, empty_score) - log_total)
    score = round(probability, 6)
    if empty_score > best.score:
        return {"answer": "", "score": score, "start": 0, "end": 0}
    return {"answer": best.answer, "score": score, "start": best.start, "end": best.end}


def read_spans(outputs: Any, samples: Sequence[dict[str, Any]]) -> list[Span]:
    """Find the best answer in each question answering sample of a batch.

    Args:
        outputs: The outputs of a question answering head, with `start_logits` and `end_logits` of
            shape (samples, padded length).
        samples: The samples of the batch, see `tokenize_questions`.
    """
    start_logits = outputs.start_logits.float().cpu()
    end_logits = outputs.end_logits.float().cpu()
    return [
        best_span(row_start_logits, row_end_logits, sample)
        for row_start_logits, row_end_logits, sample in zip(
            start_logits, end_logits, samples, strict=True
        )
    ]


def by_question(windows: Iterable[int], values: Iterable[T]) -> list[list[T]]:
    """Group the values of question answering samples by question, whose context may be split into
    several samples (windows).

    Args:
        windows: The index of each sample's window within its context. The samples of a question are
            consecutive, so a 0 begins the next question.
        values: One value of each sample.

    >>> by_question([0, 1, 0], ["a", "b", "c"])
    [['a', 'b'], ['c']]
    """
    groups: list[list[T]] = []
    for window, value in zip(windows, values, strict=True):
        if window == 0:
            groups.append([])
        groups[-1].append(value)
    return groups
