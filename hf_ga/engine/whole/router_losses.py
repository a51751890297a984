"""The load-balancing loss of mixtures of experts, exact for any split of a window.

The loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6), as the model families of
transformers implement it: with E experts, over all T tokens of a batch (without padding) and all
layers,

    loss = E x sum over experts e of f_e P_e,   f_e = (choices of e) / T,   P_e = (sum of the
    router's probabilities of e) / T

is a product of two means over the batch, so the losses of micro-batches do not add up to it. But
the choices have no gradient: if f and T are counted over the whole window first (by forwards
without gradients), the rest is a sum over tokens.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.model.override import override

# The function of transformers that computes this loss; each model family defines it in its Python
# module.
LOSS_FUNCTION = "load_balancing_loss_func"
# Its parameters, where it computes the loss above.
TOLERANCE = 1e-2  # relative; models compute it in their own dtype
KNOWN_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class Router:
    """The load-balancing loss of one model with a mixture of experts.

    Within `patched`, the model's own balancing loss is replaced by 0, and `take_calls` returns what
    each of its calls in a forward counted.

    Args:
        model: The model.

    Attributes:
        owners: The Python modules of the model's code that define a balancing loss; empty if the
            model has none.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the Python modules that define the load-balancing loss of the model's mixture of
        experts, which is replaced so that it can be split over micro-batches.
        """
        # The Python modules that define the classes of the model's layers.
        python_modules = {sys.modules.get(type(module).__module__) for module in model.modules()}
        self.owners = [module for module in python_modules if hasattr(module, LOSS_FUNCTION)]
        # For each call of the balancing loss in the last forward, its counts, and the 0 that the
        # model got as its loss: the gradient of this 0 is the coefficient.
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._known: set[Callable[..., Tensor | int]] = set()  # that were compared

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block, replace the model's load-balancing loss (mixture of experts) by a
        function that returns 0 and records how often each expert is chosen.

        A load-balancing loss with unknown parameters is replaced by a function that raises
        LossNotAdditive.
        """
        with ExitStack() as stack:
            stack.callback(self._calls.clear)
            for owner in self.owners:
                parameters = list(inspect.signature(getattr(owner, LOSS_FUNCTION)).parameters)
                is_known = parameters == KNOWN_PARAMETERS
                original = getattr(owner, LOSS_FUNCTION)
                replacement = partial(_refuse, owner.__name__)
                if is_known:
                    replacement = partial(self._checked_count, original)
                stack.enter_context(override(owner, **{LOSS_FUNCTION: replacement}))
            yield

    def take_calls(self) -> list[tuple[Tensor, Tensor]]:
        """Return the counts of each call of the balancing loss in the last forward, and the 0 that
        the model got as its loss; and forget them.

        The counts of micro-batches add up to those of the window.

        Returns:
            For each call: how often each expert was chosen, the sum of the router's probabilities
            of each expert (with a gradient), and the number of tokens times the number of layers,
            float32, shape (2 * experts + 1,); the 0, a scalar with a gradient.
        """
        calls = self._calls
        self._calls = []
        return calls

    def _checked_count(
        self, original: Callable[..., Tensor | int], *args: Any, **kwargs: Any
    ) -> Tensor | int:
        """Replacement of the model's load-balancing loss. Its first call raises LossNotAdditive if
        it is not the known one.
        """
        if original not in self._known:
            self._compare(original, args, kwargs)
        return self._count(*args, **kwargs)

    def _compare(self, original: Callable[..., Tensor | int], args: Any, kwargs: Any) -> None:
        """Compare a load-balancing loss with the known one, unless it has no tokens."""
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        gate_logits, _, top_k, mask = call.arguments.values()
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return
        with torch.no_grad():
            found = float(original(*args, **kwargs))
            counts = _count_choices(gate_logits, top_k, mask)
            expected = float(balancing_loss(counts, counts))
        if math.isnan(found) and math.isnan(expected):
            return
        self._known.add(original)
        if abs(found - expected) > TOLERANCE * abs(expected):
            raise LossNotAdditive(
                f"unsupported: the router's auxiliary loss, {original.__module__}."
                f"{LOSS_FUNCTION}, is {found:.4g}, which differs from that of Switch Transformer, "
                f"{expected:.4g}, so hf_ga cannot split it. Set output_router_logits=False (the "
                "load is then not balanced), or pass loss_fn."
            )

    def _count(
        self,
        gate_logits: Sequence[Tensor] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Replacement of the model's load-balancing loss: record how often the router chooses each
        expert, and return a 0 whose gradient is the factor of that loss.
        """
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return 0
        counts = _count_choices(gate_logits, top_k, attention_mask)
        zero = torch.zeros((), device=counts.device, requires_grad=True)
        self._calls.append((counts, zero))
        return zero.sum()  # not a leaf, so that it is read as a term of its own


def balancing_loss(counts: Tensor, window: Tensor) -> Tensor:
    """Return what a micro-batch adds to the load-balancing loss of its window.

    Args:
        counts: Of one call in the micro-batch, see `Router.take_calls`.
        window: Of the window.
    """
    num_experts = len(window) // 2
    num_tokens = window[-1]
    share_of_choices = window[:num_experts] / num_tokens
    return num_experts * share_of_choices @ (counts[num_experts:-1] / num_tokens)


def _count_choices(
    gate_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Count each expert's choices, and sum the router's probabilities of it, over the real tokens
    of all layers, whose logits have shape (tokens, experts).

    Returns float32, shape (2 * experts + 1,): choices, sums of probabilities (with a gradient), and
    the number of tokens times layers. Such counts add up over micro-batches.
    """
    device = gate_logits[0].device
    num_experts = gate_logits[0].shape[-1]
    num_choices = torch.zeros(num_experts, device=device)
    sum_of_probabilities = torch.zeros(num_experts, device=device)
    num_tokens = torch.zeros(1, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(-1)  # in the model's own dtype
        choices = probabilities.detach().topk(top_k, dim=-1).indices.reshape(-1)
        if attention_mask is None:
            is_token = torch.ones(len(logits), device=device)
        else:
            is_token = attention_mask.reshape(-1).to(device, torch.float32)
        num_choices = num_choices.scatter_add(0, choices, is_token.repeat_interleave(top_k))
        sum_of_probabilities = sum_of_probabilities + is_token @ probabilities.float()
        num_tokens = num_tokens + is_token.sum()
    return torch.cat([num_choices, sum_of_probabilities, num_tokens])


def _refuse(module_name: str, *args: object, **kwargs: object) -> None:
    """Replacement of a load-balancing loss with unknown parameters, which cannot be split."""
    raise LossNotAdditive(
        f"unsupported: the router's auxiliary loss of {module_name.rpartition('.')[2]} is not the "
        "sum over its micro-batches, so hf_ga cannot split it. Set output_router_logits=False (the "
        "load is then not balanced), or pass loss_fn."
    )
