"""What people expect of a trainer's flags: early stopping, the best model, rates, trackers, precision; each counted by hand."""

import json
import math
import os
import shutil

import pytest
import torch
from accelerate.state import AcceleratorState
from runs import filled_place, lines_of, relative_distance, save_jobs, train, train_job
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hf_ga
from hf_ga.recovery.latest import newest
from hf_ga.run import build, loop
from hf_ga.run.trackers import tracker_names

CONSTANT = {"lr_scheduler_type": "constant", "eval_steps": 1, "save_steps": 100}
NAN = math.nan


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("habits")) as folder:
        save_jobs(folder)
        yield folder


@pytest.fixture(scope="module")
def step_by_step(place):
    """The weights after each step."""
    train_job(place, place / "step by step", "classes", **CONSTANT | {"save_steps": 1, "save_total_limit": 9})
    return place / "step by step"


@pytest.fixture
def scripted(monkeypatch):
    """Function of a list of values: the n-th evaluation of the next run finds the n-th of them, for every metric."""

    def script(values):
        left = iter(values)
        names = ("loss", "num_targets", "perplexity", "accuracy", "f1")
        monkeypatch.setattr(build, "evaluate", lambda *args, **kwargs: dict.fromkeys(names, next(left)))

    return script


# name: what the evaluations find, patience, metric; then: evaluations made, number of the best one (None: there is none).
STOPS = {
    "better once": ([3.0, 2.0, 2.5, 2.1, 1.0], 2, "loss", 4, 2),
    "equal is not better": ([2.0, 2.0, 2.0, 1.0], 2, "loss", 3, 1),
    "patience 1": ([2.0, 3.0, 1.0], 1, "loss", 2, 1),
    "never": ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 2, "loss", 8, 8),
    "worse, better, worse": ([3.0, 4.0, 2.0, 4.0, 1.0, 4.0, 4.0, 0.0], 2, "loss", 7, 5),
    "higher is better": ([0.1, 0.5, 0.4, 0.3, 0.9], 2, "accuracy", 4, 2),
    "higher is better, by the name of the log": ([0.5, 0.4, 0.6, 0.5, 0.4, 0.3], 2, "eval_f1", 5, 3),
    "no number first": ([NAN, 2.0, NAN, 1.5, 1.6, NAN, 0.0], 2, "loss", 6, 4),
    "no number last": ([2.0, NAN, NAN, 1.0], 2, "loss", 3, 1),
    "no number higher": ([NAN, 0.5, 0.6, NAN, 0.4, 0.9], 2, "accuracy", 5, 3),
    "never a number": ([NAN, NAN, NAN, NAN], 3, "loss", 3, None),
    "no patience given": ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], None, "loss", 8, 1),
}


@pytest.mark.parametrize("name", STOPS)
def test_early_stopping(name, scripted, step_by_step, place, tmp_path):
    values, patience, metric, evaluations, best = STOPS[name]
    scripted([*values, 0.0])  # the last one is that of the test split
    flags = {"early_stopping_patience": patience, "metric_for_best_model": metric, **CONSTANT}
    summary = train_job(place, tmp_path / "out", "classes", **flags)
    metric = metric.removeprefix("eval_")
    lines = lines_of(tmp_path / "out")
    assert len(lines) == summary["steps"] == evaluations
    assert summary["stopped_early"] == (evaluations < 8)
    assert [line[f"eval_{metric}"] for line in lines] == pytest.approx(values[:evaluations], nan_ok=True)
    assert summary[f"best_eval_{metric}"] == (None if best is None else values[best - 1])
    assert (tmp_path / "out" / "best").is_dir() == (best is not None)
    assert (tmp_path / "out" / f"checkpoint-{evaluations}").is_dir()
    if best is not None:  # the weights as they were after that many steps, and not those of the end
        assert relative_distance(tmp_path / "out" / "best", step_by_step / f"checkpoint-{best}") == 0
        assert (relative_distance(tmp_path / "out", step_by_step / f"checkpoint-{best}") > 0) == (best < evaluations)


