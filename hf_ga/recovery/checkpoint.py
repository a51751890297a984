"""Atomic save and load at window boundaries. All randomness is keyed, so there is no random state to save."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from hf_ga.errors import CheckpointError
from hf_ga.parallel.shards import check_shardable, load_shards, load_whole
from hf_ga.recovery.files import discard, new_partial, partial_of, publish, tidy
from hf_ga.recovery.latest import keep_newest, list_checkpoints, set_latest, step_of
from hf_ga.recovery.manifest import OPTIMIZER, PREFIX, SHARDS, STATE, WEIGHTS, is_in_shards, read_manifest, verify, write_manifest
from hf_ga.recovery.versions import versions
from hf_ga.recovery.write_errors import writing

# Of safetensors, torch and the files themselves; torch's CheckpointException derives from BaseException.
_LOAD_ERRORS = (OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError, UnpicklingError)


def save_checkpoint(
    output_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write `output_dir/checkpoint-<step>` beside, rename it, write its name into `latest`, then delete all but the newest `keep`.

    Args:
        model: unwrapped. state: what else is needed, as plain values (position, schedule, best loss).

    Raises:
        CheckpointError: the disk is full, or the like. What was there before is kept.
    """
    partial = begin_checkpoint(output_dir, step)
    with writing(partial / WEIGHTS, output_dir):
        save_model(model, str(partial / WEIGHTS))
    with writing(partial / OPTIMIZER, output_dir), (partial / OPTIMIZER).open("wb") as file:
        torch.save(optimizer.state_dict(), file)  # opened here, so that an error has the system's number
    return finish_checkpoint(output_dir, step, state, keep)


def partial_folder(output_dir: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return partial_of(output_dir / f"{PREFIX}{step}")


def begin_checkpoint(output_dir: Path, step: int) -> Path:
    """An empty folder to write weights and optimizer to; what a crash left half written goes."""
    with writing(output_dir, output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        tidy(output_dir)
        return new_partial(output_dir / f"{PREFIX}{step}")


def finish_checkpoint(output_dir: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Add state and manifest to what was written, flush all of it, rename it, write its name into `latest`. Only then delete later
    checkpoints, which a resume has left behind, and all but the newest `keep`.
    """
    partial, final = partial_folder(output_dir, step), output_dir / f"{PREFIX}{step}"
    with writing(partial, output_dir):
        (partial / STATE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")
        write_manifest(partial, step, versions())
        publish(final)
    with writing(output_dir, output_dir):
        set_latest(final)
        for later in [folder for folder in list_checkpoints(output_dir) if step_of(folder) > step]:
            discard(later)
        keep_newest(output_dir, step, keep)
    return final


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool = False, verified: bool = False
) -> dict[str, Any]:
    """Load weights and optimizer in place; returns the saved state. Whatever layout wrote it, any layout reads it.

    Args:
        model: unwrapped; under FSDP (`sharded`) as it is.
        verified: its files were compared with the manifest just now, as `find_checkpoint` does for all processes.

    Raises:
        CheckpointError: a file is damaged or does not fit this model, or its optimizer does not fit FSDP.
    """
    in_shards = is_in_shards(read_manifest(folder) if verified else verify(folder))
    if sharded and not in_shards:
        check_shardable(optimizer, folder)
    with _reading(folder):
        if in_shards:
            load_shards(model, optimizer, folder / SHARDS)
        elif sharded:
            load_whole(model, optimizer, folder / WEIGHTS, folder / OPTIMIZER)
        else:
            load_model(model, str(folder / WEIGHTS), strict=True)
            optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"))
    return read_state(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside weights and optimizer, as plain values."""
    with _reading(folder / STATE):
        return json.loads((folder / STATE).read_text(encoding="utf-8"))


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names, shapes, types and bytes of all parameters and buffers, in the order of their names."""
    return state_sha256(model.state_dict())


def state_sha256(weights: Mapping[str, Tensor]) -> str:
    """`weights_sha256` of the model whose `state_dict()` this is."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Loads what is as it was written, but maybe for another model."""
    try:
        yield
    except (*_LOAD_ERRORS, CheckpointException) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0 if isinstance(error, _LOAD_ERRORS) else -1]
        raise CheckpointError(f"{path} does not fit this model: {reason} Resume from another checkpoint, or start anew.") from error
