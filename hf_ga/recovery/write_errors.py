"""A full disk, a quota, a folder that became read-only: one clear error instead of each library's own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from hf_ga.errors import CheckpointError, HfGaError
from hf_ga.recovery.files import new_partial


@contextmanager
def writing(path: Path, output_dir: Path) -> Iterator[None]:
    """A block that writes `path`, for a run in `output_dir`.

    Raises:
        CheckpointError: the system refused. All other errors go through as they are.
    """
    try:
        yield
    except HfGaError:
        raise
    except (Exception, CheckpointException) as error:  # the latter derives from BaseException
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # of torch.save's RuntimeError
        refused = isinstance(cause, OSError | SafetensorError | CheckpointException) or "(os error " in str(cause)  # tokenizers
        if not refused:
            raise
        reason = getattr(cause, "strerror", None) or str(cause).strip().splitlines()[-1]
        raise CheckpointError(
            f"cannot write {path}: {reason}. What {output_dir} holds is kept: free disk space or change the permissions, then use "
            "--resume_from_checkpoint auto."
        ) from error


@contextmanager
def filling(final: Path, names: Path | None = None) -> Iterator[Path]:
    """A block that fills `partial_of(final)`, which it gets empty, and moves it to where it belongs. If the system refuses to
    write, nothing of it is left.

    Args:
        names: what an error says that cannot be written, by default `final`.
    """
    with writing(names or final, final.parent):
        partial = new_partial(final)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # it may be all that fills the disk
            raise
