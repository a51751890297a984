"""Loops that people write around Accelerate, in three layouts of the same windows: each ends with the
weights of plain torch, one forward and backward of the whole window in float64, or is refused with
a message that names the term or the draw. Accelerate's own accelerator is the control.
"""

import copy
import io
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from documented_loop import reset_states
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hf_ga import Accelerator
from hf_ga.accelerator.training_loop import _leave_at_exit
from hf_ga.errors import ConfigError, DataError, HfGaError, LossNotAdditive, UnkeyedRandomness

WINDOW = 8
NUM_SAMPLES = 21  # windows of 8, 8 and 5 samples
LAYOUTS = [8, 2]  # samples of a micro-batch
SPLIT = [2]  # those with several micro-batches
# Where an iteration is compared with others of its window: of two, each has one other only.
IN_TWO_OR_FOUR = [4, 2]
LEARNING_RATE = 0.5
CLOSE = 2e-6  # relative to what was learnt
FAR = 1e-2

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(NUM_SAMPLES, 6, generator=GENERATOR)
Y = torch.randint(3, (NUM_SAMPLES,), generator=GENERATOR)
VALUES = torch.randn(NUM_SAMPLES, 3, generator=GENERATOR)
Y[2:4] = 0  # with micro-batches in which no sample has a class above 0
Y[8:12] = 0
Body = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


# -- models


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model.train()


def classifier() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def linear() -> nn.Module:
    return seeded(nn.Linear(6, 3))


def square() -> nn.Module:
    return seeded(nn.Linear(6, 6))


def with_batch_norm() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))


def batch_norm_last() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class TwoModels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


class TimeFirst(nn.Module):
    """Returns (time, batch, classes), with as many steps as a window has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Linear(1, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.cat([x, x], dim=1)[:, :8].T[:, :, None]
        return self.head(self.cells(steps).tanh())


def two_heads() -> nn.Module:
    return seeded(TwoHeads())


class Weighted(nn.Module):
    """Two heads, and trained weights for their losses, which it returns, too."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = TwoHeads()
        self.spread = nn.Parameter(torch.zeros(2))
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.heads(x), self.spread, self.temperature)


def weighted() -> nn.Module:
    return seeded(Weighted())


# -- the loop, and what it must equal


def flat(*models: nn.Module) -> Tensor:
    parameters = [p for model in models for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in parameters])


@dataclass
class Loop:
    """A loop of Accelerate.

    Attributes:
        body: (model, *columns of the batch) -> loss.
        build: Makes the model.
        columns: The data.
        full_body: The same loss of the whole window, if it must be written differently.
        iteration: (accelerator, model, optimizer, *batch), instead of backward(body(...)).
    """

    body: Body
    build: Callable[[], nn.Module] = classifier
    columns: tuple[Tensor, ...] = (X, Y, VALUES)
    full_body: Body | None = None
    iteration: Callable[..., None] | None = None
    collate: Callable | None = None
    options: dict = field(default_factory=dict)

    def run(self, kind: type, batch_size: int) -> Tensor:
        """The weights at the end."""
        reset_states()
        torch.manual_seed(0)
        steps = WINDOW // batch_size // PartialState(cpu=True).num_processes
        accelerator = kind(gradient_accumulation_steps=steps, **self.options)
        model = self.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        loader = DataLoader(TensorDataset(*self.columns), batch_size, collate_fn=self.collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                if self.iteration is None:
                    accelerator.backward(self.body(model, *batch))
                else:
                    self.iteration(accelerator, model, optimizer, *batch)
                optimizer.step()
                optimizer.zero_grad()
        return flat(accelerator.unwrap_model(model))

    def full_batch(self) -> Tensor:
        """One explicit forward and backward for each window, in float64."""
        model = self.build().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for start in range(0, NUM_SAMPLES, WINDOW):
            batch = [column[start : start + WINDOW] for column in self.columns]
            batch = [c.double() if c.is_floating_point() else c for c in batch]
            optimizer.zero_grad()
            (self.full_body or self.body)(model, *batch).backward()
            optimizer.step()
        return flat(model)

    def error(self, kind: type, batch_size: int) -> float:
        """The distance from the full batch, relative to what was learnt."""
        expected = self.full_batch()
        learnt = (expected - flat(self.build())).norm()
        return float((self.run(kind, batch_size) - expected).norm() / learnt)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor, **options) -> Tensor:
    return F.cross_entropy(model(x), y, **options)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y, reduction="none")


def over(number_of: Callable[[Tensor], Tensor | float]) -> Body:
    """A sum over samples whose class is above 0, and what it is divided by."""

    def body(model, x, y, values):
        return (losses(model, x, y) * (y > 0)).sum() / number_of(y > 0)

    return body


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())


EXACT: dict[str, Loop] = {}


def exact(**options) -> Callable[[Body], Body]:
    """Register a loss that must be that of the full batch."""

    def register(body: Body) -> Body:
        EXACT[body.__name__] = Loop(body, **options)
        return body

    return register


@exact()
def distillation(model, x, y, values):
    logits = model(x)
    teacher = (values / 2).softmax(-1)
    divergence = F.kl_div((logits / 2).log_softmax(-1), teacher, reduction="batchmean")
    return 0.5 * F.cross_entropy(logits, y) + 2 * divergence


@exact()
def focal(model, x, y, values):
    each = losses(model, x, y)
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@exact(build=square)
def squares(model, x, y, values):
    return ((model(x) - x) ** 2).mean()


@exact(build=lambda: seeded(TwoModels()))
def two_parts(model, x, y, values):
    return cross_entropy(model, x, y)


@exact()
def two_forwards(model, x, y, values):
    """R-Drop without dropout, and with other inputs: its two means are of one kind."""
    first = model(x)
    second = model(x + 0.1)
    divergence = F.kl_div(first.log_softmax(-1), second.softmax(-1), reduction="batchmean")
    return (F.cross_entropy(first, y) + F.cross_entropy(second, y)) / 2 + divergence


@exact(build=two_heads)
def stacked_heads(model, x, y, values):
    """A mean of two means with divisors of their own."""
    first, second = model(x)
    chosen = y != 0
    other = second.sum() * 0
    if chosen.any():
        other = F.cross_entropy(second, y.masked_fill(~chosen, -100))
    return torch.stack([F.cross_entropy(first, y), other]).mean()


class WithCache(nn.Module):
    """Fills a buffer in the first forward, and says so in an attribute, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("cached", torch.zeros(6), persistent=False)
        self.num_cached = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_cached < x.shape[1]:
            self.num_cached = x.shape[1]
            self.cached.copy_(torch.arange(6.0).cos())
        return self.head(x * self.cached)


@exact(build=lambda: seeded(WithCache()))
def a_cache_in_a_buffer(model, x, y, values):
    return cross_entropy(model, x, y)


class HeadOnTargets(nn.Module):
    """Returns a row for each chosen token, as a head of BERT's pretraining may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        return self.head(self.layer(tokens).tanh()[chosen])


@exact(build=lambda: seeded(HeadOnTargets()))
def rows_of_targets(model, x, y, values):
    """One or three tokens of each sample: two samples have an even number of them."""
    chosen = torch.ones_like(values, dtype=torch.bool)
    chosen[:, 1:] = values[:, :1] > 0.2
    labels = y[:, None].expand_as(chosen)
    return F.cross_entropy(model(x.unflatten(1, (3, 2)), chosen), labels[chosen])


@exact()
def jacobian_penalty(model, x, y, values):
    """The model is also called within transforms of torch.func."""
    jacobians = torch.vmap(torch.func.jacrev(model))(x)
    return cross_entropy(model, x, y) + 0.1 * jacobians.pow(2).sum((1, 2)).mean()


@exact()
def chosen_over_all(model, x, y, values):
    """A sum over chosen samples divided by all, which micro-batches without a chosen one lack."""
    logits = model(x)
    chosen = y == 0
    loss = F.cross_entropy(logits, y)
    if chosen.any():
        loss = loss + F.mse_loss(logits[chosen], values[chosen], reduction="sum") / len(x)
    return loss


@exact()
def chosen_alone_over_all(model, x, y, values):
    """As a loss of its own, with 0 in place of it."""
    logits = model(x)
    chosen = y == 0
    if not chosen.any():
        return logits.sum() * 0
    return F.mse_loss(logits[chosen], values[chosen], reduction="sum") / len(x)


def two_columns() -> nn.Module:
    return seeded(nn.Linear(2, 2))


def pairs_of_blocks(model, x, y, values):
    """Rows of a, then rows of b, as with prior preservation of DreamBooth."""
    first, second = model(torch.cat([x, y])).chunk(2)
    return F.mse_loss(first, x) + 0.5 * F.mse_loss(second, y)


# Their four channels look like the four samples of a micro-batch.
CHANNELS = tuple(torch.randn(3, NUM_SAMPLES, 4, 2, generator=GENERATOR))
exact(build=two_columns, columns=CHANNELS)(pairs_of_blocks)


@exact()
def sum_of_samples(model, x, y, values):
    each = [F.cross_entropy(model(row), label) for row, label in zip(x, y, strict=True)]
    return sum(each) / len(each)


@exact(build=two_heads)
def heads_of_samples(model, x, y, values):
    """Twice as many means as samples: with one sample a batch, it is a rehearsal that first has
    several of a kind.
    """
    each = [
        F.cross_entropy(logits, label)
        for of_head in model(x)
        for logits, label in zip(of_head, y, strict=True)
    ]
    return sum(each) / len(each)


@exact()
def stacked_samples(model, x, y, values):
    each = [F.cross_entropy(model(row), label) for row, label in zip(x, y, strict=True)]
    return torch.stack(each).mean()


@exact()
def penalty_on_weights(model, x, y, values):
    return cross_entropy(model, x, y) + penalty(model)


@exact(build=weighted)
def weights_of_uncertainty(model, x, y, values):
    """Some micro-batches have no targets of the first loss, which is NaN there."""
    first, second, spread, _ = model(x)
    of_first, of_second = spread[0], spread[1]
    labels = y.masked_fill(y == 0, -100)
    loss = torch.exp(-of_first) * F.cross_entropy(first, labels) + of_first
    return loss + F.mse_loss(second, values) / (2 * torch.exp(of_second)) + of_second


@exact(build=weighted)
def a_parameter_as_a_weight(model, x, y, values):
    first, second, _, temperature = model(x)
    loss = temperature * F.cross_entropy(first, y) + (temperature - 1) ** 2
    return loss + 0.5 * (temperature * F.mse_loss(second, values)) + 0.1 * temperature


@exact(build=weighted)
def a_penalized_temperature(model, x, y, values):
    """The node of the penalty is one of the logits, too."""
    first, second, _, temperature = model(x)
    factor = temperature.exp()
    return F.cross_entropy(first * factor, y) + 0.3 * factor + F.mse_loss(second, values)


@exact(build=weighted)
def a_penalized_parameter(model, x, y, values):
    first, second, _, temperature = model(x)
    loss = F.cross_entropy(first * (1 + temperature), y) + 0.3 * temperature
    return loss + F.mse_loss(second, values)


@exact()
def penalty_beside_an_empty_micro_batch(model, x, y, values):
    """Which counts in none of them more than in another one."""
    return over(lambda chosen: chosen.sum().clamp(min=1))(model, x, y, values) + penalty(model)


@exact()
def raised_to_1(model, x, y, values):
    return over(lambda chosen: chosen.sum().clamp(min=1))(model, x, y, values)


@exact()
def raised_to_1_by_python(model, x, y, values):
    return over(lambda chosen: max(int(chosen.sum()), 1))(model, x, y, values)


@exact()
def plus_eps(model, x, y, values):
    return over(lambda chosen: chosen.sum() + 1e-8)(model, x, y, values)


@exact()
def raised_to_1_times_the_dims(model, x, y, values):
    """A micro-batch without a target divides by what one would add to the divisor."""
    squares = (model(x) - values).square() * (y > 0)[:, None]
    return squares.sum() / ((y > 0).sum().clamp(min=1) * 3)


@exact()
def raised_to_1_over_3(model, x, y, values):
    return raised_to_1(model, x, y, values) / 3


@exact()
def a_sum_over_some_divided_by_all(model, x, y, values):
    """A micro-batch without a chosen sample divides by its samples all the same."""
    return over(len)(model, x, y, values)


@exact()
def a_mean_of_some_over_all(model, x, y, values):
    return (losses(model, x, y) * (y > 0)).mean()


@exact(columns=(X, Y, torch.tensor([1.0, -1.0] * 11)[:NUM_SAMPLES, None]))
def advantages_that_cancel(model, x, y, values):
    """Their sum in a micro-batch is no number of targets."""
    return (losses(model, x, y) * values[:, 0]).mean()


