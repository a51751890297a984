"""The benchmark measures what it says: counts against counts by hand, bounds that fail, and the
script from outside.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from benchmark import cli, ranks, report
from benchmark.arms import (
    ABLATION,
    CHUNKED,
    COMPILED,
    COMPILED_FULL_ROWS,
    DEFAULT,
    EXACT_TRAINER,
    GROUPED,
    NATIVE,
    OWN_LOOP,
    REBALANCED,
    SPEED,
    TRAINER,
    WITHOUT_CUDNN,
    peer_arms,
    speed_arms,
)
from benchmark.gpu import flops_per_token
from benchmark.measuring import BenchmarkRun, Measurements, measure_interleaved
from benchmark.ranks import busy_core, measure_two_ranks
from benchmark.report import Bound
from benchmark.setting import Setting, build_model
from benchmark.trainers import full_rows
from common import collate, random_samples
from forked import on_ranks, without_errors
from torch.utils.flop_counter import FlopCounterMode

from hf_ga.order.length_plan import MAX_PADDING

# Three windows, which an engine rehearses in the first epoch, so that the second has each sample once.
LENGTHS = [3, 17, 5, 9, 2, 30, 12, 4, 8, 8, 21, 6, 3, 14, 7, 11] * 3


def setting_of(model: str = "gpt") -> Setting:
    rng = np.random.default_rng(0)
    samples = [
        {"id": i, "input_ids": rng.integers(5, 60, length).tolist()}
        for i, length in enumerate(LENGTHS)
    ]
    samples = (
        [{**sample, "label": sample["id"] % 2} for sample in samples]
        if model == "bert"
        else samples
    )
    return Setting(
        model,
        size="tiny",
        window_size=16,
        micro_batch_size=4,
        max_length=32,
        epochs=1,
        samples=samples,
    )


WITHOUT_PLAN = "without plan by length"
ARMS = [
    *(
        ("gpt" if name != DEFAULT else "bert", name, arm)
        for name, arm in SPEED.items()
        if name not in (GROUPED, REBALANCED)
    )
]
ARMS.append(("gpt", WITHOUT_PLAN, ABLATION["plan by length"]))


@pytest.mark.parametrize(
    ("model", "name", "arm"), ARMS, ids=[f"{model}, {name}" for model, name, _ in ARMS]
)
def test_every_arm_sees_each_sample_once_an_epoch_and_waits_for_its_turn(model, name, arm):
    setting, (ours, turn), waits = setting_of(model), Pipe(), []

    def take_turns():
        with suppress(EOFError):
            while True:
                waits.append(ours.recv())
                ours.send(None)

    thread = threading.Thread(target=take_turns)
    thread.start()
    measured = BenchmarkRun(setting, turn).measure(arm)
    turn.close()
    thread.join()
    assert len(waits) == 2 * setting.windows_per_epoch == 6
    assert measured.each_once
    assert len(measured.seconds) == setting.windows_per_epoch
    bound = 2.5 if name in (TRAINER, OWN_LOOP, EXACT_TRAINER, WITHOUT_PLAN) else 1.5
    if name == DEFAULT:  # it packs: its plan allows padding, which is not computed
        bound = MAX_PADDING
    assert measured.padding < bound


@pytest.mark.parametrize(
    ("model", "backend"),
    [("gpt", None), pytest.param("bert", "eager", marks=pytest.mark.slow("compiles layers"))],
)
def test_full_rows_have_one_shape_and_as_many_tokens_as_a_window(model, backend):
    """480 real tokens in three windows: two micro-batches of four rows of 20 each."""
    run = BenchmarkRun(setting_of(model))
    shapes = []
    run.model.register_forward_pre_hook(
        lambda model, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    measured = run.measure(partial(full_rows, backend=backend))
    assert sum(LENGTHS) / 3 == 160 and 2 * 4 * 32 > 160 > 4 * 32
    assert set(shapes) == {(4, 20)}
    assert len(shapes) == 2 * 3 * 2  # micro-batches of three windows in two epochs
    assert measured.each_once
    assert len(measured.seconds) == 3


def test_random_samples_are_spread_as_described():
    samples = random_samples("bert", 1024, 2048)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert min(lengths) == 8 and max(lengths) == 1024
    assert np.mean(lengths) == pytest.approx(240, rel=0.02)
    assert {sample["label"] for sample in samples} == {0, 1, 2, 3}
    assert samples == random_samples("bert", 1024, 2048)


def test_arms_without_cudnns_attention_are_trainers_on_a_gpu(monkeypatch):
    seen = []
    note = lambda run: seen.append(torch.backends.cuda.cudnn_sdp_enabled())  # noqa: E731
    monkeypatch.setattr("benchmark.arms.SPEED", dict.fromkeys(SPEED, note))
    assert list(speed_arms("cpu")) == list(SPEED)
    arms = speed_arms("cuda")
    modes = (TRAINER, GROUPED, REBALANCED)
    assert list(arms) == [*SPEED, *(mode + WITHOUT_CUDNN for mode in modes)]
    assert peer_arms("cuda").keys() - peer_arms("cpu").keys() == {
        TRAINER + WITHOUT_CUDNN,
        REBALANCED + WITHOUT_CUDNN,
        COMPILED,
        COMPILED_FULL_ROWS,
    }
    for name in (TRAINER, TRAINER + WITHOUT_CUDNN, TRAINER):
        arms[name](None)
    assert seen == [True, False, True]


@pytest.mark.parametrize(
    ("arm", "moved", "tensors"), [(NATIVE, True, False), (CHUNKED, False, True)]
)
def test_what_is_left_out_is_left_out(arm, moved, tensors):
    """Native dropout moves torch's generator; without the chunked loss the training forwards return
    logits.
    """
    run = BenchmarkRun(setting_of())
    made = []
    run.model.register_forward_hook(
        lambda model, inputs, outputs: made.append(type(outputs.logits) is torch.Tensor)
    )
    before = torch.get_rng_state()
    run.measure(ABLATION[arm])
    assert torch.equal(torch.get_rng_state(), before) != moved
    assert made[-1] == tensors


def test_a_sample_that_is_lost_or_comes_twice_is_seen():
    setting = setting_of()

    def loses_one(run):
        while True:
            run.collate(setting.samples[1:])
            run.step_done()

    assert not BenchmarkRun(setting).measure(loses_one).each_once


def writes(run: BenchmarkRun, name: str, log: Path) -> None:
    """An arm that only notes its turns."""
    for number in range(100):
        with log.open("a") as file:
            file.write(f"{name}{number} ")
        if name == "dies":
            os._exit(1)
        run.step_done()


@pytest.mark.slow("starts processes")
def test_processes_take_turns_and_one_that_dies_is_an_error(tmp_path, monkeypatch):
    """The server of forks imports what it finds in PYTHONPATH, once for all."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    arms = {name: partial(writes, name=name, log=tmp_path / "log") for name in ("lives", "dies")}
    with pytest.raises(RuntimeError, match="'dies' exited without a result"):
        measure_interleaved(setting_of(), arms, "")
    assert (tmp_path / "log").read_text() == "lives0 dies0 "


