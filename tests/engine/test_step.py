"""backward_window and train_step against one full-batch backward in float64 that knows nothing of
hf_ga.
"""

import copy
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from steps import backward_window, train_step
from torch import nn
from windows import one_window, window_gradient

import hf_ga
from hf_ga.engine.window_engine import trainable_parameters
from hf_ga.model.forward import argument_filter, modules_of
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.backend import check_supported

WINDOW = 16


def with_frozen_embeddings(dropout=0.0):
    model = h.bert_token_classifier(dropout)
    model.config.return_dict = False
    model.bert.embeddings.requires_grad_(False)
    return model


def some_without_targets(num_samples):
    """Five in a row without targets: whole micro-batches of some layouts have none."""
    samples = h.token_samples(num_samples)
    return [h.without_targets(s) if 3 <= i < 8 else s for i, s in enumerate(samples)]


# name: (builder, samples, loss_fn, window that is compared). Token heads: a full window with
# unequal counts, so that a mean of means is wrong. Heads with one target a sample: the short last
# window, which the usual loop divides by too much.
CASES = {
    "masked LM, tied weights": (h.bert_masked_lm, h.token_samples, None, 0),
    "micro-batches without targets": (h.bert_masked_lm, some_without_targets, None, 0),
    "frozen embeddings, outputs as a tuple": (with_frozen_embeddings, h.tag_samples, None, 0),
    "GPT-2, tied weights": (h.gpt2, h.token_samples, None, 0),
    "Llama": (h.llama, h.token_samples, None, 0),
    "T5": (h.t5, h.token_samples, None, 0),
    "classification, short last window": (h.bert_classifier, h.class_samples, None, -1),
    "width-dependent head, short last window": (h.xlnet_classifier, h.class_samples, None, -1),
    "plain module, scalar loss, tied": (h.plain_tagger, h.plain_samples, None, 0),
    "plain module, weighted loss_fn": (
        h.plain_tagger,
        h.weighted_samples,
        h.weighted_token_loss,
        0,
    ),
}
LAYOUTS = {
    "even": lambda lengths: {"planner": h.by_number(4)},
    "uneven, sorted": lambda lengths: {
        "planner": partial(plan_by_sizes, sizes=[7, 1, 5, 3]),
        "lengths": lengths,
    },
    "one by one": lambda lengths: {"planner": h.by_number(1)},
    "by length": lambda lengths: {
        "per_device_batch_size": 2
    },  # the lengths are those of `input_ids`
    "in chunks": lambda lengths: {"canonical_micro_batch": 3},
}

# How a window is planned has nothing to do with the head, unless its loss depends on widths, or whole
# micro-batches have no target.
IN_ALL_LAYOUTS = {"micro-batches without targets", "width-dependent head, short last window"}


def make_loader(samples, layout="even", **more):
    options = LAYOUTS[layout]([len(s["input_ids"]) for s in samples])
    options = {"global_batch_size": WINDOW, "seed": 3, "shuffle": False, **options, **more}
    return hf_ga.WindowLoader(samples, h.pad_right, accelerator=Accelerator(), **options)


