"""Samples and classes with weights, and the mean of their losses by hand."""

from collections.abc import Container

import helpers as h
import torch
import torch.nn.functional as F
from torch import nn

CLASS_WEIGHTS = torch.tensor([1.0, 0.3, 20.0])


def weighted_rows(count: int, rare: int, empty: Container[int]) -> list[dict]:
    """Rows of classes 0 and 1, except one of class 2.

    rare: the row of class 2. empty: the rows of weight 0.
    """
    weights = torch.rand(count, generator=torch.Generator().manual_seed(3)) * 4
    rows = [
        {**sample, "labels": i % 2, "weight": 0.0 if i in empty else float(weights[i])}
        for i, sample in enumerate(h.class_samples(count))
    ]
    rows[rare]["labels"] = 2
    return rows


def weighted_loss(outputs, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The documented form."""
    losses = F.cross_entropy(outputs.logits, batch["labels"], reduction="none")
    weights = CLASS_WEIGHTS[batch["labels"]] * batch["weight"]
    return (weights * losses).sum(), weights.sum()


def unweighted_loss(outputs, batch: dict) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum"), len(batch["labels"])


def weighted_mean(
    model: nn.Module, rows: list[dict], dtype: torch.dtype = torch.float64
) -> tuple[float, h.Gradients]:
    """Loss and gradient of one batch: each row's negative log-likelihood times its share of the
    weights.
    """
    model = h.copy.deepcopy(model).to(dtype)
    model.zero_grad()
    batch = h.pad_right([{k: v for k, v in row.items() if k != "weight"} for row in rows])
    labels = batch.pop("labels")
    weights = [float(CLASS_WEIGHTS[row["labels"]]) * row["weight"] for row in rows]
    weights = torch.tensor(weights, dtype=dtype)
    picked = model(**batch).logits.log_softmax(-1)[torch.arange(len(rows)), labels]
    loss = -(weights / weights.sum() * picked).sum()
    loss.backward()
    return loss.item(), h.gradients(model)
