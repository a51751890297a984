"""Stop and resume: bit for bit on the same layout, close on another one, and refused where the run
would be another one.
"""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import lines_of, relative_distance, saved_weights, train
from safetensors import safe_open
from safetensors.torch import save_file
from stops import Stopped, content, interrupted, without_speed
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import hf_ga
from hf_ga.finetuning.run import build, loop
from hf_ga.finetuning.run.results import saving
from hf_ga.parallel import shards
from hf_ga.recovery.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    state_sha256,
)
from hf_ga.recovery.manifest import write_manifest
from hf_ga.recovery.saving import save_checkpoint
from hf_ga.recovery.versions import machine

ALONE = SimpleNamespace(
    is_main_process=True, num_processes=1, device=torch.device("cpu")
)  # all that saving needs of an Accelerator


# Stop and resume


@pytest.mark.parametrize(
    ("windows", "save_steps"),
    [(3, 3), (7, 3), (5, 4)],
    ids=["right after a checkpoint", "in the second epoch", "between epochs"],
)
def test_resumed_run_is_the_undisturbed_run(windows, save_steps, place, undisturbed, tmp_path):
    """Dropout on."""
    interrupted(place, tmp_path / "out", windows, save_steps=save_steps)
    assert len(lines_of(tmp_path / "out")) == windows
    assert not (tmp_path / "out" / "summary.json").exists()
    summary = train(place, tmp_path / "out", save_steps=save_steps, resume_from_checkpoint="auto")
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])
    same = ("eval_loss", "best_eval_loss", "train_loss", "steps", "skipped_windows")
    assert {k: summary[k] for k in same} == {k: undisturbed[0][k] for k in same}


@pytest.mark.parametrize("moved", [False, True], ids=["in its folder", "moved"])
def test_resume_into_another_folder(moved, place, undisturbed, tmp_path):
    """The named checkpoint's run goes on, also without its run's folder around it; the old folder
    is left as it is.
    """
    before = content(undisturbed[1])
    checkpoint = undisturbed[1] / "checkpoint-3"
    if moved:
        checkpoint = shutil.copytree(checkpoint, tmp_path / "moved" / "any name")
    summary = train(place, tmp_path / "new", resume_from_checkpoint=str(checkpoint))
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "new") == without_speed(undisturbed[1])[3:]
    assert content(undisturbed[1]) == before
    assert relative_distance(tmp_path / "new" / "best", undisturbed[1] / "best") == 0


def test_a_folder_with_checkpoints_of_its_own_is_no_place_for_another(place, undisturbed, tmp_path):
    path = str(undisturbed[1] / "checkpoint-3")
    out = tmp_path / "out"
    interrupted(place, out, 1, resume_from_checkpoint=path)
    interrupted(place, out, 3, resume_from_checkpoint=path)  # nothing was saved yet
    with pytest.raises(hf_ga.ConfigError, match="contains checkpoints"):
        train(place, out, resume_from_checkpoint=path)
    train(place, out, resume_from_checkpoint="auto")
    assert [line["step"] for line in lines_of(out)] == list(range(4, 9))


def test_best_is_not_of_a_future_that_was_given_up(place, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed[1], tmp_path / "out")
    before = saved_weights(out / "best")
    summary = train(
        place,
        out,
        resume_from_checkpoint=str(out / "checkpoint-3"),
        learning_rate=30.0,
        resume_with_changes=True,
    )
    measured = {line["step"]: line["eval_loss"] for line in lines_of(out) if "eval_loss" in line}
    assert summary["best_eval_loss"] == min(measured[6], measured[8])
    assert not all(
        weight.equal(before[name]) for name, weight in saved_weights(out / "best").items()
    )


def test_the_same_files_elsewhere_are_the_same_run(
    place, undisturbed, tmp_path, monkeypatch, capsys
):
    """Also on another machine, which is named, and in other micro-batches."""
    monkeypatch.setattr(saving, "machine", lambda: machine() | {"threads": 64})
    shutil.copytree(undisturbed[1], tmp_path / "out")
    shutil.copytree(place / "gpt", tmp_path / "gpt")
    moved = {"model_name_or_path": str(tmp_path / "gpt"), "gradient_checkpointing": True}
    moved |= {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5}
    for key, name in {"dataset_name": "train.jsonl", "validation_file": "validation.jsonl"}.items():
        moved[key] = shutil.copy(place / name, tmp_path)
    assert train(place, tmp_path / "out", **moved, resume_from_checkpoint="auto")["changes"] == []
    assert (
        "resumed on another machine, so bits may differ: threads 1 -> 64" in capsys.readouterr().out
    )