class OneWeight(nn.Module):
    """The gradient of a sample is its x (its loss is weight * x). Targets: labels that are not
    -100.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, labels=None):
        if labels is None:
            return self.weight * x
        counted = labels != h.IGNORED
        return (self.weight * x)[counted].mean()


def window_of(values, sizes):
    """values: (x, whether it is a target)."""
    samples = [{"x": float(x), "labels": 0 if counted else h.IGNORED} for x, counted in values]
    return one_window(samples, partial(plan_by_sizes, sizes=sizes), shuffle=False)


def test_unequal_counts_by_hand():
    """Two of six samples are no targets: the mean of 1, 2, 3, 4 is 2.5. Control: the mean of the
    means of {1, 2, 3} and {4} is 3.
    """
    window = window_of([(1, True), (2, True), (3, True), (9, False), (9, False), (4, True)], [3])
    model = OneWeight()
    result = backward_window(Accelerator(), model, window)
    assert (model.weight.grad.item(), result.loss, result.num_targets) == (2.5, 2.5, 4)
    assert (
        h.naive_gradient(model, [m.batch for m in window.micro_batches], 2)["weight"].item() == 3.0
    )


def test_chunks_are_added_along_their_tree_by_hand():
    """(1 + 0) + (1e8 + (16 - 1e8)), over 3 targets: the chunk without a target keeps its place.
    Control: in turn, 1 is lost in 1e8.
    """
    samples = [{"x": x, "labels": 0 if x else h.IGNORED} for x in (1.0, 0.0, 1e8, 16 - 1e8)]
    options = {"shuffle": False, "per_device_batch_size": 1, "canonical_micro_batch": 1}
    found = []
    for more in (options, {"shuffle": False}):
        model = OneWeight()
        backward_window(Accelerator(), model, one_window(samples, 1, **more))
        found.append(model.weight.grad.item())
    assert found == pytest.approx([17 / 3, 16 / 3])


@given(
    values=st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=1, max_size=9),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_any_split_of_any_targets_by_hand(values, sizes):
    model = OneWeight()
    targets = [x for x, counted in values if counted]
    result = backward_window(Accelerator(), model, window_of(values, sizes))
    found = 0.0 if model.weight.grad is None else model.weight.grad.item()
    expected = sum(targets) / max(1, len(targets))
    assert (found, result.loss, result.num_targets) == (
        pytest.approx(expected),
        pytest.approx(expected),
        len(targets),
    )


@pytest.mark.parametrize("case", CASES)
def test_every_layout_is_the_full_batch(case):
    build, make_samples, loss_fn, which = CASES[case]
    model = build()
    samples = make_samples(WINDOW + 13)
    whole = h.pad_right(samples[:WINDOW] if which == 0 else samples[WINDOW:])
    grads32, grads64 = (
        h.full_batch_gradient(model, whole, t, loss_fn) for t in (torch.float32, torch.float64)
    )
    with torch.no_grad():
        loss = float(h.mean_loss(model, whole, loss_fn))
    for layout in LAYOUTS if case in IN_ALL_LAYOUTS else ("uneven, sorted", "in chunks"):
        windows = list(make_loader(samples, layout))
        grads, result = window_gradient(model, windows[which], loss_fn=loss_fn)
        assert "frozen" not in case or all(
            (p.grad is None) != p.requires_grad for p in model.parameters()
        )
        h.assert_promise_1(grads, grads32, grads64)
        assert (result.loss, result.num_targets) == (
            pytest.approx(loss, rel=1e-6),
            pytest.approx(h.num_targets(model, whole, loss_fn)),
        )
        assert result.grad_norm is None
        assert not result.skipped
        # Control: the usual loop on the same micro-batches; accumulation steps are those of a full
        # window.
        micro_batches = [m.batch for m in windows[which].micro_batches]
        steps = len(windows[0].micro_batches)
        with pytest.raises(AssertionError):
            h.assert_promise_1(
                h.naive_gradient(model, micro_batches, steps, loss_fn), grads32, grads64
            )


class SharedTable(nn.Module):
    """Drops parts of a table that all samples share: its mask is the window's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids):
        return (input_ids[:, :1] * self.dropout(self.table)).mean()


@pytest.mark.parametrize(
    "build",
    [partial(h.bert_classifier, dropout=0.1), SharedTable],
    ids=["of samples", "of the window"],
)
def test_dropout_differs_between_windows_epochs_and_seeds(build):
    """Agreement would be cheap if all masks were one."""
    model = build()
    samples = [h.class_samples(1)[0]] * WINDOW * 2
    first, second = make_loader(samples)
    loader = make_loader(samples)
    loader.set_epoch(1)
    others = [second, next(iter(loader)), next(iter(make_loader(samples, seed=4)))]
    reference = window_gradient(model, first)[0]
    assert h.relative_error(window_gradient(model, first)[0], reference) == 0
    assert all(
        h.relative_error(window_gradient(model, other)[0], reference) > 1e-2 for other in others
    )


def test_randomness_that_begins_later_is_refused():
    noisy = []
    linear = nn.Linear(1, 1)
    model = nn.Sequential(linear)
    model.forward = lambda x: (
        (linear(x[:, None]) + (random.random() if noisy else 0.0)).pow(2).mean()
    )
    loader = hf_ga.WindowLoader(
        [{"x": float(i)} for i in range(12)],
        h.pad_right,
        accelerator=Accelerator(),
        global_batch_size=4,
    )
    first, second, third = loader
    window_gradient(model, first)
    noisy.append(1)
    with pytest.raises(hf_ga.UnkeyedRandomness, match="from the generator of random"):
        window_gradient(model, second)
    window_gradient(model, third, allow_split_dependent_randomness=True)


def train(
    model, samples, scheduler_of=None, prepare_scheduler=False, layout="uneven, sorted", **options
):
    accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = scheduler_of(optimizer.optimizer) if scheduler_of else None
    prepared = accelerator.prepare(scheduler) if prepare_scheduler else scheduler
    results = [
        train_step(accelerator, model, optimizer, window, scheduler=prepared, **options)
        for window in make_loader(samples, layout)
    ]
    return results, scheduler, optimizer


