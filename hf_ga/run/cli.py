"""The command line: flags to a configuration, errors to one line and exit code 2, a stop by a signal to exit code 75."""

import difflib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import datasets
import yaml
from accelerate.utils import get_int_from_env
from transformers import HfArgumentParser
from transformers.utils import logging

from hf_ga.errors import ConfigError, HfGaError, RunStopped
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.finetune import finetune

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
PATIENCE = 5.0  # seconds in which the main process can report an error of all ranks
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_CODES = (
    "Exit codes: 0 done; 2 error, explained in one line; 75 stopped by SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGUSR2 and "
    "saved: resume with --resume_from_checkpoint auto. `accelerate launch` exits with 1 instead of 2 or 75."
)


class _Parser(HfArgumentParser):
    """Raises ConfigError instead of printing the long usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_config(arguments: Sequence[str], kind: type[FinetuneConfig] = FinetuneConfig) -> FinetuneConfig:
    """Flags (dashes or underscores) and, as first argument, a YAML or JSON file with the same names. Flags override the file.

    Args:
        kind: `FinetuneConfig` or a subclass with more flags.

    Raises:
        ConfigError: an unknown flag (with the nearest known one), a value of the wrong type, a malformed file.

    >>> parse_config(["--learning-rate", "1e-4"]).learning_rate
    0.0001
    """
    epilog = EXIT_CODES if kind is FinetuneConfig else None
    parser = _Parser(kind, description="Any split of a global batch is the full batch.", epilog=epilog)
    parser.allow_abbrev = False
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        parser.set_defaults(**_read_file(Path(arguments.pop(0)), [field.name for field in fields(kind)]))
    config, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        _refuse_unknown(unknown[0], list(parser._option_string_actions))
    return config


def finetune_main(arguments: Sequence[str] | None = None) -> int:
    """The command `hf-ga`, and `scripts/finetune.py`. Returns the exit code."""
    return guarded(_finetune, sys.argv[1:] if arguments is None else arguments)


def guarded(run: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Call `run(arguments)`, and print an error of hf_ga as one line instead of raising it. Returns the exit code."""
    try:
        return run(arguments) or 0
    except RunStopped as stopped:
        if not get_int_from_env(["RANK"], 0):  # printed once
            print(stopped, file=sys.stderr)
        return STOPPED
    except HfGaError as error:
        if get_int_from_env(["RANK"], 0):  # let the main process print an error of all ranks; the launcher then stops this one
            time.sleep(PATIENCE)
        print("error:", " ".join(str(error).split()), file=sys.stderr)  # join lines
        return 2


def _finetune(arguments: Sequence[str]) -> None:
    config = parse_config(arguments)
    logging.disable_progress_bar()  # transformers shows one for every file, datasets one for every split
    datasets.disable_progress_bars()
    finetune(config)


def _read_file(path: Path, known: list[str]) -> dict[str, Any]:
    """The entries of a configuration file by flag name. argparse or the config checks their types."""
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"unexpected argument {str(path)!r}: flags begin with --, a configuration file ends in .yaml or .json.")
    try:
        text = path.read_text()
        values: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the configuration file {path} is malformed: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {path} must be a mapping of names to values, got {type(values).__name__}.")
    named = {str(name).replace("-", "_"): value for name, value in values.items() if value is not None}
    if unknown := [name for name in named if name not in known]:
        _refuse_unknown(f"--{unknown[0]}", [f"--{name}" for name in known])
    return named


def _refuse_unknown(argument: str, known: list[str]) -> NoReturn:
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown flag {name}.{hint} --help lists all flags.")
