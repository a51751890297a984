"""Versions of the libraries and properties of the machine, for checkpoints and reports."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Versions of Python, hf_ga and those of the libraries that results depend on that are
    installed.
    """
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):  # datasets, which only the fine-tuning command needs
            found[name] = version(name)
    return found


def machine() -> dict[str, str | int | bool]:
    """What the bits of a result depend on besides versions: device, threads of this process,
    deterministic kernels.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "device": torch.cuda.get_device_name()
        if on_gpu
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
