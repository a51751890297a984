"""Losses and gradients that are not finite, put in by hand: nothing is updated, and the samples and the module are named."""

import json
import math
import re

import helpers as h
import pytest
import steps
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from runs import lines_of, train, write_rows
from steps import same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ga
from hf_ga.errors import NonFinite
from hf_ga.exact.generators import random_states
from hf_ga.exact.order import epoch_order
from hf_ga.run import loop

WINDOW, MICRO_BATCH, NUM_WINDOWS = 8, 3, 3
BAD_TOKEN = h.VOCABULARY - 1
IDS = (10, 13)  # of the bad samples: both in the second window, in its first and second micro-batch


@pytest.fixture(autouse=True)
def _own_accelerator_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class Classifier(nn.Module):
    """Mean cross entropy of tokens that are embedded, turned and averaged; `trouble` says what goes wrong for the bad token."""

    def __init__(self, trouble=""):
        super().__init__()
        torch.manual_seed(3)
        self.trouble = trouble
        self.embedding, self.dropout = nn.Embedding(h.VOCABULARY, h.WIDTH), nn.Dropout(0.1)
        self.middle, self.norm, self.head = nn.Linear(h.WIDTH, h.WIDTH), Root(trouble), nn.Linear(h.WIDTH, h.NUM_CLASSES)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1)
        is_bad = (input_ids == BAD_TOKEN).any(1)
        hidden = self.middle(self.dropout(self.embedding(input_ids)) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.norm(hidden, is_bad))
        if labels is None:
            return {"logits": logits}
        losses = F.cross_entropy(logits, labels, reduction="none")
        if self.trouble == "loss":
            losses = torch.where(is_bad, math.inf, losses)
        return {"loss": losses.mean(), "logits": logits}


class Root(nn.Module):
    """A module in the middle that can spoil its output, or its gradient alone: the square root has none at 0."""

    def __init__(self, trouble):
        super().__init__()
        self.trouble = trouble

    def forward(self, hidden, is_bad):
        if self.trouble == "output":
            return torch.where(is_bad.unsqueeze(-1), math.nan, hidden)
        if self.trouble == "gradient":
            zero = torch.where(is_bad.unsqueeze(-1), (hidden - hidden.detach()).abs(), torch.ones_like(hidden))
            return hidden + zero.sqrt() - 1
        if self.trouble == "crowd" and len(hidden) > 1 and bool(is_bad.any()):
            return hidden * math.inf
        return hidden


def samples(count=NUM_WINDOWS * WINDOW, bad=IDS):
    """The bad token is in the bad samples and nowhere else."""
    made = h.class_samples(count)
    for i, sample in enumerate(made):
        sample["input_ids"] = [min(token, BAD_TOKEN - 1) for token in sample["input_ids"]]
        if i in bad:
            sample["input_ids"][1] = BAD_TOKEN
    return made


def sum_of_loss(outputs, batch):
    total = F.cross_entropy(outputs["logits"], batch["labels"], reduction="sum")
    return total, len(batch["labels"])


def spoilt_sum(outputs, batch):
    total, count = sum_of_loss(outputs, batch)
    return total + torch.where((batch["input_ids"] == BAD_TOKEN).any(), math.nan, 0.0), count


class Training(steps.Training):
    def __init__(self, model, **more):
        super().__init__(Accelerator(cpu=True, **more), model)


def windows_of(data, **more):
    sizes = {"global_batch_size": WINDOW, "planner": h.by_number(MICRO_BATCH), "shuffle": False, "seed": 5}
    return hf_ga.WindowLoader(data, h.pad_right, accelerator=Accelerator(), **{**sizes, **more})


def healthy_rule(model, loss_fn=None):
    """Proven before anything goes wrong, on good samples."""
    return hf_ga.prove_targets(model, samples(bad=()), h.pad_right, loss_fn=loss_fn)


def spoil_embedding(model):
    with torch.no_grad():
        model.embedding.weight[BAD_TOKEN] = math.nan


# name: what goes wrong, and what the message says of it
CASES = {
    "output": "the first module with an output that is not finite is norm (Root)",
    "loss": "the first module with an output that is not finite is the model itself (Classifier)",
    "gradient": "the gradient of middle.bias is not finite",
    "weight": "the first module with an output that is not finite is embedding (Embedding)",
    "loss_fn": "the outputs of all modules are finite, so it is the loss (loss_fn)",
}


