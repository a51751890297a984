"""What people expect of a trainer's flags: early stopping, the best model, precision; each counted
by hand.
"""

import json
import math
from types import SimpleNamespace

import helpers as h
import pytest
import torch
from runs import lines_of, relative_distance, small_config, train, train_job

import hf_ga
from hf_ga.finetuning.run import build, loop
from hf_ga.finetuning.run.run import Progress

CONSTANT = {"lr_scheduler_type": "constant", "eval_steps": 1, "save_steps": 100}
NAN = math.nan


@pytest.fixture(scope="module")
def undisturbed(place):
    """A run whose weights after three steps are known."""
    train_job(
        place,
        place / "undisturbed",
        "classes",
        **CONSTANT | {"eval_steps": 8, "save_steps": 3, "save_total_limit": 9},
    )
    return place / "undisturbed"


@pytest.fixture
def scripted(monkeypatch):
    """Function of a list of values: the n-th evaluation of the next run finds the n-th of them, for
    every metric.
    """

    def script(values):
        left = iter(values)
        names = ("loss", "num_targets", "perplexity", "accuracy", "f1")
        monkeypatch.setattr(
            build, "evaluate_samples", lambda *args, **kwargs: dict.fromkeys(names, next(left))
        )

    return script


# name: what the evaluations find, patience, metric; then: evaluations made, number of the best one
# (None: there is none).
STOPS = {
    "better once": ([3.0, 2.0, 2.5, 2.1, 1.0], 2, "loss", 4, 2),
    "equal is not better": ([2.0, 2.0, 2.0, 1.0], 2, "loss", 3, 1),
    "patience 1": ([2.0, 3.0, 1.0], 1, "loss", 2, 1),
    "worse, better, worse": ([3.0, 4.0, 2.0, 4.0, 1.0, 4.0, 4.0, 0.0], 2, "loss", 7, 5),
    "higher is better": ([0.5, 0.4, 0.6, 0.5, 0.4, 0.3], 2, "accuracy", 5, 3),
    "no number first": ([NAN, 2.0, NAN, 1.5, 1.6, NAN, 0.0], 2, "loss", 6, 4),
    "no number higher": ([NAN, 0.5, 0.6, NAN, 0.4, 0.9], 2, "accuracy", 5, 3),
    "never a number": ([NAN, NAN, NAN, NAN], 3, "loss", 3, None),
    "no patience given": ([1.0, 2.0, 3.0, 4.0], None, "loss", 4, 1),
}


@pytest.mark.parametrize("name", STOPS)
def test_early_stopping(name, monkeypatch):
    values, patience, metric, evaluations, best = STOPS[name]
    config = hf_ga.FinetuneConfig(
        task="text-classification", early_stopping_patience=patience, metric_for_best_model=metric
    )
    left = iter(values)
    kept = []
    progress = Progress()
    accelerator = SimpleNamespace(is_main_process=False)
    run = SimpleNamespace(config=config, accelerator=accelerator, model=None)
    monkeypatch.setattr(loop, "evaluate_split", lambda run, model: {f"eval_{metric}": next(left)})
    monkeypatch.setattr(loop, "save_and_check_best", lambda run, model: kept.append(progress.step))
    while progress.step < len(values) and not loop.stopped_early(run, progress):
        progress.step += 1
        loop._evaluate(run, progress)
    assert progress.step == evaluations
    assert (kept[-1] if kept else None) == best
    assert progress.best_metric == (None if best is None else values[best - 1])


def test_a_run_stops_early_and_keeps_its_best_model(scripted, undisturbed, place, tmp_path):
    values, patience, _, evaluations, best = STOPS["higher is better"]
    scripted([*values, 0.0])  # the last one is that of the test split
    flags = {
        "early_stopping_patience": patience,
        "metric_for_best_model": "eval_f1",
        **CONSTANT,
    }  # as the log calls it
    summary = train_job(place, tmp_path / "out", "classes", **flags)
    lines = lines_of(tmp_path / "out")
    assert len(lines) == summary["steps"] == evaluations
    assert summary["stopped_early"]
    assert [line["eval_f1"] for line in lines] == values[:evaluations]
    assert summary["best_eval_f1"] == values[best - 1]
    assert (tmp_path / "out" / f"checkpoint-{evaluations}").is_dir()
    # The weights as they were after that many steps, and not those of the end.
    assert relative_distance(tmp_path / "out" / "best", undisturbed / f"checkpoint-{best}") == 0
    assert relative_distance(tmp_path / "out", undisturbed / f"checkpoint-{best}") > 0


