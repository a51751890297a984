"""Masked-LM samples, masked one by one, so that the mask of a sample does not depend on how a batch
is split.

transformers masks them by BERT's rule (Devlin et al. 2019, section 3.1): a token is a target with
probability p; 80 % of the targets become the mask token, 10 % a random token, 10 % are unchanged.
"""

import numpy as np
from transformers import DataCollatorForLanguageModeling

from hf_ga.finetuning.data.encoding.tokenization import Rows


def mask_samples(samples: Rows, masks: DataCollatorForLanguageModeling) -> Rows:
    """Mask the samples of a masked language model one by one: the transform of a dataset, which is
    called anew whenever a sample is read.

    The draws are those of numpy's global generator, which a `WindowLoader` seeds for every sample
    with (seed, epoch, position). So the masks are new in every epoch of training, but do not depend
    on the batches. Evaluations always use (0, 0, position), so their masks are fixed.

    Args:
        samples: Samples by column, with `input_ids`.
        masks: Has the tokenizer of the model, with a mask token, and the probability that a token
            is a target. Its special tokens are no targets.

    Returns:
        The samples with masked `input_ids`, and with `labels`: the original ids of the targets,
        -100 for other tokens.

    Example:
        samples = dataset.with_transform(partial(mask_samples, masks=masks))
        windows = WindowLoader(samples, collate_fn, accelerator=accelerator)
    """
    masked = {**samples, "input_ids": [], "labels": []}
    for ids in samples["input_ids"]:
        inputs, labels = masks.numpy_mask_tokens(np.array([ids]))
        masked["input_ids"].append(inputs[0].tolist())
        masked["labels"].append(labels[0].tolist())
    return masked
