"""Whole runs with --streaming: the same samples and steps as the library's own loader, resumed."""

import json

import pytest
from runs import lines_of, train

STREAMED = {"streaming": True, "shuffle_buffer_size": 20}


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(place, folder, save_total_limit=9, **STREAMED), folder


def test_two_passes_of_windows(undisturbed):
    """60 rows: windows of 16, 16, 16 and 12; epochs are whole passes; `loss` is measured on all
    validation rows.
    """
    summary, folder = undisturbed
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["epoch"] for line in lines] == [0.0] * 4 + [1.0] * 4
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 8]
    assert summary["steps"] == 8
    assert "a stream, 60 rows of it read ahead" in summary["data"]
    passes = [sum(line["num_targets"] for line in lines[part]) for part in (slice(4), slice(4, 8))]
    assert passes[0] == passes[1]  # every sample once in each
    stream = json.loads((folder / "checkpoint-3" / "state.json").read_text())["windows"]
    assert (stream["seed"], stream["window_size"], stream["shuffle_buffer_size"]) == (7, 16, 20)


def test_resumed_run_is_the_undisturbed_run(place, undisturbed, tmp_path):
    summary, folder = undisturbed
    more = {
        **STREAMED,
        "dataloader_num_workers": 1,
        "resume_from_checkpoint": str(folder / "checkpoint-3"),
    }
    assert train(place, tmp_path / "out", **more)["weights_sha256"] == summary["weights_sha256"]
    found, expected = (
        [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(f)]
        for f in (tmp_path / "out", folder)
    )
    assert found == expected[3:]


def test_drop_last_window_of_a_stream(place, tmp_path):
    train(place, tmp_path / "out", **STREAMED, drop_last_window=True)
    assert [line["epoch"] for line in lines_of(tmp_path / "out")] == [0.0] * 3 + [1.0] * 3 + [
        2.0
    ] * 2
