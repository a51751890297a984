"""Extractive question answering: answers as characters of a context -> first and last token, and tokens -> answers again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.data.collation import collate_ids
from hf_ga.data.row_checks import Complaints, RowOfBatch
from hf_ga.data.tokenization import check_fast, check_room

Rows = dict[str, list]


@dataclass(frozen=True)
class Answer:
    """A predicted answer: characters [start, end) of the context, or none ("", 0, 0); score: its probability among all spans."""

    text: str
    score: float
    start: int
    end: int


def encode_answers(rows: DatasetDict) -> DatasetDict:
    """Replace `answers`, or `answer` and `answer_start`, by `answer_texts` and `answer_starts`: lists, empty where there is none.

    Raises:
        DataError: another shape, or a text that does not stand in its context where it is said to.
    """
    return DatasetDict({split: _encoded(dataset, split) for split, dataset in rows.items()})


def _encoded(dataset: Dataset, split: str) -> Dataset:
    is_flat = "answer" in dataset.column_names
    columns = ["answer", "answer_start"] if is_flat else ["answers"]
    texts, starts, complaints = [], [], Complaints(split)
    for number, row in enumerate(dataset):
        found = _flat(*(row[column] for column in columns)) if is_flat else _listed(row["answers"])
        if found is None:
            held = f"({quoted(row['question'])}) has {_shown([row[c] for c in columns])} for its answers"
            complaints.add(number, held, _SHAPE)
            continue
        if misplaced := _misplaced(row["context"] or "", found):
            complaints.add(number, f"({quoted(row['question'])}): {misplaced}", "answer_start counts characters from 0.")
        texts.append([text for text, _ in found])
        starts.append([start for _, start in found])
    complaints.refuse(len(dataset))
    dataset = dataset.remove_columns(columns)
    dataset = dataset.add_column("answer_texts", texts, feature=List(Value("string")))
    return dataset.add_column("answer_starts", starts, feature=List(Value("int64")))


_SHAPE = (
    'they must be {"text": [strings], "answer_start": [whole numbers]}, both of one length, or a text and a number in two columns.'
)


def quoted(text: str | None) -> str:
    """The beginning of a row's text, for messages."""
    return f"{text or ''!r:.40}"


def _misplaced(context: str, answers: Sequence[tuple[str, int]]) -> str:
    """What is wrong with the first answer that is not where it is said to be."""
    for text, start in answers:
        if start < 0 or context[start : start + len(text)] != text:
            there = context[max(0, start) : max(0, start) + len(text)]
            return f"the answer {text!r:.60} is not at character {start} of its context, where {there!r:.60} stands"
    return ""


