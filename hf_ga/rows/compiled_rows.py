"""Compiled layers on rows of fixed length: one graph serves all layers of a class, in all windows.

The real tokens of a micro-batch are filled up to a row of one of a few lengths; the tail belongs to
no sample. The layers' forwards are compiled for these shapes, without the hooks around them. Keyed
dropout is integer arithmetic inside of the graph, with the bits of `masks.keep_mask`; attention is
an operator that the compiler calls (`row_attention.py`).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import AttentionInterface

from hf_ga.draws.dropout.masks import keep_threshold, uniform_int32
from hf_ga.draws.hashing import mixed, signed
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import ConfigError
from hf_ga.logs import get_logger
from hf_ga.model.override import Replacement
from hf_ga.order.length_plan import row_length
from hf_ga.rows.compiling import OPTIONS
from hf_ga.rows.packed_attention import (
    PackedAttention,
    PackedSamples,
    attention_options,
    autocast_tensors,
)
from hf_ga.rows.packed_tokens import PackedTokens
from hf_ga.rows.row_attention import LayerCall, RowAttention, row_attention
from hf_ga.speed.speed_up import Call

logger = get_logger(__name__)

MAX_DRAWS = 16  # in one layer


class CompiledRows:
    """Runs the layers of one model compiled, on rows.

    Args:
        layers: The layers.
        draws: Keys the random draws of the model.
        kernels: Decides where kernels compute attention.

    Attributes:
        tokens: The real tokens of the current micro-batch. None: it is not computed as a row.
        length: Number of tokens of its row.
    """

    def __init__(self, layers: nn.ModuleList, draws: KeyedDraws, kernels: PackedAttention) -> None:
        """Compile nothing yet: the first row does."""
        self.tokens: PackedTokens | None = None
        self.length = 0
        self._layers = layers
        self._draws = draws
        self._attention = RowAttention(draws, kernels)
        self._is_eager = False  # because the layers cannot be compiled
        self._compiled: dict[nn.Module, Callable] = {}
        self._known_lengths: set[int] = set()  # of rows that were compiled
        self._of: Call | None = None  # the micro-batch
        # (first draw of a layer, its key) -> the keys of the layer's draws.
        self._tensor_of: dict[tuple[int, int], Tensor] = {}
        # What graphs read. The numbers are the same at the beginning of each layer: they are part
        # of the graph.
        no_keys = torch.empty(0, dtype=torch.int64)
        self._is_in_layer = False
        self._next_draw = 0  # of the layer
        self._site_keys = no_keys  # of the layer's draws
        self._token_keys = no_keys  # of the row: the key of each token's sample
        self._columns = no_keys  # of the row's tokens in the padded samples
        self._call = no_keys  # which layer it is

    def begin(self, call: Call, tokens: PackedTokens, samples: PackedSamples | None) -> None:
        """Begin a micro-batch, or its backward, which may run layers again.

        Args:
            call: The micro-batch.
            tokens: Its real tokens.
            samples: Its samples for the attention kernels. None: these cannot compute them.
        """
        self.tokens = tokens
        if call is self._of:
            return
        self._of = call
        self.length = row_length(len(tokens.index), call.max_tokens)
        self._attention.begin(tokens, self.length, call.keys, samples)
        tail = tokens.index[-1:].expand(self.length - len(tokens.index))
        index = torch.cat([tokens.index, tail])
        self._token_keys = call.keys[index // tokens.width]
        self._columns = index % tokens.width

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The first two sizes of a row's tensors, as of `PackedTokens.packed_shape`."""
        return 1, self.length

    def pack(self, padded: Tensor) -> Tensor:
        """Return a padded tensor as a row, whose tail repeats its last token.

        Args:
            padded: Of shape (samples or 1, width, ...).

        Returns:
            A tensor of shape (1, length, ...).
        """
        packed = self.tokens.pack(padded)
        tail = packed[:, -1:].expand(-1, self.length - packed.shape[1], *packed.shape[2:])
        return torch.cat([packed, tail], 1)

    def unpack(self, row: Tensor) -> Tensor:
        """Return the real tokens of a row as a padded tensor, see `PackedTokens.unpack`."""
        return self.tokens.unpack(row[:, : len(self.tokens.index)])

    # Around the layers

    def replacements(self, run_layer: Callable) -> list[Replacement]:
        """Let the layers run compiled.

        Args:
            run_layer: (layer, its forward on a row, arguments) -> its output.
        """
        original_dropout = F.dropout
        original_get_interface = AttentionInterface.get_interface

        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            """Within a layer, drop elements of a row."""
            if not self._is_in_layer:
                return original_dropout(input, p, training, inplace)
            return self._drop(input, p) if training and p > 0 else input

        def get_interface(*args: Any) -> Callable:
            """Return the model's attention function; within a layer, that of rows."""
            return self._attend if self._is_in_layer else original_get_interface(*args)

        forwards = [
            (layer, "forward", partial(run_layer, layer, partial(self._run, layer, layer.forward)))
            for layer in self._layers
        ]
        of_attention = (AttentionInterface, "get_interface", get_interface)
        return [(F, "dropout", dropout), of_attention, *forwards, *self.uncompiled()]

    def uncompiled(self) -> list[Replacement]:
        """Let the layers not run as the user compiled them: around a row, they would pack within
        the graph, and padded samples have many shapes.
        """
        return [(layer, "_compiled_call_impl", None) for layer in self._layers]

    def _run(self, layer: nn.Module, original: Callable, hidden: Tensor, **arguments: Any) -> Any:
        """Run a layer on a row."""
        arguments = self._begin_layer(layer, arguments)
        try:
            return self._run_compiled(layer, original, hidden, arguments)
        finally:
            self._end_layer()

    def _run_compiled(
        self, layer: nn.Module, original: Callable, hidden: Tensor, arguments: dict[str, Any]
    ) -> Any:
        """Run a layer compiled; if it cannot be, run all layers as they are from now on."""
        if self._is_eager:
            return original(hidden, **arguments)
        if layer not in self._compiled:
            options = getattr(layer, OPTIONS, {})
            self._compiled[layer] = torch.compile(
                original, dynamic=False, fullgraph=True, **options
            )
        start = time.perf_counter()
        try:
            output = self._compiled[layer](hidden, **arguments)
        except TorchDynamoException as failure:
            self._is_eager = True
            self._next_draw = 0
            reason = str(failure).splitlines()[0]
            logger.warning(f"hf_ga: the layers are not compiled: {reason}")
            return original(hidden, **arguments)
        if self.length not in self._known_lengths:  # its first call compiles
            self._known_lengths.add(self.length)
            seconds = time.perf_counter() - start
            logger.info(f"hf_ga: compiled for rows of {self.length} tokens in {seconds:.0f} s.")
        return output

    def _begin_layer(self, layer: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin a layer, and return its arguments without the mask of padded samples, of which the
        operator of attention knows.
        """
        masks = [value for value in arguments.values() if _is_mask(value)]
        first_draw = self._draws.num_draws
        call = LayerCall(layer, masks[0] if masks else None, first_draw)
        self._attention.calls.append(call)
        self._call = self._attention.name_call()
        first = (first_draw, self._draws.site_key(first_draw))  # with the seed that the loop set
        if first not in self._tensor_of:
            numbers = range(first_draw, first_draw + MAX_DRAWS)
            keys = [signed(self._draws.site_key(number)) for number in numbers]
            self._tensor_of[first] = torch.tensor(keys, device=self._token_keys.device)
        self._site_keys = self._tensor_of[first]
        self._next_draw = 0
        self._is_in_layer = True
        return {name: None if _is_mask(value) else value for name, value in arguments.items()}

    def _end_layer(self) -> None:
        """End a layer: its draws count as the micro-batch's."""
        self._is_in_layer = False
        for _ in range(self._next_draw):
            self._draws.skip_draw()

    # In the graph

    def _drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to a row of shape (1, length, features), as `PackedMasks.drop` does."""
        # The key of a sample is hashed with the number of its row, 0, first: `masks.row_keys`.
        of_samples = mixed(mixed(self._token_keys ^ self._site_keys[self._next_draw]))
        self._next_draw += 1
        of_tokens = mixed(of_samples ^ self._columns)
        uniform = uniform_int32(of_tokens, input.shape[-1])
        kept = (uniform >= keep_threshold(drop_probability)).view(input.shape)
        return input * kept * (1 / (1 - drop_probability))

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Attention of a row, as an attention function of transformers."""
        options = attention_options(module, query, arguments)
        if options is None:
            raise ConfigError(f"attention of rows does not know these options: {arguments}.")
        # Autocast does not see the operator.
        query, key, value = autocast_tensors(query, key, value)
        draw = 0
        if options.drop_probability > 0:
            draw = self._next_draw
            self._next_draw += 1
        window = -1 if options.sliding_window is None else options.sliding_window
        of_options = (options.drop_probability, options.scale, options.is_causal, window)
        numbers = [float(number) for number in (draw, *of_options)]
        return row_attention(query, key, value, self._call, numbers), None


def _is_mask(argument: Any) -> bool:
    """Whether an argument of a layer is an attention mask of padded samples, for all heads."""
    return isinstance(argument, Tensor) and argument.dim() == 4
