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

    Raises:
        DataError: rows with different numbers of choices, fewer than two, or a label that is not
            the index of a choice.
    """
    encoded = DatasetDict({split: _encoded(dataset, split) for split, dataset in rows.items()})
    counts = sorted(
        {len(choices) for dataset in encoded.values() for choices in dataset["choices"]}
    )
    if len(counts) != 1 or counts[0] < 2:
        raise DataError(
            "all rows need the same number of choices, at least 2, because a batch is one block "
            "of samples x choices; there are "
            f"rows with {' and '.join(map(str, counts))}. Remove or complete these rows."
        )
    return encoded


def _encoded(dataset: Dataset, split: str) -> Dataset:
    columns = [name for name in dataset.column_names if name.startswith("choice")]
    rows = list(dataset)
    choices = [
        row["choices"] if "choices" in row else [row[name] for name in columns] for row in rows
    ]
    rule = "choices must be lists of strings"
    check_values(split, choices, _are_texts, rule, "Choose the column with --choices_column.")
    pairs = list(zip(rows, choices, strict=True))
    texts = [
        [f"{row.get('text_pair') or ''} {text or ''}".removeprefix(" ") for text in of_row]
        for row, of_row in pairs
    ]
    if "label" in dataset.column_names:
        labels = [{"label": row["label"], "choices": len(of_row)} for row, of_row in pairs]
        rule = "a label must be the 0-based index of a choice"
        check_values(
            split,
            labels,
            lambda row: str(row["label"]).isdecimal() and int(row["label"]) < row["choices"],
            rule,
            FIX_LABELS,
        )
        dataset = dataset.remove_columns("label").add_column(
            "label", [int(row["label"]) for row in labels]
        )
    columns += ["text_pair"] if "text_pair" in dataset.column_names else []
    return dataset.remove_columns(columns).add_column(
        "choices", texts, feature=List(Value("string"))
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


def tokenize_choices(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Rows:
    """The text paired with each choice, with special tokens. One target per sample.

    `input_ids` and `token_type_ids` have one list per choice; `length` is the length of the
    longest.
    """
    num_choices = len(rows["choices"][0])  # the same in all rows, see `encode_choices`

    def by_row(values: list) -> list[list]:
        return [values[i : i + num_choices] for i in range(0, len(values), num_choices)]

    texts = [text or "" for text in rows["text"] for _ in range(num_choices)]
    encoded, was_cut = encode(
        tokenizer, max_length, texts, [choice for choices in rows["choices"] for choice in choices]
    )
    filled = [
        bool(text) and any(choices)
        for text, choices in zip(rows["text"], rows["choices"], strict=True)
    ]
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    columns = {name: without_empty(by_row(encoded[name]), filled) for name in names}
    columns |= {
        "length": [max(map(len, ids), default=0) for ids in columns["input_ids"]],
        "num_targets": list(map(int, filled)),
        "was_cut": list(map(any, without_empty(by_row(was_cut), filled))),
    }
    return columns | ({"label": rows["label"]} if "label" in rows else {})


def collate_choices(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and optionally `token_type_ids` of shape (samples, choices,
    longest), and, if the samples have labels, int64 `labels` of shape (samples,).
    """
    names = [name for name in ("input_ids", "token_type_ids") if name in samples[0]]
    choices = [
        dict(zip(names, of_choice, strict=True))
        for s in samples
        for of_choice in zip(*(s[n] for n in names), strict=True)
    ]
    batch = {
        name: tensor.unflatten(0, (len(samples), -1))
        for name, tensor in collate_ids(choices, pad_token_id).items()
    }
    if "label" in samples[0]:
        batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch
