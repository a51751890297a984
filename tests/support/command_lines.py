"""`finetune.py` with each of several lists of arguments, in processes of their own that have imported everything.

    python tests/support/command_lines.py JOB.json

JOB.json is a list of lists of arguments. Ends with code 1 at the first command that does not end well.
"""

import json
import os
import sys
from pathlib import Path

import transformers  # noqa: F401  (so that no process imports it by itself)
from forked import fork

from hf_ga.run.cli import finetune_main


def run(arguments: list[str]) -> None:
    if code := finetune_main(arguments):
        raise SystemExit(code)


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        if os.waitstatus_to_exitcode(os.waitpid(fork(lambda arguments=one: run(arguments), {}), 0)[1]):
            sys.exit(f"finetune.py {' '.join(one)}")
