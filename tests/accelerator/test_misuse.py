"""Loops that are not the documented one: each trains exactly as the full batch does, or stops with
one error before the first update. Accelerate's Accelerator is wrong in them without a word.

Here a head of transformers computes the loss; test_loops.py has the losses of a loop.
"""

import contextlib
import re
from functools import cache, partial

import accelerate
import helpers as h
import numpy as np
import pytest
import torch
from attempts import UPDATES, Attempt, documented
from documented_loop import (
    FULL_BATCH,
    TWO_STEPS,
    UNEVEN,
    Layout,
    distance,
    reset_states,
    trained_weights,
)
from forked import on_ranks, without_errors
from images import collate_images, image_samples, images_and_text
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hf_ga import Accelerator
from hf_ga.errors import ConfigError, HfGaError, UnkeyedRandomness

CLOSE = 1e-6
FAR = 1e-4
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def assert_right(attempt, layout=TWO_STEPS):
    weights = attempt.run(Accelerator, layout)
    assert distance(weights, attempt.full_batch()) < CLOSE


def assert_refused(attempt, words, error=HfGaError, layout=TWO_STEPS):
    """Before the first update. words: a pattern that its message contains."""
    with pytest.raises(error, match=f"(?is){words}"):
        attempt.run(Accelerator, layout)
    assert not attempt.moved()


def assert_right_or_refused(attempt, layout=TWO_STEPS, words=""):
    try:
        weights = attempt.run(Accelerator, layout)
    except HfGaError as error:
        assert re.search(f"(?is){words}", str(error))
        assert not attempt.moved()
        return
    assert distance(weights, attempt.full_batch()) < CLOSE


# -- the loss


def token_losses(outputs, batch, **options):
    return F.cross_entropy(
        outputs.logits.flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=h.IGNORED,
        **options,
    )


def own_loss(accelerator, model, batch):
    accelerator.backward(model(**batch).loss)


def criterion(accelerator, model, batch):
    accelerator.backward(token_losses(model(**batch), batch))


def criterion_without_labels(accelerator, model, batch):
    """The head computes no loss."""
    labels = batch.pop("labels")
    accelerator.backward(token_losses(model(**batch), {"labels": labels}))


def class_weights_as_a_sum(accelerator, model, batch):
    """The remedy; without it for Accelerate, which knows none."""
    outputs = model(**batch)
    if type(accelerator) is accelerate.Accelerator:
        accelerator.backward(token_losses(outputs, batch, weight=CLASS_WEIGHTS))
        return
    loss_sum = token_losses(outputs, batch, weight=CLASS_WEIGHTS, reduction="sum")
    targets = batch["labels"][batch["labels"] != h.IGNORED]
    accelerator.backward(loss_sum, num_targets=CLASS_WEIGHTS[targets].sum())


def penalty_on_logits(accelerator, model, batch):
    """Of all tokens, padding too."""
    outputs = model(**batch)
    accelerator.backward(outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean())


def hidden_states_of(accelerator, model, batch):
    """Outputs of the model, and of its encoder by a hook."""
    hidden = []
    encoder = accelerator.unwrap_model(model).bert
    handle = encoder.register_forward_hook(lambda m, inputs, outputs: hidden.append(outputs[0]))
    outputs = model(**batch)
    handle.remove()
    return outputs, hidden[0]


def penalty_on_hidden_states(accelerator, model, batch):
    """Of data, but not by way of the model's outputs."""
    outputs, hidden = hidden_states_of(accelerator, model, batch)
    attended = hidden[batch["attention_mask"].bool()]
    accelerator.backward(outputs.loss + (attended - 1).square().mean())


def penalty_on_padding(accelerator, model, batch):
    """Of hidden states that a speed-up might leave out."""
    outputs, hidden = hidden_states_of(accelerator, model, batch)
    accelerator.backward(outputs.loss + (hidden - 1).square().mean())


