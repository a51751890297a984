"""Multiple choice: columns in several formats -> texts, choices, index of the correct choice; their
samples and batches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import FIX_LABELS, check_values
from hf_ga.finetuning.data.collation import collate_ids
from hf_ga.finetuning.data.tokenization import Rows, encode, without_empty


def encode_choices(rows: DatasetDict) -> DatasetDict:
    """Replace the columns of the choices by `choices`, lists of strings; check `label`, the 0-based
    index of the correct one.

    Choices are a column `choices` of lists, or the columns `choice0`, `choice1`, ...; a column
    `text_pair` is prepended to each.

    Args:
        rows: The rows of all splits.

    Returns:
        The same rows with `choices` and, if they had labels, `label` as int64.

    Raises:
        DataError: If rows have different numbers of choices, fewer than two, or a label that is not
            the index of a choice.
    """
    encoded = DatasetDict({split: _encoded(dataset, split) for split, dataset in rows.items()})
    counts = {len(choices) for dataset in encoded.values() for choices in dataset["choices"]}
    if len(counts) != 1 or min(counts) < 2:
        listed = " and ".join(map(str, sorted(counts)))
        raise DataError(
            "all rows need the same number of choices, at least 2, because a batch is one block "
            f"of samples x choices; there are rows with {listed}. Remove or complete these rows."
        )
    return encoded


def _encoded(dataset: Dataset, split: str) -> Dataset:
    """Encode the rows of one split, see `encode_choices`."""
    columns = [name for name in dataset.column_names if name.startswith("choice")]
    rows = list(dataset)
    if "choices" in columns:
        choices = [row["choices"] for row in rows]
    else:
        choices = [[row[name] for name in columns] for row in rows]
    rule = "choices must be lists of strings"
    check_values(split, choices, _are_texts, rule, "Choose the column with --choices_column.")
    texts = [_with_pair(row, of_row) for row, of_row in zip(rows, choices, strict=True)]
    if "label" in dataset.column_names:
        labels = _checked_labels(split, rows, choices)
        dataset = dataset.remove_columns("label").add_column("label", labels)
    if "text_pair" in dataset.column_names:
        columns.append("text_pair")
    dataset = dataset.remove_columns(columns)
    return dataset.add_column("choices", texts, feature=List(Value("string")))


def _with_pair(row: dict[str, Any], choices: list[str | None]) -> list[str]:
    """Prepend the row's `text_pair`, if it has one, to each of its choices."""
    pair = row.get("text_pair") or ""
    return [f"{pair} {text or ''}".removeprefix(" ") for text in choices]


def _checked_labels(split: str, rows: list[dict[str, Any]], choices: list[list]) -> list[int]:
    """Return the labels of the rows as integers.

    Raises:
        DataError: If a label is not the 0-based index of one of the row's choices.
    """
    labels = [
        {"label": row["label"], "choices": len(of_row)}
        for row, of_row in zip(rows, choices, strict=True)
    ]
    rule = "a label must be the 0-based index of a choice"
    check_values(split, labels, _is_index, rule, FIX_LABELS)
    return [int(one["label"]) for one in labels]


def _is_index(row: dict[str, Any]) -> bool:
    """Whether `label` is the 0-based index of one of `choices` choices."""
    return str(row["label"]).isdecimal() and int(row["label"]) < row["choices"]


def _are_texts(value: Any) -> bool:
    """Whether a value is a list of strings; None is an empty string."""
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


def tokenize_choices(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Rows:
    """Tokenize the text of each row paired with each of its choices, with special tokens. A sample
    has one target.

    Args:
        rows: `text`, `choices` and optionally `label`.
        tokenizer: The tokenizer of the model.
        max_length: Largest number of tokens of a text with a choice. None: the tokenizer's limit.

    Returns:
        `input_ids` and optionally `token_type_ids`, one list per choice; `length`, that of the
        longest; `num_targets`, 0 for an empty row; `was_cut`; `label`, if the rows have it.
    """
    # The same in all rows, see `encode_choices`.
    num_choices = len(rows["choices"][0])

    def by_row(values: list) -> list[list]:
        return [values[i : i + num_choices] for i in range(0, len(values), num_choices)]

    texts = [text or "" for text in rows["text"] for _ in range(num_choices)]
    choices = [choice for of_row in rows["choices"] for choice in of_row]
    encoded, was_cut = encode(tokenizer, max_length, texts, choices)
    is_filled = [
        bool(text) and any(of_row)
        for text, of_row in zip(rows["text"], rows["choices"], strict=True)
    ]
    samples: Rows = {}
    for name in ("input_ids", "token_type_ids"):
        if name in encoded:
            samples[name] = without_empty(by_row(encoded[name]), is_filled)
    samples["length"] = [max(map(len, ids), default=0) for ids in samples["input_ids"]]
    samples["num_targets"] = list(map(int, is_filled))
    was_cut_by_row = without_empty(by_row(was_cut), is_filled)
    samples["was_cut"] = [any(of_row) for of_row in was_cut_by_row]
    if "label" in rows:
        samples["label"] = rows["label"]
    return samples


def collate_choices(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate samples of `tokenize_choices`.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        `input_ids`, `attention_mask` and optionally `token_type_ids` of shape (samples, choices,
        longest), and, if the samples have labels, int64 `labels` of shape (samples,).
    """
    names = [name for name in ("input_ids", "token_type_ids") if name in samples[0]]
    choices = []
    for sample in samples:
        for index in range(len(sample["input_ids"])):
            choices.append({name: sample[name][index] for name in names})
    flat = collate_ids(choices, pad_token_id)
    batch = {name: tensor.unflatten(0, (len(samples), -1)) for name, tensor in flat.items()}
    if "label" in samples[0]:
        batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch
