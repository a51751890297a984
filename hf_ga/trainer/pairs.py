"""Preference pairs, as TRL's DPOTrainer collates them: the rows of a batch are all chosen texts,
then all rejected ones.

While a window is split, a sample's two rows must stay together: entries have shape (samples, 2,
...). The model computes them as (2 x samples, ...) with the two rows of a sample next to each
other, where their dropout masks are keyed by sample; the trainer's loss gets them in TRL's order.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.model.forward import Batch


def has_pairs(collate_fn: Callable) -> bool:
    """Return whether the collate function of an `ExactTrainer` is TRL's
    `DataCollatorForPreference`, for pairs of a chosen and a rejected text.

    It is recognized by the name of its class, as TRL may not be installed.

    Args:
        collate_fn: The collate function, possibly in the wrapper by which Trainer removes columns.
    """
    collate_fn = getattr(collate_fn, "data_collator", collate_fn)
    class_names = [base.__name__ for base in type(collate_fn).__mro__]
    return "DataCollatorForPreference" in class_names


def collate_pairs(collate_fn: Callable, samples: list[Any]) -> dict[str, Any]:
    """Collate TRL's preference pairs for an `ExactTrainer`, so that both rows of a pair belong to
    one sample.

    Args:
        collate_fn: TRL's collate function, whose entries have shape (2 x samples, ...): all chosen
            rows, then all rejected rows.
        samples: The pairs.

    Returns:
        The batch with these entries as (samples, 2, ...); other entries are unchanged.
    """
    num_rows = 2 * len(samples)
    batch = {}
    for name, value in collate_fn(samples).items():
        if len(value) == num_rows:
            batch[name] = value.unflatten(0, (2, -1)).transpose(0, 1)
        else:
            batch[name] = value
    return batch


def chosen_first(batch: Batch) -> dict[str, Any]:
    """Undo `collate_pairs`, for the loss of preference pairs of one of TRL's trainers.

    Args:
        batch: A batch whose entries of pairs have shape (samples, 2, sequence length).

    Returns:
        The batch with these entries as (2 x samples, sequence length): all chosen rows, then all
        rejected rows.
    """
    changed = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() == 3:
            changed[name] = value.transpose(0, 1).flatten(0, 1)
    return changed


def forward_of_pairs(model: nn.Module, **batch: Any) -> Any:
    """Run a model's forward on the preference pairs of TRL's DPOTrainer, with the two rows of each
    pair next to each other, as hf_ga's keyed dropout needs them.

    Args:
        model: The model.
        **batch: The model's arguments: all chosen rows, then all rejected rows.

    Returns:
        The model's outputs, changed in place: the rows in the order of the arguments.
    """
    num_rows = len(batch["input_ids"])
    order = torch.arange(num_rows).view(2, -1).mT.flatten()  # the rows of a pair together

    def in_order(values: Mapping, order: Tensor) -> dict[str, Any]:
        """Return the tensors with a row for each row of the batch, with their rows in an order."""
        return {
            name: value[order]
            for name, value in values.items()
            if isinstance(value, Tensor) and value.dim() and len(value) == num_rows
        }

    outputs = model(**{**batch, **in_order(batch, order)})
    for name, value in in_order(outputs, order.argsort()).items():
        outputs[name] = value
    return outputs