def one(seconds: float, added: int = 100, **more) -> Measurements:
    return Measurements(
        [seconds / 3] * 3,
        1.2,
        peak_memory=(200 + added) * 2**20,
        memory_before=200 * 2**20,
        **more,
    )


GOOD = {
    TRAINER: one(4.0),
    GROUPED: one(1.5),
    REBALANCED: one(1.4),
    EXACT_TRAINER: one(1.2),
    OWN_LOOP: one(1.01),
    DEFAULT: one(1.0),
}


def test_rates_are_medians_over_epochs():
    measured = Measurements([0.5, 0.25, 0.25, 50.0, 50.0, 50.0, 0.4, 0.2, 0.2])
    assert report.tokens_per_second(setting_of(), measured) == sum(LENGTHS)
    section = report.speed_section(setting_of(), GOOD)
    assert section.rows[-1][1:] == [sum(LENGTHS), 4.0, pytest.approx(1.4), 1.2, 100.0]
    assert all(bound.holds for bound in section.bounds)
    assert "- passed: " in str(section)


def test_ratios_are_to_the_better_of_trainers_settings():
    setting = replace(setting_of(), device="cuda")
    others = {
        TRAINER + WITHOUT_CUDNN: one(2.0),
        GROUPED + WITHOUT_CUDNN: one(1.25, added=80),
        REBALANCED + WITHOUT_CUDNN: one(3.0),
    }
    section = report.speed_section(setting, GOOD | others)
    (row,) = [row for row in section.rows if row[0] == DEFAULT]
    assert row[2:4] == [pytest.approx(2.0), pytest.approx(1.25)]
    assert [bound.holds for bound in section.bounds[:2]] == [False, False]  # 1.25, 100 over 80
    assert section.bounds[3].value == pytest.approx(1.4 / 1.2), "batch_rebalance's better one"
    assert "better of Trainer as shipped" in str(section)
    assert "a CPU has no cuDNN" in str(report.speed_section(setting_of(), GOOD))


