"""Multiple choice: columns of several kinds -> a text, its choices and the number of the right one; their samples and batches."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ga.data.checks import check_values
from hf_ga.data.collation import collate_ids
from hf_ga.data.tokenization import check_room
from hf_ga.errors import DataError

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
    counts = sorted({len(choices) for dataset in encoded.values() for choices in dataset["choices"]})
    if len(counts) != 1 or counts[0] < 2:
        raise DataError(
            "all rows need the same number of choices, and at least 2, as a batch is one block of samples x choices, but there are "
            f"rows with {' and '.join(map(str, counts))}. Remove or complete the others."
        )
    return encoded


def _encoded(dataset: Dataset, split: str) -> Dataset:
    columns = [name for name in dataset.column_names if name.startswith("choice") or name in ("text_pair", "label")]
    rows = list(dataset.select_columns(columns))
    rule = "choices must be lists of strings"
    check_values(split, rows, lambda row: _are_texts(_choices(row)[0]), rule, "Choose the column with --choices_column.")
    texts = [[f"{row.get('text_pair') or ''} {text or ''}".removeprefix(" ") for text in _choices(row)[0]] for row in rows]
    result = dataset.remove_columns(columns).add_column("choices", texts, feature=List(Value("string")))
    if "label" not in columns:
        return result
    rule = "a label must be the name, the number (from 0) or the letter of a choice"
    remedy = "Choose the column with --label_column, or fix these rows."
    check_values(split, rows, lambda row: _number(row["label"], *_choices(row)) is not None, rule, remedy)
    labels = [_number(row["label"], *_choices(row)) for row in rows]
    return result.add_column("label", labels, feature=Value("int64"))


def _choices(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The texts of a row's choices, and their names if they have any."""
    if "choices" not in row:
        numbered = sorted((name for name in row if name.startswith("choice")), key=lambda name: int(name.removeprefix("choice")))
        return [row[name] for name in numbered], []
    value = row["choices"]
    return (value.get("text"), value.get("label") or []) if isinstance(value, dict) else (value, [])


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


def _number(label: Any, texts: Sequence[Any], names: Sequence[Any]) -> int | None:
    """The number of the right choice; None where the label is none of them."""
    if label in names:
        return list(names).index(label)
    if isinstance(label, str):
        label = label.strip().upper()
        label = LETTERS.find(label) if len(label) == 1 and label in LETTERS else int(label) if label.isdecimal() else None
    return label if isinstance(label, int) and 0 <= label < len(texts) else None


def tokenize_choices(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Rows:
    """The text with each of its choices between the tokenizer's special tokens. One target a sample.

    `input_ids` and `token_type_ids` hold a list for each choice; `length` is the longest's.
    """
    check_room(tokenizer, max_length, is_pair=True)
    columns: Rows = {name: [] for name in ("input_ids", "length", "num_targets", "was_cut", "token_type_ids")}
    for text, choices in zip(rows["text"], rows["choices"], strict=True):
        is_empty = not text or not any(choices)
        pairs = ([], []) if is_empty else ([text] * len(choices), choices)
        whole = {} if is_empty else tokenizer(*pairs, verbose=False)
        cut = {} if is_empty else tokenizer(*pairs, truncation=max_length is not None, max_length=max_length, verbose=False)
        ids = cut.get("input_ids", [])
        columns["input_ids"].append(ids)
        columns["length"].append(max(map(len, ids), default=0))
        columns["num_targets"].append(int(not is_empty))
        columns["was_cut"].append(ids != whole.get("input_ids", []))
        columns["token_type_ids"].append(cut.get("token_type_ids", []))
    if not any(columns["token_type_ids"]):  # the tokenizer has none
        del columns["token_type_ids"]
    return columns | ({"label": rows["label"]} if "label" in rows else {})


def collate_choices(samples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and maybe `token_type_ids` of shape (samples, choices, longest), and, where the samples have
    labels, int64 `labels` of shape (samples,).
    """
    names = [name for name in ("input_ids", "token_type_ids") if name in samples[0]]
    choices = [dict(zip(names, of_choice, strict=True)) for s in samples for of_choice in zip(*(s[n] for n in names), strict=True)]
    batch = {name: tensor.unflatten(0, (len(samples), -1)) for name, tensor in collate_ids(choices, pad_token_id).items()}
    if "label" in samples[0]:
        batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch
