"""The experiment, short: layouts agree, every mistake shows. (The whole is
`scripts/run_ga_experiment.py`, 100 steps.)
"""

from functools import partial

import pytest
import run_ga_experiment as script
from run_ga_experiment import LAYOUTS, LIMITS, MISTAKES, WITHOUT_DROPOUT, differences
from runs import SENTENCE, ragged_rows, write_rows

from hf_ga.finetuning.data.formats.corpus import train_tokenizer

pytestmark = pytest.mark.slow("trains in every layout and with every mistake")


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """3 steps on texts of a few words: windows of 64, 64 and 22 samples; the last validation batch
    of 16 is short.
    """
    folder = tmp_path_factory.mktemp("experiment")
    files = {"dataset_name": write_rows(folder / "train.jsonl", ragged_rows(150, 1))}
    files["validation_file"] = write_rows(folder / "validation.jsonl", ragged_rows(50, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script, "FinetuneConfig", partial(script.FinetuneConfig, text_column="text", **files)
        )
        patch.setattr(script, "load_tokenizer", lambda config: train_tokenizer([SENTENCE] * 3, 300))
        return script.Experiment(steps=3, num_samples=150, max_length=24)


@pytest.fixture(scope="module")
def results(trial):
    arms = [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], *WITHOUT_DROPOUT, *MISTAKES]
    return [trial.run(arm) for arm in arms]


def test_with_same_bits_layouts_differ_in_nothing(trial, results, monkeypatch):
    monkeypatch.setattr(trial, "same_bits", 16)
    assert set(differences(*(trial.run(arm) for arm in LAYOUTS[:2])).values()) == {0.0}
    assert differences(*results[:2])["final weights"] > 0


def test_layouts_agree(results):
    assert script.broken_limits(results) == []


@pytest.mark.parametrize("index", range(len(MISTAKES)), ids=[arm.name for arm in MISTAKES])
def test_each_mistake_shows(results, index):
    """The control: with these arms the limits would be broken, by a factor of 10 at least in one of
    the three figures.
    """
    result = results[5 + index]
    assert result.arm is MISTAKES[index]
    off = differences(result, results[0])
    assert max(value / LIMITS[name] for name, value in off.items()) > 10


def test_a_mistake_breaks_the_limits(results, monkeypatch):
    monkeypatch.setattr(script.Arm, "is_mistake", False)
    assert script.broken_limits([results[0], results[6]])
    assert results[0].train_losses[-1] != results[3].train_losses[-1]  # dropout is on


def test_table_and_plot(results, tmp_path):
    table = script.make_table(results).splitlines()
    assert len(table) == 2 + 3 + len(WITHOUT_DROPOUT) + len(MISTAKES)
    assert len({line.count("|") for line in table}) == 1
    script.plot(results, tmp_path / "experiment.png")
    assert (tmp_path / "experiment.png").read_bytes().startswith(b"\x89PNG")
