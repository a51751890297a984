"""Whole runs with --streaming: the same samples and steps as the library's own loader, resumed."""

import numpy as np
import pytest
from runs import lines_of, train

STREAMED = {"streaming": True, "shuffle_buffer_size": 20}


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(place, folder, save_total_limit=9, **STREAMED), folder


def test_two_passes_of_windows(undisturbed):
    """60 rows: windows of 16, 16, 16 and 12; epochs are whole passes; `loss` is measured on all validation rows."""
    summary, folder = undisturbed
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["epoch"] for line in lines] == [0.0] * 4 + [1.0] * 4
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 8]
    assert summary["steps"] == 8 and "a stream, 60 rows of it read ahead" in summary["data"]
    passes = [sum(line["num_targets"] for line in lines[part]) for part in (slice(4), slice(4, 8))]
    assert passes[0] == passes[1]  # every sample once in each


@pytest.mark.slow("whole runs; quick tests cover its parts")
def test_the_stream_in_its_own_order_is_the_run_on_its_rows_in_order(place, undisturbed, tmp_path, monkeypatch):
    """Against the loader of rows with random access, without shuffling. The control: with a shuffle buffer the losses differ."""
    found = train(place, tmp_path / "stream", streaming=True, shuffle_buffer_size=0)["weights_sha256"]
    monkeypatch.setattr("hf_ga.exact.window_loader.epoch_order", lambda num_samples, *_: np.arange(num_samples))
    assert found == train(place, tmp_path / "rows")["weights_sha256"] != undisturbed[0]["weights_sha256"]


def test_resumed_run_is_the_undisturbed_run(place, undisturbed, tmp_path):
    summary, folder = undisturbed
    more = {**STREAMED, "dataloader_num_workers": 1, "resume_from_checkpoint": str(folder / "checkpoint-3")}
    assert train(place, tmp_path / "out", **more)["weights_sha256"] == summary["weights_sha256"]
    found, expected = (
        [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(f)] for f in (tmp_path / "out", folder)
    )
    assert found == expected[3:]


def test_drop_last_window_of_a_stream(place, tmp_path):
    train(place, tmp_path / "out", **STREAMED, drop_last_window=True)
    assert [line["epoch"] for line in lines_of(tmp_path / "out")] == [0.0] * 3 + [1.0] * 3 + [2.0] * 2