def penalty_on_embeddings(accelerator, model, batch):
    """Of data, in a forward of a part of the model."""
    loss = model(**batch).loss
    embeddings = accelerator.unwrap_model(model).get_input_embeddings()
    accelerator.backward(loss + (embeddings(batch["input_ids"]) - 1).square().mean())


def divided_by_hand(accelerator, model, batch):
    loss = model(**batch).loss / accelerator.gradient_accumulation_steps
    accelerator.backward(loss)


def scaled_by_hand(accelerator, model, batch):
    """As gradient_accumulation_for_autoregressive_models.py: a share of the global batch."""
    loss = token_losses(model(**batch), batch, reduction="sum") / 100
    accelerator.backward(loss * accelerator.gradient_accumulation_steps)


def num_items_in_batch(accelerator, model, batch):
    accelerator.backward(model(**batch, num_items_in_batch=torch.tensor(100)).loss)


def two_backwards_of_one_loss(accelerator, model, batch):
    loss = model(**batch).loss
    accelerator.backward(0.5 * loss, retain_graph=True)
    accelerator.backward(0.5 * loss)


def two_forwards(accelerator, model, batch):
    accelerator.backward(model(**batch).loss)
    accelerator.backward(model(**batch).loss)


def two_forwards_and_one_backward(accelerator, model, batch):
    accelerator.backward(model(**batch).loss + model(**batch).loss)


def two_losses(accelerator, model, batch):
    outputs = model(**batch)
    accelerator.backward(outputs.loss, retain_graph=True)
    accelerator.backward(outputs.logits.square().mean())


def backward_of_the_loss(accelerator, model, batch):
    model(**batch).loss.backward()


WRONG_IN_ACCELERATE = [
    own_loss,
    criterion,
    criterion_without_labels,
    two_forwards,
    penalty_on_logits,
    penalty_on_hidden_states,
    penalty_on_padding,
    penalty_on_embeddings,
]
RIGHT = [
    *WRONG_IN_ACCELERATE,
    class_weights_as_a_sum,
    two_backwards_of_one_loss,
    two_forwards_and_one_backward,
    two_losses,
]


@cache
def right_weights(step):
    return Attempt(documented(step)).full_batch()


# Six micro-batches, the last of one sample, show what two show; the layout itself is tried with the
# model's own loss.
@pytest.mark.parametrize(
    ("step", "layout"),
    [*((step, UNEVEN) for step in RIGHT), (own_loss, FULL_BATCH)],
)
def test_losses_that_are_right(step, layout):
    weights = Attempt(documented(step)).run(Accelerator, layout)
    assert distance(weights, right_weights(step)) < CLOSE


@pytest.mark.parametrize("step", WRONG_IN_ACCELERATE)
def test_losses_of_accelerate_are_wrong(step):
    """The control."""
    weights = Attempt(documented(step)).run(accelerate.Accelerator, TWO_STEPS)
    assert distance(weights, right_weights(step)) > FAR


def test_a_share_of_a_constant_is_refused():
    assert_refused(Attempt(documented(scaled_by_hand)), "divide|scale|num_targets")


def test_num_items_in_batch_is_refused():
    attempt = Attempt(documented(num_items_in_batch), h.gpt2, h.token_samples(16))
    assert_refused(attempt, "divides by 100, 100 .*a constant")


def rare_class_samples():
    """Class 2 occurs in one sample of the second window only."""
    samples = h.tag_samples(32)
    for number, sample in enumerate(samples):
        labels = [label if label == h.IGNORED else min(label, 1) for label in sample["labels"]]
        samples[number] = {**sample, "labels": labels}
    samples[20]["labels"] = [2] * len(samples[20]["labels"])
    return samples


RARE_WEIGHTS = torch.tensor([1.0, 1.0, 7.0])


def rare_class_weights(accelerator, model, batch):
    """In the first window all weights are one, and the loss is the head's."""
    accelerator.backward(token_losses(model(**batch), batch, weight=RARE_WEIGHTS))


def one_epoch(step, weights_after):
    """In the order of the dataset; keeps the weights after each update."""

    def loop(accelerator, model, optimizer, loader):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                step(accelerator, model, batch)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights_after.append(trained_weights(accelerator.unwrap_model(model)))

    return loop


