"""Workers of the data loader that die or raise: one clear error where the window is waited for, and no hang."""

import json
import os
import pickle
import signal
import time

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from runs import filled_place, small_config

import hf_ga
from hf_ga.exact import fetch
from hf_ga.run.cli import finetune_main

WINDOW, DEADLY = 8, 37  # sample 37 is in window 4
LIMIT = 5.0  # seconds; so often torch looks whether its workers live, where no signal tells it


@pytest.fixture(autouse=True)
def _own_accelerator_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class TwoArguments(Exception):
    """torch would make it from one text."""

    def __init__(self, row, column):
        super().__init__(row, column)
        self.row = row


class Unwritable(Exception):
    """One that cannot be pickled."""

    def __reduce__(self):
        raise pickle.PicklingError("not this one")


class Unreadable(Exception):
    """One that cannot be read again: pickle calls it with the one text that it keeps."""

    def __init__(self, row, column):
        super().__init__(f"row {row}, column {column}")


ERRORS = {
    "DataError": hf_ga.DataError("row 37 cannot be decoded:\nit is cut"),
    "KeyError": KeyError("labels"),
    "OSError": FileNotFoundError(2, "No such file", "37.png"),
    "of two arguments": TwoArguments(37, "text"),
}


class Rows:
    """Samples by index or as a stream; the deadly one does what `act` says, where a worker fetches it."""

    def __init__(self, act=None, count=64):
        self.samples, self.act, self.main = h.class_samples(count), act, os.getpid()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == DEADLY and self.act is not None:
            self.act()
        return self.samples[index]

    def read(self):
        return (self[i] for i in range(len(self)))


class StreamOf:
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return self.rows.read()


def raising(error):
    def act():
        raise error

    return act


def windows_of(kind, rows, num_workers):
    sizes = {"accelerator": Accelerator(cpu=True), "global_batch_size": WINDOW, "per_device_batch_size": 4}
    if kind == "stream":
        return hf_ga.StreamLoader(StreamOf(rows), h.pad_right, shuffle_buffer_size=0, num_workers=min(num_workers, 1), **sizes)
    return hf_ga.WindowLoader(rows, h.pad_right, shuffle=False, num_workers=num_workers, **sizes)


def read_until_error(loader):
    """The error, the index of the last window before it, seconds."""
    seen, began = [], time.monotonic()
    try:
        for window in loader:
            seen.append(window.index)
    except Exception as error:
        return error, seen, time.monotonic() - began
    raise AssertionError("no error")


DEATHS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (SIGKILL)", "ran out of memory"),
    "shared memory": (lambda: os.kill(os.getpid(), signal.SIGBUS), "was killed by signal 7 (SIGBUS)", "/dev/shm"),
    "ended": (lambda: os._exit(3), "ended by itself with code 3", "the code of the dataset"),
    "ended well": (lambda: os._exit(0), "ended by itself with code 0", "the code of the dataset"),
}


# torch's handler of ended workers may raise in a callback of the garbage collector, where Python can only print it; the broken
# connection tells the same a moment later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# torch notices a worker that ends well late, so it is waited for only once
@pytest.mark.parametrize("death, kind", [(d, k) for d in DEATHS for k in ("list", "stream") if (d, k) != ("ended well", "stream")])
def test_a_worker_that_dies_is_one_clear_error(death, kind):
    act, how, cause = DEATHS[death]
    loader = windows_of(kind, Rows(act), num_workers=2)
    error, seen, seconds = read_until_error(loader)
    assert type(error) is hf_ga.DataError and seconds < (2 * LIMIT if death == "ended well" else LIMIT)
    assert how in str(error) and cause in str(error)
    assert f"while window {len(seen)} of epoch 0 was waited for" in str(error) and seen == list(range(len(seen)))
    assert len(seen) <= 4
    assert "Use fewer workers (--dataloader_num_workers" in str(error)


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_a_worker_that_is_killed_during_a_step_is_told_when_its_window_is_due(kind):
    """Not in the middle of the step, where torch's own handler would raise."""
    loader, others, pids = windows_of(kind, Rows(), num_workers=2), children(), set()
    with pytest.raises(hf_ga.DataError, match=r"was killed by signal 9 \(SIGKILL\) while window 1 of epoch 0 was waited for"):
        for window in loader:
            assert window.index == 0
            pids = children() - others  # such as the resource tracker that an earlier test started
            os.kill(max(pids), signal.SIGKILL)
            time.sleep(0.3)  # in which the signal of an ended child arrives
    assert pids and not children() & pids


def children():
    """Processes that this one started."""
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return set(map(int, listed.read().split()))


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_in_a_worker_is_that_without_workers(name, kind):
    alone, seen_alone, _ = read_until_error(windows_of(kind, Rows(raising(ERRORS[name])), num_workers=0))
    error, seen, _ = read_until_error(windows_of(kind, Rows(raising(ERRORS[name])), num_workers=2))
    assert (type(error), str(error), error.args) == (type(alone), str(alone), alone.args)
    assert vars(error) == vars(alone) and seen == seen_alone
    if name == "DataError":
        assert error.__cause__ is None
    else:
        assert "in act" in str(error.__cause__)  # where it happened, in the worker


@pytest.mark.parametrize("error", [Unwritable("row 37"), Unreadable(37, "text")], ids=["unwritable", "unreadable"])
def test_an_exception_that_cannot_travel_is_told_as_torch_tells_it(error):
    told, *_ = read_until_error(windows_of("list", Rows(raising(error)), num_workers=2))
    assert f"Caught {type(error).__name__} in DataLoader worker process" in str(told) and str(error) in str(told)


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_a_loop_that_is_left_early_leaves_no_worker(kind):
    before = children()
    for window in windows_of(kind, Rows(), num_workers=2):
        assert window.index == 0 and children() - before
        break
    assert not children() - before


# From the command line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("workers")) as folder:
        yield folder


# torch's handler may also raise where torch opens temporary files, to see whether there are file descriptors left: one stays open.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "act, expected",
    [
        (DEATHS["killed"][0], "was killed by signal 9 (SIGKILL) while window "),
        (raising(ERRORS["DataError"]), "error: row 37 cannot be decoded: it is cut"),
    ],
    ids=["killed", "DataError"],
)
def test_the_command_line_prints_one_line(act, expected, place, tmp_path, capfd, monkeypatch):
    samples = fetch.Fetcher.samples

    def read(self, request, offsets):
        if request.index == 2 and torch.utils.data.get_worker_info() is not None:
            act()
        return samples(self, request, offsets)

    monkeypatch.setattr(fetch.Fetcher, "samples", read)
    settings = small_config(place, tmp_path / "out", dataloader_num_workers=2).to_dict()
    (tmp_path / "run.json").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    capfd.readouterr()
    assert finetune_main([str(tmp_path / "run.json")]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("error: ") and expected in last
