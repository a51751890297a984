"""Resuming from another folder, from an earlier checkpoint, from less than all that was there."""

import shutil
import signal

import pytest
from runs import lines_of, saved_weights, train
from stops import interrupted

import hf_ga
from hf_ga.run import loop


def steps(out):
    return [line["step"] for line in lines_of(out)]


def test_a_folder_with_checkpoints_of_its_own_is_no_place_for_another(place, undisturbed, tmp_path):
    path, out = str(undisturbed[1] / "checkpoint-3"), tmp_path / "out"
    interrupted(place, out, 1, resume_from_checkpoint=path)
    interrupted(place, out, 3, resume_from_checkpoint=path)  # nothing was saved yet
    with pytest.raises(hf_ga.ConfigError, match="contains checkpoints"):
        train(place, out, resume_from_checkpoint=path)
    train(place, out, resume_from_checkpoint="auto")
    assert steps(out) == list(range(4, 9))


def test_best_is_not_of_a_future_that_was_given_up(place, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed[1], tmp_path / "out")
    before = saved_weights(out / "best")
    summary = train(place, out, resume_from_checkpoint=str(out / "checkpoint-3"), learning_rate=30.0, resume_with_changes=True)
    measured = {line["step"]: line["eval_loss"] for line in lines_of(out) if "eval_loss" in line}
    assert summary["best_eval_loss"] == min(measured[6], measured[8])
    assert not all(weight.equal(before[name]) for name, weight in saved_weights(out / "best").items())


def test_the_same_files_elsewhere_are_the_same_run(place, undisturbed, tmp_path):
    shutil.copytree(undisturbed[1], tmp_path / "out")
    shutil.copytree(place / "gpt", tmp_path / "gpt")
    moved = {"model_name_or_path": str(tmp_path / "gpt")}
    for key, name in {"dataset_name": "train.jsonl", "validation_file": "validation.jsonl"}.items():
        moved[key] = shutil.copy(place / name, tmp_path)
    assert train(place, tmp_path / "out", **moved, resume_from_checkpoint="auto")["changes"] == []


def test_a_checkpoint_may_be_a_link(place, tmp_path):
    interrupted(place, tmp_path / "out", 4)
    shutil.move(tmp_path / "out" / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "out" / "checkpoint-3").symlink_to(tmp_path / "checkpoint-3")
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_total_limit=1)
    assert {path.name for path in (tmp_path / "out").glob("*checkpoint-*")} == {"checkpoint-8"}


def test_what_a_killed_run_did_not_come_to_delete_is_deleted(place, undisturbed, tmp_path):
    """Killed behind its last checkpoint, before older ones went: no other checkpoint will be saved."""
    shutil.copytree(undisturbed[1], tmp_path / "out")
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_total_limit=1)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    shutil.move(tmp_path / "out" / "checkpoint-8", tmp_path / "out" / "backup")
    path = str(tmp_path / "out" / "backup")  # any name will do
    assert train(place, tmp_path / "out", resume_from_checkpoint=path)["steps"] == 8


def test_a_signal_behind_the_last_exchange_is_not_lost(place, tmp_path, monkeypatch):
    leave = loop._raise_if_stopped
    monkeypatch.setattr(loop, "_raise_if_stopped", lambda *args: (leave(*args), signal.raise_signal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would the run
    try:
        with pytest.raises(KeyboardInterrupt):
            train(place, tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, before)
