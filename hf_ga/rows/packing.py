"""No padding between the layers of a transformer: linear layers, norms, MLPs and hidden dropout
process real tokens only.

Embeddings and heads stay padded, so collate functions, position ids, masks and pooling are
unchanged. Before the first layer of the stack, hidden states of shape (samples, width, hidden size)
are packed to (1, num_tokens, hidden size); after the last one they are unpacked, with zeros at the
padding, which is neither a target nor attended to. Attention, the only operation across tokens in a
layer, is called through transformers' attention interface: on a GPU a kernel computes it on packed
tokens (`packed_attention.py`), elsewhere samples are padded for this call. A trial decides for
which models this leaves loss and gradient unchanged.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import ConfigError
from hf_ga.loading.batches import IGNORED_LABEL
from hf_ga.model.forward import compiled_modules
from hf_ga.model.loaded import loaded_class
from hf_ga.model.override import Replacement, override
from hf_ga.rows.compiling import layer_lists
from hf_ga.rows.packed_attention import PackedAttention, PackedSamples, is_sdpa
from hf_ga.rows.packed_tokens import PackedMasks, PackedTokens
from hf_ga.speed.speed_up import Call, SpeedUp

PER_TOKEN = ("position_ids", "position_embeddings")  # arguments of layers with a row per token
# Settings that skip layers in training, or return their intermediate results.
UNSUPPORTED = (
    "is_encoder_decoder",
    "output_hidden_states",
    "output_attentions",
    "layerdrop",
    "encoder_layerdrop",
)
# Padding ratio (padded / real tokens) above which packing is faster. Measured with GPT-2 (4 layers,
# hidden size 256) on a CPU: not faster at 1.03, 7 % faster at 1.10.
MIN_PADDING_RATIO = 1.05
# With the attention kernel and dropout, batches without padding are packed, too: otherwise
# attention stores weights and masks of length x length.
MIN_PADDING_RATIO_WITH_KERNEL = 0.0


class Packing(SpeedUp):
    """Speed-up that removes the padding between the layers of a transformer within a window.

    Args:
        use_kernel: Whether the attention kernel computes what it can. None: on a GPU with Triton.

    Attributes:
        tried_sides: Sides on which samples were padded in the trials: "left", "right" or "inside".
    """

    name = "packing"

    def __init__(self, use_kernel: bool | None = None) -> None:
        """Start the packing without a model; `attach` finds the layers to pack."""
        self._use_kernel = use_kernel
        self._min_padding_ratio = MIN_PADDING_RATIO  # above which a micro-batch is packed
        self._is_on_trial = False  # whether the packing is tried
        self.tried_sides: set[str] = set()
        self._call: Call | None = None  # the micro-batch, and what is known of it:
        self._tokens_of_call: PackedTokens | None = None
        self._samples_of_call: PackedSamples | None = None
        # Its real tokens while its layers run. None if it is not packed.
        self._tokens: PackedTokens | None = None
        self._was_packed = False  # whether any micro-batch was packed so far
        self._is_in_attention = False  # whether attention of padded samples runs
        # Per-token arguments of the layers in this micro-batch: (padded, packed).
        self._packed_arguments: list[tuple[Tensor, Tensor]] = []
        self._rows: Any = None  # the `CompiledRows`, where the layers are compiled

    @property
    def is_compiled(self) -> bool:
        """Whether the packed layers are compiled."""
        return self._rows is not None

    def attach(self, model: nn.Module, draws: KeyedDraws) -> str | None:
        """Find the layers between which padding can be removed, and keep the keyed draws.

        Returns:
            Why the model cannot be packed, or None if it can be tried.
        """
        layers = find_layer_stack(model)
        if layers is None:
            return "it has no stack of equal layers"
        if draws.allow_unkeyed:
            return "it draws random numbers that are not tied to samples"
        setting = unsupported_setting(model)
        if setting is not None:
            return f"its configuration has {setting}"
        # Of a layer's forward, without self.
        parameters = list(inspect.signature(type(layers[0]).forward).parameters.values())[1:]
        if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
            return "its layers take arguments without names"
        self._parameter_names = [parameter.name for parameter in parameters]
        compiled = compiled_modules(model)
        if compiled:
            # Here: importing torch's compiler takes a second.
            from hf_ga.rows.compiled_rows import CompiledRows

            reason = reason_not_to_run_rows(model, layers, compiled)
            if reason is not None:
                return reason
        self._dropout = draws
        self._attention = PackedAttention(draws, self._use_kernel)
        if compiled:
            self._rows = CompiledRows(layers, draws, self._attention)
        self._layers = layers
        self._modules_in_layers = frozenset(
            module for layer in layers for module in layer.modules()
        )
        self._hooks_in_layers = [
            hooks
            for module in self._modules_in_layers
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._tried_hooks = user_hooks(self._hooks_in_layers)
        return None

    def obstacle(self, compiled: Sequence[nn.Module]) -> str | None:
        """Return why it cannot be used any more: what happened to the layers after the trial."""
        if compiled and not self.is_compiled:
            return "the model's layers were compiled"
        if self._has_new_hooks:
            return "hooks on layers that were registered after the trial would get packed tokens"
        return None

    @property
    def _has_new_hooks(self) -> bool:
        """Whether modules in the layers have hooks that the trial did not try."""
        hooks = user_hooks(self._hooks_in_layers)
        return any(all(hook is not tried for tried in self._tried_hooks) for hook in hooks)

    def trial(self) -> AbstractContextManager[None]:
        """Within the trial of this speed-up, remove even padding that is too little to be faster.

        Records on which sides the trial's samples are padded.
        """
        return override(self, _min_padding_ratio=1.0, _is_on_trial=True, _call=None)

    def verdict(self) -> str | None:
        """After the trial of this speed-up, return why it packed nothing; None if it did."""
        if not self._was_packed:
            return "its batches have no padding, no attention mask, or targets at the padding"
        return None

    def fits(self, call: Call) -> bool:
        """Whether a micro-batch may be packed: its samples are padded on sides that were tried, and
        the layers have no hooks that were not.

        A head may read a fixed column (the first or the last one), where a sample that is padded
        there has zeros after packing. In a trial, a side is recorded as tried if all padded
        samples of the micro-batch share it, and a micro-batch with nothing to pack does not fit.
        Otherwise True if there is no attention mask of tokens: then nothing is packed.
        """
        if self._is_on_trial and _tokens_to_pack(call, self._min_padding_ratio) is None:
            return False
        if not self._is_on_trial and self._has_new_hooks:
            return False
        mask = call.micro_batch.batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
            return True
        sides = padded_sides(mask)
        if self._is_on_trial and len(sides) == 1:
            self.tried_sides |= sides
        return sides <= self.tried_sides

    def before(self, call: Call) -> None:
        """Before a micro-batch's forward, find its real tokens if its padding is to be removed.

        Then this object draws the dropout masks of packed tokens.
        """
        if call is not self._call:  # not in its backward, which may run layers again
            self._call = call
            ratio = self._padding_ratio_to_exceed(call.keys.device)
            self._tokens_of_call = _tokens_to_pack(call, ratio)
            self._samples_of_call = None
            if self._tokens_of_call is not None:
                self._samples_of_call = self._samples_for_kernel(call)
        self._tokens = self._tokens_of_call
        if self._tokens is None:
            return
        self._was_packed = True
        self._packer = self._tokens if self._rows is None else self._rows
        self._attention.start_micro_batch(self._samples_of_call)
        if self._rows is not None:
            self._rows.begin(call, self._tokens, self._samples_of_call)
        else:
            self._packed_masks = PackedMasks(self._tokens, call.keys)
            self._dropout.mask_source = self

    def replacements(self) -> list[Replacement]:
        """Let the layers, and transformers' attention functions, take packed tokens."""
        if self._rows is not None:
            is_row = self._tokens is not None
            return self._rows.replacements(self._run_layer) if is_row else self._rows.uncompiled()
        if self._tokens is None:
            return []
        # FSDP and checkpointing may have wrapped the layers since `attach`.
        forwards = [
            (layer, "forward", partial(self._run_layer, layer, layer.forward))
            for layer in self._layers
        ]
        interfaces = loaded_class("transformers.modeling_utils", "AttentionInterface")
        return [*forwards, *map(self._interface_replacement, interfaces)]

    def _interface_replacement(self, interface: type) -> Replacement:
        """Let the attention functions that transformers' `AttentionInterface` returns take packed
        tokens.
        """
        original = interface.get_interface

        def get_interface(*args: Any) -> Callable:
            """Return a model's attention function, wrapped so that it takes packed tokens."""
            return partial(self._attend, original(*args))

        return interface, "get_interface", get_interface

    def after(self) -> None:
        """Pack nothing until the next micro-batch."""
        self._tokens = None
        self._packed_arguments.clear()
        self._attention.start_micro_batch(None)
        if self._rows is not None:
            self._rows.tokens = None

    def masks_of_shape(self, shape: torch.Size) -> PackedMasks | None:
        """Return what draws the masks of packed tokens if a mask of this shape is one, for keyed
        draws, which know no modules.

        No mask of several padded samples begins with these sizes: packed, they have more tokens
        than the longest of them.
        """
        is_packed = self._tokens is not None and not self._is_in_attention
        if not is_packed or shape[:2] != self._tokens.packed_shape:
            return None
        return self._packed_masks

    def is_refused(self, shape: torch.Size) -> bool:
        """Whether a draw of this shape, which is no mask of packed tokens, has a row for each of
        them: such rows belong to no sample. In the trial only: in training, a parameter may have
        as many rows by chance.
        """
        is_packed = self._is_on_trial and self._tokens is not None
        return is_packed and shape[:1] == self._tokens.packed_shape[1:]

    def _padding_ratio_to_exceed(self, device: torch.device) -> float:
        """Return the padding ratio (padded / real tokens) above which packing is faster.

        It is lower if the attention kernel runs on the device and the model draws dropout, and
        where layers are compiled, which are for rows only.
        """
        has_kernel = self._dropout.sites and self._attention.can_run(device)
        if has_kernel or self._rows is not None:
            return MIN_PADDING_RATIO_WITH_KERNEL
        return self._min_padding_ratio

    def _samples_for_kernel(self, call: Call) -> PackedSamples | None:
        """Return lengths and starts of a micro-batch's samples for the attention kernel.

        None if the kernel does not run on the device, or samples are padded on another side than
        the right.
        """
        mask = call.micro_batch.batch["attention_mask"]
        if not self._attention.can_run(call.keys.device) or not padded_sides(mask) <= {"right"}:
            return None
        return PackedSamples.of(mask, call.keys)

    def _run_layer(self, layer: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a layer's own forward, or the compiled one, on packed tokens."""
        hidden_states, arguments = self._pack_arguments(layer, args, kwargs)
        output = forward(hidden_states, **arguments)
        return self._unpack_output(output) if layer is self._layers[-1] else output

    def _pack_arguments(
        self, layer: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the hidden states of a layer and its other arguments by name, with those
        packed that have a row per token.

        The hidden states are packed before the first layer only. A generation cache becomes None.
        """
        arguments = dict(zip(self._parameter_names, args, strict=False)) | kwargs
        # The first argument is the hidden states; its name differs between models.
        hidden_states = arguments.pop(self._parameter_names[0])
        for name, value in arguments.items():
            if name in PER_TOKEN:
                arguments[name] = self._packed_argument(value)
            elif isinstance(value, loaded_class("transformers.cache_utils", "Cache")):
                arguments[name] = None  # not needed in training
        return self._packed_hidden_states(layer, hidden_states), arguments

    def _packed_hidden_states(self, layer: nn.Module, hidden_states: Tensor) -> Tensor:
        """Return a layer's hidden states for packing: packed before the first one, then unchanged.

        Args:
            layer: The layer.
            hidden_states: Of shape (samples, width, hidden size) before the first layer, else (1,
                num_tokens, hidden size).

        Raises:
            ConfigError: If they have another shape.
        """
        tokens = self._tokens
        if layer is self._layers[0] and hidden_states.shape[:2] == tokens.padded_shape:
            return self._packer.pack(hidden_states)
        if hidden_states.shape[:2] != self._packer.packed_shape:
            raise ConfigError(
                f"packed layers received hidden states of shape {list(hidden_states.shape)} for "
                f"tokens of shape {list(tokens.padded_shape)}: the model's control flow depends on "
                "the data. Call hf_ga.prepare again, or omit packing."
            )
        return hidden_states

    def _unpack_output(self, output: Any) -> Any:
        """Unpack the hidden states of the last layer to a padded batch.

        Args:
            output: The hidden states, or a tuple that starts with them.
        """
        unpack = self._packer.unpack
        if isinstance(output, Tensor):
            return unpack(output)
        hidden_states, *others = output
        return (unpack(hidden_states), *others)

    def _packed_argument(self, value: Any) -> Any:
        """Pack a per-token argument of a layer, such as position ids.

        Packs a tensor of shape (samples or 1, width, ...), or each one in a tuple. The result is
        cached, because all layers get the same tensor. Other values are unchanged.
        """
        if isinstance(value, tuple | list):
            return tuple(map(self._packed_argument, value))
        tokens = self._tokens
        if not isinstance(value, Tensor):
            return value
        if value.shape[:2] not in (tokens.padded_shape, (1, tokens.width)):
            return value
        for padded, packed in self._packed_arguments:
            if padded is value:
                return packed
        packed = self._packer.pack(value)
        self._packed_arguments.append((value, packed))
        return packed

    def _attend(
        self,
        original: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Replace an attention function of transformers, for packed tokens.

        The attention kernel computes them as they are, if it supports this call. Otherwise query,
        key and value are unpacked to padded samples, the original function is called with the
        model's own mask, and its output is packed. The original is called unchanged outside of the
        packed layers.

        Args:
            original: The attention function.
            module: The model's attention module.
            query: Queries, of shape (1, num_heads, num_tokens, head_dim).
            key: Keys, of shape (1, num_kv_heads, num_tokens, head_dim).
            value: Values, of the shape of the keys.
            attention_mask: The mask of the padded samples, or None.
            options: The other arguments of the attention function.

        Returns:
            The output, of shape (1, num_tokens, num_heads, head_dim), and None in place of the
            attention weights.
        """
        tokens = self._tokens
        if tokens is None or module not in self._modules_in_layers:
            return original(module, query, key, value, attention_mask, **options)
        output = self._attention.attend(
            original, module, query, key, value, attention_mask, options
        )
        if output is not None:
            return output, None
        if "position_ids" in options:
            options["position_ids"] = None  # of packed tokens; the mask already separates samples
        padded = [tokens.unpack(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]
        self._is_in_attention = True
        try:
            output, *_ = original(module, *padded, attention_mask, **options)
        finally:
            self._is_in_attention = False
        return tokens.pack(output), None


def find_layer_stack(model: nn.Module) -> nn.ModuleList | None:
    """Find the layers to pack: a model's largest `nn.ModuleList` of layers of one class.

    Lists within another one are skipped; the largest has the most parameters. None if there is
    none.
    """
    return max(
        layer_lists(model),
        key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()),
        default=None,
    )


def can_run_rows(model: nn.Module, compiled: Collection[nn.Module]) -> bool:
    """Whether the layers of a model, of which `compiled` are or will be compiled, can be tried on
    rows.
    """
    layers = find_layer_stack(model)
    if layers is None or unsupported_setting(model) is not None:
        return False
    return reason_not_to_run_rows(model, layers, compiled) is None


def unsupported_setting(model: nn.Module) -> str | None:
    """Return the setting of a model's configuration for which its layers are not packed, if any."""
    config = getattr(model, "config", None)
    return next((name for name in UNSUPPORTED if getattr(config, name, None)), None)


def reason_not_to_run_rows(
    model: nn.Module, layers: nn.ModuleList, compiled: Collection[nn.Module]
) -> str | None:
    """Return why the layers of a model are not run on rows; None if it can be tried."""
    if set(compiled) != set(layers):
        return "other modules than its layers are compiled"
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is not None:
        from transformers import AttentionInterface

        if is_sdpa(AttentionInterface().get(name)):
            return None
    return f"its attention is {name}, not sdpa"


def user_hooks(of_modules: Iterable[Mapping[int, Callable]]) -> list[Callable]:
    """Return the hooks in the registries of modules, without those of torch (FSDP2) and hf_ga."""
    hooks = [hook for of_module in filter(None, of_modules) for hook in of_module.values()]
    owners = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks]
    return [
        hook
        for hook, owner in zip(hooks, owners, strict=True)
        if not owner.startswith(("torch.", "hf_ga."))
    ]


def padded_sides(mask: Tensor) -> set[str]:
    """Find out on which sides the samples of a batch are padded, for packing.

    Args:
        mask: The attention mask, 1 for each real token, of shape (samples, width).

    Returns:
        Some of "right", "left" and "inside"; empty without padding. "inside" stands for a sample
        with padding between its tokens, or on both sides.

    >>> padded_sides(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    {'right'}
    """
    is_real = (mask != 0).numpy()
    rises = (is_real[:, 1:] > is_real[:, :-1]).any(1)  # a token after padding
    falls = (is_real[:, 1:] < is_real[:, :-1]).any(1)  # padding after a token
    sides = {(False, True): "right", (True, False): "left", (True, True): "inside"}
    kinds = set(zip(rises.tolist(), falls.tolist(), strict=True))
    return {sides[kind] for kind in kinds if any(kind)}


def _tokens_to_pack(call: Call, min_padding_ratio: float) -> PackedTokens | None:
    """Find the real tokens of a micro-batch, if removing its padding is possible and worth it.

    Args:
        call: The micro-batch's forward and backward.
        min_padding_ratio: Padding ratio (padded / real tokens) above which packing is worth it.

    Returns:
        The real tokens. None if the batch has no attention mask of tokens (0 or 1, on the CPU), too
        little padding, a sample without tokens, or targets that are predicted at the padding.
    """
    batch = call.micro_batch.batch
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
        return None
    num_tokens = int(mask.count_nonzero())
    if mask.numel() <= min_padding_ratio * num_tokens:
        return None
    if _has_targets_at_padding(mask, batch.get("labels")):
        return None
    return PackedTokens.of(mask, call.keys.device)


def _has_targets_at_padding(mask: Tensor, labels: Any) -> bool:
    """Whether any label of a batch is predicted from the logits of a padding token.

    Such a batch cannot be packed, because packing changes these logits. A masked language model
    predicts the label of column t at column t; a causal one at t - 1. As the kind of head is
    unknown, both are checked. False for labels of another shape than the mask.

    Args:
        mask: The attention mask, 1 for each real token, of shape (samples, width).
        labels: The labels, -100 where ignored, of the shape of the mask.
    """
    if not isinstance(labels, Tensor) or labels.shape != mask.shape:
        return False
    is_target = (labels.cpu() != IGNORED_LABEL).numpy()
    is_padding = (mask == 0).numpy()
    at_own_column = bool((is_target & is_padding).any())
    at_column_before = bool((is_target[:, 1:] & is_padding[:, :-1]).any())
    return at_own_column or at_column_before
