"""Half precision, gradient checkpointing and shards under Accelerate's own loop: the gradient of a
window is that of the full batch (promise 1), however it is split; Accelerate's own is not.

Judged by float64 and by the full batch in the same precision, in plain PyTorch.
"""

from dataclasses import dataclass
from functools import cache, partial

import accelerate
import helpers as h
import pytest
import torch
from accelerate.utils import GradScalerKwargs
from documented_loop import (
    CASES,
    FULL_BATCH,
    TWO_STEPS,
    UNEVEN,
    WINDOW,
    Layout,
    distance,
    reset_states,
    train,
)
from forked import on_ranks, without_errors
from processes import assert_wrapped, whole_gradients
from torch.utils.data import DataLoader

from hf_ga import Accelerator

MODELS = {
    "GPT-2": (h.gpt2, h.token_samples),
    "BERT": (h.bert_token_classifier, h.tag_samples),
}
SHARDED_SCALE = 2.0**13
SHARDED_LAYOUTS = [Layout(8, 1), Layout(4, 2), UNEVEN]
NUM_SAMPLES = 37


@pytest.fixture(autouse=True)
def _fresh_states(own_accelerator_state):
    yield
    reset_states()


@dataclass
class Window:
    """What the loop found in the update of one window.

    Attributes:
        gradients: of the whole model, without the scale of fp16.
        scale: of the loss; None without a scaler.
    """

    gradients: h.Gradients
    scale: float | None


