"""The command line `hf-ga`: parse flags into a configuration, and exit with code 2 and one line
after an error, or with code 75 after a stop by a signal.
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
from hf_ga.finetuning.data.options import SEVERAL, flag_groups
from hf_ga.finetuning.run.finetune import finetune
from hf_ga.finetuning.run.flags.arguments import (
    RENAMED,
    adjust_to_script_flags,
    convert_script_flags,
    example_script_flags,
)
from hf_ga.finetuning.run.flags.config import FinetuneConfig

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Seconds that other processes wait, so that the main process can print an error of all ranks.
PATIENCE = 5.0
# Exit code after bad input or another error of hf_ga.
ERROR = 2
# Exit code after a stop by a signal; EX_TEMPFAIL of sysexits.h, which means: try again.
STOPPED = 75
EXIT_CODES = (
    "Exit codes: 0 done; 2 error, explained in one line; 75 stopped by SIGTERM, SIGINT (Ctrl-C), "
    "SIGUSR1 or SIGUSR2 and saved: resume with --resume_from_checkpoint auto. `accelerate launch` "
    "exits with 1 instead of 2 or 75."
)


class _Parser(HfArgumentParser):
    """Argument parser of the command `hf-ga`, which raises ConfigError instead of printing its
    usage and exiting.
    """

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message, so that the command `hf-ga` prints one line.
        argparse calls this method on bad input.
        """
        raise ConfigError(message)


def parse_config(
    arguments: Sequence[str], config_class: type[FinetuneConfig] = FinetuneConfig
) -> FinetuneConfig:
    """Parse the arguments of the command `hf-ga` into the configuration of a run.

    If flags of transformers' example scripts are among them, the main process prints notes on their
    effect.

    Args:
        arguments: Flags with dashes or underscores, also those of the example scripts. The first
            argument may be a YAML or JSON file with the same names, which flags override.
        config_class: `FinetuneConfig`, or a subclass with more flags.

    Returns:
        The configuration, an instance of `config_class`, whose values are not checked yet.

    Raises:
        ConfigError: If a flag is unknown (the message suggests a similar one), a value has the
            wrong type, or the file is malformed.

    >>> parse_config(["--learning-rate", "1e-4"]).learning_rate
    0.0001
    """
    arguments = list(arguments)
    values_in_file: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        option_names = [field.name for field in fields(config_class)]
        values_in_file = _read_file(path, [*option_names, *example_script_flags()])
    script_flags, arguments = _split_off_script_flags(values_in_file, arguments)

    parser = _Parser(
        config_class,
        usage="%(prog)s [FILE.yaml] [--FLAG VALUE ...]",
        description="Any split of a global batch is the full batch.",
        epilog=EXIT_CODES if config_class is FinetuneConfig else None,
        allow_abbrev=False,
    )
    _group_flags(parser, config_class)
    # Options on the command line override these defaults.
    parser.set_defaults(**convert_script_flags(script_flags))
    parser.set_defaults(
        **{name: value for name, value in values_in_file.items() if name not in script_flags}
    )
    config, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        known_script_flags = [f"--{name}" for name in example_script_flags()]
        _raise_unknown_flag(unknown[0], [*parser._option_string_actions, *known_script_flags])

    notes = adjust_to_script_flags(config, script_flags)
    if notes and _is_first_process():
        print(f"{'flags':11}{'; '.join(notes)}")
    return config


def _group_flags(parser: _Parser, config_class: type[FinetuneConfig]) -> None:
    """Let `--help` list the flags in groups, each with one spelling."""
    action_of_name = {action.dest: action for action in parser._actions}
    for action in parser._actions:
        action.option_strings = [f"--{action.dest}"]
    parser._optionals._group_actions = [action_of_name["help"]]
    for heading, options in flag_groups(config_class).items():
        group = parser.add_argument_group(heading)
        group._group_actions = [action_of_name[option.name] for option in options]


def _split_off_script_flags(
    values_in_file: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Split the input of the command `hf-ga` into the flags of transformers' example scripts and
    all other arguments.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--task")
    for name in example_script_flags():
        # argparse rejects one spelling twice, as for a name without an underscore.
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*spellings, dest=name, nargs="*")
    parsed, remaining = parser.parse_known_args(arguments)

    script_flags: dict[str, Any] = {}
    names = {"task", *example_script_flags()}
    for name, value in values_in_file.items():
        # These two are also options of FinetuneConfig, whose check reports a wrong type.
        has_wrong_type = name in ("task", "report_to") and not isinstance(value, str)
        if name in names and not has_wrong_type:
            script_flags[name] = value
    script_flags.update(vars(parsed))
    return {name: _to_script_value(name, value) for name, value in script_flags.items()}, remaining


def _to_script_value(name: str, value: Any) -> str | list[Any]:
    """Convert the value of an example script's flag to what `convert_script_flags` expects: a
    string, or a list for a flag that takes several values, such as `train_file`.
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
        arguments: Arguments of the command, see `parse_config`. Default: those of the command line.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(_finetune, arguments)


def guarded(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Call `command(arguments)`, and print an error of hf_ga as one line instead of a traceback.
    The progress bars of transformers and datasets are disabled. `hf-ga` and the scripts of this
    package use it to run their commands.

    Args:
        command: The function to call. It returns the exit code, or None for 0.
        arguments: Arguments of the command line.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    # transformers shows a progress bar for every file, datasets one for every split.
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        return command(arguments) or 0
    except RunStopped as stopped:
        if _is_first_process():
            print(stopped, file=sys.stderr)
        return STOPPED
    except HfGaError as error:
        if not _is_first_process():
            # If the error is on all ranks, the main process prints it meanwhile, and the launcher
            # then stops this process before it prints the same line.
            time.sleep(PATIENCE)
        in_one_line = " ".join(str(error).split())
        print("error:", in_one_line, file=sys.stderr)
        return ERROR


def _is_first_process() -> bool:
    """Whether this process of the command `hf-ga` has rank 0, or is the only one. It can be called
    before Accelerate is set up.
    """
    return get_int_from_env(["RANK"], 0) == 0


def _finetune(arguments: Sequence[str]) -> None:
    """Fine-tune a model with the flags of the command line."""
    finetune(parse_config(arguments))


def _read_file(path: Path, known_names: list[str]) -> dict[str, Any]:
    """Read a YAML or JSON file with flags of the command `hf-ga`."""
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
    value_of_flag = {
        str(name).replace("-", "_"): value for name, value in values.items() if value is not None
    }
    for name in value_of_flag:
        if name not in known_names:
            _raise_unknown_flag(f"--{name}", [f"--{known}" for known in known_names])
    return value_of_flag


def _raise_unknown_flag(argument: str, known_flags: list[str]) -> NoReturn:
    """Raise ConfigError for an unknown flag of the command `hf-ga`, with the most similar known
    flag, if one is similar, as a hint.
    """
    flag = argument.partition("=")[0]
    similar = difflib.get_close_matches(flag, known_flags, n=1, cutoff=0.7)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    raise ConfigError(f"unknown flag {flag}.{hint} --help lists all flags.")
