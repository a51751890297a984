"""A full disk, a quota, a folder that became read-only: one clear error of what could not be written, why, and what is kept."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from hf_ga.errors import CheckpointError
from hf_ga.recovery.files import new_partial
from hf_ga.recovery.latest import LATEST, list_checkpoints

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers tell the system's number in words only
_TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter|iostream error")  # torch's C++ writer does not tell it at all


@contextmanager
def writing(path: Path, output_dir: Path) -> Iterator[None]:
    """A block that writes `path`, for a run in `output_dir`.

    Raises:
        CheckpointError: the system refused. All other errors go through as they are.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        reason = _reason(error)
        if reason is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write {path}: {reason}; {_free(output_dir)}. {_remedy(output_dir)}") from error


@contextmanager
def filling(final: Path, names: Path | None = None) -> Iterator[Path]:
    """A block that fills `partial_of(final)`, which it gets empty, and moves it to where it belongs. If the system refuses to
    write, nothing of it is left.

    Args:
        final: a folder in `output_dir`. names: what an error says that cannot be written, by default `final`.
    """
    path = names or final
    with writing(path, final.parent):
        partial = new_partial(final)
    try:
        with writing(path, final.parent):
            yield partial
    except CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)  # it may be all that fills the disk
        raise


def _reason(error: BaseException) -> str | None:
    """What the system says, of an error that comes of a write."""
    if isinstance(error, CheckpointException):  # of any process
        return next(filter(None, (_reason(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if number := _RUST_ERROR.search(str(error)):
        return os.strerror(int(number[1]))
    if error.__context__ is not None and (reason := _reason(error.__context__)):  # torch raises its own while it handles a write's
        return reason
    return "torch could not write all of it" if _TORCH_WRITER.search(str(error)) else None


def _free(output_dir: Path) -> str:
    existing = next(folder for folder in (output_dir, *output_dir.absolute().parents) if folder.exists())
    return f"{shutil.disk_usage(existing).free:,} bytes are free there"


def _remedy(output_dir: Path) -> str:
    latest, checkpoints = output_dir / LATEST, list_checkpoints(output_dir)
    kept = latest.read_text().partition("\n")[0] if latest.is_file() else checkpoints[-1].name if checkpoints else None
    state = f"{kept} is kept" if kept else "There is no checkpoint yet"
    return f"{state}: make room, then use --resume_from_checkpoint auto, which {'goes on from it' if kept else 'starts anew'}."
