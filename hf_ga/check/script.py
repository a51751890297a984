"""Checks a user's script as it is: its first update in several splits of the same window.

    python -m hf_ga.check [--assert] train.py [arguments of the script]

The script runs up to its first update, in a process of its own for each split: with hf_ga's
accelerator or trainer, and with the library's own. Each gradient is compared with that of one
micro-batch, the full batch. What the library's own loop does otherwise is named from what was read:
the divisors of the loss, and the random functions that were called.
"""

import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_ga.check.causes.divisors import format_numbers
from hf_ga.check.gradients import relative_errors, total_norm
from hf_ga.check.script_arm import (
    OUTPUT,
    RESULT,
    Arm,
    ArmResult,
    run_in_process,
)
from hf_ga.errors import ConfigError, HfGaError

HELP = (["-h"], ["--help"])
USAGE = "usage: python -m hf_ga.check [--assert] SCRIPT.py [arguments of the script]"
LIMIT = 1e-4  # relative error of a gradient; float32 sums in another order differ by about 1e-6
LOW_PRECISION_LIMIT = 5e-2  # bf16 keeps 8 bits
MAX_SPLITS = 3
SCALE_OF_SUM = 1.5  # of a gradient that dropout makes no multiple of the full batch's
PROGRESS_BAR = re.compile(r"(it/s|s/it)\b")
# Each run of the script has a process of its own. Where a system can fork, all of them share one
# import of torch and transformers.
METHODS = multiprocessing.get_all_start_methods()
PROCESSES = multiprocessing.get_context("forkserver" if "forkserver" in METHODS else "spawn")
if "forkserver" in METHODS:
    PROCESSES.set_forkserver_preload(["hf_ga.check.script_arm"])
# Exit codes, as those of hf_ga.run.
FAILED = 1
ERROR = 2


class Refused(Exception):
    """hf_ga refuses the script; the message says why, and what helps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a script.

    Args:
        arguments: Options, the script and its arguments. Default: those of the command line.

    Returns:
        The exit code: 0; with --assert, 1 if a split of hf_ga is not the full batch, or if hf_ga
        refuses the script; 2 after an error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in HELP:
        print(__doc__)
        return 0
    is_asserted = "--assert" in arguments[:1]
    script = arguments[is_asserted:]
    try:
        passed = check_script(script)
    except Refused as error:
        print(f"hf_ga refuses the script before its first update: {error}")
        passed = False
    except HfGaError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ERROR
    return FAILED if is_asserted and not passed else 0


def check_script(arguments: Sequence[str]) -> bool:
    """Run a script in several splits, and print how far each is from the full batch.

    Args:
        arguments: The script and its arguments.

    Returns:
        Whether all splits of hf_ga are the full batch.

    Raises:
        Refused: If hf_ga refuses the script.
        ConfigError: If there is no such script, or a run failed.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"no script is given. {USAGE}.")
    if not Path(arguments[0]).is_file():
        raise ConfigError(f"{arguments[0]} is no file. {USAGE}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a script is checked on one process: start it with python -m hf_ga.check, without "
            "accelerate launch."
        )
    report = _run(Arm(is_exact=True), arguments, "as written")
    print(
        f"{arguments[0]}: the first update is a window of {report.num_samples} samples, which the "
        f"script splits into {report.num_micro_batches}"
    )
    if report.num_samples == report.num_micro_batches == 1:
        raise ConfigError("a window of one sample cannot be split.")
    splits = splits_of(report)
    # The script's own library, in its own split, or in another one if that is the full batch.
    own = report.num_micro_batches if report.num_micro_batches in splits else splits[-1]
    ours = dict(_compared(splits, report, arguments, is_exact=True))
    ((_, of_library),) = _compared([own], report, arguments, is_exact=False)
    if not of_library.is_full and own in ours:
        # With the divisors of each micro-batch.
        for cause in causes(ours[own].result, of_library.scale):
            print(f"    {cause}")
    return bool(ours) and all(split.is_full for split in ours.values())


@dataclass(frozen=True)
class ComparedSplit:
    """A split of the script's window, compared with the full batch.

    Attributes:
        result: What was computed.
        is_full: Whether its gradient is that of the full batch.
        scale: The multiple of the full batch's gradient that is nearest to its own.
    """

    result: ArmResult
    is_full: bool
    scale: float


