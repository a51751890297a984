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

SHARE_MASKED, SHARE_RANDOM = 0.8, 0.1


class KeyedMasks:
    """A dataset whose samples carry a key for their masks, as `mask_key`.

    The key is drawn from numpy's generator, which a `WindowLoader` seeds for every sample with
    (seed, epoch, position): new masks in every epoch of training, the same for every split.
    Evaluations always use (0, 0, position): fixed masks.

    Args:
        dataset: samples are dicts.

    Example:
        windows = WindowLoader(KeyedMasks(dataset), collate_fn, accelerator=accelerator)
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            **self.dataset[index],
            "mask_key": int(np.random.randint(0, 2**63 - 1, dtype=np.int64)),
        }


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
        input_ids: int64, shape (samples, width). keys: integers, shape (samples,).
        special_ids: ids that are never a target (padding among them). vocab_size: exclusive upper
            bound of random tokens.
        probability: probability that any other token is a target.

    Returns:
        (inputs, labels), both int64 of shape (samples, width); labels of other tokens are -100.
    """
    chosen, replacement, random = (_draws(keys, input_ids.shape[1], draw) for draw in range(3))
    is_target = (_unit(chosen) < probability) & ~np.isin(input_ids, np.asarray(special_ids))
    share = _unit(replacement)
    inputs = np.where(is_target & (share < SHARE_MASKED), mask_token_id, input_ids)
    is_random = is_target & (share >= SHARE_MASKED) & (share < SHARE_MASKED + SHARE_RANDOM)
    inputs = np.where(is_random, (random % np.uint64(vocab_size)).astype(np.int64), inputs)
    return inputs, np.where(is_target, input_ids, IGNORED_LABEL)


def _draws(keys: np.ndarray, width: int, draw: int) -> np.ndarray:
    """64 random bits for each (sample, column, draw), independent of the width."""
    rows = mixed(torch.from_numpy(np.asarray(keys, np.int64)))
    columns = mix_in_place(torch.from_numpy(np.arange(width, dtype=np.int64)) * 4 + draw)
    return mix_in_place(rows.unsqueeze(1) + columns).numpy().view(np.uint64)


def _unit(bits: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) from the upper 53 bits."""
    return (bits >> np.uint64(11)) * 2.0**-53
