"""Versions of the libraries, as checkpoints and reports record them."""

import platform
from importlib.metadata import version

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Python, hf_ga and the libraries that a result may depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
