"""What a loop keeps of samples for a later window is refused, unless a module holds it: it is that
of the last micro-batch, or counts the samples of a rehearsal twice.
"""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from documented_loop import reset_states
from forked import on_ranks, without_errors
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import hf_ga
from hf_ga.engine.checks.kept_values import KeptValues

WINDOW = 8
CLOSE = 1e-6
KEPT = "keeps of the samples of an earlier window"
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5 * WINDOW, 4, generator=GENERATOR)
Y = torch.randint(3, (5 * WINDOW,), generator=GENERATOR)


class Centre(nn.Module):
    """A centre of outputs, from sums that its forward adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))
        self.count = torch.zeros(())  # no buffer, and changed in place

    def forward(self, outputs: Tensor) -> Tensor:
        self.total += outputs.detach().sum(0)
        self.count += len(outputs)
        return outputs - self.centre

    def follow(self) -> None:
        self.centre.lerp_(self.total / self.count, 0.5)
        self.total.zero_()
        self.count.zero_()


class OfLast:
    """A centre, from the last micro-batch."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        self.accelerator = accelerator
        self.centre = torch.zeros(3)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.outputs = outputs
        return F.cross_entropy(outputs - self.centre, y)

    def after_step(self) -> None:
        self.centre[:] = 0.5 * self.centre + 0.5 * self.outputs.detach().mean(0)


class OfSums(OfLast):
    """A centre, from sums over all iterations, in place."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.total = torch.zeros(4)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.total[:3] += outputs.detach().sum(0)
        self.total[3] += len(outputs)
        return super().loss(outputs, y)

    def after_step(self) -> None:
        self.centre.copy_(self.total[:3] / self.total[3])
        self.total.zero_()


class Queue(OfLast):
    """Outputs of the window before, in a list."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.new: list[Tensor] = []

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.new.append(outputs.detach())
        return F.cross_entropy(outputs @ self.centre.expand(3, 3) + outputs, y)

    def after_step(self) -> None:
        self.centre = torch.cat(self.new)[:3]
        self.new = []


class Weights(OfLast):
    """Weights of two losses, from those of two windows."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.weights = torch.ones(2)
        self.sums = torch.zeros(2)
        self.before: Tensor | None = None

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(outputs, y), outputs.square().mean()])
        self.sums += losses.detach() * len(y)
        return self.weights[0] * F.cross_entropy(outputs, y) + self.weights[1] * losses[1]

    def after_step(self) -> None:
        if self.before is not None:
            self.weights = F.softmax(self.sums / self.before, 0)
        self.before = self.sums
        self.sums = torch.zeros(2)


class Held(OfLast):
    """The remedy: a module holds the sums."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        self.centre = Centre()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.centre(outputs), y)

    def after_step(self) -> None:
        self.centre.follow()