def _listed(value: Any) -> list[tuple[str, int]] | None:
    """Texts with their starts; None where the value is not of that kind."""
    if isinstance(value, list):  # of one object for each answer
        value = {name: [one.get(name) if isinstance(one, dict) else None for one in value] for name in ("text", "answer_start")}
    if value is None:
        return []
    if not isinstance(value, dict):
        return None
    texts, starts = (value.get(name) or [] for name in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return None
    found = [_flat(text, start) for text, start in zip(texts, starts, strict=True)]
    return None if any(one is None for one in found) else [one[0] for one in found if one]


def _flat(text: Any, start: Any) -> list[tuple[str, int]] | None:
    if text in (None, ""):
        return []
    start = int(start) if isinstance(start, float) and start.is_integer() else start  # JSON's 5.0
    return [(text, start)] if isinstance(text, str) and isinstance(start, int) and not isinstance(start, bool) else None


def _shown(values: Sequence[Any]) -> str:
    return " and ".join(f"{value!r:.80}" for value in values)


def tokenize_questions(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Question and context between the tokenizer's special tokens; only the context is cut. One target (a span) a sample.

    `start_positions` and `end_positions` are the first and the last token of the first answer. Where there is none, or the cut took
    a part of it, both are the place of the <cls> token (0 where the tokenizer has none), as is usual. `starts` and `ends` tell
    which characters [start, end) of the context a token stands for; -1: none.

    Raises:
        DataError: a question that leaves no room for a context. ConfigError: a tokenizer that does not tell characters.
    """
    check_fast(tokenizer)
    questions, contexts = ([text or "" for text in rows[name]] for name in ("question", "context"))
    _check_questions(questions, tokenizer, max_length)
    whole = tokenizer(questions, contexts, verbose=False)["input_ids"]
    options = {"truncation": "only_second", "max_length": max_length} if max_length else {}
    encoded = tokenizer(questions, contexts, return_offsets_mapping=True, verbose=False, **options)
    columns: Rows = {name: [] for name in _OF_TOKENS}
    for i, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        ids = encoded["input_ids"][i] if question and context else []
        was_cut = 0 < len(ids) < len(whole[i])
        starts, ends = _characters(encoded, i)
        no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        answer = _first_answer(rows, i) if ids else None
        found = _tokens_of(answer, starts, ends, was_cut) if answer else None
        first, last = found or (no_answer, no_answer)
        is_lost = answer is not None and found is None
        values = (ids, starts[: len(ids)], ends[: len(ids)], first, last, no_answer, is_lost, was_cut, len(ids), int(bool(ids)))
        for name, value in zip(_OF_TOKENS, values, strict=True):
            columns[name].append(value)
    columns["context"] = contexts
    if "token_type_ids" in encoded:
        columns["token_type_ids"] = [kinds[:n] for kinds, n in zip(encoded["token_type_ids"], columns["length"], strict=True)]
    return columns | ({"answers": rows["answer_texts"]} if "answer_texts" in rows else {})


_OF_TOKENS = (
    *("input_ids", "starts", "ends", "start_positions", "end_positions"),
    *("no_answer", "answer_is_lost", "was_cut", "length", "num_targets"),
)


def _check_questions(questions: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> None:
    special = tokenizer.num_special_tokens_to_add(pair=True)
    check_room(tokenizer, max_length, is_pair=True)
    if max_length is None:
        return
    encoded = tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]
    for number, (question, ids) in enumerate(zip(questions, encoded, strict=True)):
        if len(ids) + special >= max_length:
            shown = (
                f"the question {question!r:.60} has {len(ids)} tokens, which with {special} special ones leave no room for a "
                f"context within max_length {max_length}"
            )
            remedy = "use more, or leave the row out."
            raise RowOfBatch(number, f"is too long, as {shown}", remedy, f"{shown}: {remedy}")


def _first_answer(rows: Rows, index: int) -> tuple[int, int] | None:
    """Its characters [start, end) in the context, without spaces around it."""
    texts = rows["answer_texts"][index] if "answer_texts" in rows else []
    if not texts:
        return None
    start = rows["answer_starts"][index][0] + len(texts[0]) - len(texts[0].lstrip())
    return start, start + len(texts[0].strip())


def _characters(encoded: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each token the characters [start, end) of the context; -1 for all other tokens."""
    offsets = np.asarray(encoded["offset_mapping"][index], np.int64).reshape(-1, 2)
    is_context = np.array([part == 1 for part in encoded.sequence_ids(index)], bool)
    is_context &= offsets[:, 1] > offsets[:, 0]
    return np.where(is_context, offsets[:, 0], -1), np.where(is_context, offsets[:, 1], -1)


def _tokens_of(answer: tuple[int, int], starts: np.ndarray, ends: np.ndarray, was_cut: bool) -> tuple[int, int] | None:
    """The first and the last token that share a character with the answer; None where the cut took a part of it."""
    covered = np.flatnonzero((starts >= 0) & (starts < answer[1]) & (ends > answer[0]))
    if not len(covered):
        return None
    if was_cut and (starts[starts >= 0].min() > answer[0] or ends.max() < answer[1]):
        return None
    return int(covered[0]), int(covered[-1])


def collate_spans(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Ids and int64 `start_positions` and `end_positions` of shape (samples,)."""
    places = {name: torch.tensor([sample[name] for sample in samples]) for name in ("start_positions", "end_positions")}
    return {**collate_ids(samples, pad_token_id), **places}


def best_answer(start_logits: Tensor, end_logits: Tensor, sample: dict[str, Any]) -> Answer:
    """The most probable of all spans of context tokens that do not end before they start, and of no answer at all.

    A span's score is start logit + end logit, that of no answer the same of the token that `tokenize_questions` gives it; the
    probability is the softmax over all of them.

    Args:
        start_logits, end_logits: of shape (width,), on the CPU; what lies behind the sample's tokens is padding.
        sample: with `starts`, `ends` and `context` of `tokenize_questions`, and `no_answer`, the token that stands for none.
    """
    starts, ends = np.asarray(sample["starts"]), np.asarray(sample["ends"])
    places = torch.from_numpy(np.flatnonzero(starts >= 0))
    first, last = start_logits.double(), end_logits.double()
    spans = (first[places].unsqueeze(1) + last[places]).masked_fill(
        torch.ones(len(places), len(places)).tril(-1).bool(), -torch.inf
    )
    none = first[sample["no_answer"]] + last[sample["no_answer"]]
    probabilities = torch.cat([spans.flatten(), none.reshape(1)]).softmax(0)
    best = int(probabilities.argmax())
    score = round(float(probabilities[best]), 6)
    if best == len(probabilities) - 1:
        return Answer("", score, 0, 0)
    i, j = divmod(best, len(places))
    start, end = int(starts[places[i]]), int(ends[places[j]])
    text = sample["context"][start:end]
    start += len(text) - len(text.lstrip())  # byte-level tokens begin with the space before them
    return Answer(text.strip(), score, start, start + len(text.strip()))


def read_answers(outputs: Any, samples: Sequence[dict[str, Any]]) -> list[Answer]:
    """The best answer of each sample, from what a question answering head returned."""
    starts, ends = (logits.float().cpu() for logits in (outputs.start_logits, outputs.end_logits))  # waits for the device
    return [best_answer(*row) for row in zip(starts, ends, samples, strict=True)]