def stopped(case, max_grad_norm=None, precision="no"):
    """The error of the second window, and the training that it left."""
    model = Classifier(case)
    loss_fn = spoilt_sum if case == "loss_fn" else None
    rule = healthy_rule(model, loss_fn)
    if case == "weight":
        spoil_embedding(model)
    training = Training(model, mixed_precision=precision)
    first, second, _ = windows_of(samples())
    training.step(first, targets=rule, loss_fn=loss_fn)
    before, states, modes = training.snapshot(), random_states(), [m.training for m in model.modules()]
    hooks = count_hooks(model)
    with pytest.raises(NonFinite) as caught:
        training.step(second, targets=rule, loss_fn=loss_fn, max_grad_norm=max_grad_norm)
    assert same(training.snapshot(), before)
    assert (random_states(), [m.training for m in model.modules()], count_hooks(model)) == (states, modes, hooks)
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value), training, second, rule


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("case", "precision", "max_grad_norm"),
    [*((case, "no", None) for case in CASES), ("gradient", "bf16", 1.0), ("loss", "bf16", 1.0)],
)
def test_it_stops_before_the_step_and_names_samples_and_module(case, precision, max_grad_norm):
    text, *_ = stopped(case, max_grad_norm, precision)
    assert "window 1 of epoch 0" in text and CASES[case] in text
    assert "it comes from samples 10, 13;" in text
    assert text.startswith("the gradient of window" if case == "gradient" else "the loss of window")


def test_samples_are_named_by_their_rows():
    """Not by their positions, which are others where the order is shuffled."""
    model = Classifier("output")
    rule, training = healthy_rule(model), Training(model)
    with pytest.raises(NonFinite, match=r"it comes from (sample (10|13)|samples (10, 13|13, 10));"):
        for window in windows_of(samples(), shuffle=True):
            training.step(window, targets=rule)


def test_without_the_check_the_weights_become_nan(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr("hf_ga.exact.update._is_finite", lambda *args: True)
    model = Classifier("gradient")
    rule, training = healthy_rule(model), Training(model)
    for window in windows_of(samples()):
        training.step(window, targets=rule)
    assert any(p.isnan().any() for p in model.parameters())


def test_a_micro_batch_that_is_bad_only_together_is_named_whole():
    text, *_ = stopped("crowd")
    listed = [8, 9, 10, 11, 12, 13]  # two micro-batches of three; in the third is no bad sample
    assert f"it comes from samples {', '.join(map(str, listed))};" in text
    assert CASES["output"] in text


def test_a_hook_that_spoils_every_gradient_names_all_samples_shortly():
    model = Classifier()
    rule, training = healthy_rule(model), Training(model)
    model.head.weight.register_hook(lambda gradient: gradient + math.inf)
    window = next(iter(windows_of(samples(bad=()), global_batch_size=12)))
    listed = r"0, 1, 2, 3, 4, 5, 6, 7, \.\.\."
    with pytest.raises(NonFinite, match=rf"it comes from samples {listed}; the gradient of head\.weight is not finite"):
        training.step(window, targets=rule)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["no clipping", "clipping"])
def test_a_norm_that_overflows_stops_only_where_it_would_clip(max_grad_norm):
    """All gradients are finite. Without clipping the step is made; a clipped one would be zero."""
    model = Classifier()
    rule, training = healthy_rule(model), Training(model)
    model.head.bias.register_hook(lambda gradient: gradient * 1e22)
    window = next(iter(windows_of(samples(bad=()))))
    if max_grad_norm is None:
        assert not training.step(window, targets=rule).skipped
        return
    said = "each micro-batch by itself gives finite numbers again: their sum or its norm overflows float32"
    with pytest.raises(NonFinite, match=said):
        training.step(window, targets=rule, max_grad_norm=max_grad_norm)


def test_what_does_not_happen_again_is_said_to_be_so():
    model = Classifier()
    rule, training, calls = healthy_rule(model), Training(model), []

    def once(module, inputs, output):
        calls.append(1)
        return output * math.nan if len(calls) == 1 else output

    model.norm.register_forward_hook(once)
    with pytest.raises(NonFinite, match="each micro-batch by itself gives finite numbers again"):
        training.step(next(iter(windows_of(samples(bad=())))), targets=rule)


