"""The command line: it turns flags into a configuration, errors into one line and exit code 2, and
a stop by a signal into exit code 75.
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
# Seconds in which the main process can report an error of all ranks.
PATIENCE = 5.0
# EX_TEMPFAIL of sysexits.h: try again.
STOPPED = 75
EXIT_CODES = (
    "Exit codes: 0 done; 2 error, explained in one line; 75 stopped by SIGTERM, SIGINT (Ctrl-C), "
    "SIGUSR1 or SIGUSR2 and saved: resume with --resume_from_checkpoint auto. `accelerate launch` "
    "exits with 1 instead of 2 or 75."
)


class _Parser(HfArgumentParser):
    """A parser that raises ConfigError instead of printing the long usage text."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(message)


def parse_config(
    arguments: Sequence[str], kind: type[FinetuneConfig] = FinetuneConfig
) -> FinetuneConfig:
    """Parse the arguments of the command.

    Args:
        arguments: Flags (dashes or underscores; those of transformers' example scripts, too) and,
            as first argument, a YAML or JSON file with the same names. Flags override the file.
        kind: `FinetuneConfig` or a subclass with more flags.

    Returns:
        The configuration, an object of `kind`.

    Raises:
        ConfigError: If a flag is unknown (the message names the nearest known one), a value has the
            wrong type, or the file is malformed.

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
    arguments = list(arguments)
    from_file: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        names = [field.name for field in fields(kind)]
        from_file = _read_file(path, [*names, *known_flags()])
    given, arguments = _of_scripts(from_file, arguments)
    own = {name: value for name, value in from_file.items() if name not in given}
    parser.set_defaults(**translate(given) | own)
    config, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        of_scripts = [f"--{name}" for name in known_flags()]
        _refuse_unknown(unknown[0], [*parser._option_string_actions, *of_scripts])
    lines = complete(config, given)
    if lines and _is_first_process():
        print(f"{'flags':11}{'; '.join(lines)}")
    return config


def _of_scripts(
    from_file: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Separate the flags of transformers' example scripts, which `translate` takes, from others.

    Args:
        from_file: The entries of the configuration file.
        arguments: The flags of the command line, which override the file.

    Returns:
        Name -> text or list of texts of the example scripts' flags, and the other arguments.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--task")
    for name in known_flags():
        # Once, if the name has no underscore.
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*spellings, dest=name, nargs="*")
    given, rest = parser.parse_known_args(arguments)
    names = {"task", *known_flags()}
    for name in ("task", "report_to"):
        # A value of another type is an error, which is found later.
        if not isinstance(from_file.get(name), str):
            names.discard(name)
    taken = {name: value for name, value in from_file.items() if name in names}
    taken |= vars(given)
    return {name: _given_value(name, value) for name, value in taken.items()}, rest


def _given_value(name: str, value: Any) -> Any:
    """Return the value of an example script's flag as `translate` expects it.

    Args:
        name: The flag.
        value: A list of texts from the command line, empty for a flag without a value, or any value
            from a file.

    Returns:
        A list, if the flag takes several values; else a text, "true" for a flag without a value.
    """
    values = value if isinstance(value, list) else [value]
    if not values:
        return "true"
    if RENAMED.get(name) in SEVERAL:
        return values
    return ",".join(map(str, values))


def finetune_main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `hf-ga`, which is also `scripts/finetune.py`.

    Args:
        arguments: See `parse_config`. Default: those of the command line.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(_finetune, arguments)


def guarded(run: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Call `run(arguments)` without progress bars, and print an error of hf_ga as one line.

    Args:
        run: The command; returns its exit code, or None for 0.
        arguments: Its arguments.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    # transformers shows one for every file, datasets one for every split.
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        return run(arguments) or 0
    except RunStopped as stopped:
        if _is_first_process():
            print(stopped, file=sys.stderr)
        return STOPPED
    except HfGaError as error:
        if not _is_first_process():
            # Let the main process print an error of all ranks; the launcher then stops this one.
            time.sleep(PATIENCE)
        in_one_line = " ".join(str(error).split())
        print("error:", in_one_line, file=sys.stderr)
        return 2


def _is_first_process() -> bool:
    """Whether this is the only process, or the launcher's first one."""
    return get_int_from_env(["RANK"], 0) == 0


def _finetune(arguments: Sequence[str]) -> None:
    """Run `finetune` with the flags of the command line."""
    finetune(parse_config(arguments))


def _read_file(path: Path, known: list[str]) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: The file.
        known: The names of all flags.

    Returns:
        Flag -> value, without empty values. The types of the values are checked later.

    Raises:
        ConfigError: If the file cannot be read, is malformed, or has an unknown name.
    """
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"unexpected argument {str(path)!r}: flags begin with --, a configuration file ends "
            "in .yaml or .json."
        )
    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        values: Any = parse(path.read_text())
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
    for name in named:
        if name not in known:
            _refuse_unknown(f"--{name}", [f"--{flag}" for flag in known])
    return named


def _refuse_unknown(argument: str, known: list[str]) -> NoReturn:
    """Raise ConfigError for an unknown flag, with the nearest known one as a hint."""
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown flag {name}.{hint} --help lists all flags.")
