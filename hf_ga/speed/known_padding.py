"""Whether a micro-batch has padding, answered on the host: transformers looks at its mask on the device, and waits for it.

Where no token is padding a mask of attention is left out, so each forward of transformers asks whether there is any; some ask
twice, or for encoder and decoder. A GPU that is asked must first finish what it was given, and then has nothing to do until the
next forward is launched. The collated batch lies on the host as well: its copy of the mask gives the same answer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

from hf_ga.exact.batches import Batch

# Not public: where a version of transformers lacks one, the device is asked.
PREPARES, ASK = "_preprocess_mask_arguments", ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def known_padding(batch: Batch, on_host: Batch) -> Iterator[None]:
    """For one forward of `batch`, which is `on_host` on the device of the model: questions about its masks are put to the host.

    Only about its own tensors as long as nobody wrote to them; about anything else the device is asked as before.
    """
    masks = [(batch[name], batch[name]._version, mask) for name, mask in on_host.items() if _is_elsewhere(batch.get(name), mask)]
    originals = {name: getattr(masking_utils, name, None) for name in (PREPARES, *ASK)}
    if not masks or None in originals.values():
        yield
        return
    prepared: list[tuple[Tensor, Tensor]] = []
    replaced = {PREPARES: _noting(originals[PREPARES], masks, prepared)}
    replaced |= {name: _asking(originals[name], prepared) for name in ASK}
    try:
        for name, function in replaced.items():
            setattr(masking_utils, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(masking_utils, name, function)


def _is_elsewhere(tensor: Any, on_host: Any) -> bool:
    if not isinstance(tensor, Tensor) or not isinstance(on_host, Tensor):
        return False
    return tensor.device.type != "cpu" and not tensor.is_inference()  # tensors of inference mode have no version


def _noting(original: Callable, masks: list[tuple[Tensor, int, Tensor]], prepared: list[tuple[Tensor, Tensor]]) -> Callable:
    """What makes booleans of a mask; noted in `prepared`, with the mask on the host."""

    def prepare(config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> tuple:
        found = original(config, inputs_embeds, attention_mask, *args, **kwargs)
        for mask, version, on_host in masks:
            if isinstance(found[1], Tensor) and _is_same(attention_mask, mask) and mask._version == version:
                prepared.append((found[1], on_host.reshape(attention_mask.shape).bool()))
        return found

    return prepare


def _is_same(tensor: Tensor, mask: Tensor) -> bool:
    """Also for a view of all of it in the same order: GPT-2 makes one, and heads for multiple choice one of other rows."""
    in_order = tensor.is_contiguous() and mask.is_contiguous()
    return in_order and (tensor.data_ptr(), tensor.numel()) == (mask.data_ptr(), mask.numel())


def _asking(original: Callable[..., bool], prepared: list[tuple[Tensor, Tensor]]) -> Callable[..., bool]:
    """What looks at a mask, given the one on the host."""

    def ask(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        on_host = next((copy for mask, copy in prepared if mask is padding_mask), padding_mask)
        return original(on_host, *args, **kwargs)

    return ask
