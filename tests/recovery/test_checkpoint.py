"""Stop and resume: bit for bit on the same layout, close on another one, and refused where the run would be another one."""

import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import helpers as h
import pytest
import torch
from runs import lines_of, ragged_rows, relative_distance, small_config, train, write_rows
from stops import Stopped, content, interrupted, without_speed

import hf_ga
from hf_ga.parallel import shards
from hf_ga.recovery.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, state_sha256
from hf_ga.recovery.manifest import write_manifest
from hf_ga.run import build, loop, saving

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)  # all that saving needs of an Accelerator


# Stop and resume


@pytest.mark.parametrize("windows", [3, 7], ids=lambda n: f"after {n} steps")
def test_resumed_run_is_the_undisturbed_run(windows, place, undisturbed, tmp_path):
    """Stopped right after a checkpoint and a step behind one, in the first and in the second epoch; dropout on."""
    interrupted(place, tmp_path / "out", windows)
    assert len(lines_of(tmp_path / "out")) == windows and not (tmp_path / "out" / "summary.json").exists()
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto")
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])
    same = ("eval_loss", "best_eval_loss", "train_loss", "steps", "skipped_windows")
    assert {k: summary[k] for k in same} == {k: undisturbed[0][k] for k in same}


def test_resume_at_the_end_of_an_epoch(place, undisturbed, tmp_path):
    interrupted(place, tmp_path / "out", 5, save_steps=4)
    summary = train(place, tmp_path / "out", save_steps=4, resume_from_checkpoint="auto")
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])


def test_without_the_optimizer_it_is_another_run(place, undisturbed, tmp_path, monkeypatch):
    """The control: a resume that forgets the optimizer's moments does not give the same weights."""
    interrupted(place, tmp_path / "out", 5)

    def load(folder, model, optimizer, **how):
        fresh = optimizer.state_dict()
        state = load_checkpoint(folder, model, optimizer, **how)
        optimizer.load_state_dict({**fresh, "state": {}})
        return state

    monkeypatch.setattr(saving, "load_checkpoint", load)
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto")
    assert summary["weights_sha256"] != undisturbed[0]["weights_sha256"]
    assert relative_distance(tmp_path / "out", undisturbed[1]) > 1e-4


def test_resume_with_another_micro_batch(place, undisturbed, tmp_path):
    interrupted(place, tmp_path / "out", 5)
    settings = {"per_device_train_batch_size": 3, "gradient_checkpointing": True, "per_device_eval_batch_size": 5}
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto", **settings)
    assert summary["eval_loss"] == pytest.approx(undisturbed[0]["eval_loss"], rel=1e-5)
    assert relative_distance(tmp_path / "out", undisturbed[1]) <= 5e-5


def test_resume_into_another_folder(place, undisturbed, tmp_path):
    """The named checkpoint's run goes on; the old folder is left as it is."""
    before = content(undisturbed[1])
    from_folder = str(undisturbed[1] / "checkpoint-3")
    summary = train(place, tmp_path / "new", resume_from_checkpoint=from_folder)
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "new") == without_speed(undisturbed[1])[3:]
    assert content(undisturbed[1]) == before
    assert relative_distance(tmp_path / "new" / "best", undisturbed[1] / "best") == 0


def test_resume_from_a_checkpoint_alone(place, undisturbed, tmp_path):
    """Without its run's folder around it the earlier lines are missing; the rest is the same."""
    shutil.copytree(undisturbed[1] / "checkpoint-6", tmp_path / "moved" / "checkpoint-6")
    summary = train(place, tmp_path / "new", resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-6"))
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "new") == without_speed(undisturbed[1])[6:]


def test_resume_of_a_finished_run_changes_nothing(place, undisturbed, tmp_path):
    shutil.copytree(undisturbed[1], tmp_path / "out")
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto", save_total_limit=9)
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert lines_of(tmp_path / "out") == lines_of(undisturbed[1])


