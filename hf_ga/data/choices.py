"""Multiple choice: columns of several kinds -> a text, its choices and the number of the right one; their samples and batches."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.data.collation import pad
from hf_ga.data.row_checks import Complaints
from hf_ga.data.spans import quoted
from hf_ga.data.tokenization import check_room

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
    expected = 0
    for split, dataset in encoded.items():
        complaints, counts = Complaints(split), [len(choices) for choices in dataset["choices"]]
        expected = expected or counts[0]
        for number, (text, count) in enumerate(zip(dataset["text"], counts, strict=True)):
            if count != expected:
                complaints.add(number, f"({quoted(text)}) has {count} choices, the rows before it {expected}", _AS_MANY)
            elif count < 2:
                complaints.add(number, f"({quoted(text)}) has {count} choice(s)", "there is nothing to choose from.")
        complaints.refuse(len(dataset))
    return encoded


_AS_MANY = "all rows need as many, as a batch is one block of samples x choices. Leave other rows out, or fill them up."


def _encoded(dataset: Dataset, split: str) -> Dataset:
    columns = [name for name in dataset.column_names if name.startswith("choice") or name in ("text_pair", "label")]
    choices, labels, complaints = [], [], Complaints(split)
    for number, row in enumerate(dataset):
        texts, names = _choices({name: row[name] for name in columns})
        if texts is None:
            held = {name: row[name] for name in columns if name.startswith("choice")}
            shown = f"({quoted(row['text'])}) has no list of strings for its choices, but {held!r:.120}"
            complaints.add(number, shown, "name the column with --choices_column.")
            continue
        begin = row.get("text_pair") or ""
        choices.append([f"{begin} {text}" if begin else text for text in texts])
        label = _number(row["label"], names, len(texts)) if "label" in columns else None
        if label is None and "label" in columns and len(texts) > 1:  # of fewer nothing can be right
            shown = f"({quoted(row['text'])}) has the label {row['label']!r} for {len(texts)} choices"
            complaints.add(number, shown, _known_labels(names, len(texts)))
        labels.append(label)
    complaints.refuse(len(dataset))
    dataset = dataset.remove_columns(columns).add_column("choices", choices, feature=List(Value("string")))
    return dataset.add_column("label", labels, feature=Value("int64")) if "label" in columns else dataset


def _choices(row: dict[str, Any]) -> tuple[list[str] | None, list[Any]]:
    """The texts and the names of a row's choices; None where they are no texts."""
    value, names = row.get("choices"), []
    if "choices" not in row:
        value = [row[name] for name in sorted((n for n in row if n.startswith("choice")), key=lambda n: int(n[len("choice") :]))]
    if isinstance(value, dict):
        value, names = value.get("text"), value.get("label") or []
    is_texts = isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)
    return ([text or "" for text in value] if is_texts else None), names


def _number(label: Any, names: Sequence[Any], count: int) -> int | None:
    """The place of the right choice; None where the label is none of them."""
    if label in names:
        return list(names).index(label)
    number = int(label) if isinstance(label, float) and label.is_integer() else label  # JSON's 1.0
    if isinstance(label, str):
        letter = LETTERS.find(label.strip().upper()) if len(label.strip()) == 1 else -1
        number = int(label) if label.strip().isdecimal() else letter
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count else None


def _known_labels(names: Sequence[Any], count: int) -> str:
    known = f"one of {', '.join(map(str, names))}, " if names else ""
    last = LETTERS[min(max(count, 1), len(LETTERS)) - 1]
    return f"it must be {known}a number from 0 to {count - 1}, or a letter from A to {last}."


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
