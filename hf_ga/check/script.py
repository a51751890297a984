"""Checks a user's script as it is: its first update in several splits of the same window.

    python -m hf_ga.check [--assert] train.py [arguments of the script]

The script runs up to its first update, in a process of its own for each split: with hf_ga's
accelerator or trainer, and with the library's own. Each gradient is compared with that of one
micro-batch, the full batch. What the library's own loop does otherwise is named from what was read:
the divisors of the loss, and the random functions that were called.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from tqdm.auto import tqdm

from hf_ga.check.script_arm import (
    GRADIENTS,
    OUTPUT,
    PREFIX,
    REFUSED,
    REPORT,
    ArmReport,
    ArmRequest,
    run_in_process,
)
from hf_ga.errors import ConfigError, HfGaError

USAGE = "usage: python -m hf_ga.check [--assert] SCRIPT.py [arguments of the script]"
LIMIT = 1e-4  # relative error of a gradient; float32 sums in another order differ by about 1e-6
LOW_PRECISION_LIMIT = 5e-2  # bf16 keeps 8 bits
MAX_SPLITS = 3
SHOWN_DIVISORS = 8
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


@dataclass
class ArmResult:
    """One run of the script.

    Attributes:
        report: What it found.
        gradients: The gradient of the first update, by the index of the parameter.
    """

    report: ArmReport
    gradients: dict


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a script.

    Args:
        arguments: Options, the script and its arguments. Default: those of the command line.

    Returns:
        The exit code: 0; with --assert, 1 if a split of hf_ga is not the full batch, or if hf_ga
        refuses the script; 2 after an error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_asserted = "--assert" in arguments[:1]
    script = arguments[is_asserted:]
    try:
        passed = check_script(script)
    except Refused as error:
        print(f"{script[0]}: hf_ga refuses it before the first update: {error}")
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
    report = _run(ArmRequest(is_exact=True), arguments, "as written").report
    print(
        f"{arguments[0]}: the first update is a window of {report.num_samples} samples, which the "
        f"script splits into {report.num_micro_batches}"
    )
    if report.num_samples == report.num_micro_batches == 1:
        raise ConfigError("a window of one sample cannot be split.")
    limit = LOW_PRECISION_LIMIT if report.is_low_precision else LIMIT
    full = _run(_request(report, 1, is_exact=True), arguments, "full batch")
    errors = []
    for number in splits_of(report):
        is_own = number == report.num_micro_batches
        name = f"{number} micro-batches"
        result = _run(_request(report, number, is_exact=True), arguments, name)
        errors.append(relative_error(result, full))
        _print_error("hf_ga", number, errors[-1], limit, "as written" if is_own else "")
        if is_own:
            report = result.report  # with the divisors of each micro-batch
    _compare_with_library(report, arguments, limit)
    return all(error <= limit for error in errors)


def _compare_with_library(report: ArmReport, arguments: Sequence[str], limit: float) -> None:
    """Print how far the script's own library is from its own full batch, and why."""
    number = _number_to_compare(report)
    name = f"{'accelerate' if report.kind == 'Accelerator' else 'transformers'}.{report.kind}"
    full = _run(_request(report, 1, is_exact=False), arguments, f"{name}, full batch")
    split = _run(_request(report, number, is_exact=False), arguments, name)
    error = relative_error(split, full)
    _print_error(name, number, error, limit, "as written")
    if error > limit:
        for cause in causes(report):
            print(f"    {cause}")


def _number_to_compare(report: ArmReport) -> int:
    """Return the number of micro-batches in which the script's own library is compared: that of
    the script, or another one if that is 1.
    """
    return report.num_micro_batches if report.num_micro_batches > 1 else splits_of(report)[-1]


def causes(report: ArmReport) -> list[str]:
    """Return why splits differ without hf_ga, in words: divisors and draws that were read.

    Args:
        report: The window as the script splits it, with hf_ga.
    """
    found = []
    for name, divisors in report.terms:
        if len(set(divisors)) > 1:
            shown = ", ".join(f"{divisor:g}" for divisor in divisors[:SHOWN_DIVISORS])
            more = ", ..." if len(divisors) > SHOWN_DIVISORS else ""
            found.append(
                f"{name} divides by {shown}{more}: their mean is not the mean of the window"
            )
    for function, place in report.draws.items():
        found.append(f"{function} ({place}) draws other numbers in each split")
    return found or ["neither divisors nor draws differ: state that the loop keeps, or kernels"]


def splits_of(report: ArmReport) -> list[int]:
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


def _request(report: ArmReport, number: int, *, is_exact: bool) -> ArmRequest:
    """Return the request to split the script's window into this many micro-batches."""
    return ArmRequest(is_exact, report.num_micro_batches, number, report.is_by_hand)


def _run(request: ArmRequest, arguments: Sequence[str], name: str) -> ArmResult:
    """Run the script in a process of its own.

    Raises:
        Refused: If hf_ga refused it.
        ConfigError: If it failed; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        process = PROCESSES.Process(target=run_in_process, args=(request, folder, list(arguments)))
        with tqdm(total=1, desc=name, leave=False, disable=None):
            process.start()
            process.join()
        if not (folder / REPORT).exists():
            printed = (folder / OUTPUT).read_text(errors="replace").strip() or "nothing"
            last_line = printed.splitlines()[-1]
            if process.exitcode == REFUSED and last_line.startswith(PREFIX):
                raise Refused(last_line.removeprefix(PREFIX))
            raise ConfigError(f"{name}: the script failed: {last_line}")
        report = ArmReport(**json.loads((folder / REPORT).read_text()))
        return ArmResult(report, load_file(folder / GRADIENTS))


def relative_error(result: ArmResult, full: ArmResult) -> float:
    """Return |gradient - full| / |full|, all parameters together, in float64.

    Raises:
        ConfigError: If the two runs began with other weights, or had windows of other sizes.
    """
    if result.report.num_samples != full.report.num_samples:
        raise ConfigError(
            f"the first update has {result.report.num_samples} samples in one split and "
            f"{full.report.num_samples} in another, so they cannot be compared: give the script a "
            "number of samples that its batch size divides."
        )
    weights = full.report.weights
    if abs(result.report.weights - weights) > 1e-9 * weights:
        raise ConfigError(
            "two runs of the script begin with other weights, so their updates cannot be "
            "compared: seed it, for example with accelerate.utils.set_seed(0)."
        )
    squared_error = 0.0
    squared_norm = 0.0
    for index in result.gradients.keys() | full.gradients.keys():
        found = result.gradients.get(index)
        expected = full.gradients.get(index)
        zero = 0.0 * (expected if found is None else found).double()
        found = zero if found is None else found.double()
        expected = zero if expected is None else expected.double()
        squared_error += float((found - expected).square().sum())
        squared_norm += float(expected.square().sum())
    return (squared_error / squared_norm) ** 0.5 if squared_norm else squared_error**0.5


def _print_error(name: str, number: int, error: float, limit: float, note: str) -> None:
    """Print one line of the table."""
    verdict = "is the full batch" if error <= limit else "IS NOT the full batch"
    note = f" ({note})" if note else ""
    print(
        f"  {name}, {number} micro-batches: relative error {error:.0e}, {verdict}{note}", flush=True
    )
