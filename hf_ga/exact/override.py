"""Other attributes of an object for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    missing = object()
    own = vars(target)
    before = {name: own.get(name, missing) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(target, name)
            else:
                setattr(target, name, value)
