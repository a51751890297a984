"""What a micro-batch costs: a model of its time, from the number of its samples and their padded width alone."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hf_ga.exact.plan import Plan

# Attention computes 4 x width x hidden operations a token and layer, everything else of a layer 24 x hidden^2: they are equal at a
# width of 6 x hidden. A fit of the times of some 150 packed micro-batches of 4 layers x 256 on two cores: 6.5 x hidden for a GPT,
# 5.2 for a BERT.
WIDTHS_PER_HIDDEN = 6
HIDDEN_SIZE = 768  # where nobody says: that of BERT-base and GPT-2-small


@dataclass(frozen=True)
class CostModel:
    """Time of a micro-batch, measured in tokens: overhead + samples x width x (1 + width / attention_width).

    Where layers compute no padding (`packed`), only attention depends on the width: overhead + real tokens + samples x width^2 /
    attention_width.

    All costs are whole numbers of 1 / attention_width tokens, so that every process finds the same plan on any machine.

    Attributes:
        overhead: what a micro-batch costs however small it is, in tokens.
        multiple: padded widths are rounded up to one.
        attention_width: the width at which attention costs as much as all the rest.
        packed: layers compute real tokens only (`--padding_free`).

    >>> cost = CostModel(overhead=10, multiple=8, attention_width=16)
    >>> cost.widths(np.array([0, 3, 8, 9]))
    array([ 8,  8,  8, 16])
    >>> cost.of(np.array([8, 5])) / 16  # 10 + 2 x 8 x 1.5
    34.0
    >>> replace(cost, packed=True).of(np.array([8, 5])) / 16  # 10 + 13 + 2 x 8 x 0.5
    31.0
    """

    overhead: int
    multiple: int = 1
    attention_width: int = WIDTHS_PER_HIDDEN * HIDDEN_SIZE
    packed: bool = False

    def widths(self, lengths: np.ndarray) -> np.ndarray:
        """Padded widths (int64) of samples; one without tokens is as wide as one token."""
        return -(-np.maximum(np.asarray(lengths, np.int64), 1) // self.multiple) * self.multiple

    def prices(self, widths: np.ndarray) -> np.ndarray:
        """Cost of one more sample in a micro-batch of that width, beside its own."""
        return widths * widths if self.packed else widths * (self.attention_width + widths)

    def own(self, lengths: np.ndarray) -> np.ndarray:
        """What a sample costs in any micro-batch."""
        return np.asarray(lengths, np.int64) * (self.attention_width if self.packed else 0)

    @property
    def fixed(self) -> int:
        """Cost of a micro-batch without samples."""
        return self.overhead * self.attention_width

    def of(self, lengths: np.ndarray) -> int:
        """Cost of a micro-batch of samples of these lengths."""
        width = self.widths(lengths).max(initial=1)
        return self.fixed + len(lengths) * int(self.prices(width)) + int(self.own(lengths).sum())

    def of_processes(self, plan: "Plan", lengths: np.ndarray) -> np.ndarray:
        """Cost of each process's share of a window, int64 of shape (processes,)."""
        return np.array([sum(self.of(lengths[m]) for m in share) for share in plan], np.int64)

    def padded_tokens(self, plan: "Plan", lengths: np.ndarray) -> int:
        """Samples x padded width, summed over all micro-batches of a window."""
        return sum(len(m) * int(self.widths(lengths[m].max())) for share in plan for m in share)


# From the same fits: beside its tokens a micro-batch costs as much as 175 (GPT) and 219 tokens (BERT) on two cores, some 40 ms:
# Python's work, and weights and gradients that pass through memory. Widths in multiples of 8 gain 0 to 3 %, and cost more tokens.
CPU = CostModel(overhead=192)
# Estimated, not measured: some 1,000 kernel launches a forward and backward take about 10 ms, in which a GPU computes 6,000 tokens
# of a model of 100 million parameters, or 300 of one of 7 billion. Tensor cores want rows of 16 bytes: 8 numbers of 2 bytes.
CUDA = CostModel(overhead=1024, multiple=8)


def cost_model(device_type: str, hidden_size: int | None = None, *, packed: bool = False) -> CostModel:
    """The model for a device (`cpu`, `cuda`, ...), with the attention of a model of that hidden size.

    packed: the layers compute no padding, as after `prove_targets(..., padding_free=True)` where that is proven.
    """
    model = CPU if device_type == "cpu" else CUDA
    return replace(model, attention_width=WIDTHS_PER_HIDDEN * (hidden_size or HIDDEN_SIZE), packed=packed)
