"""The training loop: windows, evaluation, checkpoints and logging, by plain calls in this order."""

import math
import time
from typing import Any

from tqdm.auto import tqdm

from hf_ga.errors import DataError, RunStopped
from hf_ga.finetuning.run.build import evaluate_split
from hf_ga.finetuning.run.results.outputs import save_and_check_best
from hf_ga.finetuning.run.results.report import cut_metrics, write_metrics
from hf_ga.finetuning.run.results.saving import save
from hf_ga.finetuning.run.run import Progress, Run
from hf_ga.loading.batches import count_tokens
from hf_ga.loading.window import Window
from hf_ga.parallel.backend import sum_over_ranks
from hf_ga.parallel.processes import end_training
from hf_ga.recovery.checkpoint import PREFIX
from hf_ga.recovery.saving import CheckpointSaver
from hf_ga.recovery.signals import StopRequest, stop_requests
from hf_ga.training import StepResult, train_step

BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
PROGRESS = "loss {loss:.4f}, lr {learning_rate:.1e}, {tokens_per_second:,.0f} tokens/s"
OUT_OF_MEMORY = (
    "out of memory: from now on at most {} tokens (padding included) in a micro-batch; the update "
    "is the same"
)
MAX_SKIPPED_IN_A_ROW = 20


def fit(run: Run, progress: Progress) -> Progress:
    """Run the training loop of a fine-tuning run, with evaluations and checkpoints, until the end
    of the run or an early stop. All processes run it together; the main process writes.

    Args:
        run: The run.
        progress: How far the run has come already; updated.

    Returns:
        `progress`.

    Raises:
        DataError: If 20 consecutive windows made no optimizer step.
        NonFinite: If a loss or gradient is not finite, and `on_nonfinite` is "stop".
        SavedModelDiffers: If `best/` is not the model that was saved there.
        RunStopped: If a signal stopped the run; it is saved.
    """
    if run.accelerator.is_main_process:
        cut_metrics(run.output_dir / "metrics.jsonl", progress.metrics_size)
    run.model.train()
    must_stop = False
    saver = CheckpointSaver(
        run.accelerator,
        run.output_dir,
        keep=run.config.save_total_limit,
        trained_only=run.config.has_adapters,  # frozen weights are in the base model
    )
    bar = tqdm(
        total=run.max_steps,
        initial=progress.step,
        bar_format=BAR,
        dynamic_ncols=True,
        disable=not run.accelerator.is_main_process,
    )
    with bar, stop_requests() as request, saver:
        while not must_stop and not _is_finished(run, progress):
            for window in run.windows:
                line, must_stop = _train_on(run, progress, window, request)
                if not line["skipped"]:
                    bar.set_postfix_str(PROGRESS.format_map(line), refresh=False)
                    bar.update()
                if _is_due(run, progress, line, every=run.eval_steps):
                    line |= _evaluate(run, progress)
                _log(run, progress, line)
                # After the evaluation, on which early stopping depends.
                if must_stop or _is_due(run, progress, line, every=run.save_steps):
                    save(run, progress, saver)
                if must_stop or _is_finished(run, progress):
                    break
        saver.wait()
        _raise_if_stopped(run, progress, request)
    # A signal that arrived after the last check.
    request.pass_on()
    return progress


def _is_due(run: Run, progress: Progress, line: dict[str, Any], every: int) -> bool:
    """Return whether the training loop evaluates, or saves, after a window: every so many steps,
    and at the end of the run.
    """
    if _is_finished(run, progress):
        return True
    return not line["skipped"] and progress.step % every == 0


def _log(run: Run, progress: Progress, line: dict[str, Any]) -> None:
    """Write the line of a window to metrics.jsonl, pass its numbers to trackers and the whole line
    to the user's `on_step`.
    """
    if run.accelerator.is_main_process:
        progress.metrics_size = write_metrics(run.output_dir / "metrics.jsonl", line)
    numbers = {name: line[name] for name in line if type(line[name]) in (int, float)}
    numbers.pop("step")
    run.accelerator.log(numbers, step=progress.step)
    if run.on_step is not None:
        run.on_step(dict(line), run.model)


