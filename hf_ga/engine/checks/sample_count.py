"""Whether each sample of a window is computed exactly once, over all ranks.

Ranks plan a window each by itself, from the same settings. If these differ between ranks (a file, a
version, what a trial found), samples are computed twice, or never, and no rank sees it alone.
"""

import numpy as np

from hf_ga.errors import ConfigError

# Near 2^64 / golden ratio (Knuth, The Art of Computer Programming, 6.4).
FACTOR = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
# The highest 20 of 64 bits are kept: sums over 2^33 samples are exact in float64.
NUM_DROPPED_BITS = np.uint64(44)


class SampleCount:
    """The samples of one window on this rank, as numbers that ranks add up.

    Attributes:
        number: Number of samples that were counted.
    """

    def __init__(self) -> None:
        """Start with a window without samples."""
        self.number = 0
        self._counted: list[np.ndarray] = []  # the positions of each micro-batch
        self._expected = 0.0

    def add(self, positions: np.ndarray) -> None:
        """Count the samples of a micro-batch.

        Args:
            positions: Their positions in the epoch, shape (samples,).
        """
        self.number += len(positions)
        self._counted.append(positions)

    def expect(self, positions: np.ndarray) -> None:
        """Set all samples of the window, as this rank planned it, shape (samples,)."""
        self._expected = _checksum(positions)

    def sums(self) -> tuple[float, float]:
        """Return what ranks add up. (0, 0) if it is unknown which samples the window has."""
        if not self._expected:
            return 0.0, 0.0
        counted = _checksum(np.concatenate(self._counted)) if self._counted else 0.0
        return counted, self._expected


def check_samples(sums: tuple[float, float], num_processes: int) -> None:
    """Check that each sample was computed once. The same on all ranks.

    Args:
        sums: `SampleCount.sums`, added up over all ranks.
        num_processes: Number of ranks.

    Raises:
        ConfigError: If some samples were computed twice or not at all.
    """
    counted, expected = sums
    if counted * num_processes != expected:
        raise ConfigError(
            "some samples of the window were computed twice or not at all: the loop left out an "
            "iteration, or processes planned different windows, as their settings, data or "
            "versions differ. Nothing was updated."
        )


def _checksum(positions: np.ndarray) -> float:
    """Return a sum that hardly any other set of positions has, an integer."""
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * FACTOR
    # Multiplied once, positions with equal sums would have equal checksums in many cases.
    mixed = (mixed ^ (mixed >> HALF)) * FACTOR
    return float((mixed >> NUM_DROPPED_BITS).sum())
