"""Losses of all samples of a window: the gradient of one forward of the full batch, for any split
of it.
"""

import copy
import random
from functools import partial

import helpers as h
import pairs
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from forked import on_ranks, without_errors
from processes import make_accelerator
from torch import nn
from tried import tried

import hf_ga
from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness

WINDOW = 32


def gradient(
    size: int,
    whole_batch=pairs.info_nce,
    accelerator=None,
    number: int = WINDOW,
    returns_scale: bool = False,
    **options,
):
    """Gradient and loss of a window in micro-batches of a size; and that of one float64 batch."""
    accelerator = accelerator or Accelerator(cpu=True)
    model = pairs.embedder(returns_scale=returns_scale)
    windows = hf_ga.WindowLoader(
        pairs.pair_samples(number),
        pairs.collate_pairs,
        accelerator=accelerator,
        per_device_batch_size=size,
        global_batch_size=number,
        seed=pairs.SEED,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, _ = hf_ga.prepare(
        accelerator, model, optimizer, windows, whole_batch=whole_batch(model)
    )
    (window,) = windows
    result = hf_ga.backward_window(accelerator, prepared, window)
    truth = pairs.full_batch_gradient(model, window, whole_batch)
    return h.gradients(model), result, truth


@pytest.mark.parametrize(
    ("size", "returns_scale"),
    [(WINDOW, False), (5, False), (1, True)],
    ids=["whole-parameter", "5-parameter", "1-output"],
)
def test_in_batch_negatives_and_a_learned_temperature(size, returns_scale):
    found, result, truth = gradient(size, returns_scale=returns_scale)
    assert h.relative_error(found, truth) < 2e-6
    error = found["log_scale"].double() - truth["log_scale"]
    assert error.abs() < 2e-6 * h.norm(truth)
    assert result.num_targets == WINDOW


def test_control_negatives_of_micro_batches_only():
    """The mean of the losses of micro-batches of 16 is another loss."""
    model = pairs.embedder(dropout=0.0)
    loss = pairs.info_nce(model)
    batches = [
        pairs.collate_pairs(pairs.pair_samples(WINDOW)[i : i + 16]) for i in range(0, WINDOW, 16)
    ]
    for batch in batches:
        labels = batch.pop("label")
        (loss(model(**batch), labels) / len(batches)).backward()
    naive = h.gradients(model)
    model = pairs.embedder(dropout=0.0)
    batch = pairs.collate_pairs(pairs.pair_samples(WINDOW))
    labels = batch.pop("label")
    pairs.info_nce(model)(model(**batch), labels).backward()
    assert h.relative_error(naive, h.gradients(model)) > 0.1


def of_rank(size: int, number: int, **options):
    found, result, truth = gradient(
        size, accelerator=make_accelerator("ddp"), number=number, **options
    )
    return found, result.loss, truth


@pytest.mark.parametrize(
    ("ranks", "size", "number"), [(2, 16, 64), (2, 5, 64), (3, 1, 64), (3, 5, 7), (2, 2, 1)]
)
@pytest.mark.slow("starts processes")
def test_ranks(ranks, size, number):
    """Also ranks with different numbers of samples, and one without any."""
    results = without_errors(on_ranks(partial(of_rank, size, number), ranks))
    for found, loss, truth in results:
        assert loss == results[0][1]
        if number == 1:  # a single pair has no negatives, so the loss is 0
            assert h.norm(found) < 1e-6
            continue
        assert h.relative_error(found, truth) < 2e-6


def test_a_gather_without_gradients_is_wrong():
    """Control: each rank's samples against the others' outputs without gradients, as after a plain
    all-gather.
    """
    model = pairs.embedder(dropout=0.0)
    batch = pairs.collate_pairs(pairs.pair_samples(WINDOW))
    batch.pop("label")

    def gradients_of(detached):
        model.zero_grad()
        outputs = model(**batch)
        scale = model.log_scale.exp()
        if not detached:
            pairs.contrast(outputs["anchor"], outputs["positive"], scale).backward()
            return h.gradients(model)
        for rank in range(2):
            own = torch.arange(WINDOW) % 2 == rank
            anchor, positive = (
                torch.where(own.unsqueeze(1), outputs[name], outputs[name].detach())
                for name in ("anchor", "positive")
            )
            (pairs.contrast(anchor, positive, scale) / 2).backward(retain_graph=True)
        return h.gradients(model)

    assert h.relative_error(gradients_of(True), gradients_of(False)) > 0.1


def hardest_half(model):
    def whole_batch(outputs, batch):
        losses = F.cross_entropy(outputs["anchor"], batch["label"], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()

    return whole_batch


def focal_over_positives(model):
    def whole_batch(outputs, batch):
        losses = F.cross_entropy(outputs["anchor"], batch["label"], reduction="none")
        weights = (1 - (-losses).exp()) ** 2
        return (weights * losses).sum() / (batch["label"] > 2).sum().clamp(min=1)

    return whole_batch


@pytest.mark.parametrize("loss", [hardest_half, focal_over_positives])
def test_losses_that_no_sum_expresses(loss):
    found, _, truth = gradient(5, loss)
    assert h.relative_error(found, truth) < 2e-6


class Centres(nn.Module):
    """A loss with parameters of its own, which the model does not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.centres = nn.Parameter(torch.randn(5, h.WIDTH))

    def forward(self, outputs, batch):
        return (outputs["anchor"] - self.centres[batch["label"]]).square().mean().sqrt()


def centres_gradient(size, accelerator=None):
    loss = Centres()
    gradient(size, lambda model: copy_of(loss, model), accelerator)
    return loss.centres.grad


def copy_of(loss, model):
    """The reference gets a copy in float64, whose gradient is not looked at."""
    if next(model.parameters()).dtype == torch.float64:
        return Centres().double()
    return loss


def test_parameters_of_the_loss():
    whole = centres_gradient(WINDOW)
    assert whole is not None
    assert whole.norm() > 0
    for size in (16, 5):
        assert torch.allclose(centres_gradient(size), whole, rtol=1e-5, atol=1e-7)


def test_parameters_of_the_loss_on_two_ranks():
    def work():
        return centres_gradient(5, make_accelerator("ddp"))

    whole = centres_gradient(WINDOW)
    first, second = without_errors(on_ranks(work, 2))
    assert torch.equal(first, second)
    assert torch.allclose(first, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("returns_scale", [False, True], ids=["parameter", "output"])
def test_same_bits(returns_scale):
    options = {"returns_scale": returns_scale, "canonical_micro_batch": 4}

    def work():
        torch.set_num_threads(1)
        return of_rank(8, WINDOW, **options)[:2]

    alone, alone_loss = without_errors(on_ranks(work, 1))[0]
    for found, loss in without_errors(on_ranks(work, 2)):
        assert loss == alone_loss
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def tokens_loss(outputs, batch):
    """A mean over the tokens of the window whose loss is above the median."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    losses = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none")
    return losses[losses > 0].topk(int((losses > 0).sum()) // 2).values.mean()


def test_outputs_of_tokens_are_padded_to_the_window():
    model = h.gpt2()
    samples = h.token_samples(24)
    truth = None
    for size in (24, 7):
        windows = hf_ga.WindowLoader(
            samples,
            h.pad_right,
            accelerator=Accelerator(cpu=True),
            per_device_batch_size=size,
            global_batch_size=24,
            shuffle=False,
        )
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows, whole_batch=tokens_loss)
        assert windows.state.pad_to_window
        (window,) = windows
        model.zero_grad()
        hf_ga.backward_window(accelerator, prepared, window)
        found = h.gradients(model)
        if truth is None:
            model.double().zero_grad()
            batch = h.pad_right(samples)
            arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
            tokens_loss(model(**arguments), batch).backward()
            truth = h.gradients(model)
            model.float()
        assert h.relative_error(found, truth) < 2e-6


def refused(model, whole_batch, error, match, samples=None, collate=pairs.collate_pairs, **given):
    with pytest.raises(error, match=match):
        tried(model, samples or pairs.pair_samples(16), collate, whole_batch=whole_batch, **given)


def test_what_cannot_be_right_is_refused():
    model = pairs.embedder()
    good = pairs.info_nce(model)
    refused(model, lambda o, b: (good(o, b), 3), ConfigError, "scalar tensor")
    refused(model, lambda o, b: good(o, b).detach(), LossNotAdditive, "does not depend")
    refused(
        model,
        lambda o, b: good(o, b) * torch.rand(()),
        UnkeyedRandomness,
        "whole_batch drew from",
    )
    with pytest.raises(ConfigError, match="two losses"):
        optimizer = torch.optim.SGD(model.parameters())
        hf_ga.prepare(Accelerator(), model, optimizer, loss_fn=good, whole_batch=good)


class Hidden(pairs.Embedder):
    """Keeps something of its last forward that it does not return."""

    def forward(self, anchor, anchor_mask, positive, positive_mask):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        self.last = outputs["positive"]
        return {"anchor": outputs["anchor"]}

    def compared(self, outputs, batch):
        return (outputs["anchor"].mean(0) * self.last.sum(0)).sum()


class Similar(pairs.Embedder):
    """Compares the samples of its batch."""

    def forward(self, anchor, anchor_mask, positive, positive_mask):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        outputs["similarities"] = outputs["anchor"] @ outputs["positive"].T
        return outputs


class Centred(pairs.Embedder):
    """Subtracts the mean over its batch."""

    def forward(self, anchor, anchor_mask, positive, positive_mask):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        return {name: value - value.mean(0) for name, value in outputs.items()}


def test_models_whose_outputs_are_not_those_of_each_sample():
    hidden = Hidden(0.0, False).train()
    refused(hidden, hidden.compared, LossNotAdditive, "besides its outputs")
    similar = Similar(0.0, False).train()
    refused(similar, lambda o, b: o["similarities"].mean(), LossNotAdditive, "one row per sample")
    tried(
        similar,
        pairs.pair_samples(16),
        pairs.collate_pairs,
        whole_batch=pairs.info_nce(similar),
    )
    centred = Centred(0.0, False).train()
    refused(centred, pairs.info_nce(centred), LossNotAdditive, "among other samples")


class Noisy(pairs.Embedder):
    def forward(self, anchor, anchor_mask, positive, positive_mask):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        noise = random.random()
        return {**outputs, "anchor": outputs["anchor"] + 0.1 * self.training * noise}


def test_two_forwards_that_would_differ_are_refused():
    """Also where randomness that depends on the split is accepted."""
    model = Noisy(0.1, returns_scale=True).train()
    for allowed in (False, True):
        refused(
            model,
            pairs.info_nce(model),
            UnkeyedRandomness,
            "drew from random|drew random numbers",
            allow_split_dependent_randomness=allowed,
        )


def windows_of_16(samples, accelerator):
    """In micro-batches of 4 and in their own order."""
    return hf_ga.WindowLoader(
        samples,
        pairs.collate_pairs,
        accelerator=accelerator,
        per_device_batch_size=4,
        global_batch_size=16,
        shuffle=False,
    )


class WithANumber(pairs.Embedder):
    """Returns a number that depends on the samples, which the probes do not show."""

    def forward(self, anchor, anchor_mask, positive, positive_mask, label):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        return {**outputs, "largest": max(4, int(label.max()))}


def test_numbers_that_differ_between_micro_batches_are_refused():
    model = WithANumber(0.0, returns_scale=True).train()
    samples = pairs.pair_samples(32)
    accelerator = Accelerator(cpu=True)
    windows = windows_of_16(samples, accelerator)

    def whole_batch(outputs, batch):
        return pairs.info_nce(model)(outputs, batch) * outputs["largest"]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows, whole_batch=whole_batch)
    samples[20]["label"] = 9
    first, second = windows
    hf_ga.backward_window(accelerator, prepared, first)
    with pytest.raises(LossNotAdditive, match="not the same for all micro-batches"):
        hf_ga.backward_window(accelerator, prepared, second)


