"""Losses and gradients that are not finite, put in by hand: nothing is updated, and the samples and
the module are named.
"""

import json
import math
import re

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from runs import lines_of, train, write_rows
from spoilt import BAD_TOKEN, marked, spoil
from steps import Training, same
from torch import nn

import hf_ga
from hf_ga.draws.generators import random_states
from hf_ga.engine.checks.nonfinite import find_cause
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import NonFinite
from hf_ga.finetuning.run import loop
from hf_ga.order.order import epoch_order
from hf_ga.parallel.backend import Backend

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
WINDOW = 8
MICRO_BATCH = 3
NUM_WINDOWS = 3
IDS = (10, 13)  # of the bad samples: both in the second window, in its first and second micro-batch


class Classifier(nn.Module):
    """Mean cross entropy of tokens that are embedded, turned and averaged; `trouble` says what goes
    wrong for the bad token.

    Attributes:
        unlucky: the bad samples are those of which `coin`, a dropout, drops a one. fell: for each
            sample of each forward, whether.
    """

    def __init__(self, trouble=""):
        super().__init__()
        torch.manual_seed(3)
        self.trouble = trouble
        self.unlucky = False
        self.fell = []
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.coin = nn.Dropout(0.5)
        self.middle = nn.Linear(h.WIDTH, h.WIDTH)
        self.norm = Root(trouble)
        self.head = nn.Linear(h.WIDTH, h.NUM_CLASSES)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1)
        fell = self.coin(torch.ones(len(input_ids), 1)).squeeze(1) == 0
        self.fell += fell.tolist()
        is_bad = fell if self.unlucky else (input_ids == BAD_TOKEN).any(1)
        hidden = self.middle(self.dropout(self.embedding(input_ids)) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.norm(hidden, is_bad))
        if labels is None:
            return {"logits": logits}
        losses = F.cross_entropy(logits, labels, reduction="none")
        if self.trouble == "loss":
            losses = torch.where(is_bad, math.inf, losses)
        return {"loss": losses.mean(), "logits": logits}


class Root(nn.Module):
    """A module in the middle that can spoil its output, or its gradient alone: the square root has
    none at 0.
    """

    def __init__(self, trouble):
        super().__init__()
        self.trouble = trouble

    def forward(self, hidden, is_bad):
        if self.trouble == "output":
            return torch.where(is_bad.unsqueeze(-1), math.nan, hidden)
        if self.trouble == "gradient":
            zero = torch.where(
                is_bad.unsqueeze(-1), (hidden - hidden.detach()).abs(), torch.ones_like(hidden)
            )
            return hidden + zero.sqrt() - 1
        if self.trouble == "crowd" and len(hidden) > 1 and bool(is_bad.any()):
            return hidden * math.inf
        return hidden


def samples(bad=IDS):
    return marked(h.class_samples(NUM_WINDOWS * WINDOW), bad)


def spoilt_sum(outputs, batch):
    total = F.cross_entropy(outputs["logits"], batch["labels"], reduction="sum")
    return total + torch.where((batch["input_ids"] == BAD_TOKEN).any(), math.nan, 0.0), len(
        batch["labels"]
    )


def windows_of(data, **more):
    sizes = {
        "global_batch_size": WINDOW,
        "planner": h.by_number(MICRO_BATCH),
        "shuffle": False,
        "seed": 5,
    }
    return hf_ga.WindowLoader(data, h.pad_right, accelerator=Accelerator(), **{**sizes, **more})


def started(case="", precision="no"):
    """A training and the options of its steps. The model is tried before anything goes wrong, on
    good samples.
    """
    model = Classifier(case)
    loss_fn = spoilt_sum if case == "loss_fn" else None
    if case == "weight":
        with torch.no_grad():
            model.embedding.weight[BAD_TOKEN] = math.nan
    training = Training(Accelerator(cpu=True, mixed_precision=precision), model)
    return training, {"loss_fn": loss_fn}


# name: what goes wrong, and what the message says of it
CASES = {
    "output": "the first module with a non-finite output is norm (Root)",
    "loss": "the first module with a non-finite output is the model itself (Classifier)",
    "gradient": "the gradient of middle.bias is not finite",
    "weight": "the first module with a non-finite output is embedding (Embedding)",
    "loss_fn": "the outputs of all modules are finite, so the loss is the cause",
}


def text_of(case, max_grad_norm=None, precision="no"):
    """The error of the second window, which leaves everything as it was."""
    training, options = started(case, precision)
    first, second, _ = windows_of(samples())
    training.step(first, **options)
    before = training.snapshot(), surroundings(training.model)
    with pytest.raises(NonFinite) as caught:
        training.step(second, **options, max_grad_norm=max_grad_norm)
    assert same(training.snapshot(), before[0])
    assert surroundings(training.model) == before[1]
    assert all(p.grad is None for p in training.model.parameters())
    return str(caught.value)