@pytest.mark.parametrize("case", ["gradient", "weight", "loss_fn"])
def test_a_skipped_window_leaves_the_run_without_it(case):
    """Bit for bit the run in which train_step is not called for the bad window, with samples of which it is named."""
    ends = []
    for skips in (True, False):
        model = Classifier(case)
        loss_fn = spoilt_sum if case == "loss_fn" else None
        rule = healthy_rule(model, loss_fn)
        if case == "weight":
            spoil_embedding(model)
        training, results = Training(model), []
        for window in windows_of(samples()):
            if skips or window.index != 1:
                results.append(training.step(window, targets=rule, loss_fn=loss_fn, max_grad_norm=1.0, on_nonfinite="skip"))
        ends.append(training.snapshot())
        assert training.scheduler.last_epoch == 2
        if skips:
            assert [(r.skipped, r.nonfinite, r.overflowed) for r in results] == [(False,) * 3, (True, True, False), (False,) * 3]
            assert [r.cause is not None for r in results] == [False, True, False] and "samples 10, 13" in results[1].cause
            assert math.isfinite(results[1].loss) is (case == "gradient") and results[1].num_targets == WINDOW
    assert same(*ends) and not any(r.skipped for r in results)


class Reads(TorchDispatchMode):
    """How often the host reads a number of the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["no clipping", "clipping"])
def test_the_device_is_waited_for_once_a_window(max_grad_norm):
    model = Classifier()
    rule, training = healthy_rule(model), Training(model)
    for window in windows_of(samples(bad=())):
        with Reads() as reads:
            training.step(window, targets=rule, max_grad_norm=max_grad_norm)
        # AdamW's step counters lie on the host
        assert reads.count == 1 + len(list(model.parameters()))


class Unlucky(Classifier):
    """What goes wrong depends on the dropout of a sample, half of them."""

    def __init__(self):
        super().__init__()
        self.coin, self.seen = nn.Dropout(0.5), []

    def forward(self, input_ids, attention_mask, labels=None, number=None):
        fell = self.coin(torch.ones(len(input_ids), 1)) == 0
        self.seen += [int(i) for i in number[fell.flatten()]] if self.armed else []
        hidden = self.embedding(input_ids).mean(1)
        logits = self.head(torch.where(fell & self.armed, math.nan, hidden))
        return {"loss": F.cross_entropy(logits, labels)}

    armed = False


def test_the_forwards_are_run_again_with_their_own_dropout():
    model = Unlucky()
    data = [{**s, "number": i} for i, s in enumerate(samples())]
    rule, training = hf_ga.prove_targets(model, data, h.pad_right), Training(model)
    model.armed = True
    for window in windows_of(data):
        model.seen.clear()
        result = training.step(window, targets=rule, on_nonfinite="skip")
        fell = model.seen[: len(model.seen) // 3]  # in the step; then in micro-batches again, and one by one
        assert 0 < len(fell) < WINDOW and f"comes from samples {', '.join(map(str, fell))}" in result.cause + ";"
        assert model.seen == fell * 3


def test_micro_batches_are_cut_where_memory_ran_out_before():
    """As the step cut them: larger ones might not fit."""
    model, sizes = Classifier("output"), []
    rule, training = healthy_rule(model), Training(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    _, window, _ = windows_of(samples())
    window.state.max_elements = 24
    training.step(window, targets=rule, on_nonfinite="skip")
    assert max(sizes) <= 24
    window.state.max_elements, sizes[:] = None, []  # the control
    training.step(window, targets=rule, on_nonfinite="skip")
    assert max(sizes) > 24


# Other models, whose loss needs more than one forward of one batch


@pytest.mark.parametrize("name", ["mixtral", "xlnet"])
def test_models_with_a_router_or_of_one_width(name):
    """The second layer spoils what holds the bad token. XLNet's micro-batches are padded to their window."""
    builds = {"mixtral": lambda: h.mixtral(0.5), "xlnet": lambda: h.xlnet_classifier(0.1)}
    data = samples()
    if name == "mixtral":
        data = [{**s, "labels": list(s["input_ids"])} for s in data]
    model = builds[name]()
    good = [{**s, "input_ids": [min(i, BAD_TOKEN - 1) for i in s["input_ids"]]} for s in data]
    rule = hf_ga.prove_targets(model, good, h.pad_right, speed_ups=[])  # `spoil` knows samples
    training = Training(model)
    layer = {"mixtral": "model.layers.1", "xlnet": "transformer.layer.1.ff"}[name]
    spoil(model, layer)
    widths = set()
    first, second, _ = windows_of(data)
    training.step(first, targets=rule)
    model.register_forward_pre_hook(lambda module, args, kwargs: widths.add(kwargs["input_ids"].shape[1]), with_kwargs=True)
    with pytest.raises(NonFinite, match=rf"comes from samples 10, 13; .* output that is not finite is {re.escape(layer)} "):
        training.step(second, targets=rule)
    widest = max(len(data[i]["input_ids"]) for i in second.sample_ids)
    assert (widths == {widest}) == (name == "xlnet")


