"""finetune(): from a configuration to a trained model on disk.

All processes run it together; the main process writes and prints.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import EvalPrediction

from hf_ga.errors import HfGaError, NonFinite, OutOfMemory
from hf_ga.exact.memory import is_out_of_memory
from hf_ga.finetuning.data.data import PreparedData, prepare_unlabelled
from hf_ga.finetuning.data.showing import sample_lines
from hf_ga.finetuning.run.accelerator import check_sharded, make_accelerator, precision_name
from hf_ga.finetuning.run.build import (
    build_model,
    build_run,
    evaluate_split,
    evaluation_loss,
    prepare_setup,
    prove_on_split,
)
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.config_checks import check_one_of
from hf_ga.finetuning.run.embeddings import learned_temperature
from hf_ga.finetuning.run.hub import check_login, upload
from hf_ga.finetuning.run.loop import fit, stopped_early
from hf_ga.finetuning.run.outputs import prepare_output_dir, save_and_check_trained, write_reports
from hf_ga.finetuning.run.predictions import write_predictions
from hf_ga.finetuning.run.reload import expected_outputs
from hf_ga.finetuning.run.report import print_fact, print_results, read_metrics
from hf_ga.finetuning.run.run import Progress, Run, Setup
from hf_ga.finetuning.run.saving import forget_other_best, resume
from hf_ga.finetuning.run.trackers import start_trackers
from hf_ga.finetuning.run.train_windows import padding_ratio, planned_lengths
from hf_ga.parallel.prepare import full_state_dict, prepare
from hf_ga.parallel.processes import (
    broadcast_from_main,
    check_agreement,
    end_training,
    main_process_first,
    raise_on_all_ranks,
)
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.recovery.files import write_json
from hf_ga.recovery.latest import find_checkpoint, newest
from hf_ga.recovery.lock import only_run_in
from hf_ga.recovery.versions import machine, versions

NUM_CLASSES = 20  # whose weights are printed, at most; summary.json has all
# Names of counting rules in plain words.
TARGETS = {
    "shifted labels": "each token after the first, unless its label is -100",
    "labels": "each label, unless it is -100",
    "samples": "each sample",
    "attended tokens": "each token of the attention mask",
    "loss_fn": "counted by loss_fn",
    "whole_batch": "each sample, compared with all samples of its window",
}


def finetune(
    config: FinetuneConfig,
    on_step: Callable[[dict[str, Any], nn.Module], None] | None = None,
    on_evaluate: Callable[[dict[str, float], nn.Module], None] | None = None,
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Any]:
    """Fine-tune by a configuration; returns the content of `summary.json` (under `eval_only`, of
    `evaluation.json`).

    Writes to `output_dir`: metrics.jsonl (one line per optimizer step), summary.json, curves.png,
        checkpoints, `best/` (the best
    model by `metric_for_best_model`) and the last model with its tokenizer, both for
    `from_pretrained`.

    Args:
        on_step: called on every process after each window as `on_step(line, model)`: the line of
            metrics.jsonl, with `eval_loss` and the other metrics where there was an evaluation, and
            the model as it is trained (in training mode).
        on_evaluate: called on every process after each evaluation, that of the test split included,
            as `on_evaluate(metrics, model)`: `eval_loss`, ... or `test_loss`, ..., and the model in
            evaluation mode, without gradients.
        compute_metrics: as in `transformers.Trainer`; replaces the metrics of the task. It is
            called on every process with an `EvalPrediction` of the whole split: arrays with the
            samples in the order of the data, ragged ones padded with -100 on the second axis.
            `predictions` are the model's outputs without the loss (a tuple of arrays, if there are
            several), with `predict_with_generate` the generated token ids. The results are named
            `eval_...` and `test_...`. They may be the `metric_for_best_model`: higher is better,
            unless the name ends in loss, perplexity or mae. The run then evaluates once before the
            first step, to find out whether there is such a metric.
        preprocess_logits_for_metrics: as in Trainer: `(logits, labels) -> predictions` of one
            batch, on the device, such as an argmax, so that not all logits need to be kept in
            memory.

    Raises:
        ConfigError, DataError: bad input, before a model is built. LossNotAdditive,
            UnkeyedRandomness: the model cannot be trained exactly. OutOfMemory: a sample does not
            fit. CheckpointError: no complete checkpoint to resume from, or a full disk. NonFinite:
            a loss or gradient is not finite. SavedModelDiffers: a saved folder is not the trained
            model. UploadFailed: the run has finished, its upload failed.
            RunStopped: stopped by a signal; the run is saved.
    """
    functions = {"on_step": on_step, "on_evaluate": on_evaluate, "compute_metrics": compute_metrics}
    functions |= {"preprocess_logits_for_metrics": preprocess_logits_for_metrics}
    config.check(has_own_metrics=compute_metrics is not None)
    accelerator = make_accelerator(config)
    if config.eval_only:  # only adds files
        return _finetune(config, accelerator, functions)
    with only_run_in(Path(config.output_dir), accelerator):
        config.check_output_dir()  # again under the lock: another run may have used it since
        return _finetune(config, accelerator, functions)


def _finetune(
    config: FinetuneConfig, accelerator: Accelerator, functions: dict[str, Any]
) -> dict[str, Any]:
    layout = config.layout(accelerator.num_processes)
    accelerator.gradient_accumulation_steps = layout.accumulation_steps  # of a full window
    check_sharded(config, accelerator)
    if config.push_to_hub:
        check_login(config, accelerator)
    with main_process_first(
        accelerator
    ):  # the others read its downloads and tokenized data from caches
        setup = prepare_setup(config, accelerator, **functions)
        if config.predict_file is not None:
            setup.unlabelled = prepare_unlabelled(config, setup.data, config.predict_file)
    check_agreement(accelerator, "data", _hash_of(setup.data))
    resume_from = config.resume_from_checkpoint
    checkpoint = (
        find_checkpoint(accelerator, Path(config.output_dir), resume_from)
        if resume_from is not None
        else None
    )
    print_fact(accelerator, "data", setup.data.description, *setup.data.notes)
    for lines in sample_lines(setup.data, config.show_samples):
        print_fact(accelerator, "sample", *lines)
    if setup.class_weights:
        print_fact(accelerator, "classes", _fact_of_classes(setup))
    if config.eval_only:
        return _evaluate_only(setup)
    run = build_run(setup)
    check_agreement(
        accelerator, "count of targets", f"{run.rule.name}, width {run.rule.pad_to_window}"
    )
    _print_plan(run)
    progress = resume(run, checkpoint) if checkpoint else Progress()
    if run.compute_metrics is not None and config.metric_for_best_model != "loss":
        check_one_of(
            "metric_for_best_model", f"eval_{config.metric_for_best_model}", run.evaluate()
        )
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            prepare_output_dir(config, checkpoint)
            start_trackers(accelerator, config, resumed=checkpoint is not None)
    if checkpoint:
        forget_other_best(run, progress, checkpoint)
    began = time.perf_counter()
    try:
        progress = fit(run, progress)
    except Exception as error:
        if not isinstance(error, OutOfMemory | NonFinite) and not is_out_of_memory(error):
            raise
        raise _with_remedy(run, progress, error) from error
    return _finish(run, progress, seconds=time.perf_counter() - began)


def _fact_of_classes(setup: Setup) -> str:
    weights = [f"{label} {weight:.4g}" for label, weight in setup.class_weights.items()]
    more = f", ... ({len(weights)} classes)" if len(weights) > NUM_CLASSES else ""
    return f"weights {', '.join(weights[:NUM_CLASSES])}{more}"


def _print_plan(run: Run) -> None:
    """Print how windows are computed."""
    rule, sites = run.rule, len(run.rule.dropout.sites)
    ratio, limit = (
        padding_ratio(run.windows, planned_lengths(run.data)),
        run.windows.splitter.planner.max_tokens,
    )
    padding = (
        f"{ratio:.2f} times the real tokens; at most {limit:,} per micro-batch, padding included"
    )
    padding += "; every micro-batch as wide as its window" * rule.pad_to_window
    facts = {
        "layout": run.windows.layout,
        "targets": f"{TARGETS.get(rule.name, rule.name)}; relative error in the proof "
        f"{rule.residual:.0e}",
        "dropout": f"{sites} sites; masks depend only on seed, epoch and sample"
        if sites
        else "none",
        "precision": precision_name(run.accelerator),
        "padding": padding,
        **(
            {"bits": f"the same in any layout, in chunks of {run.config.same_bits} samples"}
            if run.config.same_bits
            else {}
        ),
        "speed-ups": ", ".join(speed_up.name for speed_up in rule.speed_ups) or "none",
    }
    for name, fact in facts.items():
        print_fact(run.accelerator, name, fact)


def _with_remedy(run: Run, progress: Progress, error: Exception) -> HfGaError:
    saved = newest(run.output_dir)
    then = (
        f"resume from {saved} with --resume_from_checkpoint auto"
        if saved
        else "start again: there is no checkpoint yet"
    )
    if isinstance(error, NonFinite):
        return NonFinite(
            f"the run stopped before optimizer step {progress.step + 1}: {error} Check these "
            "samples, lower the learning rate, "
            f"set max_grad_norm, or skip such windows with --on_nonfinite skip. Then {then}."
        )
    where = (
        ""
        if isinstance(error, OutOfMemory)
        else "memory ran out: use smaller batches, or FSDP over more devices. "
    )
    return OutOfMemory(f"{where}{error} Then {then}.")


def _hash_of(data: PreparedData) -> str:
    """Hash of the training samples, the labels, and the lengths of all splits, which determine the
    layout.
    """
    lengths = [np.asarray(dataset["length"][:]).tobytes() for dataset in data.splits.values()]
    return hashlib.sha256(
        b"".join([data.content_hash.encode(), repr(data.labels).encode(), *lengths])
    ).hexdigest()[:16]


def _finish(run: Run, progress: Progress, seconds: float) -> dict[str, Any]:
    """Save the last model, check what was saved, write the reports, predict; returns the
    summary.
    """
    config, accelerator, data = run.config, run.accelerator, run.data
    weights = full_state_dict(accelerator, run.model)  # gathered on the main process
    summary = _summary(run, progress, weights, seconds)
    if "test" in data.splits:
        summary |= run.evaluate("test")
    expected = expected_outputs(run, run.model)
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            summary |= save_and_check_trained(run, weights, expected)
            write_reports(run.output_dir, summary)
    write_predictions(run, run.model)  # last: a failure does not lose the trained model
    summary = broadcast_from_main(accelerator, summary)
    end_training(accelerator)
    print_results(accelerator, summary)
    best = (
        f", {run.output_dir / 'best'} (best by {config.metric_for_best_model})"
        if progress.best_metric is not None
        else ""
    )
    print_fact(accelerator, "output", f"{run.output_dir} (last model){best}")
    print_fact(
        accelerator,
        "files",
        "curves.png (losses, learning rate), summary.json (results), metrics.jsonl (each step)",
    )
    if (
        config.push_to_hub and accelerator.is_main_process
    ):  # last: the other processes do not wait for it
        print_fact(accelerator, "hub", upload(config, summary))
    return summary


def _summary(
    run: Run, progress: Progress, weights: dict[str, torch.Tensor], seconds: float
) -> dict[str, Any]:
    """The content of `summary.json` without test results; complete on the main process only."""
    metrics = (
        read_metrics(run.output_dir / "metrics.jsonl") if run.accelerator.is_main_process else []
    )
    return {
        "train_loss": next(
            (line["loss"] for line in reversed(metrics) if line["loss"] is not None), None
        ),  # None: skipped
        **{k: v for line in metrics[-1:] for k, v in line.items() if k.startswith("eval_")},
        f"best_eval_{run.config.metric_for_best_model}": progress.best_metric,
        "steps": progress.step,
        "stopped_early": stopped_early(run, progress),
        "skipped_windows": progress.num_skipped,
        "changes": progress.changes,
        "train_seconds": round(seconds, 2),
        "layout": str(run.windows.layout),
        "most_tokens_in_a_micro_batch": run.windows.state.max_elements,  # None: no out-of-memory
        # Of the main process; padded or made up in another way than those of the proof.
        "micro_batches_without_speed_ups": run.windows.state.num_plain,
        "precision": precision_name(run.accelerator),
        "learning_rate": max(group["initial_lr"] for group in run.optimizer.param_groups),
        "targets": str(run.rule),
        "data": run.data.description,
        "data_facts": run.data.notes,
        "labels": run.data.labels,
        "class_weights": run.class_weights or None,
        "temperature": learned_temperature(weights),
        "saved_best": progress.best_check if progress.best_metric is not None else None,
        "weights_sha256": state_sha256(weights),
        "versions": versions(),
        "machine": machine(),
        "config": run.config.to_dict(),
    }


def _evaluate_only(setup: Setup) -> dict[str, Any]:
    """Evaluate and predict without training; returns the content of `evaluation.json`."""
    config, accelerator, data, folder = (
        setup.config,
        setup.accelerator,
        setup.data,
        setup.output_dir,
    )
    model = build_model(setup)
    results: dict[str, Any] = {
        "model_name_or_path": config.model_name_or_path,
        "data": data.description,
        "class_weights": setup.class_weights or None,
    }
    loss = evaluation_loss(setup)
    proofs = {  # for counting targets; evaluations draw no dropout
        split: prove_on_split(setup, model, split, allow_split_dependent_randomness=True, **loss)
        for split in data.splits
    }
    model, _ = prepare(
        accelerator, model, torch.optim.SGD(model.parameters())
    )  # FSDP2 needs an optimizer
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    for split, rule in proofs.items():
        results |= evaluate_split(setup, model, rule, split)
    print_results(accelerator, results)
    write_predictions(setup, model)
    results |= {
        "precision": precision_name(accelerator),
        "versions": versions(),
        "config": config.to_dict(),
    }
    if accelerator.is_main_process:
        write_json(folder / "evaluation.json", results)
    end_training(accelerator)
    return results
