"""Embeddings: columns in several formats -> an anchor, a positive and negatives, or two texts and
their score; their samples and batches.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.finetuning.data.encoding.collation import collate_samples
from hf_ga.finetuning.data.encoding.tokenization import Rows, encode_groups, make_samples

# The roles of columns of texts.
TEXT_ROLE = re.compile(r"anchor|positive|negative(_\d+)?")
# The id of an empty text, see `text_id`.
NO_TEXT = 0


def tokenize_pairs(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize text pairs to train embeddings: each text of a row on its own, with special tokens.
    A sample has one target.

    Args:
        rows: A batch of rows by column: `anchor`, `positive`, optionally `negative`, `negative_1`,
            ... and `label`.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a text. None: no truncation.

    Returns:
        `input_ids`, one list per text, in the order of the columns; `text_ids`, a number per text
        that is equal for equal texts; `length`, the number of tokens of the longest text;
        `num_targets`, `was_truncated` and optionally `label`. For a row without anchor or positive,
        `input_ids` and `text_ids` are empty, and `length` and `num_targets` are 0. A missing
        negative consists of special tokens, and its text id is 0.
    """
    names = [name for name in rows if TEXT_ROLE.fullmatch(name)]
    values = zip(*(rows[name] for name in names), strict=True)
    texts = [[text or "" for text in row] for row in values]
    # The anchor and the positive are the first columns.
    has_pair = [bool(row[0].strip() and row[1].strip()) for row in texts]
    columns, full = encode_groups(tokenizer, max_length, texts)
    text_ids = [[text_id(text) for text in row] for row in texts]
    columns = {"input_ids": columns["input_ids"], "text_ids": text_ids}
    return make_samples(rows, columns, has_pair, full)


def text_id(text: str) -> int:
    """Hash a text of a pair to a signed 64-bit integer, equal for equal texts: the loss of an
    embedding model then does not take a text that equals the positive as a negative.

    The hash is 0 for a text that is empty or only spaces. Spaces around the text are ignored.

    >>> text_id("cat") == text_id("cat"), text_id("cat") == text_id("dog"), text_id(" ")
    (True, False, 0)
    """
    if not text.strip():
        return NO_TEXT
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def collate_pairs(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate samples of text pairs (`tokenize_pairs`) to a batch for an embedding model.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        For the anchors, `input_ids_anchor` and `attention_mask_anchor`, int64 of shape (samples,
        longest anchor), and `text_id_anchor`, int64 of shape (samples,); the same for `positive`,
        `negative`, `negative_1`, ... With scores also `score`, float32 of shape (samples,).
    """
    batch = {}
    num_texts = len(samples[0]["input_ids"])
    for index, column in enumerate(names_of_texts(num_texts)):
        texts = [
            {"input_ids": sample["input_ids"][index], "text_id": sample["text_ids"][index]}
            for sample in samples
        ]
        for name, tensor in collate_samples(texts, pad_token_id).items():
            batch[f"{name}_{column}"] = tensor
    if "label" in samples[0]:
        scores = [sample["label"] for sample in samples]
        batch["score"] = torch.tensor(scores, dtype=torch.float32)
    return batch


def names_of_texts(num_texts: int) -> list[str]:
    """Return the names of the texts in a sample of pairs, to train embeddings: an anchor, a
    positive, and negatives.

    >>> names_of_texts(4)
    ['anchor', 'positive', 'negative', 'negative_1']
    """
    negatives = [f"negative_{i}" if i else "negative" for i in range(num_texts - 2)]
    return ["anchor", "positive", *negatives]
