"""The tensors in the nested outputs of a model: list them by name, and replace them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def named_tensors(outputs: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors in a model's nested outputs by name: the keys and indices on the way to
    the tensor, joined with dots. A loss of a whole window joins the outputs of its micro-batches by
    these names.

    Args:
        outputs: A tensor, or nested mappings (also ModelOutput of transformers), lists and tuples
            of tensors and other values. Other values are skipped.
        name: Prefix of the names; for the recursion. A tensor without a name is called "output".

    >>> list(named_tensors({"a": Tensor([1.0]), "b": (Tensor([2.0]), None)}))
    ['a', 'b.0']
    """
    if isinstance(outputs, Tensor):
        return {name or "output": outputs}
    found: dict[str, Tensor] = {}
    for key, value in _items(outputs):
        found |= named_tensors(value, f"{name}.{key}" if name else str(key))
    return found


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or the results of a function, also in lists, tuples and
    dicts; in a fraction of the time that `named_tensors` takes for long lists of numbers.

    Args:
        values: The arguments, or the result in a list.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(list(value.values()))


def non_tensor_values(outputs: Any) -> list[Any]:
    """Return the values in a model's nested outputs that are not tensors, such as numbers and None,
    in their order. For a loss of a whole window, they must be the same in all micro-batches.

    Args:
        outputs: See `named_tensors`.

    >>> non_tensor_values({"a": Tensor([1.0]), "b": (2.0, None)})
    [2.0, None]
    """
    if isinstance(outputs, Tensor):
        return []
    if isinstance(outputs, Mapping | list | tuple):
        return [plain for _, value in _items(outputs) for plain in non_tensor_values(value)]
    return [outputs]


def with_tensors(outputs: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """Return a copy of a model's nested outputs in which every tensor is replaced: those of a
    micro-batch by those of all samples, for a loss of the whole window.

    Args:
        outputs: See `named_tensors`.
        tensors: The new tensors by the names that `named_tensors` returns. A tensor without a new
            one is replaced by None.
        name: Prefix of the names; for the recursion.
    """
    if isinstance(outputs, Tensor):
        return tensors.get(name or "output")
    replaced = {
        key: with_tensors(value, tensors, f"{name}.{key}" if name else str(key))
        for key, value in _items(outputs)
    }
    if isinstance(outputs, Mapping):
        is_model_output = hasattr(outputs, "to_tuple")  # of transformers
        return type(outputs)(**replaced) if is_model_output else replaced
    is_named_tuple = isinstance(outputs, tuple) and hasattr(outputs, "_fields")
    if is_named_tuple:
        return type(outputs)(*replaced.values())
    return type(outputs)(replaced.values()) if replaced else outputs


def _items(outputs: Any) -> list[tuple[Any, Any]]:
    """Return the items on one level of a model's nested outputs: the (key, value) pairs of a
    mapping, the (index, value) pairs of a list or tuple, and [] for anything else.
    """
    if isinstance(outputs, Mapping):
        return list(outputs.items())
    if isinstance(outputs, list | tuple):
        return list(enumerate(outputs))
    return []
