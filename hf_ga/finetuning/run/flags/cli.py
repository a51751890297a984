"""The command line `hf-ga`: parse flags into a configuration, and exit with code 2 and one line
after an error, or with code 75 after a stop by a signal.
"""

import difflib
import json
import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import datasets
import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool
from transformers.utils import logging

from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.options import flag_groups
from hf_ga.finetuning.run.finetune import finetune
from hf_ga.finetuning.run.flags.arguments import (
    RENAMED,
    SCRIPT_FLAGS,
    WITHOUT_OPTION,
    adjust_to_script_flags,
    convert_script_flags,
)
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.logs import is_main_process
from hf_ga.run import exit_code

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
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
    names = [field.name for field in fields(config_class)]
    values_in_file: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        values_in_file = _read_file(path, [*names, *SCRIPT_FLAGS])
    parser = _make_parser(config_class)
    # Options on the command line override these defaults; argparse converts those that are strings.
    parser.set_defaults(**values_in_file)
    # An option that is not given is None: an example script may have another default for it.
    namespace = Namespace(**dict.fromkeys(set(names) - values_in_file.keys()))
    parsed, unknown = parser.parse_known_args(arguments, namespace)
    if unknown:
        _raise_unknown_flag(unknown[0], [*parser._option_string_actions])
    given = {
        name: _as_text(value) if name in WITHOUT_OPTION else value
        for name, value in vars(parsed).items()
        if value is not None
    }
    trackers = given.get("report_to")
    if isinstance(trackers, list) and all(isinstance(tracker, str) for tracker in trackers):
        given["report_to"] = ",".join(trackers)
    config = config_class(**convert_script_flags(given))
    notes = adjust_to_script_flags(config, given)
    if notes and is_main_process():
        print(f"{'flags':11}{'; '.join(notes)}")
    return config


def _as_text(value: Any) -> str:
    """Return the value of a flag of transformers' example scripts as one string: "true" for a
    switch without a value.
    """
    if value == []:
        return "true"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _make_parser(config_class: type[FinetuneConfig]) -> _Parser:
    """Return the parser of the flags of a run and of transformers' example scripts. `--help` lists
    the former in groups, each with one spelling.
    """
    parser = _Parser(
        config_class,
        usage="%(prog)s [FILE.yaml] [--FLAG VALUE ...]",
        description="Any split of a global batch is the full batch.",
        epilog=EXIT_CODES if config_class is FinetuneConfig else None,
        allow_abbrev=False,
    )
    action_of_name = {action.dest: action for action in parser._actions}
    action_of_name["report_to"].nargs = "*"
    # HfArgumentParser parses a flag that is true, false or a text as true or false.
    action_of_name["torch_compile"].type = _bool_or_text
    for name in SCRIPT_FLAGS:
        # argparse rejects one spelling twice, as for a name without an underscore.
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        settings: dict[str, Any] = {"nargs": "*"}
        if name in RENAMED:
            option = action_of_name[RENAMED[name]]
            settings = {"type": option.type, "nargs": option.nargs, "const": option.const}
        parser.add_argument(*spellings, dest=name, default=SUPPRESS, **settings)
    for action in action_of_name.values():
        action.option_strings = [f"--{action.dest}"]
    parser._optionals._group_actions = [action_of_name["help"]]
    for heading, options in flag_groups(config_class).items():
        group = parser.add_argument_group(heading)
        group._group_actions = [action_of_name[option.name] for option in options]
    return parser


def _bool_or_text(value: str) -> bool | str:
    """Convert a flag to true or false, if it is either; its other values are checked later."""
    try:
        return string_to_bool(value)
    except ArgumentTypeError:
        return value.lower()


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
    return exit_code(command, arguments)


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