def test_skipped_windows_and_best_loss_survive_a_stop(place, tmp_path):
    rows = [{"text": "<eos>"} if 20 <= i < 44 else row for i, row in enumerate(ragged_rows(60, seed=1))]
    file = write_rows(tmp_path / "rows.jsonl", [{"text": row["text"]} for row in rows])
    settings = {
        "dataset_name": file,
        "global_batch_size": 2,
        "max_steps": None,
        "num_train_epochs": 1.0,
        "save_steps": 5,
        "eval_steps": 10,
    }
    whole = train(place, tmp_path / "whole", **settings)
    assert whole["skipped_windows"] > 2
    interrupted(place, tmp_path / "out", 19, **settings)
    resumed = train(place, tmp_path / "out", resume_from_checkpoint="auto", **settings)
    same = ("skipped_windows", "steps", "best_eval_loss", "weights_sha256")
    assert {k: resumed[k] for k in same} == {k: whole[k] for k in same}
    assert without_speed(tmp_path / "out") == without_speed(tmp_path / "whole")


# Files


def test_checkpoints_to_keep(place, undisturbed, tmp_path):
    assert [folder.name for folder in list_checkpoints(undisturbed[1])] == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    train(place, tmp_path / "out", save_steps=1, save_total_limit=2, max_steps=4)
    assert sorted(p.name for p in (tmp_path / "out").glob("*checkpoint*")) == ["checkpoint-3", "checkpoint-4"]


def test_newest_is_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-old", "partial-checkpoint-11"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_a_named_checkpoint_that_is_damaged_is_refused(place, undisturbed, tmp_path, monkeypatch):
    """Before a model is built; nothing is changed. test_damaged_checkpoints.py damages all files in all ways."""
    shutil.copytree(undisturbed[1], tmp_path / "out")
    shard = tmp_path / "out" / "checkpoint-8" / "shards" / "shard-00001-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = content(tmp_path / "out")
    with (
        pytest.raises(hf_ga.CheckpointError, match=r"checkpoint-8/shards/shard-00001-model-00001-of-00001\.safetensors is damaged"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(build, "load_model", lambda *_: pytest.fail("a model was built"))
        train(place, tmp_path / "out", resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-8"))
    assert content(tmp_path / "out") == before


def test_auto_starts_anew_where_there_is_no_checkpoint(place, undisturbed, tmp_path, capsys):
    """Killed before its first checkpoint: the lines of the killed run go."""
    interrupted(place, tmp_path / "out", 2)
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto")
    assert "has no checkpoint yet" in capsys.readouterr().out
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])


def test_resume_from_an_earlier_one_gives_up_the_later_ones(place, undisturbed, tmp_path):
    """From checkpoint-3 of three: `latest` names it at once; the next save, of step 4, deletes 6 and 8."""
    shutil.copytree(undisturbed[1], tmp_path / "out")
    wanted = str(tmp_path / "out" / "checkpoint-3")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "train_step", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        train(place, tmp_path / "out", resume_from_checkpoint=wanted)
    assert (tmp_path / "out" / "latest").read_text().startswith("checkpoint-3\n")
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_steps=4, save_total_limit=9)
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == ["checkpoint-3", "checkpoint-4", "checkpoint-8"]


def test_everything_is_on_the_disk_before_it_gets_its_name(place, tmp_path, monkeypatch):
    """In this order: the files of a checkpoint and the lines that it relies on, its name, `latest`, and only then deletions."""
    done, output = [], tmp_path / "out"
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def moved(move):
        return lambda path, target: (done.append((path.name, Path(target).name)), move(path, target))[1]

    def flushed(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{output}/"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", moved(rename))
    monkeypatch.setattr(Path, "replace", moved(replace))
    train(place, output, save_steps=4, save_total_limit=1)
    named = done.index(("partial-checkpoint-8", "checkpoint-8"))
    begun = done.index(("latest.partial", "latest"))  # the checkpoint before it was done
    files = [path.relative_to(output / "checkpoint-8").as_posix() for path in (output / "checkpoint-8").rglob("*")]
    assert len(files) == 4 and {"metrics.jsonl", *(f"partial-checkpoint-8/{name}" for name in files)} <= {*done[begun:named]}
    pointed = done.index(("latest.partial", "latest"), named)
    assert named < done.index(str(output), named) < done.index("latest.partial", named) < pointed
    assert pointed < done.index(("checkpoint-4", "partial-checkpoint-4"))