def test_a_pattern_elsewhere_is_the_same_name(tmp_path):
    names = [str(tmp_path), f"{tmp_path}/part-*.jsonl", "nyu-mll/glue"]
    assert [build._without_folder(name) for name in names] == [
        tmp_path.name,
        "part-*.jsonl",
        "nyu-mll/glue",
    ]


def test_a_checkpoint_may_be_a_link(place, tmp_path):
    interrupted(place, tmp_path / "out", 4)
    shutil.move(tmp_path / "out" / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "out" / "checkpoint-3").symlink_to(tmp_path / "checkpoint-3")
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_total_limit=1)
    assert {path.name for path in (tmp_path / "out").glob("*checkpoint-*")} == {"checkpoint-8"}


def test_what_a_killed_run_did_not_come_to_delete_is_deleted(place, undisturbed, tmp_path):
    """Killed behind its last checkpoint, before older ones went: no other checkpoint will be
    saved.
    """
    shutil.copytree(undisturbed[1], tmp_path / "out")
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_total_limit=1)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]


# Files


def test_checkpoints_to_keep(place, undisturbed, tmp_path):
    assert [folder.name for folder in list_checkpoints(undisturbed[1])] == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-8",
    ]
    train(place, tmp_path / "out", save_steps=1, save_total_limit=2, max_steps=4)
    assert sorted(p.name for p in (tmp_path / "out").glob("*checkpoint*")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]


def test_newest_is_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-old", "partial-checkpoint-11"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-10",
    ]


def test_what_cannot_be_resumed_is_refused_before_a_model_is_built(
    place, undisturbed, tmp_path, monkeypatch
):
    """Nothing is changed. test_damaged_checkpoints.py damages all files in all ways."""
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("a model was built"))
    folder = shutil.copytree(undisturbed[1] / "checkpoint-8", tmp_path / "checkpoint-8")
    shard = folder / "shards" / "shard-00001-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = content(tmp_path)
    for name, words in (
        (folder, rf"checkpoint-8/shards/{shard.name} is damaged"),
        (tmp_path / "absent", "absent is not a checkpoint"),
    ):
        with pytest.raises(hf_ga.CheckpointError, match=words):
            train(place, tmp_path / "out", resume_from_checkpoint=str(name))
    assert content(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_auto_starts_anew_where_there_is_no_checkpoint(place, undisturbed, tmp_path, capsys):
    """Killed before its first checkpoint: the lines of the killed run go."""
    interrupted(place, tmp_path / "out", 2)
    summary = train(place, tmp_path / "out", resume_from_checkpoint="auto")
    assert "has no checkpoint yet" in capsys.readouterr().out
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert without_speed(tmp_path / "out") == without_speed(undisturbed[1])


def test_resume_from_an_earlier_one_gives_up_the_later_ones(place, undisturbed, tmp_path):
    """From checkpoint-3 of three: `latest` names it at once; the next save, of step 4, deletes 6
    and 8.
    """
    shutil.copytree(undisturbed[1], tmp_path / "out")
    wanted = str(tmp_path / "out" / "checkpoint-3")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "train_step", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        train(place, tmp_path / "out", resume_from_checkpoint=wanted)
    assert (tmp_path / "out" / "latest").read_text().startswith("checkpoint-3\n")
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-8",
    ]
    train(place, tmp_path / "out", resume_from_checkpoint="auto", save_steps=4, save_total_limit=9)
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-8",
    ]


