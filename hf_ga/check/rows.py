"""The rows of a report: one arm in one layout each, with the causes of differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_ga.check.gradients import ratio

OURS = "hf_ga"  # the arm in every check


@dataclass(frozen=True)
class Cause:
    """Why an arm differs.

    Attributes:
        name: A short name of the mistake.
        text: What is wrong.
        seen: The figures that show it.
    """

    name: str
    text: str
    seen: str = field(default="", compare=False)


@dataclass
class Row:
    """One arm in one layout, compared with the reference of its window.

    All errors and limits are relative to the reference's norm.

    Attributes:
        arm: Name of the arm.
        layout: Name of the layout.
        micro_batches: Their sizes in samples.
        accumulation_steps: Micro-batches of a full window.
        passed: All errors are below their limits.
        refused: The message of the error that the arm raised. None: it ran.
        error: Of the gradient over all parameters together: ||g - g64|| / ||g64||.
        limit: Of `error`.
        own_error: The error of the full batch in the same precision.
        norm_ratio: ||g|| / ||g64||.
        worst_parameter: The parameter with the largest error / limit.
        worst_share: This ratio.
        loss: As the arm reports it. None: it reports none.
        loss_error: Relative error of that loss.
        parameter_errors: L2 norm of each parameter's difference, relative to the norm over all.
        causes: Why the arm differs.
    """

    arm: str
    layout: str
    micro_batches: list[int]
    accumulation_steps: int
    passed: bool = False
    refused: str | None = None
    error: float = float("inf")
    limit: float = 0.0
    own_error: float = 0.0
    norm_ratio: float = float("nan")
    worst_parameter: str = ""
    worst_share: float = float("inf")
    loss: float | None = None
    loss_error: float | None = None
    parameter_errors: dict[str, float] = field(default_factory=dict)
    causes: list[Cause] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The error as a share of its limit: above 1 the row fails."""
        return max(ratio(self.error, self.limit), self.worst_share)

    def cells(self) -> dict[str, str]:
        """Format a row of the table: header -> text."""
        cells = {
            "arm": self.arm,
            "layout": self.layout,
            "micro-batches": sizes_text(self.micro_batches),
            "loss": "-",
            "relative error": "-",
            "limit": "-",
            "norm ratio": "-",
            "worst parameter": "-",
            "verdict": "refused",
        }
        if self.refused is not None:
            return cells
        if self.loss is not None:
            cells["loss"] = f"{self.loss:.6f}"
        if not math.isnan(self.norm_ratio):
            cells["norm ratio"] = f"{self.norm_ratio:.4f}"
        cells["relative error"] = f"{self.error:.1e}"
        cells["limit"] = f"{self.limit:.1e}"
        cells["worst parameter"] = f"{self.worst_share:.2g} x limit"
        cells["verdict"] = "passed" if self.passed else "FAILED"
        return cells


def sizes_text(sizes: Sequence[int]) -> str:
    """Format sizes of micro-batches, equal ones together: `4 x 16`, `12 + 4`.

    >>> sizes_text([1, 1, 1]), sizes_text([12, 4])
    ('3 x 1', '12 + 4')
    """
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    shown = [str(size) for size in sizes[:6]]
    if len(sizes) > 6:
        shown.append("...")
    return " + ".join(shown)
