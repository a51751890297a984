"""The benchmark's tables, and the bounds (targets of --assert) that are computed from them."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import table

from benchmark.arms import (
    DEFAULT,
    EXACT_TRAINER,
    GROUPED,
    NATIVE,
    OWN_LOOP,
    REBALANCED,
    TRAINER,
    WITHOUT_CUDNN,
)
from benchmark.measuring import Measurements
from benchmark.setting import Setting

TWO_RANKS = "hf_ga, two ranks"
# Minimum ratios of tokens per second:
# hf_ga / the faster of Trainer's group_by_length and batch_rebalance, by model.
MIN_SPEED_RATIO = {"gpt": 1.30, "bert": 1.18}
# hf_ga / batch_rebalance while another process keeps a core busy.
MIN_BUSY_SPEED_RATIO = 1.20
# ExactTrainer / batch_rebalance.
MIN_EXACT_TRAINER_RATIO = 1.15
# The README's loop / hf_ga's default.
MIN_OWN_LOOP_RATIO = 0.97
# Maximum ratio of memory: hf_ga / the lower of group_by_length and batch_rebalance.
MAX_MEMORY_RATIO = 1.05
# Maximum time with keyed dropout / with torch's own.
MAX_DROPOUT_RATIO = 1.02
# Maximum time to the first window.
MAX_FIRST_WINDOW_SECONDS = 3.0
# Without a speed-up, time or memory must be larger by at least one of these factors.
MIN_TIME_GAIN = 1.05
MIN_MEMORY_GAIN = 1.10


@dataclass(frozen=True)
class Bound:
    """A target of the benchmark, which `--assert` checks: a measured value must be at least a limit
    or, with `at_most`, at most.

    Attributes:
        what: Description of the value.
        value: The measured value.
        limit: The limit.
        at_most: Whether the limit is a maximum.
    """

    what: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the target is met; False if the value is NaN."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """Format the verdict, the value and the target in one line.

        >>> print(Bound("speed", 2.5, 3.0))
        FAILED: speed: 2.5, target >= 3
        """
        verdict = "passed" if self.holds else "FAILED"
        sign = "<=" if self.at_most else ">="
        return f"{verdict}: {self.what}: {self.value:.3g}, target {sign} {self.limit:.3g}"


@dataclass
class Section:
    """One section of the benchmark's report: a table and its targets.

    Attributes:
        title: Title of the section.
        header: Titles of the columns.
        rows: The cells of each row.
        bounds: The targets that `--assert` checks.
        notes: What the reader must know, a line each.
        figures: All measurements, for benchmark.json.
    """

    title: str
    header: list[str]
    rows: list[list[Any]]
    bounds: list[Bound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format the section as Markdown: title, table, list of targets."""
        rows = [[_format_cell(cell) for cell in row] for row in self.rows]
        lines = [f"- {line}" for line in (*self.notes, *self.bounds)]
        return "\n".join([f"## {self.title}", "", table(self.header, rows), "", *lines, ""])


def speed_section(setting: Setting, measured: dict[str, Measurements]) -> Section:
    """Build the report section that compares the speed and memory of all ways of training, on
    samples of different lengths.

    Args:
        setting: The setting of the benchmark.
        measured: Name of the arm -> its measurements.
    """
    section = speed_table(setting, measured)
    rates = {arm: rate for arm, rate, *_ in section.rows}
    memory = {arm: added_memory(result) for arm, result in measured.items()}
    rebalanced = best_of_trainer(rates, REBALANCED)
    faster = best_of_trainer(rates, GROUPED, REBALANCED)
    less_memory = best_of_trainer(memory, GROUPED, REBALANCED, best=np.nanmin)
    name = setting.model
    section.bounds = [
        Bound(
            f"{name}: tokens/s over the better of Trainer's two by length",
            rates[DEFAULT] / faster,
            MIN_SPEED_RATIO[name],
        ),
        Bound(
            f"{name}: memory over the lesser of these two",
            memory[DEFAULT] / less_memory,
            MAX_MEMORY_RATIO,
            at_most=True,
        ),
        Bound(
            f"{name}: own loop over the default",
            rates[OWN_LOOP] / rates[DEFAULT],
            MIN_OWN_LOOP_RATIO,
        ),
        Bound(
            f"{name}: ExactTrainer over batch_rebalance",
            rates[EXACT_TRAINER] / rebalanced,
            MIN_EXACT_TRAINER_RATIO,
        ),
        Bound(
            f"{name}: arms with each sample once per epoch",
            sum(result.each_once for result in measured.values()),
            len(measured),
        ),
    ]
    return section


def speed_table(setting: Setting, measured: dict[str, Measurements]) -> Section:
    """Build a section of the speed, padding and memory of ways of training, without targets.

    Args:
        setting: The setting of the benchmark.
        measured: Name of the arm -> its measurements, Trainer's among them.
    """
    rates = {arm: tokens_per_second(setting, result) for arm, result in measured.items()}
    base = best_of_trainer(rates, TRAINER)
    faster = best_of_trainer(rates, GROUPED, REBALANCED)
    rows = []
    for arm, result in measured.items():
        rate = rates[arm]
        rows.append([arm, rate, rate / base, rate / faster, result.padding, added_memory(result)])
    header = [
        "arm",
        "real tokens/s",
        "x Trainer",
        "x better by length",
        "padded / real",
        "memory that training adds, MiB",
    ]
    note = "ratios are to the better of Trainer as shipped and with cuDNN's attention off"
    if setting.device == "cpu":
        note = "a CPU has no cuDNN attention, so Trainer has one arm for each of its modes"
    title = f"{setting.model}: {len(setting.samples)} ragged samples"
    return Section(title, header, rows, notes=[note], figures=_to_dicts(measured))


