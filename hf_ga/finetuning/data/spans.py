"""Extractive question answering: answers as character spans of a context -> first and last token,
and back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.finetuning.data.checks import FIX_LABELS, check_values
from hf_ga.finetuning.data.tokenization import Rows, check_fast, encode


def encode_answers(dataset: Dataset, split: str) -> Dataset:
    """Replace `answers` by `answer_texts` and `answer_starts`: lists, empty if there is no answer.

    Answers are a pair of lists or, as in SQuAD's own files, a list of pairs.

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
    if isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        value = {name: [answer.get(name) for answer in value] for name in ("text", "answer_start")}
    if not isinstance(value, dict) or len(value.get("text") or []) != len(
        value.get("answer_start") or []
    ):
        return None
    pairs = list(zip(value.get("text") or [], value.get("answer_start") or [], strict=True))
    if not all(isinstance(text, str) and isinstance(start, int) for text, start in pairs):
        return None
    return [(text, start) for text, start in pairs if text]


def tokenize_questions(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Rows:
    """Question and context with special tokens; only the context is truncated. One target (a span)
    per sample.

    `start_positions` and `end_positions` are the first and the last token of the first answer.
    Without an answer, or if it was truncated, both are the index of the <cls> token (0 if the
    tokenizer has none), as is usual. `starts` and `ends` are each token's characters [start, end)
    in the context; -1: none.

    Raises:
        ConfigError: a tokenizer without offsets. The tokenizer's error if a question is longer than
            `max_length`.
    """
    check_fast(tokenizer)
    questions, contexts = ([text or "" for text in rows[name]] for name in ("question", "context"))
    encoded, was_cut = encode(
        tokenizer,
        max_length,
        questions,
        contexts,
        truncation="only_second",
        return_offsets_mapping=True,
    )
    columns: Rows = {}
    for i, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        ids = encoded["input_ids"][i] if question and context else []
        starts, ends = _characters(encoded, i)
        answer = _first_answer(rows, i) if ids else None
        found = _tokens_of(answer, starts, ends, was_cut[i]) if answer else None
        no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        first, last = found or (no_answer, no_answer)
        sample = {
            "input_ids": ids,
            "starts": starts[: len(ids)],
            "ends": ends[: len(ids)],
            "start_positions": first,
            "end_positions": last,
            "no_answer": no_answer,
            "answer_is_lost": answer is not None and found is None,
            "was_cut": bool(ids) and was_cut[i],
            "length": len(ids),
            "num_targets": int(bool(ids)),
        }
        for name, value in sample.items():
            columns.setdefault(name, []).append(value)
    columns["context"] = contexts
    if "token_type_ids" in encoded:
        columns["token_type_ids"] = [
            kinds[:n] for kinds, n in zip(encoded["token_type_ids"], columns["length"], strict=True)
        ]
    return columns | ({"answers": rows["answer_texts"]} if "answer_texts" in rows else {})


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


def best_answer(start_logits: Tensor, end_logits: Tensor, sample: dict[str, Any]) -> dict[str, Any]:
    """The most probable among all valid spans of context tokens and the empty answer: `answer`, its
    text; `score`, its probability; `start` and `end`, its characters [start, end) in the context (0
    for the empty answer).

    The score of a span is start logit + end logit (the empty answer is the span of the `no_answer`
    token); probabilities are the softmax over all scores.

    Args:
        start_logits, end_logits: of shape (width,), on the CPU, right-padded.
        sample: with `starts`, `ends` and `context` of `tokenize_questions`, and `no_answer`, the
            token of an empty answer.
    """
    starts, ends = np.asarray(sample["starts"]), np.asarray(sample["ends"])
    positions = torch.from_numpy(np.flatnonzero(starts >= 0))
    first, last = start_logits.double(), end_logits.double()
    spans = (first[positions].unsqueeze(1) + last[positions]).masked_fill(
        torch.ones(len(positions), len(positions)).tril(-1).bool(), -torch.inf
    )
    none = first[sample["no_answer"]] + last[sample["no_answer"]]
    probabilities = torch.cat([spans.flatten(), none.reshape(1)]).softmax(0)
    best = int(probabilities.argmax())
    score = round(float(probabilities[best]), 6)
    if best == len(probabilities) - 1:
        return {"answer": "", "score": score, "start": 0, "end": 0}
    i, j = divmod(best, len(positions))
    start, end = int(starts[positions[i]]), int(ends[positions[j]])
    text = sample["context"][start:end]
    start += len(text) - len(text.lstrip())  # byte-level tokens include the preceding space
    return {
        "answer": text.strip(),
        "score": score,
        "start": start,
        "end": start + len(text.strip()),
    }


def read_answers(outputs: Any, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best answer of each sample, from the outputs of a question answering head."""
    starts, ends = (
        logits.float().cpu() for logits in (outputs.start_logits, outputs.end_logits)
    )  # synchronizes with the device
    return [best_answer(*row) for row in zip(starts, ends, samples, strict=True)]
