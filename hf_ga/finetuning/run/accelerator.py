"""Create the Accelerator of a run, with the device, precision and processes of the launcher, check
which flags it supports under FSDP, and start its experiment trackers (TensorBoard, wandb, ...).
"""

import os
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from transformers import enable_full_determinism
from transformers.utils import logging

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.parallel.backend import check_supported
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu
from hf_ga.parallel.processes import share_cores
from hf_ga.recovery.files import delete


def precision_name(accelerator: Accelerator) -> str:
    """Describe the precision in which a fine-tuning run computes, for its log and summary.json:
    "float32", or autocast to bf16 or fp16.

    Example:
        precision_name(accelerator)  # 'bf16 autocast, float32 weights and gradients'
    """
    if not accelerator.native_amp:
        return "float32"
    has_loss_scaling = accelerator.scaler is not None and accelerator.scaler.is_enabled()
    loss_scaling = " with loss scaling" if has_loss_scaling else ""
    return f"{accelerator.mixed_precision} autocast{loss_scaling}, float32 weights and gradients"


def make_accelerator(config: FinetuneConfig) -> Accelerator:
    """Create the Accelerator of a fine-tuning run on the launched processes, and apply the flags of
    precision and determinism to torch's global settings.

    On all processes except the main one, progress bars and warnings of datasets and transformers
    are disabled.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: If hf_ga or the device does not support the precision or the distributed
            backend, or a tracker is unknown.
    """
    trackers = tracker_names(config.report_to)
    try:
        accelerator = Accelerator(
            # On machines without a GPU, Accelerate forms a process group only with cpu=True.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=config.mixed_precision,
            step_scheduler_with_optimizer=False,
            log_with=trackers or None,
            project_dir=str(Path(config.output_dir) / "trackers"),
        )
    except ValueError as error:
        # Such as a mixed precision that the device does not support.
        raise ConfigError(f"Accelerate cannot start: {error}") from error
    # Accelerate reads this under FSDP: whether to reduce gradients after every micro-batch.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = (
        config.fsdp_reduce_each_micro_batch
    )
    check_supported(accelerator)
    enable_fsdp_on_cpu(accelerator)
    enable_fp16_on_cpu(accelerator)
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    share_cores(accelerator)
    device_type = accelerator.device.type
    if config.same_bits and device_type == "cpu":
        # The rounding of a sum over several threads depends on their number.
        torch.set_num_threads(1)
    if config.full_determinism or (config.same_bits and device_type != "cpu"):
        enable_full_determinism(config.seed)
    if device_type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    return accelerator


def check_sharded(config: FinetuneConfig, accelerator: Accelerator) -> None:
    """Check that the flags of a fine-tuning run are supported under FSDP. No-op without FSDP.

    Args:
        config: The configuration of the run.
        accelerator: The accelerator of the run.

    Raises:
        ConfigError: If a flag is not supported (the error names the first one), or if FSDP1 is
            launched with fsdp_cpu_ram_efficient_loading.
    """
    if not is_sharded(accelerator):
        return
    # Called for its check: raises ConfigError for FSDP1 with fsdp_cpu_ram_efficient_loading.
    loads_on_main(accelerator)
    predicts_by_generating = config.predict_file is not None and config.task == "seq2seq"
    is_unsupported = {
        "same_bits, because it adds the ranks' gradients in another order: use DDP": (
            config.same_bits is not None
        ),
        "load_in_4bit: use DDP": config.load_in_4bit,
        "resize_token_embeddings with adapters, because tied embeddings share the new rows: use "
        "DDP": config.resize_token_embeddings and config.has_adapters,
        f"optim {config.optim}, whose state cannot be sharded: use adamw": (
            config.optim in ("adafactor", "adagrad")
        ),
        "generation, because ranks need different numbers of forwards: generate with the saved "
        "model and --eval_only": config.predict_with_generate or predicts_by_generating,
    }
    for flag_and_remedy, is_set in is_unsupported.items():
        if is_set:
            raise ConfigError(f"FSDP does not support {flag_and_remedy}.")


def tracker_names(report_to: str) -> list[str]:
    """Parse the value of the flag `report_to` into names of trackers, for Accelerate's `log_with`.

    Args:
        report_to: Comma-separated names, "all" for all installed trackers, or "none".

    Returns:
        Names of installed trackers; an empty list for "none".

    Raises:
        ConfigError: If a tracker is unknown or not installed (which Accelerate ignores silently).

    >>> tracker_names("none")
    []
    """
    installed = [str(name) for name in get_available_trackers()]
    names = [name.strip() for name in report_to.split(",")]
    for name in names:
        if name not in ("", "none", "all", *installed):
            raise ConfigError(
                f"report_to {name} is not an installed tracker of Accelerate: install its package, "
                f"or use none, all, or some of {', '.join(installed)}."
            )
    if "all" in names:
        return installed
    return [name for name in names if name in installed]


def start_trackers(accelerator: Accelerator, config: FinetuneConfig, resumed: bool) -> None:
    """Start the experiment trackers of a fine-tuning run, which record its flags. TensorBoard and
    wandb write to the folder `output_dir/trackers`.

    Args:
        accelerator: The accelerator of the run, created with the names of the trackers.
        config: The flags of the run.
        resumed: Whether the run resumes from a checkpoint.

    Raises:
        ConfigError: If a tracker cannot start, such as wandb without a login. The folder of a new
            run is then deleted.
    """
    folder = Path(config.output_dir) / "trackers"
    run_name = config.run_name or folder.parent.resolve().name
    tracker_options = {
        "wandb": {"name": run_name, "dir": str(folder)},
        "mlflow": {"run_name": run_name},
        "trackio": {"name": run_name, "resume": "allow" if resumed else "never"},
    }
    # Trackers accept numbers, booleans and strings.
    flags: dict[str, Any] | None = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in config.to_dict().items()
    }
    if resumed and "MLFLOW_RUN_ID" in os.environ:
        # MLflow continues that run, and raises an error if its parameters change.
        flags = None
    # Each tracker raises exceptions of its own library.
    try:
        if accelerator.log_with:
            folder.mkdir(exist_ok=True)
        accelerator.init_trackers(config.project, config=flags, init_kwargs=tracker_options)
    except Exception as error:
        if not resumed:
            # Otherwise the next run would find the output folder not empty, and stop.
            delete(folder)
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"report_to {config.report_to} cannot start: {reason} Log in to it, set it up, or "
            "omit report_to."
        ) from error