def best_of_trainer(
    values: dict[str, float], *arms: str, best: Callable[[list[float]], float] = np.nanmax
) -> float:
    """Return the best of arms of Trainer, as shipped and, if measured, without cuDNN attention. NaN
    is an arm that failed.
    """
    names = [name for arm in arms for name in (arm, arm + WITHOUT_CUDNN)]
    return best([values[name] for name in names if name in values])


def ablation_section(setting: Setting, measured: dict[str, Measurements]) -> Section:
    """Build the report section of the ablation: for each speed-up of hf_ga, how many times longer a
    window takes without it (median over windows), how many times more memory training adds, and
    whether the speed-up is worth it.

    Args:
        setting: The setting of the benchmark.
        measured: Name of the arm -> its measurements: hf_ga's default first, then the arms with one
            speed-up or keyed dropout disabled.
    """
    default = measured[DEFAULT]
    rows = []
    for arm, result in measured.items():
        pairs = zip(result.seconds, default.seconds, strict=True)
        time_ratio = statistics.median(without / with_all for without, with_all in pairs)
        memory = added_memory(result)
        memory_ratio = memory / added_memory(default)
        is_worth_it = time_ratio >= MIN_TIME_GAIN or memory_ratio >= MIN_MEMORY_GAIN
        rows.append([arm, time_ratio, memory, memory_ratio, "yes" if is_worth_it else "no"])
    # The first row is the default itself.
    rows[0][0] = "nothing"
    rows[0][-1] = ""
    header = [
        "left out",
        "time",
        "memory that training adds, MiB",
        "memory",
        "worth 5 % of time or 10 % of memory",
    ]
    time_of_native = next(row[1] for row in rows if row[0] == NATIVE)
    bound = Bound(
        f"{setting.model}: time of keyed over native dropout",
        1 / time_of_native,
        MAX_DROPOUT_RATIO,
        at_most=True,
    )
    title = f"{setting.model}: each speed-up left out"
    return Section(title, header, rows, [bound], figures=_to_dicts(measured))


def ranks_section(setting: Setting, measured: dict[str, dict[str, Measurements]]) -> Section:
    """Build the report section that compares one process with two CPU ranks, on an idle machine and
    while another process keeps one core busy.

    Args:
        setting: The setting of the benchmark.
        measured: "idle" or "busy" -> name of the arm -> its measurements.
    """
    rows = []
    ratios: dict[str, tuple[float, float]] = {}  # over batch_rebalance; two ranks over one process
    for load_name, results in measured.items():
        rates = {arm: tokens_per_second(setting, result) for arm, result in results.items()}
        for arm, rate in rates.items():
            title = f"{arm}, {load_name}"
            rows.append([title, rate, rate / rates[REBALANCED], rate / rates[DEFAULT]])
        over_trainer = rates[DEFAULT] / rates[REBALANCED]
        ratios[load_name] = (over_trainer, rates[TWO_RANKS] / rates[DEFAULT])
    name = setting.model
    bounds = [
        Bound(
            f"{name}, busy loop on a core: one process over batch_rebalance",
            ratios["busy"][0],
            MIN_BUSY_SPEED_RATIO,
        ),
        Bound(f"{name}, idle: two ranks over one process", ratios["idle"][1], 1.0),
        Bound(f"{name}, busy loop on a core: two ranks over one process", ratios["busy"][1], 1.0),
    ]
    header = ["arm", "real tokens/s", "x batch_rebalance", "x one process"]
    figures = {load_name: _to_dicts(results) for load_name, results in measured.items()}
    title = f"{name}: two ranks (cpu_2.yaml) and one process"
    return Section(title, header, rows, bounds, figures=figures)


def planning_section(seconds: dict[int, float]) -> Section:
    """Build the report section of the time that a loader needs until its first window.

    Args:
        seconds: Number of samples of the dataset -> seconds to the first window.
    """
    largest = max(seconds)
    bound = Bound(
        f"{largest:,} samples: seconds to the first window",
        seconds[largest],
        MAX_FIRST_WINDOW_SECONDS,
        at_most=True,
    )
    rows = [[f"{num_samples:,}", value] for num_samples, value in seconds.items()]
    return Section(
        "Order and plan",
        ["samples", "seconds to the first window"],
        rows,
        [bound],
        figures={"seconds": seconds},
    )


def tokens_per_second(setting: Setting, measurements: Measurements) -> float:
    """Compute the training speed of an arm: the tokens of an epoch without padding, divided by the
    median over the epochs of their seconds.
    """
    size = setting.windows_per_epoch
    starts = range(0, len(measurements.seconds), size)
    seconds_of_epochs = [sum(measurements.seconds[start : start + size]) for start in starts]
    return setting.real_tokens / statistics.median(seconds_of_epochs)


def added_memory(measurements: Measurements) -> float:
    """Compute the memory that training adds, in MiB: peak memory minus the memory before training;
    NaN for an arm that was not measured.
    """
    if not measurements.peak_memory:
        return math.nan
    return (measurements.peak_memory - measurements.memory_before) / 2**20


def _to_dicts(measured: dict[str, Measurements]) -> dict[str, Any]:
    """Convert the measurements of each arm to a dict, for JSON."""
    return {arm: vars(measurements) for arm, measurements in measured.items()}


def _format_cell(cell: Any) -> str:
    """Format a table cell: a float of 100 or more without decimals, a smaller one with three."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3f}"