def surroundings(model):
    """Random generators, modes, number of hooks."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return random_states(), [m.training for m in model.modules()], hooks


@pytest.mark.parametrize(
    ("case", "precision", "max_grad_norm"),
    [*((case, "no", None) for case in CASES), ("gradient", "bf16", 1.0), ("loss", "bf16", 1.0)],
)
def test_it_stops_before_the_step_and_names_samples_and_module(case, precision, max_grad_norm):
    text = text_of(case, max_grad_norm, precision)
    assert "window 1 of epoch 0" in text
    assert CASES[case] in text
    assert "it comes from samples 10, 13;" in text
    assert text.startswith("the gradient of window" if case == "gradient" else "the loss of window")


def test_samples_are_named_by_their_rows():
    """Not by their positions, which are others where the order is shuffled."""
    training, options = started("output")
    with pytest.raises(NonFinite, match=r"it comes from (sample (10|13)|samples (10, 13|13, 10));"):
        for window in windows_of(samples(), shuffle=True):
            training.step(window, **options)


def test_a_micro_batch_that_is_bad_only_together_is_named_whole():
    text = text_of("crowd")
    listed = [8, 9, 10, 11, 12, 13]  # two micro-batches of three; in the third is no bad sample
    assert f"it comes from samples {', '.join(map(str, listed))};" in text
    assert CASES["output"] in text


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["no clipping", "clipping"])
def test_a_norm_that_overflows_stops_only_where_it_would_clip(max_grad_norm):
    """All gradients are finite. Without clipping the step is made; a clipped one would be zero."""
    training, options = started()
    training.model.head.bias.register_hook(lambda gradient: gradient * 1e22)
    window = next(iter(windows_of(samples(bad=()))))
    if max_grad_norm is None:
        assert not training.step(window, **options).skipped
        return
    said = "each micro-batch alone gives finite numbers: their sum or its norm overflows float32"
    with pytest.raises(NonFinite, match=said):
        training.step(window, **options, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("case", ["gradient", "weight", "loss_fn"])
def test_a_skipped_window_leaves_the_run_without_it(case):
    """Bit for bit the run in which train_step is not called for the bad window, with samples of
    which it is named.
    """
    ends = []
    for skips in (True, False):
        (training, options), results = started(case), []
        for window in windows_of(samples()):
            if skips or window.index != 1:
                results.append(
                    training.step(window, **options, max_grad_norm=1.0, on_nonfinite="skip")
                )
        ends.append(training.snapshot())
        assert training.scheduler.last_epoch == 2
        if skips:
            assert [(r.skipped, r.nonfinite, r.overflowed) for r in results] == [
                (False,) * 3,
                (True, True, False),
                (False,) * 3,
            ]
            assert [r.cause is not None for r in results] == [
                False,
                True,
                False,
            ]
            assert "samples 10, 13" in results[1].cause
            assert math.isfinite(results[1].loss) is (case == "gradient")
            assert results[1].num_targets == WINDOW
    assert same(*ends)
    assert not any(r.skipped for r in results)


def own_loop(model, **losses):
    """hf_ga's own loop, without rehearsals and trials, whose forwards `fell` would count, too."""
    backend = Backend(Accelerator())
    engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=False)
    engine.rehearses = False
    engine.speed_ups.candidates = lambda model: []
    return OwnLoop(engine, model, **losses)


def test_the_forwards_are_run_again_with_their_own_dropout():
    """Which samples go wrong depends on their dropout."""
    model = Classifier("output")
    model.unlucky = True
    for window in windows_of(samples()):
        loop = own_loop(model)
        model.fell.clear()
        result = loop.add_gradients(window)
        fell = model.fell[-WINDOW:]  # a window whose draws were keyed otherwise is computed again
        bad = [i for i, fell in zip(window.sample_ids.tolist(), fell, strict=True) if fell]
        assert 0 < len(bad) < WINDOW
        model.fell.clear()
        cause = find_cause(loop, window, result.loss)
        assert f"comes from samples {', '.join(map(str, bad))};" in cause + ";"
        assert sum(model.fell) == 2 * len(bad)  # in micro-batches again, and one by one


def test_a_micro_batch_without_targets_is_no_cause():
    """Its mean is NaN, but counts nothing in the window."""
    data = samples()
    for index in range(11, 14):  # the second micro-batch of the second window
        data[index]["labels"] = -100
    model = Classifier("output")
    loop = own_loop(model)
    _, window, _ = windows_of(data)
    result = loop.add_gradients(window)
    assert not math.isfinite(result.loss)
    assert "it comes from sample 10;" in find_cause(loop, window, result.loss)


def test_a_loss_of_the_whole_window():
    """Single samples have none: their outputs are searched."""
    model = Classifier("output")
    loop = own_loop(model, whole_batch=lambda outputs, batch: outputs["logits"].std())
    _, window, _ = windows_of(samples())
    cause = find_cause(loop, window, math.nan)
    assert "it comes from samples 10, 13;" in cause
    assert CASES["output"] in cause


