"""What a micro-batch costs: a model of its time, from the number of its samples and their padded width alone."""

from dataclasses import dataclass

import numpy as np

from hf_ga.exact.plan import Plan

# Attention computes 4 x width x hidden operations a token and layer, everything else of a layer 24 x hidden^2: they are equal at a
# width of 6 x hidden, here for the 768 of BERT-base and GPT-2-small.
ATTENTION_WIDTH = 6 * 768


@dataclass(frozen=True)
class CostModel:
    """Time of a micro-batch in tokens: overhead + samples x width x (1 + width / ATTENTION_WIDTH).

    All costs are integers in units of 1 / ATTENTION_WIDTH tokens, so that every rank finds the same plan on any machine.

    Attributes:
        overhead: what a micro-batch costs however small it is, in tokens.
        multiple: padded widths are rounded up to one.

    >>> cost = CostModel(overhead=10, multiple=8)
    >>> cost.widths(np.array([0, 3, 8, 9]))
    array([ 8,  8,  8, 16])
    >>> cost.of(np.array([8, 5])) / ATTENTION_WIDTH  # 10 + 2 x 8 x (1 + 8 / 4608)
    26.02777...
    """

    overhead: int
    multiple: int = 1

    def widths(self, lengths: np.ndarray) -> np.ndarray:
        """Padded widths (int64) of samples; one without tokens is as wide as one token."""
        return -(-np.maximum(np.asarray(lengths, np.int64), 1) // self.multiple) * self.multiple

    def prices(self, widths: np.ndarray) -> np.ndarray:
        """Cost of one more sample in a micro-batch of that width."""
        return widths * (ATTENTION_WIDTH + widths)

    @property
    def fixed(self) -> int:
        """Cost of a micro-batch without samples."""
        return self.overhead * ATTENTION_WIDTH

    def of(self, lengths: np.ndarray) -> int:
        """Cost of a micro-batch of samples of these lengths."""
        return self.fixed + len(lengths) * int(self.prices(self.widths(lengths).max(initial=1)))

    def of_ranks(self, plan: Plan, lengths: np.ndarray) -> np.ndarray:
        """Cost of each rank's share of a window, int64 of shape (ranks,)."""
        return np.array([sum(self.of(lengths[m]) for m in share) for share in plan], np.int64)

    def padded_tokens(self, plan: Plan, lengths: np.ndarray) -> int:
        """Samples x padded width, summed over all micro-batches of a window."""
        return sum(len(m) * int(self.widths(lengths[m]).max()) for share in plan for m in share)


# A fit of the times of some 150 micro-batches of 4 layers x 256 on two cores: beside its tokens a micro-batch costs as much as 175
# (GPT) and 219 tokens (BERT), for Python's work and for weights and gradients that pass through memory.
CPU = CostModel(overhead=192)
# Estimated, not measured: some 1,000 kernel launches a forward and backward take about 10 ms, in which a GPU computes 6,000 tokens
# of a model of 100 million parameters, or 300 of one of 7 billion. Tensor cores want rows of 16 bytes: 8 numbers of 2 bytes.
CUDA = CostModel(overhead=1024, multiple=8)


def cost_model(device_type: str) -> CostModel:
    """The model for a device (`cpu`, `cuda`, ...)."""
    return CPU if device_type == "cpu" else CUDA
