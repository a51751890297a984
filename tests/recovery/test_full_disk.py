"""A full disk, by a real limit of the system: one clear error, exit code 2, what was saved is kept,
and the run can go on.
"""

import json

import pytest
from disk_limits import limit_at
from runs import lines_of, small_config, train

from hf_ga.finetuning.run import loop
from hf_ga.finetuning.run.flags.cli import finetune_main
from hf_ga.finetuning.run.results import outputs, saving
from hf_ga.finetuning.run.results.report import plot_curves
from hf_ga.recovery import checkpoint
from hf_ga.recovery import saving as recovery_saving
from hf_ga.recovery.checkpoint import list_checkpoints
from hf_ga.recovery.manifest import verify

LEFT = "partial-", "replaced-"
SMALL = {
    "max_steps": 4,
    "eval_steps": 2,
    "save_steps": 2,
}  # evaluations and checkpoints after steps 2 and 4
# What is limited from which call on, to how many bytes; the file that cannot be written; the
# checkpoint that is kept.
CASES = {
    "manifest": (checkpoint, "write_manifest", 2, 100, "partial-checkpoint-4", "checkpoint-2"),
    "latest": (checkpoint, "set_latest", 2, 10, "", "checkpoint-2"),
    "first checkpoint": (
        recovery_saving,
        "write_shards",
        1,
        1_000,
        "best",  # is saved again before the run waits for the checkpoint
        None,
    ),
    "best model": (outputs, "_save_in_original_dtype", 2, 1_000, "best", "checkpoint-2"),
    "metrics": (loop, "write_metrics", 3, 500, "metrics.jsonl", "checkpoint-2"),
    "plot": (outputs, "plot_curves", 1, 1_000, "curves.png", "checkpoint-4"),
    "summary": (outputs, "write_json", 1, 100, "summary.json", "checkpoint-4"),
}
# With room again; the others differ in what is missing only.
RESUMED = ("first checkpoint", "latest", "metrics")
QUICK = ("first checkpoint", "latest", "plot")


@pytest.fixture(scope="module")
def undisturbed(place):
    return train(place, place / "small", **SMALL), lines_of(place / "small")


SLOW = pytest.mark.slow("as for the three others")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_full_disk(case, place, undisturbed, tmp_path, capsys, monkeypatch):
    """One line says which file, why and what to do; doing it gives the run that had room."""
    monkeypatch.setattr(outputs, "plot_curves", plot_curves)
    owner, name, call, size, file, kept = CASES[case]
    output = tmp_path / "out"
    (tmp_path / "run.json").write_text(json.dumps(small_config(place, output, **SMALL).to_dict()))
    with limit_at(owner, name, call, size):
        assert finetune_main([str(tmp_path / "run.json")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: cannot write {output / file}: ")
    assert "File too large" in error
    assert f"files in {output} are kept: free disk space" in error
    assert "--resume_from_checkpoint auto" in error
    assert [path.name for path in output.iterdir() if path.name.startswith(LEFT)] == []
    if kept:
        assert (output / "latest").read_text().startswith(f"{kept}\n")
        assert [verify(folder)["step"] for folder in list_checkpoints(output)][-1] >= int(kept[-1])
    assert all(json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    if case not in RESUMED:
        return
    assert finetune_main([str(tmp_path / "run.json"), "--resume_from_checkpoint", "auto"]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["weights_sha256"] == undisturbed[0]["weights_sha256"]
    assert [line["loss"] for line in lines_of(output)] == [line["loss"] for line in undisturbed[1]]


def test_an_error_that_is_none_of_the_disk_goes_through(place, tmp_path, monkeypatch):
    """A bug must not read as a full disk."""

    def save(*args, **more):
        raise RuntimeError("a bug")

    monkeypatch.setattr(saving.CheckpointSaver, "save", save)
    with pytest.raises(RuntimeError, match="a bug"):
        train(place, tmp_path / "out")
