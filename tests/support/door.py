"""The Accelerator under test."""

try:
    from hf_ga import Accelerator
except ImportError:
    from hf_ga.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
