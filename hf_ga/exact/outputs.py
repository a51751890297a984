"""The tensors among what a model returns: by name, and put back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def named_tensors(outputs: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors in outputs, by name.

    Args:
        outputs: A tensor, or nested mappings (also of transformers), lists and tuples of them.
        name: Of the outputs themselves.

    >>> list(named_tensors({"a": Tensor([1.0]), "b": (Tensor([2.0]), None)}))
    ['a', 'b.0']
    """
    if isinstance(outputs, Tensor):
        return {name or "output": outputs}
    found: dict[str, Tensor] = {}
    for key, value in _items(outputs):
        found |= named_tensors(value, f"{name}.{key}" if name else str(key))
    return found


def plain_values(outputs: Any) -> list[Any]:
    """List what is no tensor in outputs, such as numbers.

    Args:
        outputs: See `named_tensors`.

    >>> plain_values({"a": Tensor([1.0]), "b": (2.0, None)})
    [2.0, None]
    """
    if isinstance(outputs, Tensor):
        return []
    if isinstance(outputs, Mapping | list | tuple):
        return [plain for _, value in _items(outputs) for plain in plain_values(value)]
    return [outputs]


def with_tensors(outputs: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """Return outputs of the same kind with other tensors.

    Args:
        outputs: See `named_tensors`.
        tensors: By the names that `named_tensors` gives. None takes the place of the others.
        name: Of the outputs themselves.
    """
    if isinstance(outputs, Tensor):
        return tensors.get(name or "output")
    replaced = {
        key: with_tensors(value, tensors, f"{name}.{key}" if name else str(key))
        for key, value in _items(outputs)
    }
    if isinstance(outputs, Mapping):
        return type(outputs)(**replaced) if hasattr(outputs, "to_tuple") else replaced
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*replaced.values())
    return type(outputs)(replaced.values()) if replaced else outputs


def _items(outputs: Any) -> list[tuple[Any, Any]]:
    if isinstance(outputs, Mapping):
        return list(outputs.items())
    if isinstance(outputs, list | tuple):
        return list(enumerate(outputs))
    return []
