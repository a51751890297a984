"""Completing and loading checkpoints atomically. All random numbers are derived from seed and
position, so there is no random state to save.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from hf_ga.errors import CheckpointError
from hf_ga.parallel.processes import raise_on_all_ranks
from hf_ga.parallel.shards import load_shards
from hf_ga.recovery.files import discard, new_partial, partial_of, publish, tidy, writing
from hf_ga.recovery.latest import keep_newest, list_checkpoints, set_latest, step_of
from hf_ga.recovery.manifest import PREFIX, SHARDS, STATE, write_manifest
from hf_ga.recovery.versions import versions

# What torch and damaged or unfitting files raise while a checkpoint is loaded, besides torch's
# CheckpointException, which derives from BaseException.
_LOAD_ERRORS = (OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError)


def begin_checkpoint(accelerator: Accelerator, output_dir: Path, step: int) -> Path:
    """Begin the checkpoint `output_dir/checkpoint-<step>`: an empty folder of a temporary name, in
    which it is written. All processes must call it.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints.
        step: The number of optimizer steps made so far.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        CheckpointError: If a write fails; on all processes.
    """
    final = output_dir / f"{PREFIX}{step}"
    with raise_on_all_ranks(accelerator), writing(output_dir, output_dir):
        if accelerator.is_main_process:
            output_dir.mkdir(parents=True, exist_ok=True)
            tidy(output_dir)
            new_partial(final)
    return final


def complete_checkpoint(final: Path, state: dict[str, Any], keep: int) -> None:
    """Complete a checkpoint whose shards are written: add state and manifest, flush it to the disk,
    give it its final name, name it in `latest`, and delete the checkpoints of later steps (from
    before a resume) and all but the newest ones. For the main process.

    Args:
        final: The final path of the checkpoint.
        state: The content of `state.json`, which includes "step".
        keep: The number of checkpoints to keep.

    Raises:
        CheckpointError: If a write fails.
    """
    partial = partial_of(final)
    output_dir = final.parent
    step = state["step"]
    with writing(partial, output_dir):
        (partial / STATE).write_text(json.dumps(state), encoding="utf-8")
        write_manifest(partial, step, versions())
        publish(final)
    with writing(output_dir, output_dir):
        set_latest(final)
        for folder in list_checkpoints(output_dir):
            if step_of(folder) > step:
                discard(folder)
        keep_newest(output_dir, step, keep)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, trained_only: bool = False
) -> dict[str, Any]:
    """Load a checkpoint's weights and optimizer state in place. All processes must call it.

    The checkpoint may have been saved with another number of processes and another kind of
    parallelism (one process, DDP, FSDP1, FSDP2, pipeline).

    Args:
        folder: The checkpoint, verified by `find_checkpoint`.
        model: The model, as it was prepared.
        optimizer: The optimizer of the model's parameters.
        trained_only: Whether it has no frozen parameters.

    Returns:
        The `state` that was saved, with the number of steps as "step".

    Raises:
        CheckpointError: If the checkpoint does not fit this model.
    """
    with _reading(folder):
        load_shards(model, optimizer, folder / SHARDS, trained_only=trained_only)
        state = read_state(folder)
        saved_groups = state.pop("param_groups")
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            group.update(saved)
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint: all it contains besides weights and the optimizer's
    tensors (step, optimizer settings, position, schedule, ...).

    Raises:
        CheckpointError: If the file cannot be read.
    """
    with _reading(folder / STATE):
        return json.loads((folder / STATE).read_text(encoding="utf-8"))


def state_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return one SHA-256 of all tensors of a model's weights or gradients, to compare those of two
    runs (an interrupted and an uninterrupted one, for example): equal hashes mean equal bits.

    Args:
        weights: Name -> tensor, such as a `state_dict()`.

    Returns:
        The SHA-256, in hexadecimal, of names, shapes, dtypes and bytes, in the order of the names.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        header = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        digest.update(header.encode())
        values = tensor.detach().cpu().contiguous().flatten()
        as_bytes = values.view(torch.uint8).numpy()
        digest.update(as_bytes.tobytes())
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise a CheckpointError in place of any error that the block raises while it loads a
    checkpoint. The checkpoint was verified before, so its files are intact, and the error means
    that they do not fit this model.

    Args:
        path: The file or folder that the block loads, for the message.
    """
    try:
        yield
    except (*_LOAD_ERRORS, CheckpointException) as error:
        lines = str(error).strip().splitlines()
        if not lines:
            reason = type(error).__name__
        elif isinstance(error, _LOAD_ERRORS):
            reason = lines[0]
        else:
            # A CheckpointException shows a traceback, with the error itself in its last line.
            reason = lines[-1]
        raise CheckpointError(
            f"{path} does not fit this model: {reason} Use another checkpoint, or start a new run."
        ) from error
