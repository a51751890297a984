"""Build a run from a configuration and prepared data: model, proof, optimizer, schedule, windows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PretrainedConfig, get_scheduler

from hf_ga.data.data import PreparedData
from hf_ga.data.files import is_pattern
from hf_ga.data.options import as_list
from hf_ga.data.stream_loader import StreamLoader
from hf_ga.exact.forward import LossFunction, restored_modes, unwrapped
from hf_ga.parallel.prepare import prepare
from hf_ga.proof.targets import ProvenLoss
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.run.adapters import add_adapters, freeze, is_lora
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.evaluation import evaluate, evaluation_windows
from hf_ga.run.losses import SmoothedCrossEntropy
from hf_ga.run.models import complete_config, load_base_config, load_model
from hf_ga.run.optimizers import ADAM, build_optimizer
from hf_ga.run.readers import make_reader
from hf_ga.run.report import print_fact
from hf_ga.run.run import Callbacks, Run
from hf_ga.run.train_windows import train_windows
from hf_ga.training import NUM_PROOF_SAMPLES, prove_targets

# Flags of which only the last part of a path must be equal on resume.
LOCATIONS = ("model_name_or_path", "adapter_name_or_path", "dataset_name", "validation_file", "test_file")
# Flags that may change on resume: they do not affect the results.
FREE_TO_CHANGE = {
    "output_dir",
    "resume_from_checkpoint",
    "report_to",
    "run_name",
    "project",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
    "predict_file",
    "max_predict_samples",
    "max_new_tokens",
    "num_beams",
    "predict_with_generate",
    "early_stopping_patience",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "dataloader_num_workers",
    "per_device_eval_batch_size",
    "full_determinism",
    "gradient_checkpointing",
    "fsdp_reduce_each_micro_batch",
    "resume_with_changes",
    "on_nonfinite",
    "per_device_train_batch_size",
    "same_bits",  # part of `chunks`
    "gradient_accumulation_steps",
    "max_tokens_per_micro_batch",
    "global_batch_size",  # checked as the window size, part of a checkpoint's position
}


def build_model(
    config: FinetuneConfig, accelerator: Accelerator, data: PreparedData, model_config: PretrainedConfig, dtype: torch.dtype
) -> nn.Module:
    """Build the model with float32 trainable parameters; weights frozen under adapters keep the compute dtype."""
    model, new_weights = _load(config, accelerator, data, model_config, dtype)
    if new_weights:
        print_fact(
            accelerator, "weights", f"{len(new_weights)} new: {', '.join(new_weights[:2])}{', ...' * (len(new_weights) > 2)}"
        )
    return model


def mergeable(run: Run, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A model like the trained one, but neither sharded nor in 4 bits, where adapters cannot be merged. For the main process.

    Args:
        weights: the full `state_dict()`.
    """
    config = replace(run.config, load_in_4bit=False)
    model, _ = _load(config, run.accelerator, run.data, complete_config(load_base_config(config), config, run.data), run.dtype)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.load_state_dict({name: weights[name] for name in trained}, strict=False)
    return model


def _load(
    config: FinetuneConfig, accelerator: Accelerator, data: PreparedData, model_config: PretrainedConfig, dtype: torch.dtype
) -> tuple[nn.Module, list[str]]:
    """The model in training mode, and the names of parameters that the checkpoint lacks."""
    set_seed(config.seed)
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    kept = dtype if config.has_adapters and dtype == computed else torch.float32
    loaded, new_weights = load_model(config, model_config, data, kept, computed or torch.float32)
    model: nn.Module = loaded
    if config.has_adapters:
        model = add_adapters(model, config, data.task.lora_type, new_weights)
    if config.freeze:
        freeze(model, config.freeze)
    return model.to(accelerator.device).train(), new_weights  # also the model within PEFT's wrapper


def build_run(
    config: FinetuneConfig,
    accelerator: Accelerator,
    data: PreparedData,
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    callbacks: Callbacks,
) -> Run:
    """Build model, optimizer, schedule and windows, and prove the loss.

    Args:
        dtype: of the loaded model; it is saved in this dtype.
    """
    loss_fn = chosen_loss_fn(config)
    windows = train_windows(config, accelerator, data)  # checks sizes before the model is built
    model = build_model(config, accelerator, data, model_config, dtype)
    _print_size(config, accelerator, model)
    head_proven, proven = _prove(config, model, data, loss_fn)
    windows.state.pad_to_window = proven.pad_to_window
    max_windows = math.ceil(config.num_train_epochs * len(windows)) if config.max_steps is None else 2**62
    max_steps = config.max_steps or max_windows
    optimizer, scheduler = _optimizer(config, model, max_steps)
    identity = _identity(config, accelerator, data, model, windows.layout.window_size)  # before the weights are sharded
    model, optimizer = prepare(accelerator, model, optimizer)
    once_per_epoch = max_steps if isinstance(windows, StreamLoader) else min(len(windows), max_steps)  # streams have no length
    return Run(
        config=config,
        accelerator=accelerator,
        data=data,
        dtype=dtype,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        windows=windows,
        proven=proven,
        loss_fn=loss_fn,
        evaluate=make_evaluator(config, accelerator, model, data, head_proven, callbacks),
        callbacks=callbacks,
        max_windows=max_windows,
        max_steps=max_steps,
        eval_steps=config.eval_steps or once_per_epoch,
        save_steps=config.save_steps or once_per_epoch,
        identity=identity,
    )


