"""The accelerator of a run: device, precision and processes as launched, and what is unsupported
with them.
"""

from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from transformers import enable_full_determinism
from transformers.utils import logging

from hf_ga.errors import ConfigError
from hf_ga.exact.backend import check_supported
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.trackers import tracker_names
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu
from hf_ga.parallel.processes import share_cores


def precision_name(accelerator: Accelerator) -> str:
    """A description of the run's precision.

    Example:
        precision_name(accelerator)  # 'bf16 autocast, float32 weights and gradients'
    """
    if not accelerator.native_amp:
        return "float32"
    scaled = accelerator.scaler is not None and accelerator.scaler.is_enabled()
    return (
        f"{accelerator.mixed_precision} autocast{' with loss scaling' if scaled else ''}, float32 "
        "weights and gradients"
    )


def make_accelerator(config: FinetuneConfig) -> Accelerator:
    """The accelerator of a run, on the launched processes.

    Raises:
        ConfigError: a precision or a backend that hf_ga does not support.
    """
    try:
        accelerator = Accelerator(
            # several CPU processes form a group only with cpu=True
            cpu=not torch.accelerator.is_available(),
            mixed_precision=config.mixed_precision,
            step_scheduler_with_optimizer=False,
            log_with=tracker_names(config.report_to) or None,
            project_dir=str(Path(config.output_dir) / "trackers"),
        )
    except (
        ValueError
    ) as error:  # a mixed precision that the device does not support, an unknown tracker
        raise ConfigError(f"Accelerate cannot start: {error}") from error
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = (
        config.fsdp_reduce_each_micro_batch
    )
    check_supported(accelerator)
    enable_fsdp_on_cpu(accelerator)
    enable_fp16_on_cpu(accelerator)
    if (
        not accelerator.is_main_process
    ):  # which alone shows the libraries' progress bars and warnings
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    share_cores(accelerator)
    if config.same_bits and accelerator.device.type == "cpu":
        torch.set_num_threads(1)  # sums over several threads depend on their number
    if config.full_determinism or (config.same_bits and accelerator.device.type != "cpu"):
        enable_full_determinism(config.seed)
    if accelerator.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    return accelerator


def check_sharded(config: FinetuneConfig, accelerator: Accelerator) -> None:
    """Check that FSDP supports the flags.

    Raises:
        ConfigError: the first flag that it does not support.
    """
    if not is_sharded(accelerator):
        return
    generates = config.predict_with_generate or (
        config.predict_file is not None and config.task == "seq2seq"
    )
    loads_on_main(accelerator)  # raises under FSDP1
    has_same_bits = config.same_bits is not None
    unsupported = {
        "same_bits, because it adds the ranks' gradients in another order: use DDP": has_same_bits,
        "load_in_4bit: use DDP": config.load_in_4bit,
        "resize_token_embeddings with adapters, because tied embeddings share the new rows: use "
        "DDP": config.resize_token_embeddings and config.has_adapters,
        f"optim {config.optim}, whose state cannot be sharded: use adamw": config.optim
        in ("adafactor", "adagrad"),
        "generation, because ranks need different numbers of forwards: generate with the saved "
        "model and --eval_only": generates,
    }
    if found := [what for what, is_set in unsupported.items() if is_set]:
        raise ConfigError(f"FSDP does not support {found[0]}.")
