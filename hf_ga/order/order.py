"""The shuffled order of an epoch, as a pure function of (number of samples, seed, epoch).

It does not depend on the number of processes, the micro-batches, or any random generator.
"""

import numpy as np
import torch

from hf_ga.draws.hashing import Purpose, fold_in, mixed, signed


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the sample ids of one epoch in the order in which training visits them.

    The samples are sorted by a 64-bit hash of (seed, epoch, sample id). The sort is stable: samples
    with equal hashes (about num_samples**2 / 2**65 of them) stay in the order of their ids. So the
    result is the same on every platform and with every version of torch and numpy.

    Args:
        num_samples: Number of samples in the dataset.
        seed: Any integer.
        epoch: 0-based; every epoch has its own order.
        shuffle: Whether to shuffle. If False, the order is 0, 1, 2, ...

    Returns:
        int64, shape (num_samples,): a permutation of 0 ... num_samples - 1.

    >>> epoch_order(8, seed=0, epoch=0)
    array([3, 1, 6, 2, 4, 7, 0, 5])
    """
    ids = np.arange(num_samples, dtype=np.int64)
    if not shuffle:
        return ids
    hashes = mixed(torch.from_numpy(ids) ^ signed(fold_in(Purpose.ORDER, seed, epoch)))
    del ids  # saves memory if there are many samples
    # torch sorts int64. Flipping the sign bit gives the order of unsigned 64-bit numbers.
    hashes ^= signed(1 << 63)
    return torch.argsort(hashes, stable=True).numpy()  # twice as fast as numpy's argsort
