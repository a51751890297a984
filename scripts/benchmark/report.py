"""The tables and bounds of the measurements."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmark.arms import DEFAULT, EXACT_TRAINER, GROUPED, OWN_LOOP, REBALANCED, TRAINER
from benchmark.lap import Measured
from benchmark.setting import Setting

TWO_RANKS = "hf_ga, two ranks"
# Minimum ratio to the tokens/s of the better of Trainer's two strategies by length.
TIMES_BETTER = {"gpt": 1.30, "bert": 1.18}
TIMES_BUSY = 1.20
TIMES_EXACT_TRAINER = 1.15
SHARE_OF_OWN_LOOP = 0.97
# Maximum ratio to the memory of these two.
MOST_MEMORY = 1.05
# Maximum.
FIRST_WINDOW_SECONDS = 3.0
# A speed-up must reach at least one of these ratios.
WORTH_TIME = 1.05
WORTH_MEMORY = 1.10


@dataclass(frozen=True)
class Bound:
    """A bound of `--assert`: `value` is at least `limit` or, if `at_most`, at most."""

    what: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the bound is met; False for NaN."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """
        >>> print(Bound("speed", 2.5, 3.0))
        FAILED: speed: 2.5, target >= 3
        """
        sign = "<=" if self.at_most else ">="
        return (
            f"{'passed' if self.holds else 'FAILED'}: {self.what}: {self.value:.3g}, target "
            f"{sign} {self.limit:.3g}"
        )


@dataclass
class Section:
    """A table with its bounds.

    Attributes:
        title: Its title.
        header: The titles of the columns.
        rows: The cells of each row.
        bounds: The bounds of `--assert`.
        figures: All measurements, for JSON.
    """

    title: str
    header: Sequence[str]
    rows: list[Sequence[Any]]
    bounds: list[Bound] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The section in Markdown."""
        alignment = ["---"] + ["---:"] * (len(self.header) - 1)
        rows = [[_shown(cell) for cell in row] for row in self.rows]
        table = [f"| {' | '.join(line)} |" for line in (self.header, alignment, *rows)]
        bounds = [f"- {bound}" for bound in self.bounds]
        return "\n".join([f"## {self.title}", "", *table, "", *bounds, ""])


def speed_section(setting: Setting, measured: dict[str, Measured]) -> Section:
    """Return the section of all arms on ragged samples."""
    rates = {arm: tokens_per_second(setting, of) for arm, of in measured.items()}
    memory = {arm: added_memory(of) for arm, of in measured.items()}
    # Of those that were measured.
    better = np.nanmax([rates[GROUPED], rates[REBALANCED]])
    rows = []
    for arm, of in measured.items():
        rate = rates[arm]
        rows.append([arm, rate, rate / rates[TRAINER], rate / better, of.padding, memory[arm]])
    lowest = np.nanmin([memory[GROUPED], memory[REBALANCED]])
    name = setting.model
    bounds = [
        Bound(
            f"{name}: tokens/s over the better of Trainer's two by length",
            rates[DEFAULT] / better,
            TIMES_BETTER[name],
        ),
        Bound(
            f"{name}: memory over the lesser of these two",
            memory[DEFAULT] / lowest,
            MOST_MEMORY,
            at_most=True,
        ),
        Bound(
            f"{name}: own loop over the default",
            rates[OWN_LOOP] / rates[DEFAULT],
            SHARE_OF_OWN_LOOP,
        ),
        Bound(
            f"{name}: ExactTrainer over batch_rebalance",
            rates[EXACT_TRAINER] / rates[REBALANCED],
            TIMES_EXACT_TRAINER,
        ),
        Bound(
            f"{name}: arms with each sample once per epoch",
            sum(of.each_once for of in measured.values()),
            len(measured),
        ),
    ]
    header = (
        "arm",
        "real tokens/s",
        "x Trainer",
        "x better by length",
        "padded / real",
        "memory that training adds, MiB",
    )
    return Section(
        f"{name}: {len(setting.samples)} ragged samples", header, rows, bounds, _figures(measured)
    )