@pytest.mark.parametrize(("keyed", "holds"), [(1.0, True), (1.05, False)])
def test_keyed_dropout_over_native(keyed, holds):
    section = report.ablation_section(setting_of(), {DEFAULT: one(keyed), NATIVE: one(1.0)})
    (bound,) = section.bounds
    assert bound.value == pytest.approx(keyed)
    assert bound.holds == holds


def test_each_bound_of_the_speed_can_fail():
    for change, failed in [
        ({DEFAULT: one(1.1), OWN_LOOP: one(1.1)}, "better of Trainer's"),
        ({DEFAULT: one(1.0, added=106)}, "memory"),
        ({OWN_LOOP: one(1.05)}, "own loop"),
        ({EXACT_TRAINER: one(1.3)}, "ExactTrainer"),
        ({TRAINER: one(4.0, each_once=False)}, "each sample once"),
    ]:
        (bound,) = [
            bound
            for bound in report.speed_section(setting_of(), GOOD | change).bounds
            if not bound.holds
        ]
        assert failed in bound.what
        assert str(bound).startswith("FAILED: ")
    assert not Bound("x", float("nan"), 1.0).holds
    assert not Bound("x", float("nan"), 1.0, at_most=True).holds


@pytest.mark.parametrize(("flags", "code"), [(["--assert"], 1), ([], 0)])
def test_assert_prints_the_bounds_that_fail(tmp_path, monkeypatch, capsys, flags, code):
    monkeypatch.setattr(cli, "PLANNED_SAMPLES", (1000,))
    monkeypatch.setattr(cli, "seconds_to_first_window", lambda num_samples: 4.0)
    assert cli.main(["--sections", "plan", "--output_dir", str(tmp_path / "out"), *flags]) == code
    printed = capsys.readouterr()
    assert printed.err.count("FAILED: ") == code
    assert "| 1,000 | 4.000 |" in printed.out
    assert printed.out.split("## ")[1].strip() in (tmp_path / "out" / "benchmark.md").read_text()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--sections", "speeds", *flags])
    (section,) = json.loads((tmp_path / "out" / "benchmark.json").read_text())["sections"]
    assert section["figures"]["seconds"] == {"1000": 4.0}


def test_useful_flops_are_those_that_torch_counts():
    """Of a BERT, whose attention is not causal: all but the pooler of one token."""
    samples = [{"id": 0, "input_ids": np.arange(5, 105).tolist(), "label": 1}]
    setting = Setting("bert", "small", dropout=0.0, samples=samples)
    model = build_model(setting)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        model(**collate(samples)).loss.backward()
    assert counted.get_total_flops() == pytest.approx(100 * flops_per_token(setting), rel=0.01)


def test_a_busy_core_is_the_first_one_until_the_block_ends():
    first = min(os.sched_getaffinity(0))
    before = {*psutil.Process().children()}
    with busy_core():
        (busy,) = {*psutil.Process().children()} - before
        assert busy.cpu_affinity() == [first]
        assert busy.is_running()
    assert not busy.is_running()


def on_forked_ranks(command: list[str], **_: Any) -> None:
    """As `accelerate launch -m benchmark.ranks`, without importing the libraries anew."""
    _, _, _, _, *flags = command
    arguments = launch_command_parser().parse_args(flags)
    assert arguments.module and arguments.training_script == "benchmark.ranks"
    launched, *_ = _validate_launch_command(arguments)
    work = partial(ranks.main, *launched.training_script_args)
    without_errors(on_ranks(work, launched.num_processes))


@pytest.mark.slow("starts processes")
def test_two_ranks_share_each_window(monkeypatch):
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(run=on_forked_ranks))
    measured = measure_two_ranks(setting_of())
    assert len(measured.seconds) == 3
    assert min(measured.seconds) > 0
    assert 0 < measured.memory_before <= measured.peak_memory
    assert not measured.each_once and 0 < measured.padding < 1.2  # rank 0 has a part of each window
