"""finetune(): from a configuration to a trained model on disk. What `scripts/finetune.py` calls."""

import math
import os
import platform
import shutil
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import datasets
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, get_scheduler

from hf_ga.checkpoint import find_checkpoint, weights_sha256
from hf_ga.config import FinetuneConfig
from hf_ga.data import PreparedData, prepare_data
from hf_ga.errors import ConfigError
from hf_ga.evaluation import evaluate, evaluation_windows
from hf_ga.forward import unwrapped
from hf_ga.loop import Progress, Run, fit, resume
from hf_ga.models import load_model, load_model_config, load_tokenizer
from hf_ga.optimizers import build_optimizer
from hf_ga.plan import plan_by_sizes
from hf_ga.reduce import check_supported
from hf_ga.report import plot_curves, read_metrics, write_json
from hf_ga.targets import TargetRule, prove_targets
from hf_ga.windows import WindowLoader

NUM_PROOF_SAMPLES = 64
# Flags that may change when a run is resumed: they choose where and how it runs, not what it computes.
_FREE_TO_CHANGE = {
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "dataloader_num_workers",
    "per_device_eval_batch_size",
    "deterministic",
    "gradient_checkpointing",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",  # the window's size is part of the position that a checkpoint keeps
}
_SHOWN = ("train_loss", "eval_loss", "eval_accuracy", "test_loss", "test_accuracy")


def finetune(config: FinetuneConfig) -> dict[str, Any]:
    """Fine-tune as the configuration says, and return what `summary.json` holds.

    `output_dir` gets metrics.jsonl (a line per optimizer step), summary.json, curves.png, checkpoints, `best/` (lowest validation
    loss) and the last model with its tokenizer, both as `from_pretrained` loads them.

    Raises:
        ConfigError, DataError: bad input, before a model is built. LossNotAdditive, UnkeyedRandomness: the model cannot be
            trained exactly. CheckpointError: nothing to resume from.
    """
    config.check()
    accelerator = _accelerator(config)
    layout = config.layout(accelerator.num_processes)
    accelerator.gradient_accumulation_steps = layout.accumulation_steps  # sizes are derived; a short window has fewer
    tokenizer = load_tokenizer(config)
    data = prepare_data(config, tokenizer)
    model_config = load_model_config(config, data)
    checkpoint = None
    if config.resume_from_checkpoint is not None:
        checkpoint = find_checkpoint(Path(config.output_dir), config.resume_from_checkpoint)
    if config.drop_last_window and len(data.splits["train"]) < layout.window_size:
        raise ConfigError(
            f"drop_last_window leaves nothing of {len(data.splits['train'])} samples, which are less than one window of "
            f"{layout.window_size}: use a smaller global batch, or keep the last window."
        )
    for line in (data.description, *data.facts, str(layout)):
        accelerator.print(line)
    run, rule = _build_run(config, accelerator, data, model_config)
    accelerator.print(f"{_size(run.model)}; {rule}; dropout keyed at {len(rule.places.places)} places")
    if not data.labels:
        accelerator.print(f"unigram entropy of the training tokens: {data.unigram_entropy:.4f} nats per token")
    progress = resume(run, checkpoint) if checkpoint else Progress()
    _prepare_output_dir(config, checkpoint)
    began = time.perf_counter()
    progress = fit(run, progress)
    return _finish(config, run, data, progress, seconds=time.perf_counter() - began)


def _accelerator(config: FinetuneConfig) -> Accelerator:
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    check_supported(accelerator)
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            f"mixed precision {accelerator.mixed_precision} is not supported yet: launch with --mixed_precision no (float32)."
        )
    _use_all_cores(accelerator)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    if accelerator.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return accelerator