def test_a_run_that_stopped_early_stays_stopped(scripted, place, tmp_path):
    values = [3.0, 2.0, 2.5, 2.1]
    scripted([*values, 0.0])
    flags = {**CONSTANT, "early_stopping_patience": 2}
    first = train_job(place, tmp_path / "out", "classes", **flags)
    shutil.copytree(tmp_path / "out", tmp_path / "longer")
    scripted([0.0])
    again = train_job(place, tmp_path / "out", "classes", **flags, resume_from_checkpoint="auto")
    same = ("steps", "stopped_early", "best_eval_loss", "weights_sha256", "eval_loss", "train_loss")
    assert {k: again[k] for k in same} == {k: first[k] for k in same} and first["stopped_early"]
    scripted([1.0, 2.0, 3.0, 4.0, 0.0])  # more patience: it goes on, and forgets nothing
    flags["early_stopping_patience"] = 3
    longer = train_job(place, tmp_path / "longer", "classes", **flags, resume_from_checkpoint="auto")
    assert (longer["steps"], longer["best_eval_loss"], longer["stopped_early"]) == (8, 1.0, True)
    assert [line["eval_loss"] for line in lines_of(tmp_path / "longer")] == [*values, 1.0, 2.0, 3.0, 4.0]


class Stopped(Exception):
    """Where a test interrupts a run."""


def test_patience_is_kept_over_a_stop(scripted, place, tmp_path, monkeypatch):
    """Interrupted after three evaluations, one behind the best; one more without a better one ends it."""
    flags = {**CONSTANT, "save_steps": 1, "early_stopping_patience": 2}
    scripted([3.0, 2.0, 2.5])

    def step(*args, **kwargs):
        if len(lines_of(tmp_path / "out")) == 3:
            raise Stopped
        return train_step(*args, **kwargs)

    train_step = loop.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        with pytest.raises(Stopped):
            train_job(place, tmp_path / "out", "classes", **flags)
    scripted([2.2, 0.0, 0.0, 0.0, 0.0, 0.0])
    summary = train_job(place, tmp_path / "out", "classes", **flags, resume_from_checkpoint="auto")
    assert (summary["steps"], summary["best_eval_loss"], summary["stopped_early"]) == (4, 2.0, True)


def test_the_best_by_accuracy_is_the_best(place, tmp_path):
    """Not scripted: at a rate that overshoots, `best/` is the model with the highest accuracy found on the way."""
    flags = {"learning_rate": 3e-2, "eval_steps": 4, "max_steps": 40, "save_steps": 40, "metric_for_best_model": "accuracy"}
    summary = train_job(place, tmp_path / "out", "classes", still=True, **flags)
    found = [line["eval_accuracy"] for line in lines_of(tmp_path / "out") if "eval_accuracy" in line]
    assert len(found) == 10 and summary["best_eval_accuracy"] == max(found) > min(found)
    evaluated = {"eval_only": True, "model_name_or_path": str(tmp_path / "out" / "best")}
    assert train_job(place, tmp_path / "evaluated", "classes", **evaluated)["eval_accuracy"] == max(found)


def test_evaluating_and_saving_leave_the_training_alone(place, tmp_path):
    often = train_job(place, tmp_path / "often", "classes", eval_steps=1, save_steps=1, save_total_limit=1)
    once = train_job(place, tmp_path / "once", "classes", eval_steps=8, save_steps=8)
    assert often["weights_sha256"] == once["weights_sha256"]
    assert sorted(p.name for p in (tmp_path / "often").glob("*checkpoint*")) == ["checkpoint-8"]


# -- rates ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "steps"), [(0.25, 2), (0.5, 4), (0.0, 0), (0.06, 0), (3, 3), (1.0, 1)])
def test_warm_up_as_a_share_of_all_steps(warmup, steps, place, tmp_path):
    train(place, tmp_path / "out", warmup_steps=warmup, lr_scheduler_type="constant_with_warmup", learning_rate=1e-3)
    expected = [1e-3 * min(1.0, i / steps if steps else 1.0) for i in range(8)]
    assert [line["learning_rate"] for line in lines_of(tmp_path / "out")] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("more", "rate"), [({}, 5e-5), ({"lora_r": 2}, 2e-4)])
def test_default_learning_rates(more, rate, place, tmp_path):
    assert train(place, tmp_path / "out", learning_rate=None, max_steps=1, **more)["learning_rate"] == rate


