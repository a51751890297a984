"""Converts batches of any type to dicts, and back to the type that the user's loop expects."""

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from hf_ga.exact.fetch import Collate
from hf_ga.exact.generators import preserved_random_states, seed_generators


class DictCollator:
    """A collate function that always returns a dict, whatever the user's collate function returns.

    It is used for the DataLoaders of a user's loop with `hf_ga.Accelerator`. A mapping becomes a
    plain dict, a tuple or list becomes {"0": ..., "1": ...}, and a single tensor {"0": ...}.
    `restore` converts a dict back to the user's type.

    Args:
        collate_fn: The user's collate function.
    """

    def __init__(self, collate_fn: Collate) -> None:
        """Wrap the collate function of the DataLoader of a user's loop."""
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collate samples by the collate function of a user's loader, and convert the batch to a
        dict: ("a", "b") becomes {"0": "a", "1": "b"}.
        """
        collated = self.collate_fn(samples)
        if isinstance(collated, Mapping):
            return dict(collated)
        entries = collated if isinstance(collated, tuple | list) else (collated,)
        return {str(index): entry for index, entry in enumerate(entries)}

    def find_batch_type(self, dataset: Any) -> type:
        """Return the type of batch that the user's collate function returns, and that the user's
        loop therefore expects from the prepared loader.

        The function is called on the first sample of the dataset; all random generators are
        restored afterwards.

        Args:
            dataset: A map-style or iterable dataset.
        """
        with preserved_random_states():
            seed_generators(0)
            is_stream = isinstance(dataset, IterableDataset)
            sample = next(iter(dataset)) if is_stream else dataset[0]
            batch = self.collate_fn([copy.copy(sample)])
            return type(batch)

    @staticmethod
    def restore(batch: dict[str, Any], batch_type: type) -> Any:
        """Convert a batch as a dict back to the type that the user's collate function returns, for
        the user's loop: {"0": "a", "1": "b"} to ("a", "b").

        Args:
            batch: A batch as a dict; it is copied, as the user's loop may remove entries.
            batch_type: The type: a mapping, a tuple or named tuple, a list, or any other for a
                batch of one entry.

        Returns:
            The batch in that type.
        """
        batch = dict(batch)
        if batch_type is dict:
            return batch
        if issubclass(batch_type, Mapping):
            return batch_type(batch)
        is_named_tuple = issubclass(batch_type, tuple) and hasattr(batch_type, "_fields")
        if is_named_tuple:
            return batch_type(*batch.values())
        if issubclass(batch_type, tuple | list):
            return batch_type(batch.values())
        return batch["0"]