def test_micro_batches_are_cut_where_memory_ran_out_before():
    """As the step cut them: larger ones might not fit."""
    (training, options), sizes = started("output"), []
    training.model.register_forward_pre_hook(
        lambda module, args, batch: sizes.append(batch["input_ids"].numel()), with_kwargs=True
    )
    _, window, _ = windows_of(samples())
    window.state.max_elements = 24
    training.step(window, **options, on_nonfinite="skip")
    assert max(sizes) <= 24
    window.state.max_elements, sizes[:] = None, []  # the control
    training.step(window, **options, on_nonfinite="skip")
    assert max(sizes) > 24


# Other models, whose loss needs more than one forward of one batch


@pytest.mark.parametrize(
    ("name", "build", "layer"),
    [
        ("mixtral", h.mixtral, "model.layers.1"),
        ("xlnet", h.xlnet_classifier, "transformer.layer.1.ff"),
    ],
    ids=["router", "one width"],
)
def test_models_with_a_router_or_of_one_width(name, build, layer):
    """The second layer spoils what holds the bad token. XLNet's micro-batches are padded to their
    window.
    """
    data = samples()
    model = build(0.5)
    widths = set()
    if name == "mixtral":
        data = [{**s, "labels": list(s["input_ids"])} for s in data]
    training = Training(Accelerator(cpu=True), model)
    spoil(model, layer)
    first, second, _ = windows_of(data)
    training.step(first)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.add(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with pytest.raises(
        NonFinite,
        match=r"comes from samples 10, 13; .* module with a non-finite output is "
        rf"{re.escape(layer)} ",
    ):
        training.step(second)
    widest = max(len(data[i]["input_ids"]) for i in second.sample_ids)
    assert (widths == {widest}) == (name == "xlnet")


# Whole runs


ROWS = (5, 40)  # of the training file


@pytest.fixture
def bad_rows(monkeypatch, place):
    """Two rows whose hidden states become NaN in training, once the model is tried; returns the
    flags of a run on them.
    """
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    for i in ROWS:
        rows[i]["text"] = "red " * 9
    fit = loop.fit

    def spoilt_fit(run, *how):
        token = run.windows.fetcher.dataset[ROWS[0]]["input_ids"][1]
        assert sum(
            list(run.windows.fetcher.dataset[i]["input_ids"]).count(token) > 5
            for i in range(len(rows))
        ) == len(ROWS)
        is_bad = []
        run.model.register_forward_pre_hook(
            lambda module, args, kwargs: is_bad.append((kwargs["input_ids"] == token).sum(1) > 5),
            with_kwargs=True,
        )
        run.model.transformer.h[1].mlp.register_forward_hook(
            lambda module, args, output: (
                torch.where(is_bad[-1].view(-1, 1, 1), math.nan, output)
                if module.training
                else output
            )
        )
        return fit(run, *how)

    monkeypatch.setattr("hf_ga.finetuning.run.finetune.fit", spoilt_fit)
    return {
        "dataset_name": write_rows(place / "bad.jsonl", rows),
        "save_steps": 1,
        "eval_steps": 100,
    }


def windows_with(ids):
    """Numbers of the windows of the first epoch that hold a row, from 0."""
    order = epoch_order(60, 7, 0, True).tolist()
    return sorted({order.index(i) // 16 for i in ids})


def test_a_run_stops_and_says_where_to_go_on(place, tmp_path, bad_rows):
    first = windows_with(ROWS)[0]
    with pytest.raises(NonFinite) as caught:
        train(place, tmp_path / "out", **bad_rows)
    text = str(caught.value)
    assert f"the run stopped before optimizer step {first + 1}" in text
    assert f"window {first} of epoch 0" in text
    assert "is transformer.h.1.mlp (GPT2MLP)" in text
    assert "on_nonfinite skip" in text
    assert "lower the learning rate" in text
    assert (
        f"resume from {tmp_path / 'out'}/checkpoint-{first}" in text
        if first
        else "start again" in text
    )
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(1, first + 1))


def test_a_run_that_skips_says_so_once(place, tmp_path, bad_rows, capfd):
    bad = windows_with(ROWS)
    summary = train(
        place, tmp_path / "out", on_nonfinite="skip", max_steps=4 - len(bad), **bad_rows
    )
    lines = lines_of(tmp_path / "out")
    assert [line["skipped"] for line in lines] == [index in bad for index in range(len(lines))]
    for index, line in enumerate(lines):
        assert (line["loss"] is None, line.get("nonfinite", False)) == (index in bad,) * 2
    assert summary["skipped_windows"] == sum(line["skipped"] for line in lines) >= 1
    printed = capfd.readouterr()
    told = [
        line for line in (printed.out + printed.err).splitlines() if "a window was skipped" in line
    ]
    assert len(told) == summary["skipped_windows"]
    assert all("transformer.h.1.mlp" in line for line in told)
    assert summary["train_loss"] > 0


def test_many_skipped_windows_in_a_row_stop_the_run(place, tmp_path, bad_rows, monkeypatch):
    monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 1)
    with pytest.raises(
        hf_ga.DataError,
        match=r"1 consecutive windows made no step.*losses or gradients are not finite.*GPT2MLP",
    ):
        train(place, tmp_path / "out", on_nonfinite="skip", **bad_rows)
