"""Token-weighted loss and metrics over a whole split: the same numbers for every layout.

What each micro-batch adds is kept apart, exchanged between the processes, put in the order of the samples, and only then added up:
so the numbers do not depend on who computed what, and every process has all of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import evaluate as evaluate_library
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from hf_ga.errors import OutOfMemory
from hf_ga.exact.backend import Backend, gather_rows
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.forward import LossFunction, restored_modes
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.loss import Loss, OwnSum
from hf_ga.exact.memory import is_out_of_memory, size_of, too_large_for
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.step import Forward
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import backend_for
from hf_ga.proof.targets import ProvenLoss
from hf_ga.run.metrics import METRICS, entries_per_sample, predictions_and_references
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward

# Samples that share one padding width where a head's loss depends on it: fixed, or the loss would depend on the layout.
EVALUATION_WINDOW = 256


@dataclass(frozen=True)
class Reader:
    """What metrics compare, where it is more than logits with labels.

    Attributes:
        metrics: name -> class of each metric.
        read: (outputs of the model, its batch on the device, the micro-batch) -> (predictions, references), one a sample.
        predicts_tokens: the loss is one of tokens, so that it has a perplexity.
    """

    metrics: Mapping[str, type[evaluate_library.Metric]]
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
    *,
    metrics: Sequence[str] = (),
    loss_fn: LossFunction | None = None,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate in evaluation mode; the modes of all modules are restored. All ranks call it, and all get the same numbers.

    Args:
        windows: see `evaluation_windows`. proven: counts targets as training does. metrics: keys of `METRICS`; for what they
            compare see `metrics.predictions_and_references`. reader: other metrics, instead.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the metrics (NaN where there is
        nothing to compare); without metrics (language models), and where a reader says so, `perplexity` = exp(loss).

    Raises:
        OutOfMemory: a single sample does not fit or, under FSDP, a batch; other batches that do not fit are cut.
    """
    windows.set_epoch(0)
    chosen = reader.metrics if reader else {name: METRICS[name] for name in metrics}
    read = _no_comparison if not chosen else partial(_of_reader, reader) if reader else _classes_or_numbers
    loss = proven.loss if loss_fn is None else OwnSum(loss_fn)
    useful = LeanForward if chosen or loss_fn is not None else (LeanForward, ChunkedLoss)  # logits are needed, or not
    evaluator = _Evaluator(
        backend_for(accelerator), model, loss, [hook for hook in proven.speed_ups if isinstance(hook, useful)], read
    )
    with restored_modes(model):
        model.eval()
        own = evaluator.shares(windows)
    shares = _exchanged(own)
    results = _mean(loss, shares)
    if not chosen or (reader and reader.predicts_tokens):
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    results |= _computed(chosen, shares)
    if accelerator.num_processes > 1:  # those of the main process: another kind of machine may round otherwise
        results = dict(zip(results, gather_rows(accelerator, list(results.values()))[0].tolist(), strict=True))
    return results


@dataclass(frozen=True)
class _Share:
    """What one micro-batch adds. Only ever exchanged between ranks of one run.

    Attributes:
        positions: int64, shape (n,): of its samples.
        tally: what `Loss.mean_of` needs, float64; on the host once all micro-batches are computed.
        owners: int64: the position that each prediction belongs to. predictions, references: as many.
    """

    positions: np.ndarray
    tally: Tensor
    owners: np.ndarray
    predictions: Sequence[Any]
    references: Sequence[Any]


