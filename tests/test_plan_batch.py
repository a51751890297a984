"""`plan_batch`: the arithmetic by hand, against the real plan of a window, and naive arithmetic that misses the batch."""

import importlib.util
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from hypothesis import given
from hypothesis import strategies as st

import hf_ga
from hf_ga import ConfigError, plan_batch
from hf_ga.exact.length_plan import plan_by_length
from hf_ga.exact.plan import check_plan, plan_window
from hf_ga.run.cli import parse_config
from hf_ga.run.plan_batch import Share

SCRIPT = Path(__file__).parent.parent / "scripts" / "plan_batch.py"
SEED_CASE = {"nodes": 30, "devices_per_node": 8, "per_device_train_batch_size": 10}
windows, nodes, devices, limits = st.integers(1, 400), st.integers(1, 6), st.integers(1, 8), st.integers(1, 40)


def load_script():
    spec = importlib.util.spec_from_file_location("plan_batch_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(plan):
    """{micro-batch sizes of a process, larger first: number of processes} of a plan."""
    counts = {}
    for share in plan:
        sizes = tuple(sorted((len(micro_batch) for micro_batch in share), reverse=True))
        counts[sizes] = counts.get(sizes, 0) + 1
    return counts


def promised(shares):
    return {tuple(size for size, count in s.micro_batch_sizes.items() for _ in range(count)): s.num_processes for s in shares}


def naive_windows(window, processes, limit):
    """What whole numbers of accumulation steps with full micro-batches make of a wanted window."""
    ratio = window / (processes * limit)
    return [processes * limit * max(1, steps) for steps in (math.floor(ratio), math.ceil(ratio))]


def test_3072_on_240_devices_by_hand():
    """3072 = 240 x 12 + 192: 192 processes have 13 = 7 + 6 samples, 48 have 12 = 6 + 6; 1.28 steps of 2400 are not needed."""
    plan = plan_batch(3072, **SEED_CASE)
    assert plan.shares == (Share(192, 13, {7: 1, 6: 1}), Share(48, 12, {6: 2}))
    assert 192 * 13 + 48 * 12 == 192 * (7 + 6) + 48 * (6 + 6) == plan.layout.window_size == 3072
    assert (plan.layout.num_processes, plan.layout.accumulation_steps) == (240, 2)
    assert plan.balance == 3072 / (240 * 13)
    assert naive_windows(3072, 240, 10) == [2400, 4800], "control: rounding misses the wanted batch, by 22 % or 56 %"


def test_3072_on_240_devices_as_the_loader_plans_it():
    real = plan_by_length(np.full(3072, 512), 240, 10 * 512)
    check_plan(real, 3072, 240)
    assert counted(real) == promised(plan_batch(3072, **SEED_CASE).shares) == {(7, 6): 192, (6, 6): 48}


@given(windows, nodes, devices, limits)
def test_plan_batch_properties(window, num_nodes, num_devices, limit):
    """Catches lost samples, broken limits, unbalanced processes, too many forwards, and a plan that is not what is computed."""
    plan = plan_batch(window, nodes=num_nodes, devices_per_node=num_devices, per_device_train_batch_size=limit)
    processes = num_nodes * num_devices
    assert sum(s.num_processes for s in plan.shares) == processes
    assert sum(s.num_processes * s.samples for s in plan.shares) == window
    for share in plan.shares:
        sizes = share.micro_batch_sizes
        assert sum(size * count for size, count in sizes.items()) == share.samples
        assert sum(sizes.values()) == math.ceil(share.samples / limit) <= plan.layout.accumulation_steps
        assert not sizes or (min(sizes) >= 1 and max(sizes) <= limit and max(sizes) - min(sizes) <= 1)
    assert max(s.samples for s in plan.shares) - min(s.samples for s in plan.shares) <= 1
    assert max(sum(s.micro_batch_sizes.values()) for s in plan.shares) == plan.layout.accumulation_steps
    real = plan_window(window, processes, limit)
    check_plan(real, window, processes)
    assert promised(plan.shares) == counted(real)
    again = plan_batch(window, nodes=num_nodes, devices_per_node=num_devices, per_device_train_batch_size=limit)
    assert again == plan and str(again) == str(plan)
    exact = window % (processes * limit) == 0
    assert (window in naive_windows(window, processes, limit)) == exact, "control: rounded steps only hit multiples"
    assert ("not possible with full micro-batches" in str(plan)) == (not exact)


@given(windows, nodes, devices, limits)
def test_alternatives_are_what_they_say(window, num_nodes, num_devices, limit):
    """Catches a neighbour that skips a nearer one, uneven shares, and an alternative that is no change."""
    plan = plan_batch(window, nodes=num_nodes, devices_per_node=num_devices, per_device_train_batch_size=limit)
    processes, steps = num_nodes * num_devices, plan.layout.accumulation_steps
    same = [a.layout for a in plan.alternatives if a.layout.window_size == window]
    others = [a for a in plan.alternatives if a.layout.window_size != window]
    found = {a.layout.window_size: a.reason.partition(",")[0] for a in others}
    assert len(found) == len(others)
    distances = [abs(size - window) for size in found]
    assert distances == sorted(distances)
    # By brute force: the nearest multiples below and above.
    expected = {}
    for unit, reason in ((processes, "all processes get equally much"), (processes * limit, "full micro-batches")):
        multiples = range(unit, window + 2 * unit, unit)
        if window not in multiples:
            expected |= {n: reason for n in (max((m for m in multiples if m < window), default=None),) if n}
            expected |= {min(m for m in multiples if m > window): reason}
    assert found == expected
    assert all(a.layout.micro_batch_size == limit for a in others)
    largest = max(max(s.micro_batch_sizes, default=0) for s in plan.shares)
    assert [a.micro_batch_size < largest for a in same] == [False] * (steps > 1) + [True] * (largest > 1)
    for layout in same:
        real = plan_window(window, processes, layout.micro_batch_size)
        sizes = [len(m) for share in real for m in share]
        forwards = [len(share) for share in real]
        assert max(forwards) == layout.accumulation_steps != steps
        assert max(sizes) == layout.micro_batch_size, "a limit that is not reached says too much memory"


def test_learning_rates_by_hand():
    """A rate of 1e-3 found with 768: four times the batch, SGD four times the rate, Adam twice."""
    plan = plan_batch(3072, **SEED_CASE, learning_rate=1e-3, base_batch_size=768)
    assert plan.learning_rate_factors == {"linear": 4.0, "sqrt": 2.0}
    assert "x 4 (linear, for SGD) = 0.004 or x 2 (sqrt, for Adam) = 0.002, found with 768" in str(plan)
    by_window = {a.layout.window_size: a for a in plan.alternatives}
    assert by_window[2400].learning_rate_factors == pytest.approx({"linear": 3.125, "sqrt": math.sqrt(3.125)}, rel=1e-12)


def test_tokens_as_the_limit():
    """8192 tokens hold 16 samples of 512, 15 of 513."""
    sizes = [
        plan_batch(64, tokens_per_micro_batch=8192, sequence_length=length).layout.micro_batch_size for length in (512, 513, 8192)
    ]
    assert sizes == [16, 15, 1]


def test_flags_give_the_layout():
    """The printed command, read by Accelerate's and by hf_ga's own parsers."""
    plan = plan_batch(3072, **SEED_CASE)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("launch: accelerate launch ")]
    words = shlex.split(line.removeprefix("launch: accelerate launch "))
    flags = launch_command_parser().parse_args(words)
    assert (flags.multi_gpu, flags.num_machines, flags.num_processes) == (True, 30, 240)
    assert flags.training_script == "scripts/finetune.py"
    assert parse_config(flags.training_script_args).layout(flags.num_processes) == plan.layout
    one = plan_batch(64, per_device_train_batch_size=8)
    assert "--multi_gpu" not in str(one) and "--machine_rank" not in str(one)
    assert "--machine_rank, --main_process_ip and --main_process_port" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be at least 1, got 0"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"devices_per_node": -1}, "devices_per_node must be at least 1, got -1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
        ({"per_device_train_batch_size": None}, "limit of a micro-batch is unclear: got"),
        ({"tokens_per_micro_batch": 99, "sequence_length": 9}, "limit of a micro-batch is unclear: got"),
        ({"sequence_length": 9}, "limit of a micro-batch is unclear: got"),
        ({"per_device_train_batch_size": None, "tokens_per_micro_batch": 99}, "limit of a micro-batch is unclear: got"),
        (
            {"per_device_train_batch_size": None, "tokens_per_micro_batch": 99, "sequence_length": 100},
            "limit of a micro-batch is unclear: got",
        ),
        ({"base_batch_size": 0}, "base_batch_size must be at least 1, got 0"),
        ({"learning_rate": 0.0}, r"learning_rate must be greater than 0 and finite, got 0\.0"),
        ({"learning_rate": math.nan}, "learning_rate must be greater than 0 and finite, got nan"),
    ],
)
def test_plan_batch_refuses(arguments, message):
    valid = {"global_batch_size": 64, "per_device_train_batch_size": 8}
    with pytest.raises(ConfigError, match=message):
        plan_batch(**valid | arguments)


