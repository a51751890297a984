"""What attention on packed tokens computes, for its kernels and its callers."""

from dataclasses import dataclass

MAX_HEAD_DIM = 256  # of the kernels


@dataclass(frozen=True)
class AttentionOptions:
    """What attention computes, besides its tensors.

    Attributes:
        drop_probability: Dropout probability of an attention weight, with 0 <= p < 1.
        scale: Factor of the products of queries and keys.
        is_causal: Whether a query attends to no later tokens.
        sliding_window: Maximum number of tokens that a query attends to, itself and those before
            it. None: no limit.
    """

    drop_probability: float
    scale: float
    is_causal: bool
    sliding_window: int | None = None
