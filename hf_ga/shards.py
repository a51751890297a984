"""Weights and optimizer in shards, through torch's distributed checkpoint: each process writes its own file, any layout reads them.

The metadata of that format is a pickle, so callers verify its hash first (`checkpoint.py` does).
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from hf_ga.errors import CheckpointError


def save_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Write the shards of this process; all processes must call it. A parameter goes by its name in the unwrapped model."""
    distributed_checkpoint.save(_state(model, optimizer), checkpoint_id=folder)


def load_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Read weights and optimizer in place, whatever layout wrote them: FSDP1, FSDP2, DDP or one process; all must call it.

    Raises:
        CheckpointError: they are not of this model, or damaged.
    """
    state = _state(model, optimizer)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            distributed_checkpoint.load(state, checkpoint_id=folder)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise CheckpointError(
            f"{folder} is damaged or not of this model: {reason[0]} Resume from an older checkpoint, or start anew."
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, getattr(optimizer, "optimizer", optimizer))  # the plain one inside a prepared one
    return {"model": weights, "optimizer": moments}