def test_the_script(capsys):
    script = load_script()
    words = "--global_batch_size 3072 --nodes 30 --devices_per_node 8 --per_device_train_batch_size 10 --learning_rate 1e-4"
    assert script.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert printed == f"{hf_ga.plan_batch(3072, **SEED_CASE, learning_rate=1e-4)}\n"
    for fact in (
        "samples per process: 192 x 13 (in micro-batches: 7 + 6), 48 x 12 (in micro-batches: 2 x 6)\n",
        "exact: 192 x 13 + 48 x 12 = 3072;",
        "3072 / (240 x 10) = 1.28 steps; 1 step(s) give 2400, 2 step(s) give 4800\n",
        "\nbalance: 98.5 % of",
    ):
        assert fact in printed
    assert script.main([*words.split(), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["layout"] == {"num_processes": 240, "micro_batch_size": 10, "accumulation_steps": 2, "window_size": 3072}
    assert read["shares"][0] == {"num_processes": 192, "samples": 13, "micro_batch_sizes": {"7": 1, "6": 1}}
    assert {a["layout"]["window_size"] for a in read["alternatives"]} == {3072, 3120, 2880, 2400, 4800}


def test_the_script_refuses_in_one_line(capsys):
    assert load_script().main(["--global_batch_size", "64", "--nodes", "0", "--per_device_train_batch_size", "8"]) == 2
    out = capsys.readouterr()
    assert out.err == "error: nodes must be at least 1, got 0.\n" and not out.out
