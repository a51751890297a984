"""The loss of an evaluation: its terms are read in each micro-batch, from a graph that keeps no
activations.

    mean loss = sum over terms k of
        (sum over micro-batches of divisor_k x value_k) / (sum of divisor_k)
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.engine.light_graph import LightGraph
from hf_ga.engine.slots import Slot, plain_slots
from hf_ga.engine.sums.readings import Reading, TermReader
from hf_ga.engine.whole.router import parameters_below
from hf_ga.engine.whole.router_losses import Router, balancing_loss
from hf_ga.loading.window import Window
from hf_ga.model.forward import (
    LossFunction,
    argument_filter,
    call_loss_fn,
    callable_module,
    head_loss,
    unwrapped,
)
from hf_ga.model.outputs import named_tensors, with_tensors
from hf_ga.parallel.backend import Backend
from hf_ga.speed.cudnn_attention import without_cudnn_attention

# Relative difference between the losses of the same samples at two padded widths, above which it
# is no rounding.
TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 2e-2


@dataclass(frozen=True)
class LossParts:
    """What the loss of one micro-batch consists of.

    Attributes:
        divisors: What each term divides by.
        sums: The value of each term, with its factor, times its divisor.
        penalty: The value of what does not depend on the samples.
        ignores_width: Whether what a term sums over depends on how wide rows are padded.
        choices: For each balancing loss of a mixture of experts, its coefficient and its counts
            (see `Router.take_calls`).
    """

    divisors: Mapping[Hashable, float | Tensor]
    sums: Mapping[Hashable, float | Tensor]
    penalty: float | Tensor = 0.0
    choices: Sequence[tuple[float | Tensor, Tensor]] = field(default_factory=list)
    ignores_width: bool = False

    def on_host(self) -> "LossParts":
        """Return the parts with all numbers on the host."""
        return LossParts(
            {key: float(value) for key, value in self.divisors.items()},
            {key: float(value) for key, value in self.sums.items()},
            float(self.penalty),
            [(float(factor), counts.double().cpu()) for factor, counts in self.choices],
            self.ignores_width,
        )


def mean_of_parts(parts: Sequence[LossParts]) -> tuple[float, float]:
    """Return the mean loss over all micro-batches, and their number of targets.

    Sums are exact (`math.fsum`), so they do not depend on the order of the micro-batches.

    Args:
        parts: Those of all micro-batches, on the host.

    Returns:
        (mean, NaN without targets; sum of the divisors of all terms).
    """
    divisors = defaultdict(list)
    sums = defaultdict(list)
    for part in parts:
        for key, divisor in part.divisors.items():
            divisors[key].append(divisor)
            sums[key].append(part.sums[key])
    totals = {key: math.fsum(values) for key, values in divisors.items()}
    num_targets = math.fsum(totals.values())
    if not num_targets:
        return float("nan"), 0.0
    means = [math.fsum(sums[key]) / total for key, total in totals.items() if total]
    penalties = [part.penalty for part in parts]
    return math.fsum([*means, np.mean(penalties), _balancing(parts)]), num_targets


def _balancing(parts: Sequence[LossParts]) -> float:
    """Return the balancing losses of a mixture of experts over all micro-batches."""
    total = 0.0
    for calls in zip(*(part.choices for part in parts), strict=True):
        counts = np.stack([of_part.numpy() for _, of_part in calls])
        summed = torch.from_numpy(np.apply_along_axis(math.fsum, 0, counts))
        factor, _ = calls[0]
        total += factor * float(balancing_loss(summed, summed))
    return total


def evaluation_slots(backend: Backend, window: Window) -> list[Slot]:
    """Return the forwards of this rank in a window of an evaluation: the same number on all ranks
    if forwards are collectives.
    """
    if backend.can_split:
        window = window.split_to_memory_limit()
    slots = plain_slots(window)
    if backend.is_sharded:
        return slots
    return [slot for slot in slots if not slot.is_filler]


class EvaluatedLoss:
    """Computes the loss of micro-batches of an evaluation.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets), in place of the model's
            own loss.

    Attributes:
        router: Keeps the balancing loss of a mixture of experts apart.
    """

    def __init__(self, backend: Backend, model: nn.Module, loss_fn: LossFunction | None) -> None:
        """Start before the first micro-batch."""
        self.backend = backend
        self.model = model
        self.loss_fn = loss_fn
        self.router = Router(unwrapped(model))
        self._module = callable_module(model)
        self._arguments = argument_filter(model)
        self._graph = LightGraph(self._is_any)

    def _is_any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank, if forwards are collectives; else on this one."""
        if not self.backend.is_sharded:
            return condition
        return bool(self.backend.max_over_ranks(int(condition)))

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let a model without trainable parameters have a graph in the block."""
        parameters = list(self.model.parameters())
        frozen = [p for p in parameters if p.is_floating_point() and not p.requires_grad]
        must_change = len(frozen) == len(parameters)
        for parameter in frozen if must_change else ():
            parameter.requires_grad_(True)
        # Reads losses as in training.
        trainable = [p for p in parameters if p.requires_grad]
        self._reader = TermReader(trainable)
        try:
            yield
        finally:
            for parameter in frozen if must_change else ():
                parameter.requires_grad_(False)

    def run(self, batch: dict[str, Any], num_samples: int) -> tuple[Any, LossParts]:
        """Run the forward of a micro-batch.

        Args:
            batch: The batch on the device.
            num_samples: Its number of samples.

        Returns:
            (the model's outputs, what the loss consists of).

        Raises:
            LossNotAdditive: If the loss is not a sum of means.
        """
        with without_cudnn_attention():
            return self._run(batch, num_samples)

    def _run(self, batch: dict[str, Any], num_samples: int) -> tuple[Any, LossParts]:
        """Run the forward of a micro-batch, see `run`."""
        if self.loss_fn is not None:
            return self._run_loss_fn(batch)

        def compute() -> tuple[Any, LossParts]:
            """Run the forward, and read the loss."""
            with self.backend.autocast():
                outputs = self._module(**self._arguments(batch))
                loss = head_loss(outputs)
            return _detached(outputs), self._parts(loss, num_samples)

        return self._graph.run(compute)

    def _run_loss_fn(self, batch: dict[str, Any]) -> tuple[Any, LossParts]:
        """Run the forward of a micro-batch, and the user's loss function."""
        with self.backend.autocast():
            outputs = self._module(**self._arguments(batch))
            total, number = call_loss_fn(self.loss_fn, outputs, batch)
        self.router.take_calls()
        if number == 0 and bool(total.isnan()):
            total = torch.zeros_like(total)  # a mean of nothing times 0
        return outputs, LossParts({"loss_fn": number}, {"loss_fn": total.double()})

    def _parts(self, loss: Tensor, num_samples: int) -> LossParts:
        """Read what a loss consists of."""
        calls = self.router.take_calls()
        readings = [
            reading
            for reading in self._reader.read(loss, num_samples)
            if not reading.is_switched_off and not _is_balancing(reading, calls)
        ]
        data = [reading for reading in readings if not reading.term.is_penalty]
        choices = _choices(loss, calls)
        ignores_width = any(reading.ignores_width for reading in data)
        value = loss.detach().double()
        if len(readings) == 1 and data:
            divisor = _true_divisor(data[0])
            return LossParts(
                {data[0].key: divisor},
                {data[0].key: _product(value, divisor)},
                0.0,
                choices,
                ignores_width,
            )
        divisors = {reading.key: _true_divisor(reading) for reading in data}
        values = {reading.key: reading.term.value() for reading in data if divisors[reading.key]}
        unknown = [key for key, of_term in values.items() if of_term is None]
        rest = float(value) - sum(float(v) for v in values.values() if v is not None)
        penalty = 0.0
        if not unknown:
            penalty = rest if math.isfinite(rest) else 0.0  # NaN if a term has no targets
        else:  # terms that cannot be told apart count like the first of them
            values |= dict.fromkeys(unknown, 0.0)
            values[unknown[0]] = rest
        sums = {key: _product(values.get(key, 0.0), divisor) for key, divisor in divisors.items()}
        return LossParts(divisors, sums, penalty, choices, ignores_width)

    def depends_on_width(self, window: Window) -> bool:
        """Whether the loss of samples changes with the width to which they are padded. A
        collective.

        Args:
            window: A window whose micro-batches may have different widths.
        """
        is_changed = False
        for slot in evaluation_slots(self.backend, window)[:1]:
            offsets = window.offsets_of(slot.micro_batch)
            (padded,) = window.split([offsets], pad_to_window=True).micro_batches
            both = [
                self.run(self.backend.place(one.batch), len(offsets))[1].on_host()
                for one in (slot.micro_batch, padded)
            ]
            is_changed = both[0].ignores_width
            is_changed |= _are_different(*both, tolerance=self._tolerance)
        return bool(self.backend.max_over_ranks(int(is_changed)))

    @property
    def _tolerance(self) -> float:
        """Relative tolerance of the comparison of two widths."""
        dtypes = {p.dtype for p in self.model.parameters()}
        is_low = self.backend.is_mixed or bool(dtypes & {torch.float16, torch.bfloat16})
        return LOW_PRECISION_TOLERANCE if is_low else TOLERANCE


def _are_different(parts: LossParts, others: LossParts, *, tolerance: float) -> bool:
    """Whether the parts of a loss differ by more than rounding."""
    if parts.divisors.keys() != others.divisors.keys():
        return True
    for key, divisor in parts.divisors.items():
        if abs(divisor - others.divisors[key]) > tolerance * abs(divisor):
            return True
        if abs(parts.sums[key] - others.sums[key]) > tolerance * abs(parts.sums[key]):
            return True
    mean, _ = mean_of_parts([parts])
    other, _ = mean_of_parts([others])
    return abs(mean - other) > tolerance * abs(mean)


def _choices(
    loss: Tensor, calls: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[float | Tensor, Tensor]]:
    """Return the coefficient and the counts of each balancing loss that is added to a loss."""
    if not calls:
        return []
    zeros = [zero for _, zero in calls]
    factors = torch.autograd.grad(loss, zeros, retain_graph=True, allow_unused=True)
    return [
        (0.0 if factor is None else factor, counts.detach())
        for (counts, _), factor in zip(calls, factors, strict=True)
    ]


def _is_balancing(reading: Reading, calls: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether a term is the 0 in place of a balancing loss."""
    if not calls or not reading.term.is_penalty:
        return False
    zeros = {id(zero) for _, zero in calls}
    return any(id(leaf) in zeros for leaf in parameters_below(reading.term.node))


def _true_divisor(reading: Reading) -> float | Tensor:
    """Return what a reading adds to the divisor of the split: 0 if it sums over nothing. A number
    of elements counts whatever their weights, as in training.
    """
    if reading.term.is_shape_divisor:
        return reading.divisor
    number = reading.count if reading.num_nonzero is None else reading.num_nonzero
    divisor = reading.divisor
    if isinstance(divisor, Tensor) or isinstance(number, Tensor):
        divisor = torch.as_tensor(divisor)
        return (
            divisor if number is None else torch.where(torch.as_tensor(number == 0), 0.0, divisor)
        )
    return 0.0 if number == 0 else divisor


def _product(value: float | Tensor, divisor: float | Tensor) -> float | Tensor:
    """Return a value times its divisor; 0 for a divisor of 0, where the value is NaN."""
    if isinstance(divisor, Tensor):
        return torch.where(divisor == 0, 0.0, torch.as_tensor(value) * divisor)
    return value * divisor if divisor else 0.0


def _detached(outputs: Any) -> Any:
    """Return outputs without their graph."""
    tensors = {name: tensor.detach() for name, tensor in named_tensors(outputs).items()}
    return with_tensors(outputs, tensors)
