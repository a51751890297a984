"""Masked-LM inputs as a pure function of (key of the sample, column): no generator, so no split can
change a mask.

The rule is BERT's (Devlin et al. 2019, section 3.1): a token is a target with probability p; 80 %
of the targets become the mask token, 10 % a random token, 10 % are unchanged.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.exact.hashing import mix_in_place, mixed

SHARE_MASKED = 0.8
SHARE_RANDOM = 0.1


class KeyedMasks:
    """A dataset whose samples carry a key for their masks, as `mask_key`.

    The key is drawn from numpy's generator, which a `WindowLoader` seeds for every sample with
    (seed, epoch, position): new masks in every epoch of training, the same for every split.
    Evaluations always use (0, 0, position): fixed masks.

    Args:
        dataset: A dataset whose samples are dicts.

    Example:
        windows = WindowLoader(KeyedMasks(dataset), collate_fn, accelerator=accelerator)
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key = np.random.randint(0, 2**63 - 1, dtype=np.int64)
        return {**self.dataset[index], "mask_key": int(key)}


def mask_tokens(
    input_ids: np.ndarray,
    keys: np.ndarray,
    *,
    special_ids: Sequence[int],
    mask_token_id: int,
    vocab_size: int,
    probability: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose targets and mask most of them.

    Args:
        input_ids: int64, shape (samples, width).
        keys: The keys of the samples, integers of shape (samples,).
        special_ids: Ids that are never a target (padding among them).
        mask_token_id: The id of the mask token.
        vocab_size: Exclusive upper bound of random ids.
        probability: The probability that any other token is a target.

    Returns:
        Inputs and labels, both int64 of shape (samples, width); labels of other tokens are -100.
    """
    width = input_ids.shape[1]
    choice = _uniform(_draws(keys, width, draw=0))
    share = _uniform(_draws(keys, width, draw=1))
    random_ids = _draws(keys, width, draw=2) % np.uint64(vocab_size)
    is_special = np.isin(input_ids, np.asarray(special_ids))
    is_target = (choice < probability) & ~is_special
    is_masked = is_target & (share < SHARE_MASKED)
    is_random = is_target & (share >= SHARE_MASKED) & (share < SHARE_MASKED + SHARE_RANDOM)
    inputs = np.where(is_masked, mask_token_id, input_ids)
    inputs = np.where(is_random, random_ids.astype(np.int64), inputs)
    labels = np.where(is_target, input_ids, IGNORED_LABEL)
    return inputs, labels


def _draws(keys: np.ndarray, width: int, draw: int) -> np.ndarray:
    """Draw 64 random bits for each sample and column, independent of the width.

    Args:
        keys: The keys of the samples, integers of shape (samples,).
        width: Number of columns.
        draw: 0 to 3, which tells several draws for the same token apart.

    Returns:
        uint64, shape (samples, width).
    """
    rows = mixed(torch.from_numpy(np.asarray(keys, np.int64)))
    column_numbers = torch.from_numpy(np.arange(width, dtype=np.int64))
    columns = mix_in_place(column_numbers * 4 + draw)
    bits = mix_in_place(rows.unsqueeze(1) + columns)
    return bits.numpy().view(np.uint64)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Turn random bits into uniform numbers in [0, 1), by the upper 53 bits."""
    return (bits >> np.uint64(11)) * 2.0**-53
