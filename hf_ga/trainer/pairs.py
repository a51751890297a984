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
    """Whether a collate function is TRL's for preference pairs (by its name: TRL may not be
    installed).
    """
    collate_fn = getattr(
        collate_fn, "data_collator", collate_fn
    )  # Trainer's wrapper that removes columns
    return any(kind.__name__ == "DataCollatorForPreference" for kind in type(collate_fn).__mro__)


def collate_pairs(collate_fn: Callable, samples: list[Any]) -> dict[str, Any]:
    """The batch with entries of shape (2 samples, ...), chosen first, as (samples, 2, ...)."""
    halves = 2 * len(samples)
    return {
        k: v.unflatten(0, (2, -1)).transpose(0, 1) if len(v) == halves else v
        for k, v in collate_fn(samples).items()
    }


def chosen_first(batch: Batch) -> dict[str, Any]:
    """Undoes `collate_pairs`: entries of shape (samples, 2, width) as (2 samples, width), chosen
    first.
    """
    return {
        k: v.transpose(0, 1).flatten(0, 1) if isinstance(v, Tensor) and v.dim() == 3 else v
        for k, v in batch.items()
    }


def forward_of_pairs(model: nn.Module, **batch: Any) -> Any:
    """The model's outputs for rows with chosen first, computed with the rows of a sample side by
    side.
    """
    rows = len(batch["input_ids"])

    def reordered(values: Mapping, shape: tuple[int, int]) -> dict[str, Any]:
        whole = {
            k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() and len(v) == rows
        }
        return {k: v.unflatten(0, shape).transpose(0, 1).flatten(0, 1) for k, v in whole.items()}

    outputs = model(**{**batch, **reordered(batch, (2, -1))})
    for name, value in reordered(outputs, (-1, 2)).items():
        outputs[name] = value
    return outputs
