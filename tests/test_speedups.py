"""Every combination of the speed-ups is the same update: the plan, no full logits, no padding, lean forwards, two precisions."""

import contextlib
import dataclasses
import itertools

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import hf_ga
from hf_ga import training as step
from hf_ga.exact import dropped_attention
from hf_ga.exact.costs import CostModel

# samples of, what can be left out: full logits, padding
MODELS = {
    "gpt2": (h.gpt2, h.token_samples, {"logits", "padding"}),
    "llama": (h.llama, h.token_samples, {"logits", "padding"}),
    "masked lm": (h.bert_masked_lm, h.token_samples, {"logits", "padding"}),
    "t5": (h.t5, h.token_samples, {"logits"}),
    "classes": (h.bert_classifier, h.class_samples, {"padding"}),
}
NUM_SAMPLES = 24
PLANS = {
    "one": {"per_device_batch_size": NUM_SAMPLES, "lengths": False},
    "by number": {"per_device_batch_size": 5, "lengths": False},
    "by length": {"per_device_batch_size": 5, "cost": CostModel(overhead=4)},
    "multiples, small": {"per_device_batch_size": 5, "cost": CostModel(overhead=8, multiple=4), "max_tokens_per_micro_batch": 24},
}
SETTINGS = [(), ("logits",), ("padding",), ("logits", "padding")]


@pytest.fixture(autouse=True)
def _own_accelerator_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def proven(model, samples):
    rule = hf_ga.prove_targets(model, samples, h.pad_right, padding_free=True)
    if rule.packing is not None:
        rule.packing.gain = 1.0  # however few tokens that saves
    return rule


def gradient(accelerator, model, rule, samples, plan="one", without=(), lean=True):
    """Of one window, its loss, and its micro-batches."""
    options = dict(PLANS[plan])
    if options.pop("lengths", True):
        options["lengths"] = [len(sample["input_ids"]) for sample in samples]
    rule = dataclasses.replace(
        rule,
        lazy_head=rule.lazy_head if "logits" in without else None,
        packing=rule.packing if "padding" in without else None,
    )
    model.zero_grad()
    windows = hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, global_batch_size=len(samples), seed=1, **options)
    (window,) = windows
    with pytest.MonkeyPatch.context() as patch:
        if not lean:
            patch.setattr(step, "lean_forwards", contextlib.nullcontext)
        result = hf_ga.backward_window(accelerator, model, window, targets=rule)
    return h.gradients(model), float(result.loss), [m.batch for m in window.micro_batches]


def combinations(allowed, leans=(True, False)):
    for without, plan, lean in itertools.product(SETTINGS, PLANS, leans):
        if set(without) <= allowed:
            yield {"plan": plan, "without": without, "lean": lean}


@pytest.mark.parametrize("name", MODELS)
def test_every_combination_is_the_full_batch(name):
    """Promise 1, against float64 and the full batch in plain PyTorch. Control: the mean of the micro-batches' means."""
    build, make_samples, allowed = MODELS[name]
    model, samples, accelerator = build(), make_samples(NUM_SAMPLES), Accelerator(cpu=True)
    whole, rule = h.pad_right(samples), proven(model, samples)
    parts = {"logits": rule.lazy_head, "padding": rule.packing}
    assert {part for part in parts if parts[part] is not None} == allowed
    truth, full = h.full_batch_gradient(model, whole), h.full_batch_gradient(model, whole, torch.float32)
    sizes = {}
    for settings in combinations(allowed):
        found, _, batches = gradient(accelerator, model, rule, samples, **settings)
        h.assert_promise_1(found, full, truth)
        sizes[settings["plan"]] = [batch["input_ids"].numel() for batch in batches]
    assert sum(sizes["by length"]) < sum(sizes["by number"]) < sum(sizes["one"]) and max(sizes["multiples, small"]) <= 24
    naive = h.naive_gradient(model, batches, len(batches))
    assert h.relative_error(naive, truth) > 1e-3


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_draws_the_same_dropout(name, by_sample, monkeypatch):
    """Also where attention takes one sample after the other. Control: without dropout the gradient is another."""
    build, make_samples, allowed = MODELS[name]
    model, samples, accelerator = build(0.1), make_samples(NUM_SAMPLES), Accelerator(cpu=True)
    rule = proven(model, samples)
    plain, plain_loss, _ = gradient(accelerator, model, rule, samples, lean=False)
    if by_sample:
        monkeypatch.setattr(dropped_attention, "WEIGHTS_OF_SAMPLE", 0)
    for settings in combinations(allowed):
        found, loss, _ = gradient(accelerator, model, rule, samples, **settings)
        assert h.relative_error(found, plain) < 1e-6 and loss == pytest.approx(plain_loss, rel=1e-6), settings
    assert h.relative_error(h.full_batch_gradient(build(), h.pad_right(samples)), plain) > 0.05


@pytest.mark.parametrize("name", ["gpt2", "classes", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama", "t5"))])
def test_under_autocast_no_combination_is_further_off(name):
    build, make_samples, allowed = MODELS[name]
    model, samples = build(), make_samples(NUM_SAMPLES)
    truth, accelerator = h.full_batch_gradient(model, h.pad_right(samples)), Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(model)
    rule = proven(model, samples)
    rounding = h.relative_error(gradient(accelerator, model, rule, samples, lean=False)[0], truth)
    for settings in combinations(allowed, leans=(True,)):
        assert 0 < h.relative_error(gradient(accelerator, model, rule, samples, **settings)[0], truth) <= 2 * rounding, settings
