"""One run in a folder at a time: a lock of the operating system, so that a killed run leaves none behind."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from hf_ga.errors import ConfigError
from hf_ga.parallel.processes import broadcast_from_main

LOCK = "run.lock"  # in the folder while a run is in it; tells who that is


@contextmanager
def only_run_in(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep other runs out of the folder. It is made where it is missing, and removed again where nothing came into it.

    The main process holds the lock; the others hear whether it could take it. Where the file system knows no locks, nothing is
    kept out.

    Raises:
        ConfigError: another run is in the folder; on all processes.
    """
    is_main = accelerator.is_main_process
    missing = [path for path in (folder, *folder.parents) if is_main and not path.exists()]
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False, on_acquired=_sign)
    refusal = broadcast_from_main(accelerator, _take(lock, folder) if is_main else None)
    if refusal is not None:
        raise ConfigError(refusal)
    try:
        yield
    finally:
        if lock.is_locked:
            (folder / LOCK).unlink(missing_ok=True)  # while it is held: who has opened it meanwhile finds that it has lost its name
            lock.release()
        with suppress(OSError):  # something came into it
            for path in missing:
                path.rmdir()


def holds_nothing(folder: Path) -> bool:
    """Whether a folder is missing or empty; the lock of a killed run does not count."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


def _take(lock: FileLock, folder: Path) -> str | None:
    """Take the lock; returns why not, where another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        return (
            f"output_dir {folder} is in use by another run ({_holder(folder / LOCK)}), and two would overwrite each other's "
            "checkpoints and metrics. Wait for its end or stop it, or name another folder."
        )
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK):
            raise
        (folder / LOCK).unlink(missing_ok=True)
    return None


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)  # what a killed run has left
    text = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    os.write(descriptor, text.encode())


def _holder(file: Path) -> str:
    try:
        return file.read_text() or "which has just begun"
    except FileNotFoundError:
        return "which has just ended"
