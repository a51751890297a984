"""Micro-batches side by side on a CPU: the same update, the same bits whichever thread is faster, nothing left behind."""

import dataclasses
import threading
import time

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from benchmark import meters
from test_speedups import MODELS, NUM_SAMPLES, SETTINGS, proven
from torch import nn
from transformers import AttentionInterface

import hf_ga
from hf_ga.exact import gradients
from hf_ga.exact.costs import CostModel
from hf_ga.exact.places import KeyedPlaces
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.proof import lanes_proof
from hf_ga.speed import lanes
from hf_ga.speed.lazy_logits import LazyLogits

SOME = [pytest.param(name, marks=[pytest.mark.full] * (name in ("llama", "masked lm"))) for name in MODELS]
PLANS = {
    "by number": {"lengths": False},
    "by length": {"cost": CostModel(overhead=4)},
    "small": {"cost": CostModel(overhead=2), "max_tokens_per_micro_batch": 24},
    "uneven": {"lengths": False, "planner": lambda lengths, n: plan_by_sizes(lengths, n, [9, 1, 4])},
}


@pytest.fixture(autouse=True)
def _two_threads():
    AcceleratorState._reset_state(True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "every step gives the threads back"
    torch.set_num_threads(before)
    AcceleratorState._reset_state(True)


@pytest.fixture
def used(monkeypatch):
    """How many lanes each window had."""
    counts, run = [], gradients.side_by_side

    def counting(of, work):
        counts.append(len(of))
        return run(of, work)

    monkeypatch.setattr(gradients, "side_by_side", counting)
    return counts


def window_of(samples, plan="by length", accelerator=None, **more):
    options = {"per_device_batch_size": 6, **PLANS[plan], **more}
    if options.pop("lengths", True):
        options["lengths"] = [len(sample["input_ids"]) for sample in samples]
    accelerator = accelerator or Accelerator(cpu=True)
    loader = hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, global_batch_size=len(samples), seed=1, **options)
    return accelerator, next(iter(loader))


def gradient(model, rule, samples, plan="by length", count=2):
    """Of one window, and its loss; with one lane the same micro-batches one after the other."""
    model.zero_grad()
    accelerator, window = window_of(samples, plan)
    result = hf_ga.backward_window(accelerator, model, dataclasses.replace(window, lanes=count), targets=rule)
    return h.gradients(model), float(result.loss)


def without(rule, settings):
    return dataclasses.replace(
        rule, lazy_head=rule.lazy_head if "logits" in settings else None, packing=rule.packing if "padding" in settings else None
    )


@pytest.mark.parametrize("name", SOME)
def test_the_full_batch(name, used):
    """Promise 1 for every plan and with every other speed-up. Control: without the copy's share it is another gradient."""
    build, make_samples, allowed = MODELS[name]
    model, samples = build(), make_samples(NUM_SAMPLES)
    whole, rule = h.pad_right(samples), proven(model, samples)
    assert rule.copies and not rule.not_copied
    truth, full = h.full_batch_gradient(model, whole), h.full_batch_gradient(model, whole, torch.float32)
    settings = [s for s in SETTINGS if set(s) <= allowed]
    for plan in PLANS:
        for setting in settings:
            h.assert_promise_1(gradient(model, without(rule, setting), samples, plan)[0], full, truth)
    assert used == [2] * len(PLANS) * len(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "add_gradients", lambda lanes: None)
        assert h.relative_error(gradient(model, rule, samples)[0], truth) > 0.1


@pytest.mark.parametrize("name", SOME)
def test_the_same_dropout(name, used):
    """As in one lane. Control: where places do not tell threads apart, a lane draws what another one should, or comes upon a place
    that is not there. Not every time (1 of 24 on a busy machine did not): that depends on which thread is where.
    """
    build, make_samples, allowed = MODELS[name]
    model, samples = build(0.1), make_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    plain, plain_loss = gradient(model, without(rule, ()), samples, count=1)
    assert not used
    for plan in PLANS:
        found, loss = gradient(model, without(rule, allowed), samples, plan)
        assert h.relative_error(found, plain) < 1e-6 and loss == pytest.approx(plain_loss, rel=1e-6)
    assert used == [2] * len(PLANS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyedPlaces, "_is_of_this_thread", True)
        assert any(goes_wrong(model, rule, samples, plain) for _ in range(10))


