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
# negative, negative_1, negative_2, ...
NEGATIVE = re.compile(r"negative_?(\d*)")
SCORES = ("score", "similarity_score", "similarity", "label", "labels")
# The role of a column of texts.
ROLE = re.compile(r"anchor|positive|negative(_\d+)?")
# The id of an empty text.
NO_TEXT = 0


def pair_columns(
    dataset: Dataset, anchor: str | None, positive: str | None, score: str | None
) -> dict[str, str]:
    """Find the columns of pairs.

    Args:
        dataset: The rows.
        anchor: The column of the anchors. None: the one with a common name.
        positive: The column of the positives. None: the one with a common name.
        score: The column of the scores. None: the one with a common name, if there is one.

    Returns:
        Role -> column. Roles are `anchor`, `positive`, and either `negative`, `negative_1`, ... or
        `label`, the score of a pair, where the rows have them.

    Raises:
        DataError: If a score is a class, whose numbers have no order, or the rows have both a score
            and negatives.
    """
    names = dataset.column_names
    usual_anchor, usual_positive = _usual_pair(names)
    roles = {"anchor": anchor or usual_anchor, "positive": positive or usual_positive}
    score = score or next((name for name in SCORES if name in names), None)
    negatives = sorted(filter(NEGATIVE.fullmatch, names), key=_number)
    if score is None:
        numbered = names_of_negatives(len(negatives))
        return roles | dict(zip(numbered, negatives, strict=True))
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


def _usual_pair(names: Sequence[str]) -> tuple[str, str]:
    """Return the first pair of `PAIRS` whose columns both exist, or else anchor and positive."""
    for anchor, positives in PAIRS.items():
        for positive in positives:
            if anchor in names and positive in names:
                return anchor, positive
    return "anchor", "positive"


def _number(name: str) -> int:
    """Return the number of a column of negatives, 0 for `negative`."""
    return int(NEGATIVE.fullmatch(name)[1] or 0)


def check_scores(rows: DatasetDict) -> None:
    """Check the column `label`, if there is one.

    Args:
        rows: The rows of all splits.

    Raises:
        DataError: If a score is not a number that is finite in float32.
    """
    rule = "the score of a pair must be a finite number, the higher the more alike"
    for split, dataset in rows.items():
        if "label" in dataset.column_names:
            check_values(split, dataset["label"][:], _is_finite, rule, FIX_LABELS)


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that is finite in float32."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def tokenize_pairs(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize each text of a row on its own, with special tokens. A sample has one target.

    Args:
        rows: `anchor`, `positive`, optionally `negative`, `negative_1`, ... and `label`.
        tokenizer: The tokenizer of the model.
        max_length: Largest number of tokens of a text. None: the tokenizer's limit.

    Returns:
        `input_ids`, one list per text, in the order of the columns; `text_ids`, a number per text
        that is equal for equal texts; `length`, that of the longest; `num_targets`, `was_cut` and
        optionally `label`. A row without anchor or positive is empty. A missing negative consists
        of special tokens, and its number is 0.
    """
    columns = [name for name in rows if ROLE.fullmatch(name)]
    texts = {name: [text or "" for text in rows[name]] for name in columns}
    is_filled = [
        bool(anchor.strip() and positive.strip())
        for anchor, positive in zip(texts["anchor"], texts["positive"], strict=True)
    ]
    ids_of_columns = []
    cut_of_columns = []
    for name in columns:
        encoded, was_cut = encode(tokenizer, max_length, texts[name])
        ids_of_columns.append(encoded["input_ids"])
        cut_of_columns.append(was_cut)
    text_ids_of_columns = [[text_id(text) for text in texts[name]] for name in columns]

    def by_row(of_columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
        of_rows = [list(of_row) for of_row in zip(*of_columns, strict=True)]
        return without_empty(of_rows, is_filled)

    input_ids = by_row(ids_of_columns)
    samples = {
        "input_ids": input_ids,
        "text_ids": by_row(text_ids_of_columns),
        "length": [max(map(len, ids), default=0) for ids in input_ids],
        "num_targets": list(map(int, is_filled)),
        "was_cut": [any(of_row) for of_row in by_row(cut_of_columns)],
    }
    if "label" in rows:
        samples["label"] = rows["label"]
    return samples


def text_id(text: str) -> int:
    """Hash a text to 64 bits; an empty text to 0.

    >>> text_id("cat") == text_id("cat"), text_id("cat") == text_id("dog"), text_id(" ")
    (True, False, 0)
    """
    if not text.strip():
        return NO_TEXT
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def collate_pairs(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate samples of `tokenize_pairs`.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        For each column of texts, `input_ids_anchor` and `attention_mask_anchor`, int64 of shape
        (samples, longest of this column), and `text_id_anchor`, int64 of shape (samples,); the same
        for `positive`, `negative`, `negative_1`, ... With scores also `score`, float32 of shape
        (samples,).
    """
    batch = {}
    num_texts = len(samples[0]["input_ids"])
    for index, column in enumerate(names_of_texts(num_texts)):
        rows = [sample["input_ids"][index] for sample in samples]
        ones = [[1] * len(row) for row in rows]
        text_ids = [sample["text_ids"][index] for sample in samples]
        batch[f"input_ids_{column}"] = pad(rows, pad_token_id)
        batch[f"attention_mask_{column}"] = pad(ones, 0)
        batch[f"text_id_{column}"] = torch.tensor(text_ids)
    if "label" in samples[0]:
        scores = [sample["label"] for sample in samples]
        batch["score"] = torch.tensor(scores, dtype=torch.float32)
    return batch


def names_of_texts(number: int) -> list[str]:
    """List the columns of a sample with this many texts.

    >>> names_of_texts(4)
    ['anchor', 'positive', 'negative', 'negative_1']
    """
    return ["anchor", "positive", *names_of_negatives(number - 2)]


def names_of_negatives(number: int) -> list[str]:
    """List the roles of this many negatives.

    >>> names_of_negatives(3)
    ['negative', 'negative_1', 'negative_2']
    """
    return [f"negative_{i}" if i else "negative" for i in range(number)]
