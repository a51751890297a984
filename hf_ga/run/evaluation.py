"""Token-weighted loss and metrics over a whole split: the same numbers for every layout.

What each micro-batch adds is kept apart, exchanged between the processes, put in the order of the samples, and only then added up:
so the numbers do not depend on who computed what, and every process has all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import evaluate as evaluate_library
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import nn

from hf_ga.errors import OutOfMemory
from hf_ga.exact.forward import LossFunction, accepted_arguments, callable_module, head_loss, restored_modes
from hf_ga.exact.memory import is_out_of_memory, size_of, too_large_for
from hf_ga.exact.parts import PARTS
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.reduce import gather_rows, is_sharded
from hf_ga.exact.router import BalanceCall
from hf_ga.exact.terms import Counts, count_targets, loss_sums
from hf_ga.exact.windows import MicroBatch, Window, WindowLoader
from hf_ga.proof.targets import TargetRule
from hf_ga.run.metrics import METRICS, entries_per_sample, predictions_and_references
from hf_ga.speed.lean_forward import lean_forwards

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
    dataset: Any, collate_fn: Any, *, accelerator: Accelerator, batch_size: int, lengths: Sequence[int], rule: TargetRule
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
        global_batch_size=EVALUATION_WINDOW if rule.pad_to_window else max(EVALUATION_WINDOW, busy),
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
    rule: TargetRule,
    *,
    metrics: Sequence[str] = (),
    loss_fn: LossFunction | None = None,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Evaluate in evaluation mode; the modes of all modules are put back. All processes call it, and all get the same numbers.

    Args:
        windows: see `evaluation_windows`. rule: counts targets as training does. metrics: keys of `METRICS`; what they compare is
            said in `metrics.predictions_and_references`. reader: other metrics, instead.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the metrics (NaN where there is
        nothing to compare); without metrics (language models), and where a reader says so, `perplexity` = exp(loss).

    Raises:
        OutOfMemory: a single sample does not fit or, under FSDP, a batch; other batches that do not fit are cut.
    """
    windows.set_epoch(0)
    chosen = reader.metrics if reader else {name: METRICS[name] for name in metrics}
    read = _no_comparison if not chosen else partial(_of_reader, reader) if reader else _classes_or_numbers
    losses = _Losses(rule, loss_fn, reads_logits=bool(chosen))
    with restored_modes(model):
        model.eval()
        own = _own_shares(accelerator, windows, partial(_share_of, accelerator, callable_module(model), losses, read))
    shares = _exchanged(own)
    results = losses.mean(shares)
    if not chosen or (reader and reader.predicts_tokens):
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    results |= _computed(chosen, shares)
    if accelerator.num_processes > 1:  # those of the first process: another kind of machine may round otherwise
        results = dict(zip(results, gather_rows(accelerator, list(results.values()))[0].tolist(), strict=True))
    return results


@dataclass(frozen=True)
class _Share:
    """What one micro-batch adds, on the host (sums: when all are computed). Only ever exchanged between processes of one run.

    Attributes:
        positions: int64, shape (n,): of its samples.
        sums, counts: the loss summed over its targets, and their number, for each part of the loss.
        balance: for each call of the router's loss: choices, probabilities (both of shape (experts,)), tokens; float64.
        owners: int64: the position that each prediction belongs to. predictions, references: as many.
    """

    positions: np.ndarray
    sums: tuple[float, ...]
    counts: tuple[float, ...]
    balance: list[tuple[np.ndarray, ...]]
    owners: np.ndarray
    predictions: Sequence[Any]
    references: Sequence[Any]


def _own_shares(
    accelerator: Accelerator, windows: WindowLoader, share_of: Callable[[MicroBatch], _Share]
) -> "list[_Share | OutOfMemory]":
    """Of this process's micro-batches, or why there are none: the others wait for them. (Under FSDP they wait in each forward.)"""
    shares: list[_Share] = []
    try:
        for window in windows:
            for micro_batch, counts in _equal_in_number(accelerator, window):
                of_one = _in_parts(accelerator, window, micro_batch, share_of)
                shares += of_one if counts else []
        return [replace(share, sums=tuple(map(float, share.sums))) for share in shares]  # waits for the device, once
    except OutOfMemory as error:
        if is_sharded(accelerator):
            raise
        return [error]


def _exchanged(own: "list[_Share | OutOfMemory]") -> list[_Share]:
    """The shares of all processes, in the order of their samples.

    Raises:
        OutOfMemory: a process has none; on all of them.
    """
    shares = gather_object(own)
    if failure := next((share for share in shares if isinstance(share, OutOfMemory)), None):
        raise failure
    return sorted(shares, key=lambda share: share.positions[0])


