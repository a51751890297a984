"""Moving code changes no bit: see `pins.py`. A commit that changes sums on purpose writes the pins
anew, and says so.
"""

import json

import pins
import pytest

STORED = json.loads(pins.FILE.read_text())
FLOATS = STORED["floats"].get(pins.fingerprint())


def test_orders_plans_and_masks():
    assert pins.integers() == STORED["integers"]


@pytest.mark.skipif(
    FLOATS is None, reason="no floats of this kind of machine are stored: see pins.py"
)
@pytest.mark.slow("eight heads in many layouts, and runs on one and two processes")
def test_gradients_and_weights_of_whole_runs():
    assert pins.gradients() | pins.runs() == FLOATS