@exact()
def policy_gradient(model, x, y, values):
    """Signed weights over some of the elements (REINFORCE, PPO, GRPO)."""
    chosen = y > 0
    weighted = losses(model, x, y) * values[:, 0] * chosen
    return weighted.sum() / chosen.sum().clamp(min=1)


@exact()
def class_weights_and_smoothing(model, x, y, values):
    weight = torch.tensor([1.0, 3.0, 9.0], dtype=x.dtype)
    return cross_entropy(model, x, y, weight=weight, label_smoothing=0.1)


@exact()
def probabilities(model, x, y, values):
    return F.cross_entropy(model(x), values.softmax(-1))


@exact()
def minus_a_sum_of_logarithms(model, x, y, values):
    """Divided by the number of samples, which may be that of the accumulation steps."""
    chosen = model(x).log_softmax(-1)[torch.arange(len(y)), y]
    return -chosen.sum() / len(y)


@exact()
def rows_of_a_mask(model, x, y, values):
    """Without a row left in some micro-batches."""
    chosen = y > 0
    logits = model(x)
    if not chosen.any():
        return logits.sum() * 0
    return F.cross_entropy(logits[chosen], y[chosen])


@exact()
def rows_of_a_mask_without_a_check(model, x, y, values):
    """The mean of nothing is NaN, and its gradient is nothing."""
    chosen = y > 0
    return F.cross_entropy(model(x)[chosen], y[chosen])


@exact()
def a_term_that_some_lack(model, x, y, values):
    logits = model(x)
    loss = F.mse_loss(logits, values)
    if (y > 0).any():
        loss = loss + F.cross_entropy(logits, y.masked_fill(y == 0, -100))
    return loss


def a_first_term_of_the_same_kind_that_some_lack(model, x, y, values):
    logits = model(x)
    terms = [F.cross_entropy(logits, y)]
    if (y > 0).any():
        terms.insert(0, F.cross_entropy(logits, y.masked_fill(y == 0, -100)))
    return sum(terms)


@exact()
def a_mean_of_none_times_0(model, x, y, values):
    """Over all rows, in place of the mean over the rows of a mask."""
    all_losses = losses(model, x, y)
    chosen = y > 1
    return all_losses[chosen].mean() if chosen.any() else all_losses.mean() * 0


@exact()
def a_term_that_is_switched_off(model, x, y, values):
    return cross_entropy(model, x, y) + 0.0 * model(x).pow(2).mean()


@exact()
def terms_in_another_order(model, x, y, values):
    logits = model(x)
    chosen = y > 0
    each = F.cross_entropy(logits, y, reduction="none")
    terms = [F.mse_loss(logits, values), (each * chosen).sum() / chosen.sum().clamp(min=1)]
    if int(y[0]) == 0:
        terms.reverse()
    return terms[0] + terms[1]


@exact(full_body=lambda model, x, y, values: cross_entropy(model, x, y) * 3)
def a_factor(model, x, y, values):
    return 3 * cross_entropy(model, x, y)


@exact()
def multi_margin(model, x, y, values):
    return F.multi_margin_loss(model(x), y)


@exact()
def triplet(model, x, y, values):
    return F.triplet_margin_loss(model(x), values, values.roll(1, dims=1))


def connectionist(model, x, y, **options):
    log_probabilities = model(x)[:, None].expand(-1, 5, -1).log_softmax(-1).transpose(0, 1)
    targets = y[:, None].clamp(min=1).expand(-1, 2)
    lengths = 1 + (y > 0).long()
    return F.ctc_loss(
        log_probabilities, targets, torch.full((len(x),), 5), lengths, **options
    ), lengths


@exact()
def ctc(model, x, y, values):
    return connectionist(model, x, y)[0]


@exact(build=lambda: seeded(TimeFirst()))
def time_first(model, x, y, values):
    return F.cross_entropy(model(x).permute(1, 2, 0), y[:, None].expand(-1, 8))


REFERENCE = classifier().requires_grad_(False)


@exact()
def entropy_of_two_forwards(model, x, y, values):
    """One of them has a gradient of nothing but rounding."""
    entropy = -(model(x).softmax(-1) * model(x).log_softmax(-1)).sum(-1).mean()
    return cross_entropy(model, x, y) - 0.1 * entropy


@exact()
def distillation_from_itself(model, x, y, values):
    """Its gradient is rounding in the first window: a policy and its reference."""
    reference = REFERENCE.to(x.dtype)
    divergence = F.kl_div(model(x).log_softmax(-1), reference(x).softmax(-1), reduction="batchmean")
    return cross_entropy(model, x, y) + divergence


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_terms_of_one_kind_are_right_or_refused(batch_size):
    """Nothing tells them apart where one of them lacks."""
    loop = Loop(a_first_term_of_the_same_kind_that_some_lack)
    try:
        error = loop.error(Accelerator, batch_size)
    except LossNotAdditive:
        return
    assert error < CLOSE


def with_hooks(*hooks: Callable[[Tensor], Tensor | None]) -> nn.Module:
    """A model with hooks on its first parameter."""
    model = classifier()
    for hook in hooks:
        next(model.parameters()).register_hook(hook)
    return model


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def normalised(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


@exact(build=lambda: with_hooks(clamped))
def clamped_gradients(model: nn.Module, x: Tensor, y: Tensor, values: Tensor) -> Tensor:
    return plain(model, x, y, values)


@exact(build=lambda: with_hooks(normalised, clamped))
def normalised_gradients(model: nn.Module, x: Tensor, y: Tensor, values: Tensor) -> Tensor:
    return plain(model, x, y, values)


def with_hook_after_accumulation() -> nn.Module:
    model = classifier()

    def clamp(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    return model


@exact(build=with_hook_after_accumulation)
def clamped_after_accumulation(model: nn.Module, x: Tensor, y: Tensor, values: Tensor) -> Tensor:
    return plain(model, x, y, values)


def backward_code(change: Callable[[Tensor], Tensor | None]) -> type[torch.autograd.Function]:
    """A function that returns its input, and changes the gradient in its backward."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return change(gradient)

    return Changed


class WithBackwardCode(nn.Module):
    """A classifier whose gradient is changed between two layers."""

    def __init__(self, change: Callable[[Tensor], Tensor | None], kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.change, self.kind = change, kind
        if kind == "module":
            self.head.register_full_backward_hook(lambda _, inputs, outputs: self.change_of(inputs))

    def change_of(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        changed = self.change(gradients[0])
        return None if changed is None else (changed,)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        if self.kind == "function":
            hidden = backward_code(self.change).apply(hidden)
        if self.kind == "tensor":
            hidden.register_hook(self.change)
        return self.head(hidden)


CHANGED_BY = ["function", "tensor", "module"]


@pytest.mark.parametrize("kind", CHANGED_BY)
@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("name", ["reversed", "scaled by row", "only seen"])
def test_backward_code_that_treats_samples_alone_is_that_of_the_full_batch(name, batch_size, kind):
    changes = {
        "reversed": lambda gradient: -0.5 * gradient,
        "scaled by row": lambda gradient: gradient * torch.arange(8, device=gradient.device),
        "only seen": lambda gradient: gradient if kind == "function" else None,
    }
    loop = Loop(plain, lambda: WithBackwardCode(changes[name], kind))
    assert loop.error(Accelerator, batch_size) < CLOSE


class WithHeads(nn.Module):
    """A function with a backward of its own, on rows of heads: four for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).tanh().reshape(4 * len(x), 2)
        heads = backward_code(lambda gradient: -0.5 * gradient).apply(heads)
        return self.head(heads.reshape(len(x), 8))


@pytest.mark.parametrize("batch_size", SPLIT)
def test_backward_code_on_rows_of_heads_of_samples_without_targets(batch_size):
    """Their gradient is 0, but in another arrangement of the rows it is that of other samples."""
    labels = LABELS.clone()
    labels[::2] = -100
    loop = Loop(plain, WithHeads, columns=(X, labels, VALUES))
    assert loop.error(Accelerator, batch_size) < CLOSE


@pytest.mark.parametrize("kind", CHANGED_BY)
@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda gradient: gradient / gradient.norm(), "is not linear"),
        (lambda gradient: gradient.clamp(-1e-3, 1e-3), "is not linear"),
        (lambda gradient: F.normalize(gradient, dim=-1), "is not linear"),
        (lambda gradient: gradient * len(gradient), "backward depends on the other samples"),
        (lambda gradient: gradient - gradient.mean(0), "backward depends on the other samples"),
    ],
    ids=["norm", "clamp", "norm of rows", "number of rows", "centred"],
)
def test_backward_code_that_depends_on_the_split_is_refused(change, words, batch_size, kind):
    """At the model's outputs nothing of it shows."""
    with pytest.raises(LossNotAdditive, match=words):
        Loop(plain, lambda: WithBackwardCode(change, kind)).run(Accelerator, batch_size)


def two_proportions(model, x, y, values):
    of_some = over(lambda chosen: chosen.sum().clamp(min=1))
    return cross_entropy(model, x, y) + of_some(model, x, y, values)


@pytest.mark.parametrize("kind", CHANGED_BY)
@pytest.mark.parametrize("change", [normalised, clamped], ids=["norm", "clamp"])
@pytest.mark.parametrize("body", [distillation, two_proportions])
def test_backward_code_that_is_not_linear_is_right_on_the_full_batch(body, change, kind):
    """It gets the gradient of the mean, not of the sum, and that of all terms at once."""
    loop = Loop(body, lambda: WithBackwardCode(change, kind))
    assert loop.error(Accelerator, WINDOW) < CLOSE


UNEQUAL = [  # with other divisors in each micro-batch
    "raised_to_1",
    "rows_of_a_mask",
    "terms_in_another_order",
    "stacked_heads",
    "clamped_gradients",
    "normalised_gradients",
    "penalty_beside_an_empty_micro_batch",
    "policy_gradient",
    "class_weights_and_smoothing",
    "chosen_over_all",
    "chosen_alone_over_all",
    "rows_of_targets",
]


# The smallest micro-batches show of each loss what larger ones show; the layout itself is tried with
# the losses that depend on it most.
EXACT_IN_LAYOUTS = [
    *((name, 2) for name in EXACT),
    *product(UNEQUAL, (8, 4)),
    ("heads_of_samples", 1),
]


@pytest.mark.parametrize(("name", "batch_size"), EXACT_IN_LAYOUTS)
def test_a_loss_is_that_of_the_full_batch(name, batch_size):
    assert EXACT[name].error(Accelerator, batch_size) < CLOSE


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_loss_of_accelerate_is_another_one(name):
    """The control."""
    assert EXACT[name].error(accelerate.Accelerator, 2) > FAR


# -- losses that no split of a window can have


def without_the_first_sample(model, x, y, values):
    return cross_entropy(model, x[1:], y[1:])


def test_outputs_without_a_row_for_each_sample_are_said_not_to_be_tried(caplog):
    Loop(without_the_first_sample).run(Accelerator, 4)
    assert "it was not tried whether" in caplog.text


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(context, losses):
        context.save_for_backward(losses)
        return losses.pow(3).mean()

    @staticmethod
    def backward(context, gradient):
        (losses,) = context.saved_tensors
        return gradient * 3 * losses.pow(2) / losses.numel()


REFUSED: dict[str, tuple[Loop, str]] = {}


def refused(words: str, **options) -> Callable[[Body], Body]:
    """Register a loss that must be refused, and what the message contains."""

    def register(body: Body) -> Body:
        REFUSED[body.__name__] = (Loop(body, **options), words)
        return body

    return register


LEFT_OUT = (
    "factor in the loss is 0 in one iteration and 1 in another|"
    "among some samples of the window, but not among others"
)
EASY = 1.1  # a loss, which some micro-batches of all sizes are below
OTHERS = r"(?s)mean of|sum of.*depends on the other samples.*whole_batch"


@refused(r"divides by 100.*a constant.*num_targets")
def constant_divisor(model, x, y, values):
    return cross_entropy(model, x, y, reduction="sum") / 100


@refused(r"follows neither.*num_targets=n")
def ctc_over_all_labels(model, x, y, values):
    """The numbers of labels are not among what torch saves."""
    loss, lengths = connectionist(model, x, y, reduction="sum")
    return loss / lengths.sum()


@refused(r"one was added to it.*num_targets")
def one_more(model, x, y, values):
    return cross_entropy(model, x, y, reduction="sum") / (len(y) + 1)


