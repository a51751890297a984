"""Text generation with encoder-decoder models, without sampling, so repeatable.

Sources are right-padded as in training, and the attention mask hides the padding. So a text does not depend on the rest of its
batch, except that rounding can decide between two almost equally likely tokens.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_ga.exact.forward import unwrapped
from hf_ga.run.config import FinetuneConfig


def generated_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], config: FinetuneConfig) -> Tensor:
    """Generate a text for each source. Returns token ids of shape (samples, longest), right-padded.

    Args:
        batch: `input_ids` and `attention_mask` of shape (samples, width), right-padded, on the model's device.
    """
    base: Any = unwrapped(model)
    return base.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=base.generation_config.eos_token_id or tokenizer.eos_token_id,
    )


def generated_targets(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], config: FinetuneConfig
) -> list[str]:
    """The texts of `generated_ids`."""
    made = generated_ids(model, tokenizer, batch, config)
    return [text.strip() for text in tokenizer.batch_decode(made, skip_special_tokens=True)]
