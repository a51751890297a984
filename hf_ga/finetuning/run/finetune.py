"""finetune(): from a configuration to a trained model on disk.

All processes run it together; the main process writes and prints.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets.fingerprint import Hasher
from torch import nn
from transformers import EvalPrediction

from hf_ga.errors import HfGaError, NonFinite, OutOfMemory
from hf_ga.finetuning.data.data import PreparedData, prepare_unlabelled
from hf_ga.finetuning.data.showing import sample_lines
from hf_ga.finetuning.run.accelerator import (
    check_sharded,
    make_accelerator,
    precision_name,
    start_trackers,
)
from hf_ga.finetuning.run.build import (
    build_model,
    build_run,
    evaluate_split,
    prepare_setup,
)
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.flags.config_checks import check_one_of
from hf_ga.finetuning.run.loop import fit, stopped_early
from hf_ga.finetuning.run.model.embeddings import learned_temperature
from hf_ga.finetuning.run.model.reload import expected_outputs
from hf_ga.finetuning.run.results.hub import check_login, upload
from hf_ga.finetuning.run.results.outputs import (
    prepare_output_dir,
    save_and_check_trained,
    write_reports,
)
from hf_ga.finetuning.run.results.predictions import write_predictions
from hf_ga.finetuning.run.results.report import (
    describe_world_change,
    print_fact,
    print_results,
)
from hf_ga.finetuning.run.results.saving import forget_other_best, resume
from hf_ga.finetuning.run.run import Progress, Run, Setup
from hf_ga.finetuning.run.train_windows import padding_ratio, planned_lengths
from hf_ga.loading.memory import is_out_of_memory
from hf_ga.parallel.prepare import full_state_dict, prepare
from hf_ga.parallel.processes import (
    broadcast_from_main,
    call_on_main,
    check_agreement,
    end_training,
    main_process_first,
)
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.recovery.files import write_json
from hf_ga.recovery.latest import find_checkpoint, newest
from hf_ga.recovery.lock import only_run_in
from hf_ga.recovery.versions import machine, versions

NUM_CLASSES = 20  # whose rows are printed, at most


def finetune(
    config: FinetuneConfig,
    on_step: Callable[[dict[str, Any], nn.Module], None] | None = None,
    on_evaluate: Callable[[dict[str, float], nn.Module], None] | None = None,
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Any]:
    """Fine-tune a model as a configuration says: what the command `hf-ga` does.

    Writes into `output_dir`: metrics.jsonl (one line per optimizer step), summary.json, curves.png,
    checkpoints, `best/` (the best model by `metric_for_best_model`) and the last model with its
    tokenizer. `from_pretrained` loads both models.

    Args:
        config: The configuration of the run.
        on_step: Called on every process after each window as `on_step(line, model)`: the line of
            metrics.jsonl, with `eval_loss` and the other metrics where there was an evaluation, and
            the model in training mode.
        on_evaluate: Called on every process after each evaluation, that of the test split included,
            as `on_evaluate(metrics, model)`: `eval_loss`, ... or `test_loss`, ..., and the model in
            evaluation mode, without gradients.
        compute_metrics: As in `transformers.Trainer`; replaces the metrics of the task. It is
            called on every process with an `EvalPrediction` of the whole split: arrays with the
            samples in the order of the data, padded with -100 on the second axis where the lengths
            of samples differ.
            `predictions` are the model's outputs without the loss (a tuple of arrays if there are
            several), or with `predict_with_generate` the generated token ids. The results are named
            `eval_...` and `test_...`. They may be the `metric_for_best_model`: higher is better,
            unless the name ends in loss, perplexity or mae. The run then evaluates once before the
            first step, to find out whether there is such a metric.
        preprocess_logits_for_metrics: As in Trainer: `(logits, labels) -> predictions` of one
            batch, on the device. Return an argmax, for example, so that not all logits need to be
            kept in memory.

    Returns:
        The content of `summary.json`; with `eval_only` that of `evaluation.json`.

    Raises:
        ConfigError, DataError: If an option or the data is invalid; before a model is built.
        LossNotAdditive, UnkeyedRandomness: If the model cannot be trained exactly.
        OutOfMemory: If a single sample does not fit into memory.
        CheckpointError: If there is no complete checkpoint to resume from, or the disk is full.
        NonFinite: If a loss or a gradient is not finite.
        SavedModelDiffers: If a saved folder does not contain the trained model.
        UploadFailed: If the run has finished, but its upload failed.
        RunStopped: If a signal stopped the run, after it was saved.
    """
    functions: dict[str, Any] = {
        "on_step": on_step,
        "on_evaluate": on_evaluate,
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
    }
    config.check(has_own_metrics=compute_metrics is not None)
    accelerator = make_accelerator(config)
    if config.eval_only:  # only adds files to the folder
        return _evaluate_only(_prepare_and_print(config, accelerator, functions))
    with only_run_in(Path(config.output_dir), accelerator):
        config.check_output_dir()  # again under the lock: another run may have used it since
        return _train(_prepare_and_print(config, accelerator, functions))


def _prepare_and_print(
    config: FinetuneConfig, accelerator: Accelerator, functions: dict[str, Any]
) -> Setup:
    """Load tokenizer, data and the model's configuration of a fine-tuning run on all processes, and
    print what was loaded. With `push_to_hub`, also check the login.
    """
    layout = config.layout(accelerator.num_processes)
    accelerator.gradient_accumulation_steps = layout.accumulation_steps  # of a full window
    check_sharded(config, accelerator)
    if config.push_to_hub:
        call_on_main(accelerator, check_login, config)
    # The other processes read the main one's downloads and tokenized data from caches.
    with main_process_first(accelerator):
        setup = prepare_setup(config, accelerator, **functions)
        if config.predict_file is not None:
            setup.unlabelled = prepare_unlabelled(setup.data)
    # Samples, labels, and lengths, on which the split into micro-batches depends.
    data = setup.data
    lengths = [np.asarray(samples["length"][:]) for samples in data.splits.values()]
    of_samples = Hasher.hash([data.content_hash, data.labels, lengths])
    check_agreement(accelerator, "data", of_samples)
    print_fact(accelerator, "data", data.description, *data.notes)
    for lines in sample_lines(data, config.show_samples):
        print_fact(accelerator, "sample", *lines)
    if data.task.labels == "class" and "train" in data.splits and not config.streaming:
        print_fact(accelerator, "classes", _count_classes(data))
    return setup


def _train(setup: Setup) -> dict[str, Any]:
    """Carry out a fine-tuning run: train, from the beginning or from a checkpoint, and save."""
    config = setup.config
    accelerator = setup.accelerator
    checkpoint: Path | None = None
    if config.resume_from_checkpoint is not None:
        checkpoint = find_checkpoint(accelerator, setup.output_dir, config.resume_from_checkpoint)
    run = build_run(setup)
    found = f"{run.loss_facts.terms}, width {run.loss_facts.pad_to_window}"
    check_agreement(accelerator, "loss", found)
    _print_plan(run)
    progress = resume(run, checkpoint) if checkpoint else Progress()
    metric = config.metric_for_best_model
    if run.compute_metrics is not None and metric != "loss":
        # An evaluation before the first step shows whether the user's function returns the metric.
        check_one_of("metric_for_best_model", f"eval_{metric}", evaluate_split(run, run.model))
    is_resumed = checkpoint is not None
    call_on_main(accelerator, prepare_output_dir, config, checkpoint)
    call_on_main(accelerator, start_trackers, accelerator, config, is_resumed)
    if checkpoint:
        forget_other_best(run, progress, checkpoint)
        metrics = run.output_dir / "metrics.jsonl"
        change = describe_world_change(metrics, progress.step, accelerator.num_processes)
        if change is not None:
            print_fact(accelerator, "processes", change)
    start = time.perf_counter()
    try:
        progress = fit(run, progress)
    except Exception as error:
        if isinstance(error, OutOfMemory | NonFinite) or is_out_of_memory(error):
            raise _with_remedy(run, progress, error) from error
        raise
    return _finish(run, progress, seconds=time.perf_counter() - start)


def _count_classes(data: PreparedData) -> str:
    """List how many training rows each class of a run has, for its log: the first classes."""
    counts = Counter(data.splits["train"]["label"][:])
    names = data.labels[:NUM_CLASSES]
    listed = [f"{name} {counts[i]}" for i, name in enumerate(names)]
    if len(data.labels) > len(names):
        listed.append(f"... ({len(data.labels)} classes)")
    return ", ".join(listed)


def _print_plan(run: Run) -> None:
    """Print, in the log of a fine-tuning run, how its windows are computed: layout, loss, draws,
    precision, padding, bits and speed-ups.
    """
    facts = run.loss_facts
    accelerator = run.accelerator
    draws = "none"
    if facts.draws:
        draws = f"{', '.join(facts.draws)}; they depend only on seed, epoch and sample"
    ratio = padding_ratio(run.windows, planned_lengths(run.data))
    max_tokens = run.windows.splitter.planner.max_tokens
    padding = f"{ratio:.2f} times the real tokens; at most {max_tokens:,} per micro-batch, padding "
    padding += "included"
    if facts.pad_to_window:
        padding += "; every micro-batch as wide as its window"
    speed_ups = ", ".join(facts.speed_ups.names) or "none"
    print_fact(accelerator, "layout", run.windows.layout)
    print_fact(accelerator, "loss", *facts.terms)
    print_fact(accelerator, "draws", draws)
    print_fact(accelerator, "precision", precision_name(accelerator))
    print_fact(accelerator, "padding", padding)
    if run.config.same_bits:
        chunks = f"the same in any layout, in chunks of {run.config.same_bits} samples"
        print_fact(accelerator, "bits", chunks)
    print_fact(accelerator, "speed-ups", speed_ups)


def _with_remedy(run: Run, progress: Progress, error: Exception) -> HfGaError:
    """Build the error of a fine-tuning run that ran out of memory or met a non-finite number: what
    to change, and how to go on from the newest checkpoint.
    """
    checkpoint = newest(run.output_dir)
    then = "start again: there is no checkpoint yet"
    if checkpoint:
        then = f"resume from {checkpoint} with --resume_from_checkpoint auto"
    if isinstance(error, NonFinite):
        return NonFinite(
            f"the run stopped before optimizer step {progress.step + 1}: {error} Check these "
            "samples, lower the learning rate, set max_grad_norm, or skip such windows with "
            f"--on_nonfinite skip. Then {then}."
        )
    if isinstance(error, OutOfMemory):  # says itself what to change
        return OutOfMemory(f"{error} Then {then}.")
    return OutOfMemory(
        "memory ran out: use smaller batches (--per_device_train_batch_size; in evaluations "
        f"--per_device_eval_batch_size), or FSDP over more devices. {error} Then {then}."
    )


def _finish(run: Run, progress: Progress, seconds: float) -> dict[str, Any]:
    """Finish a fine-tuning run after its last step: evaluate the test split, save the last model,
    check what was saved, write the reports, predict, and upload.
    """
    config = run.config
    accelerator = run.accelerator
    weights = full_state_dict(accelerator, run.model)  # gathered on the main process
    summary = _summary(run, progress, weights, seconds)
    if "test" in run.data.splits:
        summary |= evaluate_split(run, run.model, "test")
    expected = expected_outputs(run, run.model)
    summary |= call_on_main(accelerator, save_and_check_trained, run, weights, expected)
    call_on_main(accelerator, write_reports, run.output_dir, summary)
    write_predictions(run, run.model)  # after saving: a failure does not lose the trained model
    summary = broadcast_from_main(accelerator, summary)
    end_training(accelerator)
    print_results(accelerator, summary)
    models = f"{run.output_dir} (last model)"
    if progress.best_metric is not None:
        models += f", {run.output_dir / 'best'} (best by {config.metric_for_best_model})"
    print_fact(accelerator, "output", models)
    print_fact(
        accelerator,
        "files",
        "curves.png (losses, learning rate), summary.json (results), metrics.jsonl (each step)",
    )
    # Last, because the other processes do not wait for it.
    if config.push_to_hub and accelerator.is_main_process:
        print_fact(accelerator, "hub", upload(config, summary))
    return summary


def _summary(
    run: Run, progress: Progress, weights: dict[str, torch.Tensor], seconds: float
) -> dict[str, Any]:
    """Return the content of a run's `summary.json` without test results. It is complete on the main
    process only.
    """
    state = run.windows.state
    return {
        "train_loss": progress.train_loss,
        **progress.last_metrics,
        f"best_eval_{run.config.metric_for_best_model}": progress.best_metric,
        "steps": progress.step,
        "stopped_early": stopped_early(run, progress),
        "skipped_windows": progress.num_skipped,
        "changes": progress.changes,
        "train_seconds": round(seconds, 2),
        "layout": str(run.windows.layout),
        "most_tokens_in_a_micro_batch": state.max_elements,  # None: memory never ran out
        "learning_rate": max(group["initial_lr"] for group in run.optimizer.param_groups),
        "loss": list(run.loss_facts.terms),
        "data_facts": run.data.notes,
        "labels": run.data.labels,
        "temperature": learned_temperature(weights),
        "saved_best": progress.best_check if progress.best_metric is not None else None,
        "weights_sha256": state_sha256(weights),
        "machine": machine(),
        **_facts(run),
    }


def _facts(setup: Setup) -> dict[str, Any]:
    """Return what `summary.json` and `evaluation.json` have in common: data, precision, versions of
    packages and flags.
    """
    return {
        "data": setup.data.description,
        "class_weights": setup.class_weights or None,
        "precision": precision_name(setup.accelerator),
        "versions": versions(),
        "config": setup.config.to_dict(),
    }


def _evaluate_only(setup: Setup) -> dict[str, Any]:
    """Carry out a run with the flag `eval_only`: evaluate and predict without training, write
    evaluation.json, and return its content.
    """
    accelerator = setup.accelerator
    model = build_model(setup)
    results: dict[str, Any] = {"model_name_or_path": setup.config.model_name_or_path}
    unused_optimizer = torch.optim.SGD(model.parameters())  # FSDP2 needs one to prepare a model
    model, _ = prepare(accelerator, model, unused_optimizer)
    if accelerator.is_main_process:
        setup.output_dir.mkdir(parents=True, exist_ok=True)
    for split in setup.data.splits:
        results |= evaluate_split(setup, model, split)
    print_results(accelerator, results)
    write_predictions(setup, model)
    results |= _facts(setup)
    if accelerator.is_main_process:
        write_json(setup.output_dir / "evaluation.json", results)
    end_training(accelerator)
    return results
