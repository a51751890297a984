"""Token-weighted loss and metrics over a whole split: the same numbers for every layout."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from hf_ga.forward import LossFunction, accepted_arguments, head_loss, restored_modes
from hf_ga.metrics import METRICS, predictions_and_references
from hf_ga.plan import plan_by_sizes
from hf_ga.targets import TargetRule
from hf_ga.windows import WindowLoader

# Samples that share one padding width where a head's loss depends on it: fixed, or the loss would depend on the batch size.
EVALUATION_WINDOW = 256


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
) -> dict[str, float]:
    """Evaluate in evaluation mode; the modes of all modules are put back.

    Args:
        windows: see `evaluation_windows`. rule: counts targets as training does. metrics: keys of `METRICS`; what they compare is
            said in `metrics.predictions_and_references`.

    Returns:
        `loss` (mean over all targets of the split, summed in float64), `num_targets`, and the metrics; without
        metrics (language models) `perplexity` = exp(loss).
    """
    windows.set_epoch(0)
    objects = [METRICS[name]() for name in metrics]
    loss_sum, num_targets = torch.zeros((), dtype=torch.float64), 0.0
    with restored_modes(model):
        model.eval()
        for window in windows:
            for micro_batch in window.micro_batches:
                batch = send_to_device(micro_batch.batch, accelerator.device, non_blocking=True)
                outputs = model(**accepted_arguments(model, batch))
                if loss_fn is None:
                    count = rule.count(micro_batch.batch, len(micro_batch))
                    total = head_loss(outputs).double() * count if count else torch.zeros(())
                else:
                    total, count = loss_fn(outputs, batch)
                loss_sum += total.double().cpu()
                num_targets += float(count)
                if objects:
                    logits, labels = outputs.logits.float().cpu().numpy(), micro_batch.batch["labels"].numpy()
                    predictions, references = predictions_and_references(logits, labels)
                    for metric in objects if len(references) else ():
                        metric.add_batch(predictions=predictions, references=references)
    loss = float(loss_sum) / num_targets if num_targets else float("nan")
    results = {"loss": loss, "num_targets": num_targets}
    if not metrics:
        results["perplexity"] = math.exp(min(loss, 700.0))
    for metric in objects:
        results |= metric.compute()
    return results
