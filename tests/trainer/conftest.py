from functools import partial

import pytest
from accelerate.state import AcceleratorState
from trainers import Case


@pytest.fixture(autouse=True)
def _state_of_its_own():
    """The precision of one trainer's Accelerate would be that of every test behind it."""
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def case(tmp_path):
    return partial(Case, tmp_path)