class OfWindowLoss(OfLast):
    """The remedy for losses, beside sums that are shown, and constants of a batch's type."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.shown = torch.zeros(())
        self.weight = 1.0
        self.ones: Tensor | None = None

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.ones is None:
            self.ones = torch.ones_like(outputs[0])
        loss = self.weight * F.cross_entropy(outputs * self.ones, y)
        self.shown += loss.detach()
        return loss

    def after_step(self) -> None:
        self.weight = 1 / self.accelerator.window_loss


class Constants(OfLast):
    """What is not of samples: views of constants, constants of a batch's type, and tensors that
    are written again for each micro-batch.
    """

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.weights = torch.tensor([1.0, 2.0, 3.0])
        self.weights_of_type: Tensor | None = None
        self.place = torch.zeros(1, 3)
        self.total = torch.zeros(1)
        self.strength = torch.zeros(())
        self.epochs = 0.0

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.weights_of_type is None:
            self.weights_of_type = self.weights.double().to(outputs)
        outputs = outputs * self.weights.type_as(outputs) * self.weights_of_type
        outputs, weights = torch.broadcast_tensors(outputs, self.weights)
        outputs = outputs * torch.stack([self.weights[label] for label in y])[:, None] / weights
        rows = []
        for row in outputs.detach():
            self.place.zero_()
            self.place[0, 1:] = row[1:]
            rows.append(self.place.clone())
            self.place[:] = row
            rows[-1] += self.place
            self.place.copy_(row[None])
            rows[-1] += self.place + torch.sum(row, 0, keepdim=True, out=self.total)
        self.strength.fill_(self.epochs)
        return F.cross_entropy(outputs + torch.cat(rows) * self.strength, y)

    def after_step(self) -> None:
        self.epochs += 0.1


class Teacher(OfLast):
    """Outputs of an epoch are targets of the next, whose samples have them of themselves."""

    def __init__(self, accelerator: hf_ga.Accelerator) -> None:
        super().__init__(accelerator)
        self.of_label: dict[int, Tensor] = {}
        self.old: dict[int, Tensor] = {}

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        rows = zip(y.tolist(), outputs.detach(), strict=True)
        self.of_label.update(rows)
        targets = [self.old.get(label, torch.zeros(3)) for label in y.tolist()]
        return F.mse_loss(outputs, torch.stack(targets))

    def after_step(self) -> None:
        self.old = self.of_label
        self.of_label = {}


def prepared(batch_size: int, steps: int) -> tuple:
    """(accelerator, model, optimizer, loader)."""
    reset_states()
    torch.manual_seed(0)
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    kind: Callable, batch_size: int, samples: TensorDataset | None = None, epochs: int = 1
) -> Tensor:
    """The weights after some epochs."""
    accelerator, model, optimizer, loader = prepared(batch_size, WINDOW // batch_size)
    if samples is not None:
        loader = accelerator.prepare(DataLoader(samples, batch_size))
    kept = kind(accelerator)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(kept.loss(model(x), y))
                optimizer.step()
                if accelerator.sync_gradients:
                    kept.after_step()
                optimizer.zero_grad()
    return flat(model)


def train_by_hand(kind: Callable, batch_size: int) -> Tensor:
    """The weights after an epoch of a loop that accumulates by hand."""
    accelerator, model, optimizer, loader = prepared(batch_size, 1)
    steps = WINDOW // batch_size
    kept = kind(accelerator)
    for number, (x, y) in enumerate(loader, start=1):
        accelerator.backward(kept.loss(model(x), y) / steps)
        if number % steps == 0:
            optimizer.step()
            kept.after_step()
            optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("batch_size", [4, 2, 1])
@pytest.mark.parametrize("kind", [OfLast, OfSums, Queue, Weights])
def test_what_a_loop_keeps_of_samples_is_refused(kind, batch_size, monkeypatch):
    with pytest.raises(hf_ga.LossNotAdditive, match=KEPT):
        train(kind, batch_size)
    whole = train(kind, WINDOW)  # which may keep it
    monkeypatch.setattr(KeptValues, "check", lambda self, loss: None)  # the control
    assert (train(kind, batch_size) - whole).norm() > 100 * CLOSE * whole.norm()


@pytest.mark.parametrize("batch_size", [4, 2, 1])
@pytest.mark.parametrize("kind", [OfLast, OfSums])
def test_what_a_loop_by_hand_keeps_is_refused(kind, batch_size):
    with pytest.raises(hf_ga.LossNotAdditive, match=KEPT):
        train_by_hand(kind, batch_size)


@pytest.mark.parametrize("batch_size", [4, 2, 1])
@pytest.mark.parametrize(
    ("run", "kind"),
    [(train, Held), (train, OfWindowLoss), (train, Constants), (train_by_hand, Held)],
)
def test_what_a_module_holds_is_exact(run, kind, batch_size):
    """Also what is no value of samples."""
    whole = train(kind, WINDOW)
    assert (run(kind, batch_size) - whole).norm() < CLOSE * whole.norm()


@pytest.mark.parametrize("batch_size", [4, 1])
def test_outputs_of_an_epoch_may_be_targets_of_the_next(batch_size):
    """Here an epoch is one window of samples with labels of their own."""
    samples = TensorDataset(X[:WINDOW], torch.arange(WINDOW))
    whole = train(Teacher, WINDOW, samples, epochs=4)
    split = train(Teacher, batch_size, samples, epochs=4)
    assert (split - whole).norm() < CLOSE * whole.norm()


class Odd(nn.Linear):
    """Buffers and attributes that torch cannot compare, or write into."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        kinds = {
            "sparse": torch.eye(4).to_sparse(),
            "nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "expanded": torch.ones(1).expand(3),
        }
        with torch.inference_mode():
            kinds["inference"] = torch.ones(3)
        self.meta = torch.ones(3, device="meta")
        for name, tensor in kinds.items():
            setattr(self, f"{name}_attribute", tensor)
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((self.sparse @ x.T).T + (self.sparse_attribute @ x.T).T)


