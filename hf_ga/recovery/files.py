"""Atomic files and folders: written under a temporary name, flushed to disk, renamed.

Temporary names begin with `partial-` (folders) or end in `.partial` (files). A folder being
replaced is renamed to `replaced-...` until the new one has its name. `tidy` removes what a crash
leaves. `writing` gives one clear error for a full disk, a quota or a read-only folder, instead of
each library's own.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from hf_ga.errors import CheckpointError, HfGaError

PARTIAL = "partial-"  # + name: a folder that is being written or deleted
REPLACED = "replaced-"  # + name: a folder that another is about to replace
SUFFIX = ".partial"  # of a file that is being written


def flush(path: Path) -> None:
    """Call fsync on a file, or on a folder for the names of its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Call `flush` on a folder and all its contents."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and durably (it survives a power loss)."""
    beside = path.with_name(path.name + SUFFIX)
    beside.write_text(text, encoding="utf-8")
    flush(beside)
    beside.replace(path)
    flush(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def partial_of(final: Path) -> Path:
    """Return the temporary path of the folder `final`."""
    return final.with_name(PARTIAL + final.name)


def new_partial(final: Path) -> Path:
    """Create `partial_of(final)` as an empty folder."""
    partial = partial_of(final)
    delete(partial)
    partial.mkdir(parents=True)
    return partial


def publish(final: Path) -> None:
    """Rename `partial_of(final)` to `final`, replacing an existing folder."""
    partial = partial_of(final)
    replaced = final.with_name(REPLACED + final.name)
    flush_tree(partial)
    # A folder cannot be renamed to the name of one that is not empty.
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    delete(replaced)


def delete(path: Path) -> None:
    """Delete a file, a folder, or a link (a checkpoint may be on another disk), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder atomically: a crash leaves no partial folder under its name."""
    partial = partial_of(folder)
    delete(partial)
    folder.rename(partial)
    delete(partial)


def restore(folder: Path) -> None:
    """Restore the names of `replaced-` folders that a crash left without a replacement."""
    for replaced in folder.glob(REPLACED + "*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if not final.exists():
            replaced.rename(final)


def tidy(folder: Path) -> None:
    """Remove what crashes left in a folder: restore replaced folders, then delete partial and
    replaced files and folders.
    """
    restore(folder)
    for pattern in (PARTIAL + "*", REPLACED + "*", "*" + SUFFIX):
        for path in list(folder.glob(pattern)):
            delete(path)


@contextmanager
def writing(path: Path, output_dir: Path) -> Iterator[None]:
    """Turn the errors with which a library reports a failed write into one clear error.

    Args:
        path: What the block writes.
        output_dir: The folder of the run.

    Raises:
        CheckpointError: If the system refused to write. Other errors are raised unchanged.
    """
    try:
        yield
    except HfGaError:
        raise
    # CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        # torch.save raises a RuntimeError while it handles the OSError.
        if isinstance(error.__context__, OSError):
            cause = error.__context__
        if not _is_refused_write(cause):
            raise
        reason = getattr(cause, "strerror", None)
        if not reason:
            reason = str(cause).strip().splitlines()[-1]
        raise CheckpointError(
            f"cannot write {path}: {reason}. The files in {output_dir} are kept: free disk space "
            "or change the permissions, then use --resume_from_checkpoint auto."
        ) from error


def _is_refused_write(error: BaseException) -> bool:
    """Whether an error says that the system refused to write."""
    if isinstance(error, OSError | SafetensorError | CheckpointException):
        return True
    # The tokenizers library raises a plain Exception with the text of the system's error.
    return "(os error " in str(error)


@contextmanager
def filling(final: Path, names: Path | None = None) -> Iterator[Path]:
    """Create `partial_of(final)` for the block to fill, then rename it to `final`. If writing
    fails, delete it.

    Args:
        final: The folder to write.
        names: The path that the error message names. Default: `final`.

    Yields:
        The temporary folder.

    Raises:
        CheckpointError: See `writing`.
    """
    with writing(names or final, final.parent):
        partial = new_partial(final)
        try:
            yield partial
        except BaseException:
            # It may be all that fills the disk.
            shutil.rmtree(partial, ignore_errors=True)
            raise
