"""Versions of the libraries and properties of the machine that results depend on, for checkpoints
and reports.
"""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Return name -> version of Python and of the libraries that results depend on, for the
    manifest of a checkpoint and for reports. Libraries that are not installed are omitted.
    """
    version_by_name = {"python": platform.python_version()}
    for name in LIBRARIES:
        # Only the fine-tuning command needs datasets, so it may be missing.
        with suppress(PackageNotFoundError):
            version_by_name[name] = version(name)
    return version_by_name


def machine() -> dict[str, str | int | bool]:
    """Return the properties of this machine and process on which the bits of a result depend,
    besides versions: the device, the number of threads, and whether torch uses deterministic
    kernels only. A checkpoint stores them, so that a resumed run can tell whether they changed.
    """
    device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
