"""The load-balancing loss of mixtures of experts, exact for any split of a window.

The loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6), as the families share it: with E experts, over all T tokens
of a batch (padding left out) and all layers,

    loss = E x sum over experts e of f_e P_e,   f_e = (choices of e) / T,   P_e = (sum of the router's probabilities of e) / T

is a product of two means over the batch, so the losses of micro-batches do not add up to it. But the choices carry no gradient:
with f and T counted over the whole window first (a pass without gradients), what is left is a sum over tokens.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive

FUNCTION = "load_balancing_loss_func"  # in the modules of all these families, with one meaning
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass
class BalanceCall:
    """What one call of the function saw, summed over tokens and layers.

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

    def times(self, weight: int) -> "BalanceCall":
        """The sums of a micro-batch that counts `weight` times."""
        return BalanceCall(self.chosen * weight, self.probability * weight, self.num_tokens * weight, self.value)


class RouterLoss:
    """Stands in for the balancing loss of a model while its windows are computed. One object a model.

    Example:
        router = RouterLoss(model)
        with router.active():  # coefficients: see `find_coefficients`
            with torch.no_grad():
                totals = add_calls([(model(**batch), router.take())[1] for batch in micro_batches])
            for batch in micro_batches:
                outputs = model(**batch)  # its loss is without the balancing loss
                balancing_loss = router.term(router.take(), totals)
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {sys.modules[type(module).__module__] for module in model.modules()}
        self._owners = [module for module in modules if hasattr(module, FUNCTION)]
        self._calls: list[BalanceCall] = []
        self.coefficients: list[float] = []  # d loss / d value, of each call of a forward: how much the head weighs it

    @property
    def is_possible(self) -> bool:
        """Whether the model's family has such a loss at all."""
        return bool(self._owners)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The head's balancing loss is zero, and its calls are kept for `take`."""
        originals = [getattr(owner, FUNCTION) for owner in self._owners]
        try:
            for owner, original in zip(self._owners, originals, strict=True):
                setattr(owner, FUNCTION, self._stand_in if _is_known(original) else _refused(owner.__name__))
            yield
        finally:
            for owner, original in zip(self._owners, originals, strict=True):
                setattr(owner, FUNCTION, original)
            self._calls.clear()

    def take(self) -> list[BalanceCall]:
        """The calls of the last forward."""
        calls, self._calls = self._calls, []
        return calls

    def find_coefficients(self) -> None:
        """After forward and backward of one batch: what the head multiplies each call's loss with."""
        self.coefficients = [0.0 if call.value.grad is None else float(call.value.grad) for call in self.take()]

    def term(self, calls: Sequence[BalanceCall], totals: Sequence[BalanceCall]) -> Tensor:
        """What a micro-batch adds to the window's loss. calls: of its forward; totals: `add_calls` of the whole window."""
        terms = [
            coefficient * len(total.chosen) * (total.chosen / total.num_tokens) @ (call.probability / total.num_tokens)
            for coefficient, call, total in zip(self.coefficients, calls, totals, strict=True)
        ]
        return torch.stack(terms).sum()

    def _stand_in(
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


def add_calls(micro_batches: Sequence[Sequence[BalanceCall]]) -> list[BalanceCall]:
    """The calls of several forwards, added up call by call."""
    return [
        BalanceCall(
            sum((call.chosen for call in calls), start=torch.zeros_like(calls[0].chosen)),
            sum((call.probability for call in calls), start=torch.zeros_like(calls[0].probability)),
            sum((call.num_tokens for call in calls), start=torch.zeros_like(calls[0].num_tokens)),
            calls[0].value,
        )
        for calls in zip(*micro_batches, strict=True)
    ]


def _count_choices(gate_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None) -> BalanceCall:
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
    return BalanceCall(chosen, probability, num_tokens, torch.zeros((), device=device, requires_grad=True))


def _is_known(function: object) -> bool:
    return list(inspect.signature(function).parameters) == ARGUMENTS  # type: ignore[arg-type]


def _refused(module_name: str) -> object:
    """In place of a balancing loss of another kind, which is not ours to split."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise LossNotAdditive(
            f"the router's auxiliary loss of {module_name.rpartition('.')[2]} is of a kind of its own: it is not the sum over its "
            "micro-batches, and how to split it is not known. Set output_router_logits=False (the load is then not balanced), "
            "or pass loss_fn."
        )

    return refuse
