"""Versions of the libraries, for checkpoints and reports."""

import platform
from importlib.metadata import version

LIBRARIES = ("hf_ga", "torch", "transformers", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Versions of Python, hf_ga and the libraries that results depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
