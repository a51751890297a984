"""The one place where processes meet: sums over processes, once per window.

One process needs no meeting, and more than one is refused for now, before any work starts: DDP's own reducer would average over
processes whose target counts differ.
"""

from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_ga.errors import ConfigError

_SUPPORTED = {DistributedType.NO}


def check_supported(accelerator: Accelerator) -> None:
    """Refuse what the reduction cannot do exactly.

    Raises:
        ConfigError: more than one process, or a backend that owns the gradients (FSDP, DeepSpeed, ...).
    """
    if accelerator.distributed_type not in _SUPPORTED or accelerator.num_processes > 1:
        raise ConfigError(
            f"this version of hf_ga is exact on one process, but Accelerate runs {accelerator.num_processes} process(es) under "
            f"{accelerator.distributed_type.value}. Launch with `accelerate launch --num_processes 1` (or the profile "
            "accelerate_configs/single_gpu.yaml) and take the same global batch by gradient accumulation: it is the same run."
        )


def sum_over_processes(accelerator: Accelerator, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The targets of a window over all processes."""
    check_supported(accelerator)
    return counts