class Switching(pairs.Embedder):
    """Subtracts the mean of its batch where a sample has label 9, which the first samples do not show."""

    def forward(self, anchor, anchor_mask, positive, positive_mask, label):
        outputs = super().forward(anchor, anchor_mask, positive, positive_mask)
        if (label == 9).any():
            outputs["anchor"] = outputs["anchor"] - outputs["anchor"].mean(0)
        return outputs


@pytest.mark.parametrize("is_switched", [False, True])
def test_a_model_that_compares_samples_later_is_stopped(is_switched):
    model = Switching(0.1, returns_scale=False).train()
    samples = pairs.pair_samples(64)
    accelerator = Accelerator(cpu=True)
    windows = windows_of_16(samples, accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = hf_ga.prepare(
        accelerator, model, optimizer, windows, whole_batch=pairs.info_nce(model)
    )
    for sample in samples[32:48]:  # of the third window
        sample["label"] = 9 if is_switched else 4
    done = 0
    try:
        for window in windows:
            before = copy.deepcopy(model.state_dict())
            hf_ga.train_step(accelerator, prepared, optimizer, window)
            done += 1
    except LossNotAdditive as error:
        assert "differs from that among other samples" in str(error)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert done == (2 if is_switched else 4)


def test_an_output_that_only_later_windows_train_has_its_gradient():
    """The first samples show a branch of the loss in which this output is compared with a number only."""
    far = []

    def with_a_branch(model):
        def whole_batch(outputs, batch):
            loss = contrast_of(outputs)
            is_far = outputs["anchor"].norm(dim=1) > (far[0] if far else 1e9)
            return loss + outputs["anchor"][is_far].square().sum() if is_far.any() else loss

        return whole_batch

    def contrast_of(outputs):
        return pairs.contrast(outputs["positive"], outputs["positive"].flip(0), 1.0)

    accelerator = Accelerator(cpu=True)
    model = pairs.embedder()
    windows = hf_ga.WindowLoader(
        pairs.pair_samples(16),
        pairs.collate_pairs,
        accelerator=accelerator,
        per_device_batch_size=4,
        global_batch_size=16,
        seed=pairs.SEED,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = with_a_branch(model)
    prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows, whole_batch=loss)
    far.append(0.0)
    (window,) = windows
    hf_ga.backward_window(accelerator, prepared, window)
    truth = pairs.full_batch_gradient(model, window, with_a_branch)
    assert h.relative_error(h.gradients(model), truth) < 2e-6


class Offsets(nn.Module):
    """Parameters of a loss for which autograd makes one tensor, and an expanded one."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(()))
        self.other = nn.Parameter(torch.zeros(()))
        self.several = nn.Parameter(torch.zeros(3))

    def forward(self, outputs, batch):
        error = outputs["anchor"].mean() + (self.one + self.other) - 1
        return error.square() + self.several.sum()


def test_gradients_of_the_loss_are_tensors_of_their_own():
    """So that clipping scales each of them once."""
    loss = Offsets()
    gradient(16, lambda model: copy.deepcopy(loss).double() if is_double(model) else loss)
    found = [parameter.grad for parameter in loss.parameters()]
    before = [value.clone() for value in found]
    torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.1)
    norm = torch.cat([value.reshape(-1) for value in before]).norm()
    for value, whole in zip(found, before, strict=True):
        assert torch.allclose(value, whole * 0.1 / norm, rtol=1e-4)


def is_double(model):
    return next(model.parameters()).dtype == torch.float64


@pytest.mark.parametrize("nan_in", [0, 1])
def test_a_window_that_is_not_finite_is_skipped(nan_in):
    """In windows in which the loss is computed a second time: NaN is no other loss than NaN."""
    model = pairs.embedder()
    accelerator = Accelerator(cpu=True)
    windows = windows_of_16(pairs.pair_samples(32), accelerator)
    done = []

    def whole_batch(outputs, batch):
        loss = pairs.contrast(outputs["anchor"], outputs["positive"], model.log_scale.exp())
        is_bad = len(outputs["anchor"]) == 16 and len(done) == nan_in
        return loss * float("nan") if is_bad else loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = hf_ga.prepare(
        accelerator, model, optimizer, windows, whole_batch=whole_batch
    )
    for window in windows:
        result = hf_ga.train_step(accelerator, prepared, optimizer, window, on_nonfinite="skip")
        done.append(result.skipped)
    assert done == [index == nan_in for index in range(2)]
