"""The state of fp16's loss scaler in a checkpoint."""

from typing import Any

from accelerate import Accelerator

from hf_ga.errors import CheckpointError


def scaler_state(accelerator: Accelerator) -> dict[str, Any] | None:
    """The loss scale and what moves it, as plain JSON values; None without loss scaling. Read it between two steps."""
    return (accelerator.scaler.state_dict() or None) if accelerator.scaler is not None else None  # {}: a scaler that is disabled


def load_scaler_state(accelerator: Accelerator, state: dict[str, Any] | None) -> None:
    """Restore what `scaler_state` returned, growth and backoff factors included. The next step uses it.

    Raises:
        CheckpointError: one of the run and the checkpoint scales its loss and the other does not.
    """
    own = scaler_state(accelerator)
    if own is None and state is None:
        return
    if own is None or state is None:
        raise CheckpointError(
            f"mixed precision changed: the {'checkpoint' if own is None else 'run'} scales its loss (fp16), the "
            f"{'run' if own is None else 'checkpoint'} does not. Resume with the same mixed precision, or start anew."
        )
    accelerator.scaler.load_state_dict(state)
