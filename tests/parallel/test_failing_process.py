"""One process fails: all of them say why, and nobody waits for it. Launched by `accelerate launch`."""

import json
import time
from pathlib import Path

import helpers as h
import numpy as np
import pytest
from failing_worker import SAMPLES, Bomb
from launching import launch
from processes import SEED
from safetensors.torch import load_file

import hf_ga
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.order import epoch_order

pytestmark = pytest.mark.slow("starts processes")
WORKER = Path(__file__).with_name("failing_worker.py")
LIMIT = 150  # seconds, start-up included; the processes would wait for half an hour
MESSAGES = {
    "forward": "a forward of process 1 went wrong in row ?",  # it holds a character that has no bytes
    "collate": "row 7 cannot be decoded",
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The folder of the run under DDP, and how it ended."""
    folder, began = tmp_path_factory.mktemp("failing"), time.monotonic()
    done = launch(2, WORKER, str(folder), "ddp", timeout=LIMIT * 2)
    return folder, done, time.monotonic() - began


@pytest.mark.parametrize("stage", MESSAGES)
def test_every_process_raises_in_the_same_window_and_can_go_on(ddp, stage):
    """The failing process its own error, the others its message; after that the same window is right."""
    folder, _, _ = ddp
    first, second = (json.loads((folder / f"survived {stage}.{i}.json").read_text()) for i in (0, 1))
    assert second["said"].encode(errors="replace").decode() == f"Fails: {MESSAGES[stage]}"
    assert first["said"] == f"ProcessFailed: process 1 failed: Fails: {MESSAGES[stage]}"
    bomb, samples = Bomb(), h.class_samples(SAMPLES)  # the same path of modules, so the same dropout
    rule = hf_ga.prove_targets(bomb, samples, h.pad_right)
    rule.dropout.set_keys(sample_keys(SEED, 0, np.arange(SAMPLES)), window_key(SEED, 0, 0))
    bomb.double()
    with rule.dropout.scope(bomb):
        loss = bomb(**h.pad_right([samples[i] for i in epoch_order(SAMPLES, SEED, 0, True)])).loss
        loss.backward()
    assert first["loss"] == second["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert h.relative_error(load_file(folder / f"survived {stage}.safetensors"), h.gradients(bomb)) < 1e-6


def test_a_failure_while_experts_are_counted_is_told_too(ddp):
    first, second = (json.loads((ddp[0] / f"survived router.{i}.json").read_text()) for i in (0, 1))
    assert (first["said"], second["said"]) == (f"ProcessFailed: process 1 failed: {second['said']}", "Fails: an expert is missing")
    assert first["loss"] == second["loss"]


def test_an_error_that_nobody_catches_ends_all_in_bounded_time_ddp(ddp):
    """In the data loader, where no meeting is near: the launcher ends the others."""
    _, done, seconds = ddp
    assert done.returncode != 0 and seconds < LIMIT
    assert "Fails: row 7 cannot be decoded" in done.stderr


def test_an_error_that_nobody_catches_ends_all_in_bounded_time_fsdp(tmp_path):
    """In a forward, in which the other processes wait for the shards of the failing one."""
    began = time.monotonic()
    done = launch(2, WORKER, str(tmp_path), "fsdp2", timeout=LIMIT * 2)
    assert done.returncode != 0 and time.monotonic() - began < LIMIT
    assert "Fails: a forward of process 1 went wrong" in done.stderr
