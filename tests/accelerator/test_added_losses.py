"""Losses that are sums of several: a window of the loop against one float64 full batch."""

from collections.abc import Callable, Iterator

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_ga

NUM_SAMPLES = 8
NUM_WINDOWS = 5  # of the same samples; the last ones are not rehearsed
WIDTH = 7
Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]


def samples() -> list[Batch]:
    """Sequences of 2 to 6 targets."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 2, 6, 2, 5, 4, 2, 6]
    result = []
    for index, length in enumerate(lengths):
        sample = {
            "features": torch.randn(WIDTH, 4, generator=generator),
            "labels": torch.randint(3, (WIDTH,), generator=generator),
            "mask": torch.arange(WIDTH) < length,
            "sign": torch.tensor((-1.0) ** index),
        }
        result.append(sample)
    return result


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def sums(outputs: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """(sum over the targets of a sample, number of targets), sample by sample."""
    for logits, labels, mask in zip(outputs, batch["labels"], batch["mask"], strict=True):
        losses = F.cross_entropy(logits, labels, reduction="none")
        yield (losses * mask).sum(), mask.sum()


def mean_of_means(outputs: Tensor, batch: Batch) -> Tensor:
    return sum(total / count for total, count in sums(outputs, batch)) / len(outputs)


def shares(outputs: Tensor, batch: Batch) -> Tensor:
    loss = 0.0
    for total, count in sums(outputs, batch):
        loss = loss + total / count / len(outputs)
    return loss


def mean_of_sums(outputs: Tensor, batch: Batch) -> Tensor:
    return sum(total for total, _ in sums(outputs, batch)) / len(outputs)


def mean_of_targets(outputs: Tensor, batch: Batch) -> Tensor:
    return sum(total for total, _ in sums(outputs, batch)) / batch["mask"].sum()


def weighted(outputs: Tensor, batch: Batch) -> Tensor:
    """Samples weigh by a number of Python."""
    weights = batch["features"][:, 0, 0].abs().tolist()
    losses = [
        w * total / count for w, (total, count) in zip(weights, sums(outputs, batch), strict=True)
    ]
    return sum(losses) / len(losses)


def chosen_means(outputs: Tensor, batch: Batch) -> Tensor:
    """Means of torch, over the targets of a sample."""
    chosen = zip(outputs, batch["labels"], batch["mask"], strict=True)
    return sum(F.cross_entropy(o[mask], y[mask]) for o, y, mask in chosen) / len(outputs)


LOSSES = [mean_of_means, shares, mean_of_sums, mean_of_targets, weighted, chosen_means]


def prepared(kind: type, batch_size: int, data: list[Batch] | None = None, **options: int) -> tuple:
    """The accelerator, model, optimizer and loader of some windows, by default of the same
    samples.
    """
    accelerator = kind(cpu=True, **options)
    loader = DataLoader(data or samples() * NUM_WINDOWS, batch_size=batch_size)
    return accelerator, *accelerator.prepare(*model_and_optimizer(), loader)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def squares(model: nn.Module) -> Tensor:
    """A penalty on parameters."""
    return 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def accumulated(
    kind: type,
    loss_of: Loss,
    batch_size: int,
    *,
    penalized: bool = False,
    data: list[Batch] | None = None,
) -> list[Tensor]:
    """The gradient of each window of a loop with `accelerator.accumulate`."""
    steps = NUM_SAMPLES // batch_size
    accelerator, model, optimizer, loader = prepared(
        kind, batch_size, data, gradient_accumulation_steps=steps
    )
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["features"]), batch)
            accelerator.backward(loss + squares(model) if penalized else loss)
            if accelerator.sync_gradients:
                found.append(gradient_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def accumulated_by_hand(
    kind: type, loss_of: Loss, batch_size: int, *, data: list[Batch] | None = None
) -> list[Tensor]:
    """The gradient of each window of a loop that divides its losses."""
    steps = NUM_SAMPLES // batch_size
    accelerator, model, optimizer, loader = prepared(kind, batch_size, data)
    found = []
    for number, batch in enumerate(loader, start=1):
        accelerator.backward(loss_of(model(batch["features"]), batch) / steps)
        if number % steps == 0:
            found.append(gradient_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def full_batch(
    loss_of: Loss, *, penalized: bool = False, data: list[Batch] | None = None
) -> Tensor:
    """One backward of all samples in float64."""
    model, _ = model_and_optimizer()
    model.double()
    batch = torch.utils.data.default_collate(data or samples())
    batch["features"] = batch["features"].double()
    loss = loss_of(model(batch["features"]), batch)
    (loss + squares(model) if penalized else loss).backward()
    return gradient_of(model)


def error(found: list[Tensor], reference: Tensor) -> float:
    """The largest relative error of all windows."""
    assert len(found) == NUM_WINDOWS
    return max(float((g.double() - reference).norm() / reference.norm()) for g in found)


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_loop_over_samples_is_the_full_batch(loss_of, batch_size):
    found = accumulated(hf_ga.Accelerator, loss_of, batch_size)
    assert error(found, full_batch(loss_of)) < 1e-6


@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_loop_over_samples_that_accumulates_by_hand(loss_of):
    found = accumulated_by_hand(hf_ga.Accelerator, loss_of, 4)
    assert error(found, full_batch(loss_of)) < 1e-6


def test_accelerates_own_loop_is_not():
    found = accumulated(accelerate.Accelerator, mean_of_targets, 2)
    assert error(found, full_batch(mean_of_targets)) > 1e-2


def heads_of_one_layer(outputs: Tensor, batch: Batch) -> Tensor:
    """As many losses of one layer as there are accumulation steps, of all samples each."""
    targets = batch["labels"][batch["mask"]]
    losses = [F.cross_entropy(k * outputs[batch["mask"]], targets) for k in (1, 2, 3, 4)]
    return sum(losses) / 4


@pytest.mark.parametrize("batch_size", [4, 2, 1])
@pytest.mark.parametrize("gradient", [accumulated, accumulated_by_hand])
def test_several_losses_of_one_layer_are_no_samples(gradient, batch_size):
    found = gradient(hf_ga.Accelerator, heads_of_one_layer, batch_size)
    assert error(found, full_batch(heads_of_one_layer)) < 1e-6


def weighted_targets(outputs: Tensor, batch: Batch) -> Tensor:
    """A second sum over some of the targets, which some samples lack, divided by their number."""
    mask = batch["mask"]
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    chosen = mask * (batch["labels"] == 2)
    return ((losses * mask).sum() + 0.3 * (losses * chosen).sum()) / mask.sum().clamp(min=1)


def sums_of_two_masks(outputs: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"]
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    chosen = mask * (mask.sum(1, keepdim=True) > 2)  # all targets of longer samples
    return ((losses * mask).sum() + (losses * chosen).sum()) / mask.sum()


@pytest.mark.parametrize("loss_of", [weighted_targets, sums_of_two_masks])
@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_sum_may_be_divided_by_the_targets_of_another_one(loss_of, batch_size):
    """Also where a micro-batch has none of its own."""
    found = accumulated(hf_ga.Accelerator, loss_of, batch_size)
    assert error(found, full_batch(loss_of)) < 1e-6


def mean_of_differences(outputs: Tensor, batch: Batch) -> Tensor:
    """A mean whose weights add up to 0, beside another one."""
    return (outputs[:, 0, 0] * batch["sign"]).mean() + outputs[:, 0, 1].pow(2).mean()


@pytest.mark.parametrize("batch_size", [8, 4, 2])
def test_a_mean_whose_weights_add_up_to_0_keeps_its_part(batch_size):
    found = accumulated(hf_ga.Accelerator, mean_of_differences, batch_size)
    assert error(found, full_batch(mean_of_differences)) < 1e-6


def mean_of_longer(outputs: Tensor, batch: Batch) -> Tensor:
    """A mean over all samples, of which some are no targets."""
    is_target = batch["mask"].sum(1) > 2
    return (outputs[:, 0, 0].pow(2) * is_target).mean()


def sum_of_longer(outputs: Tensor, batch: Batch) -> Tensor:
    """A sum that some micro-batches have no target of, divided by the number of samples."""
    mask = batch["mask"]
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    chosen = mask * (mask.sum(1, keepdim=True) > 2)
    return (losses * chosen).sum() / len(outputs)


def mean_of_some_if_any(outputs: Tensor, batch: Batch) -> Tensor:
    """A penalty beside it is alone in some micro-batches."""
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    chosen = batch["mask"] * (batch["labels"][:, :1] == 0)
    return (losses * chosen).sum() / chosen.sum() if chosen.any() else losses.sum() * 0


@pytest.mark.parametrize("loss_of", [mean_of_longer, sum_of_longer, mean_of_some_if_any])
@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_penalty_counts_once_beside_a_loss_without_targets(loss_of, batch_size):
    found = accumulated(hf_ga.Accelerator, loss_of, batch_size, penalized=True)
    assert error(found, full_batch(loss_of, penalized=True)) < 1e-6


def mean_over_none(outputs: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"] * 0
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def test_a_penalty_beside_no_target_at_all_is_refused():
    with pytest.raises(hf_ga.errors.LossNotAdditive, match="penalty on parameters"):
        accumulated(hf_ga.Accelerator, mean_over_none, 2, penalized=True)


def test_a_penalty_counts_in_a_window_of_one_micro_batch_without_targets():
    found = accumulated(hf_ga.Accelerator, mean_over_none, NUM_SAMPLES, penalized=True)
    assert error(found, full_batch(mean_over_none, penalized=True)) < 1e-6


def means_of_two_masks(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two means over other targets, of which a micro-batch may have none."""
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    squares = outputs.pow(2).mean(2)
    chosen = batch["mask"] * (batch["labels"] > 0)
    of_all = (losses * batch["mask"]).sum() / batch["mask"].sum()
    return of_all, (squares * chosen).sum() / chosen.sum().clamp(min=1)


