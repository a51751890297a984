"""The rows of a report: the result of one arm (training step under test) in one layout, with the
causes of differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_ga.check.gradients import ratio

OURS = "hf_ga"  # name of the arm that every check has: hf_ga's own training step


@dataclass(frozen=True)
class Cause:
    """One reason why a training step's gradient differs from the full batch's.

    Two causes are equal if name and text are; `seen` is not compared.

    Attributes:
        name: A short name of the mistake, such as "dropout".
        text: What the training step does wrong.
        seen: The measured values that show it, or "".
    """

    name: str
    text: str
    seen: str = field(default="", compare=False)


@dataclass
class ReportRow:
    """One row of a report: the gradient g of one arm (training step under test) in one layout,
    compared with g64, the full batch's in float64.

    All errors and limits are relative to the L2 norm of the reference.

    Attributes:
        arm: Name of the arm.
        layout: Name of the layout.
        micro_batches: Number of samples in each micro-batch; empty if none was run.
        accumulation_steps: Micro-batches of a full window, over all processes.
        passed: Whether all errors are at most their limits.
        refused: Why there is no gradient to compare: the message of the error that the arm raised.
            None: the arm ran.
        error: ||g - g64|| / ||g64|| over all parameters together.
        limit: Largest `error` that passes.
        own_error: The `error` of the full batch, computed in the checked precision.
        norm_ratio: ||g|| / ||g64||.
        worst_parameter: Name of the parameter with the largest quotient of error and limit.
        worst_share: This quotient; above 1 the row fails.
        loss: The window's mean loss as the arm returned it. None: it returned no loss.
        loss_error: Relative error of `loss`. None: the arm returned no loss.
        parameter_errors: For each parameter, ||its difference|| / ||g64 over all parameters||.
        causes: Why the arm differs, where the row was diagnosed.
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
        """The error divided by its limit: the larger quotient of all parameters together and of the
        worst one. Above 1 the row fails.
        """
        return max(ratio(self.error, self.limit), self.worst_share)

    def cells(self) -> dict[str, str]:
        """Return column header -> text, "-" where the arm has no value."""
        ran = self.refused is None
        verdict = "passed" if self.passed else "FAILED"
        return {
            "arm": self.arm,
            "layout": self.layout,
            "micro-batches": format_sizes(self.micro_batches) or "-",
            "loss": "-" if self.loss is None else f"{self.loss:.6f}",
            "relative error": f"{self.error:.1e}" if ran else "-",
            "limit": f"{self.limit:.1e}" if ran else "-",
            "norm ratio": "-" if math.isnan(self.norm_ratio) else f"{self.norm_ratio:.4f}",
            "worst parameter": f"{self.worst_share:.2g} x limit" if ran else "-",
            "verdict": verdict if ran else "refused",
        }


def format_sizes(sizes: Sequence[int]) -> str:
    """Format equal sizes of micro-batches as a product, others as a sum of at most six terms.

    >>> format_sizes([1, 1, 1]), format_sizes([12, 4])
    ('3 x 1', '12 + 4')
    """
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    shown = [str(size) for size in sizes[:6]]
    if len(sizes) > 6:
        shown.append("...")
    return " + ".join(shown)
