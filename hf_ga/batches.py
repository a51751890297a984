"""Small helpers on samples and on what a collate function returns."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = Mapping[str, Any]
IGNORED_LABEL = -100  # the label that torch's cross entropy leaves out


def sample_length(sample: Any) -> int:
    """The longest list, array or vector in a sample (tokens, usually); 1 if it holds numbers only."""
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((len(v) for v in values if isinstance(v, Sized) and not isinstance(v, str) and _has_length(v)), default=1)


def take_rows(batch: Batch, rows: Sequence[int] | np.ndarray, num_samples: int) -> dict[str, Any]:
    """The given samples of a collated batch of `num_samples`: every tensor, array and list with one entry a sample is indexed."""
    index = torch.as_tensor(np.asarray(rows))
    taken = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == num_samples:
            taken[name] = value[index]
        elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_samples:
            taken[name] = value[index.numpy()]
        elif isinstance(value, list | tuple) and len(value) == num_samples:
            taken[name] = [value[int(row)] for row in rows]
        else:
            taken[name] = value
    return taken


def same_shapes(batch: Batch, other: Batch) -> bool:
    """Whether all tensors of two batches agree in shape."""
    return all(not isinstance(v, Tensor) or v.shape == other[name].shape for name, v in batch.items())


def equal_batches(batch: Batch, other: Batch) -> bool:
    """Whether two batches hold the same values."""
    return batch.keys() == other.keys() and all(
        torch.equal(v, other[name]) if isinstance(v, Tensor) else np.array_equal(v, other[name]) for name, v in batch.items()
    )


def count_tokens(batch: Batch, num_samples: int) -> int:
    """Real tokens of a batch: the sum of `attention_mask`, else the elements of `input_ids`, else the samples."""
    if isinstance(mask := batch.get("attention_mask"), Tensor):
        return int(mask.sum())
    if isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    return num_samples


def _has_length(value: Any) -> bool:
    return not (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)