def halves_of_two_means(outputs: Tensor, batch: Batch) -> Tensor:
    """What micro-batches of one or two samples may take for the mean of the losses of samples."""
    first, second = means_of_two_masks(outputs, batch)
    return (first + second) / 2


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_penalty_counts_once_where_the_loss_was_misread_first(batch_size):
    found = accumulated(hf_ga.Accelerator, halves_of_two_means, batch_size, penalized=True)
    assert error(found, full_batch(halves_of_two_means, penalized=True)) < 1e-6


@pytest.mark.parametrize("batch_size", [8, 4, 1])
def test_a_penalty_counts_once_beside_a_loss_that_replaces_another_one(batch_size):
    """Also in windows that lack the term whose share it took before."""
    losses = [mean_of_longer, mean_of_differences]
    references = [full_batch(loss_of, penalized=True) for loss_of in losses]
    accelerator, model, optimizer, loader = prepared(
        hf_ga.Accelerator, batch_size, gradient_accumulation_steps=NUM_SAMPLES // batch_size
    )
    window = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = losses[window % 2](model(batch["features"]), batch)
            accelerator.backward(loss + squares(model))
            if accelerator.sync_gradients:
                reference = references[window % 2]
                found = gradient_of(model).double()
                assert (found - reference).norm() < 1e-6 * reference.norm()
                window += 1
            optimizer.step()
            optimizer.zero_grad()
    assert window == NUM_WINDOWS


