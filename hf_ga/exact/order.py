"""(number of samples, seed, epoch) -> order. Independent of processes, micro-batches and random
generators.
"""

import numpy as np
import torch

from hf_ga.exact.hashing import Purpose, fold_in, mixed, signed


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the sample ids of one epoch in the order in which they are visited.

    Every sample gets a 64-bit hash of (seed, epoch, sample id); the order sorts them by it. The
    sort is stable, so equal hashes (about n**2 / 2**65 of them) keep the order of the ids, and the
    result is the same on every platform and version.

    Args:
        num_samples: Samples in the dataset.
        seed: Any integer.
        epoch: 0-based; every epoch has its own order.
        shuffle: False gives 0, 1, 2, ...

    Returns:
        int64, shape (num_samples,): a permutation of 0 ... num_samples - 1.

    Raises:
        ValueError: If `num_samples` is negative.

    >>> epoch_order(8, seed=0, epoch=0)
    array([3, 1, 6, 2, 4, 7, 0, 5])
    """
    if num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, got {num_samples}")
    ids = np.arange(num_samples, dtype=np.int64)
    if not shuffle:
        return ids
    keys = mixed(torch.from_numpy(ids) ^ signed(fold_in(Purpose.ORDER, seed, epoch)))
    del ids  # with many samples each array counts
    keys ^= signed(1 << 63)  # as signed numbers they have the order of unsigned ones now
    return torch.argsort(keys, stable=True).numpy()  # in half of numpy's time
