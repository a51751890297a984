"""Masked-LM inputs as a pure function of (key of the sample, position of the token): no random
generator, so the mask of a sample does not depend on how a batch is split.

The rule is BERT's (Devlin et al. 2019, section 3.1): a token is a target with probability p; 80 %
of the targets become the mask token, 10 % a random token, 10 % are unchanged.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ga.draws.hashing import mix_in_place, mixed
from hf_ga.draws.values import uniform
from hf_ga.loading.batches import IGNORED_LABEL

# Shares of the targets.
SHARE_MASKED = 0.8
SHARE_RANDOM = 0.1


class KeyedMasks:
    """A dataset for masked language models, which adds a random `mask_key` to each sample: the seed
    of its mask.

    The key is drawn from numpy's global generator, which a `WindowLoader` seeds for every sample
    with (seed, epoch, position). So the masks are new in every epoch of training, but do not depend
    on the batches. Evaluations always use (0, 0, position), so their masks are fixed.

    Args:
        dataset: A dataset whose samples are dicts.

    Example:
        windows = WindowLoader(KeyedMasks(dataset), collate_fn, accelerator=accelerator)
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples of the masked language model's dataset."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample with a `mask_key`, the seed of its mask for a masked language model,
        drawn from numpy's global generator.
        """
        key = np.random.randint(0, 2**63 - 1, dtype=np.int64)
        return {**self.dataset[index], "mask_key": int(key)}


def mask_tokens(
    input_ids: Tensor,
    keys: Tensor,
    *,
    special_ids: Sequence[int],
    mask_token_id: int,
    vocab_size: int,
    probability: float,
) -> tuple[Tensor, Tensor]:
    """Choose the targets of a masked language model, and mask or replace most of them (BERT: 80 %
    become the mask token, 10 % a random token, 10 % are unchanged).

    Args:
        input_ids: int64, shape (samples, padded length).
        keys: The `mask_key` of each sample, int64 of shape (samples,).
        special_ids: Ids that are never a target (padding among them).
        mask_token_id: The id of the mask token.
        vocab_size: Exclusive upper bound of random ids.
        probability: The probability that a token that is not special is a target.

    Returns:
        Inputs and labels, both int64 of shape (samples, padded length); the labels are the original
        ids of the targets, and -100 for other tokens.
    """
    padded_length = input_ids.shape[1]
    # Three independent numbers per token: whether it is a target, what a target becomes, and which
    # random token.
    target_draw = uniform(_hashes(keys, padded_length, draw=0), torch.float64)
    share = uniform(_hashes(keys, padded_length, draw=1), torch.float64)
    bits = _hashes(keys, padded_length, draw=2).numpy().view(np.uint64)
    random_ids = torch.from_numpy((bits % np.uint64(vocab_size)).astype(np.int64))
    is_special = torch.isin(input_ids, torch.tensor(special_ids, dtype=torch.int64))
    is_target = (target_draw < probability) & ~is_special
    replaced = torch.where(share < SHARE_MASKED + SHARE_RANDOM, random_ids, input_ids)
    replaced = torch.where(share < SHARE_MASKED, mask_token_id, replaced)
    inputs = torch.where(is_target, replaced, input_ids)
    return inputs, torch.where(is_target, input_ids, IGNORED_LABEL)


def _hashes(keys: Tensor, padded_length: int, draw: int) -> Tensor:
    """Hash (key of the sample, position of the token, draw) to 64 random bits for each token, to
    choose and mask the targets of a masked language model.
    """
    hashed_positions = mix_in_place(torch.arange(padded_length) * 4 + draw)
    return mix_in_place(mixed(keys).unsqueeze(1) + hashed_positions)
