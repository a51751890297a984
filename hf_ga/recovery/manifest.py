"""Integrity of checkpoints: `manifest.json` lists the SHA-256 of every other file of a checkpoint,
and of its own content.

`verify` compares all files with it before anything is loaded.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError

PREFIX = "checkpoint-"  # of the name of a checkpoint's folder; the step follows
SHARDS = "shards"  # in a checkpoint: the folder of weights and optimizer state
STATE = "state.json"  # in a checkpoint: the state besides these tensors
MANIFEST = "manifest.json"
FORMAT = 3  # version of the files' layout, increased when older versions cannot read it
_REMEDY = "Resume from another checkpoint, or start a new run."


def write_manifest(folder: Path, step: int, versions: dict[str, str]) -> None:
    """Write `manifest.json` into a checkpoint, with the SHA-256 of all files that the checkpoint
    contains now.

    Args:
        folder: The checkpoint, complete except for the manifest.
        step: The number of optimizer steps made so far.
        versions: Library -> version, as information for people who read the file.
    """
    sha256_by_name = {
        path.relative_to(folder).as_posix(): sha256_of_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    content = {"format": FORMAT, "step": step, "versions": versions, "files": sha256_by_name}
    (folder / MANIFEST).write_text(_manifest_json(content), encoding="utf-8")


def verify(folder: Path) -> dict[str, Any]:
    """Check that every file of a checkpoint has the SHA-256 that its manifest lists.

    Args:
        folder: The checkpoint.

    Returns:
        The content of the manifest; see `read_manifest`.

    Raises:
        CheckpointError: If a file is missing, damaged, or from another checkpoint; the message
            names it. Files that the manifest does not list are ignored.
    """
    manifest = read_manifest(folder)
    for name, sha256 in manifest["files"].items():
        try:
            found = sha256_of_file(folder / name)
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
    """Read `manifest.json` of a checkpoint, and check it against the SHA-256 that it contains of
    its own content.

    Args:
        folder: The checkpoint.

    Returns:
        `format`, `step`, `versions` and `files` (name -> SHA-256).

    Raises:
        CheckpointError: If the file is missing, was changed in any way, or was written by an
            incompatible version of hf_ga.
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
    # Write the content again and compare the whole text: this finds changes of white space, too,
    # which are not part of the hash.
    if text != _manifest_json(content).encode():
        raise CheckpointError(f"{path} is damaged: SHA-256 mismatch. {_REMEDY}")
    return content


def sha256_of_file(file: Path) -> str:
    """Return the SHA-256 of a checkpoint file's content, in hexadecimal, for the manifest."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest_json(content: dict[str, Any]) -> str:
    """Return the text of `manifest.json`: the content as JSON, with the SHA-256 of the content
    itself as one more key, "sha256", so that a change of the manifest is detected.
    """
    unindented = json.dumps(content)
    sha256 = hashlib.sha256(unindented.encode()).hexdigest()
    return json.dumps(content | {"sha256": sha256}, indent=1) + "\n"
