"""The loss of a Trainer as a module, which hf_ga can prove and compute like a model."""

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
    """A trainer's model together with its loss, as one module: its forward maps the entries of a
    batch to the loss that `Trainer.compute_loss` computes on this batch alone.

    A `compute_loss_func` gets the number of items in this batch, as in Trainer's evaluation. If the
    trainer has `loss_sums`, which hf_ga calls itself, the forward returns the model's outputs. If
    it has `whole_batch = True`, the forward returns a tuple with the outputs of each call of the
    model that `compute_loss` makes.

    Args:
        trainer: The trainer, whose model is not wrapped yet.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Take what computing the loss of an `ExactTrainer` needs from it, before its model is
        wrapped.
        """
        super().__init__()
        self.model = trainer.model
        self.config = getattr(trainer.model, "config", None)
        self._compute_loss = trainer.compute_loss
        # Returns Trainer's number of items (targets) in a list of batches.
        self._get_num_items = partial(trainer._get_num_items_in_batch, device=trainer.args.device)
        self._needs_num_items = trainer.compute_loss_func is not None
        self._has_pairs = has_pairs(trainer.data_collator)
        self._returns_outputs = trainer.loss_sums is not None
        self._is_loss_of_window = trainer.whole_batch

    def forward(self, **batch: Any) -> Any:
        """Compute the loss of a batch with the `compute_loss` of an `ExactTrainer`.

        Args:
            **batch: The entries of the batch.

        Returns:
            The loss, a scalar; for a model whose loss is a sum of several means, its outputs with
            this loss; with `loss_sums` or `whole_batch`, the model's outputs (see the class).
        """
        if self._returns_outputs:
            return self.model(**argument_filter(self.model)(batch))
        if self._is_loss_of_window:
            returned: list[Any] = []
            recording_model = _ModelProxy(self.model, partial(_call_and_record, returned))
            self._compute_loss_with(recording_model, batch)
            return tuple(returned)
        num_items = self._num_items_in(batch)
        if self._has_pairs:
            model = partial(forward_of_pairs, self.model)
            return self._compute_loss(model, chosen_first(batch), num_items_in_batch=num_items)
        has_sum_of_means = find_sum_of_means(batch) is not None
        if not has_sum_of_means:
            return self._compute_loss(self.model, batch, num_items_in_batch=num_items)
        loss, outputs = self._compute_loss(
            self.model, batch, return_outputs=True, num_items_in_batch=num_items
        )
        outputs["loss"] = loss
        return outputs

    def loss_of_window(self, outputs: tuple, batch: Batch) -> Tensor:
        """Compute the loss of a whole window with the trainer's `compute_loss`, which gets outputs
        that were computed before, micro-batch by micro-batch, when it calls the model.

        Args:
            outputs: For each call of the model in `compute_loss`, its outputs for all samples of
                the window.
            batch: The batch of all samples of the window.

        Returns:
            The loss, a scalar.

        Raises:
            ConfigError: If `compute_loss` calls the model more often than for a micro-batch.
        """
        replaying_model = _ModelProxy(self.model, partial(_next_outputs, iter(outputs)))
        return self._compute_loss_with(replaying_model, dict(batch))

    def _compute_loss_with(self, model: "_ModelProxy", batch: dict[str, Any]) -> Tensor:
        """Call the trainer's `compute_loss` on a batch with a proxy in place of the model."""
        return self._compute_loss(model, batch, num_items_in_batch=self._num_items_in(batch))

    def _num_items_in(self, batch: dict[str, Any]) -> Any:
        """Return Trainer's number of items (targets) in a batch for a `compute_loss_func`, or None
        if the trainer has no such function.
        """
        return self._get_num_items([batch]) if self._needs_num_items else None

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer of the trainer's model, which the chunked loss uses; None if the
        model has none.
        """
        return getattr(self.model, "get_output_embeddings", lambda: None)()


class _ModelProxy:
    """Wraps a model for a trainer's `compute_loss`: calls go to a function, and all attributes are
    the model's.

    Args:
        model: The model.
        on_call: A function (model, args, kwargs) -> what a call of the model returns.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[nn.Module, tuple, dict], Any]) -> None:
        """Wrap a model for a trainer's `compute_loss`; its calls go to `on_call`."""
        self._model = model
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `on_call` returns for a call of the model by a trainer's `compute_loss`."""
        return self._on_call(self._model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model, which a trainer's `compute_loss` reads."""
        return getattr(self._model, name)


def _call_and_record(returned: list[Any], model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a model for a trainer's `compute_loss`, append its outputs to the list `returned`, and
    return them.
    """
    outputs = model(*args, **kwargs)
    returned.append(outputs)
    return outputs


def _next_outputs(outputs: Iterator[Any], model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Return the next of the outputs that were computed before, when a trainer's `compute_loss`
    calls the model.

    Args:
        outputs: An iterator over the outputs, one for each call.
        model: The model, not used.
        args: The positional arguments of the call, not used.
        kwargs: The keyword arguments of the call, not used.

    Raises:
        ConfigError: If there are no more outputs.
    """
    try:
        return next(outputs)
    except StopIteration:
        raise ConfigError(
            "with whole_batch, compute_loss must call the model as often for a window as for a "
            "micro-batch, because it gets the concatenated outputs of the micro-batches."
        ) from None
