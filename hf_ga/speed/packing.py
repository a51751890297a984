"""No padding between the layers of a transformer: linear layers, norms, MLPs and hidden dropout
process real tokens only.

Embeddings and heads stay padded, so collate functions, position ids, masks and pooling are
unchanged. Before the first layer of the stack, (n, S, H) is packed to (1, T, H); after the last
one, the tokens are unpacked to (n, S, H), with zeros at the padding, which is neither a target nor
attended to. Attention, the only operation across tokens in a layer, is called through transformers'
attention interface: on a GPU a kernel computes it on packed tokens (`packed_attention.py`),
elsewhere samples are padded for this call. The proof decides for which models this leaves loss and
gradient unchanged.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from hf_ga.errors import ConfigError
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.exact.dropout import DropoutSite, KeyedDropout, SampleMasks
from hf_ga.exact.hooks import Call, SpeedUp
from hf_ga.exact.override import override
from hf_ga.speed.packed_attention import PackedAttention, PackedSamples
from hf_ga.speed.packed_tokens import PackedMasks, PackedTokens

PER_TOKEN = ("position_ids", "position_embeddings")  # arguments of layers with a row per token
# Settings that skip layers in training, or return their intermediate results.
UNSUPPORTED = (
    "is_encoder_decoder",
    "output_hidden_states",
    "output_attentions",
    "layerdrop",
    "encoder_layerdrop",
)
# Padding ratio (padded / real tokens) above which packing is faster: GPT-2, 4 layers x 256, on a
# CPU: 0 % at 1.03, 7 % at 1.10.
GAIN = 1.05
# With the attention kernel and dropout also batches without padding are packed: otherwise attention
# stores weights and masks of length x length.
GAIN_WITH_KERNEL = 0.0


class Packing(SpeedUp):
    """Packs the tokens of one model within a window.

    Args:
        use_kernel: Whether the attention kernel computes what it can. None: on a GPU with Triton.
    """

    name = "packing"

    def __init__(self, use_kernel: bool | None = None) -> None:
        self._use_kernel = use_kernel
        self._gain = GAIN
        self._is_on_trial = False
        self._proven_sides: set[str] = set()
        self._tokens: PackedTokens | None = None  # of this micro-batch, if packed
        self._was_packed = False
        self._is_in_attention = False
        # Per-token arguments of the layers in this micro-batch: padded, and packed.
        self._shared: list[tuple[Tensor, Tensor]] = []

    def attach(
        self, model: nn.Module, dropout: KeyedDropout, *, reads_logits: bool, has_router: bool
    ) -> str | None:
        layers = find_stack(model)
        if layers is None:
            return "it has no stack of equal layers"
        if has_router:
            return "its router's balancing loss needs padded batches"
        if dropout.unkeyed:
            return "it draws random numbers that are not tied to samples"
        config = getattr(model, "config", None)
        for name in UNSUPPORTED:
            if getattr(config, name, None):
                return f"its configuration has {name}"
        self._dropout: KeyedDropout = dropout
        self._attention = PackedAttention(dropout, self._use_kernel)
        self._layers = layers
        self._modules = frozenset(module for layer in layers for module in layer.modules())
        self._names = list(inspect.signature(type(layers[0]).forward).parameters)[1:]
        return None

    def trial(self) -> AbstractContextManager[None]:
        return override(self, _gain=1.0, _is_on_trial=True)

    def verdict(self) -> str | None:
        if not self._was_packed:
            return "its batches have no padding, no attention mask, or targets at the padding"
        return None

    def fits(self, call: Call) -> bool:
        """Whether all samples are padded on the side that the proof saw: a head may read a fixed
        column, which must not become padding. Holes in a mask never fit.
        """
        mask = call.micro_batch.batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
            return True  # nothing is packed
        sides = padded_sides(mask)
        if self._is_on_trial and len(sides) == 1:
            self._proven_sides |= sides
        return sides <= self._proven_sides

    def before(self, call: Call) -> None:
        self._shared.clear()
        self._tokens = _tokens(call, self._gain_needed(call.keys.device))
        if self._tokens is not None:
            self._was_packed = True
            self._padded_masks = self._dropout.mask_source
            self._packed_masks = PackedMasks(self._tokens, self._padded_masks)
            self._attention.start(self._samples_for_kernel(call))
            self._dropout.mask_source = self

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._shared.clear)
            stack.callback(setattr, self, "_tokens", None)
            stack.callback(self._attention.start, None)
            # Within the window, because FSDP and checkpointing may have wrapped the layers.
            for layer in self._layers:
                handle = layer.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(handle.remove)
            handle = self._layers[-1].register_forward_hook(self._leave)
            stack.callback(handle.remove)
            original = AttentionInterface.get_interface

            def get_interface(*args: Any) -> Callable:
                return partial(self._attend, original(*args))

            stack.enter_context(override(AttentionInterface, get_interface=get_interface))
            yield

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw a mask: of packed tokens within layers, of padded samples elsewhere and for
        attention weights.
        """
        return self._source_of(site).mask(site, shape, drop_probability)

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of an input."""
        return self._source_of(site).drop(site, input, drop_probability)

    def _source_of(self, site: DropoutSite) -> PackedMasks | SampleMasks:
        is_packed = site.module in self._modules and not self._is_in_attention
        return self._packed_masks if is_packed else self._padded_masks

    def _gain_needed(self, device: torch.device) -> float:
        """Return the padding ratio above which a micro-batch on this device is packed."""
        if self._dropout.sites and self._attention.can_run(device):
            return GAIN_WITH_KERNEL
        return self._gain

    def _samples_for_kernel(self, call: Call) -> PackedSamples | None:
        """Return the packed samples; None if the attention kernel cannot run here, or needs other
        padding.
        """
        mask = call.micro_batch.batch["attention_mask"]
        if not self._attention.can_run(call.keys.device) or not padded_sides(mask) <= {"right"}:
            return None
        return PackedSamples.of(mask, call.keys)

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before a layer: pack per-token arguments; the first layer receives padded hidden
        states.
        """
        tokens = self._tokens
        if tokens is None:
            return None
        positional = dict(zip(self._names, args, strict=False))
        first = next(iter(positional), "hidden_states")  # its name differs between models
        changed: dict[str, Any] = {}
        for name, value in (positional | kwargs).items():
            if name == first:
                changed[name] = self._packed_hidden(layer, value)
            elif name in PER_TOKEN:
                changed[name] = self._per_token(value)
            elif isinstance(value, Cache):
                changed[name] = None  # not needed in training
        args = tuple(changed.get(name, value) for name, value in positional.items())
        kwargs = {name: changed.get(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _packed_hidden(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden states of a layer, packed before the first one.

        Raises:
            ConfigError: If they are neither padded nor packed.
        """
        tokens = self._tokens
        if layer is self._layers[0] and hidden.shape[:2] == tokens.padded_shape:
            return tokens.pack(hidden)
        if hidden.shape[:2] != tokens.packed_shape:
            raise ConfigError(
                f"packed layers received hidden states of shape {list(hidden.shape)} for tokens "
                f"of shape {list(tokens.padded_shape)}: the model's control flow depends on the "
                "data. Prove it again, or omit packing."
            )
        return hidden

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        """After the last layer: unpack to padded hidden states."""
        tokens = self._tokens
        if tokens is None:
            return output
        if isinstance(output, Tensor):
            return tokens.spread(output)
        hidden, *others = output
        return (tokens.spread(hidden), *others)

    def _per_token(self, value: Any) -> Any:
        """Pack a tensor of shape (n or 1, S, ...), or a tuple of such, once for all layers; return
        other values unchanged.
        """
        if isinstance(value, tuple | list):
            return tuple(map(self._per_token, value))
        tokens = self._tokens
        if not isinstance(value, Tensor):
            return value
        if value.shape[:2] not in (tokens.padded_shape, (1, tokens.width)):
            return value
        for padded, packed in self._shared:
            if padded is value:
                return packed
        packed = tokens.pack(value)
        self._shared.append((value, packed))
        return packed

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
        """Call an attention function of transformers, or the kernel that computes the same from
        packed tokens.

        Without the kernel: pad (1, heads, T, size), use the model's own mask, and pack the result.
        """
        tokens = self._tokens
        if tokens is None or module not in self._modules:
            return original(module, query, key, value, attention_mask, **more)
        attended = self._attention.attend(original, module, query, key, value, attention_mask, more)
        if attended is not None:
            return attended, None
        if "position_ids" in more:
            more["position_ids"] = None  # of packed tokens; the mask already separates samples
        padded = [tokens.spread(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]
        with override(self, _is_in_attention=True):
            output, *_ = original(module, *padded, attention_mask, **more)
        return tokens.pack(output), None


def find_stack(model: nn.Module) -> nn.ModuleList | None:
    """Return the outermost list of equal layers with the most parameters; None without one."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
        is_inner = any(name.startswith(f"{outer}.") for outer in stacks)
        if is_stack and not is_inner:
            stacks[name] = module
    return max(stacks.values(), key=_num_parameters, default=None)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def padded_sides(mask: Tensor) -> set[str]:
    """Find out where the samples of a batch are padded: "right", "left", "inside"; empty without
    padding.

    Args:
        mask: The attention mask, of shape (samples, tokens).

    >>> padded_sides(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    {'right'}
    """
    falls = mask[:, 1:] < mask[:, :-1]
    rises = mask[:, 1:] > mask[:, :-1]
    both = falls.any(1) & rises.any(1)
    sides = {
        "right": bool((falls.any(1) & ~both).any()),
        "left": bool((rises.any(1) & ~both).any()),
        "inside": bool(both.any()),
    }
    return {side for side, is_there in sides.items() if is_there}


def _tokens(call: Call, gain: float) -> PackedTokens | None:
    """Find the real tokens of a micro-batch that is worth packing.

    Args:
        call: The micro-batch.
        gain: Padding ratio (padded / real tokens) above which it is.

    Returns:
        None if the batch has no attention mask on the host, too little padding, or targets
        predicted at the padding.
    """
    batch = call.micro_batch.batch
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
        return None
    if mask.numel() <= gain * int(mask.count_nonzero()):
        return None
    if _has_targets_at_padding(mask, batch.get("labels")):
        return None
    return PackedTokens.of(mask, call.keys.device)


def _has_targets_at_padding(mask: Tensor, labels: Any) -> bool:
    """Whether a label is predicted at the padding: that of column t at t or, in causal heads, at
    t - 1.
    """
    if not isinstance(labels, Tensor) or labels.shape != mask.shape:
        return False
    is_target = labels.cpu() != IGNORED_LABEL
    is_padding = mask == 0
    at_own_column = bool((is_target & is_padding).any())
    at_column_before = bool((is_target[:, 1:] & is_padding[:, :-1]).any())
    return at_own_column or at_column_before