@pytest.mark.parametrize("batch_size", [8, 4, 1])
@pytest.mark.parametrize("is_one_backward", [True, False])
def test_a_loss_of_sums_whose_values_are_unknown_is_said_to_be_inexact(
    batch_size, is_one_backward, caplog
):
    """Autograd keeps no value of a masked sum; that of a whole backward is known."""
    model, _ = model_and_optimizer()
    batch = torch.utils.data.default_collate(samples())
    expected = sum(means_of_two_masks(model(batch["features"]), batch)).item()
    accelerator, model, optimizer, loader = prepared(
        hf_ga.Accelerator, batch_size, gradient_accumulation_steps=NUM_SAMPLES // batch_size
    )
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            means = means_of_two_masks(model(batch["features"]), batch)
            for loss in [sum(means)] if is_one_backward else means:
                accelerator.backward(loss, retain_graph=True)
            if accelerator.sync_gradients:
                found.append(float(accelerator.window_loss))
            optimizer.step()
            optimizer.zero_grad()
    is_inexact = is_one_backward and batch_size < 8
    assert ("torch does not keep the values" in caplog.text) == is_inexact
    assert found == pytest.approx([expected] * NUM_WINDOWS, rel=0.1 if is_inexact else 1e-6)


@pytest.mark.parametrize("batch_size", [8, 4, 1])
def test_a_sum_with_num_targets_beside_a_mean_over_other_targets(batch_size):
    """Each has a backward of its own; the loss of the window is that of the full batch, too."""
    model, _ = model_and_optimizer()
    batch = torch.utils.data.default_collate(samples())
    expected = sum(means_of_two_masks(model(batch["features"]), batch)).item()
    reference = full_batch(lambda outputs, batch: sum(means_of_two_masks(outputs, batch)))
    accelerator, model, optimizer, loader = prepared(
        hf_ga.Accelerator, batch_size, gradient_accumulation_steps=NUM_SAMPLES // batch_size
    )
    gradients = []
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            of_all, of_chosen = means_of_two_masks(model(batch["features"]), batch)
            number = batch["mask"].sum()
            accelerator.backward(of_all * number, num_targets=number, retain_graph=True)
            accelerator.backward(of_chosen)
            if accelerator.sync_gradients:
                gradients.append(gradient_of(model))
                losses.append(float(accelerator.window_loss))
            optimizer.step()
            optimizer.zero_grad()
    assert error(gradients, reference) < 1e-6
    assert losses == pytest.approx([expected] * NUM_WINDOWS, rel=1e-6)