@refused(r"factor in the loss is .* in one iteration and .* in another")
def factor_of_the_micro_batch(model, x, y, values):
    chosen = y > 0
    if not chosen.any():
        return model(x).sum() * 0
    share = chosen.sum() / len(chosen)
    return cross_entropy(model, x, y.masked_fill(~chosen, -100)) * share


@refused(r"factor in the loss is .* in one iteration and .* in another")
def penalty_by_the_micro_batch(model, x, y, values):
    return cross_entropy(model, x, y) + penalty(model) * y.float().mean()


@refused(LEFT_OUT)
def left_out_by_a_factor(model, x, y, values):
    """Of micro-batches with a small loss."""
    loss = cross_entropy(model, x, y)
    return loss * (loss.detach() > EASY)


@refused(LEFT_OUT)
def left_out_by_0(model, x, y, values):
    loss = cross_entropy(model, x, y)
    return loss if loss.item() > EASY else loss * 0


@refused(LEFT_OUT)
def left_out_by_a_placeholder(model, x, y, values):
    """Which stands for no targets elsewhere."""
    loss = cross_entropy(model, x, y)
    return loss if loss.item() > EASY else model(x).sum() * 0


@refused(LEFT_OUT)
def second_term_left_out(model, x, y, values):
    logits = model(x)
    loss = F.mse_loss(logits, values)
    second = F.cross_entropy(logits, y)
    return loss + second if second.item() > EASY else loss


@refused("division by a quantity that needs a gradient")
def dice(model, x, y, values):
    probability = model(x).softmax(-1)[:, 1]
    target = (y == 1).to(x.dtype)
    return 1 - 2 * (probability * target).sum() / (probability.sum() + target.sum() + 1)


@refused(OTHERS)
def normalised_advantages(model, x, y, values):
    reward = values[:, 0]
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    return (advantage * losses(model, x, y)).mean()


@refused(OTHERS)
def advantages_normalised_by_numpy(model, x, y, values):
    reward = values[:, 0].numpy()
    advantage = torch.tensor((reward - reward.mean()) / (reward.std() + 1e-4))
    return (advantage * losses(model, x, y)).mean()


@refused(OTHERS, build=square)
def in_batch_negatives(model, x, y, values):
    """Against frozen vectors of the batch."""
    return F.cross_entropy(model(x) @ x.flip(1).T, torch.arange(len(x)))


@refused(OTHERS, build=square)
def in_batch_negatives_by_functional(model, x, y, values):
    """Without a forward of the model."""
    projected = F.linear(x, model.weight)
    return F.cross_entropy(projected @ x.flip(1).T, torch.arange(len(x)))


@refused(OTHERS, build=two_columns, columns=CHANNELS)
def noise_of_blocks(model, x, y, values):
    """Drawn for 2n rows in blocks, which draws take for rows next to each other."""
    both = torch.cat([x, y])
    first, second = model(both + torch.randn_like(both)).chunk(2)
    return F.mse_loss(first, x) + 0.5 * F.mse_loss(second, y)


class Counting(nn.Module):
    """Scales its outputs by how many forwards it had."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.head(x) * (1 + 1e-4 * self.num_forwards)


@refused("leaves in Counting.num_forwards changes what the next one returns", build=Counting)
def forwards_counted_by_the_model(model, x, y, values):
    """Too little to show in the gradient of a sample."""
    return cross_entropy(model, x, y)


class Centred(nn.Module):
    """A loss on outputs whose slow centre is subtracted, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits - self.centre, y)
        self.centre = 0.9999 * self.centre + 0.0001 * logits.detach().mean(0)
        return loss


class WithCentre(nn.Linear):
    """Has its loss in a list, as a loop has it in a variable: it is no part of the model."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.criterion = [Centred()]


@refused("a forward of Centred leaves in centre changes what the next one", build=WithCentre)
def a_centre_that_the_loss_keeps(model, x, y, values):
    """Too little to show in the gradient of a sample."""
    return model.criterion[0](model(x), y)


@refused(OTHERS, build=with_batch_norm)
def batch_norm(model, x, y, values):
    return cross_entropy(model, x, y)


@refused(OTHERS, build=batch_norm_last)
def batch_norm_in_a_linear_loss(model, x, y, values):
    """Whose gradient is the same for all outputs."""
    return (model(x) * values).sum(-1).mean()


@refused(OTHERS)
def mixed_with_its_neighbour(model, x, y, values):
    return cross_entropy(model, 0.7 * x + 0.3 * x.flip(0), y)


@refused(OTHERS)
def hardest_half(model, x, y, values):
    return losses(model, x, y).topk(max(1, len(y) // 2)).values.mean()


@refused("class weights differ")
def weights_of_the_batch(model, x, y, values):
    counts = torch.bincount(y, minlength=3)
    return cross_entropy(model, x, y, weight=1 / (counts + 1.0))


@refused("maximum over the batch")
def largest(model, x, y, values):
    return losses(model, x, y).max()


@refused("square root of a mean")
def root_of_a_mean(model, x, y, values):
    return F.mse_loss(model(x), values).sqrt()


@refused("custom autograd function.*Cubed")
def custom_function(model, x, y, values):
    return Cubed.apply(losses(model, x, y))


@refused(OTHERS)
def weighted_by_place(model, x, y, values):
    """By the place of a sample in its micro-batch, which is the window where it is rehearsed."""
    return (losses(model, x, y) * torch.arange(len(x))).mean()


@refused("is a sum, not a mean")
def a_sum(model, x, y, values):
    return losses(model, x, y).sum()


@refused("needs no gradient")
def detached(model, x, y, values):
    return cross_entropy(model, x, y).detach()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("batch_size", IN_TWO_OR_FOUR)
def test_a_loss_that_depends_on_the_split_is_refused(name, batch_size):
    """In six windows: some show it in the first ones, some only where they are not rehearsed."""
    loop, words = REFUSED[name]
    loop.columns = tuple(torch.cat([column[:16]] * 3) for column in loop.columns)
    with pytest.raises(LossNotAdditive, match=words):
        loop.run(Accelerator, batch_size)


@pytest.mark.parametrize("name", ["normalised_advantages", "batch_norm", "hardest_half"])
def test_such_a_loss_depends_on_the_split_in_accelerate(name):
    """The control."""
    loop, _ = REFUSED[name]
    loop.columns = tuple(column[:16] for column in loop.columns)
    weights = loop.run(accelerate.Accelerator, 8)
    assert (loop.run(accelerate.Accelerator, 2) - weights).norm() > FAR * weights.norm()


@pytest.mark.slow("compiles")
def test_a_compiled_model_is_refused():
    """Its loss is inside of the compiled graph."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = classifier()

        def forward(self, x, y):
            return F.cross_entropy(self.layers(x), y)

    model = torch.compile(WithLoss(), backend="aot_eager")
    loop = Loop(lambda model, x, y, values: model(x, y), lambda: model)
    with pytest.raises(LossNotAdditive, match="compiled graph"):
        loop.run(Accelerator, 4)


# -- factors that change


def annealed(
    batch_size: int, kind: type = Accelerator, *, counts_iterations: bool = False
) -> Tensor:
    """A factor that follows the updates."""
    done = [0]

    def iteration(accelerator, model, optimizer, x, y, values):
        logits = model(x)
        factor = 0.2 + 0.3 * done[0]
        accelerator.backward(F.mse_loss(logits, values) + factor * F.cross_entropy(logits, y))
        done[0] += counts_iterations or accelerator.sync_gradients

    return Loop(cross_entropy, iteration=iteration).run(kind, batch_size)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_factor_may_change_between_windows(batch_size):
    expected = annealed(8, accelerate.Accelerator)
    assert (annealed(batch_size) - expected).norm() < CLOSE * expected.norm()


def test_a_factor_that_drifts_within_a_window_is_refused():
    seen = [0]

    def drifting(model, x, y, values):
        seen[0] += 1
        return cross_entropy(model, x, y) * (1 + 0.1 * seen[0])

    with pytest.raises(LossNotAdditive, match="factor"):
        Loop(drifting).run(Accelerator, 2)


def test_a_constant_divisor_is_refused_beside_draws_that_are_allowed():
    """The rehearsal is not compared then, but has a divisor of its own."""

    def divided_by_a_constant(model, x, y, values):
        np.random.rand()
        return cross_entropy(model, x, y, reduction="sum") / 100

    with pytest.raises(LossNotAdditive, match="divides by 100"):
        Loop(divided_by_a_constant, options={"allow_split_dependent_randomness": True}).run(
            Accelerator, 4
        )


def test_a_loss_that_only_the_rehearsal_lacks_is_refused():
    """Also when the window is computed again, padded."""
    seen = [0]

    def late(model, x, y, values):
        seen[0] += 1
        return model(x).sum() * 0 if seen[0] % 4 == 1 else cross_entropy(model, x, y)

    with pytest.raises(LossNotAdditive, match="but not among others"):
        Loop(late).run(Accelerator, 2)


def test_a_mean_that_is_switched_off_in_some_micro_batches_is_refused():
    """In the fourth window, which is not rehearsed."""
    seen = [0]

    def switched(model, x, y, values):
        seen[0] += 1
        return cross_entropy(model, x, y) * (seen[0] <= 14 or seen[0] % 2)

    loop = Loop(switched, columns=tuple(torch.cat([column[:16]] * 3) for column in (X, Y, VALUES)))
    with pytest.raises(LossNotAdditive, match=r"factor in the loss is 0 in .* outputs.sum"):
        loop.run(Accelerator, 2)


def pairs_in_one_tensor(rows: list[list[Tensor]]) -> dict[str, Tensor]:
    """As DreamBooth's collate function: instances, then classes, with masks."""
    x = torch.stack([row[0] for row in rows])
    both = torch.cat([x, x.flip(1)])
    return {"both": both, "attention_mask": torch.ones_like(both)}


def pairs_in_two_tensors(rows: list[list[Tensor]]) -> dict[str, Tensor]:
    x = torch.stack([row[0] for row in rows])
    return {"x": x, "classes": x.flip(1)}


def loss_of_both(model, batch, noise: float) -> Tensor:
    both = batch["both"]
    instances, classes = model(both + noise * torch.randn_like(both)).chunk(2)
    return instances.square().mean() + classes.exp().mean()


def loss_of_each(model, batch, noise: float) -> Tensor:
    x = batch["x"]
    instances = model(x + noise * torch.randn_like(x))
    return instances.square().mean() + model(batch["classes"]).exp().mean()


def train_pairs(collate: Callable, body: Callable, batch_size: int, noise: float = 0.1) -> Tensor:
    reset_states()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=WINDOW // batch_size)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(X), batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(body(model, batch, noise))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def test_two_rows_of_a_sample_in_one_tensor_are_refused_with_a_remedy():
    """The remedy, followed, is exact."""
    with pytest.raises(DataError, match="return two tensors, and call the model for each"):
        train_pairs(pairs_in_one_tensor, loss_of_both, 2)
    whole = train_pairs(pairs_in_two_tensors, loss_of_each, WINDOW)
    split = train_pairs(pairs_in_two_tensors, loss_of_each, 2)
    assert (split - whole).norm() < CLOSE * whole.norm()


def test_state_that_the_loop_keeps_is_refused():
    """As the centre of DINO, or a queue of negatives."""
    centre = torch.zeros(3)

    def centred(model, x, y, values):
        logits = model(x)
        loss = F.cross_entropy(logits - centre, y)
        centre.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        return loss

    with pytest.raises(LossNotAdditive, match="state that the loop keeps"):
        Loop(centred).run(Accelerator, 2)


# -- widths


LENGTHS = torch.tensor([3, 9, 4, 2, 12, 5, 7, 3, 4, 6, 2, 10, 5, 3, 8, 4, 11, 2, 3, 6, 5])


