"""Evaluate a split: the mean loss over all targets, and metrics. The results do not depend on the
batch size or the number of processes.

What the loss averages over is read from its graph, as in training. The results of all micro-batches
are gathered on every process, sorted by sample, and only then summed, so it makes no difference
which process computed them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
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
from hf_ga.loading.window import Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import LossFunction, restored_modes
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import broadcast_from_main

# Samples in a window of an evaluation. If the loss depends on padding, all samples of a window
# are padded to one length. A constant, so that the loss does not depend on the layout.
EVALUATION_WINDOW = 256


@dataclass(frozen=True)
class Reader:
    """Two functions with which an evaluation of a fine-tuning run computes metrics: `read` for each
    micro-batch, then `compute` for the whole split.

    Attributes:
        compute: A function (predictions, references) -> {name of a metric: value}. It gets lists
            with an entry for each sample of the split, in the order of the split.
        read: A function (outputs of the model, batch on the device, micro-batch on the CPU) ->
            (predictions, references). It returns an entry for each sample of the micro-batch.
        predicts_tokens: Whether the loss is a mean over tokens, so that it has a perplexity.
    """

    compute: Callable[[list[Any], list[Any]], dict[str, float]]
    read: Callable[[Any, dict[str, Any], MicroBatch], tuple[Sequence[Any], Sequence[Any]]]
    predicts_tokens: bool = False


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


class DependsOnWidth(Exception):
    """The loss depends on the padded width, so the windows of the evaluation must be padded."""


def evaluate_samples(
    accelerator: Accelerator,
    model: nn.Module,
    make_windows: Callable[..., WindowLoader],
    *,
    loss_fn: LossFunction | None = None,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate a model, in windows that are padded to one length each if the loss depends on it.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        make_windows: `evaluation_windows` with all arguments but `pad_to_window`.
        loss_fn: See `evaluate`.
        reader: See `evaluate`.

    Returns:
        See `evaluate`.
    """
    try:
        return evaluate(accelerator, model, make_windows(), loss_fn=loss_fn, reader=reader)
    except DependsOnWidth:
        windows = make_windows(pad_to_window=True)
        return evaluate(accelerator, model, windows, loss_fn=loss_fn, reader=reader)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    windows: WindowLoader,
    *,
    loss_fn: LossFunction | None = None,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate the model of a fine-tuning run: compute the mean loss and the metrics of a split.

    All ranks must call it, and all return the same numbers. The model is in evaluation mode
    meanwhile; the modes of its modules are restored.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        windows: The loader of the split, see `evaluation_windows`.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets), in place of the model's
            own loss.
        reader: How to compute metrics besides the loss, or None to compute the loss alone.

    Returns:
        `loss` (the mean over all targets of the split, summed in float64), `num_targets`, and the
        metrics (NaN if there is nothing to compare); if the loss is a mean over tokens, also
        `perplexity` = exp(loss).

    Raises:
        LossNotAdditive: If the loss is not a sum of means.
        DependsOnWidth: If the loss depends on the padded width, and the windows are not padded.
    """
    windows.set_epoch(0)
    backend = backend_for(accelerator)
    loss = EvaluatedLoss(backend, model, loss_fn)
    local_results: list[_MicroBatchResult] = []
    with restored_modes(model), loss.router.patched(), loss.trainable():
        model.eval()
        backend.reshard(model)
        for index, window in enumerate(windows):
            if index == 0 and not window.request.pad_to_window and loss.depends_on_width(window):
                raise DependsOnWidth
            local_results += _run_micro_batches(loss, window, reader)
    gathered = gather_object([result.on_host() for result in local_results])
    # A fixed order for every number of ranks.
    micro_batch_results = sorted(gathered, key=lambda result: result.positions[0])
    mean, num_targets = mean_of_parts([result.parts for result in micro_batch_results])
    results = {"loss": mean, "num_targets": num_targets}
    if reader is None or reader.predicts_tokens:
        # Larger losses would overflow.
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    if reader is not None:
        predictions, references = _in_order_of_split(micro_batch_results)
        # A metric of the user named `loss` does not replace the loss.
        results |= reader.compute(predictions, references) | results
    # Ranks on other machines may round differently.
    return broadcast_from_main(accelerator, results)


@dataclass(frozen=True)
class _MicroBatchResult:
    """The result of one micro-batch of an evaluation in a fine-tuning run. The results of all ranks
    are gathered.

    Attributes:
        positions: The positions of its samples in the split, int64, shape (samples,).
        parts: What its loss consists of.
        predictions: One prediction per sample for the metrics; () if only the loss is computed.
        references: What to compare each prediction with; () if only the loss is computed.
    """

    positions: np.ndarray
    parts: LossParts
    predictions: Sequence[Any] = ()
    references: Sequence[Any] = ()

    def on_host(self) -> "_MicroBatchResult":
        """Return the result with its numbers on the host; only after all forwards, because each
        copy waits for the device.
        """
        return replace(self, parts=self.parts.on_host())


def _run_micro_batches(
    loss: EvaluatedLoss, window: Window, reader: Reader | None
) -> Iterator[_MicroBatchResult]:
    """Run the forwards of this rank's micro-batches of a window in an evaluation, and yield the
    loss and the predictions of each.
    """
    for slot in evaluation_slots(loss.backend, window):
        batch = loss.backend.place(slot.micro_batch.batch)
        outputs, parts = loss.run(batch, len(slot.micro_batch))
        if slot.is_filler:
            continue
        predictions: Sequence[Any] = ()
        references: Sequence[Any] = ()
        if reader is not None:
            predictions, references = reader.read(outputs, batch, slot.micro_batch)
        yield _MicroBatchResult(slot.micro_batch.positions, parts, predictions, references)


def _in_order_of_split(results: Sequence[_MicroBatchResult]) -> tuple[list[Any], list[Any]]:
    """Return the predictions and the references of all samples of an evaluation, each in the order
    of the split, for the metrics.
    """
    samples: list[tuple[int, Any, Any]] = []
    for result in results:
        samples += zip(result.positions, result.predictions, result.references, strict=True)
    ordered = sorted(samples, key=itemgetter(0))
    predictions = [prediction for _, prediction, _ in ordered]
    references = [reference for _, _, reference in ordered]
    return predictions, references
