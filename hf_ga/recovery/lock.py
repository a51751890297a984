"""The lock that lets only one run at a time use an output folder: a file lock of the operating
system, which is released even when a run is killed.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from accelerate import Accelerator
from filelock import FileLock, Timeout

from hf_ga.errors import ConfigError
from hf_ga.parallel.processes import broadcast_from_main, raise_on_all_ranks

LOCK = "run.lock"  # name of the lock file, which exists while a run uses the folder
# Seconds after which a file that one machine has written must be seen on all others.
SHARE_SECONDS = 60.0


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
        ConfigError: If another run uses the folder, it cannot be created, or processes see
            different folders; on all processes.
    """
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    missing_folders: list[Path] = []
    problem = None
    if accelerator.is_main_process:
        missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        problem = _acquire(lock, folder)
    problem = broadcast_from_main(accelerator, problem)
    if problem is not None:
        raise ConfigError(f"output_dir {folder} {problem}")
    try:
        _check_shared(lock, folder, accelerator)
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


def _check_shared(lock: FileLock, folder: Path, accelerator: Accelerator) -> None:
    """Check that all processes see the same folder: the main one writes a text into the lock file,
    which the others read. Without locks, there is no file to check.

    Raises:
        ConfigError: If a process does not see it; on all processes.
    """
    if accelerator.num_processes == 1:
        return
    text = None
    if lock.is_locked:  # on the main process
        text = uuid4().hex
        (folder / LOCK).write_text(text)
    text = broadcast_from_main(accelerator, text)
    if text is None:
        return
    with raise_on_all_ranks(accelerator):
        if not _appears(folder / LOCK, text):
            raise ConfigError(
                f"output_dir {folder} is not the same folder for all processes: process "
                f"{accelerator.process_index} on {gethostname()} does not see the file {LOCK} that "
                "the main process has written. Its part of a checkpoint would be missing. Use a "
                "folder that all machines share."
            )


def _appears(path: Path, text: str) -> bool:
    """Return whether a file has the text, at the latest after the seconds that network file systems
    keep old names and contents.
    """
    deadline = time.monotonic() + SHARE_SECONDS
    while True:
        with suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def is_empty_folder(folder: Path) -> bool:
    """Whether a run's output folder does not exist or contains no file, except the lock file
    (`run.lock`) that a killed run left behind.
    """
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


def _acquire(lock: FileLock, folder: Path) -> str | None:
    """Create a run's output folder and acquire its lock, without waiting.

    Returns:
        None if the folder can be used (also on a file system without locks, where nothing is
        acquired). Otherwise the end of the error message that all processes raise: why it cannot be
        used, and what to do.
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