def goes_wrong(model, rule, samples, plain):
    try:
        return h.relative_error(gradient(model, rule, samples)[0], plain) > 1e-3
    except (hf_ga.UnkeyedRandomness, RuntimeError):
        return True


def test_masks_of_samples_yet_to_come_in_each_lane(used):
    """Micro-batches of one shape: each lane draws ahead for its own. Control: other samples' keys."""
    model, samples = h.bert_masked_lm(0.1), [{k: v[:4] for k, v in s.items()} for s in h.token_samples(NUM_SAMPLES)]
    rule = proven(model, samples)
    for plan in PLANS:
        plain = gradient(model, without(rule, ()), samples, plan, count=1)[0]
        assert h.relative_error(gradient(model, rule, samples, plan)[0], plain) < 1e-6
    assert used == [2] * len(PLANS)
    with pytest.MonkeyPatch.context() as patch:
        keys = gradients.sample_keys
        patch.setattr(gradients, "sample_keys", lambda seed, epoch, positions: keys(seed, epoch, NUM_SAMPLES - 1 - positions))
        assert h.relative_error(gradient(model, rule, samples, plan)[0], plain) > 1e-3


def test_activation_checkpointing_draws_the_same_again(used):
    model, samples = h.gpt2(0.1), h.token_samples(NUM_SAMPLES)
    plain = gradient(model, proven(model, samples), samples, count=1)[0]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert h.relative_error(gradient(model, proven(model, samples), samples)[0], plain) < 1e-6 and not used
    model.transformer.wte._forward_hooks.clear()  # transformers' own, for reentrant checkpointing, keeps the model alone
    assert h.relative_error(gradient(model, proven(model, samples), samples)[0], plain) < 1e-6 and used == [2]


@pytest.mark.parametrize("slow", [0, 1])
def test_the_bits_do_not_depend_on_who_is_faster(slow, monkeypatch):
    """One lane waits before each micro-batch. Control: the sum in another order of micro-batches has other bits."""
    model, samples = h.gpt2(0.1), h.token_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    plain, loss = gradient(model, rule, samples)
    expect = type(rule).expect
    main = threading.main_thread()

    def waiting(self, counts):
        if (threading.current_thread() is main) == (slow == 0):
            time.sleep(0.02)
        return expect(self, counts)

    monkeypatch.setattr(type(rule), "expect", waiting)
    found, same_loss = gradient(model, rule, samples)
    assert same_loss == loss and all(torch.equal(found[name], plain[name]) for name in plain)
    monkeypatch.setattr(gradients, "deal", lambda micro_batches, packed, count: [[0], list(range(len(micro_batches)))[:0:-1]])
    other = gradient(model, rule, samples)[0]
    assert not all(torch.equal(other[name], plain[name]) for name in plain)


