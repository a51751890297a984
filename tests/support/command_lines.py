"""Commands of the docs, one after the other, each in a process of its own that has imported
everything and read the corpus.

    python tests/support/command_lines.py JOB.json

JOB.json is a list of commands as lists of words: `python SCRIPT ...` or `accelerate launch ...
    SCRIPT ...`, which its own parser
turns into the former. Ends with code 1 at the first command that fails.
"""

import json
import os
import runpy
import sys
from argparse import Namespace
from functools import cache, partial
from pathlib import Path

import matplotlib.figure  # noqa: F401  (this and the next ones: so that no process imports them by itself)
from accelerate.commands import launch
from forked import together
from runs import without_curves
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

from hf_ga.finetuning.data.formats import corpus


def parsed(words: list[str]) -> Namespace | None:
    """The flags of `accelerate launch` and its profile."""
    is_launch = words[:2] == ["accelerate", "launch"]
    return (
        launch._validate_launch_command(launch.launch_command_parser().parse_args(words[2:]))[0]
        if is_launch
        else None
    )


def run(words: list[str]) -> None:
    if args := parsed(words):
        _, environment = launch.prepare_simple_launcher_cmd_env(args)
        os.environ.update(
            {k: v for k, v in environment.items() if k.startswith("ACCELERATE_")}
        )  # the port is that of `together`
        words = ["python", args.training_script, *args.training_script_args]
    sys.argv = words[1:]
    try:
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def main(commands: list[list[str]]) -> None:
    for words in commands:
        args = parsed(words)
        processes = args.num_processes if args and args.num_processes else 1
        if together(partial(run, words), "ddp", processes) != {0}:
            sys.exit(" ".join(words))


if __name__ == "__main__":
    corpus.load_stdlib_tokenizer = cache(corpus.load_stdlib_tokenizer)
    corpus.load_stdlib_tokenizer()  # and the corpus, which is kept, too
    with without_curves():
        main(json.loads(Path(sys.argv[1]).read_text()))
