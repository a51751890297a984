"""Token-weighted loss and metrics over a whole split: the same numbers for every layout.

What each micro-batch adds is kept apart, exchanged between the processes, put in the order of the samples, and only then added up:
so the numbers do not depend on who computed what, and every process has all of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from evaluate import Metric
from torch import nn

from hf_ga.exact.backend import Backend
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.forward import restored_modes
from hf_ga.exact.hooks import Call, Hook
from hf_ga.exact.loss import Loss, Sums
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.step import Forward
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import broadcast_from_main
from hf_ga.proof.targets import ProvenLoss
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward

# Samples that share one padding width where a head's loss depends on it: fixed, or the loss would depend on the layout.
EVALUATION_WINDOW = 256


@dataclass(frozen=True)
class Reader:
    """What metrics compare.

    Attributes:
        metrics: name -> metric.
        read: (outputs of the model, its batch on the device, the micro-batch) -> (predictions, references), one a sample; where a
            sample has several, arrays of them.
        predicts_tokens: the loss is one of tokens, so that it has a perplexity.
    """

    metrics: Mapping[str, type[Metric]]
    read: Callable[[Any, dict[str, Any], MicroBatch], tuple[Sequence[Any], Sequence[Any]]]
    predicts_tokens: bool = False


def evaluation_windows(
    dataset: Any, collate_fn: Any, *, accelerator: Accelerator, batch_size: int, lengths: Sequence[int], proven: ProvenLoss
) -> WindowLoader:
    """The split in its own order, in batches of samples of similar length (less padding, same result), dealt out in turn.

    The batches are the same for every number of processes, as long as each process gets one of a window of 256 samples. More
    processes need larger windows, or some would be idle; where the padding width counts, they are.
    """
    busy = accelerator.num_processes * min(batch_size, EVALUATION_WINDOW)
    return WindowLoader(
        dataset,
        collate_fn,
        accelerator=accelerator,
        per_device_batch_size=batch_size,
        global_batch_size=EVALUATION_WINDOW if proven.pad_to_window else max(EVALUATION_WINDOW, busy),
        shuffle=False,
        lengths=lengths,
        planner=partial(plan_by_sizes, sizes=[batch_size]),
        pad_to_window=proven.pad_to_window,
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    windows: WindowLoader,
    proven: ProvenLoss,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate in evaluation mode; the modes of all modules are restored. All ranks call it, and all get the same numbers.

    Args:
        windows: see `evaluation_windows`. proven: counts targets as training does. reader: metrics beside the loss.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the metrics (NaN where there is
        nothing to compare); without a reader, and where it says so (language models), `perplexity` = exp(loss).
    """
    windows.set_epoch(0)
    loss, useful = proven.loss, LeanForward if reader else (LeanForward, ChunkedLoss)  # logits are needed, or not
    hooks = [hook for hook in proven.speed_ups if isinstance(hook, useful)]
    with restored_modes(model):
        model.eval()
        own = [share for window in windows for share in _shares(backend_for(accelerator), model, window, loss, hooks, reader)]
        on_host = partial(torch.as_tensor, dtype=torch.float64, device="cpu")
        own = [replace(share, tally=[*map(on_host, share.tally)]) for share in own]
    shares = sorted(gather_object(own), key=lambda share: share.positions[0])
    results = _mean(loss, shares)
    if reader is None or reader.predicts_tokens:
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    if reader is not None:
        results |= _computed(reader.metrics, shares)
    return broadcast_from_main(accelerator, results)  # another kind of machine may round otherwise


@dataclass(frozen=True)
class _Share:
    """What one micro-batch adds. Only ever exchanged between ranks of one run.

    Attributes:
        positions: int64, shape (n,): of its samples.
        tally: sums and counts of `Loss.sums`; float64 on the host once all micro-batches are computed.
        predictions, references: one a sample, or none.
    """

    positions: np.ndarray
    tally: Sums
    predictions: Sequence[Any] = ()
    references: Sequence[Any] = ()


def _shares(
    backend: Backend, model: nn.Module, window: Window, loss: Loss, hooks: Sequence[Hook], reader: Reader | None
) -> Iterable[_Share]:
    """Of this rank's micro-batches; under FSDP, where forwards are collectives, it computes as many as the rank that has most."""
    calls = [Call(micro_batch, counts=loss.count(micro_batch.batch, len(micro_batch))) for micro_batch in window.micro_batches]
    for call in backend.equalize(window, calls, loss):
        forward = Forward(backend.accelerator, model, window, (loss, *hooks))
        with forward.scope():  # not where a reader generates
            call, outputs = forward(call)
            sums, counts = loss.sums(outputs, call)
        if call.weight:
            read = reader.read(outputs, call.batch, call.micro_batch) if reader else ((), ())
            yield _Share(call.micro_batch.positions, (*sums, *counts), *read)


def _mean(loss: Loss, shares: Sequence[_Share]) -> dict[str, float]:
    """The mean over all targets, NaN without any, and their number. Sums are exact, whatever the micro-batches were."""
    tallies = zip(*(share.tally for share in shares), strict=True)
    totals = [torch.as_tensor(np.apply_along_axis(math.fsum, 0, torch.stack(parts).numpy())) for parts in tallies]
    sums, counts = totals[: len(totals) // 2], totals[len(totals) // 2 :]
    number = float(sum(counts[: loss.num_means]))
    return {"loss": float(loss.mean(sums, counts)) if number else float("nan"), "num_targets": number}


def _computed(metrics: Mapping[str, type[Metric]], shares: Sequence[_Share]) -> dict[str, float]:
    """The metrics over all predictions, in the order of their samples; NaN where there are none."""
    order = np.argsort(np.concatenate([share.positions for share in shares]))
    predictions, references = (
        _in_order([one for share in shares for one in getattr(share, name)], order) for name in ("predictions", "references")
    )
    if not len(references):
        return dict.fromkeys(metrics, math.nan)
    results: dict[str, float] = {}
    for metric in metrics.values():  # in memory: the processes of a machine would write to the same cache
        results |= metric(keep_in_memory=True).compute(predictions=predictions, references=references)
    return results


def _in_order(of_samples: Sequence[Any], order: np.ndarray) -> Sequence[Any]:
    ordered = [of_samples[i] for i in order]
    return np.concatenate(ordered) if isinstance(ordered[0], np.ndarray) else ordered
