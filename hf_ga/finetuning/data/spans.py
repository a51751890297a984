"""Extractive question answering: answers as character spans of a context -> first and last token,
and back.

A context that is too long is truncated, or split into overlapping windows. Each window, with the
question before it, is a sample.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.checks import FIX_LABELS, check_values
from hf_ga.finetuning.data.tokenization import Rows, check_fast, check_room, encode

T = TypeVar("T")


def encode_answers(dataset: Dataset, split: str) -> Dataset:
    """Replace `answers` by `answer_texts` and `answer_starts`: lists, empty if there is no answer.

    Raises:
        DataError: another format, or a text that is not in its context at its answer_start.
    """
    rows = list(dataset)
    rule = 'answers must be {"text": [strings], "answer_start": [whole numbers]}'
    check_values(
        split,
        [row["answers"] for row in rows],
        lambda value: _answers(value) is not None,
        rule,
        FIX_LABELS,
    )
    answers = [_answers(row["answers"]) or [] for row in rows]
    found = [(row["context"] or "", of_row) for row, of_row in zip(rows, answers, strict=True)]
    rule = "answers must be in their contexts at the 0-based character answer_start"
    check_values(
        split,
        found,
        lambda pair: all(_is_at(pair[0], *answer) for answer in pair[1]),
        rule,
        "Fix these rows.",
    )
    texts, starts = ([[answer[i] for answer in of_row] for of_row in answers] for i in range(2))
    dataset = dataset.remove_columns("answers").add_column(
        "answer_texts", texts, feature=List(Value("string"))
    )
    return dataset.add_column("answer_starts", starts, feature=List(Value("int64")))


def _is_at(context: str, text: str, start: int) -> bool:
    return start >= 0 and context[start : start + len(text)] == text


def _answers(value: Any) -> list[tuple[str, int]] | None:
    """Texts with their starts; None for another format."""
    if not value:
        return []
    if not isinstance(value, dict) or len(value.get("text") or []) != len(
        value.get("answer_start") or []
    ):
        return None
    pairs = list(zip(value.get("text") or [], value.get("answer_start") or [], strict=True))
    if not all(isinstance(text, str) and isinstance(start, int) for text, start in pairs):
        return None
    return [(text, start) for text, start in pairs if text]


def tokenize_questions(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    doc_stride: int | None = None,
) -> Rows:
    """Question and context with special tokens. One target (a span) per sample.

    Without `doc_stride`, a context that is too long is truncated. With it, the context is split
    into windows of at most `max_length` tokens, of which neighbors share `doc_stride` tokens of the
    context, and each window is a sample; `window` is its number within its row, from 0.

    `start_positions` and `end_positions` are the first and the last token of the first answer.
    Without an answer, or if a part of it is not in the sample, both are the index of the <cls>
    token (0 if the tokenizer has none), as is usual. `answer_is_lost` is true for the first sample
    of a row if no sample has its answer. `starts` and `ends` are each token's characters
    [start, end) in the context; -1: none.

    Raises:
        ConfigError: a tokenizer without offsets, or windows that leave too little room beside a
            question. The tokenizer's error if a question is longer than `max_length`.
    """
    check_fast(tokenizer)
    texts = [
        (question, context) if question and context else ("", "")
        for question, context in zip(rows["question"], rows["context"], strict=True)
    ]
    encoded, row_of, was_cut = _encode(tokenizer, max_length, doc_stride, texts)
    windows = np.arange(len(row_of)) - np.searchsorted(row_of, row_of)  # rows are in order
    is_part = np.array(was_cut) | (np.bincount(row_of)[row_of] > 1)
    columns: Rows = {}
    is_found = np.zeros(len(texts), bool)  # rows without an answer, or with one in a sample
    for i, row in enumerate(row_of):
        ids = encoded["input_ids"][i] if any(texts[row]) else []
        starts, ends = _characters(encoded, i)
        answer = _first_answer(rows, row) if ids else None
        found = _tokens_of(answer, starts, ends, is_part[i]) if answer else None
        is_found[row] |= answer is None or found is not None
        no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        first, last = found or (no_answer, no_answer)
        sample = {
            "input_ids": ids,
            "starts": starts[: len(ids)],
            "ends": ends[: len(ids)],
            "start_positions": first,
            "end_positions": last,
            "no_answer": no_answer,
            "was_cut": bool(ids) and was_cut[i],
            "length": len(ids),
            "num_targets": int(bool(ids)),
            "context": rows["context"][row] or "",
        }
        if "token_type_ids" in encoded:
            sample["token_type_ids"] = encoded["token_type_ids"][i][: len(ids)]
        if "answer_texts" in rows:
            sample["answers"] = rows["answer_texts"][row]
        for name, value in sample.items():
            columns.setdefault(name, []).append(value)
    columns["window"] = windows.tolist()
    columns["answer_is_lost"] = ((windows == 0) & ~is_found[row_of]).tolist()
    return columns


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    doc_stride: int | None,
    texts: Sequence[tuple[str, str]],
) -> tuple[BatchEncoding, list[int], list[bool]]:
    """The samples of some rows; also the row of each sample, in order, and whether its context was
    cut.
    """
    questions, contexts = (list(part) for part in zip(*texts, strict=True))
    how: dict[str, Any] = {"truncation": "only_second", "return_offsets_mapping": True}
    if doc_stride is None or max_length is None:
        encoded, was_cut = encode(tokenizer, max_length, questions, contexts, **how)
        return encoded, list(range(len(texts))), was_cut
    _check_windows(tokenizer, max_length, doc_stride, questions, contexts)
    encoded = tokenizer(
        questions,
        contexts,
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        verbose=False,
        **how,
    )
    row_of = list(encoded["overflow_to_sample_mapping"])
    return encoded, row_of, [False] * len(row_of)


def _check_windows(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    questions: list[str],
    contexts: list[str],
) -> None:
    """Raise ConfigError if a window cannot be longer than what it shares with its neighbor."""
    num_special = check_room(tokenizer, max_length, is_pair=True)
    if doc_stride >= max_length - num_special:
        raise ConfigError(
            f"doc_stride {doc_stride} is not below the {max_length - num_special} tokens that "
            f"max_length {max_length} leaves besides {num_special} special tokens: lower "
            "doc_stride, or raise max_length."
        )
    whole = tokenizer(questions, contexts, verbose=False)["input_ids"]
    alone = tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]
    for question, ids, of_question in zip(questions, whole, alone, strict=True):
        room = max_length - num_special - len(of_question)
        if len(ids) > max_length and room <= doc_stride:
            raise ConfigError(
                f"doc_stride {doc_stride} is not below the {max(room, 0)} tokens that max_length "
                f"{max_length} leaves for the context beside the question {question!r:.60} "
                f"({len(of_question)} tokens): lower doc_stride, or raise max_length."
            )


def _first_answer(rows: Rows, index: int) -> tuple[int, int] | None:
    """Characters [start, end) of the first answer in the context, without surrounding spaces."""
    texts = rows["answer_texts"][index] if "answer_texts" in rows else []
    if not texts:
        return None
    start = rows["answer_starts"][index][0] + len(texts[0]) - len(texts[0].lstrip())
    return start, start + len(texts[0].strip())


def _characters(encoded: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Characters [start, end) of each token in the context; -1 for tokens outside it."""
    offsets = np.asarray(encoded["offset_mapping"][index], np.int64).reshape(-1, 2)
    is_context = np.array([part == 1 for part in encoded.sequence_ids(index)], bool)
    is_context &= offsets[:, 1] > offsets[:, 0]
    return np.where(is_context, offsets[:, 0], -1), np.where(is_context, offsets[:, 1], -1)


