"""The load-balancing loss of mixtures of experts in a loop's own loss: exact for any split of a
window. See `hf_ga.engine.whole.router_losses` for the loss, which is no mean over samples.

- `count_window`: forwards without gradients count how often each expert is chosen in the window.
- `patched`: a model gets the value of its micro-batch's own balancing loss, without its gradient.
- `split`: what the loop's loss multiplies it by.
- `part`: what the micro-batch adds to the balancing loss of the window.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hf_ga.engine.slots import Slot
from hf_ga.engine.sums.divisors import RELATIVE_ROUNDING
from hf_ga.engine.sums.readings import Number, Reading
from hf_ga.engine.whole.router_losses import Router, balancing_loss
from hf_ga.errors import LossNotAdditive
from hf_ga.loss.identity import VIEWS
from hf_ga.loss.nodes.saved import inputs
from hf_ga.loss.penalty import PARAMETER
from hf_ga.model.forward import unwrapped
from hf_ga.model.hooks import Hook
from hf_ga.model.precision import LOW_PRECISION, sum_dtype
from hf_ga.parallel.backend import Backend, RankStatus

# TRL computes the balancing loss of all families with the function of this one.
COMMON_OWNER = "transformers.models.mixtral.modeling_mixtral"
# Nodes between what the model gets as its balancing loss, and the term of the loop's loss.
UNCHANGED = {"SumBackward0", "ToCopyBackward0", *VIEWS}
# Largest difference of a mean probability between the two forwards of a micro-batch.
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 5e-2
MASK_ARGUMENT = 3  # index of the attention mask in the arguments of a balancing loss


@dataclass(frozen=True)
class _Call:
    """One computation of the balancing loss in a micro-batch: what it counted (`take_calls`), and
    what the model's loss depends on in place of the counts, with the value of that loss.
    """

    counts: Tensor
    leaf: Tensor


class WindowRouter(Router):
    """The balancing losses of the models that a loop trains, one window at a time.

    Args:
        models: The prepared models.

    Attributes:
        prepared: The prepared models.
        coefficients: For each call in the current micro-batch, what the loop's loss multiplies it
            by.
        counts_padding: Whether padding is counted, too, as there is no attention mask.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Find the functions that compute the balancing losses of these models."""
        self.prepared = list(models)
        self._models = [unwrapped(model) for model in models]
        super().__init__(nn.ModuleList(self._models))
        common = sys.modules.get(COMMON_OWNER)
        if self.owners and common is not None and common not in self.owners:
            self.owners.append(common)
        self.coefficients: list[Number] = []
        self.counts_padding = False
        self._sizes: list[int] = []  # of the counts of each call
        self._depth = 0  # of forwards of the models within each other
        self._recorded: list[_Call] = []  # of the current micro-batch
        self._slot: Slot | None = None
        self._window_counts: list[Tensor] = []  # of each call, over all micro-batches and ranks
        self._first: dict[int, list[Tensor]] = {}  # id of a slot -> what its first forward counted
        self._num_slots = 0  # micro-batches of the window that were added so far
        # (number of the backward, call) -> its coefficients in the micro-batches so far
        self._seen: dict[tuple[int, int], list[Number]] = defaultdict(list)
        self._differences: list[Tensor] = []  # between both forwards of each micro-batch

    @property
    def is_on(self) -> bool:
        """Whether a model adds a balancing loss to its loss, by its config."""
        if not self.owners:
            return False
        configs = [getattr(module, "config", None) for m in self._models for module in m.modules()]
        return any(getattr(config, "output_router_logits", False) is True for config in configs)

    # The first pass

    def count_window(
        self, backend: Backend, slots: Sequence[Slot], run: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Count how often each expert is chosen in the window. A collective.

        Args:
            backend: How ranks communicate.
            slots: The micro-batches of this rank.
            run: Runs the forward of each slot, and calls a function after each; returns its
                results.

        Raises:
            ProcessFailed: If another rank failed.
        """
        self._num_slots = 0
        self._seen.clear()
        self._differences = []
        self._first = {}
        status = RankStatus()
        total = torch.zeros((), device=backend.device)
        try:
            counts = run(lambda: [call.counts.detach() for call in self._recorded])
            self._first = {id(slot): of_slot for slot, of_slot in zip(slots, counts, strict=True)}
            self._sizes = [len(of_call) for of_call in counts[0]]
            total = torch.zeros(
                sum(self._sizes), dtype=sum_dtype(backend.device), device=backend.device
            )
            for slot, of_slot in zip(slots, counts, strict=True):
                if slot.is_counted and of_slot:
                    total += torch.cat(of_slot)
        except Exception as error:
            if backend.is_sharded:
                raise
            status.failure = error
        summed = backend.all_reduce(total, status)  # raises the error of a rank on all ranks
        self._window_counts = list(summed.float().split(self._sizes))

    # Micro-batches

    @contextmanager
    def patched_in(self, slot: Slot) -> Iterator[None]:
        """Record the balancing losses of a micro-batch in the block."""
        self._slot = slot
        self._depth = 0
        self._recorded = []
        with ExitStack() as stack:
            stack.enter_context(self.patched())
            for model in self._models:
                # The first hook, as others may run forwards of the model.
                before = model.register_forward_pre_hook(Hook(self._enter), prepend=True)
                after = model.register_forward_hook(Hook(self._leave), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, model: nn.Module, args: tuple) -> None:
        """Note that a forward of a trained model begins."""
        self._depth += 1

    def _leave(self, model: nn.Module, args: tuple, outputs: Any) -> None:
        """Note that a forward of a trained model has ended."""
        self._depth -= 1

    def _count(self, *args: Any, **kwargs: Any) -> Tensor | int:
        """Replacement of a model's balancing loss: its value, and a gradient that shows what the
        loop multiplies it by. Only the value for a model that is not trained.
        """
        num_calls = len(self._calls)
        super()._count(*args, **kwargs)
        mask = args[MASK_ARGUMENT] if len(args) > MASK_ARGUMENT else kwargs.get("attention_mask")
        self.counts_padding |= mask is None
        if len(self._calls) == num_calls:
            return 0
        counts, _ = self._calls.pop()
        value = balancing_loss(counts.detach(), counts.detach()).nan_to_num()
        if not self._depth:
            return value
        leaf = value.clone().requires_grad_()
        if self._depth == 1:
            self._recorded.append(_Call(counts, leaf))
        return leaf.sum()

    def split(
        self, loss: Tensor, readings: Sequence[Reading], num_targets: Number | None
    ) -> tuple[Tensor, list[Reading]]:
        """Take the balancing losses out of a micro-batch's loss; keep their coefficients.

        Args:
            loss: The loss that the loop passed to `backward`.
            readings: Its terms.
            num_targets: What it is a sum over. None: it is a sum of means.

        Returns:
            (the loss without the values of balancing losses, its other terms).

        Raises:
            LossNotAdditive: If the loss uses a balancing loss in another way than adding a
                multiple.
        """
        self.coefficients = [0.0] * len(self._recorded)
        if num_targets is not None:
            self._split_sum(loss, num_targets)
            others = list(readings)
        else:
            others = [reading for reading in readings if not self._is_mine(reading)]
        multiple = 1.0 if num_targets is None else num_targets
        for coefficient, call in zip(self.coefficients, self._recorded, strict=True):
            loss = loss - coefficient * multiple * call.leaf.detach()
        return loss, others

    def _split_sum(self, loss: Tensor, num_targets: Number) -> None:
        """Find the coefficients of balancing losses in a sum that the loop divides by nothing."""
        leaves = [call.leaf for call in self._recorded]
        if not leaves or not loss.requires_grad:
            return
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.coefficients[index] = torch.where(
                    gradient == 0, 0.0, gradient / torch.as_tensor(num_targets).to(gradient)
                )

    def _is_mine(self, reading: Reading) -> bool:
        """Whether a term is a balancing loss; its coefficient is kept."""
        if reading.term is None or not reading.term.is_penalty:
            return False
        index_of = {id(call.leaf): index for index, call in enumerate(self._recorded)}
        node = reading.term.node
        below = parameters_below(node)
        mine = [index_of[id(leaf)] for leaf in below if id(leaf) in index_of]
        if not mine:
            return False
        while node.name() in UNCHANGED and len(inputs(node)) == 1:
            node, _ = inputs(node)[0]
        if node.name() != PARAMETER:
            raise LossNotAdditive(
                f"the loss uses the balancing loss of a mixture of experts in {node.name()}, so it "
                "is not the full batch's: add a multiple of outputs.aux_loss."
            )
        self.coefficients[mine[0]] = self.coefficients[mine[0]] + reading.factor
        return True

    def part(self, number: int, *, is_counted: bool = True) -> Tensor | None:
        """Return what the micro-batch adds to the balancing loss of the window, a scalar.

        Args:
            number: Number of the backward in the micro-batch, from 1.
            is_counted: Whether the micro-batch belongs to the window.

        Returns:
            The part; None if the loss has no balancing loss.

        Raises:
            LossNotAdditive: If the model ran more often than in the first pass.
        """
        self._num_slots += is_counted and number == 1
        used = [i for i, c in enumerate(self.coefficients) if isinstance(c, Tensor) or c]
        if not used:
            return None
        if used[-1] >= len(self._window_counts):
            raise LossNotAdditive(
                "the loss has the balancing loss of a mixture of experts, but the first pass over "
                "the window, model(**batch) with what the loader returned, computed it "
                f"{len(self._window_counts)} times and the loop {len(self._recorded)} times: set "
                "output_router_logits=True in the model's config, and call the model once for each "
                "batch."
            )
        if is_counted:
            for index in used:
                self._seen[number, index].append(self.coefficients[index])
            self._compare_with_first()
        parts = [
            self.coefficients[i] * balancing_loss(self._recorded[i].counts, self._window_counts[i])
            for i in used
        ]
        return torch.stack(parts).sum()

    def _compare_with_first(self) -> None:
        """Note how much the router's probabilities differ from those of the first pass."""
        for call, first in zip(self._recorded, self._first[id(self._slot)], strict=False):
            num_tokens = first[-1].clamp(min=1)
            change = (call.counts.detach() - first)[len(first) // 2 :]
            self._differences.append(change.abs().max() / num_tokens)

    def check_window(self) -> None:
        """Check, at the window's end, that all its micro-batches have the same coefficients, and
        that the loop's forwards were those of the first pass.

        Raises:
            LossNotAdditive: If not.
        """
        for coefficients in self._seen.values():
            values = torch.stack([torch.as_tensor(c).float().cpu() for c in coefficients])
            spread = float(values.max() - values.min())
            is_missing = len(coefficients) != self._num_slots
            if is_missing or spread > RELATIVE_ROUNDING * float(values.abs().max()):
                raise LossNotAdditive(
                    "the balancing loss of a mixture of experts has coefficients "
                    f"{values[:4].tolist()} in {len(coefficients)} of {self._num_slots} "
                    "micro-batches of a window, so the full batch has no such coefficient: change "
                    "it between optimizer steps only."
                )
        if not self._differences:
            return
        difference = float(torch.stack(self._differences).max())
        if difference > self._tolerance:
            raise LossNotAdditive(
                "the router's probabilities in the loop's forward differ from those in the first "
                f"pass over the window, model(**batch) (difference {difference:.1e}), so the "
                "balancing loss would be wrong. Likely causes: the loop changes the batch, draws "
                "random numbers before the forward, or changes the model within a window."
            )

    @property
    def _tolerance(self) -> float:
        """How much a mean probability may differ by rounding."""
        dtypes = {p.dtype for model in self._models for p in model.parameters()}
        is_low = bool(dtypes & set(LOW_PRECISION)) or any(
            hasattr(model, "_original_forward") for model in self._models
        )
        return LOW_PRECISION_TOLERANCE if is_low else TOLERANCE


def parameters_below(node: Node) -> list[Tensor]:
    """Return the parameters that a penalty depends on."""
    waiting = [node]
    seen = set(waiting)
    found = []
    while waiting:
        current = waiting.pop()
        if current.name() == PARAMETER:
            found.append(current.variable)
        below = {child for child, _ in inputs(current)} - seen
        seen |= below
        waiting += below
    return found
