"""Promise 1 for all data: what a trial on a few rows cannot see is never accepted with a wrong
gradient, through any door.

Oracle: one full batch in float64. Right losses are never refused, and no error is a foreign one.
"""

import pytest
import traps
from trap_kinds import FIRST_ODD_WINDOW, KINDS

from hf_ga.rows.packing import Packing

RATE = max(traps.RATES)
LOWEST = min(traps.RATES)  # of which one window has hardly an odd row
SEED = 0
ADVERSARY = f"weights from window {FIRST_ODD_WINDOW}"
TOKEN_ADVERSARY = f"token weights from window {FIRST_ODD_WINDOW}"
LATE = [
    (ADVERSARY, "Accelerator"),
    (TOKEN_ADVERSARY, "own loop"),
    (TOKEN_ADVERSARY, "ExactTrainer"),
]
OF_ONE_WINDOW = [name for name, kind in KINDS.items() if kind.num_windows == 1]
# Through both loops over windows in turn: the other doors begin and end them in the same way.
OF_MANY_WINDOWS = [
    (name, ("own loop", "Accelerator")[number % 2]) for number, name in enumerate(OF_ONE_WINDOW)
]
SLOW = pytest.mark.slow("a data set for each kind")


def tried_cases():
    """Each kind through the own loop and through one of its other doors, which take turns; what
    must be accepted as a loop's loss, through that door.
    """
    for number, name in enumerate(OF_ONE_WINDOW):
        yield name, "own loop"
        doors = [door for door in traps.doors_of(KINDS[name]) if door != "own loop"]
        if name in traps.MEANS_OF_TORCH:
            doors = ["loop's loss"]
        yield pytest.param(name, doors[number % len(doors)], marks=SLOW)
    yield pytest.param(ADVERSARY, "loop's loss", marks=SLOW)


def faults(name, door, data_sets, num_windows=None):
    """A line for each outcome that breaks the promise."""
    kind = KINDS[name]
    found = []
    for rate, seed in data_sets:
        outcome = traps.run(kind, door, rate, seed, num_windows)
        if traps.is_fault(kind, door, outcome):
            found.append(traps.describe(kind, door, rate, seed, outcome))
    return "\n".join(found)


@pytest.mark.parametrize(("name", "door"), [*tried_cases()])
def test_nothing_is_silently_wrong(name, door):
    """`python tests/support/traps.py` tries ten data sets at each of four rates."""
    assert faults(name, door, [(RATE, SEED)]) == ""


@pytest.mark.parametrize(("name", "door"), LATE)
def test_late_weights_are_read(name, door):
    """What the loss divides by is read in each micro-batch, so late weights are exact."""
    outcome = traps.run(KINDS[name], door, RATE, SEED)
    assert outcome.accepted
    assert outcome.num_updates == KINDS[name].num_windows
    assert not outcome.is_wrong


@pytest.mark.parametrize("name", ["control: causal LM", "class weights", "rare long rows: GPT-2"])
def test_plain_accelerate_is_wrong(name):
    outcome = traps.run_door(KINDS[name], traps.PLAIN_ACCELERATE, RATE, SEED, num_windows=1)
    assert outcome.accepted
    assert outcome.error > 1e-3


def test_packing_without_its_guard_is_wrong(monkeypatch):
    monkeypatch.setattr(Packing, "fits", lambda self, call: True)
    outcome = traps.run(
        KINDS["left padding: BERT classifier"], "own loop", 0.1, SEED, num_windows=4
    )
    assert outcome.accepted
    assert outcome.error > 1e-2


@pytest.mark.slow("a data set of five windows for each kind")
@pytest.mark.parametrize(("name", "door"), OF_MANY_WINDOWS)
def test_rows_that_the_trial_never_had_are_not_silently_wrong(name, door, monkeypatch):
    """In half as many micro-batches as in the test of one window."""
    monkeypatch.setattr(traps, "MICRO_BATCH", 16)
    assert faults(name, door, [(LOWEST, SEED)], num_windows=5) == ""
