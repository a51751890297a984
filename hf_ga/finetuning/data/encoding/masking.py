"""Masked-LM samples, masked one by one, so that the mask of a sample does not depend on how a batch
is split.

transformers masks them by BERT's rule (Devlin et al. 2019, section 3.1): a token is a target with
probability p; 80 % of the targets become the mask token, 10 % a random token, 10 % are unchanged.
"""

from typing import Any

import numpy as np
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase


class MaskedSamples:
    """A dataset for masked language models, which masks each sample anew when it is read.

    The draws are those of numpy's global generator, which a `WindowLoader` seeds for every sample
    with (seed, epoch, position). So the masks are new in every epoch of training, but do not depend
    on the batches. Evaluations always use (0, 0, position), so their masks are fixed.

    Args:
        dataset: A dataset whose samples are dicts with `input_ids`.
        tokenizer: The tokenizer of the model, with a mask token. Its special tokens are no targets.
        probability: The probability that a token that is not special is a target.

    Example:
        samples = MaskedSamples(dataset, tokenizer, 0.15)
        windows = WindowLoader(samples, collate_fn, accelerator=accelerator)
    """

    def __init__(
        self, dataset: Any, tokenizer: PreTrainedTokenizerBase, probability: float
    ) -> None:
        self.dataset = dataset
        self.masks = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)

    def __len__(self) -> int:
        """Return the number of samples of the masked language model's dataset."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample with masked `input_ids`, and with `labels`: the original ids of the
        targets, -100 for other tokens.
        """
        sample = self.dataset[index]
        inputs, labels = self.masks.numpy_mask_tokens(np.array([sample["input_ids"]]))
        return {**sample, "input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}
