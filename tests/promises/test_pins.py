"""Moving code changes no bit: see `pins.py`. A commit that changes sums on purpose writes the pins anew, and says so."""

import json

import pins
import pytest

STORED = json.loads(pins.FILE.read_text())
same_machine = pytest.mark.skipif(STORED["fingerprint"] != pins.fingerprint(), reason="last bits of floats of another machine")


def test_orders_plans_and_masks():
    assert pins.integers() == STORED["integers"]


@same_machine
@pytest.mark.slow("eight heads in many layouts")
def test_gradients():
    found = pins.gradients()
    assert found == {name: value for name, value in STORED["floats"].items() if name.startswith("gradient")}


@same_machine
@pytest.mark.slow("starts processes")
def test_weights_of_whole_runs():
    assert pins.runs() == {name: value for name, value in STORED["floats"].items() if name.startswith("run")}
