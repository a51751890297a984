"""A run that stops and goes on with other processes, other micro-batches, under DDP, FSDP1 or FSDP2
is the run that never stopped.

Processes are real ones and meet over gloo; `forked.py` starts them. test_finetune_processes.py has
runs under the real launcher.
"""

import json
from pathlib import Path

import pytest
from forked import phase, run_phases
from runs import lines_of, relative_distance, small_config, train

from hf_ga.finetuning.run.results import saving
from hf_ga.recovery.checkpoint import load_checkpoint

STEPS = 13
SETTINGS = {
    "max_steps": STEPS,
    "save_steps": 2,
    "eval_steps": 5,
    "save_total_limit": 20,
    "learning_rate": 3e-3,
}
# Kind, processes, micro-batch. Each stops one window behind its checkpoint, which the next one does
# again.
CHAIN = [("ddp", 1, 8), ("ddp", 3, 4), ("fsdp2", 2, 8), ("fsdp1", 2, 8), ("ddp", 2, 2)]


@pytest.fixture(scope="module")
def whole(place):
    """Never stopped, one process, micro-batches of 8."""
    return train(place, place / "whole", **SETTINGS), place / "whole"


def distance(output: Path, reference: Path, after: int = 0) -> float:
    """Largest relative difference of a loss, in training or validation, of any step after that
    many; the lines must be of the same steps.
    """
    lines = lines_of(output)
    others = lines_of(reference)[after:]
    assert (
        [line["step"] for line in lines]
        == [line["step"] for line in others]
        == list(range(after + 1, after + len(others) + 1))
    )
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line[k] for k in ("learning_rate", "epoch", "num_targets")] == [
            other[k] for k in ("learning_rate", "epoch", "num_targets")
        ]
    pairs = [
        (a[k], b[k])
        for a, b in zip(lines, others, strict=True)
        for k in ("loss", "eval_loss")
        if k in a
    ]
    return max(abs(a - b) / b for a, b in pairs)


def chain(place: Path, output: Path, links: list[tuple[str, int, int]]) -> list[dict]:
    """Each link goes on from the newest checkpoint, makes one more, and is gone one window later;
    the last one ends the run.
    """
    phases = []
    for number, (kind, processes, size) in enumerate(links):
        more = {
            "per_device_train_batch_size": size,
            "resume_from_checkpoint": "auto" if number else None,
        }
        last = number == len(links) - 1
        config = small_config(place, output, **SETTINGS, **more)
        phases.append(phase(config, kind, processes, windows=None if last else 3))
    return phases


@pytest.mark.slow("starts processes")
def test_one_run_on_five_layouts(place, whole, tmp_path):
    """1 -> 3 -> 2 processes, DDP -> FSDP2 -> FSDP1 -> DDP, micro-batches of 8, 4 and 2; dropout
    on.
    """
    printed = run_phases(tmp_path / "job", chain(place, tmp_path / "out", CHAIN))
    layouts = [line for line in printed.splitlines() if "window of 16 samples = " in line]
    for (_, processes, size), layout in zip(CHAIN, layouts, strict=False):
        assert f"= {processes} process" in layout
        assert layout.endswith(f" {size}")
    assert [line for line in printed.splitlines() if line.startswith("processes ")] == [
        f"processes  {change} computed again"
        for change in (
            "1 -> 3 processes after step 3: same updates, resumed at step 2, 1 step",
            "3 -> 2 processes after step 5: same updates, resumed at step 4, 1 step",
        )
    ]
    processes = [line["num_processes"] for line in lines_of(tmp_path / "out")]
    assert processes == [1, 1, 3, 3, *[2] * (STEPS - 4)]
    assert distance(tmp_path / "out", whole[1]) <= 1e-5
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_loss"] == pytest.approx(whole[0]["eval_loss"], rel=1e-5)


@pytest.mark.slow("the control")
def test_a_resume_that_forgets_the_moments_is_another_run(place, whole, tmp_path, monkeypatch):
    """The control: the same comparisons fail."""

    def load(folder, model, optimizer, **how):
        state = load_checkpoint(folder, model, optimizer, **how)
        for moments in optimizer.state.values():
            moments["exp_avg"].zero_()
        return state

    monkeypatch.setattr(saving, "load_checkpoint", load)
    train(
        place, tmp_path / "out", **SETTINGS, resume_from_checkpoint=str(whole[1] / "checkpoint-8")
    )
    assert distance(tmp_path / "out", whole[1], after=8) > 1e-4
    assert relative_distance(tmp_path / "out", whole[1]) > 1e-4
