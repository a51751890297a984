"""A run that stops and goes on with other processes, other micro-batches, under DDP, FSDP1 or FSDP2 is the run that never stopped.

Processes are real ones and meet over gloo; `forked.py` starts them. test_finetune_processes.py has runs under the real launcher.
"""

import json
from pathlib import Path

import pytest
import round_trip_worker
from forked import phase, run_phases, run_script
from runs import filled_place, lines_of, small_config, train

from hf_ga.exact.window_loader import WindowLoader
from hf_ga.recovery.checkpoint import load_checkpoint
from hf_ga.run import saving

STEPS = 19
SETTINGS = {"max_steps": STEPS, "save_steps": 2, "eval_steps": 5, "save_total_limit": 20, "learning_rate": 3e-3}
# Kind, processes, micro-batch. Each stops one window behind its checkpoint, which the next one does again.
CHAIN = [
    ("ddp", 1, 8),
    ("ddp", 2, 8),
    ("ddp", 4, 4),
    ("ddp", 1, 8),
    ("ddp", 2, 2),
    ("fsdp2", 2, 8),
    ("ddp", 1, 2),
    ("fsdp1", 2, 8),
    ("ddp", 1, 8),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("layouts")) as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(place):
    """Never stopped, one process, micro-batches of 8."""
    return train(place, place / "whole", **SETTINGS), place / "whole"


def without_speed(output: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(output)]


def distance(output: Path, reference: Path, after: int = 0) -> float:
    """Largest relative difference of a loss, in training or validation, of any step after that many; the lines must be of the same
    steps.
    """
    lines, others = lines_of(output), lines_of(reference)[after:]
    assert [line["step"] for line in lines] == [line["step"] for line in others] == list(range(after + 1, after + len(others) + 1))
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line[k] for k in ("learning_rate", "epoch", "num_targets")] == [
            other[k] for k in ("learning_rate", "epoch", "num_targets")
        ]
    pairs = [(a[k], b[k]) for a, b in zip(lines, others, strict=True) for k in ("loss", "eval_loss") if k in a]
    return max(abs(a - b) / b for a, b in pairs)


def chain(place: Path, output: Path, links: list[tuple[str, int, int]]) -> list[dict]:
    """Each link goes on from the newest checkpoint, makes one more, and is gone one window later; the last one ends the run."""
    phases = []
    for number, (kind, processes, size) in enumerate(links):
        more = {"per_device_train_batch_size": size, "resume_from_checkpoint": "auto" if number else None}
        last = number == len(links) - 1
        config = small_config(place, output, **SETTINGS, **more)
        phases.append(phase(config, kind, processes, windows=None if last else 3))
    return phases


@pytest.mark.slow("starts processes")
def test_one_run_on_nine_layouts(place, whole, tmp_path):
    """1 -> 2 -> 4 -> 1 processes, DDP -> FSDP2 -> one process -> FSDP1 -> one, micro-batches of 8, 4 and 2; dropout on."""
    printed = run_phases(tmp_path / "job", chain(place, tmp_path / "out", CHAIN))
    layouts = [line for line in printed.splitlines() if "window of 16 samples = " in line]
    for (_, processes, size), layout in zip(CHAIN, layouts, strict=True):
        assert f"= {processes} process" in layout and layout.split()[-1] == str(size)
    assert distance(tmp_path / "out", whole[1]) <= 1e-5
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_loss"] == pytest.approx(whole[0]["eval_loss"], rel=1e-5)


def resumed_wrongly(place, whole, tmp_path, load) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "load_checkpoint", load)
        train(place, tmp_path / "out", **SETTINGS, resume_from_checkpoint=str(whole[1] / "checkpoint-8"))
    return distance(tmp_path / "out", whole[1], after=8)


def test_a_resume_that_forgets_the_moments_is_another_run(place, whole, tmp_path):
    """The control: the same comparison fails."""

    def load(folder, model, optimizer, **how):
        state = load_checkpoint(folder, model, optimizer, **how)
        for moments in optimizer.state.values():
            moments["exp_avg"].zero_()
        return state

    assert resumed_wrongly(place, whole, tmp_path, load) > 1e-4


def test_a_resume_one_window_further_is_another_run(place, whole, tmp_path, monkeypatch):
    """The control of the position; the first window of the third epoch is not seen."""
    load_state_dict = WindowLoader.load_state_dict

    def shifted(loader, state, **how):
        load_state_dict(loader, state | {"epoch": 2, "num_consumed": 1}, **how)

    monkeypatch.setattr(WindowLoader, "load_state_dict", shifted)
    train(place, tmp_path / "out", **SETTINGS, resume_from_checkpoint=str(whole[1] / "checkpoint-8"))
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(9, STEPS + 1))
    losses, others = ([line["loss"] for line in lines_of(output)] for output in (tmp_path / "out", whole[1]))
    assert abs(losses[-1] - others[-1]) > 1e-4


@pytest.mark.slow("starts processes")
def test_two_processes_resumed_on_two_are_the_same_bits(place, tmp_path):
    """The control: on one process they are not the same bits."""

    def config(name, **more):
        return small_config(place, tmp_path / name, **SETTINGS, **more)

    resumed = config("stopped", resume_from_checkpoint="auto")
    phases = [
        phase(config("undisturbed"), processes=2),
        phase(config("stopped"), processes=2, windows=11),
        phase(resumed, processes=2),
    ]
    run_phases(tmp_path / "job", phases)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("undisturbed", "stopped")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert without_speed(tmp_path / "stopped") == without_speed(tmp_path / "undisturbed")
    more = {"per_device_train_batch_size": 3, "resume_from_checkpoint": str(tmp_path / "undisturbed" / "checkpoint-10")}
    other = train(place, tmp_path / "one", **SETTINGS, **more)
    assert other["weights_sha256"] != summaries[0]["weights_sha256"]


# Optimizers' state into shards and back. Adam and RAdam have it in the form of AdamW.

CASES = {
    "moments, tied weights": ("adamw", "gpt", ("fsdp1", "fsdp2")),
    "a bias with two names": ("adamw", "bert", ("fsdp2",)),  # FSDP1 cannot train BERT's tied head
    "parameters without state": ("adamw", "unused", ("fsdp1", "fsdp2")),
    "numbers beside moments": ("nadam", "gpt", ("fsdp1", "fsdp2")),
    "one moment": ("rmsprop", "gpt", ("fsdp2",)),
    "no state": ("sgd", "gpt", ("fsdp1", "fsdp2")),
}


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("round trips")
    cases = [(optim, model, kind) for optim, model, kinds in CASES.values() for kind in kinds]
    run_script(round_trip_worker.__file__, folder, {"folder": str(folder), "cases": cases})
    return dict(zip(cases, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("case", CASES)
def test_a_plain_checkpoint_goes_into_shards_and_back(case, round_trips):
    """Bit for bit: weights, moments, rates and decay. The control: before it was loaded, nearly all of it was different."""
    optim, model, kinds = CASES[case]
    for kind in kinds:
        result = round_trips[optim, model, kind]
        assert result["codes"] == [0]
        assert result["after"] == [] and result["before"] >= 0.9 * result["values"]
