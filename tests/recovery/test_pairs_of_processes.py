"""Two processes, which are real: not finite numbers, memory and disks that run out on one of them, shards of any optimizer.

All say and do the same, in bounded time. `pairs_worker.py` does the work.
"""

import json
import time
from pathlib import Path

import forked
import helpers as h
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from launching import launch
from memory_worker import MICRO_BATCH, SAMPLES, WINDOW
from nonfinite_worker import KINDS
from processes import SEED
from round_trip_worker import CASES as ROUND_TRIPS
from runs import lines_of, small_config, train

import hf_ga

pytestmark = pytest.mark.slow("starts processes")
HERE = Path(__file__).parent
LIMIT = 150  # seconds for a run that fails, start-up included; the processes would wait for half an hour
FAILS = 7  # forward of process 1: three windows, a checkpoint and an evaluation come first


@pytest.fixture(scope="module")
def pairs(place, tmp_path_factory):
    """Function of a scenario: what both processes wrote, in files of a name where there are several."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("nonfinite", "memory", "full disk"):
        (folder / name).mkdir()
    small = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "global_batch_size": 4, "per_device_train_batch_size": 2}
    config = small_config(place, folder / "full disk" / "out", **small)
    (folder / "full disk" / "run.json").write_text(json.dumps(config.to_dict()))
    forked.run_script(str(HERE / "pairs_worker.py"), folder, {"folder": str(folder)})

    def found(scenario: str, prefix: str = "") -> tuple[dict, dict]:
        assert json.loads((folder / "found.json").read_text())["codes"][scenario] == [0]
        return tuple(json.loads((folder / scenario / f"{prefix}{rank}.json").read_text()) for rank in (0, 1))

    found.folder = folder
    return found


# Not finite


@pytest.mark.parametrize("name", [f"{kind} {where}" for kind in KINDS for where in ("forward", "backward")])
def test_processes_say_the_same_and_skip_the_same(pairs, name):
    """Only process 1 has the bad samples."""
    first, second = (one[name] for one in pairs("nonfinite"))
    assert first["said"] == second["said"] and first["causes"] == second["causes"]
    assert max(first["seconds"], second["seconds"]) < 30
    blamed = first["bad"]
    if name.startswith("fsdp"):  # whole micro-batches; a gradient is the sum of those of all processes
        own = first["micro_batch"][1]
        blamed = own if "forward" in name else [*first["micro_batch"][0], *own]
    more = ", ..." if len(blamed) > 8 else ""
    assert f"samples {', '.join(map(str, blamed[:8]))}{more}" in first["said"] and "window 1 of epoch 0" in first["said"]
    layer = "bert.encoder.layer.1"
    assert (f"is {layer} (BertLayer)" if "forward" in name else f"the gradient of {layer}.output.LayerNorm.bias") in first["said"]
    for one in (first, second):
        assert one["is_finite"] and one["as_left_out"] and one["moved"]
        assert [cause is None for cause in one["causes"]] == [True, False, True]
    assert (first["sha256"] == second["sha256"]) == name.startswith("ddp")


# Out of memory


def test_run_with_failures_on_either_process(pairs):
    """That of one process where nothing failed; all processes try as often, and keep the same limit."""
    first, second = pairs("memory", "windows.")
    AcceleratorState._reset_state()
    accelerator, model, samples = Accelerator(cpu=True), h.mixtral(0.5), h.token_samples(SAMPLES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    options = {"per_device_batch_size": MICRO_BATCH, "global_batch_size": WINDOW, "seed": SEED}
    windows = hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, **options)
    results = [hf_ga.train_step(accelerator, model, optimizer, w, max_grad_norm=0.5) for _ in range(2) for w in windows]
    assert first["losses"] == second["losses"] == pytest.approx([result.loss for result in results], rel=1e-5)
    assert first["retries"] == second["retries"] and first["limit"] == second["limit"] <= 60
    assert first["retries"][0] >= 1 and sum(first["retries"]) <= first["failed"] + second["failed"] and second["failed"]


def test_a_sample_that_does_not_fit_is_named_on_all_processes(pairs):
    """By the one that has it, with the limit found before; then both go on with the same window."""
    first, second = pairs("memory", "long.")
    assert second["said"].startswith("OutOfMemory: sample ")
    assert f"sample {second['sample']} with 30 tokens (30 with padding) does not fit into the memory of process 1" in second["said"]
    assert first["said"] == f"ProcessFailed: process 1 failed: {second['said']}"
    assert first["loss"] == second["loss"] > 0 and first["limit"] == second["limit"]


def test_fsdp_ends_in_bounded_time_and_goes_on_in_smaller_micro_batches(place, tmp_path, monkeypatch):
    """Out of memory on process 1 after a checkpoint; resumed on one process with 3 samples instead of 8 it is the undisturbed
    run.
    """
    config, began = small_config(place, tmp_path / "out"), time.monotonic()
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    for name, value in {**forked.SHARDED, **forked.KINDS["fsdp2"]}.items():
        monkeypatch.setenv(name, value)
    done = launch(2, HERE / "memory_worker.py", str(tmp_path / "run.json"), str(FAILS))
    monkeypatch.undo()
    assert done.returncode != 0 and time.monotonic() - began < LIMIT
    assert "Under FSDP it cannot be cut" in done.stderr and "does not fit into the memory of process 1" in done.stderr
    saved = tmp_path / "out" / "checkpoint-3"
    assert f"Then resume from {saved} with --resume_from_checkpoint auto." in done.stderr
    resumed = train(place, tmp_path / "out", per_device_train_batch_size=3, resume_from_checkpoint="auto")
    assert resumed["eval_loss"] == pytest.approx(train(place, tmp_path / "one process")["eval_loss"], rel=1e-5)
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(1, 9))


# A full disk


def test_all_processes_stop_with_the_same_words(pairs):
    """Under FSDP, where process 1 cannot write its shards, where the main process cannot finish, and where a shard is damaged."""
    first, second = pairs("full disk")
    assert first == second
    partial = pairs.folder / "full disk" / "out" / "partial-checkpoint-4"
    assert first["shards of process 1"].startswith(f"cannot write {partial / 'shards'}: ")
    assert first["manifest"].startswith(f"cannot write {partial}: ") and "File too large" in first["manifest"]
    for name in ("shards of process 1", "manifest"):
        assert "are kept: free disk space" in first[name]
    assert first["room"] == "trained 4 steps"
    assert "copy/shards/shard-00002-model-00001-of-00001.safetensors is damaged: SHA-256 mismatch" in first["damaged"]


# Shards


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_a_plain_checkpoint_goes_into_shards_and_back(case, pairs):
    """Bit for bit: weights, moments, rates and decay. The control: before it was loaded, nearly all of it was different."""
    result = json.loads((pairs.folder / "found.json").read_text())["round trips"][case]
    assert result["codes"] == [0]
    assert result["after"] == [] and result["before"] >= 0.9 * result["values"]
