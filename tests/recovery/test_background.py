"""Checkpoints that a thread writes while the run goes on."""

import threading
import time
from itertools import pairwise
from pathlib import Path

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from disk_limits import limit_at
from forked import on_ranks, without_errors
from processes import make_accelerator
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from hf_ga.errors import CheckpointError
from hf_ga.parallel import shards
from hf_ga.recovery import saving
from hf_ga.recovery.checkpoint import list_checkpoints, load_checkpoint
from hf_ga.recovery.manifest import verify
from hf_ga.recovery.saving import CheckpointSaver


def model_and_optimizer(has_stepped=True):
    model = h.bert_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not has_stepped:
        return model, optimizer
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def held_up(monkeypatch):
    """Let threads write once the event is set."""
    event = threading.Event()
    write = saving.write_shards

    def later(*args):
        assert threading.current_thread() is not threading.main_thread()
        event.wait()
        write(*args)

    monkeypatch.setattr(saving, "write_shards", later)
    return event


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_checkpoint_is_that_of_the_step_at_which_it_was_saved(tmp_path, monkeypatch):
    """The run changes weights, moments and state while it is written. Control: they do change."""
    model, optimizer = model_and_optimizer()
    saver = CheckpointSaver(Accelerator(), tmp_path, keep=2)
    may_write = held_up(monkeypatch)
    state = {"seen": [1]}
    expected = weights_of(model)
    moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
    folder = saver.save(model, optimizer, state, step=1)
    optimizer.step()
    state["seen"].append(2)
    assert not folder.exists()
    changed = weights_of(model)
    assert any(not torch.equal(changed[name], expected[name]) for name in expected)
    may_write.set()
    saver.wait()
    verify(folder)
    assert load_checkpoint(folder, model, optimizer)["seen"] == [1]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    loaded = [value["exp_avg"] for value in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(loaded, moments, strict=True))


def test_the_next_checkpoint_waits_and_uses_the_copies_again(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    saver = CheckpointSaver(Accelerator(), tmp_path, keep=2)
    places = set()
    stage = saver._stager.stage

    def noting_places(tensors):
        copies = stage(tensors)
        places.add(tuple(value.data_ptr() for value in copies.values()))
        return copies

    monkeypatch.setattr(saver._stager, "stage", noting_places)
    for step in (1, 2, 3):
        saver.save(model, optimizer, {}, step=step)
        writing = [t for t in threading.enumerate() if t.name.startswith("checkpoint-")]
        assert len(writing) <= 1
    assert len(places) == 1
    saver.wait()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-3",
    ]


def longest_pause(folder: Path, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds for which the main thread could not run while another one wrote."""
    thread = threading.Thread(target=shards.write_shards, args=(tensors, folder))
    moments = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        moments.append(time.perf_counter())
    return max(after - before for before, after in pairwise(moments))


@pytest.mark.slow("waits while a model is saved")
def test_the_run_goes_on_while_the_bytes_are_written(tmp_path, monkeypatch):
    """Control: torch's own writer holds Python's lock while it builds the bytes of a file. The
    least of several tries: other processes of the machine make pauses, too.
    """
    tensors = {"model.weight": torch.zeros(40_000_000)}
    ours = min(longest_pause(tmp_path / f"ours-{number}", tensors) for number in range(3))
    monkeypatch.setattr(shards, "_ShardsWriter", HuggingFaceStorageWriter)
    theirs = min(longest_pause(tmp_path / f"theirs-{number}", tensors) for number in range(3))
    assert ours < theirs / 2


def test_an_error_is_raised_at_the_next_checkpoint_or_at_the_end(tmp_path):
    model, optimizer = model_and_optimizer()
    saver = CheckpointSaver(Accelerator(), tmp_path, keep=2)
    saver.save(model, optimizer, {}, step=1)
    saver.wait()
    for after in (saver.wait, lambda: saver.save(model, optimizer, {}, step=3)):
        with limit_at(saving, "write_shards", call=1, size=1_000):
            saver.save(model, optimizer, {}, step=2)
            saver._thread.join()
        with pytest.raises(CheckpointError, match=r"cannot write .*partial-checkpoint-2"):
            after()
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
        assert not list(tmp_path.glob("partial-*"))
        saver.wait()  # it was raised once


def test_an_error_of_the_run_leaves_the_checkpoint_complete(tmp_path):
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointSaver(Accelerator(), tmp_path, keep=1) as saver,
    ):
        folder = saver.save(model, optimizer, {}, step=1)
        raise ZeroDivisionError
    verify(folder)


def test_without_memory_for_copies_the_run_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MEMORY_SHARE", 0.0)
    model, optimizer = model_and_optimizer()
    saver = CheckpointSaver(Accelerator(), tmp_path, keep=1)
    folder = saver.save(model, optimizer, {}, step=1)
    assert not saver._num_copied
    verify(folder)


def save_on_ranks(folder: Path, kind: str):
    accelerator = make_accelerator(kind)
    model, optimizer = accelerator.prepare(*model_and_optimizer(has_stepped=kind == "ddp"))
    is_main = accelerator.is_main_process
    said = ""
    with CheckpointSaver(accelerator, folder, keep=1) as saver:
        saver.save(model, optimizer, {"number": 7}, step=1)
        saver.wait()
        with limit_at(saving, "write_shards", call=1, size=100 if not is_main else -1):
            try:
                saver.save(model, optimizer, {}, step=2)
                saver.wait()
            except CheckpointError as error:
                said = str(error)
    return said, bool(saver._num_copied)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks(tmp_path, kind):
    """Each writes its part; where one cannot, all say so. Shards are written before the run goes on."""
    found = without_errors(on_ranks(lambda: save_on_ranks(tmp_path, kind), 2, kind))
    for said, has_copies in found:
        assert "cannot write" in said
        assert has_copies == (kind == "ddp")
    (folder,) = list_checkpoints(tmp_path)
    verify(folder)
    assert len(list((folder / "shards").iterdir())) >= 2
    model, optimizer = model_and_optimizer(has_stepped=kind == "ddp")
    expected = weights_of(model)
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    assert load_checkpoint(folder, model, optimizer)["number"] == 7
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