class Texts(Dataset):
    """Tokens of different lengths."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (int(self.lengths[index]),), generator=generator)


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def width_divisor(model, tokens, mask):
    """Divides by the padded width of the micro-batch."""
    each = model(tokens).pow(2).mean(-1) * mask
    return (each.sum(1) / each.shape[1]).mean()


def mean_with_padding(model, tokens, mask):
    return (model(tokens).pow(2).mean(-1) * mask).mean()


def mean_of_tokens(model, tokens, mask):
    return F.cross_entropy(model(tokens)[mask], tokens[mask])


def mean_of_texts(model, tokens, mask):
    each = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none") * mask
    return (each.sum(1) / mask.sum(1)).mean()


def with_targets(texts: list[Tensor]) -> dict[str, Any]:
    """As of detection: a list with the targets of each sample, of another number each."""
    return {**padded(texts), "targets": tuple({"tokens": text} for text in texts)}


def width_divisor_of_targets(model, tokens, mask, targets):
    weights = torch.stack([target["tokens"].float().mean() for target in targets])
    return (model(tokens).pow(2).mean((1, 2)) * weights).mean()


def train_texts(kind, batch_size, body, lengths=LENGTHS, collate=padded):
    reset_states()
    accelerator = kind(gradient_accumulation_steps=WINDOW // batch_size)
    model = seeded(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Texts(lengths), batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(body(model, **batch))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def mean_with_padding_of_some(model, tokens, mask):
    """Short texts have no target, so that they do not show that the width matters."""
    has_target = mask.sum(1, keepdim=True) > 3
    return (model(tokens).pow(2).mean(-1) * mask * has_target).mean(1).mean()


def two_terms_of_some(model, tokens, mask):
    """Only the second term depends on the width; few texts have it."""
    logits = model(tokens)
    has_term = mask.sum(1) > 6
    loss = F.cross_entropy(logits[mask], tokens[mask])
    if not has_term.any():
        return loss
    pooled = (logits * mask[..., None]).mean(1)
    return loss + F.cross_entropy(pooled[has_term], tokens[has_term, 0])


SHORT_FIRST = LENGTHS[[0, 3, 2, 1, *range(4, NUM_SAMPLES)]]
ORDERS = {"shuffled": LENGTHS, "sorted": LENGTHS.sort().values, "short ones first": SHORT_FIRST}


@pytest.mark.parametrize("lengths", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    ("body", "batch_size"),
    [
        (mean_with_padding_of_some, 2),
        (mean_with_padding_of_some, 1),
        (two_terms_of_some, 2),
        (two_terms_of_some, 1),
        (width_divisor, 4),
        (width_divisor, 2),
        (width_divisor, 1),
        (mean_with_padding, 2),
        (mean_of_tokens, 2),
        (mean_of_texts, 2),
    ],
)
def test_the_width_of_a_micro_batch_does_not_matter(body, batch_size, lengths):
    """Sorted, the first micro-batches have one width."""
    expected = train_texts(accelerate.Accelerator, 8, body, lengths)
    learnt = (expected - flat(seeded(Tagger()))).norm()
    trained = train_texts(Accelerator, batch_size, body, lengths)
    assert (trained - expected).norm() < CLOSE * learnt


@pytest.mark.parametrize("batch_size", [2, 1])
def test_lists_of_samples_are_padded_with_their_window(batch_size):
    options = {"body": width_divisor_of_targets, "collate": with_targets}
    expected = train_texts(accelerate.Accelerator, 8, **options)
    learnt = (expected - flat(seeded(Tagger()))).norm()
    trained = train_texts(Accelerator, batch_size, **options)
    assert (trained - expected).norm() < CLOSE * learnt


def mean_of_chosen(model, x, y, values):
    return losses(model, x, y)[(y > 0) | (values[:, 0] > 0)].mean()


def of_samples(accelerator, model, optimizer, *samples):
    accelerator.backward(mean_of_chosen(model, *map(torch.stack, zip(*samples, strict=True))))


def test_a_batch_that_is_a_list_of_samples():
    loop = Loop(mean_of_chosen, iteration=of_samples, collate=list)
    assert loop.error(Accelerator, 4) < CLOSE


@pytest.mark.parametrize("body", [width_divisor, mean_with_padding, mean_of_tokens])
def test_the_width_of_a_micro_batch_matters_in_accelerate(body):
    """The control."""
    expected = train_texts(accelerate.Accelerator, 8, body)
    learnt = (expected - flat(seeded(Tagger()))).norm()
    assert (train_texts(accelerate.Accelerator, 2, body) - expected).norm() > FAR * learnt


LONG_FIRST = torch.tensor([9, 3, 5, 4, 9, 6, 2, 7] * 2 + [9, 3, 5, 4, 9])
LONG_THIRD = torch.tensor([3, 4, 9, 4, 9, 6, 2, 7] * 2 + [9, 3, 5, 4, 9])


@pytest.mark.parametrize(("lengths", "is_told"), [(LONG_FIRST, True), (LONG_THIRD, False)])
def test_widths_that_a_loop_by_hand_never_compared_are_told(lengths, is_told, caplog):
    """The first two samples are rehearsed, then computed with the third one."""
    reset_states()
    accelerator = Accelerator()
    model = seeded(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Texts(lengths), 2, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        accelerator.backward(mean_of_texts(model, **batch) / 4)
        if number % 4 == 3 or number == len(loader) - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert ("not tried whether padding" in caplog.text) == is_told


@pytest.mark.parametrize(("batch_size", "is_told"), [(WINDOW, False), (2, True)])
def test_batches_that_a_loop_by_hand_skips_are_told(batch_size, is_told, caplog):
    """The full batch has other shortest texts than its micro-batches."""
    reset_states()
    accelerator = Accelerator()
    model = seeded(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Texts(LENGTHS), batch_size, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    number = 0
    for batch in loader:
        if batch["mask"].sum(1).min() < 3:
            continue
        accelerator.backward(mean_of_texts(model, **batch) / (WINDOW // batch_size))
        number += 1
        if number * batch_size % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert ("ran no backward for a batch" in caplog.text) == is_told


def width_divisor_of_short_texts(model, tokens, mask):
    """Divides the losses of short texts by the padded width, those of others by their length."""
    each = (model(tokens).pow(2).mean(-1) * mask).sum(1)
    lengths = mask.sum(1)
    return (each / torch.where(lengths < 7, mask.shape[1], lengths)).mean()


def test_padding_that_matters_for_later_samples_only_is_reported(caplog):
    """No sample of the windows before shows it; there it may have mattered in others."""
    lengths = LENGTHS.clone()
    lengths[:16] = lengths[:16].clamp(min=7)
    with caplog.at_level("WARNING"):
        train_texts(Accelerator, 2, width_divisor_of_short_texts, lengths)
    (message,) = [text for text in caplog.messages if "padding changes" in text]
    assert "the updates so far" in message
    caplog.clear()
    train_texts(Accelerator, 2, width_divisor)  # found out in the first window
    assert "padding changes" not in caplog.text


def values_of_class_1(model, x, y, values):
    loss = F.cross_entropy(model(x), y)
    chosen = y == 1
    return loss + F.mse_loss(model(x[chosen]), values[chosen]) if chosen.any() else loss


def test_windows_that_are_computed_again_are_told_once(caplog):
    """There are more iterations than batches, so a loop must count updates."""
    assert Loop(values_of_class_1).error(Accelerator, 2) < CLOSE
    assert caplog.text.count("more iterations than batches, as it is computed once more") == 1


# -- draws


NUMBERED = (X, Y, torch.arange(NUM_SAMPLES, dtype=torch.float32)[:, None])


class Draws:
    """Keeps what a loop draws for each sample."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        self.draw = draw
        self.by_sample: dict[int, Tensor] = {}

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
        noise = self.draw(x)
        for number, row in zip(numbers[:, 0].long().tolist(), noise, strict=True):
            self.by_sample[number] = row.clone()  # the last one, where a window is repeated
        return cross_entropy(model, x + noise, y)

    def replayed(self, model: nn.Module, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
        rows = [self.by_sample[number] for number in numbers[:, 0].long().tolist()]
        return cross_entropy(model, x + torch.stack(rows).to(x.dtype), y)


def own_generator(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(3))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "time steps": lambda x: torch.randint(0, 1000, (len(x), 1)) / 1000 * torch.ones_like(x),
    "generator": own_generator,
    "distribution": lambda x: torch.distributions.Normal(0.0, 1.0).sample(x.shape),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
    "beta": lambda x: torch.distributions.Beta(2.0, 2.0).sample((len(x), 1)).expand_as(x),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.3),
    "uniform and normal": lambda x: torch.rand(len(x), 1) * torch.randn(x.shape),
    "in nn.init": lambda x: nn.init.trunc_normal_(torch.empty_like(x)),
    "gumbel": lambda x: F.gumbel_softmax(torch.ones_like(x)),
    "columns": lambda x: torch.randn(6, len(x)).T,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_belong_to_samples(name):
    """The numbers are those of the full batch, and so is the update."""
    whole = Draws(DRAWS[name])
    loop = Loop(whole, columns=NUMBERED, full_body=whole.replayed)
    loop.run(Accelerator, 8)
    assert not torch.equal(whole.by_sample[0], whole.by_sample[1])
    expected = loop.full_batch()
    for batch_size in SPLIT:
        split = Draws(DRAWS[name])
        weights = Loop(split, columns=NUMBERED).run(Accelerator, batch_size)
        assert all(torch.equal(whole.by_sample[i], split.by_sample[i]) for i in range(NUM_SAMPLES))
        assert (weights - expected).norm() < CLOSE * (expected - flat(classifier())).norm()


def test_draws_of_accelerate_do_not():
    """The control."""
    whole = Draws(DRAWS["randn_like"])
    split = Draws(DRAWS["randn_like"])
    Loop(whole, columns=NUMBERED).run(accelerate.Accelerator, 8)
    Loop(split, columns=NUMBERED).run(accelerate.Accelerator, 2)
    assert not any(torch.equal(whole.by_sample[i], split.by_sample[i]) for i in range(1, 8))


def shared_draw(x: Tensor) -> Tensor:
    return torch.rand(1) * torch.ones_like(x)


def noise_of_a_weight(model, x, y, values):
    """One number for each weight, which all samples share; the first dim is that of a window."""
    weight = model[0].weight
    noisy = F.linear(x, weight + 0.1 * torch.randn_like(weight), model[0].bias)
    return F.cross_entropy(model[2](noisy.tanh()), y)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_draws_that_all_samples_share(batch_size):
    seen = []

    def body(model, x, y, values):
        noise = shared_draw(x)
        seen.append(float(noise[0, 0]))
        return cross_entropy(model, x + noise, y)

    weights = Loop(body).run(Accelerator, 8)
    assert (Loop(body).run(Accelerator, batch_size) - weights).norm() < CLOSE * weights.norm()
    assert len({*seen}) == 3  # one for each window


@pytest.mark.parametrize("batch_size", SPLIT)
def test_noise_of_a_weight_is_that_of_the_full_batch(batch_size):
    weights = Loop(noise_of_a_weight).run(Accelerator, 8)
    split = Loop(noise_of_a_weight).run(Accelerator, batch_size)
    assert (split - weights).norm() < CLOSE * weights.norm()


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_draw_that_only_some_micro_batches_make(batch_size):
    """The numbers of the draws after it are those of the full batch, or it is refused."""

    def body(model, x, y, values):
        if (y == 2).any():
            x = x + 0.1 * torch.randn_like(x) * (y == 2)[:, None]
        return cross_entropy(model, x + 0.5 * torch.randn_like(x), y)

    loop = Loop(body)
    weights = loop.run(Accelerator, 8)
    try:
        split = loop.run(Accelerator, batch_size)
    except HfGaError:
        return
    assert (split - weights).norm() < CLOSE * weights.norm()


def permuted(model, x, y, values):
    """Mixup."""
    partner = torch.randperm(len(x))
    return cross_entropy(model, 0.7 * x + 0.3 * x[partner], y)


RANDN_LIKE = torch.randn_like


def drawn_by_a_name_of_before(model, x, y, values):
    """`from torch import randn_like`: not the function that takes its place."""
    return cross_entropy(model, x + RANDN_LIKE(x), y)


def drawn_by_python(model, x, y, values):
    return cross_entropy(model, x * random.random(), y)


def drawn_by_numpy(model, x, y, values):
    return cross_entropy(model, x + torch.tensor(np.random.rand(*x.shape), dtype=x.dtype), y)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (permuted, r"randperm of shape \[\d\] at .*test_loops.py:\d+"),
        (drawn_by_a_name_of_before, "generator of torch"),
        (drawn_by_python, "generator of random"),
        (drawn_by_numpy, r"generator of NumPy|numpy"),
    ],
)
@pytest.mark.parametrize("batch_size", SPLIT)
def test_draws_without_samples_are_refused(body, words, batch_size):
    with pytest.raises(UnkeyedRandomness, match=words):
        Loop(body).run(Accelerator, batch_size)


NUMPY_GENERATOR = np.random.default_rng(0)


def drawn_by_an_own_generator_of_numpy(model, x, y, values):
    noise = torch.tensor(NUMPY_GENERATOR.normal(size=x.shape), dtype=x.dtype)
    return cross_entropy(model, x + noise, y)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_generators_that_nobody_sees_are_noticed(batch_size):
    with pytest.raises(LossNotAdditive):
        Loop(drawn_by_an_own_generator_of_numpy).run(Accelerator, batch_size)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand], ids=["torch", "numpy"])
