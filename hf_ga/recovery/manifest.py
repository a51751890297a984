"""Whether a checkpoint is whole: `manifest.json` lists the SHA-256 of every other file, and its own.

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
FORMAT = 2
_REMEDY = "Resume from another checkpoint, or start anew."


def write_manifest(folder: Path, step: int, versions: dict[str, str]) -> None:
    """List all files of the folder as they are now."""
    files = {path.relative_to(folder).as_posix(): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    content = {"format": FORMAT, "step": step, "versions": versions, "files": files}
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
    for name, sha256 in manifest["files"].items():
        try:
            found = digest(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}. {_REMEDY}") from error
        if found != sha256:
            raise CheckpointError(f"{folder / name} is damaged: SHA-256 mismatch with {MANIFEST}. {_REMEDY}")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of manifest.json, checked against its own SHA-256.

    Raises:
        CheckpointError: there is none, or any of its bits changed.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        content = json.loads(text)
        stated = content.pop("sha256")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}. {_REMEDY}") from error
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not the JSON that hf_ga writes. {_REMEDY}") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {content.get('format')}, this version of hf_ga reads {FORMAT}. {_REMEDY}")
    # The text, too: white space is no part of the content.
    if stated != _own_digest(content) or text != _dump(content | {"sha256": stated}).encode():
        raise CheckpointError(f"{path} is damaged: SHA-256 mismatch. {_REMEDY}")
    return content


def is_in_shards(manifest: dict[str, Any]) -> bool:
    """Whether weights and optimizer lie in `shards/`."""
    return f"{SHARDS}/.metadata" in manifest["files"]


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()
