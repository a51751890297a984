"""Statistics of tokenized samples: a hash that identifies them, and baselines, which a trained model must exceed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from hf_ga.exact.batches import IGNORED_LABEL

# Columns of a sample that are numbers, or lists of them, and determine what a model learns.
_LEARNED_FROM = ("input_ids", "length", "token_type_ids", "label", "labels", "start_positions", "end_positions")


def content_hash(train: Dataset, labels: Sequence[str]) -> str:
    """Of all numbers of the training samples and the names of the labels, wherever the rows came from."""
    train = train.with_format("numpy")
    parts: list[Any] = [list(labels)]
    for name in (name for name in _LEARNED_FROM if name in train.column_names):
        rows = [_flat(row) for row in train[name][:]]
        parts += [name, np.concatenate(rows).tobytes(), np.array([len(row) for row in rows], np.int64).tobytes()]
    return Hasher.hash(parts)


def unigram_entropy(train: Dataset, special_ids: Sequence[int] = ()) -> float:
    """The entropy, in nats per token, of the unigram distribution of the targets: `labels`, or else all `input_ids`.

    H = sum over tokens i of (c_i / N) log(N / c_i), N = sum of the counts c_i: the lowest loss of a language model that ignores the
    context. A trained one must come below it.

    Args:
        special_ids: tokens that are never a target.
    """
    name = "labels" if "labels" in train.column_names else "input_ids"
    tokens = np.concatenate([_flat(row) for row in train.with_format("numpy")[name][:]])
    _, counts = np.unique(tokens[~np.isin(tokens, [IGNORED_LABEL, *special_ids])], return_counts=True)
    shares = counts / counts.sum()
    return float((shares * np.log(1 / shares)).sum())


def majority_class(validation: Dataset, names: Sequence[str]) -> str:
    """The accuracy of a constant prediction, which a trained model must exceed."""
    labels = np.concatenate([_flat(row) for row in validation.with_format("numpy")["label"][:]])
    found, counts = np.unique(labels[labels != IGNORED_LABEL], return_counts=True)
    return f"majority class of validation: {names[int(found[counts.argmax()])]}, {counts.max() / counts.sum():.1%}"


def _flat(row: Any) -> np.ndarray:
    """A number, a list of numbers or a list of such lists as one vector."""
    array = np.asarray(row)
    return np.concatenate([*map(_flat, array), []]) if array.dtype == object else np.ravel(array).astype(np.float64)
