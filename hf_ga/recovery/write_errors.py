"""One clear error for a full disk, a quota or a read-only folder, instead of each library's own."""

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
    """Turn errors of the block, which writes `path` for a run in `output_dir`, into one clear error.

    Raises:
        CheckpointError: the system refused to write. Other errors are re-raised unchanged.
    """
    try:
        yield
    except HfGaError:
        raise
    except (Exception, CheckpointException) as error:  # the latter derives from BaseException
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # torch.save raises a RuntimeError
        refused = isinstance(cause, OSError | SafetensorError | CheckpointException) or "(os error " in str(cause)  # tokenizers
        if not refused:
            raise
        reason = getattr(cause, "strerror", None) or str(cause).strip().splitlines()[-1]
        raise CheckpointError(
            f"cannot write {path}: {reason}. The files in {output_dir} are kept: free disk space or change the permissions, then "
            "use --resume_from_checkpoint auto."
        ) from error


@contextmanager
def filling(final: Path, names: Path | None = None) -> Iterator[Path]:
    """Create `partial_of(final)` for the block to fill, then rename it to `final`. If writing fails, it is deleted.

    Args:
        names: the path in the error message, by default `final`.
    """
    with writing(names or final, final.parent):
        partial = new_partial(final)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # it may be all that fills the disk
            raise
