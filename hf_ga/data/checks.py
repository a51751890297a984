"""Values of rows and token ids that cannot be used: one error with the rule, the values and the remedy, before any work starts."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL

NUM_SHOWN = 3


def check_values(split: str, values: Collection[Any], is_valid: Callable[[Any], bool], rule: str, remedy: str) -> None:
    """Check one value per row.

    Raises:
        DataError: the rule, how many rows break it with the first values, and the remedy.

    >>> check_values("train", [1, "x"], lambda value: value != "x", "labels must be numbers", "Fix these rows.")
    Traceback (most recent call last):
    hf_ga.errors.DataError: labels must be numbers, but 1 of 2 train rows hold 'x'. Fix these rows.
    """
    wrong = [value for value in values if not is_valid(value)]
    if wrong:
        shown = ", ".join(f"{value!r:.80}" for value in wrong[:NUM_SHOWN])
        raise DataError(f"{rule}, but {len(wrong)} of {len(values)} {split} rows hold {shown}. {remedy}")


def check_token_ids(splits: Mapping[str, Dataset], vocabulary: int) -> None:
    """Check that all token ids of the samples are within the model's embedding.

    Raises:
        DataError: samples of a split have other ids.
    """
    for split, dataset in splits.items():
        for name in {"input_ids", "labels"} & set(dataset.column_names):
            least = 0 if name == "input_ids" else IGNORED_LABEL
            for batch in dataset.select_columns([name]).with_format("arrow").iter(1000):
                found = pc.min_max(pc.list_flatten(batch[name], recursive=True)).as_py()
                for token in (found["min"], found["max"]):
                    if token is not None and not least <= token < vocabulary:
                        raise DataError(
                            f"{split} samples hold token {token}, but the model has only tokens 0 to {vocabulary - 1}: use the "
                            "tokenizer that belongs to it."
                        )
