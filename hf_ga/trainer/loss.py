"""A trainer's loss as a module, which can be proven and computed like a model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import Batch
from hf_ga.exact.forward import argument_filter
from hf_ga.exact.sums_of_means import find_sum_of_means
from hf_ga.trainer.pairs import chosen_first, forward_of_pairs, has_pairs


class TrainerLoss(nn.Module):
    """A trainer's loss as a model: maps the entries of a batch to the loss of `compute_loss` on
    this batch alone.

    A `compute_loss_func` receives the number of items of this batch, as in Trainer's evaluation.
    With `loss_sums`, which is called on them, it returns the model's outputs; with `whole_batch`, a
    tuple of what each call of the model in `compute_loss` returned.
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
        self._is_of_window = trainer.whole_batch

    def forward(self, **batch: Any) -> Any:
        """Compute the loss, a scalar; for a head whose loss is a sum of means, the outputs with
        this loss.
        """
        if self._returns_outputs:
            return self.model(**argument_filter(self.model)(batch))
        if self._is_of_window:
            returned: list[Any] = []
            self._loss_with(_ModelCalls(self.model, partial(_call_and_keep, returned)), batch)
            return tuple(returned)
        items = self._items_of(batch)
        if self._has_pairs:
            return self._compute_loss(
                partial(forward_of_pairs, self.model), chosen_first(batch), num_items_in_batch=items
            )
        if find_sum_of_means(batch) is None:
            return self._compute_loss(self.model, batch, num_items_in_batch=items)
        loss, outputs = self._compute_loss(
            self.model, batch, return_outputs=True, num_items_in_batch=items
        )
        outputs["loss"] = loss
        return outputs

    def of_window(self, outputs: tuple, batch: Batch) -> Tensor:
        """Compute the loss of a whole window: `compute_loss` with these outputs in place of the
        model's.

        Args:
            outputs: For each call of the model, its outputs for all samples.
            batch: Of all samples.

        Raises:
            ConfigError: If `compute_loss` calls the model more often than for a micro-batch.
        """
        replay = _ModelCalls(self.model, partial(_next_of, iter(outputs)))
        return self._loss_with(replay, dict(batch))

    def _loss_with(self, model: "_ModelCalls", batch: dict[str, Any]) -> Tensor:
        return self._compute_loss(model, batch, num_items_in_batch=self._items_of(batch))

    def _items_of(self, batch: dict[str, Any]) -> Any:
        return self._count_items([batch]) if self._needs_items else None

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the model's output layer, for the chunked loss."""
        return getattr(self.model, "get_output_embeddings", lambda: None)()


class _ModelCalls:
    """Stands for a model whose calls somebody else answers; everything else is the model's.

    Args:
        model: The model.
        answer: (model, arguments) -> what a call returns.
    """

    def __init__(self, model: nn.Module, answer: Callable) -> None:
        self._model = model
        self._answer = answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _call_and_keep(kept: list[Any], model: nn.Module, args: tuple, kwargs: dict) -> Any:
    kept.append(model(*args, **kwargs))
    return kept[-1]


def _next_of(outputs: Iterator[Any], model: nn.Module, args: tuple, kwargs: dict) -> Any:
    try:
        return next(outputs)
    except StopIteration:
        raise ConfigError(
            "with whole_batch, compute_loss must call the model as often for a window as for a "
            "micro-batch, whose outputs are put together."
        ) from None