@pytest.mark.parametrize("of_main", [True, False], ids=["this thread's", "the other's"])
def test_an_error_in_a_lane_is_the_steps(of_main, monkeypatch):
    """Earlier gradients, functions of torch and hooks are as before, the other lane stops, and the next window is right."""
    model, samples = h.gpt2(0.1), h.token_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    plain = gradient(model, rule, samples, "small")[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = F.dropout, F.scaled_dot_product_attention, AttentionInterface.get_interface
    main, forwards, expect = threading.main_thread(), [], type(rule).expect

    def failing(self, counts):
        forwards.append(threading.current_thread())
        if (threading.current_thread() is main) == of_main:
            raise ValueError("broken")
        time.sleep(0.2)
        return expect(self, counts)

    accelerator, window = window_of(samples, "small")
    with monkeypatch.context() as patch:
        patch.setattr(type(rule), "expect", failing)
        with pytest.raises(ValueError, match=r"^broken$"):
            hf_ga.backward_window(accelerator, model, window, targets=rule)
    assert len(forwards) <= 3 < len(window.micro_batches)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert before == (F.dropout, F.scaled_dot_product_attention, AttentionInterface.get_interface)
    assert rule.places.thread is None and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    again = gradient(model, rule, samples, "small")[0]
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_memory_that_runs_out_in_the_other_lane_cuts_its_micro_batch(monkeypatch):
    model, samples = h.gpt2(0.1), h.token_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    plain = gradient(model, rule, samples)[0]
    expect, main, failed = type(rule).expect, threading.main_thread(), []

    def failing(self, counts):
        if threading.current_thread() is not main and not failed:
            failed.append(counts)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return expect(self, counts)

    monkeypatch.setattr(type(rule), "expect", failing)
    model.zero_grad()
    accelerator, window = window_of(samples, "by number")  # 3 samples each
    result = hf_ga.backward_window(accelerator, model, window, targets=rule)
    assert result.retries == 1 and window.memory.elements
    assert h.relative_error(h.gradients(model), plain) < 1e-6


class Counting(nn.Module):
    """A head that counts its calls in a buffer."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids, attention_mask, labels):
        self.calls += 1
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Hiding(nn.Module):
    """A model outside of the tree of modules, as a copy would compute with it."""

    def __init__(self, model):
        super().__init__()
        self.weights = nn.ParameterList(model.parameters())
        self.call = lambda **batch: model(**batch)

    def forward(self, input_ids, attention_mask, labels):
        return self.call(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Uncopyable(Counting):
    def forward(self, input_ids, attention_mask, labels):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def __deepcopy__(self, memo):
        raise TypeError("only one of these")


@pytest.mark.parametrize(
    ("wrapped", "said"),
    [
        (Counting, "changes its buffers"),
        (Hiding, "computes with modules of the model itself"),
        (Uncopyable, r"cannot be copied \(TypeError: only one of these\)"),
    ],
)
def test_models_that_are_not_copied(wrapped, said, used):
    """They are computed one micro-batch at a time, and the rule says why."""
    model, samples = wrapped(h.gpt2()), h.token_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    assert not rule.copies and f"one micro-batch at a time ({rule.not_copied})" in str(rule)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(rule.not_copied)
    truth = h.full_batch_gradient(model.model, h.pad_right(samples)) if wrapped is not Hiding else None
    found = gradient(model, rule, samples)[0]
    assert not used
    if truth is not None:
        assert h.relative_error({name.removeprefix("model."): g for name, g in found.items()}, truth) < 1e-5


def test_hooks_and_modes_of_the_user_keep_the_model_alone(used):
    """Also those that come after the proof."""
    model, samples = h.gpt2(), h.token_samples(NUM_SAMPLES)
    rule = proven(model, samples)
    seen = []
    handle = model.transformer.h[0].register_forward_hook(lambda *args: seen.append(1))
    gradient(model, rule, samples)
    assert len(seen) == len(window_of(samples)[1].micro_batches) and not used
    handle.remove()
    handle = model.transformer.wte.weight.register_hook(lambda gradient: seen.append(2))
    gradient(model, rule, samples)
    assert 2 in seen and not used
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        gradient(model, rule, samples)
    assert not used
    gradient(model, rule, samples)
    assert used == [2]


def test_who_plans_for_lanes():
    samples = h.token_samples(NUM_SAMPLES)
    longest = max(len(sample["input_ids"]) for sample in samples)
    assert window_of(samples)[1].lanes == window_of(samples, "by number")[1].lanes == 2
    for more in ({"per_device_batch_size": 1}, {"max_tokens_per_micro_batch": 2 * longest - 1}):
        assert window_of(samples, **more)[1].lanes == 1  # two long samples at once would be more than was allowed
    AcceleratorState._reset_state(True)
    assert window_of(samples, accelerator=Accelerator(cpu=True, mixed_precision="bf16"))[1].lanes == 1
    torch.set_num_threads(1)
    assert window_of(samples)[1].lanes == 1
    torch.set_num_threads(2)


@pytest.mark.parametrize("plan", ["by number", "by length"])
def test_what_is_computed_at_once_is_one_micro_batchs(plan):
    """Two at once have half of its samples, or tokens, each; and lanes are about equally long busy."""
    samples = h.token_samples(64)
    _, window = window_of(samples, plan, per_device_batch_size=8)
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = [m.batch["input_ids"].numel() for m in window.micro_batches]
    assert max(tokens) <= 4 * longest and max(map(len, window.micro_batches)) <= (4 if plan == "by number" else 64)
    dealt = lanes.deal(window.micro_batches, False, 2)
    assert sorted(dealt[0] + dealt[1]) == list(range(len(tokens)))
    busy = [sum(tokens[i] + CostModel(overhead=4).overhead for i in lane) for lane in dealt]
    assert max(busy) < 1.15 * np.mean(busy)


def test_time_inside_of_two_threads_counts_once():
    watch = meters.Stopwatch("cpu")
    watch._runs = [(0.0, 10.0)]
    watch.inside = [(1.0, 4.0), (2.0, 3.0), (3.5, 5.0), (7.0, 8.0)]
    assert watch.inside_seconds == pytest.approx(4.0 + 1.0)


def test_the_proof_of_copies_makes_no_full_logits(monkeypatch):
    """With a large vocabulary they took twice the memory of training."""
    model, samples, logits = h.gpt2(0.1), h.token_samples(24), []
    head_loss = lanes_proof.head_loss
    monkeypatch.setattr(lanes_proof, "head_loss", lambda outputs: (logits.append(type(outputs.logits)), head_loss(outputs))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rule = hf_ga.prove_targets(model, samples, h.pad_right)
    finally:
        torch.set_num_threads(before)
    assert rule.copies and rule.lazy_head is not None and logits == [LazyLogits, LazyLogits]


class SaysHow(nn.Linear):
    """A module that is asked how it is copied."""

    was_asked = False

    def __deepcopy__(self, memo):
        new = memo[id(self)] = SaysHow(self.in_features, self.out_features)
        new.weight, new.bias, new.was_asked = memo[id(self.weight)], memo[id(self.bias)], True
        return new


class Sharing(nn.Module):
    """What modules may have beside parameters: things that several share, and plain references to each other."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.own = nn.Linear(4, 4), nn.Dropout(0.1), SaysHow(4, 4)
        self.first.seen = self.second.seen = {}
        self.first.names = self.second.names = ["x"]
        self.in_a_list = [self.first, self.own]
        self.first.others, self.function, self.count = {"next": self.second}, torch.tanh, 3
        self.config = {"hidden_size": 4}


def test_a_copy_has_all_that_the_model_has_and_shares_only_its_tensors():
    """Catches attributes that are lost or shared with the model, and what two modules share that falls apart."""
    model = Sharing()
    copy = lanes.copied(lanes.Lane(model, None)).model
    ours, theirs = set(map(id, model.modules())), set(map(id, copy.modules()))
    assert not ours & theirs and len(ours) == len(theirs)
    for (name, module), new in zip(model.named_modules(), copy.modules(), strict=True):
        assert type(module) is type(new) and vars(module).keys() <= vars(new).keys(), name
    assert all(p.data_ptr() == q.data_ptr() and p is not q for p, q in zip(model.parameters(), copy.parameters(), strict=True))
    assert copy.in_a_list[0] is copy.first and copy.first.others["next"] is copy.second
    assert copy.first.seen is copy.second.seen is not model.first.seen
    assert copy.first.names is copy.second.names is not model.first.names and copy.first.names == ["x"]
    assert copy.own.was_asked and not model.own.was_asked and copy.in_a_list[1] is copy.own
    assert (copy.function, copy.count, copy.second.p) == (torch.tanh, 3, 0.1)
    assert copy.config is model.config, "settings are the model's own"
    copy.eval()
    assert model.first.training
