"""scripts/peers.py: the causes that the page gives for other libraries are found, and a library that
is not installed is named.
"""

from functools import cache, partial

import peers
import pytest

import hf_ga

LAYOUTS = ["even", "uneven", "one by one"]


@pytest.fixture(scope="module")
def reports():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "NUM_SAMPLES", 8)
        patched.setattr(peers, "MAX_LENGTH", 24)
        # TRL's arm asks for it in each layout.
        patched.setattr(
            peers.corpus, "load_stdlib_tokenizer", cache(peers.corpus.load_stdlib_tokenizer)
        )
        check = partial(hf_ga.check_equivalence, layouts=LAYOUTS)
        patched.setattr(hf_ga, "check_equivalence", check)
        return peers.check_all()


@pytest.fixture(scope="module")
def without_dropout(reports):
    return reports[0][1]


@pytest.fixture(scope="module")
def with_dropout(reports):
    return reports[1][1]


def causes(report, arm):
    return {cause.name for cause in report.causes(arm)}


def passed(report, arm):
    return [row.passed for row in report.arm(arm).rows]


@pytest.mark.slow("checks six libraries in three layouts")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_hf_ga_passes_in_all_layouts(reports, index):
    assert all(passed(reports[index][1], "hf_ga"))


@pytest.mark.slow("checks six libraries in three layouts")
def test_counting_the_targets_is_exact_without_dropout(without_dropout):
    assert all(passed(without_dropout, "Accelerate, targets counted by hand"))


@pytest.mark.slow("checks six libraries in three layouts")
def test_counting_the_targets_leaves_dropout(with_dropout):
    assert causes(with_dropout, "Accelerate, targets counted by hand") == {"dropout"}


@pytest.mark.slow("checks six libraries in three layouts")
@pytest.mark.parametrize(
    "arm", ["Accelerate, documented loop", "PyTorch, loss / accumulation steps"]
)
def test_means_of_means_are_named(without_dropout, arm):
    assert "normalisation" in causes(without_dropout, arm)


@pytest.mark.slow("checks six libraries in three layouts")
@pytest.mark.parametrize("arm", ["transformers.Trainer", "TRL SFTTrainer"])
def test_trainers_count_labels_unshifted(without_dropout, arm):
    assert causes(without_dropout, arm) == {"labels counted unshifted"}


@pytest.mark.slow("checks six libraries in three layouts")
def test_cached_losses_see_the_negatives_of_a_micro_batch_only(reports):
    arm = "sentence-transformers, cached loss"
    assert "cross-batch loss" in causes(reports[2][1], arm)
    assert min(row.error for row in reports[2][1].arm(arm).rows) > 0.1


@pytest.mark.slow("checks six libraries in three layouts")
def test_a_library_that_is_not_installed_is_named(reports, monkeypatch):
    monkeypatch.setitem(peers.LANGUAGE_MODEL_PEERS, "A library", ("not_installed_anywhere", None))
    assert "Not checked, as the package is not installed: " in peers.format_page(reports)
    assert "A library" in peers.format_page(reports)
