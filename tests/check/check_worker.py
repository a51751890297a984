"""Checks scripts one after the other, which share one import of the libraries; run by
`test_check_script.py`.

    python tests/check/check_worker.py JOB.json

JOB.json: name -> arguments of the command, of which the last one is the script. Prints, for each
name, the exit code and what the command printed as output and as errors.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hf_ga.check.script import main


def checked(arguments: list[str]) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    return code, printed.getvalue(), errors.getvalue()


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: checked(arguments) for name, arguments in job.items()}))
