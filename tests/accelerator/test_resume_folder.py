"""`accelerator.resume`: the last complete checkpoint of a folder, on any number of processes; one
error for a checkpoint of another run, a folder that a process does not see, and a full disk.
"""

import os
from functools import partial
from pathlib import Path

import accelerate
import pytest
import torch
from disk_limits import limit_at
from documented_loop import reset_states
from forked import on_ranks, without_errors
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hf_ga import Accelerator
from hf_ga.accelerator.state import SavedState
from hf_ga.errors import CheckpointError

EPOCHS = 3  # of windows of 16, 16 and 5 samples


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def train(folder, *, until=99, batch_size=4, samples=37, width=16, window=16):
    """Train, saving after every second step, until so many steps are done.

    Returns:
        Where it began, the losses, and the last weights.
    """
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, global_batch_size=window)
    data = TensorDataset(torch.randn(samples, 4), torch.randint(4, (samples,)))
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = accelerator.resume(folder)
    step = start.step
    losses = []
    for _ in range(start.epoch, EPOCHS):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            losses.append(float(accelerator.window_loss))
            step += 1
            if step % 2 == 0:
                accelerator.save_state(folder / f"step_{step}")
            if step == until:
                return start, losses, None
    return start, losses, accelerator.unwrap_model(model).state_dict()


def within_rounding(weights, others):
    return all(torch.allclose(weights[n], others[n], rtol=1e-5, atol=1e-6) for n in others)


@pytest.mark.parametrize("until", [3, 5, 6])
def test_it_goes_on_at_the_last_complete_checkpoint(tmp_path, until):
    """In the middle of an epoch and at its end; a checkpoint without its last file, or with a
    damaged one, does not count, and neither do other files.
    """
    _, losses, weights = train(tmp_path / "whole")
    reset_states()
    assert train(tmp_path / "out", until=until)[0].step == 0
    (tmp_path / "out" / "step_90").mkdir()
    (tmp_path / "out" / "step_90" / "model.safetensors").touch()
    (tmp_path / "out" / "notes.txt").touch()
    reset_states()
    start, others, resumed = train(tmp_path / "out", batch_size=8)
    done = until - until % 2
    assert start.folder == tmp_path / "out" / f"step_{done}"
    assert (start.step, start.epoch, start.step_in_epoch) == (done, done // 3, done % 3)
    assert others == pytest.approx(losses[done:], rel=1e-6)
    assert within_rounding(resumed, weights)


def test_the_control_begins_again(tmp_path):
    """Without the file that says that a checkpoint is complete, the run starts from the start."""
    train(tmp_path, until=2)
    (tmp_path / "step_2" / "hf_ga_state.json").unlink()
    reset_states()
    assert train(tmp_path, until=1)[0].step == 0
    reset_states()
    assert train(tmp_path / "missing", until=1)[0].folder is None


@pytest.mark.parametrize("pads", [True, False])
def test_what_was_found_about_padding_goes_on(tmp_path, pads):
    def begin(folder=None):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, shuffle=True)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data)
        if folder is not None:
            accelerator.load_state(folder)
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                break
        return accelerator, loader

    accelerator, loader = begin()
    assert not loader.windows.state.pad_to_window
    loader.windows.state.pad_to_window = pads
    accelerator.save_state(str(tmp_path / "saved"))
    reset_states()
    _, resumed = begin(str(tmp_path / "saved"))
    assert resumed.windows.state.pad_to_window == pads


def test_a_checkpoint_that_is_written_again_is_incomplete_meanwhile(tmp_path, monkeypatch):
    train(tmp_path, until=2)
    reset_states()

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(SavedState, "write", stop)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(tmp_path / "step_2")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="its files may be of two steps"):
        accelerator.load_state(tmp_path / "step_2")
    accelerator.save_state(tmp_path / "step_2")
    accelerator.load_state(tmp_path / "step_2")
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(SavedState, "write", stop)
        accelerator.save_state(tmp_path / "step_2")
    reset_states()
    assert train(tmp_path, until=1)[0].folder is None


@pytest.mark.slow("trains on up to three processes")
def test_another_number_of_processes(tmp_path, capsys):
    """2 -> 1 -> 3 processes."""
    _, losses, weights = train(tmp_path / "whole")
    folder = tmp_path / "out"
    without_errors(on_ranks(partial(train, folder, until=5), 2))
    reset_states()
    capsys.readouterr()
    start, others, _ = train(folder, until=7)
    assert "2 -> 1 processes: same updates, resumed at step 4" in capsys.readouterr().out
    assert start.step == 4
    assert others == pytest.approx(losses[4:7], rel=1e-6)
    for start, others, resumed in without_errors(on_ranks(partial(train, folder), 3)):
        assert (start.step, start.epoch) == (6, 2)
        assert others == pytest.approx(losses[6:], rel=1e-6)
        assert within_rounding(resumed, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 38}, "is of another run: num_samples 37 -> 38"),
        ({"window": 8}, "is of another run: window_size 16 -> 8"),
        ({"width": 17}, "does not fit this run"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    train(tmp_path, until=2)
    reset_states()
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path, **change)


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    """The second process looks into a folder of its own, as on a machine without the share."""
    train(tmp_path / "a", until=2)
    work = partial(train, tmp_path / "a")

    def on_own_disk():
        is_dir = Path.is_dir
        rank = os.environ["RANK"]
        Path.is_dir = lambda path: rank == "0" and is_dir(path)
        return work()

    for error in on_ranks(on_own_disk, 2):
        assert "process 1 does not see" in str(error)
        assert "use a folder that all machines share" in str(error)


def test_a_full_disk(tmp_path):
    """The checkpoint before is kept, and the half-written one does not count."""
    message = r"cannot write .*step_4: .*then resume the run"
    with (
        limit_at(accelerate.Accelerator, "save_state", 2, 1_000),
        pytest.raises(CheckpointError, match=message),
    ):
        train(tmp_path)
    reset_states()
    assert train(tmp_path, until=3)[0].step == 2