def train_by_hand(model, samples, max_grad_norm, scheduler_of):
    """Zero, full batch, clip, AdamW, scheduler: plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    scheduler = scheduler_of(optimizer)
    for start in range(0, len(samples), WINDOW):
        optimizer.zero_grad()
        model(**h.pad_right(samples[start : start + WINDOW])).loss.backward()
        norms.append(h.norm(h.gradients(model)))
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, max_grad_norm / (norms[-1] + 1e-6)))
        optimizer.step()
        scheduler.step()
    return norms


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def parameter_distance(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).norm().item() / b.norm().clamp(min=1e-3).item() for a, b in pairs)


@pytest.mark.parametrize(
    "prepare_scheduler", [False, True], ids=["plain scheduler", "prepared scheduler"]
)
def test_three_steps_equal_adamw_by_hand(prepare_scheduler):
    """In float64, where rounding cannot hide anything; 16 + 16 + 13 samples."""
    samples = h.token_samples(WINDOW * 2 + 13)
    ours, by_hand, other = (h.bert_masked_lm().double() for _ in range(3))
    norms = train_by_hand(by_hand, samples, 0.5, halving)
    results, scheduler, _ = train(ours, samples, halving, prepare_scheduler, max_grad_norm=0.5)
    assert parameter_distance(ours, by_hand) < 1e-9
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-9)
    assert min(norms) > 0.5  # so clipping did something
    assert scheduler.last_epoch == 3
    assert scheduler.get_last_lr() == [1e-2 / 8]
    assert all(p.grad is None for p in ours.parameters())
    results, _, _ = train(other, samples, halving)  # control: not clipped
    assert parameter_distance(other, by_hand) > 1e-6
    assert results[0].grad_norm is None


def test_a_window_without_targets_changes_nothing():
    """The first one, which tells a trial nothing, too."""
    targets = h.token_samples(WINDOW)
    none = [h.without_targets(s) for s in targets]
    samples = none + targets + none
    model = h.gpt2()
    once = h.gpt2()
    results, scheduler, optimizer = train(model, samples, halving, max_grad_norm=1.0)
    _, _, optimizer_once = train(once, targets, halving, max_grad_norm=1.0)
    assert [(r.skipped, r.num_targets > 0) for r in results] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert results[2].loss == 0.0
    assert scheduler.last_epoch == 1
    assert parameter_distance(model, once) == 0
    states, states_once = (o.optimizer.state_dict()["state"] for o in (optimizer, optimizer_once))
    assert all(torch.equal(states[i][k], states_once[i][k]) for i in states for k in states[i])


@pytest.mark.parametrize(
    "failing", [None, 1, 2], ids=["never", "in the rehearsal", "in the second micro-batch"]
)
def test_an_error_leaves_what_was_there_before(failing):
    """Gradients, accumulation steps, hooks and torch's functions. Control: without an error
    gradients are added to.
    """
    accelerator = Accelerator(gradient_accumulation_steps=4)
    left = []
    model = h.plain_tagger(0.1)
    samples = h.weighted_samples(WINDOW)
    (window,) = make_loader(samples)

    def loss_fn(outputs, batch):
        if left and not left.pop():
            raise ZeroDivisionError
        return h.weighted_token_loss(outputs, batch)

    before, _ = window_gradient(model, window, loss_fn=loss_fn)
    left += [False] if failing == 1 else [False, True]
    if failing is None:
        left.clear()
        backward_window(accelerator, model, window, loss_fn=loss_fn)
    else:
        if failing == 2:  # a window that is not rehearsed
            window = replace(window, request=replace(window.request, index=5))
        with pytest.raises(ZeroDivisionError):
            backward_window(accelerator, model, window, loss_fn=loss_fn)
    factor = 1 if failing else 2
    assert h.relative_error(
        h.gradients(model), {name: factor * g for name, g in before.items()}
    ) <= (0 if failing else 1e-6)
    assert accelerator.gradient_accumulation_steps == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.XLA])
def test_a_backend_that_divides_gradients_itself_is_refused(monkeypatch, kind):
    model = h.bert_classifier()
    samples = h.class_samples(WINDOW)
    (window,) = make_loader(samples)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: kind))
    with pytest.raises(
        hf_ga.ConfigError,
        match=f"unsupported: {kind.value}.* over targets: use .*accelerate_configs",
    ):
        backward_window(Accelerator(), model, window)
    assert all(p.grad is None for p in model.parameters())


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    """What Accelerate makes of `--multi_gpu` on a machine without GPU: each would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        hf_ga.ConfigError,
        match="2 processes were launched, but Accelerate sees 1, so each would train alone",
    ):
        check_supported(Accelerator())


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_processes_that_need_the_same_samples_are_refused(monkeypatch, name):
    accelerator = Accelerator()
    monkeypatch.setattr(Accelerator, "parallelism_config", SimpleNamespace(**{name: 2}))
    with pytest.raises(
        hf_ga.ConfigError, match=f"unsupported: {name}.*leave tp_size, cp_size and sp_size at 1"
    ):
        check_supported(accelerator)
    monkeypatch.setattr(Accelerator, "parallelism_config", SimpleNamespace(**{name: 1}))
    check_supported(accelerator)


