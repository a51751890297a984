"""Whole runs with --streaming: the same samples and steps as the library's own loader, resumed, on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from runs import lines_of, relative_distance, small_config, train

import hf_ga
from hf_ga.data import streamed
from hf_ga.run.cli import finetune_main

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with runs.filled_place(tmp_path_factory.mktemp("streamed")) as folder:
        yield folder


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


def test_the_stream_in_its_own_order_is_the_run_on_its_rows_in_order(place, tmp_path, monkeypatch):
    """Against the loader of rows with random access, without shuffling. The control: with a shuffle buffer the losses differ."""
    found = train(place, tmp_path / "stream", streaming=True, shuffle_buffer_size=0)["weights_sha256"]
    shuffled = train(place, tmp_path / "shuffled", **STREAMED)["weights_sha256"]
    monkeypatch.setattr("hf_ga.exact.window_loader.epoch_order", lambda num_samples, *_: np.arange(num_samples))
    in_order = train(place, tmp_path / "rows")["weights_sha256"]
    assert found == in_order != shuffled


def test_rows_read_ahead_do_not_matter(place, undisturbed, tmp_path, monkeypatch):
    """How many rows are looked at first changes the samples of the proof, nothing that is trained."""
    monkeypatch.setattr(streamed, "NUM_READ_AHEAD", 40)
    assert train(place, tmp_path / "out", **STREAMED)["weights_sha256"] == undisturbed[0]["weights_sha256"]


@pytest.mark.parametrize(("step", "more"), [(3, {}), (6, {"dataloader_num_workers": 1})])
def test_resumed_run_is_the_undisturbed_run(step, more, place, undisturbed, tmp_path):
    summary, folder = undisturbed
    checkpoint = str(folder / f"checkpoint-{step}")
    resumed = train(place, tmp_path / "out", resume_from_checkpoint=checkpoint, **STREAMED, **more)
    assert resumed["weights_sha256"] == summary["weights_sha256"]
    without_time = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(folder)]
    assert [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(tmp_path / "out")] == without_time[
        step:
    ]


def test_another_buffer_is_another_run(place, undisturbed, tmp_path):
    with pytest.raises(hf_ga.CheckpointError, match="shuffle_buffer_size 20 -> 21"):
        checkpoint = str(undisturbed[1] / "checkpoint-3")
        train(place, tmp_path / "out", resume_from_checkpoint=checkpoint, streaming=True, shuffle_buffer_size=21)


def test_classes_by_another_layout(place, tmp_path):
    more = {**STREAMED, "task": "text-classification", "model_name_or_path": str(place / "bert"), "label_column": "label"}
    layouts = {"by 8": {}, "by 3, all prefetched": {"per_device_train_batch_size": 3, "dataloader_num_workers": 1}}
    summaries = [train(place, tmp_path / name, **more, **layout) for name, layout in layouts.items()]
    assert summaries[0]["labels"] == ["blue", "green", "red"]
    assert relative_distance(tmp_path / "by 3, all prefetched", tmp_path / "by 8") < 1e-5
    assert "accuracy" in str(summaries[0].keys())


def test_max_steps_is_asked_for_before_any_work(place, tmp_path, capsys):
    arguments = ["--dataset_name", str(place / "train.jsonl"), "--streaming", "--output_dir", str(tmp_path / "out")]
    assert finetune_main(arguments) == 2
    assert "streaming needs max_steps" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_drop_last_window_of_a_stream(place, tmp_path):
    train(place, tmp_path / "out", **STREAMED, drop_last_window=True)
    assert [line["epoch"] for line in lines_of(tmp_path / "out")] == [0.0] * 3 + [1.0] * 3 + [2.0] * 2


@pytest.mark.slow("starts processes")
def test_two_processes_are_one(place, undisturbed, tmp_path):
    config = small_config(place, tmp_path / "out", **STREAMED).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    command = [*launch, "--main_process_port=0", str(SCRIPT), str(tmp_path / "config.json")]
    subprocess.run(command, env=environment, timeout=180, check=True, capture_output=True)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["layout"].startswith("window of 16 samples = 2 processes")
    alone, together = ([line["loss"] for line in lines_of(folder)] for folder in (undisturbed[1], tmp_path / "out"))
    assert together == pytest.approx(alone, abs=1e-5)
    assert relative_distance(tmp_path / "out", undisturbed[1]) < 1e-5
