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
    """Reads the inputs of metrics from a model's outputs, and computes the metrics.

    Attributes:
        compute: (predictions, references) of all samples of the split, in its order -> {name:
            value}.
        read: (outputs of the model, its batch on the device, the micro-batch) -> (predictions,
            references) of its samples.
        predicts_tokens: the loss averages over tokens, so it has a perplexity.
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
    """The split in its own order, in batches of samples of similar length (less padding, same
    result), assigned round-robin.

    The batches are the same for every number of processes, as long as each process has one in a
    window of 256 samples. More processes use larger windows, except if the loss depends on the
    padding width, or for the same bits.
    """
    busy = accelerator.num_processes * min(batch_size, EVALUATION_WINDOW)
    return WindowLoader(
        dataset,
        collate_fn,
        accelerator=accelerator,
        per_device_batch_size=batch_size,
        global_batch_size=EVALUATION_WINDOW
        if rule.pad_to_window or same_bits
        else max(EVALUATION_WINDOW, busy),
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
        reader: For metrics besides the loss.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the
        metrics (NaN if there is nothing to compare); for losses over tokens also `perplexity` =
        exp(loss).
    """
    windows.set_epoch(0)
    useful = LeanForward if reader else (LeanForward, ChunkedLoss)  # a reader needs logits
    speed_ups = tuple(hook for hook in rule.speed_ups if isinstance(hook, useful))
    without_dropout = replace(rule, dropout=Hook(), speed_ups=speed_ups)
    engine = Engine(backend_for(accelerator), model, without_dropout)
    with restored_modes(model):
        model.eval()
        own = [share for window in windows for share in _shares(engine, window, reader)]
        on_host = partial(torch.as_tensor, dtype=torch.float64, device="cpu")
        own = [replace(share, tally=[*map(on_host, share.tally)]) for share in own]
    shares = sorted(gather_object(own), key=lambda share: share.positions[0])
    results = _mean(rule.loss, shares)
    if reader is None or reader.predicts_tokens:
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    if reader is not None:
        samples = [
            entry
            for share in shares
            for entry in zip(share.positions, share.predictions, share.references, strict=True)
        ]
        _, predictions, references = map(
            list, zip(*sorted(samples, key=itemgetter(0)), strict=True)
        )
        results |= reader.compute(predictions, references) | results  # the loss is never replaced
    return broadcast_from_main(accelerator, results)  # other machines may round differently


@dataclass(frozen=True)
class _Share:
    """The contribution of one micro-batch, exchanged between the ranks of a run.

    Attributes:
        positions: int64, shape (n,), of the samples.
        tally: sums and counts of `Loss.sums`; float64 on the host once all micro-batches are
            computed.
        predictions, references: from the reader, one entry per sample.
    """

    positions: np.ndarray
    tally: Sums
    predictions: Sequence[Any] = ()
    references: Sequence[Any] = ()


def _shares(engine: Engine, window: Window, reader: Reader | None) -> Iterable[_Share]:
    """Contributions of this rank's micro-batches. Under FSDP, where forwards are collectives, all
    ranks run equally many.
    """
    engine.begin(window, training=False, skip_empty=False)
    for index in range(len(engine.calls)):
        with engine.scope(), engine.micro_batch(index) as batch:  # excludes a reader's generation
            outputs = engine.forward(batch)
            sums, counts = engine.sums(outputs)
        call = engine.call
        if call.weight:
            predictions, references = (), ()
            if reader is not None:
                predictions, references = reader.read(outputs, batch, call.micro_batch)
            yield _Share(call.micro_batch.positions, (*sums, *counts), predictions, references)


def _mean(loss: Loss, shares: Sequence[_Share]) -> dict[str, float]:
    """The mean over all targets (NaN without any) and their number. Sums are exact and independent
    of the micro-batches.
    """
    tallies = zip(*(share.tally for share in shares), strict=True)
    totals = [
        torch.as_tensor(np.apply_along_axis(math.fsum, 0, torch.stack(parts).numpy()))
        for parts in tallies
    ]
    sums, counts = totals[: len(totals) // 2], totals[len(totals) // 2 :]
    number = float(sum(counts[: loss.num_means]))
    return {
        "loss": float(loss.mean(sums, counts)) if number else float("nan"),
        "num_targets": number,
    }
