"""A trainer's loss as a module, which can be proven and computed like a model."""

from functools import partial
from typing import Any

from torch import nn
from transformers import Trainer

from hf_ga.exact.forward import argument_filter
from hf_ga.exact.sums_of_means import kind_of
from hf_ga.trainer.pairs import chosen_first, forward_of_pairs, has_pairs


class TrainerLoss(nn.Module):
    """A trainer's loss as a model: maps the entries of a batch to the loss of `compute_loss` on
    this batch alone.

    A `compute_loss_func` receives the number of items of this batch, as in Trainer's evaluation.
    With `loss_sums`, which is called on them, it returns the model's outputs.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self.config = getattr(trainer.model, "config", None)
        self._compute_loss = trainer.compute_loss
        self._count_items = partial(trainer._get_num_items_in_batch, device=trainer.args.device)
        self._needs_items = trainer.compute_loss_func is not None
        self._has_pairs = has_pairs(trainer.data_collator)
        self._returns_outputs = trainer.loss_sums is not None

    def forward(self, **batch: Any) -> Any:
        """The loss, a scalar; for a head whose loss is a sum of means, the outputs with this
        loss.
        """
        if self._returns_outputs:
            return self.model(**argument_filter(self.model)(batch))
        items = self._count_items([batch]) if self._needs_items else None
        if self._has_pairs:
            return self._compute_loss(
                partial(forward_of_pairs, self.model), chosen_first(batch), num_items_in_batch=items
            )
        if kind_of(batch) is None:
            return self._compute_loss(self.model, batch, num_items_in_batch=items)
        loss, outputs = self._compute_loss(
            self.model, batch, return_outputs=True, num_items_in_batch=items
        )
        outputs["loss"] = loss
        return outputs

    def get_output_embeddings(self) -> nn.Module | None:
        """The model's output layer, for the chunked loss."""
        return getattr(self.model, "get_output_embeddings", lambda: None)()
