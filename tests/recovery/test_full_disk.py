"""A full disk, by a real limit of the system: one clear error, exit code 2, what was saved is kept, and the run can go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_limits import limit_at, limit_files
from runs import filled_place, lines_of, small_config, train
from transformers import PreTrainedTokenizerBase

from hf_ga.recovery import checkpoint
from hf_ga.recovery.checkpoint import list_checkpoints
from hf_ga.recovery.manifest import verify
from hf_ga.run import finetune, outputs, report, saving
from hf_ga.run.cli import finetune_main

WORKER = Path(__file__).with_name("full_disk_worker.py")
PROFILE = Path(__file__).parents[2] / "accelerate_configs" / "fsdp2.yaml"
LIMIT = 150  # seconds; it takes 20 to 40
LEFT = "partial-", "replaced-"
# What is limited from which call on, to how many bytes; the file that cannot be written; the checkpoint that is kept.
CASES = {
    "weights and optimizer": (checkpoint, "save_shards", 2, 1_000, "partial-checkpoint-6/shards", "checkpoint-3"),
    "state": (checkpoint, "_finish", 2, 100, "partial-checkpoint-6", "checkpoint-3"),
    "manifest": (checkpoint, "write_manifest", 2, 100, "partial-checkpoint-6", "checkpoint-3"),
    "latest": (checkpoint, "set_latest", 2, 10, "", "checkpoint-3"),
    "first checkpoint": (checkpoint, "save_shards", 1, 1_000, "partial-checkpoint-3/shards", None),
    "best model": (outputs, "_save", 2, 1_000, "best", "checkpoint-3"),
    "its tokenizer": (PreTrainedTokenizerBase, "save_pretrained", 2, 1_000, "best", "checkpoint-3"),
    "metrics": (report.MetricsFile, "write", 5, 700, "metrics.jsonl", "checkpoint-3"),
    "last model": (finetune, "save_last", 1, 1_000, "model.safetensors", "checkpoint-8"),
    "plot": (outputs, "plot_curves", 1, 1_000, "curves.png", "checkpoint-8"),
    "summary": (outputs, "write_json", 1, 100, "summary.json", "checkpoint-8"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("runs")) as folder:
        yield folder


@pytest.fixture(scope="module")
def undisturbed(place):
    return train(place, place / "undisturbed"), lines_of(place / "undisturbed")


@pytest.mark.parametrize("case", CASES)
def test_full_disk(case, place, undisturbed, tmp_path, capsys):
    """One line says which file, why and what to do; doing it gives the run that had room."""
    owner, name, call, size, file, kept = CASES[case]
    output = tmp_path / "out"
    (tmp_path / "run.json").write_text(json.dumps(small_config(place, output).to_dict()))
    with limit_at(owner, name, call, size):
        assert finetune_main([str(tmp_path / "run.json")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: cannot write {output / file}: ") and "File too large" in error
    assert f"files in {output} are kept: free disk space" in error and "--resume_from_checkpoint auto" in error
    assert [path.name for path in output.iterdir() if path.name.startswith(LEFT)] == []
    if kept:
        assert (output / "latest").read_text().startswith(f"{kept}\n")
        assert [verify(folder)["step"] for folder in list_checkpoints(output)][-1] >= int(kept[-1])
    assert all(json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    assert finetune_main([str(tmp_path / "run.json"), "--resume_from_checkpoint", "auto"]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert [line["loss"] for line in lines_of(output)] == [line["loss"] for line in undisturbed[1]]


def test_an_error_that_is_none_of_the_disk_goes_through(place, tmp_path, monkeypatch):
    """A bug must not read as a full disk."""

    def save(*args, **more):
        raise RuntimeError("a bug")

    monkeypatch.setattr(saving, "save_checkpoint", save)
    with pytest.raises(RuntimeError, match="a bug"):
        train(place, tmp_path / "out")


def test_the_limit_is_real(tmp_path):
    """The control: the system refuses, and does not when the limit is gone."""
    limit_files(10)
    try:
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(b"0" * 11)
    finally:
        limit_files(-1)
    (tmp_path / "file").write_bytes(b"0" * 11)


@pytest.mark.slow("starts processes")
def test_all_processes_stop_with_the_same_words(place, tmp_path):
    """Under FSDP, where process 1 cannot write its shards, where the main process cannot finish, and where a shard is damaged."""
    small = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "global_batch_size": 4, "per_device_train_batch_size": 2}
    (tmp_path / "run.json").write_text(json.dumps(small_config(place, tmp_path / "out", **small).to_dict()))
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(PROFILE)]
    command += ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no", str(WORKER)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(place / "cache")}
    done = subprocess.run(
        [*command, str(tmp_path / "run.json"), str(tmp_path)], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    partial = tmp_path / "out" / "partial-checkpoint-4"
    assert first["shards of process 1"].startswith(f"cannot write {partial / 'shards'}: ")
    assert first["manifest"].startswith(f"cannot write {partial}: ") and "File too large" in first["manifest"]
    for name in ("shards of process 1", "manifest"):
        assert "are kept: free disk space" in first[name]
    assert first["room"] == "trained 4 steps"
    assert "copy/shards/shard-00002-model-00001-of-00001.safetensors is damaged: SHA-256 mismatch" in first["damaged"]
