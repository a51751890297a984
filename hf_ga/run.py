"""Runs a training script as it is, with exact gradient accumulation:

    accelerate launch -m hf_ga.run train.py ...        instead of: accelerate launch train.py ...
    python -m hf_ga.run train.py ...                   instead of: python train.py ...

Where the script makes an `accelerate.Accelerator`, it gets an `hf_ga.Accelerator`, and where it
makes a `transformers.Trainer`, also of a subclass of its own, the same trainer with
`ExactTrainerMixin` before it. Both are subclasses, so `isinstance` holds, and it does not matter
under which name or when the script imports them. Of TRL's trainers, those in `EXACT_TRL_TRAINERS`
are made exact. The others are refused.
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, new_class
from typing import Any

from hf_ga.errors import ConfigError, HfGaError, RunStopped

USAGE = "usage: python -m hf_ga.run SCRIPT.py [arguments of the script]"
EXACT_TRL_TRAINERS = (
    "trl.trainer.sft_trainer.SFTTrainer",
    "trl.trainer.dpo_trainer.DPOTrainer",
    "trl.trainer.reward_trainer.RewardTrainer",
    "trl.experimental.cpo.cpo_trainer.CPOTrainer",
    "trl.experimental.orpo.orpo_trainer.ORPOTrainer",
)
TRL_BASE_CLASS = "trl.trainer.base_trainer._BaseTrainer"
# Libraries whose own accelerators stay Accelerate's: ExactTrainer drives the one of Trainer.
OWN_ACCELERATORS = ("transformers.", "hf_ga.")
# Seconds that other processes wait, so that the main process can print an error of all ranks.
PATIENCE = 5.0
ERROR = 2  # exit code after bad input or another error of hf_ga
STOPPED = 75  # after a stop by a signal; EX_TEMPFAIL of sysexits.h, which means: try again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script with exact accelerators and trainers.

    Args:
        arguments: The script and its arguments. Default: those of the command line.

    Returns:
        The exit code: 0; 2 after an error of hf_ga, which is printed as one line; 75 after a stop
        by a signal. Other errors of the script, and its own exit codes, are left as they are.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    return exit_code(run_script, arguments, end_of_line="\n")  # a progress bar may be in this line


def exit_code(
    command: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str],
    end_of_line: str = "",
) -> int:
    """Call `command(arguments)`, and print an error of hf_ga as one line instead of a traceback.

    Args:
        command: Returns its exit code, or None for 0.
        arguments: Arguments of the command line.
        end_of_line: What to print before an error.

    Returns:
        The exit code: that of the command; 2 after an error of hf_ga; 75 after a stop by a signal.
    """
    try:
        return command(arguments) or 0
    except RunStopped as stopped:
        _print_on_main(str(stopped))
        return STOPPED
    except HfGaError as error:
        if not _is_main_process():
            # If all ranks have this error, the launcher stops them after the main process.
            time.sleep(PATIENCE)
        print(f"{end_of_line}error: {in_one_line(error, arguments)}", file=sys.stderr)
        return ERROR


def in_one_line(error: HfGaError, arguments: Sequence[str]) -> str:
    """Return the message of an error, after the line of the script that it comes from, if any.

    Args:
        error: The error.
        arguments: The script and its arguments.
    """
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    scripts = [str(Path(argument)) for argument in arguments[:1]]  # as Python's frames name it
    lines = [frame.lineno for frame in frames if frame.filename in scripts]
    if not lines:
        return message
    return f"{arguments[0]}, line {lines[-1]}: {message}"


def run_script(arguments: Sequence[str]) -> None:
    """Run a script as `python SCRIPT.py ...` does, with exact accelerators and trainers.

    Args:
        arguments: The script and its arguments.

    Raises:
        ConfigError: If there is no such script.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"no script is given. {USAGE}.")
    script = Path(arguments[0])
    if not script.is_file():
        raise ConfigError(f"{script} is no file. {USAGE}.")
    made = replace_classes()
    run_as_main(arguments)
    if not made:
        _print_on_main(
            f"hf_ga.run: {script} made neither an accelerate.Accelerator nor a "
            "transformers.Trainer, so it ran unchanged."
        )


