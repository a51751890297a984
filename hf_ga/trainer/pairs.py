"""Preference pairs, as TRL's DPOTrainer collates them: the rows of a batch are all chosen texts,
then all rejected ones.

While a window is split, a sample's two rows must stay together: entries have shape (samples, 2,
...). The model computes them as (2 samples, ...) with the rows of a sample side by side, where
their dropout masks are keyed; the trainer's loss sees its own order.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hf_ga.exact.batches import Batch


def has_pairs(collate_fn: Callable) -> bool:
    """Whether a collate function is TRL's for preference pairs.

    It is known by its name, as TRL may not be installed.
    """
    # Inside of Trainer's wrapper that removes columns.
    collate_fn = getattr(collate_fn, "data_collator", collate_fn)
    return any(kind.__name__ == "DataCollatorForPreference" for kind in type(collate_fn).__mro__)


def collate_pairs(collate_fn: Callable, samples: list[Any]) -> dict[str, Any]:
    """Collate, with entries of shape (2 samples, ...), chosen first, as (samples, 2, ...)."""
    num_rows = 2 * len(samples)
    batch = {}
    for name, value in collate_fn(samples).items():
        is_of_pairs = len(value) == num_rows
        batch[name] = value.unflatten(0, (2, -1)).transpose(0, 1) if is_of_pairs else value
    return batch


def chosen_first(batch: Batch) -> dict[str, Any]:
    """Undo `collate_pairs`: give entries of shape (samples, 2, width) as (2 samples, width), chosen
    first.
    """
    changed = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() == 3:
            changed[name] = value.transpose(0, 1).flatten(0, 1)
    return changed


def forward_of_pairs(model: nn.Module, **batch: Any) -> Any:
    """Compute the model's outputs for rows with chosen first, with the rows of a sample side by
    side in the forward.
    """
    num_rows = len(batch["input_ids"])

    def reordered(values: Mapping, shape: tuple[int, int]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == num_rows:
                found[name] = value.unflatten(0, shape).transpose(0, 1).flatten(0, 1)
        return found

    outputs = model(**{**batch, **reordered(batch, (2, -1))})
    for name, value in reordered(outputs, (-1, 2)).items():
        outputs[name] = value
    return outputs