@dataclass(frozen=True)
class _Evaluator:
    """Computes this rank's shares. read: (outputs, batch, micro-batch) -> owners, predictions, references."""

    backend: Backend
    model: nn.Module
    loss: Loss
    hooks: Sequence[Hook]
    read: Callable

    def shares(self, windows: WindowLoader) -> "list[_Share | OutOfMemory]":
        """Of this rank's micro-batches; or why there are none, as the other ranks wait for them (under FSDP, in each forward)."""
        shares: list[_Share] = []
        try:
            for window in windows:
                for call in self._calls(window):
                    of_call = self._in_parts(window, call)
                    shares += of_call if call.weight else []
            return [replace(share, tally=share.tally.cpu()) for share in shares]
        except OutOfMemory as error:
            if self.backend.is_sharded:
                raise
            return [error]

    def _calls(self, window: Window) -> list[Call]:
        """Of this rank; under FSDP, where forwards are collectives, as many as of the rank that has most."""
        calls = [Call(micro_batch, counts=self._counts(micro_batch)) for micro_batch in window.micro_batches]
        return self.backend.equalize(window, calls, self.loss)

    def _counts(self, micro_batch: MicroBatch) -> Counts:
        return () if self.loss.counts_in_forward else self.loss.count(micro_batch.batch, len(micro_batch))

    def _in_parts(self, window: Window, call: Call) -> list[_Share]:
        """Of a micro-batch; where it does not fit into memory, of its parts, on this rank alone.

        Raises:
            OutOfMemory: a single sample does not fit or, under FSDP, a batch.
        """
        pending, shares = [call.micro_batch], []
        while pending:
            micro_batch, *others = window.fitting_parts(pending.pop())
            pending += others
            try:
                shares.append(self._share(window, replace(call, micro_batch=micro_batch, counts=self._counts(micro_batch))))
                continue
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if len(micro_batch) == 1 or self.backend.is_sharded:
                    raise too_large_for(self.backend.accelerator.process_index, micro_batch, evaluating=True) from error
            window.state.memory.after_failure(size_of(micro_batch))
            clear_device_cache(garbage_collection=True)  # now that no traceback holds its tensors
            pending.append(micro_batch)
        return shares

    def _share(self, window: Window, call: Call) -> _Share:
        forward = Forward(self.backend.accelerator, self.model, window, (self.loss, *self.hooks))
        with forward.scope():  # not where a reader generates
            call, outputs = forward(call)
            tally = self.loss.tally(outputs, call)
        return _Share(call.micro_batch.positions, tally, *self.read(outputs, call.batch, call.micro_batch))


def _exchanged(own: "list[_Share | OutOfMemory]") -> list[_Share]:
    """The shares of all ranks, in the order of their samples.

    Raises:
        OutOfMemory: a rank has none; on all of them.
    """
    shares = gather_object(own)
    if failure := next((share for share in shares if isinstance(share, OutOfMemory)), None):
        raise failure
    return sorted(shares, key=lambda share: share.positions[0])


def _mean(loss: Loss, shares: Sequence[_Share]) -> dict[str, float]:
    """The mean over all targets, NaN without targets, and their number. Sums are exact, so they do not depend on the
    micro-batches.
    """
    columns = zip(*(share.tally.tolist() for share in shares), strict=True)
    total = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    number = loss.targets_of(total)
    return {"loss": float(loss.mean_of(total)) if number else float("nan"), "num_targets": number}


def _no_comparison(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[np.ndarray, list[Any], list[Any]]:
    return np.empty(0, np.int64), [], []


def _of_reader(
    reader: Reader, outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> tuple[np.ndarray, Sequence[Any], Sequence[Any]]:
    return micro_batch.positions, *reader.read(outputs, batch, micro_batch)


def _classes_or_numbers(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = micro_batch.batch["labels"].numpy()
    owners = np.repeat(micro_batch.positions, entries_per_sample(labels))
    return owners, *predictions_and_references(outputs.logits.float().cpu().numpy(), labels)


def _computed(metrics: Mapping[str, type[evaluate_library.Metric]], shares: Sequence[_Share]) -> dict[str, float]:
    """The metrics over all predictions, in the order of their samples."""
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *(share.owners for share in shares)]), kind="stable")
    if not len(order):
        return dict.fromkeys(metrics, float("nan"))
    predictions, references = (
        _in_order([getattr(share, name) for share in shares], order) for name in ("predictions", "references")
    )
    results: dict[str, float] = {}
    for metric in metrics.values():  # in memory: the processes of a machine would write to the same cache
        results |= metric(keep_in_memory=True).compute(predictions=predictions, references=references)
    return results


def _in_order(parts: Sequence[Sequence[Any]], order: np.ndarray) -> Sequence[Any]:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)[order]
    together = [item for part in parts for item in part]
    return [together[i] for i in order]