def test_draws_of_a_collate_function_belong_to_samples(draw):
    """It is called for each sample, or refused."""

    def collate(rows):
        x, y, values = map(torch.stack, zip(*rows, strict=True))
        noise = torch.as_tensor(draw(len(x)), dtype=x.dtype)
        return x + noise[:, None], y, values

    weights = {}
    for batch_size in LAYOUTS:
        loop = Loop(lambda model, x, y, values: cross_entropy(model, x, y), collate=collate)
        weights[batch_size] = loop.run(Accelerator, batch_size)
    for batch_size in SPLIT:
        assert (weights[batch_size] - weights[8]).norm() < CLOSE * weights[8].norm()


def test_a_collate_function_that_mixes_samples_belongs_to_the_window():
    """A permutation of one sample draws nothing: micro-batches of one do not show it, which all are
    in windows without a rehearsal.
    """

    def mixed(rows):
        x, y, values = map(torch.stack, zip(*rows, strict=True))
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y, values

    columns = tuple(column.repeat_interleave(2, dim=0) for column in (X, Y, VALUES))
    loop = Loop(plain, columns=columns, collate=mixed)
    expected = loop.run(Accelerator, WINDOW)
    for batch_size in (2, 1):
        assert (loop.run(Accelerator, batch_size) - expected).norm() < CLOSE * expected.norm()


def packed(model, x, y, values):
    """As `pack_padded_sequence`, which needs the longest sample first."""
    assert torch.equal(values[:, 0].sort(descending=True).values, values[:, 0])
    return cross_entropy(model, x, y)


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_a_collate_function_may_sort_the_samples_of_its_batch(batch_size):
    """Windows are collated as one then, as rows are those of other samples in each split."""

    def longest_first(rows):
        rows = sorted(rows, key=lambda row: -float(row[2][0]))
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    loop = Loop(packed, full_body=plain, collate=longest_first)
    assert loop.error(Accelerator, batch_size) < CLOSE


def with_count(rows):
    """How many samples have a class above 0, for the loss."""
    x, y, values = map(torch.stack, zip(*rows, strict=True))
    return x, y, values, int((y > 0).sum())


def sum_over_count(accelerator, model, optimizer, x, y, values, count):
    accelerator.backward((losses(model, x, y) * (y > 0)).sum() / max(count, 1))


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_count_of_the_collate_function_is_that_of_the_micro_batch(batch_size):
    """Also in a rehearsal, which is padded to the window: counted there, it was a constant."""
    counted = over(lambda mask: mask.sum().clamp(min=1))
    loop = Loop(counted, iteration=sum_over_count, collate=with_count)
    assert loop.error(Accelerator, batch_size) < CLOSE


def passed_count(accelerator, model, optimizer, x, y, values, count):
    loss = (losses(model, x, y) * (y > 0)).sum()
    accelerator.backward(loss, num_targets=count)


def test_a_count_of_a_random_collate_function_would_be_that_of_the_window():
    """It is exact where the window is one micro-batch."""

    def masked(rows):
        x, y, values = map(torch.stack, zip(*rows, strict=True))
        y = y.masked_fill(torch.rand(len(y)) < 0.4, 0)
        return x, y, values, int((y > 0).sum())

    loop = Loop(plain, iteration=passed_count, collate=masked)
    loop.run(Accelerator, WINDOW)
    with pytest.raises(DataError, match="'3' is one value that depends on the samples"):
        loop.run(Accelerator, WINDOW // 2)


# -- calls of the loop


def cross_entropy_and_penalty(model, x, y, values):
    return cross_entropy(model, x, y) + penalty(model)


def two_backwards(accelerator, model, optimizer, x, y, values):
    accelerator.backward(F.cross_entropy(model(x), y))
    accelerator.backward(F.mse_loss(model(x), values))


def penalty_last(accelerator, model, optimizer, x, y, values):
    accelerator.backward(cross_entropy(model, x, y))
    accelerator.backward(penalty(model))


def penalty_first(accelerator, model, optimizer, x, y, values):
    accelerator.backward(penalty(model))
    accelerator.backward(cross_entropy(model, x, y))


def two_backwards_of_some(accelerator, model, optimizer, x, y, values):
    """The second one only where there is a target."""
    logits = model(x)
    accelerator.backward(F.mse_loss(logits, values), retain_graph=True)
    if (y > 0).any():
        accelerator.backward(F.cross_entropy(logits, y.masked_fill(y == 0, -100)))


def zero_grad_first(accelerator, model, optimizer, x, y, values):
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model, x, y))


def zero_grad_before_the_second(accelerator, model, optimizer, x, y, values):
    """Only the second loss counts."""
    accelerator.backward(F.mse_loss(model(x), values))
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model, x, y))


def sum_of_two(model, x, y, values):
    return F.cross_entropy(model(x), y) + F.mse_loss(model(x), values)


def sum_of_some(model, x, y, values):
    return F.mse_loss(model(x), values) + cross_entropy(model, x, y.masked_fill(y == 0, -100))


def plain(model, x, y, values):
    return cross_entropy(model, x, y)


HAS_TARGETS = Y.clone()
HAS_TARGETS[::8] = 1  # in every window, not in every micro-batch
CALLS = [
    (two_backwards, sum_of_two),
    (penalty_last, cross_entropy_and_penalty),
    (penalty_first, cross_entropy_and_penalty),
    (two_backwards_of_some, sum_of_some),
    (zero_grad_first, plain),
]


@pytest.mark.parametrize(("iteration", "body"), CALLS)
@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_calls_of_the_loop(iteration, body, batch_size):
    loop = Loop(body, iteration=iteration, columns=(X, HAS_TARGETS, VALUES))
    assert loop.error(Accelerator, batch_size) < CLOSE


WINDOW_OF = torch.arange(NUM_SAMPLES) // WINDOW


@pytest.mark.parametrize("windows", [{1, 2}, {0, 2}], ids=["later", "not always"])
@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_a_second_backward_in_some_windows(batch_size, windows):
    def iteration(accelerator, model, optimizer, x, y, values, window):
        accelerator.backward(cross_entropy(model, x, y))
        if int(window[0]) in windows:
            accelerator.backward(F.mse_loss(model(x), values))

    def body(model, x, y, values, window):
        loss = cross_entropy(model, x, y)
        return loss + F.mse_loss(model(x), values) if int(window[0]) in windows else loss

    loop = Loop(body, iteration=iteration, columns=(X, Y, VALUES, WINDOW_OF))
    assert loop.error(Accelerator, batch_size) < CLOSE