def test_a_rare_class_in_the_second_window_is_noticed_before_its_update():
    """What one window shows is no proof for the next one."""
    samples = rare_class_samples()
    right = []
    found = []
    attempt = Attempt(one_epoch(rare_class_weights, right), samples=samples, loader_options={})
    attempt.full_batch()
    attempt.loop = one_epoch(rare_class_weights, found)
    try:
        attempt.run(Accelerator, TWO_STEPS)
    except HfGaError:
        now = trained_weights(attempt.model)
        assert distance(now, right[0]) < CLOSE
        return
    assert distance(found[1], right[1]) < CLOSE


def test_a_rare_class_in_accelerate():
    """The control."""
    right = []
    found = []
    samples = rare_class_samples()
    attempt = Attempt(one_epoch(rare_class_weights, right), samples=samples, loader_options={})
    attempt.full_batch()
    attempt.loop = one_epoch(rare_class_weights, found)
    attempt.run(accelerate.Accelerator, TWO_STEPS)
    assert distance(found[1], right[1]) > FAR


@pytest.mark.parametrize("convert", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_num_targets_may_be_a_number_or_a_tensor(convert):
    def step(accelerator, model, batch):
        if type(accelerator) is accelerate.Accelerator:
            own_loss(accelerator, model, batch)
            return
        loss_sum = token_losses(model(**batch), batch, reduction="sum")
        accelerator.backward(loss_sum, num_targets=convert(count(batch["labels"]).item()))

    assert_right(Attempt(documented(step)), UNEVEN)


def test_num_targets_in_one_micro_batch_only_is_right_or_refused():
    """The model's own mean and the sum with its number of targets are one loss."""
    calls = []

    def step(accelerator, model, batch):
        calls.append(len(calls))
        outputs = model(**batch)
        if len(calls) % 2:
            loss_sum = token_losses(outputs, batch, reduction="sum")
            accelerator.backward(loss_sum, num_targets=count(batch["labels"]))
        else:
            accelerator.backward(outputs.loss)

    attempt = Attempt(documented(step))
    try:
        weights = attempt.run(Accelerator, TWO_STEPS)
    except HfGaError as error:
        assert "num_targets" in str(error)
        assert not attempt.moved()
        return
    assert distance(weights, right_weights(own_loss)) < CLOSE


@pytest.mark.parametrize("step", [own_loss, class_weights_as_a_sum])
def test_a_window_without_targets_makes_no_update_of_nan(step):
    """Its mean is 0 / 0: refused, or nothing is learnt."""
    samples = [h.without_targets(sample) for sample in h.tag_samples(16)]
    attempt = Attempt(documented(step), samples=samples + h.tag_samples(16), loader_options={})
    try:
        weights = attempt.run(Accelerator, TWO_STEPS)
    except HfGaError:
        assert not attempt.moved()
        return
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    assert attempt.moved()


def test_a_micro_batch_without_targets():
    """Its mean is 0 / 0."""
    samples = h.tag_samples(16)
    samples = samples[:8] + [h.without_targets(sample) for sample in samples[8:]]
    assert_right(Attempt(documented(own_loss), samples=samples, loader_options={}))


class Logits(nn.Module):
    """The model of the documentation: inputs in, logits out."""

    def __init__(self):
        super().__init__()
        self.tagger = h.PlainTagger()

    def forward(self, inputs):
        return self.tagger(inputs)


def pad_to_pair(samples):
    batch = h.pad_right(samples)
    return batch["input_ids"], batch["labels"]


def documentation(reduction):
    """Word for word: `loss_function(outputs, targets)`; or the remedy."""
    loss_function = nn.CrossEntropyLoss(ignore_index=h.IGNORED, reduction=reduction)

    def step(accelerator, model, batch):
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs.flatten(0, 1), targets.flatten())
        if reduction == "mean" or type(accelerator) is accelerate.Accelerator:
            accelerator.backward(loss if reduction == "mean" else loss / count(targets))
        else:
            accelerator.backward(loss, num_targets=count(targets))

    return documented(step)


