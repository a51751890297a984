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

    Answers are a pair of lists or, as in SQuAD's own files, a list of pairs.

    Args:
        dataset: The rows of one split, with `answers` and `context`.
        split: The name of the split, for errors.

    Raises:
        DataError: If answers have another format, or a text is not in its context at its
            `answer_start`.
    """
    rows = list(dataset)
    values = [row["answers"] for row in rows]
    rule = 'answers must be {"text": [strings], "answer_start": [whole numbers]}'
    check_values(split, values, _has_format, rule, FIX_LABELS)
    answers = [_answers(value) for value in values]
    found = [(row["context"] or "", of_row) for row, of_row in zip(rows, answers, strict=True)]
    rule = "answers must be in their contexts at the 0-based character answer_start"
    check_values(split, found, _are_in_context, rule, "Fix these rows.")
    texts = [[text for text, _ in of_row] for of_row in answers]
    starts = [[start for _, start in of_row] for of_row in answers]
    dataset = dataset.remove_columns("answers")
    dataset = dataset.add_column("answer_texts", texts, feature=List(Value("string")))
    return dataset.add_column("answer_starts", starts, feature=List(Value("int64")))


def _are_in_context(pair: tuple[str, list[tuple[str, int]]]) -> bool:
    """Whether all answers of a row, each a text and its start, are in the row's context."""
    context, answers = pair
    return all(start >= 0 and context.startswith(text, start) for text, start in answers)


def _has_format(value: Any) -> bool:
    """Whether the answers of a row are empty or have the format of SQuAD."""
    if not value:
        return True
    are_pairs = isinstance(value, list) and all(isinstance(answer, dict) for answer in value)
    if not isinstance(value, dict) and not are_pairs:
        return False
    texts, starts = _as_lists(value)
    if len(texts) != len(starts):
        return False
    has_texts = all(isinstance(text, str) for text in texts)
    return has_texts and all(isinstance(start, int) for start in starts)


def _answers(value: dict[str, list] | list[dict[str, Any]] | None) -> list[tuple[str, int]]:
    """Return the answers of a row, each a text and its start, without empty texts."""
    if not value:
        return []
    texts, starts = _as_lists(value)
    return [(text, start) for text, start in zip(texts, starts, strict=True) if text]


def _as_lists(value: dict[str, list] | list[dict[str, Any]]) -> tuple[list, list]:
    """Return the texts and the starts of a row's answers, given as two lists or as pairs."""
    if isinstance(value, dict):
        return value.get("text") or [], value.get("answer_start") or []
    texts = [answer.get("text") for answer in value]
    starts = [answer.get("answer_start") for answer in value]
    return texts, starts


def tokenize_questions(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    doc_stride: int | None = None,
) -> Rows:
    """Tokenize question and context, with special tokens. A sample has one target, a span.

    Without `doc_stride`, a context that is too long is truncated. With it, the context is split
    into windows of at most `max_length` tokens, of which neighbors share `doc_stride` tokens of the
    context, and each window is a sample; `window` is its number within its row, from 0.

    `start_positions` and `end_positions` are the first and the last token of the first answer.
    Without an answer, or if a part of it is not in the sample, both are the index of the <cls>
    token (0 if the tokenizer has none), as is usual. `answer_is_lost` is true for the first sample
    of a row if no sample has its answer. `starts` and `ends` are each token's characters
    [start, end) in the context; -1: none.

    Args:
        rows: `question`, `context` and optionally `answer_texts` and `answer_starts`.
        tokenizer: The tokenizer of the model.
        max_length: Largest number of tokens of a sample. None: the tokenizer's limit.
        doc_stride: Number of tokens that neighboring windows share. None: truncate the context.

    Raises:
        ConfigError: If the tokenizer has no offsets, or windows leave too little room beside a
            question. The tokenizer raises its own error if a question is longer than `max_length`.
    """
    check_fast(tokenizer)
    texts = [
        (question, context) if question and context else ("", "")
        for question, context in zip(rows["question"], rows["context"], strict=True)
    ]
    encoded, row_of, was_cut = _encode(tokenizer, max_length, doc_stride, texts)
    # The samples of a row follow each other, so the first one of each is where the row is inserted.
    windows = np.arange(len(row_of)) - np.searchsorted(row_of, row_of)
    is_part = np.array(was_cut) | (np.bincount(row_of)[row_of] > 1)
    columns: Rows = {}
    # Rows without an answer, or with one in a sample.
    is_found = np.zeros(len(texts), bool)
    for i, row in enumerate(row_of):
        ids = encoded["input_ids"][i] if any(texts[row]) else []
        starts, ends = _characters(encoded, i)
        no_answer = 0
        if tokenizer.cls_token_id in ids:
            no_answer = ids.index(tokenizer.cls_token_id)
        answer = _first_answer(rows, row) if ids else None
        tokens = None
        if answer is not None:
            tokens = _tokens_of(answer, starts, ends, is_part[i])
        if answer is None or tokens is not None:
            is_found[row] = True
        first, last = tokens or (no_answer, no_answer)
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
    """Tokenize questions with their contexts to samples.

    Args:
        tokenizer: The tokenizer of the model.
        max_length: See `tokenize_questions`.
        doc_stride: See `tokenize_questions`.
        texts: The question and the context of each row.

    Returns:
        The samples; the row of each sample, in order; whether its context was cut.
    """
    questions = [question for question, _ in texts]
    contexts = [context for _, context in texts]
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
    """Return the characters [start, end) of a row's first answer in its context, without
    surrounding spaces. None: there is no answer.
    """
    texts = rows["answer_texts"][index] if "answer_texts" in rows else []
    if not texts:
        return None
    text = texts[0]
    num_spaces = len(text) - len(text.lstrip())
    start = rows["answer_starts"][index][0] + num_spaces
    return start, start + len(text.strip())