def test_everything_is_on_the_disk_before_it_gets_its_name(place, tmp_path, monkeypatch):
    """In this order: the files of a checkpoint and the lines that it relies on, its name, `latest`,
    and only then deletions.
    """
    done = []
    output = tmp_path / "out"
    fsync = os.fsync
    rename = Path.rename
    replace = Path.replace

    def moved(move):
        return lambda path, target: (
            done.append((path.name, Path(target).name)),
            move(path, target),
        )[1]

    def flushed(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{output}/"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", moved(rename))
    monkeypatch.setattr(Path, "replace", moved(replace))
    train(place, output, save_steps=4, save_total_limit=1)
    named = done.index(("partial-checkpoint-8", "checkpoint-8"))
    begun = done.index(("latest.partial", "latest"))  # the checkpoint before it was done
    files = [
        path.relative_to(output / "checkpoint-8").as_posix()
        for path in (output / "checkpoint-8").rglob("*")
    ]
    assert len(files) == 4
    assert {
        "metrics.jsonl",
        *(f"partial-checkpoint-8/{name}" for name in files),
    } <= {*done[begun:named]}
    pointed = done.index(("latest.partial", "latest"), named)
    assert named < done.index(str(output), named) < done.index("latest.partial", named) < pointed
    assert pointed < done.index(("checkpoint-4", "partial-checkpoint-4"))


def test_lost_lines(place, undisturbed, tmp_path):
    """metrics.jsonl ends in the middle of its fifth line, and checkpoint-6 had six: no half line is
    left, none is doubled.
    """
    interrupted(place, tmp_path / "out", 6)
    metrics = tmp_path / "out" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    train(place, tmp_path / "out", resume_from_checkpoint="auto")
    whole = without_speed(undisturbed[1])
    assert without_speed(tmp_path / "out") == whole[:4] + whole[6:]


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


@pytest.mark.parametrize("file_bytes", [shards.FILE_BYTES, 16], ids=["one file", "several files"])
def test_save_and_load_by_hand(file_bytes, tmp_path, monkeypatch):
    """Weights, the optimizer's moments and the state come back exactly; a model of another width is
    refused.
    """
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    model, optimizer = small()
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    folder = save_checkpoint(
        ALONE, tmp_path, model, optimizer, {"best": math.inf, "note": "é"}, step=3, keep=1
    )
    assert (len(list((folder / "shards").iterdir())) > 2) == (file_bytes == 16)
    other, other_optimizer = small()
    other_optimizer.param_groups[0]["lr"] = 9.0
    assert not torch.equal(other.weight, model.weight)
    assert load_checkpoint(folder, other, other_optimizer) == {
        "step": 3,
        "best": math.inf,
        "note": "é",
    }
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    with pytest.raises(hf_ga.CheckpointError, match="checkpoint-3"):
        load_checkpoint(folder, *small(width=4))


def test_files_are_those_of_torch(tmp_path, monkeypatch):
    """The same names, permissions, tensors and offsets, also of tensors that share their memory.
    Control: a file that safetensors writes has other permissions.
    """
    rows = torch.arange(12.0).view(3, 4)
    tensors = {"model.a": rows, "model.b": rows[1:], "model.c": torch.ones(2, dtype=torch.bfloat16)}
    found = []
    for writer in (shards._ShardsWriter, HuggingFaceStorageWriter):
        monkeypatch.setattr(shards, "_ShardsWriter", writer)
        folder = tmp_path / writer.__name__
        shards.write_shards(tensors, folder)
        (path,) = folder.iterdir()
        with safe_open(path, "pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            found.append((path.name, path.stat().st_mode, offsets, file.get_tensors()))
    *described, ours = found[0]
    *described_by_torch, theirs = found[1]
    assert described == described_by_torch
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    save_file({"a": rows}, tmp_path / "alone")
    assert (tmp_path / "alone").stat().st_mode not in described


def test_a_transposed_weight_comes_back(tmp_path):
    """torch's own writer refuses it."""
    model, _ = small()
    model.weight = torch.nn.Parameter(torch.randn(3, 2).T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = model.weight.detach().clone()
    folder = save_checkpoint(ALONE, tmp_path, model, optimizer, {}, step=0, keep=1)
    torch.nn.init.zeros_(model.weight)
    load_checkpoint(folder, model, optimizer)
    assert torch.equal(model.weight, expected)


def test_the_sha256_sees_every_bit():
    model, _ = small()
    before = state_sha256(model.state_dict())
    assert state_sha256(model.state_dict()) == before
    with torch.no_grad():
        model.bias[1] = torch.nextafter(model.bias[1], torch.tensor(9.0))
    assert state_sha256(model.state_dict()) != before
    assert state_sha256(torch.nn.Sequential(model).state_dict()) != state_sha256(
        model.state_dict()
    )  # names count
    assert state_sha256(model.double().state_dict()) != state_sha256(
        model.float().state_dict()
    )  # and types
