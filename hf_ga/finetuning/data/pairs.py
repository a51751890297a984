"""Embeddings: columns in several formats -> an anchor, a positive and negatives, or two texts and
their score; their samples and batches.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from datasets import ClassLabel, Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import FIX_LABELS, LARGEST, check_values
from hf_ga.finetuning.data.collation import pad
from hf_ga.finetuning.data.tokenization import Rows, encode, without_empty

# Columns of anchors -> columns of their positives, by the names common on the hub.
PAIRS = {
    "anchor": ("positive",),
    "query": ("positive", "document", "passage", "answer", "response"),
    "question": ("positive", "answer", "document", "passage"),
    "sentence1": ("sentence2",),
    "sentence_A": ("sentence_B",),
    "text1": ("text2",),
}
NEGATIVE = re.compile(r"negative_?(\d*)")  # negative, negative_1, negative_2, ...
SCORES = ("score", "similarity_score", "similarity", "label", "labels")
ROLE = re.compile(r"anchor|positive|negative(_\d+)?")  # of a column of texts
NO_TEXT = 0  # the id of an empty text


def pair_columns(
    dataset: Dataset, anchor: str | None, positive: str | None, score: str | None
) -> dict[str, str]:
    """Role -> column. Roles are `anchor`, `positive`, and either `negative`, `negative_1`, ... or
    `label`, the score of a pair, where the rows have them.

    Args:
        dataset: The rows.
        anchor: Column of that role. None: a common name.
        positive: Column of that role. None: a common name.
        score: Column of that role. None: a common name, or no score.

    Raises:
        DataError: A score is a class, whose numbers have no order; both a score and negatives.
    """
    names = dataset.column_names
    known = [
        (first, second)
        for first, seconds in PAIRS.items()
        for second in seconds
        if first in names and second in names
    ]
    usual = known[0] if known else ("anchor", "positive")
    roles = {"anchor": anchor or usual[0], "positive": positive or usual[1]}
    score = score or next((name for name in SCORES if name in names), None)
    negatives = sorted(filter(NEGATIVE.fullmatch, names), key=_number)
    if score is None:
        numbered = {f"negative_{i}" if i else "negative": name for i, name in enumerate(negatives)}
        return roles | numbered
    if negatives:
        raise DataError(
            f"the rows have a score ({score!r}) and negatives ({', '.join(negatives)}), but pairs "
            "with a score and pairs with negatives have different losses: remove one of them."
        )
    feature = dataset.features.get(score)
    if isinstance(feature, ClassLabel):
        raise DataError(
            f"the score of a pair must be a number, the higher the more alike, but {score!r} is a "
            f"class ({', '.join(feature.names)}): replace the classes by numbers, or keep the rows "
            "whose texts belong together and remove the column."
        )
    return {**roles, "label": score}


def _number(name: str) -> int:
    return int(NEGATIVE.fullmatch(name)[1] or 0)


def check_scores(rows: DatasetDict) -> None:
    """Check the column `label`, if there is one.

    Raises:
        DataError: A score is not a number that is finite in float32.
    """
    rule = "the score of a pair must be a finite number, the higher the more alike"
    for split, dataset in rows.items():
        if "label" in dataset.column_names:
            check_values(split, dataset["label"][:], _is_finite, rule, FIX_LABELS)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST


def tokenize_pairs(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Each text of a row on its own, with special tokens. One target per sample.

    `input_ids` has one list per text, in the order of the columns, and `text_ids` a number that is
    equal for equal texts; `length` is that of the longest. A row without anchor or positive is
    empty. A missing negative consists of special tokens, and its `text_id` is 0.
    """
    columns = [name for name in rows if ROLE.fullmatch(name)]
    texts = {name: [text or "" for text in rows[name]] for name in columns}
    encoded = {name: encode(tokenizer, max_length, texts[name]) for name in columns}
    filled = [
        bool(anchor.strip() and positive.strip())
        for anchor, positive in zip(texts["anchor"], texts["positive"], strict=True)
    ]

    def by_row(columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return without_empty(list(map(list, zip(*columns, strict=True))), filled)

    input_ids = by_row([encoded[name][0]["input_ids"] for name in columns])
    was_cut = by_row([encoded[name][1] for name in columns])
    samples = {
        "input_ids": input_ids,
        "text_ids": by_row([list(map(text_id, texts[name])) for name in columns]),
        "length": [max(map(len, ids), default=0) for ids in input_ids],
        "num_targets": list(map(int, filled)),
        "was_cut": list(map(any, was_cut)),
    }
    return samples | ({"label": rows["label"]} if "label" in rows else {})


def text_id(text: str) -> int:
    """A 64-bit hash of a text, 0 if it is empty.

    >>> text_id("cat") == text_id("cat"), text_id("cat") == text_id("dog"), text_id(" ")
    (True, False, 0)
    """
    if not text.strip():
        return NO_TEXT
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def collate_pairs(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """For each column of texts `input_ids_anchor`, `attention_mask_anchor` of shape (samples,
    longest of this column) and `text_id_anchor`, int64 of shape (samples,); the same for
    `positive`, `negative`, `negative_1`, ... With scores `score`, float32 of shape (samples,).
    """
    batch = {}
    num_texts = len(samples[0]["input_ids"])
    for index, column in enumerate(names_of_texts(num_texts)):
        rows = [sample["input_ids"][index] for sample in samples]
        batch[f"input_ids_{column}"] = pad(rows, pad_token_id)
        batch[f"attention_mask_{column}"] = pad([[1] * len(row) for row in rows], 0)
        batch[f"text_id_{column}"] = torch.tensor([s["text_ids"][index] for s in samples])
    if "label" in samples[0]:
        scores = [sample["label"] for sample in samples]
        batch["score"] = torch.tensor(scores, dtype=torch.float32)
    return batch


def names_of_texts(number: int) -> list[str]:
    """The columns of a sample with this many texts.

    >>> names_of_texts(4)
    ['anchor', 'positive', 'negative', 'negative_1']
    """
    negatives = [f"negative_{i}" if i else "negative" for i in range(number - 2)]
    return ["anchor", "positive", *negatives]
