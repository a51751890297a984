"""Token-weighted loss and metrics over a whole split: the same numbers for every layout."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import evaluate as evaluate_library
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from hf_ga.forward import LossFunction, accepted_arguments, head_loss, restored_modes
from hf_ga.metrics import METRICS, predictions_and_references
from hf_ga.parts import PARTS
from hf_ga.plan import plan_by_sizes
from hf_ga.router import BalanceCall, add_calls
from hf_ga.targets import TargetRule
from hf_ga.terms import count_targets, loss_sums
from hf_ga.windows import MicroBatch, WindowLoader

# Samples that share one padding width where a head's loss depends on it: fixed, or the loss would depend on the batch size.
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
    """The split in its own order, in batches of samples of similar length (less padding, same result)."""
    return WindowLoader(
        dataset,
        collate_fn,
        accelerator=accelerator,
        per_device_batch_size=batch_size,
        global_batch_size=EVALUATION_WINDOW,
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
    """Evaluate in evaluation mode; the modes of all modules are put back.

    Args:
        windows: see `evaluation_windows`. rule: counts targets as training does. metrics: keys of `METRICS`; what they compare is
            said in `metrics.predictions_and_references`. reader: other metrics, instead.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the metrics; without
        metrics (language models), and where a reader says so, `perplexity` = exp(loss).
    """
    windows.set_epoch(0)
    objects = [(reader.metrics if reader else METRICS)[name]() for name in (reader.metrics if reader else metrics)]
    sums = _LossSums(rule, loss_fn)
    with restored_modes(model):
        model.eval()
        for micro_batch in (m for window in windows for m in window.micro_batches):
            batch = send_to_device(micro_batch.batch, accelerator.device, non_blocking=True)
            with sums.active():  # not where a reader generates
                outputs = model(**accepted_arguments(model, batch))
                sums.add(outputs, batch, micro_batch)
            if objects:
                predictions, references = (reader.read if reader else _classes_or_numbers)(outputs, batch, micro_batch)
                for metric in objects if len(references) else ():
                    metric.add_batch(predictions=predictions, references=references)
    results = {"loss": sums.mean(), "num_targets": sums.num_targets}
    if not objects or (reader and reader.predicts_tokens):
        results["perplexity"] = math.exp(min(results["loss"], 700.0))
    for metric in objects:
        results |= metric.compute()
    return results


class _LossSums:
    """The loss of a split summed in float64, each part over its own targets; the router's choices of the whole split."""

    def __init__(self, rule: TargetRule, loss_fn: LossFunction | None) -> None:
        self.rule, self.loss_fn, self.router = rule, loss_fn, rule.router if loss_fn is None else None
        self.sums, self.counts = np.zeros(1), np.zeros(1)
        self.balance: list[BalanceCall] = []

    def active(self) -> AbstractContextManager[None]:
        """The balancing loss is taken over the split, not over each batch."""
        return nullcontext() if self.router is None else self.router.active()

    def add(self, outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> None:
        """A batch that lies on the device."""
        if self.loss_fn is None:
            counts = count_targets(self.rule.name, micro_batch.batch, len(micro_batch))
            mean = None if self.rule.name in PARTS else head_loss(outputs).double()
            sums = loss_sums(self.rule.name, outputs, batch, counts, mean)
        else:
            total, count = self.loss_fn(outputs, batch)
            sums, counts = (total,), (float(count),)
        self.sums, self.counts = self.sums + np.array([float(s) for s in sums]), self.counts + np.array(counts)
        if self.router is not None:
            self.balance = add_calls([calls for calls in (self.balance, self.router.take()) if calls])

    @property
    def num_targets(self) -> float:
        return float(self.counts.sum())

    def mean(self) -> float:
        """The mean over all targets (of each part, added up); NaN without targets."""
        if not self.num_targets:
            return float("nan")
        routed = float(self.router.term(self.balance, self.balance)) if self.router is not None else 0.0
        return float(sum(s / n for s, n in zip(self.sums, self.counts, strict=True) if n)) + routed


def _classes_or_numbers(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[Any, Any]:
    return predictions_and_references(outputs.logits.float().cpu().numpy(), micro_batch.batch["labels"].numpy())