@pytest.mark.parametrize("is_prepared", [True, False], ids=["accelerator", "torch"])
@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_clipping_after_fewer_backwards_is_right_or_refused(batch_size, is_prepared):
    """Only the first sample of each window has a target of the second loss."""

    def iteration(accelerator, model, optimizer, *batch):
        two_backwards_of_some(accelerator, model, optimizer, *batch)
        if accelerator.sync_gradients:
            clip = accelerator.clip_grad_norm_ if is_prepared else nn.utils.clip_grad_norm_
            clip(model.parameters(), 0.1)

    targets = torch.zeros_like(Y)
    targets[::WINDOW] = 1
    loop = Loop(plain, iteration=iteration, columns=(X, targets, VALUES))
    expected = loop.run(accelerate.Accelerator, WINDOW)
    try:
        weights = loop.run(Accelerator, batch_size)
    except ConfigError as refusal:
        assert "clip with accelerator.clip_grad_norm_" in str(refusal)
        assert not is_prepared
        return
    assert (weights - expected).norm() < CLOSE * (expected - flat(classifier())).norm()


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_clipping_between_two_backwards_is_refused(batch_size):
    def iteration(accelerator, model, optimizer, x, y, values):
        accelerator.backward(cross_entropy(model, x, y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        accelerator.backward(F.mse_loss(model(x), values))

    with pytest.raises(ConfigError, match="gradients changed between two calls"):
        Loop(plain, iteration=iteration).run(Accelerator, batch_size)


def test_zero_grad_first_in_accelerate():
    """The control."""
    loop = Loop(plain, iteration=zero_grad_first)
    assert loop.error(accelerate.Accelerator, 2) > FAR


@pytest.mark.parametrize("batch_size", [WINDOW, *IN_TWO_OR_FOUR])
def test_zero_grad_between_two_backwards_is_right_or_refused(batch_size):
    loop = Loop(plain, iteration=zero_grad_before_the_second)
    try:
        error = loop.error(Accelerator, batch_size)
    except ConfigError as refusal:
        assert "optimizer.zero_grad() came between" in str(refusal)
        return
    assert error < CLOSE


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_clipping_every_time(batch_size):
    def iteration(accelerator, model, optimizer, x, y, values):
        accelerator.backward(cross_entropy(model, x, y))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(
            max((p.grad.norm() for p in model.parameters() if p.grad is not None), default=0)
        )

    norms = []
    expected = Loop(plain, iteration=iteration).run(accelerate.Accelerator, 8)
    weights = Loop(plain, iteration=iteration).run(Accelerator, batch_size)
    assert max(norms) <= 0.1
    assert (weights - expected).norm() < CLOSE * expected.norm()


def backward_of_the_loss(accelerator, model, optimizer, x, y, values):
    cross_entropy(model, x, y).backward()


def divided_by_the_steps(accelerator, model, optimizer, x, y, values):
    steps = accelerator.gradient_accumulation_steps
    accelerator.backward(cross_entropy(model, x, y) / steps)


def a_number(accelerator, model, optimizer, x, y, values):
    accelerator.backward(cross_entropy(model, x, y).item())


def multiplied_by_the_steps(accelerator, model, optimizer, x, y, values):
    steps = accelerator.gradient_accumulation_steps
    accelerator.backward(steps * cross_entropy(model, x, y))


@pytest.mark.parametrize(
    ("iteration", "words"),
    [
        (backward_of_the_loss, r"accelerator\.backward"),
        (a_number, "backward takes a loss with one element, got float"),
        (divided_by_the_steps, "divided by .* accumulation steps.*leave the division out"),
        (multiplied_by_the_steps, "multiplied by .* accumulation steps.*leave the factor out"),
    ],
)
@pytest.mark.parametrize("batch_size", SPLIT)
def test_calls_that_are_refused(iteration, words, batch_size):
    with pytest.raises(HfGaError, match=words):
        Loop(plain, iteration=iteration).run(Accelerator, batch_size)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("num_samples", [8, 21])
@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_schedule_that_steps_every_micro_batch_is_refused(batch_size, num_samples):
    """Also in a run of one window."""

    def iteration(accelerator, model, optimizer, x, y, values):
        accelerator.backward(cross_entropy(model, x, y))
        optimizer.step()
        schedules.setdefault(
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda update: 0.9**update),
        ).step()

    schedules = {}
    columns = tuple(column[:num_samples] for column in (X, Y, VALUES))
    with pytest.raises(ConfigError, match="lr of the optimizer changed"):
        Loop(plain, iteration=iteration, columns=columns).run(Accelerator, batch_size)


def make_step(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, WINDOW, 0.1)


def make_sequence(optimizer):
    steps = [make_step(optimizer), make_step(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, steps, [1])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("make", [make_step, make_sequence])
@pytest.mark.parametrize("steps_when", ["iteration", "update"])
def test_a_schedule_that_changes_between_windows_only(steps_when, make, batch_size):
    """Refused before it changes the learning rate, if it steps in each iteration."""

    def iteration(accelerator, model, optimizer, x, y, values):
        if not schedules:
            schedules.append(make(optimizer.optimizer))
        accelerator.backward(cross_entropy(model, x, y))
        if steps_when == "iteration" or accelerator.sync_gradients:
            optimizer.step()
            schedules[0].step()

    schedules = []
    loop = Loop(plain, iteration=iteration)
    if steps_when == "iteration":
        with pytest.raises(ConfigError, match="steps in several iterations of one window"):
            loop.run(Accelerator, batch_size)
    else:
        loop.run(Accelerator, batch_size)
        assert schedules[0].last_epoch == 3


def scheduled(name, value_of):
    """A loop that sets an option of the optimizer by hand, by the number of what `value_of` says:
    iterations or updates.
    """
    counts = {"iterations": 0, "updates": 0}

    def iteration(accelerator, model, optimizer, x, y, values):
        for group in optimizer.param_groups:
            group[name] = 0.05 + 0.01 * counts[value_of]
        accelerator.backward(cross_entropy(model, x, y))
        counts["iterations"] += 1
        counts["updates"] += accelerator.sync_gradients

    return iteration


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
@pytest.mark.parametrize("batch_size", SPLIT)
def test_options_that_the_loop_sets_in_every_iteration(batch_size, name):
    """By hand: right by the number of updates, refused by the number of iterations."""
    full, split = (
        Loop(plain, iteration=scheduled(name, "updates")).run(Accelerator, size)
        for size in (WINDOW, batch_size)
    )
    learnt = (full - flat(classifier())).norm()
    assert (split - full).norm() < CLOSE * learnt
    with pytest.raises(ConfigError, match=f"{name} of the optimizer changed from"):
        Loop(plain, iteration=scheduled(name, "iterations")).run(Accelerator, batch_size)


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_a_part_that_is_frozen_between_windows_is_right_or_refused(batch_size):
    """As loops of GANs do with the discriminator."""

    def iteration(accelerator, model, optimizer, x, y, values):
        model[0].requires_grad_(True)
        accelerator.backward(cross_entropy(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(False)

    loop = Loop(plain, iteration=iteration)
    try:
        error = loop.error(Accelerator, batch_size)
    except ConfigError as refusal:
        assert "requires_grad" in str(refusal)
        return
    assert error < CLOSE


# -- two models, two optimizers, two loaders, nested batches


class Adversaries:
    """A generator and a discriminator, each with its optimizer."""

    def __init__(self, order: str) -> None:
        self.order = order

    def run(self, kind: type, batch_size: int) -> Tensor:
        accelerator, loader, *prepared = self.prepared(kind, batch_size)
        for (x,) in loader:
            with accelerator.accumulate(*self.models):
                self.iterate(accelerator, x, *prepared)
        return flat(*self.models)

    def run_by_hand(self, kind: type) -> Tensor:
        accelerator, loader, *prepared = self.prepared(kind, WINDOW)
        for (x,) in loader:
            self.iterate(accelerator, x, *prepared)
        return flat(*self.models)

    def prepared(self, kind: type, batch_size: int) -> tuple:
        reset_states()
        accelerator = kind(gradient_accumulation_steps=WINDOW // batch_size)
        generator = square()
        critic = seeded(nn.Linear(6, 1))
        of_generator = torch.optim.SGD(generator.parameters(), lr=LEARNING_RATE)
        of_critic = torch.optim.SGD(critic.parameters(), lr=LEARNING_RATE)
        loader = DataLoader(TensorDataset(X[:16]), batch_size)
        generator, critic, of_generator, of_critic, loader = accelerator.prepare(
            generator, critic, of_generator, of_critic, loader
        )
        self.models = generator, critic
        return accelerator, loader, generator, critic, of_generator, of_critic

    def iterate(self, accelerator, x, generator, critic, of_generator, of_critic) -> None:
        fake = generator(x)
        if self.order == "in turn":
            of_critic.zero_grad()
            accelerator.backward(F.softplus(-critic(x)).mean())
            accelerator.backward(F.softplus(critic(fake.detach())).mean())
            of_critic.step()
            of_generator.zero_grad()
            accelerator.backward(F.softplus(-critic(fake)).mean())
        elif self.order == "zeroed between":
            of_generator.zero_grad()
            accelerator.backward(F.softplus(-critic(fake)).mean())
            of_critic.zero_grad()
            accelerator.backward(self.loss_of_critic(critic, x, fake))
            of_critic.step()
        else:
            of_generator.zero_grad()
            of_critic.zero_grad()
            accelerator.backward(F.softplus(-critic(fake)).mean())
            accelerator.backward(self.loss_of_critic(critic, x, fake))
            of_critic.step()
        of_generator.step()

    @staticmethod
    def loss_of_critic(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()


@pytest.mark.parametrize("order", ["in turn", "zeroed between", "together"])
@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_adversaries_are_right_or_refused(order, batch_size):
    """Those in turn are right in windows of one micro-batch, and refused in others."""
    adversaries = Adversaries(order)
    expected = adversaries.run(accelerate.Accelerator, 8)
    try:
        weights = adversaries.run(Accelerator, batch_size)
    except ConfigError as refusal:
        assert "optimizer" in str(refusal)
        assert order != "together"
        assert (order, batch_size) != ("in turn", WINDOW)
        fresh = flat(square(), seeded(nn.Linear(6, 1)))
        assert torch.equal(flat(*adversaries.models), fresh)
        return
    assert (weights - expected).norm() < CLOSE * expected.norm()


def test_adversaries_in_turn_in_a_plain_loop():
    adversaries = Adversaries("in turn")
    expected = adversaries.run_by_hand(accelerate.Accelerator)
    weights = adversaries.run_by_hand(Accelerator)
    assert (weights - expected).norm() < CLOSE * expected.norm()


def test_adversaries_in_turn_that_accumulate_by_hand_are_refused():
    """The critic's step ends the window, which has a loss of the generator."""
    adversaries = Adversaries("together")
    accelerator, loader, generator, critic, _, of_critic = adversaries.prepared(Accelerator, 8)
    with pytest.raises(ConfigError, match="came after the optimizer's step"):
        for number, (x,) in enumerate(loader):
            fake = generator(x)
            accelerator.backward(adversaries.loss_of_critic(critic, x, fake) / 2)
            if number % 2:
                of_critic.step()
            accelerator.backward(F.softplus(-critic(fake)).mean() / 2)


def train_on_two(kind, batch_size, datasets, repeat=iter):
    """Train on the batches of two loaders side by side."""
    reset_states()
    accelerator = kind(gradient_accumulation_steps=WINDOW // batch_size)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loaders = [DataLoader(dataset, batch_size) for dataset in datasets]
    model, optimizer, first, second = accelerator.prepare(model, optimizer, *loaders)
    for (x, y), (other_x, other_y) in zip(first, repeat(second), strict=False):
        with accelerator.accumulate(model):
            loss = cross_entropy(model, x, y) + cross_entropy(model, other_x, other_y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_two_loaders_that_are_zipped(batch_size):
    """The second one has other samples, and targets of its own."""
    labels = Y.masked_fill(Y == 0, -100).clone()
    labels[::4] = 2
    datasets = TensorDataset(X[:16], Y[:16]), TensorDataset(X.flip(0)[:16], labels[:16])
    expected = train_on_two(accelerate.Accelerator, 8, datasets)
    learnt = (expected - flat(classifier())).norm()
    assert (train_on_two(Accelerator, batch_size, datasets) - expected).norm() < CLOSE * learnt
    if batch_size == 2:
        usual = train_on_two(accelerate.Accelerator, 2, datasets)
        assert (usual - expected).norm() > FAR * learnt


def again_and_again(loader):
    while True:
        yield from loader


@pytest.mark.parametrize(("repeat", "is_told"), [(cycle, True), (again_and_again, False)])
def test_a_shorter_second_loader_that_begins_again(repeat, is_told, caplog):
    """`cycle` gives the batches again that it has seen, those of rehearsals, too."""
    many = TensorDataset(torch.cat([X[:16]] * 3), torch.cat([Y[:16]] * 3))
    datasets = many, TensorDataset(X[8:16], Y[8:16])
    expected = train_on_two(accelerate.Accelerator, 8, datasets, repeat)
    learnt = (expected - flat(classifier())).norm()
    error = (train_on_two(Accelerator, 2, datasets, repeat) - expected).norm() / learnt
    assert (error > FAR) == is_told
    assert ("second loader" in caplog.text) == is_told
    assert is_told or error < CLOSE


@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_second_loader_that_is_not_prepared_is_told(batch_size, caplog):
    """Its batches beside a rehearsal are lost, and those after it are too few."""
    samples = TensorDataset(torch.cat([X[:16]] * 2), torch.cat([Y[:16]] * 2))
    other = DataLoader(samples, batch_size)
    train_on_two(Accelerator, batch_size, (samples, samples), lambda second: other)
    assert "pass each loader to accelerator.prepare" in caplog.text
    caplog.clear()
    train_on_two(Accelerator, batch_size, (samples, samples))
    assert "pass each loader" not in caplog.text


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_nested_batches(batch_size):
    """With names, which are no tensors."""

    def nest(rows):
        x, y, _ = map(torch.stack, zip(*rows, strict=True))
        names = [f"class {int(label)}" for label in y]
        return [{"inputs": {"x": x}, "labels": [y], "names": names}]

    def body(model, batch):
        assert batch["names"] == [f"class {int(label)}" for label in batch["labels"][0]]
        return F.cross_entropy(model(batch["inputs"]["x"]), batch["labels"][0])

    loop = Loop(body, collate=nest, full_body=plain)
    assert loop.error(Accelerator, batch_size) < CLOSE


# -- accumulation by hand


LABELS = Y.masked_fill(Y == 0, -100)
LABELS[::4] = 1


def by_hand(
    kind: type,
    batch_size: int,
    body: Body = plain,
    build: Callable[[], nn.Module] = classifier,
    first: int = 1,
    collate: Callable | None = None,
    after: Callable[[Any], None] = lambda optimizer: None,
    more: tuple[Body, ...] = (),
    labels: Tensor = LABELS,
    is_last_after: bool = False,
) -> Tensor:
    """Accelerator is told nothing of it; the last window of the epoch is short. `after` is called
    after each iteration. `is_last_after`: its step comes after the loop.
    """
    reset_states()
    steps = WINDOW // batch_size
    accelerator = kind()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(X, labels, VALUES), batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        for of_batch in (body, *more):
            loss = of_batch(model, *batch)
            accelerator.backward(loss if steps == 1 else loss / steps)
        is_last = number == len(loader) - 1 and not is_last_after
        if (number + first) % steps == 0 or is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        after(optimizer.optimizer)
    if is_last_after:
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("body", [plain, cross_entropy_and_penalty])
def test_accumulation_by_hand(batch_size, body):
    """The window has unequal numbers of targets."""
    loop = Loop(body, columns=(X, LABELS, VALUES))
    expected = loop.full_batch()
    learnt = (expected - flat(classifier())).norm()
    assert (by_hand(Accelerator, batch_size, body) - expected).norm() < CLOSE * learnt
    assert (by_hand(accelerate.Accelerator, batch_size, body) - expected).norm() > FAR * learnt


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_two_backwards_of_a_batch_by_hand(batch_size):
    def second(model, x, y, values):
        return F.mse_loss(model(x), values)

    expected = Loop(sum_of_two, columns=(X, LABELS, VALUES)).full_batch()
    learnt = (expected - flat(classifier())).norm()
    weights = by_hand(Accelerator, batch_size, more=(second,))
    assert (weights - expected).norm() < CLOSE * learnt


def test_a_plain_loop_that_steps_before_the_backward():
    """The step is that of the batches before."""

    def weights(kind):
        reset_states()
        accelerator = kind()
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        loader = DataLoader(TensorDataset(X[:16], Y[:16]), 2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for number, batch in enumerate(loader):
            if number and number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            accelerator.backward(cross_entropy(model, *batch) / 4)
        return flat(model)

    expected = weights(accelerate.Accelerator)
    assert (weights(Accelerator) - expected).norm() < CLOSE * expected.norm()


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_random_collate_function_of_an_accumulation_by_hand_is_refused(batch_size):
    """Each of its calls draws for one micro-batch; a mean of two terms is no accumulation."""

    def noisy(rows):
        x, y, values = map(torch.stack, zip(*rows, strict=True))
        return x + torch.rand(len(x), 1), y, values

    def mean_of_two(model, x, y, values):
        return plain(model, x, y, values) + F.mse_loss(model(x), values)

    with pytest.raises(UnkeyedRandomness, match="the collate function draws random numbers"):
        by_hand(Accelerator, batch_size, collate=noisy)
    Loop(lambda *batch: mean_of_two(*batch) / 2, collate=noisy).run(Accelerator, WINDOW)


@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("body", [raised_to_1, plus_eps, a_mean_of_some_over_all])
def test_masked_means_by_hand(batch_size, body):
    """Of micro-batches without a target, one is the first that counts in its window."""
    labels = Y.clone()
    labels[WINDOW : 2 * WINDOW - 1] = 0
    labels[2 * WINDOW - 1] = 1
    expected = Loop(body, columns=(X, labels, VALUES)).full_batch()
    learnt = (expected - flat(classifier())).norm()
    found = by_hand(Accelerator, batch_size, body, labels=labels)
    assert (found - expected).norm() < CLOSE * learnt


def test_a_masked_mean_of_single_samples_by_hand_is_refused():
    """A sample without a target divides by k, as if divided by samples; all others have one."""
    labels = torch.ones_like(Y)
    labels[13] = 0
    with pytest.raises(LossNotAdditive, match="of samples or a constant"):
        by_hand(Accelerator, 1, raised_to_1, labels=labels)


def test_a_constant_divisor_of_as_many_targets_in_all_micro_batches_is_refused():
    labels = torch.zeros_like(Y)
    labels[::WINDOW] = 1
    loop = Loop(over(lambda chosen: 100), columns=(X, labels, VALUES))
    with pytest.raises(LossNotAdditive, match="of samples or a constant"):
        loop.run(Accelerator, 2)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_accumulation_by_hand_from_step_0(batch_size):
    """`step % k == 0`: the first update is that of one micro-batch."""
    steps = WINDOW // batch_size
    words = (
        rf"Step when \(step \+ 1\) % {steps} == 0.*gradient_accumulation_steps={steps}"
        r".*`if accelerator\.sync_gradients:`"
    )
    with pytest.raises(ConfigError, match=words):
        by_hand(Accelerator, batch_size, first=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_steps_in_each_iteration_by_hand_is_refused():
    def after(optimizer):
        if not schedules:
            schedules.append(make_step(optimizer))
        schedules[0].step()

    schedules = []
    with pytest.raises(ConfigError, match="steps in several iterations of one window"):
        by_hand(Accelerator, 4, after=after)
    schedules.clear()
    by_hand(Accelerator, WINDOW, after=after)


def sum_of_sums_over_samples(model, x, y, values):
    """The loss of a variational autoencoder."""
    outputs = model(x)
    return (F.mse_loss(outputs, values, reduction="sum") - 0.5 * (1 + outputs).sum()) / len(x)


def mean_of_three(model, x, y, values):
    outputs = model(x)
    return sum(F.mse_loss(scale * outputs, values) for scale in (1.0, 2.0, 3.0)) / 3


@pytest.mark.parametrize("body", [sum_of_sums_over_samples, mean_of_three])
@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_a_sum_that_is_divided_to_be_a_mean_is_no_accumulation(body, batch_size):
    expected = Loop(body).full_batch()
    learnt = (expected - flat(classifier())).norm()
    found = by_hand(Accelerator, batch_size, body, labels=Y)
    assert (found - expected).norm() < CLOSE * learnt
    assert Loop(body).error(Accelerator, batch_size) < CLOSE


def constant_divisor_by_hand(model, x, y, values):
    return cross_entropy(model, x, y, reduction="sum") / 100


def normalised_by_hand(model, x, y, values):
    logits = model(x)
    return F.cross_entropy(logits - logits.mean(0), y)


def by_place(model, x, y, values):
    """The weight of a sample is its place in the micro-batch."""
    return (F.cross_entropy(model(x), y, reduction="none") * torch.arange(1, len(x) + 1)).mean()


@pytest.mark.parametrize(
    ("body", "build"),
    [
        (constant_divisor_by_hand, classifier),
        (normalised_by_hand, classifier),
        (by_place, classifier),
        (plain, with_batch_norm),
    ],
    ids=["constant", "normalised", "place", "batch norm"],
)
@pytest.mark.parametrize("batch_size", SPLIT)
def test_accumulation_by_hand_that_depends_on_the_split_is_refused(batch_size, body, build):
    words = "a constant" if body is constant_divisor_by_hand else "(other|over) samples"
    with pytest.raises(HfGaError, match=words):
        by_hand(Accelerator, batch_size, body, build)


class Codebook(nn.Module):
    """A code that follows what it stands for, and a constant that the graph keeps."""

    def __init__(self, reads: bool):
        super().__init__()
        self.reads = reads
        self.register_buffer("code", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.scale + (self.code if self.reads else 0)
        self.code.lerp_(x.detach().mean(0), 0.1)
        return output


def with_codebook(reads: bool) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Codebook(reads), nn.Linear(8, 3)))


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_what_forwards_leave_for_the_next_one_is_refused_by_hand(batch_size):
    """The rehearsal's samples may come again first, after as many forwards."""
    with pytest.raises(LossNotAdditive, match=r"forward of Sequential leaves in 2\.code"):
        by_hand(Accelerator, batch_size, build=lambda: with_codebook(reads=True))


@pytest.mark.parametrize(("batch_size", "reads"), [(8, True), (4, False), (1, False)])
def test_what_forwards_leave_is_accepted_by_hand(batch_size, reads):
    """In windows of one forward, or where no forward reads it."""
    build = partial(with_codebook, reads)
    loop = Loop(plain, build, columns=(X, LABELS, VALUES))
    expected = loop.full_batch()
    learnt = (expected - flat(build())).norm()
    assert (by_hand(Accelerator, batch_size, build=build) - expected).norm() < CLOSE * learnt


def test_a_loss_that_is_nan_for_a_sample_alone_is_refused_by_hand():
    """NaN is neither larger nor smaller than its gradient among others."""

    def body(model, x, y, values):
        advantages = values[:, 0] - values[:, 0].mean()
        variance = advantages.pow(2).sum() / (len(x) - 1)
        return (advantages / variance.sqrt() * losses(model, x, y)).mean()

    with pytest.raises(LossNotAdditive, match="statistics or mixtures over the batch"):
        by_hand(Accelerator, 1, body)


class Shifted(nn.Sequential):
    def __init__(self):
        super().__init__(*classifier())
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.shift)


@pytest.mark.parametrize("batch_size", [2, 1])
def test_a_buffer_that_the_loop_changes_is_refused_by_hand(batch_size):
    """Of one sample a batch, the rehearsed one comes last."""

    def body(model, x, y, values):
        loss = plain(model, x, y, values)
        model.shift.lerp_(x.mean(0), 0.1)
        return loss

    with pytest.raises(LossNotAdditive, match="state that the loop keeps"):
        by_hand(Accelerator, batch_size, body, Shifted)


def term_of_the_second_half(model, x, y, values):
    loss = F.mse_loss(model(x), values)
    return loss + F.cross_entropy(model(x), y) if x[0, 0] > X[:WINDOW, 0].median() else loss


@pytest.mark.parametrize("body", [term_of_the_second_half, plain])
def test_terms_that_micro_batches_by_hand_lack_are_said_not_to_be_tried(body, caplog):
    with suppress(HfGaError):  # in a later window
        by_hand(Accelerator, 4, body)
    assert ("lacks a term of the loss" in caplog.text) == (body is term_of_the_second_half)


@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("name", ["clamped_gradients", "clamped_after_accumulation"])
def test_hooks_on_parameters_in_an_accumulation_by_hand(name, batch_size):
    build = EXACT[name].build
    expected = Loop(plain, build, columns=(X, LABELS, VALUES)).full_batch()
    learnt = (expected - flat(classifier())).norm()
    assert (by_hand(Accelerator, batch_size, plain, build) - expected).norm() < CLOSE * learnt


def test_hooks_on_parameters_are_called_once_a_window_and_can_be_removed():
    seen = []
    model = with_hooks(seen.append)
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    before = next(model.parameters()).detach().clone()
    Loop(plain, lambda: model).run(Accelerator, 2)
    assert len(seen) == 3  # windows
    assert torch.equal(next(model.parameters()), before)
    handle.remove()
    next(model.parameters()).sum().backward()
    assert len(seen) == 4
    assert torch.equal(next(model.parameters()).grad, torch.ones_like(before))


def test_noise_on_gradients_is_that_of_the_full_batch():
    """The first layer has as many rows as the window has samples, the last as a micro-batch has."""

    def iteration(accelerator, model, optimizer, *batch):
        accelerator.backward(plain(model, *batch))
        if accelerator.sync_gradients:
            for parameter in model.parameters():
                parameter.grad += 0.1 * torch.randn(parameter.shape)

    loop = Loop(plain, iteration=iteration)
    whole = loop.run(Accelerator, WINDOW)
    assert (whole - Loop(plain).run(Accelerator, WINDOW)).norm() > 1e-2
    for batch_size in (4, 2):
        assert (loop.run(Accelerator, batch_size) - whole).norm() < CLOSE * whole.norm()


def test_a_draw_between_backwards_of_the_shape_of_a_weight_is_refused():
    """The first layer has a bias of as many numbers as the window has samples."""

    def iteration(accelerator, model, optimizer, x, y, values):
        accelerator.backward(plain(model, x, y, values))
        weights = torch.rand(len(x))
        losses = F.cross_entropy(model(x), y, reduction="none")
        accelerator.backward((weights * losses).mean())

    with pytest.raises(UnkeyedRandomness, match=r"rand of shape \[8\] was drawn between two"):
        Loop(plain, iteration=iteration).run(Accelerator, WINDOW)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_parameters_that_the_loop_changes_within_a_window_are_refused(batch_size):
    def clamp(accelerator, model, optimizer, *batch):
        accelerator.backward(plain(model, *batch))
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    with pytest.raises(ConfigError, match=r"weights changed within a window \(Linear\.weight"):
        Loop(plain, iteration=clamp).run(Accelerator, batch_size)


def with_a_teacher(*, follows: Callable[[Accelerator], bool]) -> Loop:
    """Its loss compares with a teacher that follows the model, so slowly that no gradient of a
    sample shows it.
    """

    class Distilled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.teacher = [nn.Linear(6, 3).requires_grad_(False)]  # no part of the model

    def iteration(accelerator, model, optimizer, x, y, values):
        (teacher,) = model.teacher
        logits = model(x)
        accelerator.backward(F.cross_entropy(logits, y) + F.mse_loss(logits, teacher(x)))
        optimizer.step()
        if follows(accelerator):
            for parameter, own in zip(teacher.parameters(), model.parameters(), strict=True):
                parameter.data.lerp_(own.data, 1e-4)

    return Loop(plain, lambda: seeded(Distilled()), iteration=iteration)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_teacher_that_follows_in_each_iteration_is_refused(batch_size):
    """One that follows once a window is that of the full batch."""
    with pytest.raises(ConfigError, match="a teacher or a centre follow by a moving average"):
        with_a_teacher(follows=lambda accelerator: True).run(Accelerator, batch_size)
    loop = with_a_teacher(follows=lambda accelerator: accelerator.sync_gradients)
    whole = loop.run(Accelerator, WINDOW)
    assert (loop.run(Accelerator, batch_size) - whole).norm() < CLOSE * whole.norm()


@pytest.mark.parametrize("batch_size", SPLIT)
def test_weights_that_the_loop_changes_after_the_first_windows_are_refused(batch_size):
    """A loop's warm-up may end at any window."""
    num_updates = []

    def decay(accelerator, model, optimizer, *batch):
        accelerator.backward(plain(model, *batch))
        num_updates.append(accelerator.sync_gradients)
        if sum(num_updates) >= 4:
            model[0].weight.data.mul_(1 - 1e-4)

    columns = tuple(column.repeat(4, *[1] * (column.dim() - 1)) for column in (X, Y, VALUES))
    with pytest.raises(ConfigError, match="weights changed within a window"):
        Loop(plain, iteration=decay, columns=columns).run(Accelerator, batch_size)
    assert sum(num_updates) in (4, 5)


@pytest.mark.parametrize("batch_size", [8, 4])
def test_parameters_that_are_switched_on_after_the_first_windows_are_refused(batch_size):
    """After the batch was fetched: their sums would not be divided."""
    num_updates = []

    def unfreeze(accelerator, model, optimizer, *batch):
        model[0].requires_grad_(sum(num_updates) >= 4)
        accelerator.backward(plain(model, *batch))
        num_updates.append(accelerator.sync_gradients)

    columns = tuple(column.repeat(4, *[1] * (column.dim() - 1)) for column in (X, Y, VALUES))
    with pytest.raises(ConfigError, match="set to True after the batch was fetched"):
        Loop(plain, iteration=unfreeze, columns=columns).run(Accelerator, batch_size)


def test_windows_without_a_target_are_told(caplog):
    """Micro-batches of one sample have no pairs; the labels of all samples differ."""

    def pairs_of_one_class(model, x, y, values):
        logits = model(x)
        first, second = torch.triu_indices(len(y), len(y), 1)
        is_pair = y[first] == y[second]
        distances = (logits[first] - logits[second]).square().sum(1)
        return distances[is_pair].mean() if is_pair.any() else logits.sum() * 0

    columns = (X, torch.arange(NUM_SAMPLES), VALUES)
    before = flat(classifier())
    assert torch.equal(Loop(pairs_of_one_class, columns=columns).run(Accelerator, 1), before)
    assert "the first 3 windows have no target" in caplog.text
    caplog.clear()

    def placeholder_first(accelerator, model, optimizer, x, y, values):
        """After its first backward, the window has no target yet."""
        accelerator.backward(model(x).sum() * 0)
        accelerator.backward(plain(model, x, y, values))

    for loop in (Loop(plain), Loop(plain, iteration=placeholder_first)):
        loop.run(Accelerator, WINDOW)
        loop.run(Accelerator, 1)
    assert "have no target" not in caplog.text


def test_an_error_of_the_loop_in_a_rehearsal_says_how_many_samples_it_got():
    """It may have made a tensor for the loader's batch size."""
    offsets = torch.zeros(2, 1)

    def with_fixed_size(model, x, y, values):
        return cross_entropy(model, x + offsets, y)

    with pytest.raises(RuntimeError, match="must match the size") as caught:
        Loop(with_fixed_size).run(Accelerator, 2)
    assert "this micro-batch has 3 samples" in caught.value.__notes__[0]


def test_a_gradient_that_is_read_within_a_window_is_explained():
    """Adversarial training by the gradient of the embeddings (FGM) does so."""

    def iteration(accelerator, model, optimizer, x, y, values):
        accelerator.backward(cross_entropy(model, x, y))
        for parameter in model.parameters():
            parameter.grad.norm()

    with pytest.raises(AttributeError) as caught:
        Loop(plain, iteration=iteration).run(Accelerator, 2)
    assert "appears with the last backward" in caught.value.__notes__[0]


@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_draw_of_some_micro_batches_before_others_is_refused(batch_size):
    """Those after it would be others."""

    def noise_if_needed(model, x, y, values):
        is_rare = y == 2
        if is_rare.any():
            x = x + is_rare[:, None] * torch.randn_like(x)
        return cross_entropy(model, F.dropout(x, 0.5), y)

    rare = torch.zeros_like(Y)
    rare[[5, 9, 18]] = 2
    with pytest.raises(UnkeyedRandomness, match="it is draw 1 of this micro-batch, which is"):
        Loop(noise_if_needed, columns=(X, rare, VALUES)).run(Accelerator, batch_size)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_batch_norm_that_trains_after_the_first_windows_is_refused(batch_size):
    num_updates = []

    def unfreeze(accelerator, model, optimizer, *batch):
        model[1].train(sum(num_updates) >= 4)
        accelerator.backward(plain(model, *batch))
        num_updates.append(accelerator.sync_gradients)

    columns = tuple(column.repeat(4, *[1] * (column.dim() - 1)) for column in (X, Y, VALUES))
    loop = Loop(plain, with_batch_norm, iteration=unfreeze, columns=columns)
    with pytest.raises(LossNotAdditive, match=r"its loss depends on the other samples"):
        loop.run(Accelerator, batch_size)
    assert sum(num_updates) in (4, 5, 6)


@pytest.mark.parametrize("batch_size", SPLIT)
def test_what_forwards_leave_for_the_loop_is_no_state(batch_size):
    """A part of the loss in an attribute, features that a hook collects, a metric of all samples."""

    class WithPenalty(nn.Linear):
        penalty = None

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            self.penalty = logits.square().mean()
            return logits

    class Features(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 4).requires_grad_(False))
            self.found: list[Tensor] = []
            self.last_width = 0
            self[0].register_forward_hook(lambda module, args, out: self.found.append(out))

        def forward(self, x: Tensor) -> Tensor:
            self.found.clear()
            self.last_width = len(x)
            return super().forward(x)

    class MeanLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, loss: Tensor) -> Tensor:
            self.total += loss
            self.count += 1
            return self.total / self.count

    def build() -> nn.Module:
        model = seeded(WithPenalty(6, 3))
        model.helpers = [seeded(Features()), MeanLoss()]
        return model

    def body(model, x, y, values):
        features, metric = model.helpers
        features(x)
        weights = features.found[0].square().sum(1)
        loss = (weights * F.cross_entropy(model(x), y, reduction="none")).mean() + model.penalty
        metric(loss.detach())
        return loss

    whole = Loop(body, build).run(Accelerator, WINDOW)
    assert (Loop(body, build).run(Accelerator, batch_size) - whole).norm() < CLOSE * whole.norm()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("batch_size", SPLIT)
def test_a_scripted_loss_is_called_as_any_other(batch_size):
    """It has no hooks of its own."""
    criterion = torch.jit.script(nn.CrossEntropyLoss())

    def scripted(model, x, y, values):
        return criterion(model(x), y)

    whole = Loop(plain).run(Accelerator, WINDOW)
    assert (Loop(scripted).run(Accelerator, batch_size) - whole).norm() < CLOSE * whole.norm()


@pytest.mark.parametrize("batch_size", LAYOUTS)
def test_parameters_that_the_loop_changes_before_the_forward_are_those_of_the_window(batch_size):
    """Copied in each iteration: the first one changes them, the others change nothing."""

    def copy(accelerator, model, optimizer, *batch):
        model[0].bias.data.copy_(torch.ones(8))
        accelerator.backward(plain(model, *batch))

    loop = Loop(plain, iteration=copy)
    whole = loop.run(Accelerator, WINDOW)
    assert (loop.run(Accelerator, batch_size) - whole).norm() < CLOSE * whole.norm()


@pytest.mark.parametrize("batch_size", SPLIT)
def test_an_attribute_that_the_loop_sets_in_the_first_iteration_stays(batch_size):
    """Of each window, also if that iteration is a rehearsal."""

    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    def run(kind, size):
        updates = [0, True]  # how many there were, whether a window begins

        def iteration(accelerator, model, optimizer, x, y, values):
            number, begins = updates
            if begins:
                accelerator.unwrap_model(model).scale = 2.0 + number
            accelerator.backward(cross_entropy(model, x, y))
            updates[:] = number + accelerator.sync_gradients, accelerator.sync_gradients

        return Loop(plain, lambda: seeded(Scaled(6, 3)), iteration=iteration).run(kind, size)

    expected = run(accelerate.Accelerator, WINDOW)
    assert (run(Accelerator, batch_size) - expected).norm() < CLOSE * expected.norm()


@pytest.mark.parametrize("batch_size", IN_TWO_OR_FOUR)
def test_a_factor_that_changes_in_each_iteration_is_refused_in_the_first_window(batch_size):
    """With two micro-batches the first one is a rehearsal, and the other one the whole window."""
    factors = iter(range(1, 100))

    def iteration(accelerator, model, optimizer, *batch):
        accelerator.backward(next(factors) * plain(model, *batch))

    with pytest.raises(LossNotAdditive, match="factor in the loss is"):
        Loop(plain, iteration=iteration).run(Accelerator, batch_size)
    assert next(factors) == 1 + WINDOW // batch_size


def test_an_open_window_is_undone_when_python_ends():
    """The loop is left by `break`, and somebody has reset Accelerate's states."""
    own = torch.randn
    reset_states()
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    *_, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(X), 2))
    iterator = iter(loader)
    next(iterator)
    assert torch.randn is not own
    reset_states()
    _leave_at_exit(weakref.ref(accelerator.training_loop))
    assert torch.randn is own
    Accelerator()  # its states are again
    iterator.close()


def test_a_loop_without_accumulation_is_told_nothing(caplog):
    """One that names `accumulate`, one that does not, and one that calls a function that does."""

    def step(accelerator, model, optimizer, *batch):
        with accelerator.accumulate(model):
            accelerator.backward(plain(model, *batch))
            optimizer.step()
            optimizer.zero_grad()

    Loop(plain).run(Accelerator, WINDOW)
    by_hand(Accelerator, WINDOW)
    reset_states()
    accelerator = Accelerator()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(X, Y, VALUES), WINDOW)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        step(accelerator, model, optimizer, *batch)
    assert not caplog.text


@pytest.mark.parametrize("batch_size", SPLIT)
@pytest.mark.parametrize("collate", [list, tuple], ids=["list", "tuple"])
def test_batches_of_samples_that_are_not_stacked(batch_size, collate):
    """`collate_fn=lambda samples: samples`: as many entries as the micro-batch has samples."""

    def iteration(accelerator, model, optimizer, *samples):
        x, y, values = map(torch.stack, zip(*samples, strict=True))
        accelerator.backward(plain(model, x, y, values))

    loop = Loop(plain, iteration=iteration, collate=collate)
    assert loop.error(Accelerator, batch_size) < CLOSE


def samples_of_sizes(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(X[i].expand(sizes[i % len(sizes)], 6), Y[i]) for i in range(NUM_SAMPLES)]


def loss_of_sizes(model, x, y):
    return F.cross_entropy(model(x).mean(1), y)


def train_sizes(kind: type, steps: int, step: Callable, sizes: Sequence[int]) -> Tensor:
    """Batches of one sample, of these sizes in turn; `steps` is 1 where it is no argument."""
    reset_states()
    accelerator = kind(gradient_accumulation_steps=steps)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(samples_of_sizes(sizes), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader, start=1):
        step(accelerator, model, optimizer, number, *batch)
    return flat(accelerator.unwrap_model(model))


def accumulating(accelerator, model, optimizer, number, x, y):
    with accelerator.accumulate(model):
        accelerator.backward(loss_of_sizes(model, x, y))
        optimizer.step()
        optimizer.zero_grad()


def dividing_by_3(accelerator, model, optimizer, number, x, y):
    accelerator.backward(loss_of_sizes(model, x, y) / 3)
    if number % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()


def full_batches_of_sizes(window: int, sizes: Sequence[int]) -> Tensor:
    model = classifier().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    samples = samples_of_sizes(sizes)
    for start in range(0, NUM_SAMPLES, window):
        of_window = samples[start : start + window]
        optimizer.zero_grad()
        losses = [loss_of_sizes(model, x.double()[None], y[None]) for x, y in of_window]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("steps", "step"), [(3, accumulating), (1, dividing_by_3)])
def test_samples_that_cannot_be_collated_together_are_not_rehearsed(steps, step, caplog):
    sizes = (2, 3, 3, 2, 4)
    expected = full_batches_of_sizes(3, sizes)
    weights = train_sizes(Accelerator, steps, step, sizes)
    assert (weights - expected).norm() < CLOSE * expected.norm()
    assert caplog.text.count("cannot be collated together (RuntimeError: stack expects") == 1


def test_samples_that_cannot_be_padded_are_refused_with_a_remedy(monkeypatch):
    """As under FSDP, where no window is rehearsed and all are padded."""
    monkeypatch.setattr("hf_ga.accelerator.training_loop.is_sharded", lambda accelerator: True)
    with pytest.raises(DataError, match="let the collate function pad its samples"):
        train_sizes(Accelerator, 3, accumulating, (2, 3))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"hf_ga" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("batch_size", LAYOUTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel, pickled])
def test_copies_of_the_model_within_a_window_are_free_of_it(copied, batch_size):
    """Before and after each backward. Their forwards are none of the model's."""

    def iteration(accelerator, model, optimizer, x, y, values):
        first = copied(model)
        loss = cross_entropy(model, x, y)
        assert torch.equal(cross_entropy(first, x, y), loss)
        accelerator.backward(loss)
        assert torch.equal(cross_entropy(copied(model), x, y), loss)

    assert Loop(plain, iteration=iteration).error(Accelerator, batch_size) < CLOSE


def test_values_are_clipped_once_a_window():
    def iteration(accelerator, model, optimizer, *batch):
        accelerator.backward(plain(model, *batch))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)

    loop = Loop(plain, iteration=iteration)
    whole = loop.run(Accelerator, WINDOW)
    assert (loop.run(Accelerator, 2) - whole).norm() < CLOSE * whole.norm()
    assert (
        loop.run(Accelerator, WINDOW) - flat(classifier())
    ).abs().max() <= 3.1e-3 * LEARNING_RATE


