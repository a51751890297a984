"""Evaluate a split: the mean loss over all targets, and metrics. The results do not depend on the
batch size or the number of processes.

The results of all micro-batches are gathered on every process, sorted by sample, and only then
summed, so it makes no difference which process computed them.
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

from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import restored_modes
from hf_ga.exact.hooks import Hook
from hf_ga.exact.loss import Loss, Sums
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.rule import Rule
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import broadcast_from_main
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward

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
    rule: Rule,
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
        rule: The result of testing, before training, what the loss averages over and whether it
            depends on padding.
        same_bits: Whether results must have the same bits for every number of processes.
    """
    window_size = EVALUATION_WINDOW
    if not rule.pad_to_window and not same_bits:
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
        pad_to_window=rule.pad_to_window,
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    windows: WindowLoader,
    rule: Rule,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate the model of a fine-tuning run: compute the mean loss and the metrics of a split.

    All ranks must call it, and all return the same numbers. The model is in evaluation mode
    meanwhile; the modes of its modules are restored.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        windows: The loader of the split, see `evaluation_windows`.
        rule: The result of testing, before training, what the loss averages over: how to count
            targets.
        reader: How to compute metrics besides the loss, or None to compute the loss alone.

    Returns:
        `loss` (the mean over all targets of the split, summed in float64), `num_targets`, and the
        metrics (NaN if there is nothing to compare); if the loss is a mean over tokens, also
        `perplexity` = exp(loss).
    """
    windows.set_epoch(0)
    useful_speed_ups: tuple[type, ...] = (LeanForward, ChunkedLoss)
    if reader is not None:
        # A reader needs logits, which the chunked loss does not compute.
        useful_speed_ups = (LeanForward,)
    speed_ups = tuple(hook for hook in rule.speed_ups if isinstance(hook, useful_speed_ups))
    rule_without_dropout = replace(rule, dropout=Hook(), speed_ups=speed_ups)
    engine = Engine(backend_for(accelerator), model, rule_without_dropout)
    local_results: list[_MicroBatchResult] = []
    with restored_modes(model):
        model.eval()
        for window in windows:
            local_results += _run_micro_batches(engine, window, reader)
        # Only after all forwards, because each copy waits for the device.
        local_results = [_copy_to_cpu(result) for result in local_results]
    gathered = gather_object(local_results)
    # A fixed order for every number of ranks.
    micro_batch_results = sorted(gathered, key=lambda result: result.positions[0])
    results = _mean_loss(rule.loss, micro_batch_results)
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
        sums_and_counts: First the sums of the loss, then as many numbers of targets, see
            `Loss.sums`.
        predictions: One prediction per sample for the metrics; () if only the loss is computed.
        references: What to compare each prediction with; () if only the loss is computed.
    """

    positions: np.ndarray
    sums_and_counts: Sums
    predictions: Sequence[Any] = ()
    references: Sequence[Any] = ()


def _run_micro_batches(
    engine: Engine, window: Window, reader: Reader | None
) -> Iterator[_MicroBatchResult]:
    """Run the forwards of this rank's micro-batches of a window in an evaluation, and yield the
    loss and the predictions of each.

    Under FSDP, where forwards are collectives, ranks with fewer micro-batches run more forwards
    with weight 0; these yield nothing.

    Args:
        engine: The engine of the evaluation.
        window: The window.
        reader: How to read predictions and references from the outputs, or None.
    """
    engine.begin(window, training=False, skip_empty=False)
    for index in range(len(engine.calls)):
        with engine.scope(), engine.micro_batch(index) as batch:
            outputs = engine.forward(batch)
            sums, counts = engine.sums(outputs)
        call = engine.call
        if call.weight == 0:
            continue
        predictions: Sequence[Any] = ()
        references: Sequence[Any] = ()
        if reader is not None:
            # Outside of the engine's contexts, because a reader may call `model.generate`.
            predictions, references = reader.read(outputs, batch, call.micro_batch)
        positions = call.micro_batch.positions
        yield _MicroBatchResult(positions, (*sums, *counts), predictions, references)


def _copy_to_cpu(result: _MicroBatchResult) -> _MicroBatchResult:
    """Return the result of a micro-batch of an evaluation with its sums of the loss and numbers of
    targets as float64 tensors on the CPU.
    """
    on_cpu = [
        torch.as_tensor(value, dtype=torch.float64, device="cpu")
        for value in result.sums_and_counts
    ]
    return replace(result, sums_and_counts=on_cpu)


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


def _mean_loss(loss: Loss, results: Sequence[_MicroBatchResult]) -> dict[str, float]:
    """Compute the mean loss of an evaluation over all targets of a split, and their number.

    The sums are exact (`math.fsum`), so they do not depend on the order of the micro-batches.

    Args:
        loss: How to divide the sums by the numbers of targets.
        results: The results of all micro-batches of all ranks, on the CPU.

    Returns:
        `loss`, which is NaN without targets, and `num_targets`.
    """
    totals = []
    # For each sum, then for each count, its values in all micro-batches.
    for values in zip(*(result.sums_and_counts for result in results), strict=True):
        values_of_micro_batches = torch.stack(values).numpy()
        total = np.apply_along_axis(math.fsum, 0, values_of_micro_batches)
        totals.append(torch.as_tensor(total))
    num_sums = len(totals) // 2
    sums = totals[:num_sums]
    counts = totals[num_sums:]
    # The counts of a loss with several means come first; others, such as a router's, follow.
    num_targets = float(sum(counts[: loss.num_means]))
    mean = float("nan")
    if num_targets:
        mean = float(loss.mean(sums, counts))
    return {"loss": mean, "num_targets": num_targets}