def count(labels):
    return (labels != h.IGNORED).sum()


def of_the_documentation(reduction):
    return Attempt(documentation(reduction), h.seeded(Logits), h.plain_samples(16), pad_to_pair)


def test_a_loss_function_outside_of_the_model():
    assert_right(of_the_documentation("mean"))


def test_the_sum_of_a_loss_function_outside_of_the_model():
    assert_right(of_the_documentation("sum"))


def test_a_loss_function_outside_of_the_model_with_accelerate():
    """The control."""
    attempt = of_the_documentation("mean")
    weights = attempt.run(accelerate.Accelerator, TWO_STEPS)
    assert distance(weights, attempt.full_batch()) > FAR


# -- the loop


def by_hand(accelerator, model, optimizer, loader):
    """Accumulation over two batches, of which Accelerate knows nothing."""
    for _ in range(UPDATES):
        for number, batch in enumerate(loader):
            accelerator.backward(model(**batch).loss / 2)
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def by_hand_without_division(accelerator, model, optimizer, loader):
    for _ in range(UPDATES):
        for number, batch in enumerate(loader):
            accelerator.backward(model(**batch).loss)
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def no_sync_by_hand(accelerator, model, optimizer, loader):
    for _ in range(UPDATES):
        for number, batch in enumerate(loader):
            is_last = (number + 1) % 2 == 0
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                accelerator.backward(model(**batch).loss / 2)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


def batches_first(accelerator, model, optimizer, loader):
    """As Trainer, and gradient_accumulation_for_autoregressive_models.py."""
    for _ in range(UPDATES):
        batches = iter(loader)
        window = [next(batches), next(batches)]
        for batch in window:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()


def zero_grad_first(accelerator, model, optimizer, loader):
    """Accelerate clears the gradients of the first micro-batch before the last one."""
    for _ in range(UPDATES):
        for batch in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(**batch).loss)
                optimizer.step()


def zero_grad_of_the_model(accelerator, model, optimizer, loader):
    """Unlike the optimizer's, in every micro-batch."""
    for _ in range(UPDATES):
        for batch in loader:
            with accelerator.accumulate(model):
                model.zero_grad()
                accelerator.backward(model(**batch).loss)
                optimizer.step()


def step_without_accumulate(accelerator, model, optimizer, loader):
    """Accelerate steps after every micro-batch."""
    for _ in range(UPDATES):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def step_of_the_bare_optimizer(accelerator, model, optimizer, loader):
    step_without_accumulate(accelerator, model, optimizer.optimizer, loader)


def left_in_a_window(accelerator, model, optimizer, loader):
    """An epoch that ends between two micro-batches."""
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        break
    documented(own_loss)(accelerator, model, optimizer, loader)


def in_evaluation_mode(accelerator, model, optimizer, loader):
    """As `from_pretrained` leaves a model, whose dropout then does nothing."""
    model.eval()
    for _ in range(UPDATES):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()


TWO_AT_ONCE = Layout(8, 1)  # for loops that accumulate by hand


@pytest.mark.parametrize("loop", [by_hand, no_sync_by_hand])
def test_accumulation_by_hand_is_right(loop):
    right = right_weights(own_loss)
    assert distance(Attempt(loop).run(Accelerator, TWO_AT_ONCE), right) < CLOSE


def test_accumulation_by_hand_without_division_is_refused():
    words = "gradient_accumulation_steps.*accumulate"
    assert_refused(Attempt(by_hand_without_division), words, layout=TWO_AT_ONCE)


def test_batches_fetched_before_their_backward_are_refused():
    assert_refused(Attempt(batches_first), "backward")


