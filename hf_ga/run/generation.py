"""Texts that an encoder with a decoder generates. Never sampled, so repeatable.

Sources are padded at the right, as in training, where the attention mask hides the padding. So a text does not depend on the
others of its batch, but for rounding, which can decide between two tokens that are as good as equal.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_ga.exact.forward import unwrapped


def generated_targets(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], *, max_new_tokens: int, num_beams: int
) -> list[str]:
    """What the model writes for each source.

    Args:
        batch: `input_ids` and `attention_mask` of shape (samples, width), padded at the right, on the model's device.
    """
    base: Any = unwrapped(model)
    made = base.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=base.generation_config.eos_token_id or tokenizer.eos_token_id,
    )
    return [text.strip() for text in tokenizer.batch_decode(made, skip_special_tokens=True)]