def test_the_best_by_accuracy_is_the_best(place, tmp_path):
    """Not scripted: at a rate that overshoots, `best/` is the model with the highest accuracy found
    on the way.
    """
    flags = {
        "learning_rate": 3e-2,
        "eval_steps": 4,
        "max_steps": 24,
        "save_steps": 24,
        "metric_for_best_model": "accuracy",
    }
    summary = train_job(place, tmp_path / "out", "classes", still=True, **flags)
    found = [
        line["eval_accuracy"] for line in lines_of(tmp_path / "out") if "eval_accuracy" in line
    ]
    assert len(found) == 6
    assert summary["best_eval_accuracy"] == max(found) > min(found)
    evaluated = {"eval_only": True, "model_name_or_path": str(tmp_path / "out" / "best")}
    assert train_job(place, tmp_path / "evaluated", "classes", **evaluated)["eval_accuracy"] == max(
        found
    )


@pytest.mark.slow("two runs")
def test_evaluating_and_saving_leave_the_training_alone(undisturbed, place, tmp_path):
    """And so does whatever was drawn before in the process: new weights depend on the run's seed
    alone.
    """
    torch.manual_seed(99)
    often = train_job(
        place, tmp_path / "often", "classes", **CONSTANT | {"save_steps": 1, "save_total_limit": 1}
    )
    assert (
        often["weights_sha256"]
        == json.loads((undisturbed / "summary.json").read_text())["weights_sha256"]
    )
    assert [p.name for p in (tmp_path / "often").glob("*checkpoint*")] == ["checkpoint-8"]
    assert not (tmp_path / "often" / "trackers").exists()


def test_on_step_gets_every_line_and_the_model(place, tmp_path):
    """And draws no number of the run's: weights and lines are those without it."""
    lines = []
    modes = []

    def on_step(line, model):
        lines.append(line)
        modes.append(model.training)
        torch.rand(1)

    with_it = hf_ga.finetune(small_config(place, tmp_path / "out", max_steps=4), on_step)
    without = train(place, tmp_path / "plain", max_steps=4)
    assert lines == lines_of(tmp_path / "out")
    assert modes == [True] * 4
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 4]
    assert with_it["weights_sha256"] == without["weights_sha256"]


@pytest.mark.slow("two runs")
def test_fp16_resumes_bit_for_bit_with_its_scale(launched, place, tmp_path):
    """And in no other precision."""
    launched("fp16")
    flags = {"eval_steps": 8, "save_total_limit": 9}
    whole = train_job(place, tmp_path / "whole", "classes", **flags)
    assert whole["precision"] == "fp16 autocast with loss scaling, float32 weights and gradients"
    assert [line["loss_scale"] for line in lines_of(tmp_path / "whole")] == [65536.0] * 8
    flags["resume_from_checkpoint"] = str(tmp_path / "whole" / "checkpoint-3")
    resumed = train_job(place, tmp_path / "out", "classes", **flags)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    states = [
        json.loads((tmp_path / name / "checkpoint-8" / "state.json").read_text())["scaler"]
        for name in ("whole", "out")
    ]
    assert states[0] == states[1]
    assert (states[0]["scale"], states[0]["_growth_tracker"]) == (
        65536.0,
        8,
    )
    launched("no")
    with pytest.raises(
        hf_ga.CheckpointError, match="has other settings: mixed_precision 'fp16' -> 'no'"
    ):
        train_job(place, tmp_path / "again", "classes", **flags)


# name: whether the device is a GPU with Triton, the number of micro-batches that pay for
# compilation; then: what the log says.
COMPILATIONS = {
    "a CPU": (False, 16, "off, only a GPU with Triton gains time"),
    "a short run": (True, 17, "off, compiling takes as long as 17 micro-batches save"),
    "a long run": (True, 16, "on"),
}


@pytest.mark.parametrize("name", COMPILATIONS)
def test_compilation_where_it_pays(name, place, tmp_path, monkeypatch, capsys):
    has_kernels, minimum, decision = COMPILATIONS[name]
    monkeypatch.setattr(build, "has_kernels", lambda device: has_kernels)
    monkeypatch.setattr(build, "MIN_ROWS_TO_COMPILE", minimum)
    compiled = []
    monkeypatch.setattr(build, "compile_layers", compiled.append)
    train(place, tmp_path / "out", torch_compile="auto")
    assert f"compile    {decision} (8 steps x 2 micro-batches, on cpu)" in capsys.readouterr().out
    assert len(compiled) == (decision == "on")


def test_compilation_of_a_model_without_rows(monkeypatch):
    """Its attention is not sdpa, or it has two stacks of layers. The control can have rows."""
    monkeypatch.setattr(build, "has_kernels", lambda device: True)
    gpu = torch.device("cuda")
    assert build.reason_not_to_compile(h.gpt2(), gpu, 2000) is None
    gpt2 = h.gpt2()
    gpt2.set_attn_implementation("eager")
    for model in (gpt2, h.t5(), torch.nn.Linear(2, 2)):
        assert "cannot be computed on rows" in build.reason_not_to_compile(model, gpu, 2000)
