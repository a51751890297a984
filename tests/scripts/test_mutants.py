"""The list of mutants stays in step with the code, and scripts/mutants.py tells a fault from
none.
"""

from collections import Counter
from dataclasses import replace

import mutants
import pytest

MUTANTS = mutants.all_mutants()
ROOMS = {
    "accelerator",
    "batch",
    "draws",
    "order",
    "loading",
    "loss",
    "engine",
    "rows",
    "speed",
    "parallel",
    "recovery",
    "training",
    "embedding",
    "finetuning/data",
    "finetuning/run",
    "check",
    "trainer",
}


def test_every_room_has_mutants():
    counts = Counter(mutant.room for mutant in MUTANTS)
    assert counts.keys() == ROOMS
    assert min(counts.values()) >= 5
    assert len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_mutants_apply_and_their_tests_exist():
    """Their tests are those of the room; training.py has none of its own."""
    for mutant in MUTANTS:
        named = f"{mutant.number}: {mutant.reason}"
        assert (mutants.ROOT / "hf_ga" / mutant.file).read_text().count(mutant.old) == 1, named
        assert mutant.new != mutant.old, named
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            assert mutant.room == "training" or file.startswith(f"{mutant.room}/"), named
            path = mutants.ROOT / "tests" / file
            assert path.is_file(), named
            assert not name or f"def {name}(" in path.read_text(), named


@pytest.mark.slow("imports the libraries twice")
def test_a_fault_is_killed_and_a_change_of_nothing_survives():
    fault = replace(
        next(mutant for mutant in MUTANTS if mutant.room == "order"),
        tests="order/test_order.py::test_order_is_the_permutation_of_the_oracle",
    )
    assert mutants.judge(fault) == (mutants.KILLED, fault.tests)
    of_nothing = replace(fault, new=f"({fault.old})", tests="test_house.py::test_no_import_circles")
    assert mutants.judge(of_nothing) == (mutants.SURVIVED, of_nothing.tests)


def test_what_gives_no_verdict():
    verdict, why = mutants.judge(replace(MUTANTS[0], old="no such text"))
    assert (verdict, why) == (
        mutants.DOES_NOT_APPLY,
        f"the text occurs 0 times in hf_ga/{MUTANTS[0].file}",
    )