def _train_on(
    run: Run, progress: Progress, window: Window, request: StopRequest
) -> tuple[dict[str, Any], bool]:
    """Train on one window of a fine-tuning run, and count it in `progress`."""
    learning_rate = run.scheduler.get_last_lr()[0]
    start = time.perf_counter()
    result = train_step(
        run.accelerator,
        run.model,
        run.optimizer,
        window,
        scheduler=run.scheduler,
        max_grad_norm=run.config.max_grad_norm or None,
        on_nonfinite=run.config.on_nonfinite,
    )
    if result.nonfinite:
        next_step = progress.step + 1
        _write(run, f"before optimizer step {next_step} a window was skipped: {result.cause}")
    # Reading the loss waits for the device, so it comes before the time.
    loss = result.loss
    seconds = time.perf_counter() - start
    local_tokens = sum(count_tokens(m.batch, len(m)) for m in window.micro_batches)
    tokens, num_stopping = sum_over_ranks(run.accelerator, [local_tokens, request.received])
    progress.num_windows += 1
    progress.step += not result.skipped
    progress.num_skipped += result.skipped
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
    if progress.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
        raise DataError(_why_skipped(window, result))
    if not result.skipped:
        progress.train_loss = loss
    if result.retries:
        _write(run, OUT_OF_MEMORY.format(run.windows.state.max_elements))
    part_of_epoch = 0.0
    if run.data.stream is None:
        part_of_epoch = (window.index + 1) / len(run.windows)
    line = {
        "step": progress.step,
        "epoch": window.epoch + part_of_epoch,
        "loss": None if result.skipped else loss,
        "grad_norm": None if result.skipped else result.grad_norm,
        "learning_rate": learning_rate,
        "num_targets": result.num_targets,
        "tokens_per_second": round(tokens / seconds, 1),
        "num_processes": run.accelerator.num_processes,
        "skipped": result.skipped,
    }
    for name in ("nonfinite", "retries", "loss_scale"):
        if getattr(result, name):
            line[name] = getattr(result, name)
    return line, num_stopping > 0


def _write(run: Run, text: str) -> None:
    """Print a text above the progress bar of a fine-tuning run, on the main process only."""
    if run.accelerator.is_main_process:
        tqdm.write(text)


def _raise_if_stopped(run: Run, progress: Progress, request: StopRequest) -> None:
    """Raise RunStopped on all processes of a fine-tuning run if any of them received a stop signal,
    also one that came during the evaluation or saving after the last window.
    """
    (num_stopping,) = sum_over_ranks(run.accelerator, [request.received])
    if num_stopping:
        end_training(run.accelerator)
        raise RunStopped(
            f"stopped by {request} after step {progress.step}: saved as "
            f"{run.output_dir / f'{PREFIX}{progress.step}'}; resume with "
            "--resume_from_checkpoint auto"
        )


def _why_skipped(window: Window, result: StepResult) -> str:
    """Return the error message of a run that stops because too many consecutive windows made no
    optimizer step.
    """
    why = "their samples have no targets, or weight 0: check the labels, or remove such rows"
    if result.overflowed:
        why = (
            f"their gradients overflow in fp16, even with a loss scale of {result.loss_scale:g}: "
            "train in bf16 or float32"
        )
    if result.nonfinite:
        why = (
            f"their losses or gradients are not finite ({result.cause}): lower the learning rate, "
            "or check these samples"
        )
    return (
        f"{MAX_SKIPPED_IN_A_ROW} consecutive windows made no step, up to window {window.index} of "
        f"epoch {window.epoch}; {why}."
    )


def _evaluate(run: Run, progress: Progress) -> dict[str, float]:
    """Evaluate a run on the validation split, save the model to `best/` if it is the best so far,
    and print the metrics.
    """
    results = evaluate_split(run, run.model)
    progress.last_metrics = results
    value = results[f"eval_{run.config.metric_for_best_model}"]
    progress.evaluations_since_best += 1
    best = progress.best_metric
    lower_is_better = run.config.lower_is_better
    is_better = best is None or (value < best if lower_is_better else value > best)
    if is_better and not math.isnan(value):
        progress.best_metric = value
        progress.evaluations_since_best = 0
        progress.best_check = save_and_check_best(run, run.model)
    shown = ", ".join(
        f"{name.removeprefix('eval_')} {value:.4f}"
        for name, value in results.items()
        if name != "eval_num_targets"
    )
    _write(run, f"step {progress.step}: validation {shown}")
    return results


def _is_finished(run: Run, progress: Progress) -> bool:
    """Return whether a fine-tuning run has made all its steps or trained on all its windows, or
    stops early.
    """
    return (
        progress.step >= run.max_steps
        or progress.num_windows >= run.max_windows
        or stopped_early(run, progress)
    )


def stopped_early(run: Run, progress: Progress) -> bool:
    """Return whether the metric of the best model has not improved for `early_stopping_patience`
    evaluations; never without that option.
    """
    patience = run.config.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience
