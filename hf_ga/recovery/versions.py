"""Versions of the libraries, as checkpoints and reports record them."""

import platform
from importlib.metadata import version

import accelerate
import datasets
import torch
import transformers


def versions() -> dict[str, str]:
    """Python, hf_ga and the libraries that a result may depend on."""
    modules = {"torch": torch, "transformers": transformers, "accelerate": accelerate, "datasets": datasets}
    return {"hf_ga": version("hf_ga"), "python": platform.python_version()} | {k: m.__version__ for k, m in modules.items()}