def test_sparse_and_other_odd_tensors_of_a_module_are_left_alone():
    accelerator, _, _, loader = prepared(2, 4)
    model = Odd()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


class Scaled(nn.Linear):
    """The loop changes its scale after each step."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def train_on_ranks(
    batch_size: int, steps: int, *, reduces: bool = True, seed: int = 0, rounds: bool = False
) -> Tensor:
    """The weights after two epochs, each of which ends with half a window. A module that is not
    prepared, and an attribute of the model, change after each step.
    """
    reset_states()
    torch.manual_seed(seed)
    centre = Centre()
    centre.head = nn.Linear(3, 3).requires_grad_(False)
    if rounds and os.environ["RANK"] == "1":
        centre.head.weight.mul_(1 + 3e-7)
    torch.manual_seed(0)
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = Scaled(4, 3)
    model.scale = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = WINDOW // 2
    loader = DataLoader(TensorDataset(X[:-half], Y[:-half]), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(centre.head(centre(model(x))), y))
                optimizer.step()
                if accelerator.sync_gradients:
                    if reduces:
                        centre.total.copy_(accelerator.reduce(centre.total))
                        centre.count.copy_(accelerator.reduce(centre.count))
                    centre.follow()
                    accelerator.unwrap_model(model).scale *= 0.9
                optimizer.zero_grad()
    return torch.cat([flat(model), centre.centre])


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(("batch_size", "steps"), [(4, 1), (2, 2), (1, 4)])
def test_what_a_module_holds_is_exact_on_two_ranks(batch_size, steps):
    """Also where a rank has no sample, and computes one that is not counted."""
    whole = train_on_ranks(WINDOW, 1)
    for found in without_errors(on_ranks(partial(train_on_ranks, batch_size, steps), 2)):
        assert (found - whole).norm() < CLOSE * whole.norm()


@pytest.mark.slow("starts processes")
def test_modules_may_differ_by_rounding():
    """Where a frozen module was computed on other hardware."""
    without_errors(on_ranks(partial(train_on_ranks, 2, 2, rounds=True), 2))


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(("batch_size", "steps"), [(4, 1), (2, 2), (1, 4)])
def test_modules_that_differ_between_ranks_are_refused(batch_size, steps):
    """As they follow their own samples, or were initialised with other seeds."""
    for work in (partial(train_on_ranks, reduces=False), train_with_seed_of_rank):
        for error in on_ranks(partial(work, batch_size, steps), 2):
            assert "differ between processes" in error


def train_with_seed_of_rank(batch_size: int, steps: int) -> Tensor:
    return train_on_ranks(batch_size, steps, seed=int(os.environ["RANK"]))


class OfUser(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_modes_of_the_loop_end_where_they_end():
    """Also if the loop is left in a window that would be watched."""
    accelerator, model, _, loader = prepared(4, 2)
    with OfUser():
        batches = iter(loader)
        x, y = next(batches)
        accelerator.backward(F.cross_entropy(model(x), y))
    assert torch._C._len_torch_function_stack() == 0
    batches.close()
