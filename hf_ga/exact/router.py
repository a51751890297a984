"""The load-balancing loss of mixtures of experts, exact for any split of a window.

The loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6), as the model families share it: with E experts, over all T
tokens of a batch (padding left out) and all layers,

    loss = E x sum over experts e of f_e P_e,   f_e = (choices of e) / T,   P_e = (sum of the router's probabilities of e) / T

is a product of two means over the batch, so the losses of micro-batches do not add up to it. But the choices carry no gradient:
with f and T counted over the whole window first (a pass without gradients), what is left is a sum over tokens.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.precision import sum_dtype

FUNCTION = "load_balancing_loss_func"  # in the modules of all these families, with one meaning
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass
class RouterCounts:
    """What one call of the balancing loss counts, summed over tokens and layers.

    Attributes:
        chosen: float32, shape (experts,): how often each expert was among the chosen. No gradient.
        probability: float32, shape (experts,): the sum of the router's probabilities.
        num_tokens: float32 scalar: tokens times layers.
        value: what the head got for its loss: a scalar zero, whose gradient is the head's coefficient.
    """

    chosen: Tensor
    probability: Tensor
    num_tokens: Tensor
    value: Tensor

    def flat(self) -> Tensor:
        """float64, shape (2 x experts + 1,): additive over tokens."""
        return torch.cat([self.chosen, self.probability, self.num_tokens.reshape(1)]).to(sum_dtype(self.chosen.device))


class Router:
    """The balancing loss of one model. While `patched`, the head's own is zero and its calls are kept for `take`.

    Attributes:
        coefficients: of each call of a forward, how much the head weighs it. num_experts: how many experts it counts.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {sys.modules.get(type(module).__module__) for module in model.modules()}
        self._owners = [module for module in modules if hasattr(module, FUNCTION)]
        self._calls: list[RouterCounts] = []
        self.coefficients: list[float] = []
        self.num_experts: list[int] = []

    @property
    def is_possible(self) -> bool:
        """Whether the model's family has such a loss at all."""
        return bool(self._owners)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The head's balancing loss is zero, and its calls are kept."""
        originals = [getattr(owner, FUNCTION) for owner in self._owners]
        try:
            for owner, original in zip(self._owners, originals, strict=True):
                known = list(inspect.signature(original).parameters) == ARGUMENTS
                setattr(owner, FUNCTION, self._count if known else _unsupported(owner.__name__))
            yield
        finally:
            for owner, original in zip(self._owners, originals, strict=True):
                setattr(owner, FUNCTION, original)
            self._calls.clear()

    def take(self) -> list[RouterCounts]:
        """The calls of the last forward."""
        calls, self._calls = self._calls, []
        return calls

    def find_coefficients(self) -> None:
        """After forward and backward of one batch: what the head multiplies each call's loss with."""
        calls = self.take()
        self.coefficients = [0.0 if call.value.grad is None else float(call.value.grad) for call in calls]
        self.num_experts = [len(call.chosen) for call in calls]

    @property
    def sizes(self) -> list[int]:
        """Numbers that each call adds to `flat_counts`."""
        return [2 * experts + 1 for experts in self.num_experts]

    def term(self, calls: Sequence[RouterCounts], totals: Tensor) -> Tensor:
        """What a forward adds to the window's loss. totals: the sum of `flat_counts` over the window."""
        terms = []
        for coefficient, call, part in zip(self.coefficients, calls, totals.float().split(self.sizes), strict=True):
            chosen, num_tokens = part[: len(call.chosen)], part[-1]
            terms.append(coefficient * len(chosen) * (chosen / num_tokens) @ (call.probability / num_tokens))
        return torch.stack(terms).sum()

    def mean(self, totals: Tensor) -> Tensor:
        """The balancing loss of everything that `totals` counts, a scalar in the type of `totals`."""
        terms = []
        for coefficient, experts, part in zip(self.coefficients, self.num_experts, totals.split(self.sizes), strict=True):
            shares = part[:-1] / part[-1]
            terms.append(coefficient * experts * shares[:experts] @ shares[experts:])
        return torch.stack(terms).sum()

    def _count(
        self,
        gate_logits: Sequence[Tensor] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return 0
        self._calls.append(_count_choices(gate_logits, top_k, attention_mask))
        return self._calls[-1].value


def flat_counts(calls: Sequence[RouterCounts]) -> Tensor:
    """The counts of all calls of a forward in one float64 vector, which adds up over micro-batches."""
    return torch.cat([call.flat() for call in calls])


def _count_choices(gate_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None) -> RouterCounts:
    """Sums over the tokens of all layers; gate_logits: of each layer, shape (tokens, experts)."""
    device, num_experts = gate_logits[0].device, gate_logits[0].shape[-1]
    chosen, probability = (torch.zeros(num_experts, device=device) for _ in range(2))
    num_tokens = torch.zeros((), device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(-1)  # in the type in which the head itself chooses
        choices = probabilities.detach().topk(top_k, dim=-1).indices.reshape(-1)
        if attention_mask is None:
            counted = torch.ones(len(logits), device=device)
        else:
            counted = attention_mask.reshape(-1).to(device, torch.float32)
        chosen = chosen.scatter_add(0, choices, counted.repeat_interleave(top_k))
        probability = probability + counted @ probabilities.float()
        num_tokens = num_tokens + counted.sum()
    return RouterCounts(chosen, probability, num_tokens, torch.zeros((), device=device, requires_grad=True))


def _unsupported(module_name: str) -> Callable:
    """In place of a balancing loss with other arguments."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise LossNotAdditive(
            f"unsupported: the router's auxiliary loss of {module_name.rpartition('.')[2]} is not the sum over its "
            "micro-batches, and hf_ga does not know how to split it. Set output_router_logits=False (the load is then not "
            "balanced), or pass loss_fn."
        )

    return refuse