@pytest.mark.parametrize("left_out", [1, 7, 15])
def test_an_iteration_without_a_backward_is_refused(left_out):
    """Also the last one of a window, and of the epoch: its window would make no update."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [{"x": torch.randn(4), "y": i % 3} for i in range(64)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    with pytest.raises(ConfigError, match="of the one before it"):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if number == left_out:
                    continue
                accelerator.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [
        zero_grad_first,
        zero_grad_of_the_model,
        step_without_accumulate,
        step_of_the_bare_optimizer,
    ],
)
def test_loops_that_are_right_or_refused(loop):
    assert_right_or_refused(Attempt(loop))


@pytest.mark.parametrize("loop", [zero_grad_first, zero_grad_of_the_model])
def test_gradients_may_be_zeroed_first_where_a_window_is_one_batch(loop):
    """The order of most PyTorch loops."""
    assert_right(Attempt(loop), FULL_BATCH)


def test_an_epoch_that_ends_within_a_window():
    """Its first micro-batches are no part of the next window."""
    attempt = Attempt(left_in_a_window)
    try:
        weights = attempt.run(Accelerator, TWO_STEPS)
    except HfGaError:
        assert not attempt.moved()
        return
    assert distance(weights, right_weights(own_loss)) < CLOSE


@pytest.mark.parametrize("loop", [by_hand, no_sync_by_hand])
def test_loops_by_hand_of_accelerate_are_wrong(loop):
    """The control."""
    attempt = Attempt(loop)
    right = right_weights(own_loss)
    assert distance(attempt.run(accelerate.Accelerator, TWO_AT_ONCE), right) > FAR


@pytest.mark.parametrize("loop", [zero_grad_first, zero_grad_of_the_model])
def test_loops_of_accelerate_are_wrong(loop):
    """The control."""
    attempt = Attempt(loop)
    weights = attempt.run(accelerate.Accelerator, TWO_STEPS)
    assert distance(weights, attempt.full_batch()) > FAR


@pytest.mark.parametrize("layout", [TWO_STEPS, UNEVEN], ids=str)
def test_a_model_that_is_trained_in_evaluation_mode(layout):
    assert_right_or_refused(
        Attempt(in_evaluation_mode, lambda: h.bert_token_classifier(0.1)), layout
    )


# -- two models


class Pair:
    """Two models, each with its optimizer, in one loop over one loader."""

    def __init__(self, backward):
        self.backward = backward

    def run(self, accelerator_class, layout):
        accelerator = layout.make(accelerator_class)
        torch.manual_seed(2)
        loader = torch.utils.data.DataLoader(
            h.tag_samples(16),
            shuffle=True,
            collate_fn=h.pad_right,
            batch_size=layout.per_device_batch_size,
        )
        self.models = [h.bert_token_classifier(), h.bert_token_classifier()]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in self.models]
        *prepared, loader = accelerator.prepare(*self.models, *optimizers, loader)
        models = prepared[:2]
        optimizers = prepared[2:]
        for _ in range(UPDATES):
            for batch in loader:
                with accelerator.accumulate(*models):
                    self.backward(accelerator, models, batch)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        return self.weights()

    def weights(self):
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }


def one_after_the_other(accelerator, models, batch):
    for model in models:
        accelerator.backward(model(**batch).loss)


def in_one_sum(accelerator, models, batch):
    accelerator.backward(sum(model(**batch).loss for model in models))


@pytest.mark.parametrize("backward", [one_after_the_other, in_one_sum])
def test_two_models_are_right_or_refused(backward):
    pair = Pair(backward)
    right = pair.run(accelerate.Accelerator, FULL_BATCH)
    assert distance(pair.run(accelerate.Accelerator, TWO_STEPS), right) > FAR  # the control
    try:
        weights = pair.run(Accelerator, TWO_STEPS)
    except HfGaError:
        assert not any(hasattr(p, "_hf_ga_moved") for m in pair.models for p in m.parameters())
        fresh = h.bert_token_classifier().state_dict()
        for model in pair.models:
            assert all(
                torch.equal(fresh[name], value) for name, value in model.state_dict().items()
            )
        return
    assert distance(weights, right) < CLOSE


# -- random numbers


def noise_before_backward(accelerator, model, batch):
    """As NEFTune by hand, or mixup."""
    embedded = accelerator.unwrap_model(model).get_input_embeddings()(batch["input_ids"])
    inputs = {
        "inputs_embeds": embedded + 0.1 * torch.randn_like(embedded),
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"],
    }
    accelerator.backward(model(**inputs).loss)


def numpy_before_backward(accelerator, model, batch):
    """As a reward that is computed outside of torch."""
    loss = model(**batch).loss
    accelerator.backward(loss * np.random.rand())


def noise_after_backward(accelerator, model, batch):
    """Harmless: a log line for one batch in ten."""
    accelerator.backward(model(**batch).loss)
    torch.rand(1)


def test_draws_before_the_backward_are_right():
    """The noise of a sample is the same in every layout."""
    attempt = Attempt(documented(noise_before_backward))
    right = attempt.run(Accelerator, FULL_BATCH)
    for layout in (TWO_STEPS, UNEVEN):
        assert distance(attempt.run(Accelerator, layout), right) < CLOSE
    assert distance(attempt.run(accelerate.Accelerator, TWO_STEPS), right) > FAR  # the control


def test_draws_that_belong_to_no_sample_are_refused():
    assert_refused(Attempt(documented(numpy_before_backward)), "random", UnkeyedRandomness)


def test_draws_that_belong_to_no_sample_may_be_allowed():
    """The factor of the loss is the same in the window's micro-batches."""

    def step(accelerator, model, batch):
        loss = model(**batch).loss
        np.random.rand()
        accelerator.backward(loss)

    attempt = Attempt(documented(step), options={"allow_split_dependent_randomness": True})
    attempt.run(Accelerator, TWO_STEPS)
    assert attempt.moved()


