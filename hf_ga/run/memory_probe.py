"""How large a micro-batch may be, asked before training; and how a run goes on for which memory ran out for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hf_ga.data.data import PreparedData
from hf_ga.errors import HfGaError, OutOfMemory
from hf_ga.exact.fetch import Fetcher, WindowRequest
from hf_ga.exact.forward import restored_buffers, restored_modes
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.memory import is_out_of_memory
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.processes import print_on_main
from hf_ga.recovery.latest import newest
from hf_ga.run.config import AUTO, FinetuneConfig
from hf_ga.run.run import Run
from hf_ga.run.train_windows import planned_lengths
from hf_ga.training import backward_window

MOMENTS = 2  # numbers that AdamW keeps for each parameter


def find_limit(config: FinetuneConfig, run: Run, data: PreparedData) -> None:
    """Compute the gradient of the longest samples in a micro-batch of the planned size, and drop it: under `auto` to find how large
    one may be, and under FSDP, where running out of memory later ends the run. A limit that a checkpoint brought is kept under DDP.

    Raises:
        OutOfMemory: a single sample does not fit or, under FSDP, the micro-batch.
    """
    is_auto, state = config.per_device_train_batch_size == AUTO, run.windows.state
    if is_sharded(run.accelerator):
        state.max_elements = None  # of a checkpoint without FSDP: here nothing can be cut
    elif not is_auto or state.max_elements is not None:
        return
    with restored_modes(run.model), restored_buffers(run.model), preserved_random_states(), _room_for_moments(run):
        run.model.train()
        window = _longest_samples(config, run, data)
        backward_window(
            run.accelerator,
            run.model,
            window,
            targets=run.proven,
            loss_fn=run.loss_fn,
            allow_split_dependent_randomness=config.allow_split_dependent_randomness,
            fsdp_reduce_each_micro_batch=config.fsdp_reduce_each_micro_batch,
        )
    run.model.zero_grad(set_to_none=True)
    if is_auto:
        samples = f"{window.num_samples // run.accelerator.num_processes} samples"
        most = samples if state.max_elements is None else f"at most {state.max_elements} tokens (padding included)"
        print_on_main(run.accelerator, f"per_device_train_batch_size auto: micro-batches of {most} fit into memory")


@contextmanager
def name_checkpoint_on_out_of_memory(run: Run) -> Iterator[None]:
    """Where memory runs out for good, the error names the checkpoint to go on from.

    Raises:
        OutOfMemory: with that.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OutOfMemory) and (isinstance(error, HfGaError) or not is_out_of_memory(error)):
            raise
        saved = newest(run.output_dir)
        then = f"go on from {saved} with --resume_from_checkpoint auto" if saved else "start again: nothing was saved yet"
        said = error if isinstance(error, OutOfMemory) else _outside(error)
        raise OutOfMemory(f"{said} Then {then}.") from error


def _outside(error: Exception) -> str:
    return (
        f"memory ran out outside of forward and backward, where nothing can be cut ({error}): use a smaller model, LoRA, FSDP over "
        "more devices, or smaller micro-batches."
    )


def _longest_samples(config: FinetuneConfig, run: Run, data: PreparedData) -> Window:
    """A window in which every process has the same samples in one micro-batch: as many of the longest as a plan puts together. Of a
    stream only the first rows are known.
    """
    lengths, processes = planned_lengths(data), run.accelerator.num_processes
    size, most = run.windows.layout.micro_batch_size, config.max_tokens_per_micro_batch
    if most is not None:
        size = min(most // int(lengths.max()), run.windows.layout.window_size)
    longest = np.argsort(-lengths, kind="stable")[:size]
    own = len(longest) * run.accelerator.process_index + np.arange(len(longest))
    request = WindowRequest(
        seed=run.windows.seed,
        epoch=0,
        index=0,
        positions=np.arange(len(longest) * processes),
        sample_ids=np.tile(longest, processes),
        micro_batches=[own],
        whole_window=run.proven.pad_to_window,
        most_micro_batches=1,
    )
    fetcher = Fetcher(data.samples("train"), data.collate)
    return Window(request, fetcher, fetcher[request], state=run.windows.state)


@contextmanager
def _room_for_moments(run: Run) -> Iterator[None]:
    """Hold meanwhile, on a GPU, what the optimizer will take in its first step.

    Raises:
        OutOfMemory: not even that fits.
    """
    trained = [p for p in run.model.parameters() if p.requires_grad and p not in run.optimizer.state]
    try:
        held = [torch.empty_like(p) for p in trained for _ in range(MOMENTS)] if run.accelerator.device.type != "cpu" else []
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "weights, gradients and the optimizer's moments must fit into memory before any sample does, but do not: use FSDP over "
            "more devices, LoRA, or a smaller model."
        ) from error
    try:
        yield
    finally:
        held.clear()
