"""From the hidden states of a text's tokens to one vector."""

from collections.abc import Callable

import torch
from torch import Tensor


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the hidden states of the real tokens."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def first_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Take the first real token: `<cls>` of a BERT."""
    return _token_at(hidden, mask.argmax(1))


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Take the last real token: the only one of a decoder that sees the whole text."""
    num_behind = mask.flip(1).argmax(1)
    return _token_at(hidden, mask.shape[1] - 1 - num_behind)


def _token_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Take the hidden state at one position of each text."""
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, positions]


# Name, as in sentence-transformers -> (hidden states of shape (texts, width, hidden size),
# attention mask of shape (texts, width), 1 for real tokens) -> (texts, hidden size). Padding may be
# on any side.
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean_of_tokens,
    "cls": first_token,
    "lasttoken": last_token,
}
