"""Atomic save and load at window boundaries. All randomness is keyed, so there is no random state to save."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from hf_ga.errors import CheckpointError
from hf_ga.shards import load_shards

PREFIX = "checkpoint-"
WEIGHTS, OPTIMIZER, SHARDS = "model.safetensors", "optimizer.pt", "shards"  # either the first two or, under FSDP, the folder
STATE, MANIFEST = "state.json", "manifest.json"  # the manifest holds the hashes of all other files


def save_checkpoint(
    output_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write `output_dir/checkpoint-<step>` beside and rename it, then delete all but the newest `keep`.

    Args:
        model: unwrapped. state: what else is needed, as plain values (position, schedule, best loss).
    """
    partial = begin_checkpoint(output_dir, step)
    save_model(model, str(partial / WEIGHTS))
    torch.save(optimizer.state_dict(), partial / OPTIMIZER)
    return finish_checkpoint(partial, step, state, keep)


def partial_folder(output_dir: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return output_dir / f"partial-{PREFIX}{step}"


def begin_checkpoint(output_dir: Path, step: int) -> Path:
    """An empty folder to write weights and optimizer to."""
    partial = partial_folder(output_dir, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish_checkpoint(partial: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Add state and manifest to what was written, make it last, give it its name, delete all but the newest `keep`."""
    (partial / STATE).write_text(json.dumps({"step": step, **state}))
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    (partial / MANIFEST).write_text(json.dumps({path.relative_to(partial).as_posix(): _digest(path) for path in files}))
    for path in (*partial.rglob("*"), partial):
        _flush(path)
    final = partial.with_name(f"{PREFIX}{step}")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(final.parent)
    for old in list_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool = False) -> dict[str, Any]:
    """Load weights and optimizer in place; returns the saved state. One in shards is read by any layout.

    Args:
        model: unwrapped; under FSDP (`sharded`) as it is.

    Raises:
        CheckpointError: a file is missing or does not fit this model, or FSDP is to go on with a checkpoint without shards.
    """
    manifest = _read(folder / MANIFEST, lambda file: json.loads(file.read_text()))
    in_shards = f"{SHARDS}/.metadata" in manifest
    for name in {STATE, *({} if in_shards else (WEIGHTS, OPTIMIZER)), *manifest}:
        if _read(folder / name, _digest) != manifest.get(name):
            raise CheckpointError(
                f"{folder / name} has not the SHA-256 that manifest.json states: one of them is damaged. Resume from an older "
                "checkpoint."
            )
    state = _read(folder / STATE, lambda file: json.loads(file.read_text()))
    if in_shards:
        load_shards(model, optimizer, folder / SHARDS)
        return state
    if sharded:
        raise CheckpointError(
            f"{folder} was not written under FSDP and has no shards: go on without FSDP, or start anew (FSDP's own checkpoints can "
            "be resumed with and without it)."
        )
    _read(folder / WEIGHTS, lambda file: load_model(model, str(file), strict=True))
    _read(
        folder / OPTIMIZER,
        lambda file: optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="cpu")),
    )
    return state


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    folders = [folder for folder in output_dir.glob(f"{PREFIX}*") if folder.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix(PREFIX)))


def find_checkpoint(output_dir: Path, wanted: str) -> Path:
    """`auto`: the newest checkpoint of `output_dir`; else the folder itself.

    Raises:
        CheckpointError: there is none.
    """
    if wanted == "auto":
        found = list_checkpoints(output_dir)
        if not found:
            raise CheckpointError(f"resume_from_checkpoint auto: {output_dir} has no checkpoint. Leave the flag out to start anew.")
        return found[-1]
    if not (Path(wanted) / "state.json").is_file():
        raise CheckpointError(f"resume_from_checkpoint {wanted} is not a checkpoint: it has no state.json.")
    return Path(wanted)


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


def _read(file: Path, load: Callable[[Path], Any]) -> Any:
    try:
        return load(file)
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError, UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file} is damaged or not of this model: {reason} Resume from an older checkpoint, or start anew."
        ) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
