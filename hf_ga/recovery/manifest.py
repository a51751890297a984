"""Whether a checkpoint is whole: `manifest.json` states step and versions, size and SHA-256 of every other file, its own digest.

Nothing of a checkpoint is unpickled or loaded before `verify` has compared all of its files with it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError

PREFIX = "checkpoint-"
WEIGHTS, OPTIMIZER, SHARDS = "model.safetensors", "optimizer.pt", "shards"  # either the first two or, under FSDP, the folder
STATE, MANIFEST = "state.json", "manifest.json"
FORMAT = 1
_REMEDY = "Resume from another checkpoint, or start anew."
_KEYS = {"format", "step", "versions", "files", "sha256"}


def write_manifest(folder: Path, step: int, versions: dict[str, str]) -> None:
    """State what all files of the folder are now."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    stated = {name: {"bytes": path.stat().st_size, "sha256": digest(path)} for name, path in files.items()}
    content = {"format": FORMAT, "step": step, "versions": versions, "files": stated}
    (folder / MANIFEST).write_text(_dump(content | {"sha256": _own_digest(content)}), encoding="utf-8")


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest; returns the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or of another checkpoint; the message names it.
    """
    manifest = read_manifest(folder)
    if folder.name.removeprefix(PREFIX).isdigit() and folder.name != f"{PREFIX}{manifest['step']}":
        raise CheckpointError(
            f"{folder / MANIFEST} is of step {manifest['step']}: the folder holds another checkpoint than its name says. {_REMEDY}"
        )
    needed = {STATE} if is_in_shards(manifest) else {STATE, WEIGHTS, OPTIMIZER}
    if unlisted := sorted(needed - manifest["files"].keys()):
        raise CheckpointError(f"{folder / MANIFEST} does not list {unlisted[0]}, which a checkpoint needs. {_REMEDY}")
    for name, stated in manifest["files"].items():
        _compare(folder / name, stated)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """What manifest.json states, after a look at its own digest.

    Raises:
        CheckpointError: there is none, or not a bit of it may have changed and did.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode()
        content = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}. {_REMEDY}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_line(error)}. {_REMEDY}") from error
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise CheckpointError(f"{path} is damaged, or of another version of hf_ga: it has not exactly {sorted(_KEYS)}. {_REMEDY}")
    stated = {name: value for name, value in content.items() if name != "sha256"}
    if text != _dump(content) or content["sha256"] != _own_digest(stated):  # the text: white space is no part of the content
        raise CheckpointError(f"{path} is damaged: SHA-256 mismatch. {_REMEDY}")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version of hf_ga reads {FORMAT}. {_REMEDY}")
    return content


def is_in_shards(manifest: dict[str, Any]) -> bool:
    """Whether weights and optimizer lie in `shards/`."""
    return f"{SHARDS}/.metadata" in manifest["files"]


def _compare(file: Path, stated: dict[str, Any]) -> None:
    try:
        size = file.stat().st_size
        if size != stated["bytes"]:
            raise CheckpointError(f"{file} is damaged: it has {size:,} bytes, {MANIFEST} states {stated['bytes']:,}. {_REMEDY}")
        if digest(file) != stated["sha256"]:
            raise CheckpointError(f"{file} is damaged, or of another checkpoint: SHA-256 mismatch with {MANIFEST}. {_REMEDY}")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}. {_REMEDY}") from error


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