def _share_of(accelerator: Accelerator, module: nn.Module, losses: "_Losses", read: Callable, micro_batch: MicroBatch) -> _Share:
    batch = send_to_device(micro_batch.batch, accelerator.device, non_blocking=True)
    with losses.active(), lean_forwards(module):  # not where a reader generates
        counts = losses.expected(micro_batch)
        outputs = module(**accepted_arguments(module, batch))
        loss = losses.of(outputs, batch, counts)
    return _Share(micro_batch.positions, *loss, *read(outputs, batch, micro_batch))


def _in_parts(
    accelerator: Accelerator, window: Window, micro_batch: MicroBatch, share_of: Callable[[MicroBatch], _Share]
) -> list[_Share]:
    """Of a micro-batch; where it does not fit, of its parts, on this process alone: nothing is exchanged in between.

    Raises:
        OutOfMemory: a single sample does not fit or, under FSDP, a batch.
    """
    pending, shares = [micro_batch], []
    while pending:
        micro_batch, *others = window.memory.parts(pending.pop(), window)
        pending += others
        try:
            shares.append(share_of(micro_batch))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if len(micro_batch) == 1 or is_sharded(accelerator):
                raise too_large_for(accelerator.process_index, micro_batch, evaluating=True) from error
        window.memory.after_failure(size_of(micro_batch))
        clear_device_cache(garbage_collection=True)  # now that no traceback holds its tensors
        pending.append(micro_batch)
    return shares


class _Losses:
    """The loss of a split, each part over its own targets, and the router's choices of the whole split."""

    def __init__(self, rule: TargetRule, loss_fn: LossFunction | None, *, reads_logits: bool) -> None:
        self.rule, self.loss_fn, self.router = rule, loss_fn, rule.router if loss_fn is None else None
        self.without_logits = loss_fn is None and not reads_logits

    def active(self) -> AbstractContextManager[None]:
        """The balancing loss is taken over the split, not over each batch. Logits are not made where only the loss is asked for."""
        if self.loss_fn is not None:
            return nullcontext()
        return self.rule.active(without_logits=self.without_logits)

    def expected(self, micro_batch: MicroBatch) -> Counts:
        """The targets of the next forward, counted on the host; of an own loss, which counts by itself, nothing."""
        counts = () if self.loss_fn is not None else count_targets(self.rule.name, micro_batch.batch, len(micro_batch))
        if self.without_logits:  # only then is the rule asked how many there are
            self.rule.expect(counts)
        return counts

    def of(self, outputs: Any, batch: dict[str, Any], counts: tuple[float, ...]) -> tuple[tuple, tuple, list[tuple]]:
        """Sums (on the device), counts and balance of a batch that lies there."""
        if self.loss_fn is None:
            mean = None if self.rule.name in PARTS else head_loss(outputs).double()
            sums = loss_sums(self.rule.name, outputs, batch, counts, mean)
        else:
            total, count = self.loss_fn(outputs, batch)
            sums, counts = (total,), (float(count),)
        calls = [] if self.router is None else self.router.take()
        balance = [tuple(t.cpu().double().numpy() for t in (c.chosen, c.probability, c.num_tokens)) for c in calls]
        return sums, counts, balance

    def mean(self, shares: Sequence[_Share]) -> dict[str, float]:
        """The mean over all targets (of each part, added up), NaN without targets, and their number."""
        counts = [math.fsum(column) for column in zip(*(share.counts for share in shares), strict=True)]
        sums = [math.fsum(column) for column in zip(*(share.sums for share in shares), strict=True)]
        if not sum(counts):
            return {"loss": float("nan"), "num_targets": 0.0}
        routed = 0.0 if self.router is None else self._balance(shares)
        return {"loss": sum(s / n for s, n in zip(sums, counts, strict=True) if n) + routed, "num_targets": sum(counts)}

    def _balance(self, shares: Sequence[_Share]) -> float:
        calls = []
        for call in zip(*(share.balance for share in shares), strict=True):
            chosen, probability, num_tokens = (torch.from_numpy(np.asarray(sum(part))) for part in zip(*call, strict=True))
            calls.append(BalanceCall(chosen, probability, num_tokens, num_tokens))
        assert self.router is not None
        return float(self.router.term(calls, calls))


def _equal_in_number(accelerator: Accelerator, window: Window) -> Iterator[tuple[MicroBatch, bool]]:
    """This process's micro-batches of a window, and whether each counts.

    Under FSDP a forward is a meeting of all processes: one that has fewer micro-batches repeats one, and its result is dropped.
    """
    own = window.micro_batches
    yield from ((micro_batch, True) for micro_batch in own)
    missing = window.request.most_micro_batches - len(own) if is_sharded(accelerator) else 0
    if missing:
        spare = own or window.split([np.zeros(1, np.int64)]).micro_batches
        yield from [(spare[0], False)] * missing


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
