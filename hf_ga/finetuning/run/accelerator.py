"""Create the Accelerator of a run, with the device, precision and processes of the launcher, and
check which flags it supports under FSDP.
"""

from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from transformers import enable_full_determinism
from transformers.utils import logging

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.results.trackers import tracker_names
from hf_ga.parallel.backend import check_supported
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu
from hf_ga.parallel.processes import share_cores


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
