"""A real limit of the operating system on the size of files, from a given call of a given function
on: a disk that is full.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def limit_files(size: int) -> None:
    """No file can grow beyond `size` bytes; -1: no limit. Python ignores the signal, so writes fail
    with EFBIG.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def limit_at(owner: Any, name: str, call: int, size: int) -> Iterator[None]:
    """In this block the limit holds from the given call of `owner.name` on."""
    original = getattr(owner, name)
    count = 0

    def limited(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            limit_files(size)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, limited)
        try:
            yield
        finally:
            limit_files(-1)
