"""`plan_batch`: the arithmetic by hand, against the real plan of a window, and naive arithmetic
that misses the batch.
"""

import math
import shlex

import numpy as np
import plan_batch as script
import pytest
from accelerate.commands.launch import launch_command_parser
from hypothesis import given
from hypothesis import strategies as st

import hf_ga
from hf_ga import ConfigError, plan_batch
from hf_ga.finetuning.run.flags.cli import parse_config
from hf_ga.order.length_plan import CPU_OVERHEAD, ByLength

CASE = {"nodes": 30, "devices_per_node": 8, "per_device_train_batch_size": 10}
windows = st.integers(1, 400)
nodes = st.integers(1, 6)
devices = st.integers(1, 8)
limits = st.integers(1, 40)


def naive_windows(window, processes, limit):
    """What whole numbers of accumulation steps with full micro-batches make of a wanted window."""
    ratio = window / (processes * limit)
    return [processes * limit * max(1, steps) for steps in (math.floor(ratio), math.ceil(ratio))]


def test_3072_on_240_devices_by_hand():
    """3072 = 240 x 12 + 192: 192 processes have 13 = 7 + 6 samples, 48 have 12 = 6 + 6; 1.28 steps
    of 2400 are not needed.
    """
    plan = plan_batch(3072, **CASE)
    assert plan.shares == {(7, 6): 192, (6, 6): 48}
    assert (plan.layout.num_processes, plan.layout.accumulation_steps, plan.layout.window_size) == (
        240,
        2,
        3072,
    )
    assert naive_windows(3072, 240, 10) == [2400, 4800], (
        "control: rounding misses the wanted batch, by 22 % or 56 %"
    )
    planner = ByLength(10, 10 * 512, CPU_OVERHEAD, lockstep=False)
    real = planner(np.full(3072, 512), 240)  # as the loader plans samples of one length
    sizes = [tuple(sorted(map(len, share), reverse=True)) for share in real]
    assert {size: sizes.count(size) for size in set(sizes)} == plan.shares


@given(windows, nodes, devices, limits)
def test_plan_batch_properties(window, num_nodes, num_devices, limit):
    """Catches lost samples, broken limits, unbalanced processes and too many forwards."""
    plan = plan_batch(
        window, nodes=num_nodes, devices_per_node=num_devices, per_device_train_batch_size=limit
    )
    processes = num_nodes * num_devices
    assert sum(plan.shares.values()) == processes
    assert sum(sum(sizes) * count for sizes, count in plan.shares.items()) == window
    for sizes in plan.shares:
        assert len(sizes) == math.ceil(sum(sizes) / limit) <= plan.layout.accumulation_steps
        assert not sizes or (
            min(sizes) >= 1 and max(sizes) <= limit and max(sizes) - min(sizes) <= 1
        )
    assert max(map(sum, plan.shares)) - min(map(sum, plan.shares)) <= 1
    assert max(map(len, plan.shares)) == plan.layout.accumulation_steps
    exact = window % (processes * limit) == 0
    assert (window in naive_windows(window, processes, limit)) == exact, (
        "control: rounded steps only hit multiples"
    )


def test_the_command_gives_the_layout():
    """The printed command, read by Accelerate's and by hf_ga's own parsers."""
    plan = plan_batch(3072, **CASE)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("command")]
    flags = launch_command_parser().parse_args(shlex.split(line)[3:])
    assert (flags.multi_gpu, flags.num_machines, flags.num_processes) == (True, 30, 240)
    assert flags.training_script == "scripts/finetune.py"
    assert parse_config(flags.training_script_args).layout(flags.num_processes) == plan.layout
    one = plan_batch(64, per_device_train_batch_size=8)
    assert "--multi_gpu" not in str(one)


@pytest.mark.parametrize(
    "name", ["global_batch_size", "nodes", "devices_per_node", "per_device_train_batch_size"]
)
def test_plan_batch_refuses(name):
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        plan_batch(**{"global_batch_size": 64, "per_device_train_batch_size": 8, name: 0})


def test_the_script(capsys):
    words = (
        "--global_batch_size 3072 --nodes 30 --devices_per_node 8 --per_device_train_batch_size 10"
    )
    assert script.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert printed == f"{hf_ga.plan_batch(3072, **CASE)}\n"
    for fact in (
        "192 process(es) x 13, in micro-batches: 1 x 7 + 1 x 6\n",
        "(full micro-batches: 1.28)\n",
        "98.5% of",
    ):
        assert fact in printed
    assert script.main([*words.split(), "--nodes", "0"]) == 2
    out = capsys.readouterr()
    assert out.err == "error: the number of processes must be at least 1, got 0.\n"
    assert not out.out
