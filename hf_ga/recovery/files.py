"""Atomic files and folders: written under a temporary name, flushed to disk, renamed.

Temporary names begin with `partial-` (folders) or end in `.partial` (files). A folder that is being
replaced is renamed to `replaced-...` until the new one has its name. `tidy` removes what a crash
leaves behind. `writing` raises one clear error for a full disk, a quota or a read-only folder, in
place of the various errors of the libraries that write files.
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
    """Flush a file of a checkpoint to the disk (fsync), so that its content survives a power loss.
    For a folder, this flushes the names of its files: new and renamed ones.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush a folder (a checkpoint, a saved model) and everything in it, recursively, to the disk
    (fsync), so that it survives a power loss.
    """
    for path in (*folder.rglob("*"), folder):
        flush(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file (of a run's output folder, for example) atomically and durably: after a
    crash or power loss it has either its old or its new content.
    """
    temporary = path.with_name(path.name + SUFFIX)
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write values as an indented JSON file, atomically and durably: after a crash it has either
    its old or its new content.
    """
    write_text(path, json.dumps(values, indent=2) + "\n")


def partial_of(final: Path) -> Path:
    """Return the temporary path under which the folder `final` (a checkpoint, for example) is
    written, in the same parent folder.

    >>> partial_of(Path("outputs/checkpoint-50")).name
    'partial-checkpoint-50'
    """
    return final.with_name(PARTIAL + final.name)


def new_partial(final: Path) -> Path:
    """Create the empty temporary folder under which the folder `final` (a checkpoint, for example)
    will be written, `partial_of(final)`, and return its path. Deletes an earlier one that a crash
    left behind.
    """
    partial = partial_of(final)
    delete(partial)
    partial.mkdir(parents=True)
    return partial


def publish(final: Path) -> None:
    """Give a completely written folder, such as a checkpoint, its final name: flush the temporary
    folder `partial_of(final)` to the disk and rename it to `final`, replacing an existing folder.

    A crash leaves the old or the new folder, never a mixture; `restore` undoes a replacement that a
    crash interrupted.
    """
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
    """Delete a folder (a checkpoint) atomically: it is renamed to a temporary name first, so that a
    crash never leaves a half-deleted checkpoint under its own name.
    """
    partial = partial_of(folder)
    delete(partial)
    folder.rename(partial)
    delete(partial)


def restore(folder: Path) -> None:
    """Undo the replacements of checkpoints in a run's output folder that a crash interrupted: each
    `replaced-<name>` for which there is no new `<name>` gets its own name again.
    """
    for replaced in folder.glob(REPLACED + "*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if not final.exists():
            replaced.rename(final)


def tidy(folder: Path) -> None:
    """Clean up what crashes left in a run's output folder: undo interrupted replacements of
    checkpoints (`restore`), then delete all temporary files and folders in it.
    """
    restore(folder)
    for pattern in (PARTIAL + "*", REPLACED + "*", "*" + SUFFIX):
        for path in list(folder.glob(pattern)):
            delete(path)


@contextmanager
def writing(
    path: Path, output_dir: Path, then: str = "use --resume_from_checkpoint auto"
) -> Iterator[None]:
    """Raise one clear error if the block cannot write (a full disk, a quota, missing permissions),
    in place of the various errors with which libraries report that.

    Args:
        path: The file or folder that the block writes, for the message.
        output_dir: The output folder of the run, for the message.
        then: What to do when there is space again, for the message.

    Raises:
        CheckpointError: If the operating system refused to write. Other errors are raised
            unchanged.
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
        if _is_cut_short(cause):
            reason = "torch.save could write a part only, as on a full disk"
        elif not reason:
            reason = str(cause).strip().splitlines()[-1]
        raise CheckpointError(
            f"cannot write {path}: {reason}. The files in {output_dir} are kept: free disk space "
            f"or change the permissions, then {then}."
        ) from error


def _is_refused_write(error: BaseException) -> bool:
    """Whether an error of a library that writes a checkpoint or a model means that the operating
    system refused to write (a full disk, a quota, missing permissions).
    """
    if isinstance(error, OSError | SafetensorError | CheckpointException):
        return True
    # The tokenizers library raises a plain Exception whose text contains the system's error.
    return "(os error " in str(error) or _is_cut_short(error)


def _is_cut_short(error: BaseException) -> bool:
    """Whether an error is that of torch.save's writer, in C++, for a write that came to less than
    all bytes: it does not name the system's error.
    """
    return isinstance(error, RuntimeError) and (
        "inline_container.cc" in str(error) or "iostream error" in str(error)
    )


@contextmanager
def partial_folder(final: Path, path_in_error: Path | None = None) -> Iterator[Path]:
    """Create an empty temporary folder for the block to write into (a saved model, for example),
    and delete it if the block raises. At its end the block gives the folder its final name, with
    `publish(final)`, or moves the files to where they belong.

    Args:
        final: The folder that is being written.
        path_in_error: The path that the error message names. Default: `final`.

    Yields:
        The temporary folder, `partial_of(final)`.

    Raises:
        CheckpointError: If the operating system refuses to write; see `writing`.
    """
    with writing(path_in_error or final, final.parent):
        partial = new_partial(final)
        try:
            yield partial
        except BaseException:
            # The unfinished folder may be what fills the disk.
            shutil.rmtree(partial, ignore_errors=True)
            raise
