"""No padding between the layers of a transformer: linear layers, norms, MLPs and hidden dropout see real tokens only.

Embeddings and heads stay padded, so the collate functions, position ids and masks are the model's own, and every head pools at
each sample's own token. The first layer of the model's stack gets (1, T, H) for (n, S, H); after the last one the tokens are
spread to (n, S, H) again, with zeros at the padding, which is neither a target nor attended to. Attention, the only thing in a
layer that looks beyond a token, goes through transformers' attention interface (`packed_attention.py`). Which models this is right
for is decided by proof (`packing_proof.py`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, Cache

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.dropped_attention import gains_by_sample
from hf_ga.exact.packed_tokens import PackedTokens
from hf_ga.exact.places import KeyedPlaces
from hf_ga.speed.packed_attention import (
    in_autocast,
    is_plain,
    kernel_takes,
    padded_attention,
    reference_varlen,
    separate_attention,
    takes_separately,
    varlen_attention,
)

PER_TOKEN = ("position_ids", "position_embeddings")  # arguments of layers that have a row for each token
# Padded tokens per real one above which packing is taken to gain time. On a CPU measured (GPT-2, 4 layers x 256): at 1.03 nothing,
# at 1.10 1.07 times the speed. On a GPU not measured: there every padded token is left out.
GAIN_ON_CPU, GAIN_ON_GPU = 1.05, 1.0


class Packing:
    """Packs the tokens of one model while a window is computed.

    Attributes:
        layers: the stack of layers, called one after the other.
        plain: proven: attention is full or causal within a sample and nothing else, so a kernel may compute it.
        dropped: the same of attention with dropout, which a CPU may compute sample by sample.
        gain: padded tokens per real one above which a micro-batch is packed; None: what was measured for the device.
        tried: in the proof these ways are taken, with a reference in the kernel's place, and noted here; else None.

    Example:
        with rule.places.active(), rule.packing.active():
            rule.packing.set_batch(batch, device)   # on the host, before each forward
            rule.places.set_keys(...)
            model(**batch).loss.backward()
    """

    def __init__(self, places: KeyedPlaces, layers: nn.ModuleList) -> None:
        self.places, self.layers = places, layers
        self.modules = frozenset(module for layer in layers for module in layer.modules())
        self.plain = self.dropped = False
        self.gain: float | None = None
        self.tried: set[str] | None = None
        self._is_active = False
        self._names = [*inspect.signature(type(layers[0]).forward).parameters][1:]
        self._shared: list[tuple[Tensor, Tensor]] = []  # per-token arguments of this micro-batch, padded and packed

    def set_batch(self, batch: Batch, device: torch.device) -> None:
        """What the next forward and its backward compute: a collated batch that still lies on the host. It is packed where that
        is possible and gains; else, and outside of `active`, it is padded.
        """
        gain = self.gain or (GAIN_ON_CPU if device.type == "cpu" else GAIN_ON_GPU)
        self.places.set_packed(_tokens(batch, device, gain) if self._is_active else None, self.modules)
        self._shared.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forwards of the model, and what `backward()` runs again, compute as `set_batch` said. Nothing is left behind."""
        with ExitStack() as stack:
            self._is_active = True
            stack.callback(setattr, self, "_is_active", False)
            stack.callback(self._shared.clear)
            stack.callback(self.places.set_packed, None, self.modules)
            for layer in self.layers:  # looked up now: FSDP and checkpointing may have wrapped them
                stack.callback(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            stack.callback(self.layers[-1].register_forward_hook(self._leave).remove)
            original = AttentionInterface.get_interface
            stack.callback(setattr, AttentionInterface, "get_interface", original)
            AttentionInterface.get_interface = lambda *args: partial(self._attend, original(*args))
            yield

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before a layer: pack what has a row for each token; the first layer gets padded hidden states."""
        tokens = self.places.packed
        if tokens is None:
            return None
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer is self.layers[0] and hidden.shape[:2] == tokens.padded_shape:
            hidden = tokens.pack(hidden)
        elif hidden.shape[:2] != tokens.packed_shape:
            raise ConfigError(
                f"packed layers got hidden states of shape {list(hidden.shape)} for tokens of shape {list(tokens.padded_shape)}: "
                "the model's path depends on its data. Prove it again, or compute it padded."
            )
        changed = {name: self._per_token(named[name]) for name in PER_TOKEN if name in named}
        changed |= {name: None for name, value in named.items() if isinstance(value, Cache)}  # nothing is generated
        positional = [changed.get(name, value) for name, value in zip(self._names, args, strict=False)]
        if args:
            return (hidden, *positional[1:]), {name: changed.get(name, value) for name, value in kwargs.items()}
        return (), {**kwargs, **changed, "hidden_states": hidden}

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        """After the last layer: back to padded hidden states."""
        tokens = self.places.packed
        if tokens is None:
            return output
        return tokens.spread(output) if isinstance(output, Tensor) else (tokens.spread(output[0]), *output[1:])

    def _per_token(self, value: Any) -> Any:
        """A tensor of shape (n or 1, S, ...), or a tuple of such, packed once for all layers; anything else as it is."""
        if isinstance(value, tuple | list):
            return tuple(map(self._per_token, value))
        tokens = self.places.packed
        if not isinstance(value, Tensor) or value.shape[:2] not in (tokens.padded_shape, (1, tokens.width)):
            return value
        for padded, packed in self._shared:
            if padded is value:
                return packed
        self._shared.append((value, tokens.pack(value)))
        return self._shared[-1][1]

    def _attend(
        self,
        original: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """For an attention function of transformers."""
        tokens = self.places.packed
        if tokens is None or module not in self.modules:
            return original(module, query, key, value, attention_mask, **more)
        heads, trying = (query, key, value), self.tried is not None
        if is_plain(**more):
            if dropout := more.get("dropout"):
                if self._is_separate(tokens, query) and self.places.is_keyed(dropout):
                    if trying:
                        self.tried.add("dropped")
                    return separate_attention(tokens, self.places, module, heads, **more)
            elif trying:
                self.tried.add("plain")
                return varlen_attention(tokens, reference_varlen, module, heads, **more)
            elif self.plain and kernel_takes((cast := in_autocast(heads))[0], cast[2]):
                return varlen_attention(tokens, varlen_attn, module, cast, **more)
        with self.places.padded():  # dropout of attention weights is drawn for padded samples
            return padded_attention(tokens, original, module, heads, attention_mask, **more)

    def _is_separate(self, tokens: PackedTokens, query: Tensor) -> bool:
        """Whether attention with dropout is computed sample by sample: in the proof, and where it is proven and gains."""
        gains = self.dropped and gains_by_sample(query.shape[1], tokens.num_tokens / tokens.num_samples)
        return (gains or self.tried is not None) and takes_separately(query, tokens)


def packed_layers(packing: Packing | None) -> AbstractContextManager[None]:
    """`packing.active()`, or nothing where a model is not packed."""
    return nullcontext() if packing is None else packing.active()


def _tokens(batch: Batch, device: torch.device, gain: float) -> PackedTokens | None:
    """None where the batch has no mask of tokens on the host, too little padding, or a target that padding predicts."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
        return None
    if mask.numel() <= gain * int(mask.count_nonzero()):
        return None
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        counted, padding = labels.cpu() != IGNORED_LABEL, mask == 0
        # The label of column t is predicted at t or, in causal heads, at t - 1.
        if bool((counted & padding).any()) or bool((counted[:, 1:] & padding[:, :-1]).any()):
            return None
    return PackedTokens.of(mask, device)
