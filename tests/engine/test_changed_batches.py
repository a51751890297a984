"""A loop or a model that changes its batch in place changes it once, though the samples come again:
in a trial of speed-ups, in a first pass, and where a window is computed again.
"""

import pytest
import torch
import torch.nn.functional as F
from documented_loop import reset_states
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hf_ga

GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(40, 6, generator=GENERATOR)
Y = torch.randint(3, (40,), generator=GENERATOR)


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x.mul_(1.5).add_(0.5)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def windows() -> list[tuple[Tensor, Tensor]]:
    return [(x.clone(), y) for x, y in zip(X.split(8), Y.split(8), strict=True)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, window: int) -> Tensor:
    """From the fourth window on, it has another term, so that this window is computed again."""
    outputs = model(x, y)
    return outputs["loss"] + (outputs["logits"].pow(2).mean() if window >= 3 else 0.0)


def in_the_loop(batch_size: int) -> list[Tensor]:
    accelerator = hf_ga.Accelerator(gradient_accumulation_steps=8 // batch_size)
    model = Scaling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(X, Y), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gradients = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y, len(gradients)))
            if accelerator.sync_gradients:
                gradients.append(model.head.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def in_calls(batch_size: int, **options) -> list[Tensor]:
    model = Scaling()
    gradients = []
    for x, y in windows():
        batch = {"x": x, "labels": y}
        hf_ga.backward(model, batch, micro_batch_size=batch_size, **options)
        gradients.append(model.head.weight.grad.clone())
        model.zero_grad()
    return gradients


def of_whole_batches(batch_size: int) -> list[Tensor]:
    def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs["logits"], batch["labels"])

    return in_calls(batch_size, whole_batch=loss)


def reference(*, has_late_term: bool) -> list[Tensor]:
    model = Scaling()
    gradients = []
    for window, (x, y) in enumerate(windows()):
        loss_of(model, x, y, window if has_late_term else 0).backward()
        gradients.append(model.head.weight.grad.clone())
        model.zero_grad()
    return gradients


@pytest.mark.parametrize("batch_size", [8, 2])
@pytest.mark.parametrize("door", [in_the_loop, in_calls, of_whole_batches])
def test_a_batch_is_changed_once(door, batch_size):
    expected = reference(has_late_term=door is in_the_loop)
    torch.testing.assert_close(door(batch_size), expected, rtol=1e-5, atol=1e-6)
