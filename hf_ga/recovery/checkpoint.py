"""Saving and loading checkpoints atomically, between windows. All random numbers are derived from
seed and position, so there is no random state to save.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from hf_ga.parallel.shards import ShardCopies, load_shards
from hf_ga.recovery.files import discard, new_partial, partial_of, publish, tidy, writing
from hf_ga.recovery.latest import keep_newest, list_checkpoints, set_latest, step_of
from hf_ga.recovery.manifest import PREFIX, SHARDS, STATE, write_manifest
from hf_ga.recovery.versions import versions

# What torch and damaged or unfitting files raise while a checkpoint is loaded, besides torch's
# CheckpointException, which derives from BaseException.
_LOAD_ERRORS = (OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError)


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    step: int,
    keep: int,
    trained_only: bool = False,
) -> Path:
    """Save the checkpoint `output_dir/checkpoint-<step>` atomically. All processes must call it.

    It is written under a temporary name, flushed to disk and renamed; then its name is written into
    the file `latest`. At the end, checkpoints of later steps (from before a resume) are deleted,
    and so are all but the newest `keep`.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints.
        model: The model, as it was prepared: on one process, under DDP, FSDP or as a pipeline
            stage.
        optimizer: The optimizer of the model's parameters.
        state: Further values that JSON can represent (position, schedule, best loss).
        step: The number of optimizer steps made so far.
        keep: The number of checkpoints to keep.
        trained_only: Whether to omit frozen parameters.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: If a write fails, for example because the disk is full; on all processes.
            Earlier checkpoints are kept.
    """
    with BackgroundSaves(
        accelerator, output_dir, keep=keep, trained_only=trained_only
    ) as background:
        background.save(model, optimizer, state, step=step)
    return output_dir / f"{PREFIX}{step}"


class BackgroundSaves:
    """Saves the checkpoints of a run in a thread, as `save_checkpoint` does, while the run trains
    on: it waits only until the tensors are copied. All processes must use it alike.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints.
        keep: The number of checkpoints to keep.
        trained_only: Whether to omit frozen parameters.

    Example:
        with BackgroundSaves(accelerator, output_dir, keep=2) as saves:
            for window in windows:
                ...
                saves.save(model, optimizer, state, step=step)
    """

    def __init__(
        self, accelerator: Accelerator, output_dir: Path, *, keep: int, trained_only: bool = False
    ) -> None:
        """Begin without a checkpoint."""
        self.accelerator = accelerator
        self.output_dir = output_dir
        self.keep = keep
        self.trained_only = trained_only
        self._copies = ShardCopies(accelerator)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._final = output_dir

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        step: int,
    ) -> None:
        """Wait for the checkpoint before, then copy this one's tensors and begin to write them.

        Args:
            model: See `save_checkpoint`.
            optimizer: See `save_checkpoint`.
            state: See `save_checkpoint`; converted to JSON at once.
            step: The number of optimizer steps made so far.

        Raises:
            CheckpointError: If the checkpoint before could not be written, or this one's folder
                cannot; on all processes. Earlier checkpoints are kept.
        """
        self.wait()
        final = self.output_dir / f"{PREFIX}{step}"
        _begin(self.accelerator, final)
        text = _state_json(optimizer, state, step)
        shards = partial_of(final) / SHARDS
        written = self._copies.save(model, optimizer, shards, trained_only=self.trained_only)
        self._final = final
        self._pending = self._thread.submit(self._finish, written, final, text, step)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun last is complete.

        Raises:
            CheckpointError: If it could not be written; on all processes. What was written of it is
                deleted.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        try:
            with raise_on_all_ranks(self.accelerator):
                pending.result()
        except CheckpointError:
            _discard_partial(self.accelerator, self._final)
            raise

    def _finish(self, written: Future[Any], final: Path, text: str, step: int) -> None:
        """Wait for the files of all processes, then complete the checkpoint, on the main process.
        This runs in the thread.
        """
        with writing(partial_of(final) / SHARDS, self.output_dir):
            written.result()
        if self.accelerator.is_main_process:
            _complete(final, text, step, self.keep)

    def __enter__(self) -> "BackgroundSaves":
        """Return the object itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Wait for the last checkpoint. After an error of the block, which may be on this process
        only, do so without the other processes, and leave the error as it is.
        """
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown()
            self._copies.close()
        if self._pending is not None and self._pending.exception() is not None:
            _discard_partial(self.accelerator, self._final)


def _begin(accelerator: Accelerator, final: Path) -> None:
    """Make the temporary folder of a checkpoint. All processes must call it."""
    output_dir = final.parent
    with raise_on_all_ranks(accelerator), writing(output_dir, output_dir):
        if accelerator.is_main_process:
            output_dir.mkdir(parents=True, exist_ok=True)
            tidy(output_dir)
            new_partial(final)


def _discard_partial(accelerator: Accelerator, final: Path) -> None:
    """Delete what was written of a checkpoint, which may be what fills the disk."""
    if accelerator.is_main_process:
        shutil.rmtree(partial_of(final), ignore_errors=True)


def _state_json(optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int) -> str:
    """Return the content of `state.json`: a run's state, the step, and the settings of the
    optimizer's parameter groups (learning rate, weight decay, ...), without the parameters.
    """
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return json.dumps({"step": step, "param_groups": groups, **state})


def _complete(final: Path, state: str, step: int, keep: int) -> None:
    """Complete a checkpoint whose shards are written: add state and manifest, give it its final
    name, name it in `latest`, and delete the checkpoints that are no longer kept. For the main
    process.

    Args:
        final: The final path of the checkpoint.
        state: The content of `state.json`.
        step: The number of optimizer steps made so far.
        keep: The number of checkpoints to keep.

    Raises:
        CheckpointError: If a write fails.
    """
    partial = partial_of(final)
    output_dir = final.parent
    with writing(partial, output_dir):
        (partial / STATE).write_text(state, encoding="utf-8")
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
        trained_only: The same as in `save_checkpoint`.

    Returns:
        The `state` that was passed to `save_checkpoint`, with the number of steps as "step".

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