def _print_size(config: FinetuneConfig, accelerator: Accelerator, model: Any) -> None:
    trained, total = (model.num_parameters(only_trainable=only) for only in (True, False))
    size = f"{total:,} parameters, {'all' if trained == total else f'{trained:,}'} trained"
    print_fact(accelerator, "model", f"{type(model).__name__}, {size}, {config.model_name_or_path or 'new weights'}")


def _optimizer(
    config: FinetuneConfig, model: nn.Module, max_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer and its schedule."""
    usual = 2e-4 if config.has_adapters else 1e-3 if config.model_name_or_path is None else 5e-5
    adam = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon} if config.optim in ADAM else {}
    optimizer = build_optimizer(model, config.optim, config.learning_rate or usual, config.weight_decay, **adam)
    warmup_steps = math.ceil(config.warmup_steps * max_steps) if config.warmup_steps < 1 else int(config.warmup_steps)
    return optimizer, get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, max_steps)


def _prove(
    config: FinetuneConfig, model: nn.Module, data: PreparedData, loss_fn: LossFunction | None
) -> tuple[ProvenLoss, ProvenLoss]:
    """Proofs of the head's own loss, for evaluations, and of the training loss."""
    more = {"allow_split_dependent_randomness": config.allow_split_dependent_randomness}
    samples = proof_samples(data, "train")
    proven = prove_targets(model, samples, data.collate, **more)
    return proven, proven if loss_fn is None else prove_targets(model, samples, data.collate, loss_fn=loss_fn, **more)


def _identity(
    config: FinetuneConfig, accelerator: Accelerator, data: PreparedData, model: nn.Module, window_size: int
) -> dict[str, Any]:
    """Settings that must be equal on resume. Only names of files and folders: their location may change."""
    flags = {k: v for k, v in config.to_dict().items() if k not in FREE_TO_CHANGE}
    places = {k: [_without_folder(place) for place in as_list(flags[k])] for k in LOCATIONS}
    return (
        flags
        | {k: names if len(names) > 1 else names[0] for k, names in places.items() if names}
        | {
            "window_size": window_size,
            "chunks": [config.same_bits, config.max_tokens_per_micro_batch] if config.same_bits else None,
            "data": data.content_hash,
            "mixed_precision": accelerator.mixed_precision,
            "base_model": _frozen_sha256(model) if is_lora(model) else None,  # not in checkpoints
        }
    )


def _without_folder(place: str) -> str:
    path = Path(place)
    return path.resolve().name if path.exists() else path.name if is_pattern(place) else place


def _frozen_sha256(model: nn.Module) -> str:
    named = unwrapped(model).named_parameters(remove_duplicate=False)
    return state_sha256({name: parameter for name, parameter in named if not parameter.requires_grad})


def chosen_loss_fn(config: FinetuneConfig) -> LossFunction | None:
    """The loss with label smoothing; None: the head's own."""
    if not config.label_smoothing_factor:
        return None
    return SmoothedCrossEntropy(config.label_smoothing_factor, shifted=config.task == "causal-lm")


def make_evaluator(
    config: FinetuneConfig,
    accelerator: Accelerator,
    model: nn.Module,
    data: PreparedData,
    proven: ProvenLoss,
    callbacks: Callbacks,
) -> Callable[..., dict[str, float]]:
    """Returns a function: split -> loss of the head and metrics, as `eval_loss` or `test_loss`, ..."""

    def measure(split: str = "validation") -> dict[str, float]:
        windows = evaluation_windows(
            data.samples(split),
            data.collate,
            accelerator=accelerator,
            batch_size=config.per_device_eval_batch_size,
            lengths=data.splits[split]["length"],
            proven=proven,
            same_bits=config.same_bits is not None,
        )
        reader = make_reader(config, accelerator, model, data, split, callbacks)
        prefix = "eval_" if split == "validation" else f"{split}_"
        found = evaluate(accelerator, model, windows, proven, reader)
        results = {prefix + name.removeprefix("eval_"): value for name, value in found.items()}
        if callbacks.on_evaluate is not None:
            with torch.no_grad(), restored_modes(model):
                callbacks.on_evaluate(dict(results), model.eval())
        return results

    return measure


def proof_samples(data: PreparedData, split: str) -> Sequence[dict[str, Any]]:
    """Samples over the whole range of lengths, to find out whether the loss depends on padding."""
    by_length = np.argsort(np.asarray(data.splits[split]["length"][:]), kind="stable")
    ids = by_length[np.linspace(0, len(by_length) - 1, min(NUM_PROOF_SAMPLES, len(by_length))).astype(int)]
    samples = data.samples(split)
    return [samples[int(i)] for i in ids]