def ablation_section(setting: Setting, measured: dict[str, Measured]) -> Section:
    """Return the section of each speed-up left out in turn: how many times longer a window takes
    without it, by the median over windows, and how many times more memory training adds.

    Args:
        setting: The setting of all arms.
        measured: The default arm first, then those without a speed-up.
    """
    whole = measured[DEFAULT]
    rows = []
    for arm, of in measured.items():
        seconds = zip(of.seconds, whole.seconds, strict=True)
        time_ratio = statistics.median(without / with_all for without, with_all in seconds)
        memory = added_memory(of)
        memory_ratio = memory / added_memory(whole)
        is_worth = time_ratio >= WORTH_TIME or memory_ratio >= WORTH_MEMORY
        rows.append([arm, time_ratio, memory, memory_ratio, "yes" if is_worth else "no"])
    # The default arm comes first.
    rows[0][0] = "nothing"
    rows[0][-1] = ""
    header = (
        "left out",
        "time",
        "memory that training adds, MiB",
        "memory",
        "worth 5 % of time or 10 % of memory",
    )
    return Section(f"{setting.model}: each speed-up left out", header, rows, [], _figures(measured))


def ranks_section(setting: Setting, measured: dict[str, dict[str, Measured]]) -> Section:
    """Return the section of one process and two ranks, idle and beside a busy loop.

    Args:
        setting: The setting of all arms.
        measured: "idle" and "busy" -> arm -> measurements.
    """
    rates = {
        when: {arm: tokens_per_second(setting, of) for arm, of in arms.items()}
        for when, arms in measured.items()
    }
    rows = [
        [f"{arm}, {when}", rate, rate / of[REBALANCED], rate / of[DEFAULT]]
        for when, of in rates.items()
        for arm, rate in of.items()
    ]
    name = setting.model
    busy = rates["busy"]
    idle = rates["idle"]
    bounds = [
        Bound(
            f"{name}, busy loop on a core: one process over batch_rebalance",
            busy[DEFAULT] / busy[REBALANCED],
            TIMES_BUSY,
        ),
        Bound(f"{name}, idle: two ranks over one process", idle[TWO_RANKS] / idle[DEFAULT], 1.0),
        Bound(
            f"{name}, busy loop on a core: two ranks over one process",
            busy[TWO_RANKS] / busy[DEFAULT],
            1.0,
        ),
    ]
    header = ("arm", "real tokens/s", "x batch_rebalance", "x one process")
    figures = {when: _figures(arms) for when, arms in measured.items()}
    return Section(f"{name}: two ranks (cpu_2.yaml) and one process", header, rows, bounds, figures)


def planning_section(seconds: dict[int, float]) -> Section:
    """Return the section of the seconds to the first window by number of samples."""
    most = max(seconds)
    bound = Bound(
        f"{most:,} samples: seconds to the first window",
        seconds[most],
        FIRST_WINDOW_SECONDS,
        at_most=True,
    )
    rows = [[f"{size:,}", value] for size, value in seconds.items()]
    return Section(
        "Order and plan",
        ("samples", "seconds to the first window"),
        rows,
        [bound],
        {"seconds": seconds},
    )


def tokens_per_second(setting: Setting, measured: Measured) -> float:
    """Compute the real tokens of an epoch over the median of the epochs' seconds."""
    size = setting.windows_per_epoch
    starts = range(0, len(measured.seconds), size)
    epochs = [sum(measured.seconds[start : start + size]) for start in starts]
    return setting.real_tokens / statistics.median(epochs)


def added_memory(measured: Measured) -> float:
    """Compute the MiB of peak memory above that before training; NaN for an arm that was not
    measured.
    """
    if not measured.peak_memory:
        return math.nan
    return (measured.peak_memory - measured.memory_before) / 2**20


def _figures(measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the measurements of each arm for JSON."""
    return {arm: vars(of) for arm, of in measured.items()}


def _shown(cell: Any) -> str:
    """Return the text of a cell."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3f}"