def _characters(encoded: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters [start, end) of each token of a sample in the context; -1 for tokens
    outside of it.

    Returns:
        Starts and ends, each int64 of shape (tokens,).
    """
    offsets = np.asarray(encoded["offset_mapping"][index], np.int64).reshape(-1, 2)
    starts = offsets[:, 0]
    ends = offsets[:, 1]
    # Sequence 0 is the question, 1 the context, None a special token.
    is_context = np.array([part == 1 for part in encoded.sequence_ids(index)], bool)
    is_context &= ends > starts
    return np.where(is_context, starts, -1), np.where(is_context, ends, -1)


def _tokens_of(
    answer: tuple[int, int], starts: np.ndarray, ends: np.ndarray, was_cut: bool
) -> tuple[int, int] | None:
    """Return the first and the last token that overlap the answer.

    Args:
        answer: Characters [start, end) of the answer in the context.
        starts: See `_characters`.
        ends: See `_characters`.
        was_cut: Whether the sample has a part of the context only.

    Returns:
        None, if a part of the answer is not in the sample.
    """
    start, end = answer
    is_context = starts >= 0
    covered = np.flatnonzero(is_context & (starts < end) & (ends > start))
    if not len(covered):
        return None
    if was_cut and (starts[is_context].min() > start or ends.max() < end):
        return None
    return int(covered[0]), int(covered[-1])


@dataclass(frozen=True)
class Span:
    """The best answer in one window.

    The score of a span of tokens is its start logit + its end logit; the empty answer is the span
    of the `no_answer` token.

    Attributes:
        answer: The text of the span with the largest score, of all that consist of context tokens.
        start: Its first character in the context.
        end: The character after its last one.
        score: Its score; -inf without a context.
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
    """Find the best answer in a window.

    Args:
        start_logits: Shape (width,), on the CPU, right-padded.
        end_logits: Shape (width,), on the CPU, right-padded.
        sample: A sample of `tokenize_questions`, of which `starts`, `ends`, `context` and
            `no_answer`, the token of an empty answer, are used.
    """
    starts = np.asarray(sample["starts"])
    ends = np.asarray(sample["ends"])
    start_scores = start_logits.double()
    end_scores = end_logits.double()
    no_answer = sample["no_answer"]
    empty_score = float(start_scores[no_answer] + end_scores[no_answer])
    positions = torch.from_numpy(np.flatnonzero(starts >= 0))
    num_tokens = len(positions)
    if not num_tokens:
        return Span("", 0, 0, -math.inf, empty_score, -math.inf)
    # scores[i, j] is that of the span from the i-th to the j-th token of the context.
    scores = start_scores[positions].unsqueeze(1) + end_scores[positions]
    ends_before_start = torch.ones(num_tokens, num_tokens).tril(-1).bool()
    scores = scores.masked_fill(ends_before_start, -torch.inf)
    i, j = divmod(int(scores.argmax()), num_tokens)
    start = int(starts[positions[i]])
    end = int(ends[positions[j]])
    text = sample["context"][start:end]
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
    """Choose the best answer over the windows of a question: the span with the largest score, or
    the empty answer if its score is larger.

    As in transformers' example script for SQuAD 2.0, the score of the empty answer is the least
    over the windows: a window without the answer says nothing about the others. Probabilities are
    the softmax over all spans of all windows and the empty answer.

    Args:
        windows: The best answer in each window.

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
    """Find the best answer in each sample, from the outputs of a question answering head."""
    start_logits = outputs.start_logits.float().cpu()
    end_logits = outputs.end_logits.float().cpu()
    return [
        best_span(starts, ends, sample)
        for starts, ends, sample in zip(start_logits, end_logits, samples, strict=True)
    ]


def by_question(windows: Iterable[int], values: Iterable[T]) -> list[list[T]]:
    """Group the values of samples by question.

    Args:
        windows: The column `window`: the samples of a question are consecutive and count from 0.
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
