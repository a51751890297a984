"""Moving code changes no bit: see `pins.py`. A commit that changes sums on purpose writes the pins anew, and says so."""

import json

import pins
import pytest

STORED = json.loads(pins.FILE.read_text())
FLOATS = STORED["floats"].get(pins.fingerprint())
known_machine = pytest.mark.skipif(FLOATS is None, reason="no floats of this kind of machine are stored: see pins.py")


def stored(kind: str) -> dict[str, str]:
    return {name: value for name, value in FLOATS.items() if name.startswith(kind)}


def test_orders_plans_and_masks():
    assert pins.integers() == STORED["integers"]


@known_machine
@pytest.mark.slow("eight heads in many layouts")
def test_gradients():
    assert pins.gradients() == stored("gradient")


@known_machine
@pytest.mark.slow("starts processes")
def test_weights_of_whole_runs():
    assert pins.runs() == stored("run")
