"""Workers of the data loader that die or raise: one clear error where the window is waited for, and
no hang.
"""

import multiprocessing
import os
import signal
import time

import helpers as h
import pytest
from accelerate import Accelerator

import hf_ga

WINDOW, DEADLY = 8, 37  # sample 37 is in window 4
LIMIT = 10.0  # seconds; torch looks every 5 whether its workers live, where no signal tells it


class TwoArguments(Exception):
    """torch would make it from one text."""

    def __init__(self, row, column):
        super().__init__(row, column)


ERRORS = {
    "DataError": hf_ga.DataError("row 37 cannot be decoded:\nit is cut"),
    "KeyError": KeyError("labels"),
    "OSError": FileNotFoundError(2, "No such file", "37.png"),
    "of two arguments": TwoArguments(37, "text"),
}


class Rows:
    """Samples by index or as a stream; where a worker fetches the deadly one, it calls `act`."""

    def __init__(self, act=None, count=64):
        self.samples = h.class_samples(count)
        self.act = act

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == DEADLY and self.act is not None:
            self.act()
        return self.samples[index]


def raising(error):
    def act():
        raise error

    return act


def windows_of(kind, rows, num_workers):
    sizes = {
        "accelerator": Accelerator(cpu=True),
        "global_batch_size": WINDOW,
        "per_device_batch_size": 4,
    }
    if kind == "stream":
        return hf_ga.StreamLoader(
            rows, h.pad_right, shuffle_buffer_size=0, num_workers=min(num_workers, 1), **sizes
        )
    return hf_ga.WindowLoader(rows, h.pad_right, shuffle=False, num_workers=num_workers, **sizes)


def read_until_error(loader):
    """The error, and the indices of the windows before it."""
    seen = []
    try:
        for window in loader:
            seen.append(window.index)
    except Exception as error:
        return error, seen
    raise AssertionError("no error")


DEATHS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "shared memory": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "ended": lambda: os._exit(3),
}


def read_in_a_dying_worker(connection, death, kind):
    """Sends what this process sees. It waits for the worker when that dies."""
    began = time.monotonic()
    error, seen = read_until_error(
        windows_of(kind, Rows(lambda: (time.sleep(0.5), DEATHS[death]())), num_workers=2)
    )
    connection.send((type(error), str(error), seen, time.monotonic() - began))


@pytest.mark.parametrize(
    ("death", "kind"), [*((death, "list") for death in DEATHS), ("killed", "stream")]
)
def test_a_worker_that_dies_is_one_clear_error(death, kind):
    """In a process of its own: torch's handler of ended children raises wherever the process is
    then.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=read_in_a_dying_worker, args=(there, death, kind))
    child.start()
    assert here.poll(60)
    error, text, seen, seconds = here.recv()
    child.join()
    assert error is hf_ga.DataError
    assert seconds < LIMIT
    assert text.startswith("DataLoader worker")
    assert "shared memory is full" in text
    assert "Use fewer workers (--dataloader_num_workers" in text
    assert "\n" not in text
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "list") for name in ERRORS), ("DataError", "stream")]
)
def test_an_exception_in_a_worker_is_as_torch_tells_it(name, kind):
    """With its type, where it takes one text, and its traceback as text. One of hf_ga has its
    message alone, as without workers.
    """
    alone, seen_alone = read_until_error(
        windows_of(kind, Rows(raising(ERRORS[name])), num_workers=0)
    )
    error, seen = read_until_error(windows_of(kind, Rows(raising(ERRORS[name])), num_workers=2))
    assert alone is ERRORS[name]
    assert seen == seen_alone
    assert type(error) is (RuntimeError if name == "of two arguments" else type(alone))
    if name == "DataError":
        assert str(error) == str(alone) == "row 37 cannot be decoded:\nit is cut"
    else:
        assert f"Caught {type(alone).__name__} in DataLoader worker process" in str(error)
        assert str(alone) in str(error)
        assert "in act" in str(error)  # where it happened, in the worker


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_a_loop_that_is_left_early_leaves_no_worker(kind):
    before = set(multiprocessing.active_children())
    for window in windows_of(kind, Rows(), num_workers=2):
        assert window.index == 0
        assert set(multiprocessing.active_children()) - before
        break
    assert not set(multiprocessing.active_children()) - before
