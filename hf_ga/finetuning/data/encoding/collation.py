"""Samples -> arguments of the model: right-padded int64 tensors, whose dim 0 is the sample. Padding
is never a target.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_ga.loading.batches import IGNORED_LABEL

Samples = Sequence[dict[str, Any]]
# The entry of a batch that has the weight of each sample in the loss, float32.
ROW_WEIGHTS = "row_weights"
NO_TOKEN = -1  # is no token id
# Column of samples, besides `input_ids`, -> entry of a batch.
ENTRIES = {
    "token_type_ids": "token_type_ids",
    "weight": ROW_WEIGHTS,
    "text_id": "text_id",
    "label": "labels",
    "labels": "labels",
    "start_positions": "start_positions",
    "end_positions": "end_positions",
}


def pad(rows: Sequence[Sequence[Any]], padding_value: int) -> Tensor:
    """Right-pad the token ids or labels of samples to the longest and stack them, to collate a
    batch.

    Args:
        rows: A list of integers per sample, of any lengths; or, for each sample, as many such
            lists.
        padding_value: The number to pad with.

    Returns:
        int64, shape (samples, longest) or (samples, lists, longest).
    """
    if any(row and isinstance(row[0], list) for row in rows):
        lists = [numbers for row in rows for numbers in row]
        return pad(lists, padding_value).unflatten(0, (len(rows), -1))
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding_value)


def collate_samples(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Collate samples to the arguments of a model: token ids and, as far as the samples have them,
    token types, weights and targets.

    Args:
        samples: The samples of the batch. Columns that are not in `ENTRIES` are left out.
        pad_token_id: The id of the padding token.

    Returns:
        `input_ids`, `attention_mask`, and the entries of `ENTRIES` that the samples have. Those
        that are a list per sample, with a number per token, are padded to int64 of shape (samples,
        longest): ids with `pad_token_id`, labels with -100, others with 0. (In multiple choice,
        they are a list per choice, of shape (samples, choices, longest).) Those that are a number
        per sample have shape (samples,). An empty list of labels becomes one -100, because a
        decoder derives its inputs from the labels and needs at least one position.
    """
    ids = pad([sample["input_ids"] for sample in samples], NO_TOKEN)
    batch = {
        "input_ids": ids.masked_fill(ids == NO_TOKEN, pad_token_id),
        "attention_mask": (ids != NO_TOKEN).long(),
    }
    for column, entry in ENTRIES.items():
        if column not in samples[0]:
            continue
        values = [sample[column] for sample in samples]
        if not isinstance(values[0], list):
            batch[entry] = torch.tensor(values)
        elif column == "token_type_ids":
            batch[entry] = pad(values, 0)
        else:
            non_empty_lists = [labels or [IGNORED_LABEL] for labels in values]
            batch[entry] = pad(non_empty_lists, IGNORED_LABEL)
    return batch


def collate_causal(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Collate token ids and the labels of a causal language model.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        The entries of `collate_samples`, with int64 `labels` of shape (samples, longest), not
        shifted, and -100 at padding: the samples' own labels (of completions) or, without them, the
        token ids.
    """
    with_labels = [{"labels": sample["input_ids"], **sample} for sample in samples]
    return collate_samples(with_labels, pad_token_id)


def collate_label_sets(samples: Samples, pad_token_id: int, num_labels: int) -> dict[str, Tensor]:
    """Collate token ids and multi-hot labels for multi-label classification.

    Args:
        samples: The samples of the batch. Their `label`, if they have it, is a list of class ids.
        pad_token_id: The id of the padding token.
        num_labels: Number of classes.

    Returns:
        The entries of `collate_samples`, and, if the samples have labels, float32 `labels` of shape
        (samples, num_labels): 1 for each class of the sample, 0 for the others.
    """
    batch = collate_samples(samples, pad_token_id)
    if "label" in samples[0]:
        labels = torch.zeros(len(samples), num_labels)
        for row, sample in zip(labels, samples, strict=True):
            row[sample["label"]] = 1.0
        batch["labels"] = labels
    return batch
