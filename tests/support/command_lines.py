"""Commands of the docs, one after the other, each in a process of its own that has imported everything and read the corpus.

    python tests/support/command_lines.py JOB.json

JOB.json is a list of commands as lists of words: `python SCRIPT ...` or, for one process, `accelerate launch ... SCRIPT ...`, which
its own parser turns into the former. Ends with code 1 at the first command that fails.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import matplotlib.figure  # noqa: F401  (this and the next ones: so that no process imports them by itself)
from accelerate.commands import launch
from forked import fork
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

from hf_ga.data.corpus import load_stdlib


def run(words: list[str]) -> None:
    if words[:2] == ["accelerate", "launch"]:
        args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words[2:]))
        words, environment = launch.prepare_simple_launcher_cmd_env(args)
        os.environ.update(environment)
        os.sched_getaffinity = lambda pid: {0}  # one thread: several would wait for each other beside other tests
    sys.argv = words[1:]
    try:
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    load_stdlib()
    for words in json.loads(Path(sys.argv[1]).read_text()):
        if os.waitstatus_to_exitcode(os.waitpid(fork(lambda words=words: run(words), {}), 0)[1]):
            sys.exit(" ".join(words))
