"""`ExactTrainer.whole_batch`: a trainer's `compute_loss` as a loss of all samples of a window."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from hf_ga.errors import ConfigError
from hf_ga.model.forward import Batch


class WindowLoss:
    """A trainer's `compute_loss` in two parts: the calls of the model that it makes, and the loss
    of all samples of a window, in which these calls return outputs that were computed before.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Take what computing the loss needs from an `ExactTrainer`."""
        self.trainer = trainer
        self.model = trainer.model
        self._compute_loss = trainer.compute_loss

    def __call__(self, **batch: Any) -> tuple:
        """Return the outputs of each call of the model in `compute_loss` for a batch."""
        return self.outputs_of(self.model, batch)

    def outputs_of(self, model: nn.Module, batch: dict[str, Any]) -> tuple:
        """Return the outputs of each call of a model in `compute_loss` for a batch.

        Args:
            model: The model, with or without wrappers.
            batch: The batch.
        """
        returned: list[Any] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            """Call the model, and keep its outputs."""
            outputs = model(*args, **kwargs)
            returned.append(outputs)
            return outputs

        self._compute_loss_with(record, batch)
        return tuple(returned)

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
        remaining = list(outputs)

        def replay(*args: Any, **kwargs: Any) -> Any:
            """Return the next of the outputs, whatever the arguments."""
            if not remaining:
                raise ConfigError(
                    "with whole_batch, compute_loss must call the model as often for a window as "
                    "for a micro-batch, because it gets the concatenated outputs of the "
                    "micro-batches."
                )
            return remaining.pop(0)

        return self._compute_loss_with(replay, dict(batch))

    def _compute_loss_with(self, on_call: Callable[..., Any], batch: dict[str, Any]) -> Tensor:
        """Call the trainer's `compute_loss` on a batch; `on_call` stands for calls of the model."""
        model = _ModelProxy(self.model, on_call)
        num_items = num_items_in(self.trainer, batch)
        return self._compute_loss(model, batch, num_items_in_batch=num_items)


def num_items_in(trainer: Trainer, batch: dict[str, Any]) -> Any:
    """Return Trainer's number of items (targets) in a batch for its `compute_loss_func`; None if it
    has none.
    """
    if trainer.compute_loss_func is None:
        return None
    return trainer._get_num_items_in_batch([batch], device=trainer.args.device)


class _ModelProxy:
    """Wraps a model for a trainer's `compute_loss`: calls go to the function `on_call`, and all
    attributes are the model's.
    """

    def __init__(self, model: nn.Module, on_call: Callable[..., Any]) -> None:
        """Wrap a model for a trainer's `compute_loss`."""
        self._model = model
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `on_call` returns."""
        return self._on_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        return getattr(self._model, name)
