"""`Accelerator(whole_batch=...)` in the documented loop: two epochs end with the same weights for any
layout and any number of processes.
"""

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
from forked import on_ranks, without_errors

from hf_ga import Accelerator
from hf_ga.errors import ConfigError

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


@pytest.mark.parametrize("layout", [TWO_STEPS, UNEVEN], ids=str)
def test_layouts_end_with_the_same_weights(full_batch, layout):
    trained = train(exact, layout, PAIRS, NUM_SAMPLES)
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


def loop(compute, collate=pairs.collate_pairs):
    accelerator = TWO_STEPS.make(exact)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        pairs.pair_samples(16), batch_size=8, shuffle=True, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
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


@pytest.mark.parametrize("layout", [FULL_BATCH, TWO_STEPS, UNEVEN], ids=str)
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
