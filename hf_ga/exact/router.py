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
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.override import override

# The function of transformers that computes this loss; each model family defines it in its Python
# module.
LOSS_FUNCTION = "load_balancing_loss_func"
# Its parameters, where it computes the loss above.
KNOWN_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class Router:
    """The load-balancing loss of one model.

    Within `patched`, the model's own balancing loss is replaced by 0, and `take` returns what each
    of its calls in a forward counted.

    Args:
        model: The model.

    Attributes:
        owners: The Python modules of the model's code that define a balancing loss; empty if the
            model has none.
        coefficients: For each call of the balancing loss in a forward, the factor with which the
            model adds it to its loss.
        sizes: For each call, how many numbers it contributes to the result of `take`: two for each
            expert, and one.
    """

    def __init__(self, model: nn.Module) -> None:
        # The Python modules that define the classes of the model's layers.
        python_modules = {sys.modules.get(type(module).__module__) for module in model.modules()}
        self.owners = [module for module in python_modules if hasattr(module, LOSS_FUNCTION)]
        # For each call of the balancing loss in the last forward, its counts, and the 0 that the
        # model got as its loss: the gradient of this 0 is the coefficient.
        self._calls: list[tuple[Tensor, Tensor]] = []
        self.coefficients: list[float] = []
        self.sizes: list[int] = []

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the model's balancing loss within the block: it returns 0 and records its counts.

        A balancing loss with unknown parameters is replaced by a function that raises
        LossNotAdditive.
        """
        with ExitStack() as stack:
            stack.callback(self._calls.clear)
            for owner in self.owners:
                parameters = list(inspect.signature(getattr(owner, LOSS_FUNCTION)).parameters)
                is_known = parameters == KNOWN_PARAMETERS
                replacement = self._count if is_known else partial(_refuse, owner.__name__)
                stack.enter_context(override(owner, **{LOSS_FUNCTION: replacement}))
            yield

    def take(self) -> Tensor:
        """Return the counts of the last forward's calls of the balancing loss, and forget them.

        The counts of micro-batches add up to those of the window.

        Returns:
            float32, shape (sum of `sizes`,): for each call, how often each expert was chosen, the
            sum of the router's probabilities of each expert (with a gradient), and the number of
            tokens times the number of layers.
        """
        calls = self._calls
        self._calls = []
        return torch.cat([counts for counts, _ in calls])

    def find_coefficients(self) -> None:
        """Find the factor with which the model adds each call's balancing loss to its loss. Call
        this within `patched`, after the forward and backward of one batch.
        """
        self.coefficients = []
        self.sizes = []
        for counts, zero in self._calls:
            self.coefficients.append(0.0 if zero.grad is None else float(zero.grad))
            self.sizes.append(len(counts))
        self._calls.clear()

    def loss(self, micro_batch: Tensor, window: Tensor) -> Tensor:
        """Compute what a micro-batch adds to the balancing loss of its window.

        Args:
            micro_batch: The result of `take` for the micro-batch. With the sum of those of all
                micro-batches, the result is the balancing loss of the window.
            window: The sum of the results of `take` over all micro-batches of the window.

        Returns:
            A scalar.
        """
        terms = []
        calls = zip(
            self.coefficients, micro_batch.split(self.sizes), window.split(self.sizes), strict=True
        )
        for coefficient, of_micro_batch, of_window in calls:
            # Each has the choices of the experts, then their probabilities, then the tokens.
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
        """Replacement of the model's balancing loss: record its counts, and return 0.

        The 0 has a gradient, from which `find_coefficients` reads the factor of the loss.

        Args:
            gate_logits: For each layer, the router's logits of shape (tokens, experts). Without
                any, nothing is recorded.
            num_experts: Not used; part of the signature of the function in transformers.
            top_k: How many experts are chosen per token.
            attention_mask: 1 at real tokens, 0 at padding. None: all tokens are real.
        """
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return 0
        counts = _count_choices(gate_logits, top_k, attention_mask)
        zero = torch.zeros((), device=counts.device, requires_grad=True)
        self._calls.append((counts, zero))
        return zero


def _count_choices(
    gate_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Count how often a mixture of experts chooses each expert, and sum the router's probabilities
    of each expert, over the real tokens of all layers.

    Args:
        gate_logits: For each layer, the router's logits of shape (tokens, experts).
        top_k: How many experts are chosen per token.
        attention_mask: 1 at real tokens, 0 at padding. None: all tokens are real.

    Returns:
        float32, shape (2 * experts + 1,): the number of choices of each expert, the sum of its
        probabilities (with a gradient), and the number of tokens times layers.
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
    """Replacement of a balancing loss with unknown parameters, which cannot be split over
    micro-batches.

    Args:
        module_name: Name of the Python module that defines the loss.
        *args: Arguments of the call; not used.
        **kwargs: Arguments of the call; not used.

    Raises:
        LossNotAdditive: Always.
    """
    raise LossNotAdditive(
        f"unsupported: the router's auxiliary loss of {module_name.rpartition('.')[2]} is not the "
        "sum over its micro-batches, so hf_ga cannot split it. Set output_router_logits=False (the "
        "load is then not balanced), or pass loss_fn."
    )
