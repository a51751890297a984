"""Micro-batches of a window with keyed draws, for the tests of hf_ga.draws."""

import contextlib

import torch

from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws

WINDOW_KEY = window_key(0, 0, 0)
SPLITS = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "3 + 5": [[0, 1, 2], [3, 4, 5, 6, 7]],
    "one each": [[i] for i in range(8)],
    "permuted": [[5, 0, 7], [2, 6], [1, 4, 3]],
}


def keys_of(samples, epoch=0):
    return sample_keys(0, epoch, list(samples))


@contextlib.contextmanager
def micro_batch(samples, draws=None, epoch=0):
    """Within the block, the draws are those of a micro-batch of the samples."""
    draws = draws or KeyedDraws()
    with draws.scope():
        draws.begin(keys_of(samples, epoch), WINDOW_KEY)
        yield draws


def drawn(function, samples, draws=None, epoch=0):
    """Return what `function(samples)` draws for a micro-batch of the samples."""
    with micro_batch(samples, draws, epoch):
        return function(samples)


def rows_of(full, samples, dim=0, rows=1):
    """Return the rows of samples of what was drawn for all of them."""
    index = [sample * rows + row for sample in samples for row in range(rows)]
    return full.index_select(dim, torch.tensor(index))
