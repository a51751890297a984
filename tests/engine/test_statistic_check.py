"""Samples that a loop compares with a statistic of their micro-batch are refused by name, in any
data: here no sample crosses the statistic of any of the micro-batches that are compared.
"""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from forked import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hf_ga

NUM_SAMPLES = 16
BATCH_SIZE = 4


def losses_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """One loss a sample."""
    return F.cross_entropy(outputs, labels, reduction="none")


def above_the_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses[losses > losses.mean()].mean()


def weighted_above_the_median(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    weights = (losses.detach() >= losses.detach().median()).float()
    return (losses * weights).sum() / weights.sum()


def above_a_quantile(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    is_low = losses < torch.quantile(losses.detach(), 0.7)
    return losses.masked_fill(is_low, 0.0).sum() / len(losses)


def without_outliers(outputs: Tensor, labels: Tensor) -> Tensor:
    """In micro-batches of four no standard score exceeds 1.5, in those of 16 some do."""
    losses = losses_of(outputs, labels)
    values = losses.detach()
    scores = (values - values.mean()) / values.std()
    return torch.where(scores < 1.6, losses, 0.0).mean()


def set_in_place(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    weights = torch.zeros_like(losses)
    weights[losses > losses.mean()] = 1.0
    return (losses * weights).mean()


def limited(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses.clone().clamp_(max=3 * losses.detach().mean()).mean()


def detached_topk(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses[losses.detach().topk(2).indices].mean()


def largest_of_a_column(outputs: Tensor, labels: Tensor) -> Tensor:
    return losses_of(outputs, labels)[:, None].topk(2, dim=0).values.mean()


def sorted_half(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses[losses.detach().argsort()[len(losses) // 2 :]].mean()


def above_a_rank(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses[losses >= losses.sort().values[1]].mean()


def of_low_ranks(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    ranks = losses.argsort().argsort()
    return (losses * (ranks < 3)).mean()


def above_a_number(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses[losses > losses.mean().item()].mean()


def limited_by_a_number(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = losses_of(outputs, labels)
    return losses.clamp(max=2.0 * float(losses.detach().mean())).mean()


def of_large_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """By a statistic of the data."""
    weights = (labels >= labels.float().mean()).float()
    return (losses_of(outputs, labels) * weights).sum() / weights.sum()


COMPARED = [
    above_the_mean,
    weighted_above_the_median,
    above_a_quantile,
    without_outliers,
    set_in_place,
    limited,
    detached_topk,
    largest_of_a_column,
    sorted_half,
    above_a_rank,
    of_low_ranks,
    above_a_number,
    limited_by_a_number,
    of_large_labels,
]


class Classifier(nn.Module):
    """It computes its loss itself, or lets the loop do that."""

    def __init__(self, loss_of):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.loss_of = loss_of

    def forward(self, features, labels=None):
        outputs = self.layer(features)
        return outputs if labels is None else self.loss_of(outputs, labels)


def train(
    loss_of,
    batch_size: int = BATCH_SIZE,
    *,
    is_own_loss: bool = False,
    compiled=lambda model: model,
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of one window, and the outputs that the loop met."""
    torch.manual_seed(0)
    model = compiled(Classifier(loss_of))
    features = torch.randn(NUM_SAMPLES, 3)
    labels = torch.arange(NUM_SAMPLES) % 3
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=NUM_SAMPLES // batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(features, labels), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    outputs_met = []
    for x, y in loader:
        with accelerator.accumulate(model):
            outputs = model(x, y if is_own_loss else None)
            accelerator.backward(outputs if is_own_loss else loss_of(outputs, y))
            outputs_met.append(outputs)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), outputs_met


@pytest.mark.parametrize("is_own_loss", [False, True], ids=["of the loop", "of the model"])
@pytest.mark.parametrize("loss_of", COMPARED)
def test_samples_that_are_compared_with_a_statistic_are_refused(loss_of, is_own_loss):
    with pytest.raises(hf_ga.LossNotAdditive, match="compares samples with a statistic"):
        train(loss_of, is_own_loss=is_own_loss)


def in_layers(model: Classifier) -> Classifier:
    model.layer.compile(backend="eager")
    return model


def as_a_whole(model: Classifier) -> Classifier:
    model.compile(backend="eager")
    return model


def in_a_wrapper(model: Classifier) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads `.grad`
@pytest.mark.parametrize("compiled", [in_layers, as_a_whole, in_a_wrapper])
def test_they_are_refused_where_the_model_is_compiled(compiled):
    with pytest.raises(hf_ga.LossNotAdditive, match="compares samples with a statistic"):
        train(weighted_above_the_median, compiled=compiled)
    gradient, _ = train(by_constants, compiled=compiled)
    expected, _ = train(by_constants, batch_size=NUM_SAMPLES)
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_are_refused_in_the_loss_of_a_model_with_compiled_layers():
    for loss_of in (weighted_above_the_median, detached_topk):
        with pytest.raises(hf_ga.LossNotAdditive, match="compares samples with a statistic"):
            train(loss_of, is_own_loss=True, compiled=in_layers)


class OfColumns(nn.Module):
    """Its samples are columns, and it returns nothing but its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, features, labels):
        return F.cross_entropy(self.layer(features.T), labels.flatten())


def fail_before_backward():
    """A loop by hand that raises between its forward and its backward."""
    model = Classifier(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(NUM_SAMPLES, 3))
    accelerator = hf_ga.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(samples, BATCH_SIZE)
    )
    with pytest.raises(ArithmeticError):
        for (x,) in loader:
            model(x)
            raise ArithmeticError


def train_unwatched():
    """A loop in which a compiled model has neither outputs nor a batch with rows of samples."""
    model = OfColumns()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [(torch.randn(3), torch.tensor(number % 3)) for number in range(NUM_SAMPLES)]

    def collate(samples):
        features, labels = zip(*samples, strict=True)
        return torch.stack(features, dim=1), torch.stack(labels)[None]

    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(samples, BATCH_SIZE, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads `.grad`
@pytest.mark.parametrize("run", [fail_before_backward, train_unwatched])
def test_functions_are_compiled_after_a_loop(run):
    """They run eagerly where it is watched what the loop computes."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run()
    torch.compile(torch.sin, backend=backend)(torch.randn(3))
    torch.compiler.set_stance("default")
    assert compiled


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_they_are_refused_under_fsdp(kind):
    """Where nothing is rehearsed."""
    for error in on_ranks(partial(train, weighted_above_the_median), 2, kind):
        assert "compares samples with a statistic" in error


@pytest.mark.parametrize("loss_of", [weighted_above_the_median, limited, of_large_labels])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_refused_by_hand_at_micro_batches_of_one(loss_of, seed):
    """The first iteration, of one sample, is the rehearsal, and shows nothing."""
    torch.manual_seed(seed)
    model = Classifier(loss_of)
    samples = TensorDataset(torch.randn(NUM_SAMPLES, 3), torch.arange(NUM_SAMPLES) % 3)
    accelerator = hf_ga.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples))
    with pytest.raises(hf_ga.LossNotAdditive, match="compares samples with a statistic"):
        for number, (x, y) in enumerate(loader, start=1):
            accelerator.backward(loss_of(model(x), y) / 8)
            if number % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("loss_of", COMPARED)
def test_a_full_batch_may_compare_samples(loss_of):
    """The control: there is no split."""
    gradient, _ = train(loss_of, batch_size=NUM_SAMPLES)
    assert gradient.norm() > 0


def by_constants(outputs: Tensor, labels: Tensor) -> Tensor:
    """The hardest ones by a constant, statistics of one sample, another order of the samples,
    statistics that are only shown.
    """
    order = labels.argsort()
    losses = losses_of(outputs, labels)[order]
    shown = (losses * (losses > losses.mean())).mean()
    assert repr(shown).startswith("tensor(")
    copy.deepcopy(losses.detach())
    torch.save(losses.detach(), io.BytesIO())
    of_rows = [row.relu()[row > row.mean()].sum() for row in outputs]
    kept = outputs[outputs > outputs.mean(-1, keepdim=True)].abs().sum() / len(outputs)
    weights = (losses.clamp(0.1, 5.0) > 1.0).float()
    return (losses * weights).sum() / weights.sum() + kept + torch.stack(of_rows).mean()


class OfUser(Tensor):
    """A class whose functions are its own."""


def with_constants(outputs: Tensor, labels: Tensor) -> Tensor:
    """Constants of the type of a tensor, and a loss that is printed before its backward."""
    losses = losses_of(outputs, labels)
    limited = torch.max(losses - 1, losses.new_zeros(1)).minimum(losses.new_tensor(2.0))
    shifted = torch.where(labels > 0, losses - 1, losses.new_zeros(())).abs()
    loss = (limited + shifted + torch.ones_like(losses.mean()) * losses.relu()).mean()
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    weighted = labels.as_subclass(OfUser) * losses
    assert type(weighted) is OfUser
    return loss + weighted.as_subclass(Tensor).mean()


def of_sorted_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """A mask of sorted lengths."""
    lengths, order = labels.sort(descending=True)
    mask = torch.arange(3) < lengths[:, None]
    return (outputs[order].abs() * mask).sum() / len(outputs)


def by_slices(outputs: Tensor, labels: Tensor) -> Tensor:
    """A number of Python for each sample, and rows as slices."""
    losses = losses_of(outputs, labels)
    total = outputs.new_zeros(())
    for i in range(len(outputs)):
        total = total + (losses[i : i + 1] - float(labels[i]) / 7).abs().sum()
        total = total + (outputs[i : i + 1] - losses[i : i + 1]).relu().sum()
    return total / len(outputs)


def of_one_element(outputs: Tensor, labels: Tensor) -> Tensor:
    """One element that a mask takes and sets is no statistic."""
    targets = torch.zeros_like(outputs)
    mask = torch.zeros_like(outputs, dtype=torch.bool)
    mask[:1, :1] = True
    targets[mask] = outputs.detach()[mask] * 1
    return F.l1_loss(outputs, targets * 0 + 1)


def of_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    """A number of Python for each class that the micro-batch has."""
    losses = losses_of(outputs, labels)
    limits = [losses[labels == label].clamp(max=1.0 + label) for label in set(labels.tolist())]
    return torch.cat(limits).sum() / len(losses)


@pytest.mark.parametrize("batch_size", [4, 2, 1])
@pytest.mark.parametrize(
    "loss_of", [with_constants, of_sorted_labels, by_slices, of_one_element, of_classes]
)
def test_comparisons_without_a_statistic_are_exact(loss_of, batch_size):
    gradient, _ = train(loss_of, batch_size)
    expected, _ = train(loss_of, batch_size=NUM_SAMPLES)
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


def test_other_comparisons_are_exact():
    gradient, outputs = train(by_constants)
    expected, _ = train(by_constants, batch_size=NUM_SAMPLES)
    assert (gradient - expected).norm() < 1e-6 * expected.norm()
    assert {type(tensor) for tensor in outputs} == {Tensor}
