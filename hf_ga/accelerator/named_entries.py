"""Converts batches of any type to flat dicts, and back to what the user's loop expects."""

import copy
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from hf_ga.draws.generators import preserved_random_states, seed_generators
from hf_ga.errors import ConfigError
from hf_ga.loading.fetch import Collate
from hf_ga.loading.window import Window

SEPARATOR = "/"  # between the names of nested entries


class DictCollator:
    """A collate function that always returns a flat dict, whatever the user's function returns.

    A mapping becomes a dict, a tuple or list becomes {"0": ..., "1": ...}, and a single tensor
    {"0": ...}. Nested containers of tensors are flattened: {"inputs": {"ids": x}} becomes
    {"inputs/ids": x}. Lists of strings or numbers, and those with one value for each sample, are
    entries; a batch that is one has the name "". `restore` is the reverse.

    Args:
        collate_fn: The user's collate function.
    """

    def __init__(self, collate_fn: Collate) -> None:
        """Wrap the collate function of the DataLoader of a user's loop."""
        self.collate_fn = collate_fn
        self._lists: set[str] | None = None  # with one value for each sample

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collate samples by the user's collate function, and flatten the batch."""
        first = copy.copy(samples[0])  # the collate function may remove items from it
        collated = self.collate_fn(samples)
        if self._lists is None:
            self._lists = self._find_lists(first) if _sizes(collated) else set()
        return _flat_entries(collated, self._lists)

    def _find_lists(self, sample: Any) -> set[str]:
        """Return the names of lists with as many values as a batch has copies of a sample."""
        lists = []
        with preserved_random_states(), suppress(Exception):  # a batch that may need other samples
            for number in (2, 3):
                seed_generators(0)
                batch = self.collate_fn([copy.copy(sample) for _ in range(number)])
                lists.append({name for name, size in _sizes(batch) if size == number})
        return set.intersection(*lists) if len(lists) == 2 else set()

    def example(self, dataset: Any) -> Any:
        """Return the user's batch of the first sample of a dataset, for the type of batches.

        All random generators are restored afterwards.

        Args:
            dataset: A map-style or iterable dataset.
        """
        with preserved_random_states():
            seed_generators(0)
            is_stream = isinstance(dataset, IterableDataset)
            sample = next(iter(dataset)) if is_stream else dataset[0]
            return self.collate_fn([copy.copy(sample)])

    @staticmethod
    def restore(entries: dict[str, Any], example: Any) -> Any:
        """Convert a flat dict back to the type that the user's collate function returns.

        Args:
            entries: The flat dict.
            example: A batch that the user's collate function returned.
        """
        if "" in entries:
            return entries[""]
        is_single = not isinstance(example, Mapping | tuple | list)
        return entries["0"] if is_single else _nested(entries, example)


def _is_container(value: Any) -> bool:
    """Whether a value is a mapping, tuple or list that holds tensors, at any depth."""
    if not isinstance(value, Mapping | tuple | list):
        return False
    values = value.values() if isinstance(value, Mapping) else value
    return any(isinstance(inner, Tensor) or _is_container(inner) for inner in values)


def _items(container: Any) -> list[tuple[str, Any]]:
    """Return the named values of a mapping, tuple or list."""
    if isinstance(container, Mapping):
        return [(str(name), value) for name, value in container.items()]
    return [(str(index), value) for index, value in enumerate(container)]


def _sizes(container: Any, name: str = "") -> list[tuple[str, int]]:
    """Return the names and sizes of the lists that hold tensors in a batch, at any depth."""
    if not _is_container(container):
        return []
    sizes = [(name, len(container))] if isinstance(container, tuple | list) else []
    for inner_name, value in _items(container):
        sizes += _sizes(value, f"{name}{SEPARATOR}{inner_name}" if name else inner_name)
    return sizes


def _flat_entries(collated: Any, lists: Set[str]) -> dict[str, Any]:
    """Return the entries of a batch. Those with the names `lists` are not flattened."""
    if not isinstance(collated, Mapping | tuple | list):
        return {"0": collated}
    if "" in lists:
        return {"": collated}
    entries: dict[str, Any] = {}
    for name, value in _items(collated):
        entries.update(_flat(value, name, lists))
    return entries


def _flat(value: Any, name: str, lists: Set[str]) -> dict[str, Any]:
    """Return the entries of a value with this name."""
    if not _is_container(value) or name in lists:
        return {name: value}
    entries: dict[str, Any] = {}
    for inner_name, inner in _items(value):
        entries.update(_flat(inner, f"{name}{SEPARATOR}{inner_name}", lists))
    return entries


def _nested(entries: dict[str, Any], example: Any) -> Any:
    """Put entries together to a container of the type of an example."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in entries.items():
        outer, _, inner = name.partition(SEPARATOR)
        grouped.setdefault(outer, {})[inner] = value
    examples = dict(_items(example))
    # A list with one value for each sample has as many as the batch, those of an example fewer.
    of_others = {} if isinstance(example, Mapping) else examples.get("0", {})
    values = {}
    for outer, inner_entries in grouped.items():
        is_leaf = "" in inner_entries
        values[outer] = (
            inner_entries[""] if is_leaf else _nested(inner_entries, examples.get(outer, of_others))
        )
    container_type = type(example)
    if isinstance(example, Mapping):
        return values if container_type is dict else container_type(values)
    if hasattr(container_type, "_fields"):  # a named tuple
        return container_type(*values.values())
    return container_type(values.values())


def check_named_entries(window: Window) -> None:
    """Check that the user's batches are mappings of the model's arguments.

    Raises:
        ConfigError: If they are tuples, tensors, or nested.
    """
    # `DictCollator` names the entries of a tuple "0", "1", and those of containers "outer/inner".
    names = [name for batch in window.batches for name in batch]
    if any(name in ("", "0") or SEPARATOR in name for name in names):
        raise ConfigError(
            "whole_batch needs batches with named entries, as hf_ga calls the model with them "
            "once more: let the collate function return a dict, and call model(**batch)."
        )
