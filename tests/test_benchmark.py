"""The benchmark measures what it says: counts against counts by hand, bounds that break, and the script from outside."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark import apart, cli, lap, meters, planning, profiles, samples, sections, speed, speed_tables, steps
from benchmark.arms import ARMS, BY_LENGTH, GROUPED, PACKED, REBALANCED, TRAINER, UNSORTED, Measurement, measure_arm
from benchmark.figures import Bound, Section, markdown_table
from benchmark.setting import SIZES, Setting, build_model, count_parameters, useful_flops
from benchmark.speed import Speed
from torch.utils.flop_counter import FlopCounterMode

import hf_ga
from hf_ga.exact.order import epoch_order

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
LENGTHS = [3, 17, 5, 9, 2, 30, 12, 4, 8, 8, 21, 6, 3, 14, 7, 11] * 2
SETTING = Setting(size="tiny", vocabulary=60, window_size=16, micro_batch_size=4, max_length=32)


def make_samples(label: bool = False) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = [{"id": i, "input_ids": rng.integers(5, 60, length).tolist()} for i, length in enumerate(LENGTHS)]
    return [{**row, "label": row["id"] % 2} for row in rows] if label else rows


@pytest.mark.parametrize(
    "arm", [TRAINER, REBALANCED, "TRL SFTTrainer, padding-free", "raw Accelerate loop", UNSORTED, BY_LENGTH, PACKED]
)
@pytest.mark.filterwarnings("ignore")  # TRL's, of padding-free attention
def test_every_arm_sees_each_sample_once_and_waits_for_its_turn_before_each_window(monkeypatch, arm):
    waited = []
    monkeypatch.setattr(lap, "wait_for_turn", waited.append)
    measured = measure_arm(SETTING, arm, make_samples(), "turn")
    assert waited == ["turn"] * (1 + len(LENGTHS) // SETTING.window_size)
    assert not measured.refused
    assert measured.each_once
    assert (measured.samples, measured.real_tokens) == (len(LENGTHS), sum(LENGTHS))
    assert 0 < measured.inside_seconds < measured.seconds
    if arm == UNSORTED:  # micro-batches of 4 in the order of the epoch
        padded = np.array(LENGTHS)[epoch_order(len(LENGTHS), SETTING.seed, 0)].reshape(-1, 4).max(1).sum() * 4
        assert measured.padded_tokens == padded > measured.real_tokens
    if arm in (BY_LENGTH, PACKED):
        assert measured.padded_tokens < 1.5 * measured.real_tokens
    if "padding-free" in arm:
        assert measured.padded_tokens == measured.real_tokens


def test_a_sample_that_is_lost_or_comes_twice_is_told():
    collate = meters.CountedCollate(samples.collate_function(SETTING))
    rows = make_samples()[:4]
    collate(rows)
    assert (sorted(collate.ids), collate.real_tokens, collate.padded_tokens) == ([0, 1, 2, 3], 34, 68)
    collate(rows[:1])
    assert sorted(collate.ids) != [0, 1, 2, 3]
    speed = fake_speed({BY_LENGTH: [replace(one(1.0), each_once=False)]})
    section = speed_tables.ragged_section(speed)
    assert any("each sample once" in note for note in section.notes)
    assert ["saw each sample once" in bound.what for bound in section.bounds if not bound.holds] == [True]


def test_an_arm_that_cannot_run_says_why():
    setting = replace(SETTING, model="bert")
    measured = measure_arm(setting, "TRL SFTTrainer", make_samples(label=True))
    assert "causal" in measured.refused
    section = speed_tables.ragged_section(fake_speed({BY_LENGTH: [one(1.0)], "TRL SFTTrainer": [measured]}))
    assert "TRL SFTTrainer: not run: " in section.to_markdown()
    assert all(bound.holds for bound in section.bounds)
    nothing = speed_tables.ragged_section(fake_speed({BY_LENGTH: [measured]}))
    assert not any(bound.holds for bound in nothing.bounds)  # hf_ga must run


@pytest.mark.parametrize("model", ["gpt", "bert", "bert-mlm"])
def test_parameters_and_operations_are_those_of_the_products(model):
    """Every weight of body and head is used once a token: torch's own count of the products' operations, and sizes by hand."""
    setting = replace(SETTING, model=model, size="small", vocabulary=500, dropout=0.0)
    layers, width, _ = SIZES["small"]
    built = build_model(setting)
    body, head = count_parameters(built)
    of_layers = layers * (12 * width**2 + 13 * width)
    assert body == of_layers + (2 * width if model == "gpt" else 0)  # the last norm
    heads = {
        "gpt": 500 * width,
        "bert": width**2 + width + 2 * width + 2,
        "bert-mlm": width**2 + width + 2 * width + 500 * width + 500,
    }
    assert head == heads[model]
    ids = torch.randint(5, 500, (3, 40))
    with FlopCounterMode(display=False) as counter:
        labels = torch.zeros(3, dtype=torch.long) if model == "bert" else ids
        built(input_ids=ids, labels=labels).loss.backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    counted = useful_flops(body, head, 120, 3 if model == "bert" else 120)
    assert counted == pytest.approx(products, rel=0.01)
    assert useful_flops(body, head, 60, 60) < 0.6 * products  # not that of half the tokens


def test_targets_are_those_of_the_labels():
    rows = make_samples()
    assert samples.count_targets(SETTING, rows) == sum(LENGTHS) - len(LENGTHS)
    assert samples.count_targets(replace(SETTING, model="bert"), rows) == len(LENGTHS)
    masked = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
    assert samples.count_targets(replace(SETTING, model="bert-mlm"), masked) == sum(LENGTHS) - len(LENGTHS)


def test_all_arms_start_from_the_same_weights():
    first, second = (torch.nn.utils.parameters_to_vector(build_model(SETTING).parameters()) for _ in range(2))
    assert torch.equal(first, second)


def test_nearly_one_length_is_within_ten_percent():
    made = samples.uniform_samples(make_samples(), 20)
    lengths = [len(sample["input_ids"]) for sample in made]
    assert (min(lengths), max(lengths)) == (18, 20)
    assert [sample["id"] for sample in made] == list(range(len(LENGTHS)))
    equal = samples.uniform_samples(make_samples(), 20, shortest_share=1.0)
    assert {len(sample["input_ids"]) for sample in equal} == {20}


def test_what_is_nested_counts_once():
    watch = meters.Stopwatch("cpu")
    watch.start()
    with watch.counted():
        time.sleep(0.02)
        with watch.counted():
            time.sleep(0.02)
    time.sleep(0.02)
    watch.stop()
    assert 0.04 <= watch.inside_seconds <= watch.seconds - 0.02


def test_a_stopwatch_leaves_out_what_lies_between_stop_and_go_on():
    watch = meters.Stopwatch("cpu")
    watch.start()
    with watch.counted():
        time.sleep(0.02)
    watch.stop()
    time.sleep(0.5)
    watch.go_on()
    with watch.counted():
        time.sleep(0.02)
    watch.stop()
    assert 0.04 <= watch.inside_seconds <= watch.seconds < 0.4
    watch.start()
    watch.stop()
    assert watch.inside_seconds == 0 and watch.seconds < 0.02, "start forgets"


def write_in_turns(name: str, log: Path, count: int, turn: Connection) -> str:
    """A line in the log when it starts and in each of its turns; ends its process if there are none."""
    for what in ["starts", *range(count)]:
        with log.open("a") as file:
            file.write(f"{name} {what}\n")
        if not count:
            os._exit(1)
        apart.wait_for_turn(turn)
    return name


@pytest.mark.launch
def test_processes_take_turns_until_each_has_ended(tmp_path):
    log = tmp_path / "log"
    calls = [("a", log, 2), ("b", log, 0), ("c", log, 1), ("d", log, 2)]
    first, killed, *others = apart.run_in_turns(write_in_turns, calls)
    assert first == "a" and isinstance(killed, apart.ProcessEnded) and others == ["c", "d"]
    starts, turns = ["a starts", "b starts", "c starts", "d starts"], ["a 0", "c 0", "d 0", "a 1", "d 1"]
    assert log.read_text().splitlines() == [*starts, *turns]


@pytest.mark.launch
def test_processes_that_wait_for_their_turns_end_with_an_error_of_their_parent(tmp_path, monkeypatch):
    asked = []

    def fail(*of):
        asked.append(of)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return until(*of)

    def end_what_still_waits():
        late.append(True)
        for process in multiprocessing.active_children():
            process.kill()

    until, late, timer = apart._until_it_waits, [], threading.Timer(60, end_what_still_waits)
    monkeypatch.setattr(apart, "_until_it_waits", fail)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        apart.run_in_turns(write_in_turns, [("a", tmp_path / "log", 2), ("b", tmp_path / "log", 2)])
    timer.cancel()
    assert not late


@pytest.mark.parametrize(("in_turns", "together"), [(False, [1, 1, 1, 1, 1]), (True, [3, 2])])
def test_arms_of_a_round_are_measured_together_where_they_take_turns(monkeypatch, in_turns, together):
    """An arm that is refused is asked once."""
    asked = []

    def measured(function, calls):
        asked.append([arm for _, arm, _ in calls])
        return [Measurement(refused="no" if arm == TRAINER else "") for arm in asked[-1]]

    monkeypatch.setattr(speed, "run_in_turns", measured)
    monkeypatch.setattr(speed, "run_apart", lambda *_: 1.0)
    found = speed.run_arms(Setting("gpt"), [], 1, dict.fromkeys([UNSORTED, TRAINER, PACKED], 2), "", in_turns=in_turns)
    assert list(map(len, asked)) == together
    assert {arm: len(of) for arm, of in found.rounds.items()} == {UNSORTED: 2, TRAINER: 1, PACKED: 2}


def test_forwards_and_backwards_are_counted_and_nothing_stays_behind():
    model, watch = torch.nn.Linear(4, 4), meters.Stopwatch("cpu")
    backward = torch.autograd.backward
    watch.start()
    with meters.forwards_and_backwards(watch, model):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(watch.inside) == 2
    assert torch.autograd.backward is backward
    assert model.weight.grad is not None


def test_the_rate_of_products_is_the_best_of_several(monkeypatch):
    seconds = iter([0.5, 4.0, 2.0, 3.0])
    monkeypatch.setattr(meters, "_product_seconds", lambda *_: next(seconds))
    assert meters.matrix_product_rate("cpu", "no", size=10, repeats=4) == 2 * 10**3 / 2.0  # the first is a warm-up


def one(seconds: float, padded: int = 1200, peak: int = 300) -> Measurement:
    return Measurement(
        seconds=seconds,
        inside_seconds=0.98 * seconds,
        cpu_seconds=seconds,
        samples=10,
        each_once=True,
        real_tokens=1000,
        padded_tokens=padded,
        num_body=50,
        num_head=20,
        peak_memory=peak * 2**20,
        memory_before=100 * 2**20,
    )


def fake_speed(rounds: dict[str, list[Measurement]]) -> Speed:
    return Speed(SETTING, 10, 990, rounds, [4e5, 5e5, 6e5])


def test_medians_ratios_and_bounds_by_hand():
    rounds = {
        TRAINER: [one(4.0), one(40.0), one(3.9)],
        GROUPED: [one(1.5), one(1.5), one(1.5)],
        REBALANCED: [one(1.2), one(1.3), one(0.2)],
        BY_LENGTH: [one(1.0), one(9.0), one(0.9)],
    }
    arms = speed_tables.summarise(fake_speed(rounds))
    ours = arms[BY_LENGTH]
    assert (ours["seconds"], ours["tokens_per_second"], ours["padding"]) == (1.0, 1000.0, 1.2)
    assert (ours["times_trainer"], ours["times_best"]) == (4.0, 1.2)
    assert ours["outside"] == pytest.approx(0.02)
    assert ours["efficiency"] == pytest.approx((6 * 50 * 1000 + 6 * 20 * 990) / 5e5)
    assert (ours["peak"], ours["above"]) == (300.0, 200.0)
    assert all(bound.holds for bound in speed_tables.ragged_section(fake_speed(rounds)).bounds)
    assert [bound.is_aim for bound in speed_tables.ragged_section(fake_speed(rounds)).bounds] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("arm", "measured", "broken"),
    [
        (BY_LENGTH, one(1.4), "Trainer's default"),
        (BY_LENGTH, one(1.1), "the better Trainer"),
        (BY_LENGTH, one(1.0, peak=301), "memory"),
        (BY_LENGTH, replace(one(1.0), inside_seconds=0.9), "outside"),
        (BY_LENGTH, replace(one(1.0), num_body=20), "FLOPs"),
    ],
)
def test_each_bound_can_break(arm, measured, broken):
    rounds = {TRAINER: [one(4.0)], GROUPED: [one(1.5)], REBALANCED: [one(1.2)], BY_LENGTH: [one(1.0)]} | {arm: [measured]}
    names = [bound.what for bound in speed_tables.ragged_section(fake_speed(rounds)).bounds if bound.is_broken]
    assert any(broken in name for name in names)


@pytest.mark.parametrize(("device", "bounded"), [("cpu", PACKED), ("cuda", BY_LENGTH)])
def test_bounds_are_about_what_finetune_does_by_itself(device, bounded):
    """Not about whichever arm came out fastest."""
    other = {PACKED: BY_LENGTH, BY_LENGTH: PACKED}[bounded]
    speed = fake_speed({TRAINER: [one(4.0)], other: [one(1.0)], bounded: [one(3.0)]})
    section = speed_tables.ragged_section(replace(speed, setting=replace(SETTING, device=device)))
    assert all(f", {bounded}: " in bound.what for bound in section.bounds)
    (ratio,) = (bound for bound in section.bounds if "Trainer's default" in bound.what)
    assert ratio.value == pytest.approx(4 / 3) and not ratio.holds


@pytest.mark.parametrize(("seconds", "holds"), [(2.1, True), (2.3, False)])
def test_steps_in_turn_are_compared_by_the_clock(seconds, holds):
    times = {"1": [(2.0, 9.0), (50.0, 9.0), (1.0, 9.0)], "4": [(2.0, 1.0)], "16": [(seconds, 1.0)]}
    (bound,) = steps.splits_section(SETTING, times, "samples").bounds
    assert (bound.value, bound.holds) == (pytest.approx(seconds / 2), holds)
    (bound,) = steps.dropout_section(SETTING, {steps.KEYED: [(1.0, 1.0)], steps.NATIVE: [(1.0, 1.0)]}).bounds
    assert bound.holds


@pytest.mark.parametrize("kind", [steps.KEYED, steps.NATIVE])
def test_only_one_of_the_two_steps_draws_from_torchs_generator(monkeypatch, kind):
    monkeypatch.setattr(steps, "_in_turn", lambda setting, runs, rounds: runs)
    runs = steps.measure_dropout(SETTING, make_samples(), 1)
    before = torch.get_rng_state()
    assert runs[kind]() > 0
    assert torch.equal(torch.get_rng_state(), before) == (kind == steps.KEYED)


def test_a_window_is_split_into_1_4_and_16_micro_batches_of_the_same_padded_tokens(monkeypatch):
    shapes, step = [], hf_ga.train_step

    def watched(*of, **more):
        shapes.append([tuple(batch["input_ids"].shape) for batch in of[3].batches])
        return step(*of, **more)

    monkeypatch.setattr(hf_ga, "train_step", watched)
    times = steps.measure_splits(SETTING, make_samples(), 2)
    assert {name: len(measured) for name, measured in times.items()} == {"1": 2, "4": 2, "16": 2}
    assert [len(each) for each in shapes[:3]] == [1, 4, 16]
    assert len({(sum(rows for rows, _ in each), *{width for _, width in each}) for each in shapes}) == 1


def test_windows_of_an_epoch_are_split_one_after_the_other(monkeypatch):
    """All splits of a window before the next one: ratios are of the same samples."""
    seen, step = [], hf_ga.train_step

    def watched(*of, **more):
        seen.append((of[3].index, len(of[3].batches)))
        return step(*of, **more)

    monkeypatch.setattr(hf_ga, "train_step", watched)
    setting = replace(SETTING, window_size=16)
    steps.measure_splits(setting, [*make_samples(), *make_samples()][:32], 3)
    assert [{index for index, _ in seen[i : i + 3]} for i in range(0, 12, 3)] == [{0}, {1}, {0}, {1}]
    assert all({number for _, number in seen[i : i + 3]} == {1, 4, 16} for i in range(0, 12, 3))


def test_splits_of_the_settings_own_samples_and_of_short_ones_have_a_bound_each(monkeypatch):
    asked = []

    def measured(function, setting, rows, rounds):
        asked.append({len(row["input_ids"]) for row in rows})
        return {"1": [(1.0, 1.0)], "4": [(1.0, 1.0)], "16": [(1.0 + len(asked), 1.0)]}

    monkeypatch.setattr(sections, "ragged_samples", lambda *_: (make_samples(), 0))
    monkeypatch.setattr(sections, "run_apart", measured)
    own, short = sections.run_splits(sections.Plan([SETTING], len(LENGTHS), [], 1, 1, 0))
    assert asked == [set(LENGTHS), {SETTING.max_length}]
    assert [(bound.value, bound.limit) for bound in (*own.bounds, *short.bounds)] == [(2.0, 1.1), (3.0, 1.1)]
    assert all(bound.is_broken for bound in (*own.bounds, *short.bounds))


def test_the_first_window_and_its_plan_are_timed():
    seconds, cpu_seconds, added, peak = planning.first_window(1000)
    assert seconds > 0
    assert cpu_seconds >= 0
    assert 0 <= added <= peak
    assert len(planning.planned_window(2)) == 2
    broken = planning.planning_section({1000: [(3.5, 1.0, 6 * 10**8, 9 * 10**8)]}, [60.0]).bounds
    assert [bound.holds for bound in broken] == [False, False, False]


def test_the_profile_counts_what_ran_and_leaves_no_time_out():
    """Catches kinds that overlap or miss operations, and a profile of the warm-up."""
    seen = profiles.profile_arm(profiles.on_one_thread(SETTING), REBALANCED, make_samples())
    # Two layers of four linear ones and the head, each one product forward and two backward, in 32 / 4 micro-batches.
    assert seen.kinds["matrix products of layers and head"][1] == (2 * 4 + 1) * 3 * 8
    assert sum(seconds for seconds, _ in seen.kinds.values()) == pytest.approx(seen.seconds)
    assert all(seconds > 0 for kind, (seconds, _) in seen.kinds.items())
    assert seen.kinds[profiles.OTHER][1] < 0.1 * sum(calls for _, calls in seen.kinds.values()), "names that no kind knows"
    section = profiles.profile_section(SETTING, {REBALANCED: seen, PACKED: profiles.Profile(refused="no")}, 2)
    assert section.rows[-1] == ["all", pytest.approx(seen.seconds * 1e3 / 2), "100.0"]
    assert section.notes == [f"{PACKED}: not run: no"]


def test_a_figure_that_is_no_number_keeps_no_bound():
    assert not Bound("x", float("nan"), 1.0).holds
    assert not Bound("x", float("nan"), 1.0, at_most=True).holds
    assert markdown_table(["a", "b"], [["x", 12345.6]])[-1] == "| x | 12,346 |"


@pytest.mark.parametrize(("value", "flags", "code"), [(2.0, ["--assert"], 0), (0.5, ["--assert"], 1), (0.5, [], 0)])
def test_assert_names_the_bound_that_is_broken(tmp_path, monkeypatch, capsys, value, flags, code):
    aim = Bound("an aim of x", value, 3.0, is_aim=True)
    section = Section("t", ("arm", "s"), [["x", 1.0]], [Bound("the speed of x", value, 1.0), aim])
    monkeypatch.setitem(cli.SECTIONS, "plan", lambda plan: [section])
    output = tmp_path / "out"
    assert cli.main(["--quick", "--sections", "plan", "--output_dir", str(output), *flags]) == code
    printed = capsys.readouterr()
    assert ("the speed of x" in printed.err) == (code == 1) and "an aim of x" not in printed.err
    assert f"AIM MISSED: an aim of x: {value:.4g}, aimed at: at least 3" in printed.out
    figures = json.loads((output / "benchmark.json").read_text())
    assert figures["sections"][0]["bounds"][0]["holds"] == (value >= 1)
    assert "| x | 1 |" in (output / "benchmark.md").read_text()


@pytest.mark.parametrize("flags", [["--sections", "speeds"], ["--num_samples", "100"], ["--model", "t5"], ["--rounds", "0"]])
def test_wrong_flags_are_refused_in_a_line(capsys, flags):
    assert cli.main(["--quick", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.launch
def test_the_script_measures_in_processes_of_their_own(tmp_path):
    flags = ["--quick", "--sections", "speed", "--model", "gpt", "--num_threads", "1", "--assert", "--output", "figures.json"]
    arms = [TRAINER, BY_LENGTH]
    command = [sys.executable, str(SCRIPT), *flags, "--arms", ";".join(arms)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr  # no tiny model uses a matrix unit well
    assert "BROKEN: gpt, hf_ga, by length: useful FLOPs" in done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["sections"][0]["figures"]
    assert list(figures["arms"]) == arms
    assert set(arms) < set(ARMS)
    for name in arms:
        row, (measured,) = figures["arms"][name], figures["rounds"][name]
        assert row["each_once"]
        assert measured["memory_before"] < measured["warmup_peak"] <= measured["peak_memory"]  # a process of its own
        assert row["tokens_per_second"] == pytest.approx(measured["real_tokens"] / measured["seconds"])
        flops = 6 * (measured["num_body"] * measured["real_tokens"] + measured["num_head"] * figures["targets"])
        assert row["efficiency"] == pytest.approx(flops / measured["seconds"] / figures["product_rates"][0])
    assert figures["targets"] == measured["real_tokens"] - figures["num_samples"]
