"""Checks scripts one after the other; run by `test_check_script.py`. Their runs are forked from this
process, which has imported the libraries.

    python tests/check/check_worker.py JOB.json

JOB.json: name -> arguments of the command, of which the last one is the script. Prints, for each
name, the exit code and what the command printed as output and as errors.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from forked import FORK

from hf_ga.check import script
from hf_ga.check.script_arm import run_in_process


def checked(arguments: list[str]) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        code = script.main(arguments)
    return code, printed.getvalue(), errors.getvalue()


def run_as_if_started(*arguments: Any) -> None:
    """Print to the process's own files: nothing is redirected in a new process."""
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    run_in_process(*arguments)


if __name__ == "__main__":
    script.PROCESSES = FORK
    script.run_in_process = run_as_if_started
    job = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: checked(arguments) for name, arguments in job.items()}))