@pytest.mark.parametrize(
    ("forward", "accepted"),
    [
        (lambda x, labels=None: ..., {"x", "labels"}),
        (lambda **arguments: ..., {"x", "labels", "row"}),
        (lambda input_ids=None, labels=None, **more: ..., {"x", "labels", "row"}),
    ],
)
def test_which_columns_reach_the_model(forward, accepted):
    """PEFT's wrappers name some arguments and hand the rest on."""
    model = nn.Identity()
    model.forward = forward
    assert argument_filter(model)({"x": 1, "labels": 2, "row": 3}).keys() == accepted
    assert argument_filter(h.gpt2())({"input_ids": 1, "row": 3}).keys() == {"input_ids"}, (
        "its **kwargs are settings"
    )


def masked_mean_times_count(outputs, batch):
    """An own loss written as mean x count: 0 / 0 where a micro-batch has no targets."""
    losses = (outputs - 1) ** 2
    counted = (batch["mask"] > 0).float()
    return (losses * counted).sum() / counted.sum() * counted.sum(), counted.sum()


def test_loss_fn_with_a_nan_for_no_targets():
    samples = [{"x": float(i), "mask": float(i >= 2)} for i in range(8)]
    window = one_window(samples, 2, shuffle=False)
    model = OneWeight()
    with torch.no_grad():
        model.weight.fill_(2.0)
    grads, result = window_gradient(model, window, loss_fn=masked_mean_times_count)
    expected = sum(2 * (2 * x - 1) * x for x in range(2, 8)) / 6
    assert result.num_targets == 6
    assert grads["weight"].item() == pytest.approx(expected)


def test_another_batch_or_mode_is_refused():
    model = h.plain_tagger()
    samples = h.plain_samples(WINDOW)
    (window,) = make_loader(samples)
    with pytest.raises(hf_ga.ConfigError, match="got a dict: iterate over a WindowLoader"):
        backward_window(Accelerator(), model, h.pad_right(samples))
    with pytest.raises(hf_ga.ConfigError, match=r"in evaluation mode: call model.train\(\)"):
        backward_window(Accelerator(), model.eval(), window)


def interrupt_accumulation():
    """Leave Accelerate's flag, which all Accelerators share, in the middle of a window."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    with accelerator.accumulate():
        assert not accelerator.sync_gradients


def test_step_after_an_interrupted_accumulation():
    """The optimizer would silently not step."""
    model = h.bert_classifier()
    (window,) = make_loader(h.class_samples(WINDOW))
    before = copy.deepcopy(model)
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    interrupt_accumulation()
    train_step(accelerator, prepared, optimizer, window)
    assert parameter_distance(model, before) > 1e-4


def test_own_updates_after_an_interrupted_accumulation():
    """The optimizer would keep the gradients of the windows before, or not step."""
    model = h.bert_classifier()
    samples = h.class_samples(2 * WINDOW)
    accelerator = Accelerator()
    interrupt_accumulation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    windows = make_loader(samples)
    prepared, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    for window, share in zip(windows, (samples[:WINDOW], samples[WINDOW:]), strict=True):
        optimizer.zero_grad()
        hf_ga.backward_window(accelerator, prepared, window)
        truth = h.full_batch_gradient(h.bert_classifier(), h.pad_right(share))
        assert h.relative_error(h.gradients(model), truth) < 1e-6
        optimizer.step()
        assert not optimizer.step_was_skipped


def test_an_interrupted_accumulation_of_another_loop_between_updates():
    model = h.bert_classifier()
    (window,) = make_loader(h.class_samples(WINDOW))
    before = copy.deepcopy(model)
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = hf_ga.prepare(
        accelerator, model, optimizer, make_loader(h.class_samples(WINDOW))
    )
    interrupt_accumulation()
    hf_ga.backward_window(accelerator, prepared, window)
    optimizer.step()
    assert parameter_distance(model, before) > 1e-4


def test_all_modules_and_parameters_are_found_in_the_order_of_torch():
    shared = nn.Linear(2, 2)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model = nn.Sequential(nn.ModuleList([shared, nn.Tanh()]), scripted, shared)
    model.register_module("missing", None)
    shared.bias.requires_grad_(False)
    assert modules_of(model) == list(model.modules())
    expected = [id(p) for p in model.parameters() if p.requires_grad]
    assert len(expected) == 3
    assert [id(p) for p in trainable_parameters([model], [])] == expected