def run_as_main(arguments: Sequence[str]) -> None:
    """Run a script in this process as `python SCRIPT.py ...` does.

    Args:
        arguments: The script and its arguments.
    """
    script = Path(arguments[0])
    sys.argv = list(arguments)
    sys.path[0] = str(script.resolve().parent)  # of the script, as Python sets it
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise


def replace_classes(
    accelerators: Callable[[type], type] | None = None,
    trainers: Callable[[type], type] | None = None,
) -> dict[type, type]:
    """Let `accelerate.Accelerator(...)` and `transformers.Trainer(...)` make exact objects from now
    on in this process.

    Neither library is imported here, as a script may set environment variables before it does.

    Args:
        accelerators: Takes a class of accelerators of the script, and returns a subclass that is
            made instead. Default: `exact_accelerator`.
        trainers: The same for trainers. Default: `exact_trainer`.

    Returns:
        Class that the script calls -> exact class of what it gets, filled as the script runs.
    """
    made: dict[type, type] = {}

    def patch(class_name: str, choose: Callable[[type], type]) -> Callable[[ModuleType], None]:
        """Return what patches a class of a module."""
        return lambda module: _choose_class_of_new(getattr(module, class_name), choose, made)

    actions = {
        "accelerate.accelerator": patch("Accelerator", accelerators or exact_accelerator),
        "transformers.trainer": patch("Trainer", trainers or exact_trainer),
    }
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(actions))
    return made


class _AfterImport(MetaPathFinder):
    """Calls functions, by the names of modules, once these were imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        """Make the finder, for the front of `sys.meta_path`."""
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that has an action; Python asks before it imports one."""
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            """Run the module's code, then the action."""
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec


def _choose_class_of_new(
    base: type, choose: Callable[[type], type], made: dict[type, type]
) -> None:
    """Let a call of `base`, or of a subclass, make an object of the class that `choose` returns for
    the class that is called: it, or a subclass. `made` gets both.
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Make an object, before Python calls `__init__` of its class."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(OWN_ACCELERATORS):
            return object.__new__(cls)
        if cls not in made:
            made[cls] = choose(cls)
            _print_replacement(cls, made[cls])
        return object.__new__(made[cls])

    base.__new__ = new


def exact_accelerator(cls: type) -> type:
    """Return the exact subclass of a script's class of accelerators."""
    import accelerate

    from hf_ga.accelerator.accelerator import Accelerator

    if issubclass(cls, Accelerator):
        return cls
    if cls is accelerate.Accelerator:
        return Accelerator
    return new_class(cls.__name__, (Accelerator, cls))


def exact_trainer(cls: type) -> type:
    """Return the exact subclass of a script's class of trainers.

    Raises:
        ConfigError: If it is, or derives from, a trainer of TRL that is not exact.
    """
    from hf_ga.trainer.exact_trainer import ExactTrainerMixin

    if issubclass(cls, ExactTrainerMixin):
        return cls
    for owner in cls.__mro__:
        name = f"{owner.__module__}.{owner.__qualname__}"
        is_trl = name.startswith("trl.") and name.endswith("Trainer") and name != TRL_BASE_CLASS
        if is_trl and name not in EXACT_TRL_TRAINERS:
            known = ", ".join(known.rpartition(".")[2] for known in EXACT_TRL_TRAINERS)
            raise ConfigError(
                f"TRL's {owner.__name__} cannot be made exact: its loss compares samples, or it "
                f"generates its data while it trains. Exact are {known}. Run the script without "
                "hf_ga.run, and accept that its updates depend on the split of the batch."
            )
    return new_class(cls.__name__, (ExactTrainerMixin, cls))


def _print_replacement(cls: type, exact: type) -> None:
    """Print, on the main process, which class of hf_ga an object of a script gets."""
    if exact is cls:
        return
    ours = [base for base in exact.__mro__ if base.__module__.startswith("hf_ga.")]
    own = next((base for base in ours if base.__module__ != "hf_ga.check.script_arm"), None)
    if own is None:
        return
    _print_on_main(f"hf_ga.run: {cls.__module__}.{cls.__qualname__} runs as hf_ga.{own.__name__}")


def _print_on_main(line: str) -> None:
    """Print a line on the main process, to stderr."""
    if _is_main_process():
        print(line, file=sys.stderr, flush=True)


def _is_main_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
