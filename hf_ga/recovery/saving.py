"""Saves the checkpoints of a run while it goes on: the tensors are copied to the host's memory, and
a thread writes them.

A checkpoint counts once it is complete (`checkpoint.py`): a run that is killed while one is written
has the one before.
"""

import copy
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hf_ga.parallel.processes import raise_on_all_ranks
from hf_ga.parallel.shards import named_state, write_shards
from hf_ga.recovery.checkpoint import begin_checkpoint, complete_checkpoint
from hf_ga.recovery.files import partial_of, writing
from hf_ga.recovery.manifest import SHARDS

MEMORY_SHARE = 0.5  # of the free memory, which the copies of all processes of a machine may take


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
    """Save one checkpoint, and wait for it. All processes must call it.

    Args:
        accelerator: See `CheckpointSaver`.
        output_dir: See `CheckpointSaver`.
        model: See `CheckpointSaver.save`.
        optimizer: See `CheckpointSaver.save`.
        state: See `CheckpointSaver.save`.
        step: See `CheckpointSaver.save`.
        keep: See `CheckpointSaver`.
        trained_only: See `CheckpointSaver`.

    Returns:
        The checkpoint's folder, `output_dir/checkpoint-<step>`.

    Raises:
        CheckpointError: If a write fails; on all processes. Earlier checkpoints are kept.
    """
    saver = CheckpointSaver(accelerator, output_dir, keep=keep, trained_only=trained_only)
    final = saver.save(model, optimizer, state, step=step, in_background=False)
    saver.wait()
    return final


class CheckpointSaver:
    """Saves the checkpoints of one run, one at a time.

    Sharded tensors (FSDP, pipelines), and tensors for which the memory is too small, are written
    before the run goes on.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints.
        keep: The number of checkpoints to keep.
        trained_only: Whether to omit frozen parameters.

    Example:
        saver = CheckpointSaver(accelerator, folder, keep=2)
        saver.save(model, optimizer, {"epoch": 1}, step=10)
        saver.wait()
    """

    def __init__(
        self, accelerator: Accelerator, output_dir: Path, *, keep: int, trained_only: bool = False
    ) -> None:
        """Start without a checkpoint."""
        self.accelerator = accelerator
        self.output_dir = output_dir
        self.keep = keep
        self.trained_only = trained_only
        is_on_gpu = accelerator.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=is_on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_on_gpu,
        )
        self._stager = DefaultStager(options)  # copies to the host, the same memory each time
        self._num_copied = 0  # bytes of that memory
        self._group: dist.ProcessGroup | None = None  # of the threads
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "CheckpointSaver":
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Let the checkpoint that is being written be completed, also after an error."""
        if self._thread is not None:
            self._thread.join()

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        step: int,
        in_background: bool = True,
    ) -> Path:
        """Save the checkpoint `output_dir/checkpoint-<step>`. All processes must call it.

        Waits for the one before, and returns when the tensors are copied.

        Args:
            model: The model, as it was prepared.
            optimizer: The optimizer of the model's parameters.
            state: Further values that JSON can represent (position, schedule, best loss).
            step: The number of optimizer steps made so far.
            in_background: Whether to return before the checkpoint is written.

        Returns:
            The checkpoint's folder, which is there after `wait`.

        Raises:
            CheckpointError: If a write fails, of this or of the checkpoint before; on all
                processes. Earlier checkpoints are kept.
        """
        self.wait()
        final = begin_checkpoint(self.accelerator, self.output_dir, step)
        tensors = named_state(model, optimizer, trained_only=self.trained_only)
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        state = copy.deepcopy({"step": step, "param_groups": groups, **state})
        if in_background and self._can_copy(tensors):
            self._thread = threading.Thread(
                target=self._write,
                args=(final, state, self._stager.stage(tensors)),
                name=final.name,
            )
            self._thread.start()
        else:
            self._write(final, state, tensors)
            self.wait()
        return final

    def wait(self) -> None:
        """Wait until the checkpoint is complete that is being written. All processes must call it.

        Raises:
            CheckpointError: If it could not be written; on all processes.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        with raise_on_all_ranks(self.accelerator):
            if failure is not None:
                raise failure

    def _write(self, final: Path, state: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Write a checkpoint, and note an error for `wait`."""
        shards = partial_of(final) / SHARDS
        try:
            with writing(shards, self.output_dir):
                write_shards(tensors, shards, self._group)
            if self.accelerator.is_main_process:
                complete_checkpoint(final, state, self.keep)
        except BaseException as error:  # torch's CheckpointException is no Exception
            self._failure = error
            if self.accelerator.is_main_process:
                # The unfinished checkpoint may be what fills the disk.
                shutil.rmtree(partial_of(final), ignore_errors=True)

    def _can_copy(self, tensors: dict[str, Any]) -> bool:
        """Whether a thread may write the tensors: all processes find them whole, and the memory is
        large enough.
        """
        is_whole = all(type(value) in (Tensor, nn.Parameter) for value in tensors.values())
        num_bytes = sum(value.nbytes for value in tensors.values()) if is_whole else 0
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = psutil.virtual_memory().available * MEMORY_SHARE / per_machine
        flags = gather_object([is_whole and num_bytes - self._num_copied <= free])
        if not all(flags):
            return False
        self._num_copied = num_bytes
        if self._group is None and len(flags) > 1:
            self._group = dist.new_group(backend="gloo")  # training uses the other one meanwhile
        return True
