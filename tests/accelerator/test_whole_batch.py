"""`Accelerator(whole_batch=...)` in the documented loop: two epochs end with the same weights for any
layout and any number of processes.
"""

import random
from functools import partial

import accelerate
import helpers as h
import pairs
import pytest
import torch
from documented_loop import (
    FULL_BATCH,
    LAYOUTS,
    TWO_STEPS,
    UNEVEN,
    Case,
    distance,
    reset_states,
    train,
)
from forked import on_ranks, on_two_ranks, without_errors

from hf_ga import Accelerator
from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness

CLOSE = 1e-6
FAR = 1e-3
NUM_SAMPLES = 37  # windows of 16, 16 and 5 pairs


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def contrast(outputs, batch):
    return pairs.contrast(outputs["anchor"], outputs["positive"], outputs["scale"])


def outputs_of(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "label"})


def loss_of_micro_batch(model, batch):
    """What a loop without whole-window losses has."""
    return contrast(outputs_of(model, batch), batch)


def build():
    return pairs.embedder(returns_scale=True)


PAIRS = Case(build, pairs.pair_samples, pairs.collate_pairs, outputs_of, max_norm=0.1)
exact = partial(Accelerator, whole_batch=contrast)


@pytest.fixture(scope="module")
def full_batch():
    return train(exact, FULL_BATCH, PAIRS, NUM_SAMPLES)


def test_uneven_micro_batches_end_with_the_same_weights(full_batch):
    trained = train(exact, UNEVEN, PAIRS, NUM_SAMPLES)
    assert trained.norms == pytest.approx(full_batch.norms, rel=1e-4)
    assert distance(trained.weights, full_batch.weights) < CLOSE


def test_layouts_of_accelerate_end_with_other_weights():
    """The control."""
    case = Case(build, pairs.pair_samples, pairs.collate_pairs, loss_of_micro_batch)
    one, two = (
        train(accelerate.Accelerator, layout, case, NUM_SAMPLES)
        for layout in (FULL_BATCH, TWO_STEPS)
    )
    assert distance(two.weights, one.weights) > FAR


def train_layouts(num_processes):
    return [train(exact, layout, PAIRS, NUM_SAMPLES) for layout in LAYOUTS[num_processes]]


@pytest.mark.slow("trains on up to three processes")
@pytest.mark.parametrize("num_processes", [2, 3])
def test_ranks_end_with_the_same_weights(full_batch, num_processes):
    for found in without_errors(on_ranks(partial(train_layouts, num_processes), num_processes)):
        for trained in found:
            assert distance(trained.weights, full_batch.weights) < CLOSE


def changed(model, batch):
    outputs = outputs_of(model, batch)
    outputs["anchor"] = 2 * outputs["anchor"]
    return outputs


