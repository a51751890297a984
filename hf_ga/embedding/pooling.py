"""Pooling functions of an embedding model: the hidden states of a text's tokens -> one vector."""

from collections.abc import Callable

import torch
from torch import Tensor


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Pool each text's hidden states to its embedding by their mean over the tokens that are not
    padding.

    Args:
        hidden: Hidden states, shape (texts, sequence length, hidden size).
        mask: Attention mask, shape (texts, sequence length), 1 for tokens and 0 for padding.

    Returns:
        Shape (texts, hidden size).
    """
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def first_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Pool each text's hidden states to its embedding by taking that of its first token, `[CLS]` of
    a BERT.

    Args:
        hidden: Hidden states, shape (texts, sequence length, hidden size).
        mask: Attention mask, shape (texts, sequence length), 1 for tokens and 0 for padding, which
            may be on either side.

    Returns:
        Shape (texts, hidden size).
    """
    return _hidden_at(hidden, mask.argmax(1))


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Pool each text's hidden states to its embedding by taking that of its last token, the only
    token of a decoder that attends to the whole text.

    Args:
        hidden: Hidden states, shape (texts, sequence length, hidden size).
        mask: Attention mask, shape (texts, sequence length), 1 for tokens and 0 for padding, which
            may be on either side.

    Returns:
        Shape (texts, hidden size).
    """
    num_padding_after = mask.flip(1).argmax(1)
    return _hidden_at(hidden, mask.shape[1] - 1 - num_padding_after)


def _hidden_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Select one hidden state of each text, shape (texts, hidden size), at positions of shape
    (texts,) in hidden states of shape (texts, sequence length, hidden size).
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, positions]


# Name of a pooling, as in sentence-transformers -> its function.
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean_of_tokens,
    "cls": first_token,
    "lasttoken": last_token,
}