def spoil(model, layer):
    """NaN out of a layer, in the rows that hold the bad token."""
    is_bad = []

    def look(module, args, kwargs):
        is_bad[:] = [(kwargs["input_ids"] == BAD_TOKEN).any(1)]

    def change(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        rows = is_bad[0].view(-1, 1, 1) if len(hidden) == len(is_bad[0]) else is_bad[0].view(1, -1, 1)
        changed = torch.where(rows, math.nan, hidden)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.get_submodule(layer).register_forward_hook(change)


# Whole runs


ROWS = (5, 40)  # of the training file


@pytest.fixture
def bad_rows(monkeypatch, place):
    """Two rows whose hidden states become NaN in training, once the model is proven; returns the flags of a run on them."""
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    for i in ROWS:
        rows[i]["text"] = "red " * 9
    fit = loop.fit

    def spoilt_fit(run, progress):
        token = run.windows.fetcher.dataset[ROWS[0]]["input_ids"][1]
        assert sum(list(run.windows.fetcher.dataset[i]["input_ids"]).count(token) > 5 for i in range(len(rows))) == len(ROWS)
        is_bad = []
        run.model.register_forward_pre_hook(
            lambda module, args, kwargs: is_bad.append((kwargs["input_ids"] == token).sum(1) > 5), with_kwargs=True
        )
        run.model.transformer.h[1].mlp.register_forward_hook(
            lambda module, args, output: torch.where(is_bad[-1].view(-1, 1, 1), math.nan, output) if module.training else output
        )
        return fit(run, progress)

    monkeypatch.setattr("hf_ga.run.finetune.fit", spoilt_fit)
    return {"dataset_name": write_rows(place / "bad.jsonl", rows), "save_steps": 1, "eval_steps": 100}


def windows_with(ids):
    """Numbers of the windows of the first epoch that hold a row, from 0."""
    order = epoch_order(60, 7, 0, True).tolist()
    return sorted({order.index(i) // 16 for i in ids})


def test_a_run_stops_and_says_where_to_go_on(place, tmp_path, bad_rows):
    first = windows_with(ROWS)[0]
    with pytest.raises(NonFinite) as caught:
        train(place, tmp_path / "out", **bad_rows)
    text = str(caught.value)
    assert f"before optimizer step {first + 1} the run stopped" in text and f"window {first} of epoch 0" in text
    assert "is transformer.h.1.mlp (GPT2MLP)" in text and "on_nonfinite skip" in text and "lower the learning rate" in text
    assert f"go on from {tmp_path / 'out'}/checkpoint-{first}" in text if first else "start again" in text
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(1, first + 1))


def test_a_run_that_skips_says_so_once(place, tmp_path, bad_rows, capfd):
    bad = windows_with(ROWS)
    summary = train(place, tmp_path / "out", on_nonfinite="skip", max_steps=4 - len(bad), **bad_rows)
    lines = lines_of(tmp_path / "out")
    assert [line["skipped"] for line in lines] == [index in bad for index in range(len(lines))]
    for index, line in enumerate(lines):
        assert (line["loss"] is None, line.get("nonfinite", False)) == (index in bad,) * 2
    assert summary["skipped_windows"] == sum(line["skipped"] for line in lines) >= 1
    printed = capfd.readouterr()
    told = [line for line in (printed.out + printed.err).splitlines() if "a window was skipped" in line]
    assert len(told) == summary["skipped_windows"] and all("transformer.h.1.mlp" in line for line in told)
    assert summary["train_loss"] > 0


def test_many_skipped_windows_in_a_row_stop_the_run(place, tmp_path, bad_rows, monkeypatch):
    monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 1)
    with pytest.raises(hf_ga.DataError, match=r"1 windows in a row made no step.*losses or gradients are not finite.*GPT2MLP"):
        train(place, tmp_path / "out", on_nonfinite="skip", **bad_rows)
