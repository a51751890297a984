"""Start a script under the real `accelerate launch`, on CPU processes, with a time limit."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

TIME_LIMIT = 400  # seconds; a launch takes 15 to 60
# Torch's, of a program that has ended: a thread of gloo that has not let go of the last collective
# when Python ends waits for Python's lock, and aborts. One in thirty of ten lines without hf_ga.
ABORTED_AT_EXIT = "terminate called without an active exception"


def launch(
    num_processes: int, script: Path, *arguments: str, timeout: float = TIME_LIMIT
) -> subprocess.CompletedProcess:
    """Run a script in real processes to its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words_of_launch(num_processes), str(script), *arguments]
    return run(command, environment, timeout)


def words_of_launch(num_processes: int) -> list[str]:
    """Of the command, behind Python and before the script. `--multi_gpu` is Accelerate's only way
    to start several processes, whatever they compute on.
    """
    several = "--multi_gpu" if num_processes > 1 else "--cpu"
    words = [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        several,
        "--num_processes",
        str(num_processes),
    ]
    words += [
        "--num_machines",
        "1",
        "--main_process_port",
        str(free_port()),
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    return words


def run(command: list, environment: dict | None, timeout: float) -> subprocess.CompletedProcess:
    """Run ranks to their end; once more if torch aborted one at its exit."""
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=timeout, check=False
        )
        if ABORTED_AT_EXIT not in done.stderr:
            break
    return done


def free_port() -> int:
    """One at random, so that two test processes never hand out the same one at the same time.

    Below those that the system hands out: there a process that waits for a listener may be
    connected to itself.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # tests seed the other one alike
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
