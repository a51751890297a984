"""Files and folders that are there whole or not at all: written beside, flushed to the disk, renamed.

While something is written its name begins with `partial-` (folders) or ends in `.partial` (files). A folder that makes way for a
new one of its name is called `replaced-...` until the new one is there. `tidy` sees to what a crash leaves of either.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

PARTIAL, REPLACED, SUFFIX = "partial-", "replaced-", ".partial"


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """`flush` for a folder and all that is in it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, to stay after a loss of power, too."""
    beside = path.with_name(path.name + SUFFIX)
    beside.write_text(text, encoding="utf-8")
    flush(beside)
    beside.replace(path)
    flush(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def partial_of(final: Path) -> Path:
    """Where the folder `final` is written before it gets its name."""
    return final.with_name(PARTIAL + final.name)


def new_partial(final: Path) -> Path:
    """`partial_of`, made, and empty."""
    partial = partial_of(final)
    delete(partial)
    partial.mkdir(parents=True)
    return partial


def publish(final: Path) -> None:
    """Give what lies in `partial_of(final)` its name, in place of what had that name before."""
    partial, replaced = partial_of(final), final.with_name(REPLACED + final.name)
    flush_tree(partial)
    if final.exists():  # no folder can be renamed onto one that is not empty
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    delete(replaced)


def delete(path: Path) -> None:
    """Delete a file, a folder, or a link to one (a checkpoint may lie on another disk); nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder. A crash meanwhile leaves no half of it under its name."""
    partial = partial_of(folder)
    delete(partial)
    folder.rename(partial)
    delete(partial)


def restore(folder: Path) -> None:
    """Give back their names to folders in `folder` that a crash left `replaced-`, with nothing in their place."""
    for replaced in folder.glob(REPLACED + "*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if not final.exists():
            replaced.rename(final)


def tidy(folder: Path) -> None:
    """Delete what crashes left in `folder` half written or replaced, after `restore`."""
    restore(folder)
    for path in (*folder.glob(PARTIAL + "*"), *folder.glob(REPLACED + "*"), *folder.glob("*" + SUFFIX)):
        delete(path)
