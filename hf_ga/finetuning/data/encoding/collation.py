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
# The entry of a batch that has the weight of each sample in the loss.
ROW_WEIGHTS = "row_weights"


def pad(rows: Sequence[Sequence[int]], padding_value: int) -> Tensor:
    """Right-pad the token ids, masks or labels of samples to the longest and stack them, to collate
    a batch.

    Args:
        rows: A list of integers per sample, of any lengths.
        padding_value: The number to pad with.

    Returns:
        int64, shape (samples, longest).
    """
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding_value)


def collate_ids(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Collate the token ids of samples to the inputs of a model, without its targets.

    Args:
        samples: Tokenized samples with `input_ids` and optionally `token_type_ids` and `weight`.
        pad_token_id: The id of the padding token.

    Returns:
        `input_ids`, `attention_mask` and, if the samples have them, `token_type_ids`, each int64 of
        shape (samples, longest) and 0 (ids: `pad_token_id`) at padding; and, if the samples have
        a `weight`, `row_weights`, their weights in the loss, float32 of shape (samples,).
    """
    rows = [sample["input_ids"] for sample in samples]
    ones = [[1] * len(row) for row in rows]
    batch = {"input_ids": pad(rows, pad_token_id), "attention_mask": pad(ones, 0)}
    if "token_type_ids" in samples[0]:
        batch["token_type_ids"] = pad([sample["token_type_ids"] for sample in samples], 0)
    if "weight" in samples[0]:
        weights = [sample["weight"] for sample in samples]
        batch[ROW_WEIGHTS] = torch.tensor(weights, dtype=torch.float32)
    return batch


def collate_samples(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Collate token ids and, if the samples have them, targets: `labels` (from the column `label`
    or `labels`), `start_positions`, `end_positions`.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        The entries of `collate_ids`, and the targets. Targets that are a number per sample have
        shape (samples,). Those that are a list per sample, with a label per token, are padded with
        -100 to (samples, longest). An empty list becomes one -100, because a decoder derives its
        inputs from the labels and needs at least one position.
    """
    batch = collate_ids(samples, pad_token_id)
    for column in ("label", "labels", "start_positions", "end_positions"):
        if column not in samples[0]:
            continue
        values = [sample[column] for sample in samples]
        if isinstance(values[0], list):
            non_empty_lists = [labels or [IGNORED_LABEL] for labels in values]
            targets = pad(non_empty_lists, IGNORED_LABEL)
        else:
            targets = torch.tensor(values)
        model_argument = "labels" if column == "label" else column
        batch[model_argument] = targets
    return batch


def collate_causal(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Collate token ids and the labels of a causal language model.

    Args:
        samples: The samples of the batch.
        pad_token_id: The id of the padding token.

    Returns:
        The entries of `collate_ids`, and int64 `labels` of shape (samples, longest), not shifted,
        and -100 at padding: the samples' own labels (of completions) or, without them, the token
        ids.
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
        The entries of `collate_ids`, and, if the samples have labels, float32 `labels` of shape
        (samples, num_labels): 1 for each class of the sample, 0 for the others.
    """
    batch = collate_ids(samples, pad_token_id)
    if "label" in samples[0]:
        labels = torch.zeros(len(samples), num_labels)
        for row, sample in zip(labels, samples, strict=True):
            row[sample["label"]] = 1.0
        batch["labels"] = labels
    return batch
