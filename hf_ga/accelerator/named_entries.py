"""Batches of any type as dicts of named entries, and back."""

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from hf_ga.exact.fetch import Collate
from hf_ga.exact.generators import preserved_random_states, seed_generators


class NamedEntries:
    """A collate function that returns a dict, whatever the user's returns.

    A tuple or list becomes {"0": ..., "1": ...}, a single tensor {"0": ...}; `restore` gives the
    user's own type back.

    Args:
        collate_fn: The user's.
    """

    def __init__(self, collate_fn: Collate) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        collated = self.collate_fn(samples)
        if isinstance(collated, Mapping):
            return dict(collated)
        entries = collated if isinstance(collated, tuple | list) else (collated,)
        return {str(i): entry for i, entry in enumerate(entries)}

    def find_type(self, dataset: Any) -> type:
        """Return the type that the user's function returns, found on one sample."""
        with preserved_random_states():
            seed_generators(0)
            is_stream = isinstance(dataset, IterableDataset)
            sample = next(iter(dataset)) if is_stream else dataset[0]
            return type(self.collate_fn([copy.copy(sample)]))

    @staticmethod
    def restore(batch: dict[str, Any], kind: type) -> Any:
        """Convert a batch to the type that the user's collate function returns."""
        batch = dict(batch)  # a loop may take entries out
        if kind is dict:
            return batch
        if issubclass(kind, Mapping):
            return kind(batch)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return kind(*batch.values())
        if issubclass(kind, tuple | list):
            return kind(batch.values())
        return batch["0"]
