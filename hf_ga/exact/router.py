"""The load-balancing loss of mixtures of experts, exact for any split of a window.

The loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6), as the model families share
it: with E experts, over all T tokens of a batch (padding left out) and all layers,

    loss = E x sum over experts e of f_e P_e,   f_e = (choices of e) / T,   P_e = (sum of the
    router's probabilities of e) / T

is a product of two means over the batch, so the losses of micro-batches do not add up to it. But
the choices carry no gradient: with f and T counted over the whole window first (a pass without
gradients), what is left is a sum over tokens.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.override import override

FUNCTION = "load_balancing_loss_func"  # in the modules of all these families, with one meaning
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class Router:
    """The balancing loss of one model.

    While `patched`, the head's own is zero, and what its calls count is kept for `take`.

    Args:
        model: The model.

    Attributes:
        owners: Python modules that define such a loss; empty if the model's family has none.
        coefficients: For each call in a forward, its weight in the head's loss.
        sizes: For each call, how many numbers it adds to what `take` returns: two for each expert
            and one.
    """

    def __init__(self, model: nn.Module) -> None:
        # The Python modules that the classes of the model's modules are from.
        files = {sys.modules.get(type(module).__module__) for module in model.modules()}
        self.owners = [file for file in files if hasattr(file, FUNCTION)]
        # What was counted, and what the head got: its gradient is its coefficient.
        self._calls: list[tuple[Tensor, Tensor]] = []
        self.coefficients: list[float] = []
        self.sizes: list[int] = []

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the head's balancing loss by zero, and keep its calls, within the block."""
        with ExitStack() as stack:
            stack.callback(self._calls.clear)
            for owner in self.owners:
                arguments = list(inspect.signature(getattr(owner, FUNCTION)).parameters)
                is_known = arguments == ARGUMENTS
                replacement = self._count if is_known else partial(_refuse, owner.__name__)
                stack.enter_context(override(owner, **{FUNCTION: replacement}))
            yield

    def take(self) -> Tensor:
        """Return what the calls of the last forward counted. It adds up over micro-batches.

        Returns:
            float32, shape (sum of `sizes`,): for each call, how often each expert was among the
            chosen, the sums of the router's probabilities (with a gradient), and the number of
            tokens times layers.
        """
        calls = self._calls
        self._calls = []
        return torch.cat([counted for counted, _ in calls])

    def find_coefficients(self) -> None:
        """After forward and backward of one batch, find out what the head multiplies each call's
        loss by.
        """
        self.coefficients = []
        self.sizes = []
        for counted, zero in self._calls:
            self.coefficients.append(0.0 if zero.grad is None else float(zero.grad))
            self.sizes.append(len(counted))
        self._calls.clear()

    def loss(self, own: Tensor, window: Tensor) -> Tensor:
        """Compute what a micro-batch adds to the balancing loss of its window.

        Args:
            own: What `take` returned for the micro-batch. With that of the whole window, the result
                is the window's loss.
            window: The same, summed over the window.

        Returns:
            A scalar.
        """
        terms = []
        calls = zip(self.coefficients, own.split(self.sizes), window.split(self.sizes), strict=True)
        for coefficient, of_micro_batch, of_window in calls:
            num_experts = len(of_window) // 2
            num_tokens = of_window[-1]
            share_of_choices = of_window[:num_experts] / num_tokens
            mean_probability = of_micro_batch[num_experts:-1] / num_tokens
            terms.append(coefficient * num_experts * share_of_choices @ mean_probability)
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
        counted = _count_choices(gate_logits, top_k, attention_mask)
        zero = torch.zeros((), device=counted.device, requires_grad=True)
        self._calls.append((counted, zero))
        return zero


def _count_choices(
    gate_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Count choices and add up probabilities over the tokens of all layers.

    Args:
        gate_logits: For each layer, logits of shape (tokens, experts).
        top_k: Experts that are chosen for a token.
        attention_mask: 1 for each real token. None: all are.

    Returns:
        See `Router.take`.
    """
    device = gate_logits[0].device
    num_experts = gate_logits[0].shape[-1]
    chosen = torch.zeros(num_experts, device=device)
    probability = torch.zeros(num_experts, device=device)
    num_tokens = torch.zeros(1, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(-1)  # in the head's own type
        choices = probabilities.detach().topk(top_k, dim=-1).indices.reshape(-1)
        if attention_mask is None:
            counted = torch.ones(len(logits), device=device)
        else:
            counted = attention_mask.reshape(-1).to(device, torch.float32)
        chosen = chosen.scatter_add(0, choices, counted.repeat_interleave(top_k))
        probability = probability + counted @ probabilities.float()
        num_tokens = num_tokens + counted.sum()
    return torch.cat([chosen, probability, num_tokens])


def _refuse(module_name: str, *args: object, **kwargs: object) -> None:
    """Replace a balancing loss with other arguments.

    Raises:
        LossNotAdditive: Always.
    """
    raise LossNotAdditive(
        f"unsupported: the router's auxiliary loss of {module_name.rpartition('.')[2]} is not the "
        "sum over its micro-batches, so hf_ga cannot split it. Set output_router_logits=False (the "
        "load is then not balanced), or pass loss_fn."
    )