def noise_for_time(model, x, y, values):
    """16 numbers that all samples share: two for each of 8 samples, by their shape."""
    return plain(model, x, y, values) * (1 + torch.rand(16).mean())


def noise_for_samples(model, x, y, values):
    return cross_entropy(model, x + torch.randn_like(x), y)


@pytest.mark.parametrize(
    ("body", "batch_size", "is_told"),
    [(noise_for_time, 8, True), (noise_for_time, 4, False), (noise_for_samples, 8, False)],
)
def test_windows_of_one_micro_batch_may_not_show_whose_the_draws_are(
    body, batch_size, is_told, caplog
):
    columns = tuple(column[:16] for column in (X, Y, VALUES))  # no shorter window
    Loop(body, columns=columns).run(Accelerator, batch_size)
    assert ("other splits of the windows may draw other numbers" in caplog.text) == is_told


@pytest.mark.parametrize(("body", "is_told"), [(noise_for_time, True), (noise_for_samples, False)])
def test_plain_loops_of_one_micro_batch_may_not_show_whose_the_draws_are(body, is_told, caplog):
    """Without `accumulate`; it is told at the first update, before the shorter last window."""
    by_hand(Accelerator, WINDOW, body)
    assert ("other splits of the windows may draw other numbers" in caplog.text) == is_told
