"""Promise 1 for all data: what a proof on a few rows cannot see is never accepted with a wrong
gradient, through any door.

Oracle: one full batch in float64. Right losses are never refused, and no error is a foreign one.
"""

import pytest
import traps
from trap_kinds import KINDS

RATE, SEED = 0.05, 0


def faults(name, door, data_sets):
    """A line for each outcome that breaks the promise."""
    kind = KINDS[name]
    found = []
    for rate, seed in data_sets:
        outcome = traps.run(kind, door, rate, seed)
        if traps.is_fault(kind, outcome):
            found.append(traps.describe(kind, door, rate, seed, outcome))
    return found


@pytest.mark.parametrize("door", traps.DOORS)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_silently_wrong(name, door):
    assert not faults(name, door, [(RATE, SEED)])


@pytest.mark.slow("40 data sets for each kind and door")
@pytest.mark.parametrize("door", traps.DOORS)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_silently_wrong_on_many_data_sets(name, door):
    data_sets = [(rate, seed) for rate in traps.RATES for seed in range(10)]
    assert not faults(name, door, data_sets)
