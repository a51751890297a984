"""Samples -> arguments of the model: right-padded int64 tensors, samples on the first axis. Padding
is never a target.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.finetuning.data.masking import mask_tokens

Samples = Sequence[dict[str, Any]]
ROW_WEIGHTS = "row_weights"  # the entry of a batch


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Right-pad lists of integers. Returns int64 of shape (rows, longest)."""
    return pad_sequence(
        [torch.as_tensor(row, dtype=torch.int64) for row in rows],
        batch_first=True,
        padding_value=value,
    )


def collate_ids(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and, if the samples have them, `token_type_ids`, each of shape
    (samples, longest), and `row_weights`, float32 of shape (samples,).
    """
    rows = [sample["input_ids"] for sample in samples]
    batch = {
        "input_ids": pad(rows, pad_token_id),
        "attention_mask": pad([[1] * len(row) for row in rows], 0),
    }
    if "token_type_ids" in samples[0]:
        batch["token_type_ids"] = pad([sample["token_type_ids"] for sample in samples], 0)
    if "weight" in samples[0]:
        weights = [sample["weight"] for sample in samples]
        batch[ROW_WEIGHTS] = torch.tensor(weights, dtype=torch.float32)
    return batch


def collate_samples(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Ids and, if the samples have them, targets: `labels` (of a column `label` or `labels`),
    `start_positions`, `end_positions`.

    Numbers have the shape (samples,). Lists, a target per token, are padded with -100 to (samples,
    longest); to one position if no sample has a target, which a decoder needs (it derives its
    inputs from the labels).
    """
    batch = collate_ids(samples, pad_token_id)
    for column in ("label", "labels", "start_positions", "end_positions"):
        if column in samples[0]:
            values = [sample[column] for sample in samples]
            per_token = isinstance(values[0], list)
            targets = (
                pad([row or [IGNORED_LABEL] for row in values], IGNORED_LABEL)
                if per_token
                else torch.tensor(values)
            )
            batch["labels" if column == "label" else column] = targets
    return batch


def collate_causal(samples: Samples, pad_token_id: int) -> dict[str, Tensor]:
    """Ids and `labels` of shape (samples, longest): the samples' labels (completions) or, without
    them, the ids.
    """
    batch = collate_ids(samples, pad_token_id)
    if "labels" in samples[0]:
        return {**batch, "labels": pad([sample["labels"] for sample in samples], IGNORED_LABEL)}
    return {
        **batch,
        "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL),
    }


def collate_masked(
    samples: Samples,
    pad_token_id: int,
    special_ids: Sequence[int],
    mask_token_id: int,
    vocab_size: int,
    probability: float,
) -> dict[str, Tensor]:
    """Masked ids, and `labels` of shape (samples, longest): the original ids of the targets. See
    `masking`.
    """
    batch = collate_ids(samples, pad_token_id)
    inputs, labels = mask_tokens(
        batch["input_ids"].numpy(),
        np.array([sample["mask_key"] for sample in samples]),
        special_ids=[*special_ids, pad_token_id],  # so padding is never a target
        mask_token_id=mask_token_id,
        vocab_size=vocab_size,
        probability=probability,
    )
    return {**batch, "input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def collate_label_sets(samples: Samples, pad_token_id: int, num_labels: int) -> dict[str, Tensor]:
    """Ids and, if the samples have labels (lists of class ids), float32 `labels` of shape (samples,
    num_labels): 0 or 1.
    """
    batch = collate_ids(samples, pad_token_id)
    if "label" in samples[0]:
        chosen = [torch.tensor(sample["label"], dtype=torch.int64) for sample in samples]
        batch["labels"] = torch.stack(
            [torch.zeros(num_labels).index_fill(0, ids, 1.0) for ids in chosen]
        )
    return batch