# -- trackers ---------------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_what_metrics_hold(place, tmp_path):
    train(place, tmp_path / "out", report_to="tensorboard")
    folders = {path.parent for path in (tmp_path / "out" / "trackers").rglob("events.out.tfevents.*")}
    events = [EventAccumulator(str(folder)).Reload() for folder in folders]
    lines, compared = lines_of(tmp_path / "out"), 0
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_perplexity", "num_targets"):
        (scalars,) = [e.Scalars(name) for e in events if name in e.Tags()["scalars"]]
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [s.step for s in scalars] == [step for step, _ in expected]
        assert [s.value for s in scalars] == pytest.approx([value for _, value in expected], rel=1e-6)
        compared += len(scalars)
    assert compared == 4 * 8 + 2 * 3


def test_no_tracker_leaves_no_files(place, tmp_path):
    train(place, tmp_path / "out", max_steps=1)
    assert not (tmp_path / "out" / "trackers").exists()


def test_names_of_trackers(monkeypatch):
    monkeypatch.setattr("hf_ga.run.trackers.get_available_trackers", lambda: ["tensorboard", "aim"])
    assert tracker_names("none") == tracker_names("") == []
    assert tracker_names("aim, tensorboard") == ["aim", "tensorboard"]
    assert tracker_names("all") == ["tensorboard", "aim"]
    for name in ("tensorbord", "wandb"):
        with pytest.raises(hf_ga.ConfigError, match=f"report_to {name} is no tracker .* installed: install its package, or use "):
            tracker_names(f"tensorboard,{name}")


# -- precision --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Function of a precision: as `accelerate launch --mixed_precision` hands it on, without its change of the threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)

    def launch(precision):
        AcceleratorState._reset_state(True)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    yield launch
    AcceleratorState._reset_state(True)


WORDS_OF = {
    "no": "float32",
    "bf16": "bf16 autocast, float32 weights and gradients",
    "fp16": "fp16 autocast with loss scaling, float32 weights and gradients",
}


@pytest.mark.parametrize("precision", WORDS_OF)
def test_precision_of_the_launcher(precision, launched, place, tmp_path, capsys):
    """A whole run in each: real (its losses are not float32's to the last digit), close to float32, and told."""
    launched("no")
    train_job(place, tmp_path / "no", "classes", max_steps=6)
    launched(precision)
    summary = train_job(place, tmp_path / "out", "classes", max_steps=6)
    lines, exact = lines_of(tmp_path / "out"), lines_of(tmp_path / "no")
    assert summary["precision"] == WORDS_OF[precision] and f"\nprecision  {WORDS_OF[precision]}\n" in capsys.readouterr().out
    scales = [line.get("loss_scale") for line in lines]
    assert scales == ([65536.0] * len(lines) if precision == "fp16" else [None] * 6)
    taken = [line for line in lines if not line["skipped"]]
    assert len(taken) == 6
    for line, other in zip(taken, exact, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-2)
    assert ([line["loss"] for line in taken] == [line["loss"] for line in exact]) == (precision == "no")
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert summary["precision"] == WORDS_OF[precision]


def test_fp16_resumes_bit_for_bit_with_its_scale(launched, place, tmp_path):
    launched("fp16")
    whole = train_job(place, tmp_path / "whole", "classes", save_total_limit=9)
    resumed = train_job(place, tmp_path / "out", "classes", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    first, last, last_resumed = (
        json.loads((folder / "state.json").read_text())["scaler"]
        for folder in (tmp_path / "whole" / "checkpoint-3", newest(tmp_path / "whole"), newest(tmp_path / "out"))
    )
    assert first["scale"] == 65536.0 and first["_growth_tracker"] == 3 and last_resumed == last


@pytest.mark.parametrize(("first", "then"), [("no", "bf16"), ("bf16", "no"), ("fp16", "bf16"), ("no", "fp16")])
def test_resume_in_another_precision_is_refused(first, then, launched, place, tmp_path):
    launched(first)
    train_job(place, tmp_path / "out", "classes", max_steps=1)
    launched(then)
    with pytest.raises(hf_ga.CheckpointError, match=f"changed: mixed_precision '{first}' -> '{then}'"):
        train_job(place, tmp_path / "out", "classes", max_steps=1, resume_from_checkpoint="auto")


def test_the_seed_of_a_run_is_all_that_new_weights_depend_on(place, tmp_path):
    """Whatever was drawn before in the process."""
    weights = []
    for number in (1, 2):
        torch.manual_seed(number)
        train_job(place, tmp_path / str(number), "classes", max_steps=1)
        weights.append(load_file(tmp_path / str(number) / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
