"""Change attributes of an object, or a mapping, for a while."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

MISSING = object()


@contextmanager
def override(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object (a module, a class, an instance) within the block.

    At the end they are as before: an attribute that the object did not have itself is removed, so
    that its class's is seen again.

    Args:
        target: The object.
        attributes: Names and temporary values.

    Example:
        with override(trainer.args, gradient_accumulation_steps=1):
            ...
    """
    before = {name: vars(target).get(name, MISSING) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is MISSING:
                delattr(target, name)
            else:
                setattr(target, name, value)


@contextmanager
def restored(mapping: MutableMapping) -> Iterator[None]:
    """Give a mapping its entries back at the end of the block.

    Args:
        mapping: The block may change it: `os.environ`, for example.
    """
    before = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(before)
