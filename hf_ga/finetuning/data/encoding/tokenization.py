"""Rows -> tokenized samples, for each task but question answering, multiple choice and pairs.

Every `tokenize_...` function takes a batch of rows by column, a tokenizer, and the maximum number
of tokens of a sample (None: no truncation). It returns the samples by column: `input_ids`,
`length` (number of tokens), `num_targets`, `was_truncated`, and what the task's collation needs.
"""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.chat.rendering import RenderedRow, render_rows
from hf_ga.loading.batches import IGNORED_LABEL

Rows = dict[str, list]


def tokenize_causal(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize plain texts, conversations, or prompts with completions, for a causal language
    model. The end-of-text token follows what no chat template wrote.

    The targets are the completions, or all tokens of a plain text; the first token of a sample is
    none, because nothing predicts it.

    Args:
        rows: A batch of rows by column: `text`, or the columns of `chat_columns`.
        tokenizer: The tokenizer of the model, with offsets unless the rows are plain texts.
        max_length: Maximum number of tokens of a sample. None: no truncation.

    Returns:
        `input_ids`, `length`, `num_targets` and `was_truncated`. Empty texts have no tokens. Except
        for plain texts: `labels`, the ids of the targets, and -100 elsewhere; `notes`, what the
        chat template omits from each row, one note per line.

    Raises:
        ConfigError: If a tokenizer that needs offsets has none.
        DataError: If a row cannot be rendered (see `render_rows`).
    """
    is_plain = "text" in rows
    # A chat template writes special tokens itself.
    is_templated = bool(tokenizer.chat_template) and not is_plain
    if is_plain:
        rendered = [RenderedRow(text or "", []) for text in rows["text"]]
    else:
        check_fast(tokenizer)
        rendered = list(render_rows(rows, tokenizer))
    encoded = tokenizer(
        [row.text for row in rendered],
        add_special_tokens=not is_templated,
        return_offsets_mapping=not is_plain,
        return_special_tokens_mask=True,
        verbose=False,
    )
    side = tokenizer.truncation_side
    full: list[list[int]] = []
    columns: Rows = {"input_ids": [], "labels": []}
    for i, row in enumerate(rendered):
        # An empty text has no tokens, not even special ones.
        ids = encoded["input_ids"][i] if row.text else []
        if row.text and not is_templated:
            ids = _with_end(ids, tokenizer)
        labels = ids
        if not is_plain:
            # The end token of a template is a target only within a turn.
            end_id = None if is_templated else tokenizer.eos_token_id
            labels = _labels(row, ids, encoded["offset_mapping"][i], end_id)
        # Special tokens at the beginning, which truncation keeps: those that the tokenizer added,
        # or the begin-of-text token that a chat template wrote.
        num_added = [*encoded["special_tokens_mask"][i], 0].index(0)
        num_prefix = max(num_added, int(ids[:1] == [tokenizer.bos_token_id]))
        for name, values in (("input_ids", ids), ("labels", labels)):
            columns[name].append(truncate(values, max_length, side, num_prefix))
        full.append(ids)
    num_targets = [sum(label != IGNORED_LABEL for label in row[1:]) for row in columns["labels"]]
    if is_plain:
        del columns["labels"]
    samples = make_samples(rows, columns, full, full, num_targets)
    return samples if is_plain else {**samples, "notes": ["\n".join(row.notes) for row in rendered]}


def _labels(
    row: RenderedRow,
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    end_id: int | None,
) -> list[int]:
    """Return the ids of the tokens that a rendered row has as targets, and `end_id` if it is the
    last one; -100 elsewhere.
    """
    # An end token that was added has no offsets.
    starts, ends = _token_characters(offsets[: len(ids)])
    is_target = np.zeros(len(ids), bool)
    for start, end in row.targets:
        is_target[: len(starts)] |= (starts < end) & (ends > start) & (ends > starts)
    is_target[-1:] |= ids[-1:] == [end_id]
    return np.where(is_target, np.array(ids, np.int64), IGNORED_LABEL).tolist()


def tokenize_masked(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize texts for a masked language model, with special tokens.

    Args:
        rows: A batch of rows by column: `text`.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a sample. None: no truncation.

    Returns:
        The columns of `tokenize_texts`. `num_targets` counts the tokens that are not special, which
        may become targets: collation chooses among them in every epoch.
    """
    columns = tokenize_texts(rows, tokenizer, max_length)
    special_ids = set(tokenizer.all_special_ids)
    num_candidates = [
        sum(token not in special_ids for token in ids) for ids in columns["input_ids"]
    ]
    return {**columns, "num_targets": num_candidates}


def tokenize_texts(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize texts, or pairs of texts, for a sequence classifier, with special tokens, which
    truncation keeps. A sample has one target.

    Args:
        rows: A batch of rows by column: `text`, optionally `text_pair` and `label`.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a sample. None: no truncation.

    Returns:
        `input_ids`, `length`, `num_targets` and `was_truncated`; `token_type_ids` for pairs, if the
        tokenizer returns them; `label`, if the rows have it. A row whose texts are all empty has no
        tokens and no target.
    """
    texts = [[text or "" for text in rows[name]] for name in ("text", "text_pair") if name in rows]
    encoded, full = encode(tokenizer, max_length, *texts)
    columns = {"input_ids": encoded["input_ids"]}
    is_pair = len(texts) == 2
    if is_pair and "token_type_ids" in encoded:  # 0 for the first text, 1 for the second
        columns["token_type_ids"] = encoded["token_type_ids"]
    has_content = [any(row_texts) for row_texts in zip(*texts, strict=True)]
    return make_samples(rows, columns, has_content, full)


def tokenize_words(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """Tokenize lists of words for token classification, with special tokens. The first token of
    each word is a target, with the word's tag; other tokens have the label -100.

    A word whose first token was truncated (from the left) has no target.

    Args:
        rows: A batch of rows by column: `tokens`, lists of words, and optionally `label`, lists of
            a tag per word.
        tokenizer: The tokenizer of the model, with offsets.
        max_length: Maximum number of tokens of a sample. None: no truncation.

    Returns:
        `input_ids`, `length`, `num_targets`, `was_truncated`, and `label`, a list with a label per
        token (the index of its word if the rows have no labels). Rows without words have no tokens.

    Raises:
        ConfigError: If the tokenizer has no offsets.
    """
    check_fast(tokenizer)
    words = [row or [] for row in rows["tokens"]]
    encoded, full = encode(tokenizer, max_length, words, is_split_into_words=True)
    tags = rows.get("label") or [range(len(row)) for row in words]
    labels = []
    for row_tags, encoding in zip(tags, encoded.encodings, strict=True):
        seen = {None}  # special tokens, and words whose first token is seen or truncated
        if tokenizer.truncation_side == "left":
            seen |= {word for part in encoding.overflowing for word in part.word_ids}
        row_labels = []
        for word in encoding.word_ids:
            row_labels.append(IGNORED_LABEL if word in seen else row_tags[word])
            seen.add(word)
        labels.append(row_labels)
    columns = {"input_ids": encoded["input_ids"], "label": labels}
    num_targets = [sum(label != IGNORED_LABEL for label in row) for row in labels]
    return make_samples(rows, columns, words, full, num_targets)


def tokenize_targets(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    prefix: str = "",
    max_target_length: int | None = None,
) -> Rows:
    """Tokenize source and target texts for an encoder-decoder model. Every token of a target text
    is a target of the loss, its end token included.

    Args:
        rows: A batch of rows by column: `text`, the sources, and optionally `target`.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a source. None: no truncation.
        prefix: Text before every source, such as "summarize: ".
        max_target_length: Maximum number of tokens of a target text. None: `max_length`.

    Returns:
        The columns of `tokenize_texts` for the sources. If the rows have target texts, also
        `labels`, their token ids with an end token, empty if source or target is empty;
        `was_truncated`, whether source or target was truncated; `target`, the full text, for
        metrics.
    """
    sources = [text and prefix + text for text in rows["text"]]
    columns = tokenize_texts({**rows, "text": sources}, tokenizer, max_length)
    if "target" not in rows:
        return columns
    targets = [text or "" for text in rows["target"]]
    max_target_length = max_target_length or max_length
    encoded, full = encode(tokenizer, max_target_length, text_target=targets)
    # The end token may replace the last token of a text.
    labels = [_with_end(ids, tokenizer, max_target_length) for ids in encoded["input_ids"]]
    full = [_with_end(ids, tokenizer) for ids in full]
    has_content = [
        bool(target and source)
        for target, source in zip(targets, columns["input_ids"], strict=True)
    ]
    samples = make_samples({}, {"input_ids": labels}, has_content, full)
    was_truncated = zip(columns["was_truncated"], samples["was_truncated"], strict=True)
    return {
        **columns,
        "labels": samples["input_ids"],
        "num_targets": samples["length"],
        "was_truncated": list(map(any, was_truncated)),
        "target": targets,
    }


def split_into_blocks(dataset: Dataset, block_size: int) -> Dataset:
    """Concatenate the tokens of all samples and split them into blocks of `block_size` tokens, the
    new samples; the last block may be shorter.

    Args:
        dataset: Samples with `input_ids`.
        block_size: Number of tokens of a block.

    Returns:
        Samples with `input_ids`, `length`, `num_targets` (all tokens but the first of a block) and
        `was_truncated` (False).
    """
    table = dataset.flatten_indices().data.table
    ids = pa.concat_arrays([chunk.flatten() for chunk in table["input_ids"].chunks])
    boundaries = np.append(np.arange(0, len(ids), block_size), len(ids))
    # Large, because there may be more than 2**31 tokens.
    blocks = pa.LargeListArray.from_arrays(pa.array(boundaries, pa.int64()), ids)
    lengths = np.diff(boundaries)
    columns = {
        "input_ids": blocks,
        "length": lengths,
        "num_targets": lengths - 1,
        "was_truncated": np.zeros(len(lengths), bool),
    }
    return Dataset(pa.table(columns))


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, architecture: str) -> None:
    """Set what a tokenizer lacks to prepare samples, in place: a padding token (the end-of-text
    token), and a post-processor that adds special tokens.

    The post-processor is set only if the tokenizer has <cls> and <sep> but adds no special tokens,
    as that of the embedded corpus: pretrained ones add theirs. For an encoder it adds <cls> and
    <sep>, for an encoder-decoder the end-of-text token, as T5's. A decoder gets none.

    Args:
        tokenizer: The tokenizer to change.
        architecture: "encoder", "decoder" or "encoder-decoder".
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    adds_special_tokens = tokenizer.num_special_tokens_to_add() > 0
    has_cls_and_sep = bool(tokenizer.cls_token) and bool(tokenizer.sep_token)
    if architecture == "decoder" or adds_special_tokens or not has_cls_and_sep:
        return
    if architecture == "encoder-decoder":
        eos = str(tokenizer.eos_token)
        post_processor = TemplateProcessing(
            single=f"$A {eos}", pair=None, special_tokens=[(eos, tokenizer.eos_token_id)]
        )
    else:
        cls = str(tokenizer.cls_token)
        sep = str(tokenizer.sep_token)
        post_processor = TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
        )
    tokenizer.backend_tokenizer.post_processor = post_processor


def encoding_settings(tokenizer: PreTrainedTokenizerBase) -> str:
    """Serialize all that determines how a tokenizer encodes texts: vocabulary, special tokens,
    truncation side, ...

    Excluded are the chat template, and the truncation and padding of the tokenizer's last call.
    """
    special_tokens_and_side = f"{tokenizer.special_tokens_map}{tokenizer.truncation_side}"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return str(sorted(tokenizer.get_vocab().items())) + special_tokens_and_side
    backend_settings = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(backend_settings) + special_tokens_and_side


def _token_characters(offsets: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters [start, end) of each token in the text, from its offsets."""
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # The largest end of all earlier tokens; special tokens, whose end is 0, do not lower it.
    previous_ends = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]).astype(np.int64)
    previous_ends = previous_ends[: len(ends)]
    return np.where(starts == ends, previous_ends, starts), ends


def encode(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    *texts: list,
    **options: Any,
) -> tuple[BatchEncoding, list[list[int]]]:
    """Tokenize texts, or pairs of texts, with special tokens.

    Args:
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a sample. None: no truncation.
        texts: A list of texts, or two lists: the first and the second text of each pair.
        options: Other arguments of the tokenizer.

    Returns:
        (the encoded texts; their token ids without truncation)

    Raises:
        ConfigError: If special tokens alone fill a sample.
    """
    check_room(tokenizer, max_length, is_pair=len(texts) == 2)
    full = tokenizer(*texts, verbose=False, **options)["input_ids"]
    encoded = tokenizer(
        *texts,
        truncation=max_length is not None,
        max_length=max_length,
        verbose=False,
        **options,
    )
    return encoded, full


def encode_groups(
    tokenizer: PreTrainedTokenizerBase, max_length: int | None, *texts: list[list[str]]
) -> tuple[Rows, list[list]]:
    """Tokenize several texts, or pairs of texts, of each row, with special tokens.

    Args:
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a text or pair. None: no truncation.
        texts: A list of texts for each row, or two such lists for pairs. All rows have the same
            number of texts.

    Returns:
        (`input_ids` and, if the tokenizer returns them, `token_type_ids`, each a list per text of
        each row; the same `input_ids` without truncation)
    """
    size = len(texts[0][0])

    def by_row(values: list) -> list[list]:
        """Group a list with one value per text, row after row, by row."""
        return [values[i : i + size] for i in range(0, len(values), size)]

    flat_texts = [list(chain.from_iterable(rows)) for rows in texts]
    encoded, full = encode(tokenizer, max_length, *flat_texts)
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    columns = {name: by_row(encoded[name]) for name in names}
    return columns, by_row(full)


def check_room(tokenizer: PreTrainedTokenizerBase, max_length: int | None, is_pair: bool) -> int:
    """Check that a sample has room for more than special tokens, and return how many special
    tokens the tokenizer adds to a sample.

    Args:
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a sample. None: no limit.
        is_pair: Whether a sample has two texts.

    Raises:
        ConfigError: If the special tokens alone reach `max_length`.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length is not None and max_length <= num_special:
        raise ConfigError(
            f"max_length {max_length} leaves no room besides the {num_special} special tokens of "
            "every sample: use more."
        )
    return num_special


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer is a fast one, which can return the characters of each token.

    Raises:
        ConfigError: If it is a slow one, without offsets of tokens.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no token offsets, which completions, tags and "
            "answers need: use a model with a fast tokenizer."
        )


def _with_end(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[int]:
    """Append the end-of-text token to token ids, as most tokenizers of decoders do not."""
    eos = tokenizer.eos_token_id
    if eos is None or ids[-1:] == [eos]:
        return ids
    num_prefix = int(ids[:1] == [tokenizer.bos_token_id])
    max_other_tokens = max_length - 1 if max_length else max_length
    return [*truncate(ids, max_other_tokens, tokenizer.truncation_side, num_prefix), eos]


def truncate(row: list[int], max_length: int | None, side: str, num_prefix: int = 0) -> list[int]:
    """Truncate the token ids (or labels) of a sample as transformers' tokenizers do.

    Args:
        row: The ids or labels.
        max_length: Maximum number of entries. None: no truncation.
        side: "right": the last entries are removed. "left": the first entries, except those of the
            prefix.
        num_prefix: Number of special tokens at the beginning, which "left" keeps.

    >>> truncate([1, 5, 6, 7, 2], 3, "right"), truncate([1, 5, 6, 7, 2], 3, "left", num_prefix=1)
    ([1, 5, 6], [1, 7, 2])
    """
    if max_length is None or len(row) <= max_length:
        return row
    if side == "right":
        return row[:max_length]
    num_prefix = min(num_prefix, max_length)
    return [*row[:num_prefix], *row[len(row) - max_length + num_prefix :]]


def make_samples(
    rows: Rows,
    columns: Rows,
    contents: Sequence[Any],
    full: Sequence[list],
    num_targets: list[int] | None = None,
) -> Rows:
    """Return the columns that tokenized samples of all tasks have.

    Args:
        rows: A batch of rows by column; their `label`, if they have it, is that of the samples.
        columns: `input_ids` and others with a list for each row; with several texts in a row, a
            list for each text.
        contents: What was tokenized, or whether there was something: empty, "", None or False for
            a row that consists of special tokens only.
        full: The `input_ids` without truncation.
        num_targets: Number of targets of each row. None: one in each row with content.

    Returns:
        The columns, empty for rows without content; `length`, the number of tokens (of the longest
        text); `num_targets`; `was_truncated`.
    """
    has_content = list(map(bool, contents))
    samples = {"label": rows["label"]} if "label" in rows else {}
    for name, values in columns.items():
        samples[name] = [row if has else [] for row, has in zip(values, has_content, strict=True)]
    lengths = list(map(_lengths, samples["input_ids"]))
    shorter = [
        has and sum(of_row) < sum(_lengths(full_row))
        for has, of_row, full_row in zip(has_content, lengths, full, strict=True)
    ]
    return {
        **samples,
        "length": list(map(max, lengths)),
        "num_targets": num_targets or list(map(int, has_content)),
        "was_truncated": shorter,
    }


def _lengths(ids: list) -> list[int]:
    """Return the number of tokens of each text of a row: one, or several for a list of lists."""
    return list(map(len, ids)) if ids and isinstance(ids[0], list) else [len(ids)]
