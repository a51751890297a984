"""Multiple choice: columns of several kinds -> a text, its choices and the number of the right one; their samples and batches."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.collation import pad
from hf_ga.errors import DataError
from hf_ga.spans import row_named
from hf_ga.tokenization import check_room

Rows = dict[str, list]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def encode_choices(rows: DatasetDict) -> DatasetDict:
    """Replace the columns of the choices by `choices`, lists of strings, and `label` by the number of the right one, from 0.

    Choices are a column `choices` of lists, or of {"text": [...], "label": [...]} whose labels are names of the choices, or the
    columns `choice0`, `choice1`, ...; a column `text_pair` begins each of them. A label is a name of a choice, its number from 0,
    or its letter.

    Raises:
        DataError: rows with different numbers of choices, fewer than two, or a label that is none of them.
    """
    encoded = DatasetDict({split: _encoded(dataset, split) for split, dataset in rows.items()})
    expected = None
    for split, dataset in encoded.items():
        for number, (text, choices) in enumerate(zip(dataset["text"], dataset["choices"], strict=True)):
            expected = expected or len(choices)
            if len(choices) != expected:
                raise DataError(
                    f"{row_named(split, number, text)} has {len(choices)} choices, the rows before it {expected}: all rows need "
                    "as many, as a batch is one block of samples x choices. Leave other rows out, or fill them up."
                )
            if expected < 2:
                raise DataError(f"{row_named(split, number, text)} has {expected} choice(s): there is nothing to choose from.")
    return encoded


def _encoded(dataset: Dataset, split: str) -> Dataset:
    columns = [name for name in dataset.column_names if name.startswith("choice") or name in ("text_pair", "label")]
    choices, labels = [], []
    for number, row in enumerate(dataset):
        where = row_named(split, number, row["text"])
        texts, names = _choices({name: row[name] for name in columns})
        if texts is None:
            held = {name: row[name] for name in columns if name.startswith("choice")}
            raise DataError(
                f"{where} has no list of strings for its choices, but {held!r:.120}: name the column with --choices_column."
            )
        begin = row.get("text_pair") or ""
        choices.append([f"{begin} {text}" if begin else text for text in texts])
        if "label" in columns:
            labels.append(_number(row["label"], names, len(texts), where))
    dataset = dataset.remove_columns(columns).add_column("choices", choices, feature=List(Value("string")))
    return dataset.add_column("label", labels, feature=Value("int64")) if labels else dataset


def _choices(row: dict[str, Any]) -> tuple[list[str] | None, list[Any]]:
    """The texts and the names of a row's choices; None where they are no texts."""
    value, names = row.get("choices"), []
    if "choices" not in row:
        value = [row[name] for name in sorted((n for n in row if n.startswith("choice")), key=lambda n: int(n[len("choice") :]))]
    if isinstance(value, dict):
        value, names = value.get("text"), value.get("label") or []
    is_texts = isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)
    return ([text or "" for text in value] if is_texts else None), names


def _number(label: Any, names: Sequence[Any], count: int, where: str) -> int:
    """The place of the right choice."""
    if label in names:
        return list(names).index(label)
    number = label
    if isinstance(label, str):
        letter = LETTERS.find(label.strip().upper()) if len(label.strip()) == 1 else -1
        number = int(label) if label.strip().isdecimal() else letter
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count:
        return number
    known = f"one of {', '.join(map(str, names))}, " if names else ""
    raise DataError(
        f"{where} has the label {label!r} for {count} choices: it must be {known}a number from 0 to {count - 1}, or a letter from "
        f"A to {LETTERS[min(count, len(LETTERS)) - 1]}."
    )


def tokenize_choices(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """The text with each of its choices between the tokenizer's special tokens. One target a sample.

    `input_ids` holds the choices one after the other, `choice_lengths` how many tokens each has, `length` the longest's.
    """
    check_room(tokenizer, max_length, is_pair=True)
    texts = [[text or ""] * len(choices or []) for text, choices in zip(rows["text"], rows["choices"], strict=True)]
    pairs = [list(choices or []) for choices in rows["choices"]]
    options = {"truncation": True, "max_length": max_length} if max_length else {}
    columns: Rows = {name: [] for name in ("input_ids", "choice_lengths", "length", "num_targets", "was_cut", "token_type_ids")}
    for of_row, choices in zip(texts, pairs, strict=True):
        is_empty = not any(of_row) or not any(choices)
        whole = [] if is_empty else tokenizer(of_row, choices, verbose=False)["input_ids"]
        encoded = {"input_ids": []} if is_empty else tokenizer(of_row, choices, verbose=False, **options)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        columns["input_ids"].append([token for ids in encoded["input_ids"] for token in ids])
        columns["choice_lengths"].append(lengths)
        columns["length"].append(max(lengths, default=0))
        columns["num_targets"].append(int(not is_empty))
        columns["was_cut"].append(lengths != [len(ids) for ids in whole])
        columns["token_type_ids"].append([kind for kinds in encoded.get("token_type_ids", []) for kind in kinds])
    if not any(columns["token_type_ids"]):  # the tokenizer has none
        del columns["token_type_ids"]
    return columns | ({"label": rows["label"]} if "label" in rows else {})


def collate_choices(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and maybe `token_type_ids` of shape (samples, choices, longest), and, where the samples have
    labels, int64 `labels` of shape (samples,).
    """
    lengths = [sample["choice_lengths"] for sample in samples]
    shape = (len(samples), len(lengths[0]), -1)
    batch = {
        "input_ids": pad(_cut(samples, "input_ids"), pad_token_id).view(shape),
        "attention_mask": pad([[1] * length for of_sample in lengths for length in of_sample], 0).view(shape),
    }
    if "token_type_ids" in samples[0]:
        batch["token_type_ids"] = pad(_cut(samples, "token_type_ids"), 0).view(shape)
    if "label" in samples[0]:
        batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch


def _cut(samples: Sequence[dict[str, Any]], name: str) -> list[list[int]]:
    """The choices of all samples, one after the other."""
    rows = []
    for sample in samples:
        end = 0
        for length in sample["choice_lengths"]:
            rows.append(sample[name][end : end + length])
            end += length
    return rows
