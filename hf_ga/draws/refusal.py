"""Draws that cannot be keyed: an exception inside the package, and the place in the user's code."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# Code below these folders is not the user's.
LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

REMEDY = (
    "Draw it in the dataset or in the collate function, or give it one row per sample, or use "
    "Accelerator(allow_split_dependent_randomness=True)."
)


class NotKeyed(Exception):
    """Raised by the replacement of a random function if its numbers cannot be derived from the keys
    of the samples. Caught by `KeyedDraws`, which refuses the draw or calls torch's own function.
    """

    def __init__(
        self, function: str, shape: Sequence[int], reason: str, remedy: str = REMEDY
    ) -> None:
        """Create the exception.

        Args:
            function: Name of the random function, such as "randperm".
            shape: Shape of the numbers.
            reason: Why they depend on the split, as a clause.
            remedy: What the user can do, as sentences.
        """
        self.description = f"{function} of shape {list(shape)} at {user_code()}: {reason}."
        super().__init__(f"{self.description} {remedy}")


def user_code() -> str:
    """Return "file:line" of the innermost running code that is neither torch's nor of hf_ga."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARY_FOLDERS, "<frozen")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown code"