def _compared(
    numbers: Sequence[int],
    report: ArmResult,
    arguments: Sequence[str],
    *,
    is_exact: bool,
) -> Iterator[tuple[int, ComparedSplit]]:
    """Run the script with one library in some splits, and print the relative error of each.

    That of the window as written is the larger one of two: with its rehearsal, as the script runs
    it, and without. A rehearsal may show how a loss is read that single micro-batches do not.

    Args:
        numbers: Numbers of micro-batches.
        report: The window as the script splits it.
        arguments: The script and its arguments.
        is_exact: Whether the library is hf_ga, and not that of the script.

    Yields:
        Each number of micro-batches that was not refused, and its split.
    """
    name = "hf_ga" if is_exact else report.kind
    plan = replace(report, gradients={})  # each tensor would take a file descriptor
    limit = LOW_PRECISION_LIMIT if report.is_low_precision else LIMIT
    full = _run(Arm(is_exact, plan, 1), arguments, f"{name}, full batch")
    for number in numbers:
        arm = Arm(is_exact, plan, number)
        is_as_written = number == report.num_micro_batches
        try:
            result = _run(arm, arguments, f"{name}, {number} micro-batches")
        except Refused as refusal:
            if not is_as_written:
                print(f"  {name}, {number} micro-batches: refused: {refusal}", flush=True)
                continue
            result = report
        error = relative_error(result, full)
        if is_exact and is_as_written:
            error = max(error, relative_error(report, full))
        is_full = error <= limit
        verdict = "is the full batch" if is_full else "IS NOT the full batch"
        note = " (as written)" if is_as_written else ""
        print(
            f"  {name}, {number} micro-batches: relative error {error:.0e}, {verdict}{note}",
            flush=True,
        )
        yield number, ComparedSplit(result, is_full, scale_of(result, full))


def causes(report: ArmResult, scale: float = 1.0) -> list[str]:
    """Return why splits differ without hf_ga, in words: divisors and draws that were read.

    Args:
        report: The window as the script splits it, with hf_ga.
        scale: How many times the gradient of the full batch the gradient without hf_ga is.
    """
    found = []
    if scale > SCALE_OF_SUM:
        found.append(
            f"the gradient is about {scale:.2g} times that of the full batch: the losses of the "
            "micro-batches are added up, and nothing divides by their number"
        )
    for name, divisors in report.terms:
        if len(set(divisors)) > 1:
            shown = format_numbers(divisors)
            found.append(f"{name} divides by {shown}: their mean is not the mean of the window")
    for function, place in report.draws.items():
        found.append(f"{function} ({place}) draws other numbers in each split")
    return found or ["neither divisors nor draws differ: state that the loop keeps, or kernels"]


def splits_of(report: ArmResult) -> list[int]:
    """Return the numbers of micro-batches to try: that of the script, and others of equal sizes.

    A script that accumulates by hand cannot have more than its own.
    """
    own = report.num_micro_batches
    largest = own if report.is_by_hand else report.num_samples
    # Its micro-batches must keep a whole number of samples.
    possible = [n for n in range(2, largest + 1) if report.num_samples % n == 0]
    others = [n for n in possible if n != own]
    chosen = sorted(others, key=lambda n: abs(n - own))[: MAX_SPLITS - 1]
    return sorted({*chosen, own} - {1})


def _run(arm: Arm, arguments: Sequence[str], name: str) -> ArmResult:
    """Run the script in a process of its own. The ConfigError of one that fails has the end of what
    it printed.
    """
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        process = PROCESSES.Process(target=run_in_process, args=(arm, folder, list(arguments)))
        with tqdm(total=1, desc=name, leave=False, disable=None):
            process.start()
            process.join()
        if not (folder / RESULT).exists():
            printed = (folder / OUTPUT).read_text(errors="replace").strip() or "nothing"
            lines = re.split(r"[\r\n]+", printed)
            told = [line for line in lines if not PROGRESS_BAR.search(line)]
            raise ConfigError(f"{name}: the script failed: {(told or lines)[-1]}")
        result = torch.load(folder / RESULT, weights_only=False)
    if isinstance(result, str):
        raise Refused(result)
    return result


def relative_error(result: ArmResult, full: ArmResult) -> float:
    """Return |gradient - full| / |full|, all parameters together.

    Raises:
        ConfigError: If the two runs began with other weights, or had windows of other sizes.
    """
    if result.num_samples != full.num_samples:
        raise ConfigError(
            f"the first update has {result.num_samples} samples in one split and "
            f"{full.num_samples} in another, so they cannot be compared: give the script a "
            "number of samples that its batch size divides."
        )
    weights = full.weights
    if abs(result.weights - weights) > 1e-9 * weights:
        raise ConfigError(
            "two runs of the script begin with other weights, so their updates cannot be "
            "compared: seed it, for example with accelerate.utils.set_seed(0)."
        )
    return total_norm(relative_errors(result.gradients, full.gradients))


def scale_of(result: ArmResult, full: ArmResult) -> float:
    """Return the multiple of the full batch's gradient that is nearest to a gradient."""
    product = sum(float((result.gradients[name] * g).sum()) for name, g in full.gradients.items())
    return product / sum(float(g.square().sum()) for g in full.gradients.values())
