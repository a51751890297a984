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

PREFIX = "checkpoint-"
FILES = ("model.safetensors", "optimizer.pt", "state.json")  # manifest.json holds their hashes


def save_checkpoint(
    output_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write `output_dir/checkpoint-<step>` beside and rename it, then delete all but the newest `keep`.

    Args:
        model: unwrapped. state: what else is needed, as plain values (position, schedule, best loss).
    """
    final = output_dir / f"{PREFIX}{step}"
    partial = output_dir / f"partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(model, str(partial / "model.safetensors"))
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps({"step": step, **state}))
    (partial / "manifest.json").write_text(json.dumps({name: _digest(partial / name) for name in FILES}))
    for file in (*partial.iterdir(), partial):
        _flush(file)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(output_dir)
    for old in list_checkpoints(output_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load weights and optimizer in place; returns the saved state.

    Raises:
        CheckpointError: a file is missing or does not fit this model.
    """
    manifest = _read(folder / "manifest.json", lambda file: json.loads(file.read_text()))
    for name in FILES:
        if _read(folder / name, _digest) != manifest.get(name):
            raise CheckpointError(
                f"{folder / name} has not the SHA-256 that manifest.json states: one of them is damaged. Resume from an older "
                "checkpoint."
            )
    state = _read(folder / "state.json", lambda file: json.loads(file.read_text()))
    _read(folder / "model.safetensors", lambda file: load_model(model, str(file), strict=True))
    _read(
        folder / "optimizer.pt",
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
