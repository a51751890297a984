"""The lock that lets only one run at a time use an output folder: a file lock of the operating
system, which is released even when a run is killed.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from hf_ga.errors import ConfigError
from hf_ga.parallel.processes import call_on_main

LOCK = "run.lock"  # name of the lock file, which exists while a run uses the folder


@contextmanager
def only_run_in(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock a run's output folder against other runs during the block. All processes of the run must
    enter the block; the main process holds the lock.

    Creates the folder (and its parents) if it is missing, and removes what it created if that is
    still empty at the end. On file systems without file locks, nothing is locked.

    Args:
        folder: The `output_dir` of the run.
        accelerator: The accelerator of the run.

    Raises:
        ConfigError: If another run uses the folder, or it cannot be created; on all processes.
    """
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    missing_folders = call_on_main(accelerator, _acquire, lock, folder)
    try:
        yield
    finally:
        if lock.is_locked:
            # Remove the file before the release: another process that has opened it meanwhile then
            # notices that it is gone.
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        with suppress(OSError):  # the folder is not empty
            for path in missing_folders:
                path.rmdir()


def is_empty_folder(folder: Path) -> bool:
    """Whether a run's output folder does not exist or contains no file, except the lock file
    (`run.lock`) that a killed run left behind.
    """
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


def _acquire(lock: FileLock, folder: Path) -> list[Path]:
    """Create a run's output folder and acquire its lock, without waiting. On a file system without
    locks nothing is acquired.

    Returns:
        The folders that it created: this one and its parents.

    Raises:
        ConfigError: If the folder cannot be used.
    """
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"output_dir {folder} is in use by another run, and two would overwrite each other's "
            "checkpoints and metrics: wait until it ends, stop it, or choose another output_dir."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK):
            raise ConfigError(
                f"output_dir {folder} cannot be used ({error}): choose another output_dir."
            ) from error
        (folder / LOCK).unlink(missing_ok=True)
    return missing_folders
