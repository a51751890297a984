"""Rows -> columns of samples: `input_ids`, `length` (tokens), `num_targets`, `was_cut`, and inputs
of the task's collation.

Every function takes a batch of rows by column, a tokenizer and the maximum number of tokens (None:
no truncation).
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.finetuning.data.chat.ending import check_ending, special_ids
from hf_ga.finetuning.data.chat.rendering import rendered

Rows = dict[str, list]


def tokenize_causal(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Text, then the end-of-text token. Every token except the first is a target."""
    texts = [text or "" for text in rows["text"]]
    encoded = tokenizer(texts, return_special_tokens_mask=True, verbose=False)
    whole = without_empty(_ended(encoded["input_ids"], tokenizer), texts)
    cut = [
        shorten(ids, max_length, tokenizer.truncation_side, _num_first(ids, mask, tokenizer))
        for ids, mask in zip(whole, encoded["special_tokens_mask"], strict=True)
    ]
    return _columns(cut, [max(0, len(ids) - 1) for ids in cut], _shortened(whole, cut))


def tokenize_completions(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Rows:
    """Conversations or prompts with completions; `labels` are the ids of the completions, and -100
    elsewhere. `notes` says what a chat template left out of a row, one sentence a line.

    The whole text is tokenized at once. A token is a target if any of its characters belongs to a
        completion: the last space of a
    prompt may be part of the completion's first token.
    """
    check_fast(tokenizer)
    special = special_ids(tokenizer)
    whole: list[list[int]] = []
    cut: list[list[int]] = []
    labels: list[list[int]] = []
    notes: list[str] = []
    for row in rendered(rows, tokenizer):
        text = row.text
        is_templated = row.is_templated
        encoded = tokenizer(
            text,
            add_special_tokens=not is_templated,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        ids = (
            encoded["input_ids"] if text else []
        )  # an empty text has no tokens, not even special ones
        needs_end = (
            bool(text) and not is_templated and tokenizer.eos_token_id is not None
        )  # a template adds its own end
        if needs_end:
            ids = _ended([ids], tokenizer)[0]
        starts, ends = _characters(encoded["offset_mapping"][: len(ids)])
        is_target = np.zeros(len(ids), bool)
        if is_templated:
            check_ending(row, ids, starts, ends, special)
        for start, end in row.targets:
            is_target[: len(starts)] |= (starts < end) & (ends > start) & (ends > starts)
        if needs_end:
            is_target[-1] = True
        of_row = np.where(is_target, np.array(ids, np.int64), IGNORED_LABEL).tolist()
        num_first = _num_first(ids, encoded["special_tokens_mask"], tokenizer)
        whole.append(ids)
        cut.append(shorten(ids, max_length, tokenizer.truncation_side, num_first))
        labels.append(shorten(of_row, max_length, tokenizer.truncation_side, num_first))
        notes.append("\n".join(row.notes))
    num_targets = [sum(label != IGNORED_LABEL for label in row[1:]) for row in labels]
    return {**_columns(cut, num_targets, _shortened(whole, cut)), "labels": labels, "notes": notes}


def tokenize_masked(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Text with special tokens. All other tokens are candidates for targets, drawn in every
    epoch.
    """
    columns = tokenize_texts(rows, tokenizer, max_length)
    special = set(tokenizer.all_special_ids)
    return {
        **columns,
        "num_targets": [sum(token not in special for token in ids) for ids in columns["input_ids"]],
    }


def tokenize_texts(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Text, or a pair of texts, with special tokens, which truncation keeps. One target per
    sample.
    """
    texts = [[text or "" for text in rows[name]] for name in ("text", "text_pair") if name in rows]
    encoded, was_cut = encode(tokenizer, max_length, *texts)
    filled = list(map(any, zip(*texts, strict=True)))
    columns = _columns(without_empty(encoded["input_ids"], filled), list(map(int, filled)), was_cut)
    if len(texts) == 2 and "token_type_ids" in encoded:  # 0 for the first text, 1 for the second
        columns["token_type_ids"] = without_empty(encoded["token_type_ids"], filled)
    return columns | ({"label": rows["label"]} if "label" in rows else {})


def tokenize_words(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Words with one tag each. If a word has several tokens, the first has the tag and the others
    are ignored; so is a word whose first token was truncated.
    """
    check_fast(tokenizer)
    words = [row or [] for row in rows["tokens"]]
    encoded, was_cut = encode(tokenizer, max_length, words, is_split_into_words=True)
    word_of = [
        np.array([-1 if word is None else word for word in encoded.word_ids(i)], np.int64)
        for i in range(len(words))
    ]
    first = [(ids >= 0) & (ids != np.concatenate([[-1], ids[:-1]])) for ids in word_of]
    if tokenizer.truncation_side == "left":
        for encoding, words_of_row, mask in zip(encoded.encodings, word_of, first, strict=True):
            dropped = {word for part in encoding.overflowing for word in part.word_ids} - {None}
            mask &= ~np.isin(words_of_row, [*dropped])
    columns = _columns(
        without_empty(encoded["input_ids"], words), [int(mask.sum()) for mask in first], was_cut
    )
    if "label" in rows:
        tags = [np.array(row or [IGNORED_LABEL], np.int64) for row in rows["label"]]
        labels = [
            np.where(mask, row[ids], IGNORED_LABEL)
            for row, ids, mask in zip(tags, word_of, first, strict=True)
        ]
        columns["label"] = without_empty([row.tolist() for row in labels], words)
    return columns


def tokenize_targets(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    prefix: str = "",
    max_target_length: int | None = None,
) -> Rows:
    """Source texts for an encoder, and `labels`, the ids of their target texts with an end token:
    both truncated.

    Every token of a target is predicted, its end too; rows without a target add nothing. `target`
    is the whole text, for metrics.
    """
    texts = [text and prefix + text for text in rows["text"]]
    columns = tokenize_texts({**rows, "text": texts}, tokenizer, max_length)
    if "target" not in rows:
        return columns
    targets, most = [text or "" for text in rows["target"]], max_target_length or max_length
    whole, cut = (
        tokenizer(
            text_target=targets, truncation=limit is not None, max_length=limit, verbose=False
        )["input_ids"]
        for limit in (None, most)
    )
    whole, cut = _ended(whole, tokenizer), _ended(cut, tokenizer, most)
    filled = [target and ids for target, ids in zip(targets, columns["input_ids"], strict=True)]
    labels = without_empty(cut, filled)
    was_cut = [
        source or target
        for source, target in zip(columns["was_cut"], _shortened(whole, cut), strict=True)
    ]
    return {
        **columns,
        "labels": labels,
        "num_targets": list(map(len, labels)),
        "was_cut": was_cut,
        "target": targets,
    }


def cut_into_blocks(dataset: Dataset, block_size: int) -> Dataset:
    """Concatenate all `input_ids` and split them into blocks of `block_size` tokens; the last block
    may be shorter.
    """
    table = dataset.flatten_indices().data.table
    ids = pa.concat_arrays([chunk.flatten() for chunk in table["input_ids"].chunks])
    ends = np.append(np.arange(0, len(ids), block_size), len(ids))
    lengths = np.diff(ends)
    offsets = pa.array(ends, pa.int32() if len(ids) < 2**31 else pa.int64())
    blocks = (pa.ListArray if len(ids) < 2**31 else pa.LargeListArray).from_arrays(offsets, ids)
    columns = {
        "input_ids": blocks,
        "length": lengths,
        "num_targets": lengths - 1,
        "was_cut": np.zeros(len(lengths), bool),
    }
    return Dataset(pa.table(columns))


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, labels: str, is_decoder: bool) -> None:
    """Set a missing padding token. If the tokenizer has <cls> and <sep> but does not add them (the
    embedded corpus's; pretrained ones do), add them for an encoder, or <eos> for an
    encoder-decoder.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    special = [
        (str(token), tokenizer.convert_tokens_to_ids(token))
        for token in (tokenizer.cls_token, tokenizer.sep_token)
        if token
    ]
    if is_decoder or tokenizer.num_special_tokens_to_add() or len(special) != 2:
        return
    first, end = special[0][0], special[1][0]
    single, pair = f"{first} $A {end}", f"{first} $A {end} $B:1 {end}:1"
    if labels == "target":  # like T5's
        special = [(str(tokenizer.eos_token), tokenizer.eos_token_id)]
        single, pair = f"$A {tokenizer.eos_token}", None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )


def contents_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that determines a tokenizer's output, as a cache key."""
    return f"{encoding_of(tokenizer)}{tokenizer.chat_template}"


def encoding_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that determines how a tokenizer encodes texts; not the truncation and padding of
    its last call, nor its chat template.
    """
    extra = f"{tokenizer.special_tokens_map}{tokenizer.truncation_side}"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return str(sorted(tokenizer.get_vocab().items())) + extra
    content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(content) + extra


def _characters(offsets: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each token's characters; empty for special tokens.

    Byte-level tokenizers that exclude spaces from offsets give a token of only spaces an empty
    offset, at its end: it starts at the end of the previous token.
    """
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]).astype(np.int64)[: len(ends)]
    return np.where(starts == ends, before, starts), ends


def encode(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    *texts: list,
    truncation: str | bool = True,
    **options: Any,
) -> tuple[BatchEncoding, list[bool]]:
    """Encode texts or (two lists) pairs of texts with special tokens; also returns which of them
    were truncated.

    Raises:
        ConfigError: special tokens alone fill a sample.
    """
    check_room(tokenizer, max_length, is_pair=len(texts) == 2)
    whole = tokenizer(*texts, verbose=False, **options)["input_ids"]
    truncation = truncation if max_length else False
    encoded = tokenizer(
        *texts, truncation=truncation, max_length=max_length, verbose=False, **options
    )
    return encoded, _shortened(whole, encoded["input_ids"])


def check_room(tokenizer: PreTrainedTokenizerBase, max_length: int | None, is_pair: bool) -> int:
    """The number of special tokens of a sample. Raise ConfigError if they alone fill it."""
    special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length is not None and max_length <= special:
        raise ConfigError(
            f"max_length {max_length} leaves no room besides the {special} special tokens of "
            "every sample: use more."
        )
    return special


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for a tokenizer without offsets."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no token offsets, which completions, tags and "
            "answers need: use a model with "
            "a fast tokenizer."
        )


def _ended(
    rows: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[list[int]]:
    """Rows with an end-of-text token (most decoder tokenizers add none), within `max_length`
    tokens.
    """
    end, most = tokenizer.eos_token_id, max_length and max_length - 1
    ended = []
    for ids in rows:
        if end is not None and ids[-1:] != [end]:
            num_first = int(ids[:1] == [tokenizer.bos_token_id])
            ids = [*shorten(ids, most, tokenizer.truncation_side, num_first), end]
        ended.append(ids)
    return ended


def shorten(row: list[int], max_length: int | None, side: str, num_first: int = 0) -> list[int]:
    """At most `max_length` entries of a row, as transformers' tokenizers truncate.

    Args:
        row: ids or labels.
        max_length: None: all of them.
        side: "right": the last entries are dropped; "left": those after the first `num_first`.
        num_first: special tokens at the beginning, which stay.

    >>> shorten([1, 5, 6, 7, 2], 3, "right"), shorten([1, 5, 6, 7, 2], 3, "left", num_first=1)
    ([1, 5, 6], [1, 7, 2])
    """
    if max_length is None or len(row) <= max_length:
        return row
    if side == "right":
        return row[:max_length]
    num_first = min(num_first, max_length)
    return [*row[:num_first], *row[len(row) - max_length + num_first :]]


def _num_first(ids: list[int], is_added: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of special tokens at the beginning: added by the tokenizer, or a chat template's
    begin-of-text token.

    Args:
        is_added: the tokenizer's mask of the special tokens that it added.
    """
    num_added = next((i for i, added in enumerate(is_added) if not added), len(is_added))
    return max(num_added, int(ids[:1] == [tokenizer.bos_token_id]))


def without_empty(ids: Sequence[list], contents: Sequence[Any]) -> list[list]:
    """Remove the special tokens of rows without content."""
    return [row if content else [] for row, content in zip(ids, contents, strict=True)]


def _shortened(whole: Sequence[list[int]], cut: Sequence[list[int]]) -> list[bool]:
    return [len(short) < len(full) for short, full in zip(cut, whole, strict=True)]


def _columns(input_ids: list[list[int]], num_targets: list[int], was_cut: list[bool]) -> Rows:
    return {
        "input_ids": input_ids,
        "length": list(map(len, input_ids)),
        "num_targets": num_targets,
        "was_cut": was_cut,
    }