def _tokens_of(
    answer: tuple[int, int], starts: np.ndarray, ends: np.ndarray, was_cut: bool
) -> tuple[int, int] | None:
    """The first and the last token that overlap the answer; None if a part of it was truncated."""
    covered = np.flatnonzero((starts >= 0) & (starts < answer[1]) & (ends > answer[0]))
    if not len(covered):
        return None
    if was_cut and (starts[starts >= 0].min() > answer[0] or ends.max() < answer[1]):
        return None
    return int(covered[0]), int(covered[-1])


@dataclass(frozen=True)
class Span:
    """The best answer in one window.

    The score of a span of tokens is its start logit + its end logit; the empty answer is the span
    of the `no_answer` token.

    Attributes:
        answer: the span with the largest score, of all that consist of context tokens.
        start: its first character in the context.
        end: the character after its last one.
        score: its score; -inf without a context.
        empty_score: that of the empty answer.
        log_total: the logarithm of the sum of exp(score) over all spans of context tokens.
    """

    answer: str
    start: int
    end: int
    score: float
    empty_score: float
    log_total: float


def best_span(start_logits: Tensor, end_logits: Tensor, sample: dict[str, Any]) -> Span:
    """The best answer in a window.

    Args:
        start_logits: shape (width,), on the CPU, right-padded.
        end_logits: the same.
        sample: with `starts`, `ends` and `context` of `tokenize_questions`, and `no_answer`, the
            token of an empty answer.
    """
    starts, ends = np.asarray(sample["starts"]), np.asarray(sample["ends"])
    positions = torch.from_numpy(np.flatnonzero(starts >= 0))
    first, last = start_logits.double(), end_logits.double()
    empty_score = float(first[sample["no_answer"]] + last[sample["no_answer"]])
    if not len(positions):
        return Span("", 0, 0, -math.inf, empty_score, -math.inf)
    scores = (first[positions].unsqueeze(1) + last[positions]).masked_fill(
        torch.ones(len(positions), len(positions)).tril(-1).bool(), -torch.inf
    )
    i, j = divmod(int(scores.argmax()), len(positions))
    start, end = int(starts[positions[i]]), int(ends[positions[j]])
    text = sample["context"][start:end]
    start += len(text) - len(text.lstrip())  # byte-level tokens include the preceding space
    return Span(
        answer=text.strip(),
        start=start,
        end=start + len(text.strip()),
        score=float(scores[i, j]),
        empty_score=empty_score,
        log_total=float(scores.flatten().logsumexp(0)),
    )


def best_answer(windows: Sequence[Span]) -> dict[str, Any]:
    """The best answer over the windows of a question: `answer`, its text; `score`, its probability;
    `start` and `end`, its characters [start, end) in the context (0 for the empty answer).

    The span with the largest score, or the empty answer if its score is larger. As in transformers'
    example script for SQuAD 2.0, the score of the empty answer is the least over the windows: a
    window without the answer says nothing about the others. Probabilities are the softmax over all
    spans of all windows and the empty answer.

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
    """The best answer in each sample, from the outputs of a question answering head."""
    starts, ends = (
        logits.float().cpu() for logits in (outputs.start_logits, outputs.end_logits)
    )  # synchronizes with the device
    return [best_span(*of_sample) for of_sample in zip(starts, ends, samples, strict=True)]


def by_question(windows: Iterable[int], values: Iterable[T]) -> list[list[T]]:
    """Group the values of samples by question.

    Args:
        windows: the column `window`: the samples of a question are consecutive and count from 0.
        values: one of each sample.

    >>> by_question([0, 1, 0], ["a", "b", "c"])
    [['a', 'b'], ['c']]
    """
    groups: list[list[T]] = []
    for window, value in zip(windows, values, strict=True):
        if window == 0:
            groups.append([])
        groups[-1].append(value)
    return groups
