"""Losses that a loop computes itself: the gradient of a window against one float64 full batch."""

from collections.abc import Callable
from functools import partial

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hf_ga

NUM_SAMPLES = 16
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
IGNORED = -100
Criterion = Callable[[Tensor, Tensor], Tensor]


def dataset() -> TensorDataset:
    """Rare classes, and samples without a label."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 6, generator=generator)
    labels = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    labels[2] = 1
    labels[11] = 2
    labels[[3, 4, 5]] = IGNORED
    return TensorDataset(features, labels)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def one_hot(labels: Tensor, outputs: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), 3).to(outputs.dtype)


def weighted(outputs: Tensor, labels: Tensor, **options: float) -> Tensor:
    weight = CLASS_WEIGHTS.to(outputs.dtype)
    return F.cross_entropy(outputs, labels, weight=weight, **options)


CRITERIA: dict[str, Criterion] = {
    "cross entropy": lambda outputs, labels: F.cross_entropy(outputs, labels),
    "class weights": weighted,
    "class weights, smoothed": partial(weighted, label_smoothing=0.1),
    "module": lambda outputs, labels: nn.CrossEntropyLoss()(outputs, labels),
    "probabilities": lambda o, labels: F.cross_entropy(o, one_hot(labels, o)),
    "negative log likelihood": lambda o, labels: F.nll_loss(o.log_softmax(-1), labels),
    "squared error": lambda o, labels: F.mse_loss(o, one_hot(labels, o)),
    "huber": lambda o, labels: nn.HuberLoss()(o, one_hot(labels, o)),
    "binary": lambda o, labels: F.binary_cross_entropy_with_logits(o, one_hot(labels, o)),
    "divergence": lambda o, labels: F.kl_div(
        o.log_softmax(-1), one_hot(labels, o), reduction="batchmean"
    ),
}


def gradient(
    kind: type,
    loss_of: Callable[[accelerate.Accelerator, nn.Module, Tensor, Tensor], object],
    batch_size: int = 2,
) -> Tensor:
    """The gradient of one window, as the loop's optimizer would see it."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=NUM_SAMPLES // batch_size)
    model = small_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(dataset(), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for features, labels in loader:
        with accelerator.accumulate(model):
            loss_of(accelerator, model, features, labels)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def full_batch(loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Tensor:
    """One backward of all samples in float64."""
    model = small_model().double()
    features, labels = dataset().tensors
    loss_of(model, features.double(), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", CRITERIA)
def test_a_mean_of_torch_is_exact(name):
    criterion = CRITERIA[name]
    reference = full_batch(lambda model, x, y: criterion(model(x), y))

    def step(accelerator, model, x, y):
        accelerator.backward(criterion(model(x), y))

    assert error(gradient(hf_ga.Accelerator, step), reference) < 1e-6


@pytest.mark.parametrize("name", ["cross entropy", "class weights", "negative log likelihood"])
def test_accelerates_own_loop_is_not(name):
    """With another number of targets in each micro-batch."""
    criterion = CRITERIA[name]
    reference = full_batch(lambda model, x, y: criterion(model(x), y))

    def step(accelerator, model, x, y):
        accelerator.backward(criterion(model(x), y).nan_to_num())

    assert error(gradient(accelerate.Accelerator, step), reference) > 1e-2


def penalty(model: nn.Module) -> Tensor:
    return 1e-2 * sum((p**2).sum() for p in model.parameters())


def test_a_penalty_on_the_weights_counts_once():
    reference = full_batch(lambda model, x, y: weighted(model(x), y) + penalty(model))

    def step(accelerator, model, x, y):
        if (y != IGNORED).any():
            accelerator.backward(weighted(model(x), y) + penalty(model))
        else:
            accelerator.backward(weighted(model(x), y))

    assert error(gradient(hf_ga.Accelerator, step), reference) < 1e-6


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def test_any_sum_with_its_number_of_targets_is_exact():
    """Here the focal loss over positives: most micro-batches have none."""

    def mean(model, x, y):
        return focal(model(x), y).sum() / (y > 0).sum()

    def step(accelerator, model, x, y):
        accelerator.backward(focal(model(x), y).sum(), num_targets=(y > 0).sum())

    assert error(gradient(hf_ga.Accelerator, step), full_batch(mean)) < 1e-6


@pytest.mark.parametrize("convert", [int, torch.as_tensor], ids=["number", "tensor"])
def test_a_number_of_targets_that_was_raised_is_refused_or_named(convert, caplog):
    """A true 1 looks like it, so only a sum of 0 is refused: the loss is over positives."""

    def step(accelerator, model, x, y):
        total = (focal(model(x), y) * (y > 0)).sum()
        accelerator.backward(total, num_targets=convert((y > 0).sum().clamp(min=1)))

    with pytest.raises(hf_ga.LossNotAdditive, match=r"the sum is 0.*max\(number, 1\)"):
        gradient(hf_ga.Accelerator, step)

    def with_negatives(accelerator, model, x, y):
        number = (y > 0).sum().clamp(min=1)
        losses = focal(model(x), y.clamp(min=0))
        accelerator.backward(losses.sum(), num_targets=convert(number))

    gradient(hf_ga.Accelerator, with_negatives)
    assert caplog.text.count("num_targets is 1 for a micro-batch") == 1


def hardest_half(accelerator, model, x, y):
    losses = F.cross_entropy(model(x), y.clamp(min=0), reduction="none")
    accelerator.backward(losses.topk(len(y) // 2).values.sum(), num_targets=len(y) // 2)


def above_the_median(accelerator, model, x, y):
    losses = F.cross_entropy(model(x), y.clamp(min=0), reduction="none")
    accelerator.backward(F.relu(losses - losses.median()).sum(), num_targets=len(y))


def sum_of_in_batch_negatives(accelerator, model, x, y):
    outputs = model(x)
    losses = F.cross_entropy(outputs @ outputs.T, torch.arange(len(x)), reduction="sum")
    accelerator.backward(losses, num_targets=len(x))


def sum_of(losses_of):
    """A step that passes a loss of the model's outputs."""

    def step(accelerator, model, x, y):
        accelerator.backward(losses_of(model(x)), num_targets=len(x))

    return step


def similarities_by_einsum(outputs):
    similarities = torch.einsum("id,jd->ij", outputs, outputs)
    return F.cross_entropy(similarities, torch.arange(len(outputs)), reduction="sum")


def similarities_by_cosine(outputs):
    similarities = F.cosine_similarity(outputs[:, None], outputs[None], dim=-1)
    return F.cross_entropy(similarities, torch.arange(len(outputs)), reduction="sum")


def distances(outputs):
    return torch.cdist(outputs, outputs.roll(1, 0)).exp().sum()


def spread(outputs):
    return (outputs - outputs.mean(0)).square().sum()


def log_of_a_sum(outputs):
    return (outputs[:, 0] - outputs[:, 1]).square().exp().sum().log()


OF_OUTPUTS = map(
    sum_of, (similarities_by_einsum, similarities_by_cosine, distances, spread, log_of_a_sum)
)


@pytest.mark.parametrize(
    "step", [hardest_half, above_the_median, sum_of_in_batch_negatives, *OF_OUTPUTS]
)
def test_a_sum_that_compares_samples_is_refused(step):
    with pytest.raises(hf_ga.LossNotAdditive, match=r"depends on the other samples.*whole_batch"):
        gradient(hf_ga.Accelerator, step)


@pytest.mark.parametrize("choose", ["topk", "sort", "kthvalue"])
def test_a_choice_among_samples_is_refused_by_name(choose):

    def step(accelerator, model, x, y):
        losses = F.cross_entropy(model(x), y.clamp(min=0), reduction="none")
        chosen = {
            "topk": lambda: losses.topk(1).values,
            "sort": lambda: losses.sort().values[-1:],
            "kthvalue": lambda: losses.kthvalue(len(losses)).values[None],
        }[choose]()
        accelerator.backward(chosen.sum(), num_targets=len(y))

    with pytest.raises(hf_ga.LossNotAdditive, match=rf"torch\.{choose} compares"):
        gradient(hf_ga.Accelerator, step)


def test_a_sum_that_compares_the_outputs_of_one_sample_is_exact():
    """The control: the two largest logits of each sample, their softmax, a product with weights."""

    def losses(model, x, y):
        outputs = model(x)
        largest = outputs.topk(2, dim=1).values.log_softmax(-1)
        return (largest @ largest.new_ones(2, 2)).square().sum(1) + outputs.sort(-1).values[:, 0]

    def mean(model, x, y):
        return losses(model, x, y).mean()

    def step(accelerator, model, x, y):
        accelerator.backward(losses(model, x, y).sum(), num_targets=len(y))

    assert error(gradient(hf_ga.Accelerator, step), full_batch(mean)) < 1e-6


def over_positives(number_of):
    """Most micro-batches have no positive sample."""

    def mean(model, x, y):
        return (focal(model(x), y) * (y > 0)).sum() / number_of(y > 0)

    return mean


def two_terms(model, x, y):
    """With other divisors."""
    outputs = model(x)
    return F.mse_loss(outputs, one_hot(y, outputs)) + weighted(outputs, y)


def captured_before(model, x, y, criterion=F.cross_entropy):
    """A function that was taken from torch before the loop."""
    return criterion(model(x), y)


def sum_by_position(model, x, y):
    return F.cross_entropy(model(x), y, None, None, -100, None, "sum") / (y >= 0).sum()


def penalty_with_data(model, x, y):
    used = (x @ next(model.parameters()).T).pow(2).mean()
    return F.cross_entropy(model(x), y) + used


OWN_MEANS = {
    "raised to 1": over_positives(lambda chosen: chosen.sum().clamp(min=1)),
    "two terms": two_terms,
    "captured before": captured_before,
    "sum by position": sum_by_position,
    "penalty with data": penalty_with_data,
}


@pytest.mark.parametrize("name", OWN_MEANS)
def test_a_mean_of_the_loop_is_exact(name):
    """More of them, in more layouts: test_loops.py."""
    mean = OWN_MEANS[name]

    def step(accelerator, model, x, y):
        accelerator.backward(mean(model, x, y))

    assert error(gradient(hf_ga.Accelerator, step), full_batch(mean)) < 1e-6


def test_accelerates_means_of_the_loop_are_not_exact():
    """The control."""
    mean = OWN_MEANS["raised to 1"]

    def step(accelerator, model, x, y):
        accelerator.backward(mean(model, x, y))

    assert error(gradient(accelerate.Accelerator, step), full_batch(mean)) > 1e-2


def divided(accelerator, model, x, y):
    accelerator.backward(F.cross_entropy(model(x), y) / accelerator.gradient_accumulation_steps)


def only_a_sum(accelerator, model, x, y):
    accelerator.backward(F.cross_entropy(model(x), y, reduction="sum"))


def plus_one(accelerator, model, x, y):
    accelerator.backward(F.cross_entropy(model(x), y, reduction="sum") / (len(y) + 1))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (divided, "divided by 8, the gradient accumulation steps.*multiply the loss by 0.125"),
        (only_a_sum, "is a sum, not a mean.*pass num_targets"),
        (plus_one, r"one was added to it.*backward\(sum, num_targets=n\)"),
    ],
)
def test_another_loss_is_refused_before_the_update(step, message):
    with pytest.raises(hf_ga.HfGaError, match=message):
        gradient(hf_ga.Accelerator, step)


def test_torchs_functions_are_put_back():
    """Those that draw; those that compute losses stay as they are."""
    before = F.cross_entropy, torch.rand

    def step(accelerator, model, x, y):
        assert F.cross_entropy is before[0]
        assert torch.rand is not before[1]
        accelerator.backward(F.cross_entropy(model(x), y))

    gradient(hf_ga.Accelerator, step)
    assert (F.cross_entropy, torch.rand) == before


@pytest.mark.parametrize("accumulates", [True, False])
def test_torchs_functions_are_put_back_by_an_error_whose_traceback_is_kept(accumulates):
    """As in a notebook: it keeps the iterator, too."""
    before = torch.rand
    accelerator = hf_ga.Accelerator(cpu=True)
    model = small_model()
    loader = DataLoader(dataset(), batch_size=4)
    model, loader = accelerator.prepare(model, loader)
    batches = iter(loader)
    features, labels = next(batches)
    assert torch.rand is not before
    with pytest.raises(hf_ga.HfGaError):
        if accumulates:
            with accelerator.accumulate(model):
                raise hf_ga.HfGaError
        else:
            accelerator.backward(F.cross_entropy(model(features), labels, reduction="none"))
    assert torch.rand is before


class WithLoss(nn.Module):
    """Counts each sample whose label is not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, x: Tensor, labels: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels, weight=weight), "logits": logits}


def named_rows() -> list[dict[str, Tensor]]:
    features, labels = dataset().tensors
    return [{"x": x, "labels": y} for x, y in zip(features, labels.clamp(min=0), strict=True)]


def gradient_of_calls(call: Callable[[nn.Module, dict[str, Tensor]], Tensor], size: int) -> Tensor:
    """Of one window, where the loop calls the model with something else than its batch."""
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=NUM_SAMPLES // size)
    model = WithLoss().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(named_rows(), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(call(model, batch))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relabelled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every second sample has no label."""
    labels = batch["labels"].masked_fill(batch["x"][:, 0] > 0.3, IGNORED)
    return model(x=batch["x"], labels=labels)["loss"]


def relabelled_in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    batch["labels"][batch["x"][:, 0] > 0.3] = IGNORED
    return model(**batch)["loss"]


def with_class_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, weight=CLASS_WEIGHTS.to(batch["x"].dtype))["loss"]


def with_some_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["x"][:, 0] < 0.3
    return model(batch["x"][kept], batch["labels"][kept])["loss"]


CALLS = [relabelled, relabelled_in_place, with_class_weights, with_some_rows]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [16, 4])
def test_what_the_loop_passes_to_the_model_is_what_counts(call, size):
    model = WithLoss().double()
    rows = named_rows()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["x"] = batch["x"].double()
    call(model, batch).backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert error(gradient_of_calls(call, size), reference) < 1e-6


def weighted_elements(accelerator, model, x, y):
    outputs = model(x)
    weight = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(len(x)))
    accelerator.backward(F.mse_loss(outputs, one_hot(y, outputs), weight=weight))


def test_weights_of_elements_that_depend_on_the_micro_batch_are_refused():
    with pytest.raises(hf_ga.LossNotAdditive):
        gradient(hf_ga.Accelerator, weighted_elements)


def test_a_parameter_outside_of_the_model_is_trained_exactly():
    """A temperature that only the optimizer holds."""

    def train(kind, batch_size, dtype=torch.float32):
        accelerator = kind(cpu=True, gradient_accumulation_steps=NUM_SAMPLES // batch_size)
        model = small_model().to(dtype).train()
        temperature = nn.Parameter(torch.ones((), dtype=dtype))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1.0)
        loader = DataLoader(dataset(), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for features, labels in loader:
            with accelerator.accumulate(model):
                outputs = model(features.to(dtype)) * temperature
                accelerator.backward(F.cross_entropy(outputs, labels))
        return torch.stack([temperature.grad, model[0].bias.grad[0]])

    reference = train(accelerate.Accelerator, NUM_SAMPLES, torch.float64)
    assert error(train(hf_ga.Accelerator, 4), reference) < 1e-6
    assert error(train(accelerate.Accelerator, 4), reference) > 1e-3
