"""What each process that runs tests has: one thread, warnings of transformers off, and a state of
Accelerate and of random numbers for each test. `conftest.py` loads it.
"""

import gc
import os
from collections.abc import Iterator
from functools import lru_cache

import hypothesis
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import imports

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
if not torch.cuda.is_available():
    # `torch.manual_seed` would keep a stack trace for each of these devices, which takes 0.5 ms.
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.manual_seed_all = lambda seed: None
# Each optimizer step looks on the disk for packages that are not installed, which takes 0.1 ms.
imports._is_package_available = lru_cache(None)(imports._is_package_available)
# Tests leave little garbage: seldom looking for it takes a fiftieth less of their time.
gc.set_threshold(10_000)
# The same examples in every run, however slow the machine is.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collections: what imports make stays, and is looked at again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Leave what was imported out of garbage collections, of which Trainer does one before each
    training: looking at all the libraries takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers, and sums on one thread, whichever ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_process_state() -> Iterator[None]:
    """What Accelerate keeps for the process, and what it and `TrainingArguments` set in the
    environment, is that of one test: the precision would be that of later tests.
    """
    PartialState()  # of this process, before a test pretends to be one of several
    states = [
        os.environ,
        AcceleratorState._shared_state,
        GradientState._shared_state,
        PartialState._shared_state,
    ]
    before = [dict(state) for state in states]
    yield
    for state, values in zip(states, before, strict=True):
        for name in state.keys() - values.keys():
            del state[name]
        state.update(values)


@pytest.fixture
def own_accelerator_state():
    """The precision of one test's Accelerator would be that of the next one."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def launched(own_accelerator_state, monkeypatch):
    """Function of a precision: as `accelerate launch --mixed_precision` hands it on, without its
    change of the threads.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)

    def launch(precision):
        AcceleratorState._reset_state(True)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    return launch
