"""One process fails: all of them say why, and nobody waits for it. Launched by `accelerate launch`."""

import json
import time
from pathlib import Path

import pytest
from launching import launch

pytestmark = pytest.mark.slow("starts processes")
WORKER = Path(__file__).with_name("failing_worker.py")
LIMIT = 150  # seconds, start-up included; the processes would wait for half an hour
MESSAGES = {"collate": "Fails: row 7 cannot be decoded", "router": "Fails: an expert is missing in row ?"}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The folder of the run under DDP, and how it ended."""
    folder, began = tmp_path_factory.mktemp("failing"), time.monotonic()
    done = launch(2, WORKER, str(folder), "ddp", timeout=LIMIT * 2)
    return folder, done, time.monotonic() - began


@pytest.mark.parametrize("where", MESSAGES)
def test_every_process_raises_in_the_same_window_and_can_go_on(ddp, where):
    """The failing process its own error, the others its message. (`test_two_ranks.py`: in a forward; then the window is right.)"""
    first, second = (json.loads((ddp[0] / f"{where}.{rank}.json").read_text()) for rank in (0, 1))
    assert first["said"] == f"ProcessFailed: process 1 failed: {MESSAGES[where]}"
    assert second["said"].encode(errors="replace").decode() == MESSAGES[where]
    assert first["loss"] == second["loss"] > 0


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
