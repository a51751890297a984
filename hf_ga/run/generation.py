"""Texts that a model generates: continuations of a causal LM, targets of an encoder with a decoder. Never sampled, so repeatable.

Padding stands where it changes nothing: a causal LM's at the left, as new tokens follow the end of a text; that of an encoder's
source at the right, as in training, where the attention mask hides it (the decoder begins every row at its own first token). So a
text does not depend on the others of its batch, but for rounding, which can decide between two tokens that are as good as equal.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_ga.exact.forward import unwrapped


def continuations(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    add_special_tokens: bool,
    max_length: int,
    max_new_tokens: int,
    num_beams: int,
) -> list[str]:
    """What a causal LM writes behind each text. Of a text that is too long for `max_length` tokens the end is kept.

    Args:
        tokenizer: pads and cuts at the left. num_beams: 1 takes the most likely token each time.
    """
    base: Any = unwrapped(model)
    positions = getattr(base.config, "max_position_embeddings", None)
    batch = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        truncation=True,
        max_length=min(max_length, positions - max_new_tokens) if positions else max_length,
        padding=True,
        return_tensors="pt",
    ).to(next(base.parameters()).device)
    ids = batch["input_ids"]
    made = _generate(base, tokenizer, ids, batch["attention_mask"], max_new_tokens, num_beams)
    return tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)


def generated_targets(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], *, max_new_tokens: int, num_beams: int
) -> list[str]:
    """What an encoder with a decoder writes for each source.

    Args:
        batch: `input_ids` and `attention_mask` of shape (samples, width), padded at the right, on the model's device.
    """
    base: Any = unwrapped(model)
    made = _generate(base, tokenizer, batch["input_ids"], batch["attention_mask"], max_new_tokens, num_beams)
    return [text.strip() for text in tokenizer.batch_decode(made, skip_special_tokens=True)]


def _generate(
    base: Any, tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, max_new_tokens: int, num_beams: int
) -> Tensor:
    return base.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=base.generation_config.eos_token_id or tokenizer.eos_token_id,  # a chat model may have several
    )
