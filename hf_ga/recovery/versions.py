"""Versions of the libraries and properties of the machine, for checkpoints and reports."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Return name -> version of Python and of the installed libraries that results depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        # Only the fine-tuning command needs datasets.
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, str | int | bool]:
    """Return what the bits of a result depend on besides versions: the device, the number of this
    process's threads, and whether kernels are deterministic.
    """
    device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
