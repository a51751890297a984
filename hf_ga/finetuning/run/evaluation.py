"""Token-weighted loss and metrics over a whole split: the same numbers for every layout.

The terms of all micro-batches are gathered on every process, sorted by sample, and then summed, so
the results do not depend on which process computed a term.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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

# Samples with one padding width if a head's loss depends on it: a constant, so that the loss does
# not depend on the layout.
EVALUATION_WINDOW = 256


@dataclass(frozen=True)
class Reader:
    """How metrics are computed: what is read from a model's outputs, and the metrics of that.

    Attributes:
        compute: A function (predictions, references) -> {name: value}, of all samples of the split
            in its order.
        read: A function (outputs of the model, its batch on the device, the micro-batch) ->
            (predictions, references) of its samples.
        predicts_tokens: Whether the loss averages over tokens, so that it has a perplexity.
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
    """Return the windows of a split in its own order, with micro-batches of samples of similar
    length (less padding, same result), assigned round-robin.

    The batches are the same for every number of processes, as long as each process has one in a
    window of 256 samples. More processes use larger windows, except if the loss depends on the
    padding width, or for the same bits.

    Args:
        dataset: The samples of the split.
        collate_fn: Joins samples to a batch.
        accelerator: The accelerator of the run.
        batch_size: Largest number of samples in a micro-batch.
        lengths: Tokens of each sample.
        rule: What was proven about the model.
        same_bits: Whether results have the same bits for every number of processes.
    """
    window_size = EVALUATION_WINDOW
    if not rule.pad_to_window and not same_bits:
        one_batch_each = accelerator.num_processes * min(batch_size, EVALUATION_WINDOW)
        window_size = max(EVALUATION_WINDOW, one_batch_each)
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
    """Evaluate in evaluation mode; the modes of all modules are restored. All ranks must call it,
    and return the same numbers.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        windows: See `evaluation_windows`.
        rule: What was proven about the model: targets are counted as in training.
        reader: How metrics besides the loss are computed. None: there are none.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the
        metrics (NaN if there is nothing to compare); for losses over tokens also `perplexity` =
        exp(loss).
    """
    windows.set_epoch(0)
    # A reader needs logits, which the chunked loss does not compute.
    useful = LeanForward if reader else (LeanForward, ChunkedLoss)
    speed_ups = tuple(hook for hook in rule.speed_ups if isinstance(hook, useful))
    without_dropout = replace(rule, dropout=Hook(), speed_ups=speed_ups)
    engine = Engine(backend_for(accelerator), model, without_dropout)
    with restored_modes(model):
        model.eval()
        own = [share for window in windows for share in _shares(engine, window, reader)]
        # Once all forwards are queued, as each copy waits for the device.
        own = [_on_host(share) for share in own]
    shares = sorted(gather_object(own), key=lambda share: share.positions[0])
    results = _mean(rule.loss, shares)
    if reader is None or reader.predicts_tokens:
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    if reader is not None:
        predictions, references = _in_order(shares)
        # The loss is never replaced.
        results |= reader.compute(predictions, references) | results
    # Other machines may round differently.
    return broadcast_from_main(accelerator, results)


@dataclass(frozen=True)
class _Share:
    """The contribution of one micro-batch, exchanged between the ranks of a run.

    Attributes:
        positions: The samples' positions in the split, int64, shape (n,).
        tally: Sums and counts of `Loss.sums`; float64 on the host once all micro-batches are
            computed.
        predictions: What the reader read, one entry per sample.
        references: What the reader compares them with, one entry per sample.
    """

    positions: np.ndarray
    tally: Sums
    predictions: Sequence[Any] = ()
    references: Sequence[Any] = ()


def _shares(engine: Engine, window: Window, reader: Reader | None) -> Iterable[_Share]:
    """Yield the contributions of this rank's micro-batches. Under FSDP, where forwards are
    collectives, all ranks run equally many.
    """
    engine.begin(window, training=False, skip_empty=False)
    for index in range(len(engine.calls)):
        # A reader's generation is outside of these contexts.
        with engine.scope(), engine.micro_batch(index) as batch:
            outputs = engine.forward(batch)
            sums, counts = engine.sums(outputs)
        call = engine.call
        if not call.weight:
            continue
        predictions: Sequence[Any] = ()
        references: Sequence[Any] = ()
        if reader is not None:
            predictions, references = reader.read(outputs, batch, call.micro_batch)
        yield _Share(call.micro_batch.positions, (*sums, *counts), predictions, references)


def _on_host(share: _Share) -> _Share:
    """Copy sums and counts to the host in float64."""
    tally = [torch.as_tensor(part, dtype=torch.float64, device="cpu") for part in share.tally]
    return replace(share, tally=tally)


def _in_order(shares: Sequence[_Share]) -> tuple[list[Any], list[Any]]:
    """Return predictions and references of all samples in the order of the split."""
    samples: list[tuple[int, Any, Any]] = []
    for share in shares:
        samples += zip(share.positions, share.predictions, share.references, strict=True)
    ordered = sorted(samples, key=itemgetter(0))
    predictions = [prediction for _, prediction, _ in ordered]
    references = [reference for _, _, reference in ordered]
    return predictions, references


def _mean(loss: Loss, shares: Sequence[_Share]) -> dict[str, float]:
    """Compute the mean loss over all targets (NaN without any) and their number. Sums are exact and
    independent of the micro-batches.
    """
    totals = []
    for parts in zip(*(share.tally for share in shares), strict=True):
        stacked = torch.stack(parts).numpy()
        totals.append(torch.as_tensor(np.apply_along_axis(math.fsum, 0, stacked)))
    # As many counts as sums, and behind them.
    num_sums = len(totals) // 2
    sums = totals[:num_sums]
    counts = totals[num_sums:]
    num_targets = float(sum(counts[: loss.num_means]))
    mean = float("nan")
    if num_targets:
        mean = float(loss.mean(sums, counts))
    return {"loss": mean, "num_targets": num_targets}