def test_lost_lines(place, undisturbed, tmp_path):
    """metrics.jsonl ends in the middle of its fifth line, and checkpoint-6 had six: no half line is left, none is doubled."""
    interrupted(place, tmp_path / "out", 6)
    metrics = tmp_path / "out" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    train(place, tmp_path / "out", resume_from_checkpoint="auto")
    whole = without_speed(undisturbed[1])
    assert without_speed(tmp_path / "out") == whole[:4] + whole[6:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd's threads for a GPU survive no fork")
def test_killed_process_is_resumed(place, undisturbed, tmp_path):
    """SIGKILL in the middle of a window behind a checkpoint: the process that goes on makes the same bits."""
    child = os.fork()  # imports take most of the time of a new process
    if not child:
        try:
            interrupted(place, tmp_path / "out", 5, killed=True)
        finally:
            os._exit(1)  # it was not killed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(lines_of(tmp_path / "out")) == 5 and not (tmp_path / "out" / "summary.json").exists()
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto")
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])


def test_state_of_another_kind(place, undisturbed, tmp_path):
    shutil.copytree(undisturbed[1], tmp_path / "out")
    folder = tmp_path / "out" / "checkpoint-8"
    (folder / "state.json").write_text('{"step": 8}')
    (folder / "manifest.json").unlink()
    write_manifest(folder, 8, {})
    with pytest.raises(hf_ga.CheckpointError, match=r"state\.json"):
        train(place, tmp_path / "out", resume_from_checkpoint="auto")


def small(width=3):
    model = torch.nn.Linear(width, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_save_and_load_by_hand(tmp_path):
    """Weights, the optimizer's moments and the state come back exactly; a model of another width is refused."""
    model, optimizer = small()
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    folder = save_checkpoint(ALONE, tmp_path, model, optimizer, {"best": math.inf, "note": "é"}, step=3, keep=1)
    other, other_optimizer = small()
    other_optimizer.param_groups[0]["lr"] = 9.0
    assert not torch.equal(other.weight, model.weight)
    assert load_checkpoint(folder, other, other_optimizer) == {"step": 3, "best": math.inf, "note": "é"}
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    with pytest.raises(hf_ga.CheckpointError, match="checkpoint-3"):
        load_checkpoint(folder, *small(width=4))


def test_the_sha256_sees_every_bit():
    model, _ = small()
    before = state_sha256(model.state_dict())
    assert state_sha256(model.state_dict()) == before
    with torch.no_grad():
        model.bias[1] = torch.nextafter(model.bias[1], torch.tensor(9.0))
    assert state_sha256(model.state_dict()) != before
    assert state_sha256(torch.nn.Sequential(model).state_dict()) != state_sha256(model.state_dict())  # names count
    assert state_sha256(model.double().state_dict()) != state_sha256(model.float().state_dict())  # and types


def test_resume_is_refused_before_a_model_is_built(place, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(hf_ga.CheckpointError, match="absent is not a checkpoint"):
        hf_ga.finetune(small_config(place, tmp_path / "out", resume_from_checkpoint=str(tmp_path / "absent")))
    assert not (tmp_path / "out").exists()


def test_a_large_state_is_several_files(tmp_path, monkeypatch):
    """Each is made in memory. Control: another model of the same kind has other weights before."""
    monkeypatch.setattr(shards, "FILE_BYTES", 4096)
    made = []
    for rate in (1e-3, 1e-1):
        model = h.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        model(**h.pad_right(h.token_samples(4))).loss.backward()
        optimizer.step()
        made.append((model, optimizer))
    (model, optimizer), (other, others) = made
    shards.save_shards(model, optimizer, tmp_path / "shards")
    assert len(list((tmp_path / "shards").iterdir())) > 2
    different = [n for n, p in other.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    shards.load_shards(other, others, tmp_path / "shards")
    assert different and all(torch.equal(p, model.get_parameter(n)) for n, p in other.named_parameters())
    for mine, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(value, others.state[restored][k]) for k, value in optimizer.state[mine].items())
