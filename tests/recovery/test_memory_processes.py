"""Memory runs out on some processes of several, which are real: the same run on all, or one clear error in bounded time."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from launching import environment, launch
from memory_worker import CASES, MICRO_BATCH, SAMPLES, WINDOW, of_sample
from processes import SEED
from runs import filled_place, lines_of, small_config, train

import hf_ga

pytestmark = pytest.mark.slow("starts processes")
WORKER = Path(__file__).with_name("memory_worker.py")
LIMIT = 150  # seconds for a run that fails, start-up included; the processes would wait for half an hour
FAILS = 7  # forward of process 1: three windows, a checkpoint and an evaluation come first


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    done = launch(2, WORKER, str(folder), "windows", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def found(folder: Path, name: str) -> list[dict]:
    return [json.loads((folder / f"{name}.{index}.json").read_text()) for index in (0, 1)]


def undisturbed(name: str) -> tuple[list[float], list[Counter]]:
    """On one process, where nothing fails: losses and samples of each window."""
    build, make_samples, loss_fn = CASES[name]
    AcceleratorState._reset_state()
    accelerator, model, samples = Accelerator(cpu=True), build(), make_samples(SAMPLES)
    rule = hf_ga.prove_targets(model, samples, h.pad_right, loss_fn=loss_fn)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    options = {"per_device_batch_size": MICRO_BATCH, "global_batch_size": WINDOW, "seed": SEED}
    windows = hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, **options)
    losses, seen = [], []
    for window in (window for _ in range(2) for window in windows):
        result = hf_ga.train_step(accelerator, model, optimizer, window, targets=rule, loss_fn=loss_fn, max_grad_norm=0.5)
        losses.append(result.loss)
        seen.append(Counter(of_sample(samples[i]["input_ids"]) for i in window.sample_ids))
    return losses, seen


@pytest.mark.parametrize("name", CASES)
def test_run_with_failures_on_either_process(ddp, name):
    """That of one process where nothing failed; all processes try as often, and keep the same limit."""
    (first, second), (losses, samples) = found(ddp, name), undisturbed(name)
    assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-5)
    assert first["retries"] == second["retries"] and first["limit"] == second["limit"] <= 60
    assert first["retries"][0] >= 1 and sum(first["retries"]) <= first["failed"] + second["failed"] and second["failed"]
    if name == "router":  # its forwards are done twice
        return
    for window, (own, others) in enumerate(zip(first["seen"], second["seen"], strict=True)):
        together = Counter()
        for *tokens, times in (*own, *others):
            together[tuple(tokens)] += times
        assert together == samples[window]


def test_a_sample_that_does_not_fit_is_named_on_all_processes(ddp):
    """By the one that has it, with the limit found before; then both go on with the same window."""
    first, second = found(ddp, "long")
    assert second["said"].startswith("OutOfMemory: sample ")
    assert f"sample {second['sample']} with 30 tokens (30 with padding) does not fit into the memory of process 1" in second["said"]
    assert first["said"] == f"ProcessFailed: process 1 failed: {second['said']}"
    assert first["loss"] == second["loss"] > 0 and first["limit"] == second["limit"]


def launch_fsdp2(*arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """Returns the finished run and its seconds."""
    flags = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_cpu_ram_efficient_loading false"
    several = "--num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags.split(), *several.split()]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(WORKER), *arguments], env=environment(None), capture_output=True, text=True, timeout=300, check=False
    )
    return done, time.monotonic() - began


def test_fsdp_ends_in_bounded_time_and_goes_on_in_smaller_micro_batches(tmp_path):
    """Out of memory on process 1 after a checkpoint; resumed with 3 samples instead of 8, it ends as the run that never stopped."""
    with filled_place(tmp_path) as place:
        config = small_config(place, place / "out")
        (place / "first.json").write_text(json.dumps(config.to_dict()))
        done, seconds = launch_fsdp2(str(place / "first.json"), str(FAILS))
        assert done.returncode != 0 and seconds < LIMIT
        assert "Under FSDP it cannot be cut" in done.stderr and "does not fit into the memory of process 1" in done.stderr
        saved = place / "out" / "checkpoint-3"
        assert f"Then resume from {saved} with --resume_from_checkpoint auto." in done.stderr
        resumed = {"per_device_train_batch_size": 3, "resume_from_checkpoint": "auto"}
        (place / "second.json").write_text(json.dumps(config.to_dict() | resumed))
        done, _ = launch_fsdp2(str(place / "second.json"), "1000000")
        assert done.returncode == 0, done.stderr[-3000:]
        expected = train(place, place / "one process")
        summary = json.loads((place / "out" / "summary.json").read_text())
        assert summary["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert [line["step"] for line in lines_of(place / "out")] == list(range(1, 9))