def first_window(accelerator_class, layout, model, samples, precision="no", kind="ddp"):
    """The documented loop on a single window of 16 samples, without dropout."""
    # Shards are in fp16 themselves, and terms are multiplied by the ranks, over which FSDP averages:
    # torch's first scale of 65,536 overflows, as it would in the first windows of a run.
    handlers = [GradScalerKwargs(init_scale=SHARDED_SCALE)] if kind.startswith("fsdp") else None
    accelerator = layout.make(
        accelerator_class, mixed_precision=precision, kwargs_handlers=handlers
    )
    torch.manual_seed(2)  # an order in which two halves have unequal numbers of targets
    loader = DataLoader(
        samples, shuffle=True, collate_fn=h.pad_right, batch_size=layout.per_device_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert_wrapped(model, kind, accelerator)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                scaler = accelerator.scaler
                scale = None if scaler is None else scaler.get_scale()
                accelerator.clip_grad_norm_(model.parameters(), 1e9)  # removes the scale
                found.append(Window(whole_gradients_in_float64(model), scale))
            optimizer.step()
            optimizer.zero_grad()
    (window,) = found
    return window


def whole_gradients_in_float64(model):
    return {name: gradient.double() for name, gradient in whole_gradients(model).items()}


def references(name, precision):
    """Full batch in the precision, and in float64."""
    build, make_samples = MODELS[name]
    batch = h.pad_right(make_samples(WINDOW))
    full = h.autocast_gradient(precision, build(), [batch], [1.0])
    return full, h.full_batch_gradient(build(), batch)


def assert_full_batch(window, name, precision):
    full, in_float64 = references(name, precision)
    assert window.gradients.keys() == in_float64.keys()
    h.assert_promise_1(window.gradients, full, in_float64, h.ROUNDING[precision])
    assert_scaled(window, precision)


def assert_full_batch_of_shards(windows, name, precision):
    """FSDP rounds all parameters to half precision, where autocast leaves some in float32, so the
    reference is its own window in one micro-batch on each rank. That one is of the size of
    autocast's error.
    """
    full, in_float64 = references(name, precision)
    errors = [h.relative_error(window.gradients, in_float64) for window in windows]
    assert errors[0] <= 1e-6 + 4 * h.relative_error(full, in_float64)
    for error in errors[1:]:
        assert error <= 1e-6 + 2 * errors[0]
    for window in windows:
        assert_scaled(window, precision, SHARDED_SCALE)


def assert_scaled(window, precision, scale=h.SCALE):
    assert window.scale == (scale if precision == "fp16" else None)


# The layout has nothing to do with the model: each pair of a model and a precision in uneven
# micro-batches, one in the other layouts.
@pytest.mark.parametrize(
    ("name", "precision", "layout"),
    [
        *((name, precision, UNEVEN) for name in MODELS for precision in h.ROUNDING),
        ("GPT-2", "fp16", FULL_BATCH),
        ("GPT-2", "fp16", TWO_STEPS),
    ],
)
def test_gradient_in_half_precision(name, precision, layout):
    build, make_samples = MODELS[name]
    window = first_window(Accelerator, layout, build(), make_samples(WINDOW), precision)
    assert_full_batch(window, name, precision)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_of_accelerate_fails(name, precision):
    """The control. Without fp16: there Accelerate has no scaler on a CPU."""
    build, make_samples = MODELS[name]
    samples = make_samples(WINDOW)
    window = first_window(accelerate.Accelerator, TWO_STEPS, build(), samples, precision)
    with pytest.raises(AssertionError, match="all parameters"):
        assert_full_batch(window, name, precision)


def test_an_overflow_skips_the_whole_window():
    """Also for the scheduler, which Accelerate does not step then."""
    model = h.gpt2()
    samples = h.token_samples(WINDOW)
    options = {"init_scale": 2.0**40, "backoff_factor": 2.0**-24}
    accelerator = TWO_STEPS.make(
        Accelerator,
        mixed_precision="fp16",
        kwargs_handlers=[accelerate.utils.GradScalerKwargs(**options)],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)
    loader = DataLoader(samples, shuffle=True, collate_fn=h.pad_right, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    moved = []
    rates = []
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        moved.append(any(not torch.equal(before[n], p) for n, p in model.named_parameters()))
        rates.append(scheduler.get_last_lr()[0])
    assert moved == [False, True]
    assert rates == [1e-2, 0.5e-2]
    assert accelerator.scaler.get_scale() == 2.0**16


# -- gradient checkpointing: with dropout, whose masks the second forward must draw again


@cache
def trained_on_the_full_batch(name):
    return train(Accelerator, FULL_BATCH, CASES[name], NUM_SAMPLES)


def checkpointed(case):
    def build():
        model = case.build()
        model.config.use_cache = False
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    return case.__class__(build, case.make_samples, case.collate)


def test_gradient_checkpointing_trains_the_same():
    reference = trained_on_the_full_batch("T5")
    trained = train(Accelerator, UNEVEN, checkpointed(CASES["T5"]), NUM_SAMPLES)
    assert distance(trained.weights, reference.weights) < 1e-6


# -- shards: two ranks that compute on CPUs


def sharded_windows(name, kind, precision):
    """On each rank: the window of each layout, and Accelerate's own gradient as the control."""
    build, make_samples = MODELS[name]
    samples = make_samples(WINDOW)
    return [
        first_window(Accelerator, layout, build(), samples, precision, kind)
        for layout in SHARDED_LAYOUTS
    ]


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [
        ("GPT-2", "ddp", "fp16"),
        ("GPT-2", "fsdp1", "no"),
        ("GPT-2", "fsdp1", "bf16"),
        ("GPT-2", "fsdp2", "bf16"),
        ("GPT-2", "fsdp2", "fp16"),
        ("BERT", "fsdp2", "no"),
    ],
)
def test_gradient_of_two_ranks(name, kind, precision):
    has_half_shards = kind != "ddp" and precision != "no"
    work = partial(sharded_windows, name, kind, precision)
    for windows in without_errors(on_ranks(work, 2, kind)):
        if has_half_shards:
            assert_full_batch_of_shards(windows, name, precision)
            continue
        for window in windows:
            assert_full_batch(window, name, precision)


@pytest.mark.slow("starts processes")
def test_gradient_of_two_ranks_of_accelerate_fails():
    """The control."""
    build, make_samples = MODELS["GPT-2"]
    samples = make_samples(WINDOW)
    work = partial(first_window, accelerate.Accelerator, Layout(4, 2), build(), samples)
    for window in without_errors(on_ranks(work, 2)):
        with pytest.raises(AssertionError, match="all parameters"):
            assert_full_batch(window, "GPT-2", "no")


def sharded_training(name):
    """On each rank: whole weights after two epochs, with dropout; of GPT-2 in all layouts."""
    layouts = SHARDED_LAYOUTS if name == "GPT-2" else [UNEVEN]
    return [train(Accelerator, layout, CASES[name], NUM_SAMPLES) for layout in layouts]


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(("name", "kind"), [("GPT-2", "fsdp2"), ("BERT classification", "fsdp1")])
def test_shards_train_as_one_process(name, kind):
    reference = trained_on_the_full_batch(name)
    for found in without_errors(on_ranks(partial(sharded_training, name), 2, kind)):
        for trained in found:
            assert trained.rates == pytest.approx(reference.rates, rel=1e-12)
            assert trained.norms == pytest.approx(reference.norms, rel=1e-4)
            assert distance(trained.weights, reference.weights) < 1e-6
