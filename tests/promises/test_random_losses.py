"""Random losses: the gradient of each window of a loop is that of the full batch in float64, or the
loss is refused. They are put together from losses of tokens, weights, ways to reduce and forms, over
samples of which some have no target.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import hf_ga
from hf_ga.errors import HfGaError

NUM_SAMPLES = 8  # of a window
NUM_WINDOWS = 4  # the last one is not rehearsed
NUM_TOKENS = 7
NUM_CLASSES = 3
SEEDS = range(30, 50)
BATCH_SIZES = (4, 1)
CLOSE = 2e-5  # float32 against float64
Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch, nn.Module], Tensor]

pytestmark = pytest.mark.slow("160 windows")


def samples(seed: int) -> list[Batch]:
    """Sequences of 0 to 7 targets; of 1 or more for every third seed."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 3, 6, 7] if seed % 3 == 0 else [0, 0, 1, 2, 3, 6, 7]
    return [
        {
            "features": torch.randn(NUM_TOKENS, 4, generator=generator),
            "labels": torch.randint(NUM_CLASSES, (NUM_TOKENS,), generator=generator),
            "mask": (torch.arange(NUM_TOKENS) < chance.choice(lengths)).float(),
            "weight": torch.rand((), generator=generator) + 0.2,
            "sign": torch.tensor((-1.0) ** index),
        }
        for index in range(NUM_SAMPLES * NUM_WINDOWS)
    ]


# Losses of tokens, of shape (samples, tokens).


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


def smoothed(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)


def focal(logits: Tensor, batch: Batch) -> Tensor:
    losses = cross_entropy(logits, batch)
    return (1 - torch.exp(-losses)) ** 2 * losses


def squares(logits: Tensor, batch: Batch) -> Tensor:
    return (logits[..., 0] - batch["features"][..., 0]) ** 2


TOKEN_LOSSES = [cross_entropy, smoothed, focal, squares]

WEIGHTS: list[Callable[[Batch], Tensor]] = [
    lambda batch: batch["mask"],
    lambda batch: batch["mask"] * batch["weight"][:, None],
    lambda batch: batch["mask"] * (batch["labels"] == 2),
    lambda batch: batch["mask"] * (batch["mask"].sum(1, keepdim=True) > 2),
    lambda batch: torch.ones_like(batch["mask"]),
]


# From losses and weights of tokens to a scalar.


def if_any(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What reduces, only of batches with a target."""

    def reduced(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
        return reduce(losses, weights, batch) if weights.any() else losses.sum() * 0

    return reduced


def by_weights(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).sum() / weights.sum()


def by_raised_weights(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def by_python_number(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).sum() / max(float(weights.sum()), 1.0)


def by_samples(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).sum() / len(losses)


def by_mask(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).sum() / batch["mask"].sum().clamp(min=1)


def mean_of_all(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return (losses * weights).mean()


def mean_of_rows(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return ((losses * weights).sum(1) / weights.sum(1).clamp(min=1)).mean()


def mean_of_chosen(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    return losses[weights != 0].mean()


def loop_over_samples(losses: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    rows = zip(losses, weights, strict=True)
    return sum((row * w).sum() / w.sum().clamp(min=1) for row, w in rows) / len(losses)


REDUCTIONS = [
    if_any(by_weights),
    if_any(mean_of_chosen),
    by_raised_weights,
    by_python_number,
    by_samples,
    by_mask,
    mean_of_all,
    mean_of_rows,
    loop_over_samples,
]


class Mean(NamedTuple):
    """A scalar of a loss: a loss of tokens, its weights, and how it is reduced."""

    loss_of: Callable[[Tensor, Batch], Tensor]
    weights_of: Callable[[Batch], Tensor]
    reduce: Callable[[Tensor, Tensor, Batch], Tensor]

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.reduce(self.loss_of(logits, batch), self.weights(logits, batch), batch)

    def weights(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.weights_of(batch).to(logits.dtype)


# From means to the loss.


def first_only(means: list[Mean], logits: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    return means[0](logits, batch)


def weighted_sum(means: list[Mean], logits: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    return 0.3 * means[0](logits, batch) + 1.7 * means[1](logits, batch)


def with_penalty(means: list[Mean], logits: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    return means[0](logits, batch) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def one_divisor(means: list[Mean], logits: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    sums = [(m.loss_of(logits, batch) * m.weights(logits, batch)).sum() for m in means]
    return (sums[0] + 0.3 * sums[1]) / means[0].weights(logits, batch).sum().clamp(min=1)


def second_if_any(means: list[Mean], logits: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    loss = means[0](logits, batch)
    return loss + 0.5 * means[1](logits, batch) if means[1].weights_of(batch).any() else loss


FORMS = [first_only, weighted_sum, with_penalty, one_divisor, second_if_any]


def random_loss(seed: int) -> Loss:
    chance = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    means = [
        Mean(chance.choice(TOKEN_LOSSES), chance.choice(WEIGHTS), chance.choice(REDUCTIONS))
        for _ in range(2)
    ]
    return lambda logits, batch, model: form(means, logits, batch, model)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def accumulated(kind: type, loss_of: Loss, data: list[Batch], batch_size: int) -> list[Tensor]:
    """The gradient of each window of a loop."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=NUM_SAMPLES // batch_size)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(batch["features"]), batch, model))
            if accelerator.sync_gradients:
                found.append(gradient_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def full_batches(loss_of: Loss, data: list[Batch]) -> list[Tensor]:
    """The gradient of each window in one float64 backward."""
    model = make_model().double()
    found = []
    for start in range(0, len(data), NUM_SAMPLES):
        batch = default_collate(data[start : start + NUM_SAMPLES])
        batch["features"] = batch["features"].double()
        model.zero_grad()
        loss_of(model(batch["features"]), batch, model).backward()
        found.append(gradient_of(model))
    return found


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[int, int], float | str]:
    """By loss and batch size: the error of the worst window, or the refusal."""
    found: dict[tuple[int, int], float | str] = {}
    for seed in SEEDS:
        loss_of = random_loss(seed)
        data = samples(seed)
        expected = full_batches(loss_of, data)
        for size in BATCH_SIZES:
            try:
                gradients = accumulated(hf_ga.Accelerator, loss_of, data, size)
            except HfGaError as error:
                found[seed, size] = str(error)
            else:
                found[seed, size] = largest_error(gradients, expected)
    return found


def test_no_loss_is_silently_another_one(outcomes):
    errors = {key: value for key, value in outcomes.items() if isinstance(value, float)}
    assert not {key: error for key, error in errors.items() if not error < CLOSE}


def test_most_losses_are_exact(outcomes):
    assert sum(isinstance(value, float) for value in outcomes.values()) > 0.75 * len(outcomes)


def test_accelerates_own_loop_is_not():
    wrong = 0
    for seed in SEEDS[::3]:
        data = samples(seed)
        found = accumulated(accelerate.Accelerator, random_loss(seed), data, 2)
        wrong += not largest_error(found, full_batches(random_loss(seed), data)) < CLOSE
    assert wrong > len(SEEDS) // 6