def _use_all_cores(accelerator: Accelerator) -> None:
    """`accelerate launch` sets one CPU thread a process unless told otherwise; training on a CPU wants its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if accelerator.device.type == "cpu" and "ACCELERATE_MIXED_PRECISION" in os.environ and torch.get_num_threads() < cores:
        torch.set_num_threads(cores)


def _build_run(
    config: FinetuneConfig, accelerator: Accelerator, data: PreparedData, model_config: PretrainedConfig
) -> tuple[Run, TargetRule]:
    """Model, optimizer, schedule and windows; the target rule is proven on the way."""
    set_seed(config.seed)
    model = load_model(config, model_config, data).to(accelerator.device)
    train = data.splits["train"]
    rule = prove_targets(model, _proof_samples(train), data.collate, allow_unkeyed=config.allow_unkeyed)
    windows = _train_windows(config, accelerator, data, rule)
    rate = config.learning_rate or (1e-3 if config.model_name_or_path is None else 5e-5)
    optimizer = build_optimizer(model, config.optim, rate, config.weight_decay)
    max_windows = math.ceil(config.num_train_epochs * len(windows)) if config.max_steps is None else 2**62
    max_steps = config.max_steps or max_windows
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, max_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    once_per_epoch = min(len(windows), max_steps)
    run = Run(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        windows=windows,
        rule=rule,
        evaluate=lambda: _evaluate_split(config, accelerator, model, data, "validation", rule),
        save_best=lambda: _save_model(Path(config.output_dir) / "best", model, data),
        output_dir=Path(config.output_dir),
        max_windows=max_windows,
        max_steps=max_steps,
        eval_steps=config.eval_steps or once_per_epoch,
        save_steps=config.save_steps or once_per_epoch,
        save_total_limit=config.save_total_limit,
        max_grad_norm=config.max_grad_norm or None,
        allow_unkeyed=config.allow_unkeyed,
        identity={k: v for k, v in config.to_dict().items() if k not in _FREE_TO_CHANGE}
        | {"window_size": windows.layout.window_size, "data": data.content_hash},
    )
    return run, rule


def _train_windows(config: FinetuneConfig, accelerator: Accelerator, data: PreparedData, rule: TargetRule) -> WindowLoader:
    return WindowLoader(
        data.splits["train"],
        data.collate,
        accelerator=accelerator,
        per_device_batch_size=config.per_device_train_batch_size,
        global_batch_size=config.layout(accelerator.num_processes).window_size,
        seed=config.seed,
        lengths=data.splits["train"]["length"],
        target_counts=data.splits["train"]["num_targets"],
        # Micro-batches of similar lengths: less padding, the same update.
        planner=None if rule.pad_to_window else partial(plan_by_sizes, sizes=[config.per_device_train_batch_size]),
        drop_last_window=config.drop_last_window,
        num_workers=config.dataloader_num_workers,
        pad_to_window=rule.pad_to_window,
    )


def _finish(config: FinetuneConfig, run: Run, data: PreparedData, progress: Progress, seconds: float) -> dict[str, Any]:
    """Save the last model, plot, evaluate on the test split, write the summary."""
    folder, accelerator = run.output_dir, run.accelerator
    _save_model(folder, run.model, data)
    metrics = read_metrics(folder / "metrics.jsonl")
    plot_curves(metrics, folder / "curves.png")
    summary = {
        "train_loss": next((line["loss"] for line in reversed(metrics) if line["loss"] is not None), None),  # skipped: none
        **{k: v for line in metrics[-1:] for k, v in line.items() if k.startswith("eval_")},
        "best_eval_loss": progress.best_loss,
        "unigram_entropy": data.unigram_entropy,
        "steps": progress.step,
        "skipped_windows": progress.num_skipped,
        "train_seconds": round(seconds, 2),
        "layout": str(run.windows.layout),
        "targets": str(run.rule),
        "data": data.description,
        "data_facts": data.facts,
        "labels": data.labels,
        "weights_sha256": weights_sha256(unwrapped(run.model)),
        "versions": _versions(),
        "config": config.to_dict(),
    }
    if "test" in data.splits:
        results = _evaluate_split(config, accelerator, run.model, data, "test", run.rule)
        summary |= {f"test_{name}": value for name, value in results.items()}
    write_json(folder / "summary.json", summary)
    shown = {k: v for k, v in summary.items() if k in _SHOWN and v is not None}
    accelerator.print(", ".join(f"{name} {value:.4f}" for name, value in shown.items()) + f"; model and curves in {folder}")
    return summary


def _evaluate_split(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, split: str, rule: TargetRule
) -> dict[str, float]:
    windows = evaluation_windows(
        data.splits[split],
        data.collate,
        accelerator=accelerator,
        batch_size=config.per_device_eval_batch_size,
        lengths=data.splits[split]["length"],
        rule=rule,
    )
    return evaluate(accelerator, model, windows, rule, metrics=data.task.metrics)


def _proof_samples(train: Dataset) -> Sequence[dict[str, Any]]:
    """Samples over the whole range of lengths: shortest and longest tell whether padding matters."""
    by_length = np.argsort(np.asarray(train["length"]), kind="stable")
    ids = by_length[np.linspace(0, len(by_length) - 1, min(NUM_PROOF_SAMPLES, len(by_length))).astype(int)]
    return [train[int(i)] for i in ids]


def _prepare_output_dir(config: FinetuneConfig, checkpoint: Path | None) -> None:
    """A run that goes on in another folder takes its earlier lines and its best model along."""
    folder = Path(config.output_dir)
    if config.overwrite_output_dir:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint is None or checkpoint.resolve().parent == folder.resolve():
        return
    if (earlier := checkpoint.resolve().parent / "metrics.jsonl").is_file():
        shutil.copy(earlier, folder)
    if (best := checkpoint.resolve().parent / "best").is_dir():
        shutil.copytree(best, folder / "best", dirs_exist_ok=True)


def _save_model(folder: Path, model: nn.Module, data: PreparedData) -> None:
    unwrapped(model).save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)


def _size(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{type(unwrapped(model)).__name__} with {sum(p.numel() for p in parameters):,} parameters, {trainable:,} trainable"


def _versions() -> dict[str, str]:
    modules = {"torch": torch, "transformers": transformers, "accelerate": accelerate, "datasets": datasets}
    return {"hf_ga": version("hf_ga"), "python": platform.python_version()} | {k: m.__version__ for k, m in modules.items()}