def prepared(model, collate=pairs.collate_pairs, num_samples=16, **options):
    accelerator = TWO_STEPS.make(Accelerator, **{"whole_batch": contrast, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        pairs.pair_samples(num_samples), batch_size=8, shuffle=True, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model.train(), optimizer, loader


def loop(compute, collate=pairs.collate_pairs, model=None, **options):
    model = build() if model is None else model
    accelerator, model, optimizer, loader = prepared(model, collate, **options)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            losses.append(accelerator.backward(compute(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_backward_returns_the_loss_of_the_window():
    first, second = loop(outputs_of)
    assert first == second
    assert torch.isfinite(first)
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("compute", "collate", "words"),
    [
        (loss_of_micro_batch, pairs.collate_pairs, "takes what the model returned"),
        (
            lambda model, batch: dict(outputs_of(model, batch)),
            pairs.collate_pairs,
            "takes what the model returned",
        ),
        (changed, pairs.collate_pairs, "takes what the model returned"),
        (
            lambda model, batch: model(*[v.clone() for n, v in batch.items() if n != "label"]),
            pairs.collate_pairs,
            r"model\(\*\*batch\)",
        ),
        (
            lambda model, batch: model(*batch),
            lambda samples: tuple(pairs.collate_pairs(samples).values())[1:],
            "named entries",
        ),
    ],
    ids=["a loss", "other outputs", "changed outputs", "changed inputs", "a tuple"],
)
def test_misuse_is_refused(compute, collate, words):
    with pytest.raises(ConfigError, match=words):
        loop(compute, collate)


def test_a_second_backward_is_refused():
    def loop_with_two_backwards():
        accelerator, model, optimizer, loader = prepared(build())
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = outputs_of(model, batch)
                accelerator.backward(outputs)
                accelerator.backward(outputs)
                optimizer.step()

    with pytest.raises(ConfigError, match="takes what the model returned"):
        loop_with_two_backwards()


def test_a_second_forward_is_refused():
    def second_of_two(model, batch):
        outputs_of(model, batch)
        return outputs_of(model, batch)

    with pytest.raises(ConfigError, match="the model ran twice on one batch"):
        loop(second_of_two)


def test_num_targets_are_refused():
    accelerator, model, _, loader = prepared(build())
    with pytest.raises(ConfigError, match="takes what the model returned"):
        for batch in loader:
            accelerator.backward(outputs_of(model, batch), num_targets=8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        # So the forward draws the numbers after it.
        (lambda model: torch.rand(1), UnkeyedRandomness, "it is draw 1 of this micro-batch"),
        (
            lambda model: model.log_scale.data.add_(1.0),
            LossNotAdditive,
            "differs from that in the first pass",
        ),
    ],
    ids=["a draw", "another weight"],
)
def test_other_outputs_than_in_the_first_pass_are_refused(change, error, words):
    def changed_before(model, batch):
        change(model)
        return outputs_of(model, batch)

    with pytest.raises(error, match=words):
        loop(changed_before)


class NormalizedOverBatch(pairs.Embedder):
    """The outputs of a sample depend on the others."""

    def embed(self, ids, mask):
        embedded = super().embed(ids, mask)
        return embedded - embedded.mean(0)


class MeanOverTheWidth(pairs.Embedder):
    """Divides by the padded width: a sample's outputs depend on how it is padded."""

    def embed(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden.mean(1)


def two_epochs(layout, lengths):
    """Train with outputs that depend on padding; return the weights."""
    reset_states()
    model = h.seeded(lambda: MeanOverTheWidth(0.1, True))()
    accelerator = layout.make(exact)
    samples = pairs.pair_samples(48)
    for index, sample in enumerate(samples):
        for name in ("anchor", "positive"):
            sample[name] = sample[name][: lengths(index)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = layout.per_device_batch_size
    loader = torch.utils.data.DataLoader(samples, size, collate_fn=pairs.collate_pairs)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(outputs_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(weights, others):
    pairs_of_weights = zip(weights, others, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs_of_weights)


def test_outputs_that_depend_on_padding():
    """All windows are padded to their longest sample, as in one batch."""
    whole, split = (two_epochs(layout, lambda i: 11) for layout in (FULL_BATCH, UNEVEN))
    assert largest_difference(split, whole) < CLOSE


def test_padding_that_matters_late():
    """In the first window all samples are equally long, so that nothing shows there."""
    lengths = {0: 3, 1: 11, 2: 11}  # of each window
    whole, split = (
        two_epochs(layout, lambda i: lengths[i // 16]) for layout in (FULL_BATCH, UNEVEN)
    )
    assert largest_difference(split, whole) < CLOSE


class Remembering(pairs.Embedder):
    """Keeps the embeddings for a loss that does not use the outputs alone."""

    def embed(self, ids, mask):
        self.last = super().embed(ids, mask)
        return self.last


class Drawing(pairs.Embedder):
    """Draws from a generator of Python's."""

    def embed(self, ids, mask):
        return super().embed(ids, mask) * random.random()


@pytest.mark.parametrize(
    ("model_class", "error", "words"),
    [
        (NormalizedOverBatch, LossNotAdditive, "among other samples"),
        (Drawing, UnkeyedRandomness, "generator of random"),
    ],
    ids=["outputs that compare samples", "an unkeyed draw"],
)
def test_models_that_are_refused(model_class, error, words):
    with pytest.raises(error, match=words):
        loop(outputs_of, model=model_class(0.1, True))


def test_a_loss_of_something_beside_the_outputs_is_refused():
    model = Remembering(0.1, True)

    def of_last(outputs, batch):
        return contrast(outputs, batch) + model.last.square().sum()

    with pytest.raises(LossNotAdditive, match="besides its outputs"):
        loop(outputs_of, model=model, whole_batch=of_last)


def test_draws_that_are_not_keyed_are_refused_even_where_they_are_allowed():
    with pytest.raises(UnkeyedRandomness):
        loop(outputs_of, model=Drawing(0.1, True), allow_split_dependent_randomness=True)


def returning_a_copy_on_the_second_rank(model, batch):
    outputs = outputs_of(model, batch)
    return dict(outputs) if torch.distributed.get_rank() else outputs


def test_all_ranks_end_where_the_backward_of_one_is_refused():
    first, second = on_two_ranks(partial(loop, returning_a_copy_on_the_second_rank))
    assert "ProcessFailed" in first
    assert "takes what the model returned" in second


class FailingOnTheSecondRank(pairs.Embedder):
    """In the first pass, of micro-batches of 8."""

    def forward(self, anchor, anchor_mask, positive, positive_mask):
        is_first_pass = not torch.is_grad_enabled() and len(anchor) == 8
        if is_first_pass and torch.distributed.get_rank():
            raise ValueError("this rank fails")
        return super().forward(anchor, anchor_mask, positive, positive_mask)


def test_all_ranks_end_where_the_first_pass_of_one_fails():
    work = partial(loop, outputs_of, model=FailingOnTheSecondRank(0.1, True), num_samples=32)
    first, second = on_two_ranks(work)
    assert "ProcessFailed" in first
    assert "this rank fails" in second


def test_fp16_scales_no_gradient_twice():
    """Neither that through the outputs nor that of a parameter of the loss."""
    layout = TWO_STEPS
    expected = gradients_of_learned_scale(layout, "no")
    found = gradients_of_learned_scale(layout, "fp16")
    assert h.relative_error(found, expected) < 5e-2


def gradients_of_learned_scale(layout, mixed_precision):
    loss = LearnedScale()
    accelerator = layout.make(Accelerator, whole_batch=loss, mixed_precision=mixed_precision)
    model = pairs.embedder(dropout=0.0).train()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.0)
    loader = torch.utils.data.DataLoader(
        pairs.pair_samples(16), layout.per_device_batch_size, collate_fn=pairs.collate_pairs
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(outputs_of(model, batch))
    accelerator.unscale_gradients()
    return h.gradients(model) | {"loss scale": loss.scale.grad}


@pytest.mark.slow("trains on two processes")
def test_shards_of_fsdp2_end_with_the_same_weights(full_batch):
    work = partial(train, exact, LAYOUTS[2][1], PAIRS, NUM_SAMPLES)
    for trained in without_errors(on_ranks(work, 2, "fsdp2")):
        assert distance(trained.weights, full_batch.weights) < CLOSE


def test_fsdp1_is_refused():
    work = partial(train, exact, LAYOUTS[2][1], PAIRS, NUM_SAMPLES)
    for found in on_ranks(work, 2, "fsdp1"):
        assert "whole_batch does not support FSDP1" in found


def test_token_outputs_are_padded_to_the_window():
    """The outputs have a row for each token."""

    def median_of_tokens(outputs, batch):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return losses[labels != h.IGNORED].median()

    def forward(model, batch):
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    case = Case(lambda: h.gpt2(0.1), compute_loss=forward)
    of_tokens = partial(Accelerator, whole_batch=median_of_tokens)
    whole = train(of_tokens, FULL_BATCH, case, NUM_SAMPLES)
    split = train(of_tokens, UNEVEN, case, NUM_SAMPLES)
    assert distance(split.weights, whole.weights) < CLOSE


class LearnedScale(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, outputs, batch):
        return pairs.contrast(outputs["anchor"], outputs["positive"], self.scale)


def learned_scale(batch_size):
    loss = LearnedScale()
    accelerator = Accelerator(cpu=True, whole_batch=loss, global_batch_size=16)
    model = pairs.embedder().train()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    loader = torch.utils.data.DataLoader(
        pairs.pair_samples(32), batch_size, shuffle=True, collate_fn=pairs.collate_pairs
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(outputs_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    reset_states()
    return loss.scale.item()


def test_a_parameter_of_the_loss_is_trained():
    whole = learned_scale(16)
    assert abs(whole - 3.0) > 1e-3
    assert learned_scale(4) == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("layout", [FULL_BATCH, UNEVEN], ids=str)
def test_window_loss_is_the_loss_of_the_window(layout):
    accelerator = layout.make(exact)
    model = pairs.embedder(dropout=0.0, returns_scale=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = pairs.pair_samples(16)
    size = layout.per_device_batch_size
    loader = torch.utils.data.DataLoader(samples, size, collate_fn=pairs.collate_pairs)
    with torch.no_grad():
        expected = loss_of_micro_batch(model, pairs.collate_pairs(samples))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(outputs_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.window_loss.item() == pytest.approx(expected.item(), rel=1e-5)


class Normalized(pairs.Embedder):
    """With BatchNorm, which has no statistics of one sample."""

    def __init__(self, dropout, returns_scale):
        super().__init__(dropout, returns_scale)
        self.norm = torch.nn.BatchNorm1d(h.WIDTH)

    def embed(self, ids, mask):
        return self.norm(super().embed(ids, mask))


def test_batch_norm_is_refused_by_name():
    with pytest.raises(LossNotAdditive, match="BatchNorm, a comparison of samples"):
        loop(outputs_of, model=Normalized(0.1, True))
