"""Context managers that change an object's attributes or a mapping temporarily."""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

# (object, name of its attribute, temporary value)
Replacement = tuple[Any, str, Any]
MISSING = object()  # marks an attribute that the object itself did not have


def override(target: Any, **attributes: Any) -> AbstractContextManager[None]:
    """Set attributes of an object temporarily, for the duration of the `with` block.

    Used to patch a model or a library while a window is computed. On exit, every attribute gets its
    previous value back. An attribute that was not in the object's own `__dict__` is deleted again,
    so that lookups find the attribute of its class as before.

    Args:
        target: A module, a class or an instance.
        attributes: Names and temporary values.

    Example:
        with override(trainer.args, gradient_accumulation_steps=1):
            ...
    """
    return replaced([(target, name, value) for name, value in attributes.items()])


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Set attributes of several objects temporarily, as `override` does for one."""
    previous = [(target, name, vars(target).get(name, MISSING)) for target, name, _ in replacements]
    try:
        _set_all(replacements)
        yield
    finally:
        _set_all(previous[::-1])


def _set_all(replacements: Sequence[Replacement]) -> None:
    """Set attributes, or delete those whose value is `MISSING`."""
    for target, name, value in replacements:
        if value is MISSING:
            if name in vars(target):
                delattr(target, name)
        elif isinstance(target, nn.Module):  # torch would look among parameters and buffers first
            vars(target)[name] = value
        else:
            setattr(target, name, value)


@contextmanager
def restored(mapping: MutableMapping) -> Iterator[None]:
    """Restore all entries of a mapping when the `with` block ends, whatever the block changed, as
    `override` does for the attributes of an object.

    Args:
        mapping: For example `os.environ`. It is restored in place.
    """
    previous_entries = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(previous_entries)
