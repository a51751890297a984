"""Integrity of checkpoints: `manifest.json` lists the SHA-256 of every other file, and its own.

`verify` compares all files with it before anything is loaded.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError

PREFIX = "checkpoint-"
SHARDS = "shards"  # the folder of weights and optimizer
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 3
_REMEDY = "Resume from another checkpoint, or start a new run."


def write_manifest(folder: Path, step: int, versions: dict[str, str]) -> None:
    """Write the manifest of the folder's current files.

    Args:
        folder: The checkpoint, complete but for the manifest.
        step: The number of optimizer steps made so far.
        versions: Library -> version, for whoever reads the file.
    """
    files = {
        path.relative_to(folder).as_posix(): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    content = {"format": FORMAT, "step": step, "versions": versions, "files": files}
    (folder / MANIFEST).write_text(_dump(content), encoding="utf-8")


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest.

    Args:
        folder: The checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: If a file is missing, damaged, or from another checkpoint; the message
            names it.
    """
    manifest = read_manifest(folder)
    for name, sha256 in manifest["files"].items():
        try:
            found = digest(folder / name)
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} cannot be read: {error.strerror}. {_REMEDY}"
            ) from error
        if found != sha256:
            raise CheckpointError(
                f"{folder / name} is damaged: SHA-256 mismatch with {MANIFEST}. {_REMEDY}"
            )
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read manifest.json and check it against its own SHA-256.

    Args:
        folder: The checkpoint.

    Returns:
        `format`, `step`, `versions` and `files` (name -> SHA-256).

    Raises:
        CheckpointError: If the file is missing, or any bit changed.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        content = json.loads(text)
        del content["sha256"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {MANIFEST}. {_REMEDY}"
        ) from error
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: it is not the JSON that hf_ga writes. {_REMEDY}"
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, but this version of hf_ga reads "
            f"{FORMAT}. {_REMEDY}"
        )
    # White space is not part of the hash, so compare the whole text.
    if text != _dump(content).encode():
        raise CheckpointError(f"{path} is damaged: SHA-256 mismatch. {_REMEDY}")
    return content


def digest(file: Path) -> str:
    """Compute the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _dump(content: dict[str, Any]) -> str:
    """Return the JSON text of the content and of its SHA-256."""
    text = json.dumps(content)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": sha256}, indent=1) + "\n"
