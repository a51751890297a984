"""Samples that a layer makes NaN of, for the tests of losses and gradients that are not finite."""

import helpers as h
import torch
from torch import nn

BAD_TOKEN = h.VOCABULARY - 1


def marked(samples: list[dict], bad: list[int]) -> list[dict]:
    """The bad samples hold the bad token, no other does. Lengths and labels stay."""
    tokens = [[min(token, BAD_TOKEN - 1) for token in sample["input_ids"]] for sample in samples]
    for i in bad:
        tokens[i][0] = BAD_TOKEN
    return [{**sample, "input_ids": ids} for sample, ids in zip(samples, tokens, strict=True)]


def spoil(model: nn.Module, layer: str, where: str = "forward") -> None:
    """Of the bad samples, the output of a layer or only the gradient that goes into it."""
    is_bad: list[torch.Tensor] = []

    def look(module, args, kwargs):
        is_bad[:] = [(kwargs["input_ids"] == BAD_TOKEN).any(1)]

    def change(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        rows = (
            is_bad[0].view(-1, 1, 1) if len(hidden) == len(is_bad[0]) else is_bad[0].view(1, -1, 1)
        )  # XLNet's second dimension
        changed = torch.where(rows, torch.nan, hidden) if where == "forward" else hidden
        if where == "backward" and hidden.requires_grad:
            changed.register_hook(lambda gradient: torch.where(rows, torch.inf, gradient))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.get_submodule(layer).register_forward_hook(change)