def with_masked_mean_if_any(outputs: Tensor, batch: Batch) -> Tensor:
    """A second mean over all elements, which is left out where it is 0."""
    chosen = batch["labels"] == 2
    chosen = chosen & (batch["mask"].sum(1, keepdim=True) > 2)
    loss = outputs[:, 0, 0].pow(2).mean()
    return loss + (outputs[..., 1].pow(2) * chosen).mean() if chosen.any() else loss


def with_mean_of_chosen_if_any(outputs: Tensor, batch: Batch) -> Tensor:
    """A second mean over some samples."""
    chosen = batch["mask"].sum(1) > 2
    loss = outputs[:, 0, 0].pow(2).mean()
    return loss + outputs[chosen, 0, 1].pow(2).mean() if chosen.any() else loss


@pytest.mark.parametrize("loss_of", [with_masked_mean_if_any, with_mean_of_chosen_if_any])
@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_mean_that_some_micro_batches_lack(loss_of, batch_size):
    """Over all samples if weights of 0 leave some out, over those chosen if they were selected."""
    found = accumulated(hf_ga.Accelerator, loss_of, batch_size)
    assert error(found, full_batch(loss_of)) < 1e-6


def with_mean_of_rows_if_any(outputs: Tensor, batch: Batch) -> Tensor:
    """A second mean that may be over all samples, or over those of micro-batches that have it."""
    chosen = (batch["mask"].sum(1, keepdim=True) > 2) * batch["mask"]
    loss = outputs[:, 0, 0].pow(2).mean()
    rows = (outputs[..., 1].pow(2) * chosen).sum(1) / chosen.sum(1).clamp(min=1)
    return loss + rows.mean() if chosen.any() else loss


def test_a_mean_of_unknown_samples_is_refused():
    with pytest.raises(hf_ga.errors.LossNotAdditive, match="some micro-batches lack this"):
        accumulated(hf_ga.Accelerator, with_mean_of_rows_if_any, 1)


def chosen_by_sign(numbers: list[int]) -> list[Batch]:
    """Windows of two batches of 4, in which so many samples have a positive sign."""
    signs = [1.0 if index < number else -1.0 for number in numbers for index in range(4)]
    generator = torch.Generator().manual_seed(3)
    return [
        {"features": torch.randn(1, 4, generator=generator), "sign": torch.tensor(sign)}
        for sign in signs
    ]


def sum_over_chosen(outputs: Tensor, batch: Batch) -> Tensor:
    """A sum over all samples that is divided by the number of chosen ones."""
    losses = outputs[:, 0].pow(2).sum(1)
    chosen = batch["sign"] > 0
    return (losses.sum() + (losses * chosen).sum()) / chosen.sum().clamp(min=1)


def error_by_window(found: list[Tensor], loss_of: Loss, data: list[Batch]) -> float:
    """The largest relative error of windows of different samples."""
    windows = batched(data, NUM_SAMPLES)
    expected = [full_batch(loss_of, data=window) for window in windows]
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("gradient", [accumulated, accumulated_by_hand])
def test_a_sum_keeps_the_divisor_of_another_one_whatever_its_own_targets(gradient):
    """The next to last window has no chosen sample, so the full batch divides by 1, too. In the
    last one the batches have none and one, so their divisors are also those of the samples.
    """
    data = chosen_by_sign([3, 1, 2, 4, 4, 2, 0, 0, 0, 1])
    found = gradient(hf_ga.Accelerator, sum_over_chosen, 4, data=data)
    assert error_by_window(found, sum_over_chosen, data) < 1e-6


def with_mean_of_positive_if_any(outputs: Tensor, batch: Batch) -> Tensor:
    chosen = batch["sign"] > 0
    loss = outputs[:, 0, 0].pow(2).mean()
    return loss + outputs[chosen, 0, 1].pow(2).mean() if chosen.any() else loss


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_mean_over_chosen_samples_that_were_all_at_first(batch_size):
    """It is seen that they are selected."""
    data = chosen_by_sign([4, 4, 4, 4, 4, 4, 2, 3, 0, 4])
    found = accumulated(hf_ga.Accelerator, with_mean_of_positive_if_any, batch_size, data=data)
    assert error_by_window(found, with_mean_of_positive_if_any, data) < 1e-6


def batched(data: list[Batch], size: int) -> list[list[Batch]]:
    return [data[start : start + size] for start in range(0, len(data), size)]
