"""One run in a folder at a time: the second is refused and changes nothing, and no lock is left in
the way.
"""

import os
from types import SimpleNamespace

import pytest
from runs import lines_of, small_config, train
from stops import content

import hf_ga
from hf_ga.finetuning.run import finetune
from hf_ga.recovery import lock
from hf_ga.recovery.lock import LOCK, is_empty_folder, only_run_in

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)


def test_the_second_run_is_refused(tmp_path):
    out = tmp_path / "a" / "out"
    with only_run_in(out, ALONE):
        (out / "metrics.jsonl").write_text("{}\n")
        before = content(out)
        with pytest.raises(hf_ga.ConfigError) as refused, only_run_in(out, ALONE):
            pytest.fail("two runs are in the folder")
        assert content(out) == before
    assert f"output_dir {out} is in use" in str(refused.value)
    assert "choose another output_dir" in str(refused.value)
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    with only_run_in(out, ALONE):  # it is free again
        pass
    with (
        pytest.raises(hf_ga.ConfigError, match=r"cannot be used .*: choose another"),
        only_run_in(out / "metrics.jsonl/x", ALONE),
    ):
        pytest.fail("below a file")


def test_a_run_beside_a_run(place, tmp_path, monkeypatch):
    """It is refused and changes nothing; without the lock it would continue what is there. What a
    killed run left is nothing.
    """
    out = tmp_path / "out"
    fit = finetune.fit
    more = {"max_steps": 3, "resume_from_checkpoint": "auto"}
    out.mkdir()
    (out / LOCK).write_text("process 1")

    def fit_beside(*args):
        before = content(out)
        with pytest.raises(hf_ga.ConfigError, match="is in use by another run"):
            train(place, out, **more)
        assert content(out) == before
        return fit(*args)

    monkeypatch.setattr(finetune, "fit", fit_beside)
    train(place, out, **more)
    assert [line["step"] for line in lines_of(out)] == [1, 2, 3]
    assert not (out / LOCK).exists()


def test_another_run_began_and_ended_meanwhile(place, tmp_path, monkeypatch):
    """Behind the first look at the folder, and before the lock was taken."""
    accelerator = finetune.make_accelerator

    def meanwhile(config):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")
        return accelerator(config)

    monkeypatch.setattr(finetune, "make_accelerator", meanwhile)
    with pytest.raises(hf_ga.ConfigError, match="contains another run"):
        train(place, tmp_path / "out")
    assert content(tmp_path / "out") == {tmp_path / "out" / "metrics.jsonl": b"{}\n"}


def test_a_folder_that_was_made_for_nothing_is_removed(place, tmp_path):
    for folder in (tmp_path / "a" / "b" / "out", tmp_path / "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(hf_ga.DataError):
            train(place, folder, dataset_name=str(tmp_path / "missing.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert not any((tmp_path / "there").iterdir())


def test_an_evaluation_may_go_on_beside_a_run(place, tmp_path):
    """It writes files of its own only."""
    with only_run_in(tmp_path / "out", ALONE):
        train(place, tmp_path / "out", eval_only=True)
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "evaluation.json",
            LOCK,
        ]


def test_the_lock_of_a_killed_run_is_nothing(tmp_path):
    assert is_empty_folder(tmp_path / "missing")
    assert is_empty_folder(tmp_path)
    (tmp_path / LOCK).write_text("process 1")
    assert is_empty_folder(tmp_path)
    (tmp_path / "file").touch()
    assert not is_empty_folder(tmp_path)


def test_workers_do_not_keep_the_lock(tmp_path):
    """A killed run's workers may live some seconds longer."""
    reading, writing = os.pipe()
    with only_run_in(tmp_path / "out", ALONE):
        child = os.fork()
        if not child:
            os.read(reading, 1)
            os._exit(0)
    try:
        with only_run_in(tmp_path / "out", ALONE):
            pass
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unknown(self):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.FileLock, "_acquire", unknown)
    with only_run_in(tmp_path / "out", ALONE):
        (tmp_path / "out" / "file").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_all_processes_hear_the_refusal(tmp_path, monkeypatch):
    """The others take no lock; all raise where the main process could not."""

    def call_on_main(accelerator, function, *arguments):
        if accelerator.is_main_process:
            function(*arguments)
        raise hf_ga.ConfigError("in use")

    monkeypatch.setattr(lock, "call_on_main", call_on_main)
    for is_main in (True, False):
        process = SimpleNamespace(is_main_process=is_main, num_processes=2)
        with (
            pytest.raises(hf_ga.ConfigError, match="in use"),
            only_run_in(tmp_path / str(is_main), process),
        ):
            pytest.fail("goes on")
    assert not (tmp_path / "False").exists()


def test_configuration_is_checked_before_the_folder_is_touched(place, tmp_path):
    with pytest.raises(hf_ga.ConfigError, match="save_steps"):
        hf_ga.finetune(small_config(place, tmp_path / "out", save_steps=0))
    assert not (tmp_path / "out").exists()
