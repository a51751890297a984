"""The rows of a report: one arm in one layout each, with the causes of differences."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_ga.check.gradients import ratio

OURS = "hf_ga"  # the arm in every check


@dataclass(frozen=True)
class Cause:
    """Why an arm differs: a short `name`, `text`: what is wrong, `seen`: the figures that show
    it.
    """

    name: str
    text: str
    seen: str = field(default="", compare=False)


@dataclass
class Row:
    """One arm in one layout, against the reference of its window. All errors and limits are
    relative to the reference's norm.

    Attributes:
        micro_batches: their sizes in samples. accumulation_steps: micro-batches of a full window.
        error, limit: of the gradient over all parameters together: ||g - g64|| / ||g64||.
        own_error: that of the full batch in the same precision.
        norm_ratio: ||g|| / ||g64||.
        worst_parameter, worst_share: the parameter with the largest error / limit, and this ratio.
        parameter_errors: L2 norm of each parameter's difference, relative to the norm over all.
        loss: as the arm reports it, or None.
        refused: the message of the error that the arm raised. causes: why it differs.
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
        """A row of the table: header -> text."""
        ran = self.refused is None
        return {
            "arm": self.arm,
            "layout": self.layout,
            "micro-batches": sizes_text(self.micro_batches),
            "loss": f"{self.loss:.6f}" if ran and self.loss is not None else "-",
            "relative error": f"{self.error:.1e}" if ran else "-",
            "limit": f"{self.limit:.1e}" if ran else "-",
            "norm ratio": f"{self.norm_ratio:.4f}"
            if ran and self.norm_ratio == self.norm_ratio
            else "-",
            "worst parameter": f"{self.worst_share:.2g} x limit" if ran else "-",
            "verdict": "refused" if not ran else "passed" if self.passed else "FAILED",
        }


def sizes_text(sizes: Sequence[int]) -> str:
    """Sizes of micro-batches, equal sizes grouped: `4 x 16`, `12 + 4`.

    >>> sizes_text([1, 1, 1]), sizes_text([12, 4])
    ('3 x 1', '12 + 4')
    """
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(map(str, sizes[:6])) + (" + ..." if len(sizes) > 6 else "")
