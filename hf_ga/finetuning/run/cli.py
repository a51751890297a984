"""The command line: flags to a configuration, errors to one line and exit code 2, a stop by a
signal to exit code 75.
"""

import difflib
import json
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import datasets
import yaml
from accelerate.utils import get_int_from_env
from transformers import HfArgumentParser
from transformers.utils import logging

from hf_ga.errors import ConfigError, HfGaError, RunStopped
from hf_ga.finetuning.data.options import SEVERAL
from hf_ga.finetuning.run.arguments import RENAMED, complete, known_flags, translate
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.finetune import finetune

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
PATIENCE = 5.0  # seconds in which the main process can report an error of all ranks
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_CODES = (
    "Exit codes: 0 done; 2 error, explained in one line; 75 stopped by SIGTERM, SIGINT (Ctrl-C), "
    "SIGUSR1 or SIGUSR2 and "
    "saved: resume with --resume_from_checkpoint auto. `accelerate launch` exits with 1 instead "
    "of 2 or 75."
)


class _Parser(HfArgumentParser):
    """Raises ConfigError instead of printing the long usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_config(
    arguments: Sequence[str], kind: type[FinetuneConfig] = FinetuneConfig
) -> FinetuneConfig:
    """Flags (dashes or underscores; those of transformers' example scripts, too) and, as first
    argument, a YAML or JSON file with the same names. Flags override the file.

    Args:
        kind: `FinetuneConfig` or a subclass with more flags.

    Raises:
        ConfigError: an unknown flag (with the nearest known one), a value of the wrong type, a
            malformed file.

    >>> parse_config(["--learning-rate", "1e-4"]).learning_rate
    0.0001
    """
    epilog = EXIT_CODES if kind is FinetuneConfig else None
    parser = _Parser(
        kind,
        description="Any split of a global batch is the full batch.",
        epilog=epilog,
        allow_abbrev=False,
    )
    arguments, from_file = list(arguments), {}
    if arguments and not arguments[0].startswith("-"):
        from_file = _read_file(
            Path(arguments.pop(0)), [*(field.name for field in fields(kind)), *known_flags()]
        )
    given, arguments = _of_scripts(from_file, arguments)
    own = {name: value for name, value in from_file.items() if name not in given}
    parser.set_defaults(**translate(given) | own)
    config, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        _refuse_unknown(
            unknown[0], [*parser._option_string_actions, *(f"--{name}" for name in known_flags())]
        )
    if (lines := complete(config, given)) and not get_int_from_env(["RANK"], 0):
        print(f"{'flags':11}{'; '.join(lines)}")
    return config


def _of_scripts(
    from_file: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The texts of the flags that `translate` takes, from a file's entries and the command line,
    and the other arguments.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--task")
    for name in known_flags():
        parser.add_argument(
            *dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), dest=name, nargs="*"
        )
    given, rest = parser.parse_known_args(arguments)
    own = {
        name for name in ("task", "report_to") if not isinstance(from_file.get(name), str)
    }  # of another type: an error
    taken = {
        name: value for name, value in from_file.items() if name in {"task", *known_flags()} - own
    } | vars(given)
    lists = {name: value if isinstance(value, list) else [value] for name, value in taken.items()}
    texts = {
        name: ",".join(map(str, values)) if values else "true" for name, values in lists.items()
    }
    return texts | {
        name: values for name, values in lists.items() if values and RENAMED.get(name) in SEVERAL
    }, rest


def finetune_main(arguments: Sequence[str] | None = None) -> int:
    """The command `hf-ga`, and `scripts/finetune.py`. Returns the exit code."""
    return guarded(_finetune, sys.argv[1:] if arguments is None else arguments)


def guarded(run: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Call `run(arguments)` without progress bars, and print an error of hf_ga as one line. Returns
    the exit code.
    """
    # transformers shows one for every file, datasets one for every split
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        return run(arguments) or 0
    except RunStopped as stopped:
        if not get_int_from_env(["RANK"], 0):  # printed once
            print(stopped, file=sys.stderr)
        return STOPPED
    except HfGaError as error:
        if get_int_from_env(
            ["RANK"], 0
        ):  # let the main process print an error of all ranks; the launcher then stops this one
            time.sleep(PATIENCE)
        print("error:", " ".join(str(error).split()), file=sys.stderr)  # join lines
        return 2


def _finetune(arguments: Sequence[str]) -> None:
    finetune(parse_config(arguments))


def _read_file(path: Path, known: list[str]) -> dict[str, Any]:
    """The entries of a configuration file by flag name. argparse or the config checks their
    types.
    """
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"unexpected argument {str(path)!r}: flags begin with --, a configuration file ends "
            "in .yaml or .json."
        )
    try:
        text = path.read_text()
        values: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the configuration file {path} is malformed: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"the configuration file {path} must be a mapping of names to values, got "
            f"{type(values).__name__}."
        )
    named = {
        str(name).replace("-", "_"): value for name, value in values.items() if value is not None
    }
    if unknown := [name for name in named if name not in known]:
        _refuse_unknown(f"--{unknown[0]}", [f"--{name}" for name in known])
    return named


def _refuse_unknown(argument: str, known: list[str]) -> NoReturn:
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown flag {name}.{hint} --help lists all flags.")