def test_draws_after_the_backward_are_right():
    assert_right(Attempt(documented(noise_after_backward)))


# -- several ranks


def on_rank(step):
    return Attempt(documented(step)).run(Accelerator, Layout(4, 2))


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("step", [criterion, class_weights_as_a_sum])
def test_losses_that_are_right_on_two_ranks(step):
    """More of them: test_loops_processes.py."""
    for weights in without_errors(on_ranks(partial(on_rank, step), 2)):
        assert distance(weights, right_weights(step)) < CLOSE


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("step", [divided_by_hand, backward_of_the_loss, numpy_before_backward])
def test_losses_that_are_refused_on_two_ranks(step):
    """By both, in the same window: none is left waiting."""
    assert_refused_by_all(on_ranks(partial(on_rank, step), 2))


ERRORS = {"ConfigError", "LossNotAdditive", "ProcessFailed", "UnkeyedRandomness"}


def assert_refused_by_all(found):
    for one in found:
        assert isinstance(one, str)
        assert one.split(":")[0] in ERRORS, one


def refused_on_one_rank():
    """Rank 1 divides its loss."""

    def step(accelerator, model, batch):
        step = divided_by_hand if accelerator.process_index else own_loss
        step(accelerator, model, batch)

    return on_rank(step)


@pytest.mark.slow("starts processes")
def test_a_loss_that_one_rank_refuses_ends_all():
    assert_refused_by_all(on_ranks(refused_on_one_rank, 2))


def with_images_by_hand(accelerator, model, batch):
    """Several images of a sample, in a call that is not that of the batch."""
    outputs = model(batch["input_ids"], batch["labels"], batch["pixel_values"], batch["sizes"])
    accelerator.backward(outputs.loss)


def test_images_in_a_call_by_hand_are_right():
    """The loss is read, not the call."""

    def renamed(samples):
        batch = collate_images(samples)
        return {**batch, "sizes": batch.pop("image_grid_thw")}

    attempt = Attempt(
        documented(with_images_by_hand),
        images_and_text,
        image_samples(16, num_images=[2, 1]),
        renamed,
    )
    assert_right(attempt)
    assert_right(attempt, UNEVEN)


def test_an_optimizer_that_needs_a_closure():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.LBFGS(h.bert_token_classifier().parameters())
    with pytest.raises(HfGaError, match="LBFGS computes the loss several times in each step"):
        accelerator.prepare(optimizer)
