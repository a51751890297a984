import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _state_of_its_own():
    """The precision of one trainer's Accelerate would be that of every test behind it."""
    yield
    AcceleratorState._reset_state(True)
