"""One run per folder at a time: a lock of the operating system, which is released when a run is
killed.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from hf_ga.errors import ConfigError
from hf_ga.parallel.processes import broadcast_from_main

LOCK = "run.lock"  # exists while a run uses the folder


@contextmanager
def only_run_in(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock the folder against other runs during the block. Create it if it is missing, and remove
    it if it is still empty at the end. All processes must enter the block.

    The main process has the lock. File systems without locks are not protected.

    Args:
        folder: The `output_dir` of the run.
        accelerator: The accelerator of the run.

    Raises:
        ConfigError: If another run uses the folder, or it cannot be created; on all processes.
    """
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    missing: list[Path] = []
    problem = None
    if accelerator.is_main_process:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        problem = _take(lock, folder)
    problem = broadcast_from_main(accelerator, problem)
    if problem is not None:
        raise ConfigError(f"output_dir {folder} {problem}")
    try:
        yield
    finally:
        if lock.is_locked:
            # Before the release: a process that has just opened the file detects the removal.
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        with suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


def is_empty_folder(folder: Path) -> bool:
    """Whether a folder is missing or empty, apart from the lock file of a killed run."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


def _take(lock: FileLock, folder: Path) -> str | None:
    """Create the folder and acquire the lock.

    Returns:
        None, or why that is not possible, for the error that all processes raise.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        return (
            "is in use by another run, and two would overwrite each other's checkpoints and "
            "metrics: wait until it ends, stop it, or choose another output_dir."
        )
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK):
            return f"cannot be used ({error}): choose another output_dir."
        (folder / LOCK).unlink(missing_ok=True)
    return None
