"""Evaluate a split: the mean loss over all targets, and metrics. The results do not depend on the
batch size or the number of processes.

What the loss averages over is read from its graph, as in training. The results of all micro-batches
are gathered on every process, sorted by sample, and only then summed, so it makes no difference
which process computed them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from hf_ga.engine.evaluation import (
    EvaluatedLoss,
    LossParts,
    evaluation_slots,
    mean_of_parts,
)
from hf_ga.loading.batches import MicroBatch
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import LossFunction, restored_modes
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.backend import Backend
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import broadcast_from_main

# Samples in a window of an evaluation. If the loss depends on padding, all samples of a window
# are padded to one length. A constant, so that the loss does not depend on the layout.
EVALUATION_WINDOW = 256
T = TypeVar("T")
# The loss of a micro-batch, and what a `Reader` read for each sample; () if only the loss is
# computed.
Forward = tuple[LossParts, Sequence[Any]]


@dataclass(frozen=True)
class Reader:
    """Two functions with which an evaluation of a fine-tuning run computes metrics: `read` for each
    micro-batch, then `compute` for the whole split.

    Attributes:
        compute: A function (entries) -> {name of a metric: value}. It gets what `read` returned for
            all samples of the split, in the order of the split.
        read: A function (outputs of the model, batch on the device, micro-batch on the CPU) ->
            an entry for each sample of the micro-batch, such as (prediction, reference).
    """

    compute: Callable[[list[Any]], dict[str, float]]
    read: Callable[[Any, dict[str, Any], MicroBatch], Sequence[Any]]


def evaluation_windows(
    dataset: Any,
    collate_fn: Any,
    *,
    accelerator: Accelerator,
    batch_size: int,
    lengths: Sequence[int],
    pad_to_window: bool = False,
    same_bits: bool = False,
) -> WindowLoader:
    """Return the loader of an evaluation in a fine-tuning run: the samples of a split in windows,
    in the order of the split.

    Within a window, samples of similar length are in one micro-batch (for less padding), and the
    micro-batches are assigned to the processes round-robin. A window has 256 samples. If that is
    too few for one full micro-batch per process, it is larger, unless the loss depends on padding
    or `same_bits` is set.

    Args:
        dataset: The samples of the split.
        collate_fn: A function that collates a list of samples to a batch.
        accelerator: The accelerator of the run.
        batch_size: Maximum number of samples in a micro-batch.
        lengths: The number of tokens of each sample.
        pad_to_window: Whether the loss depends on padding, so that all samples of a window are
            padded to one length.
        same_bits: Whether results must have the same bits for every number of processes.
    """
    window_size = EVALUATION_WINDOW
    if not pad_to_window and not same_bits:
        one_batch_per_process = accelerator.num_processes * min(batch_size, EVALUATION_WINDOW)
        window_size = max(EVALUATION_WINDOW, one_batch_per_process)
    return WindowLoader(
        dataset,
        collate_fn,
        accelerator=accelerator,
        per_device_batch_size=batch_size,
        global_batch_size=window_size,
        shuffle=False,
        lengths=lengths,
        planner=partial(plan_by_sizes, sizes=[batch_size]),
        pad_to_window=pad_to_window,
    )


@contextmanager
def evaluation_mode(backend: Backend, model: nn.Module) -> Iterator[None]:
    """Within the block, the model of a run computes in evaluation mode; the modes of its modules
    are restored afterwards.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
    """
    with restored_modes(model):
        model.eval()
        backend.reshard(model)
        yield


def run_forwards(
    backend: Backend, windows: WindowLoader, forward: Callable[[dict[str, Any], MicroBatch], T]
) -> Iterator[tuple[MicroBatch, T]]:
    """Run the forwards of this rank's micro-batches of a split, in an evaluation or for the rows of
    `predict_file`. Call it within `evaluation_mode`, without gradients.

    Args:
        backend: How ranks communicate.
        windows: The loader of the split, see `evaluation_windows`.
        forward: A function (batch on the device, micro-batch on the CPU) -> result.

    Yields:
        Each micro-batch with its result. Under FSDP, a rank with fewer micro-batches than another
        repeats a forward, whose result is dropped.
    """
    windows.set_epoch(0)
    for window in windows:
        for slot in evaluation_slots(backend, window):
            result = forward(backend.place(slot.micro_batch.batch), slot.micro_batch)
            if not slot.is_filler:
                yield slot.micro_batch, result


@torch.no_grad()
def evaluate_samples(
    accelerator: Accelerator,
    model: nn.Module,
    make_windows: Callable[..., WindowLoader],
    *,
    loss_fn: LossFunction | None = None,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate the model of a fine-tuning run: compute the mean loss and the metrics of a split, in
    windows that are padded to one length each if the loss depends on it.

    All ranks must call it, and all return the same numbers. The model is in evaluation mode
    meanwhile; the modes of its modules are restored.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        make_windows: `evaluation_windows` with all arguments but `pad_to_window`.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets), in place of the model's
            own loss.
        reader: How to compute metrics besides the loss, or None to compute the loss alone.

    Returns:
        `loss` (the mean over all targets of the split, summed in float64), `num_targets`, and the
        metrics (NaN if there is nothing to compare).

    Raises:
        LossNotAdditive: If the loss is not a sum of means.
    """
    backend = backend_for(accelerator)
    loss = EvaluatedLoss(backend, model, loss_fn)

    def forward(batch: dict[str, Any], micro_batch: MicroBatch) -> Forward:
        """Compute the loss of a micro-batch, and read what the metrics compare."""
        outputs, parts = loss.run(batch, len(micro_batch))
        if reader is None:
            return parts, ()
        return parts, reader.read(outputs, batch, micro_batch)

    windows = make_windows()
    with evaluation_mode(backend, model), loss.router.patched(), loss.trainable():
        if loss.depends_on_width(next(iter(windows))):
            windows = make_windows(pad_to_window=True)
        forwards = list(run_forwards(backend, windows, forward))
    # To the host only after all forwards, because each copy waits for the device.
    local_results = [
        (micro_batch.positions, parts.on_host(), entries)
        for micro_batch, (parts, entries) in forwards
    ]
    # A fixed order for every number of ranks.
    gathered = sorted(gather_object(local_results), key=lambda result: result[0][0])
    mean, num_targets = mean_of_parts([parts for _, parts, _ in gathered])
    results = {"loss": mean, "num_targets": num_targets}
    if reader is not None:
        samples: list[tuple[int, Any]] = []
        for positions, _, entries in gathered:
            samples += zip(positions, entries, strict=True)
        in_order = [entry for _, entry in sorted(samples, key=itemgetter(0))]
        # A metric of the user named `loss` does not replace the loss.
        results |= reader.compute(in_order) | results
    # Ranks on other machines may round differently.
    return broadcast_from_main(accelerator, results)
