"""Under every plan each speed-up, alone and with others, is the same update; the trial uses those
that it should, no wrong one.
"""

import itertools

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import backward_window
from tried import later, tried
from windows import one_window

from hf_ga.engine.speed_ups import candidates
from hf_ga.order.length_plan import ByLength
from hf_ga.rows.fused_attention import FusedAttention
from hf_ga.rows.packing import Packing
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.speed_up import SpeedUp

ALL = {
    "lean forward": LeanForward,
    "chunked loss": ChunkedLoss,
    "packing": Packing,
    "fused attention": FusedAttention,
}
# samples of, what is not used with dropout, and why
MORE = pytest.mark.slow("all combinations again")
MODELS = {
    "gpt2": (h.gpt2, h.token_samples, {}),
    "llama": (h.llama, h.token_samples, {}),
    "masked lm": (h.bert_masked_lm, h.token_samples, {}),
    "t5": (h.t5, h.token_samples, {"packing": "is_encoder_decoder"}),
    "classes": (
        h.bert_classifier,
        h.class_samples,
        {"chunked loss": "no plain linear output layer"},
    ),
}
NUM_SAMPLES = 12
PLANS = {
    "one": h.by_number(NUM_SAMPLES),
    "by number": h.by_number(5),
    "by length": ByLength(5, None, overhead=4, lockstep=False),
    "small": ByLength(5, 24, overhead=8, lockstep=False),
}


def tried_on(model, samples, speed_ups=None):
    found = tried(model, samples, speed_ups=speed_ups)
    for speed_up in found.used:
        if isinstance(speed_up, Packing):
            speed_up._min_padding_ratio = 1.0  # however few tokens that saves
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_which_speed_ups_are_used(name, dropout):
    """A failure in a trial only leaves a speed-up out: this test would notice."""
    build, make_samples, not_used = MODELS[name]
    if not dropout:
        not_used = {**not_used, "fused attention": "draws no dropout"}
    found = tried(build(dropout), make_samples(NUM_SAMPLES))
    assert {speed_up.name for speed_up in found.used} == ALL.keys() - not_used.keys(), (
        found.left_out
    )
    assert found.left_out.keys() == not_used.keys()
    assert all(why in found.left_out[left_out] for left_out, why in not_used.items())


class Wrong(SpeedUp):
    """Does something to one gradient."""

    name = "wrong"

    def __init__(self, change):
        self.change = change

    def attach(self, model, draws):
        self.model = model

    def before(self, call):
        def change(module, args, outputs):
            outputs.register_hook(self.change)

        self.handle = self.model.get_input_embeddings().register_forward_hook(change)

    def after(self):
        self.handle.remove()


def fail(gradient):
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda g: g * 1.001, "relative error"),
        (lambda g: g * torch.nan, "relative error inf"),
        (fail, "ZeroDivisionError: on purpose"),
    ],
    ids=["a thousandth", "NaN", "fails"],
)
def test_a_wrong_speed_up_is_left_out(change, why):
    """And only that one. Control: one that changes rounding only is used."""
    model = h.gpt2(0.1)
    samples = h.token_samples(NUM_SAMPLES)
    harmless = Wrong(lambda g: g * (1 + 1e-7))
    speed_ups = [LeanForward(), Wrong(change), harmless, ChunkedLoss()]
    found = tried(model, samples, speed_ups=speed_ups)
    assert [speed_up.name for speed_up in found.used] == [
        "lean forward",
        "wrong",
        "chunked loss",
    ]
    assert found.used[1] is harmless
    assert why in found.left_out["wrong"]
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_speed_ups_are_chosen_by_the_device():
    assert [type(s) for s in candidates(h.gpt2())] == [
        LeanForward,
        ChunkedLoss,
        FusedAttention,
        Packing,
    ]
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    assert [type(s) for s in candidates(elsewhere)] == [LeanForward, ChunkedLoss]


def gradient(accelerator, model, samples, plan="one"):
    """Of one window, its loss, and its micro-batches."""
    model.zero_grad()
    window = one_window(
        samples, PLANS[plan], lengths=[len(sample["input_ids"]) for sample in samples]
    )
    result = backward_window(accelerator, model, later(window))
    return h.gradients(model), float(result.loss), [m.batch for m in window.micro_batches]


def choices(model, samples, not_used):
    """The model without speed-ups first, then with each alone, with all but one, and with all."""
    names = [name for name in ALL if name not in not_used]
    for number in sorted({0, 1, len(names) - 1, len(names)}):
        for chosen in itertools.combinations(names, number):
            found = tried_on(model, samples, [ALL[name]() for name in chosen])
            assert {speed_up.name for speed_up in found.used} == set(chosen), found.left_out
            yield chosen


@pytest.mark.parametrize(
    "name",
    ["classes", *(pytest.param(n, marks=MORE) for n in ("gpt2", "llama", "t5"))],
)
def test_every_plan_and_speed_up_is_the_full_batch(name):
    """Promise 1, against float64 and the full batch in plain PyTorch. Control: the mean of the
    micro-batches' means.
    """
    build, make_samples, not_used = MODELS[name]
    model = build()
    samples = make_samples(NUM_SAMPLES)
    accelerator = Accelerator(cpu=True)
    sizes = {}
    whole = h.pad_right(samples)
    truth = h.full_batch_gradient(model, whole)
    full = h.full_batch_gradient(model, whole, torch.float32)
    names = ALL.keys() - not_used.keys() - {"fused attention"}
    for chosen in choices(model, samples, {*not_used, "fused attention"}):
        # Any plan for none and for all of them; the others get ragged micro-batches.
        for plan in PLANS if len(chosen) in (0, len(names)) else ["by length"]:
            found, _, batches = gradient(accelerator, model, samples, plan)
            h.assert_promise_1(found, full, truth)
            sizes[plan] = [batch["input_ids"].numel() for batch in batches]
    assert sum(sizes["by length"]) < sum(sizes["by number"]) < sum(sizes["one"])
    assert max(sizes["small"]) <= 24
    naive = h.naive_gradient(model, batches, len(batches))
    assert h.relative_error(naive, truth) > 1e-3


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=MORE), "classes"])
def test_under_autocast_no_speed_up_is_further_off(name, launched):
    launched("bf16")
    build, make_samples, not_used = MODELS[name]
    model = build()
    samples = make_samples(NUM_SAMPLES)
    truth = h.full_batch_gradient(model, h.pad_right(samples))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    rounding = None
    for chosen in choices(model, samples, {*not_used, "fused attention"}):
        if rounding is None:
            rounding = h.relative_error(gradient(accelerator, model, samples)[0], truth)
            continue
        for plan in ("by number", "by length"):
            error = h.relative_error(gradient(accelerator, model, samples, plan)[0], truth)
            assert 0 < error <= 2 * rounding, chosen
