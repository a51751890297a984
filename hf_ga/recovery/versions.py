"""Versions of the libraries and properties of the machine, for checkpoints and reports."""

import platform
from importlib.metadata import version

import torch

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Versions of Python, hf_ga and the libraries that results depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


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
