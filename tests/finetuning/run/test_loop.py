"""Whole small runs of `hf_ga.finetune`: what they log, save and leave out, and that the split of a
window does not matter.
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import seqeval.metrics
import torch
import transformers as tf
from runs import (
    TRAIN,
    WINDOW,
    job_rows,
    lines_of,
    ragged_rows,
    relative_distance,
    train,
    train_job,
    write_rows,
)
from torch.nn import functional as F

import hf_ga
from hf_ga.order.order import epoch_order

KEYS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_targets",
    "tokens_per_second",
    "num_processes",
    "skipped",
}
EVAL_KEYS = {"eval_loss", "eval_perplexity", "eval_num_targets"}


def causal_ids(folder: Path, file: Path, max_length: int) -> list[list[int]]:
    """What the run should have trained on, by hand."""
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    return [[*tokenizer.encode(text), tokenizer.eos_token_id][:max_length] for text in texts]


@torch.no_grad()
def loss_by_hand(model: torch.nn.Module, rows: list[list[int]]) -> float:
    """Mean over all targets in float64, row by row, so without any padding."""
    model = model.double().eval()
    total = 0.0
    for ids in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        total += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    return total / sum(len(ids) - 1 for ids in rows)


@pytest.fixture(scope="module")
def run(place):
    """The run that most tests look at."""
    return train(place, place / "run"), place / "run"


def test_metrics_hold_one_line_for_each_optimizer_step(run):
    _, output = run
    lines = lines_of(output)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["epoch"] for line in lines] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    for line in lines:
        evaluated = line["step"] in (3, 6, 8)  # every 3 steps, and at the end
        assert set(line) == (KEYS | EVAL_KEYS if evaluated else KEYS)
        assert line["skipped"] is False
        assert line["loss"] > 0
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert line["num_processes"] == 1


def test_targets_of_a_run_are_those_of_its_rows(run, place):
    rows = causal_ids(place / "gpt", place / "train.jsonl", 24)
    counts = np.array([len(ids) - 1 for ids in rows])
    assert max(counts) == 23 > sorted(counts)[0]  # some are cut, and they are ragged
    expected = []
    for epoch in (0, 1):
        order = epoch_order(TRAIN, 7, epoch)
        expected += [
            int(counts[order[start : start + WINDOW]].sum()) for start in range(0, TRAIN, WINDOW)
        ]
    assert [line["num_targets"] for line in lines_of(run[1])] == expected


@pytest.mark.parametrize(("schedule", "warmup", "steps"), [("linear", 0.25, 2), ("cosine", 2, 2)])
def test_learning_rate_follows_optimizer_steps(schedule, warmup, steps, run, place, tmp_path):
    """As `get_scheduler` gives for 8 steps, although 16 micro-batches were computed; below 1 the
    warm-up is a share of them.
    """
    output = run[1] if schedule == "cosine" else tmp_path / "out"
    if schedule != "cosine":
        train(
            place,
            output,
            lr_scheduler_type=schedule,
            warmup_steps=warmup,
            eval_steps=8,
            save_steps=8,
        )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = tf.get_scheduler(schedule, optimizer, steps, 8)
    expected = []
    for _ in range(8):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert [line["learning_rate"] for line in lines_of(output)] == pytest.approx(
        expected, rel=1e-12
    )


def test_epochs_and_short_windows(place, tmp_path):
    """1.5 epochs are 6 of 4 windows each; without the short last window an epoch has 3, and each is
    full.
    """
    seldom = {"max_steps": None, "eval_steps": 99, "save_steps": 99}
    assert train(place, tmp_path / "whole", num_train_epochs=1.5, **seldom)["steps"] == 6
    summary = train(place, tmp_path / "cut", num_train_epochs=2.0, drop_last_window=True, **seldom)
    lines = lines_of(tmp_path / "cut")
    assert summary["steps"] == len(lines) == 6
    assert [line["epoch"] for line in lines] == pytest.approx([k / 3 for k in range(1, 7)])


def write_with_empty(path: Path, rows: int, without_targets: list[int]) -> str:
    """Rows of which those at the given positions of epoch 0 (seed 7) hold the end-of-text token
    alone.
    """
    values = ragged_rows(rows, seed=3)
    for sample in epoch_order(rows, 7, 0)[without_targets]:
        values[sample] = {"text": "<eos>"}
    return write_rows(path, [{"text": value["text"]} for value in values])


def test_a_window_without_targets_makes_no_step(place, tmp_path):
    """Windows of one sample: those without targets are logged as skipped; steps and schedule do not
    move.
    """
    without_targets = [0, 4, 5, 19]  # the last one, too
    file = write_with_empty(tmp_path / "rows.jsonl", 20, without_targets)
    settings = {
        "global_batch_size": 1,
        "max_steps": None,
        "num_train_epochs": 1.0,
        "eval_steps": 10,
        "save_steps": 10,
    }
    summary = train(place, tmp_path / "out", dataset_name=file, **settings)
    lines = lines_of(tmp_path / "out")
    assert [i for i, line in enumerate(lines) if line["skipped"]] == without_targets
    assert (len(lines), summary["steps"], summary["skipped_windows"]) == (20, 16, 4)
    for i in without_targets:
        assert (lines[i]["loss"], lines[i]["num_targets"]) == (None, 0)
        assert lines[i]["step"] == (lines[i - 1]["step"] if i else 0)
        if i + 1 < len(lines):
            assert lines[i]["learning_rate"] == lines[i + 1]["learning_rate"]
    taken = [line for line in lines if not line["skipped"]]
    assert [line["step"] for line in taken] == list(range(1, 17))
    assert summary["train_loss"] == taken[-1]["loss"]
    assert summary["eval_loss"] == lines[-1]["eval_loss"]
    assert (tmp_path / "out" / "checkpoint-16").is_dir()


def test_twenty_windows_in_a_row_without_targets_stop_the_run(place, tmp_path):
    settings = {"global_batch_size": 1, "max_steps": None, "num_train_epochs": 1.0}
    settings |= {"eval_steps": 99, "save_steps": 99}
    nineteen = write_with_empty(tmp_path / "19.jsonl", 40, [*range(5, 24), 25])  # and one more
    twenty = write_with_empty(tmp_path / "20.jsonl", 40, list(range(5, 25)))
    assert (
        train(place, tmp_path / "out19", dataset_name=nineteen, **settings)["skipped_windows"] == 20
    )
    with pytest.raises(
        hf_ga.DataError, match="20 consecutive windows made no step, up to window 24 of epoch 0"
    ):
        train(place, tmp_path / "out20", dataset_name=twenty, **settings)


def test_summary(run, place):
    returned, output = run
    summary = json.loads((output / "summary.json").read_text())
    assert summary == json.loads(json.dumps(returned))
    last = lines_of(output)[-1]
    assert {k: summary[k] for k in EVAL_KEYS} == {k: last[k] for k in EVAL_KEYS}
    assert (summary["train_loss"], summary["steps"], summary["skipped_windows"]) == (
        last["loss"],
        8,
        0,
    )
    assert "16 samples" in summary["layout"]
    assert "2 micro-batch" in summary["layout"]
    assert summary["config"]["seed"] == 7
    assert summary["versions"]["torch"] == version("torch")
    rows = causal_ids(place / "gpt", place / "validation.jsonl", 24)
    assert summary["eval_num_targets"] == sum(len(ids) - 1 for ids in rows)
    model = tf.AutoModelForCausalLM.from_pretrained(output)
    assert summary["eval_loss"] == pytest.approx(loss_by_hand(model, rows), rel=1e-6)
    assert summary["eval_perplexity"] == pytest.approx(np.exp(summary["eval_loss"]), rel=1e-12)


def test_another_split_of_the_windows_is_the_same_run(run, place, tmp_path):
    """With dropout on: 16 samples as 8 + 8 and in micro-batches of at most 3. The control: another
    seed is another run.
    """
    train(place, tmp_path / "out", per_device_train_batch_size=3, per_device_eval_batch_size=5)
    for line, other in zip(lines_of(run[1]), lines_of(tmp_path / "out"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-6)
        if "eval_loss" in line:
            assert line["eval_loss"] == pytest.approx(other["eval_loss"], rel=5e-6)
    assert relative_distance(tmp_path / "out", run[1]) <= 5e-5
    train(place, tmp_path / "other", seed=8, eval_steps=8, save_steps=8)
    assert abs(lines_of(tmp_path / "other")[0]["loss"] / lines_of(run[1])[0]["loss"] - 1) > 1e-4
    assert relative_distance(tmp_path / "other", run[1]) > 1e-3


@pytest.mark.slow("two runs")
def test_checkpointed_activations_and_workers_are_the_same_run(run, place, tmp_path):
    train(place, tmp_path / "out", gradient_checkpointing=True, dataloader_num_workers=1)
    assert relative_distance(tmp_path / "out", run[1]) <= 5e-5


@pytest.mark.slow("whole runs; quick tests cover its parts")
def test_f1_of_whole_entities(place, tmp_path):
    """A colour begins an entity, the word behind it is inside. The metric is that of the
    predictions, and below that of tags.
    """
    files = {"test_file": None}
    for name, count in (("dataset_name", 60), ("validation_file", 13)):
        rows = job_rows("tags", count, count)
        for row in rows:
            tags = zip(["other", *row["tags"]], row["tags"], strict=False)
            row["tags"] = [
                f"B-{t}" if t != "other" else "O" if before == "other" else f"I-{before}"
                for before, t in tags
            ]
        files[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    files["predict_file"] = files["validation_file"]
    few = {"max_steps": 15, "eval_steps": 15, "learning_rate": 1e-2, "metric_for_best_model": "f1"}
    summary = train_job(place, tmp_path / "out", "tags", **files, **few)
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    found = [row["prediction"]["tags"] for row in rows]
    true = [row["tags"] for row in rows]
    assert summary["eval_f1"] == pytest.approx(seqeval.metrics.f1_score(true, found))
    assert 0 < summary["eval_f1"] < summary["eval_accuracy"]


def test_an_encoder_is_no_causal_model(place, tmp_path):
    """It would be trained with every token in sight; as a decoder it is welcome."""
    with pytest.raises(
        hf_ga.ConfigError,
        match="bert is an encoder and attends to the tokens that causal-lm predicts",
    ):
        train(place, tmp_path / "out", model_name_or_path=str(place / "bert"))
    assert not (tmp_path / "out").exists()
    shutil.copytree(place / "bert", tmp_path / "decoder")
    settings = json.loads((tmp_path / "decoder/config.json").read_text())
    (tmp_path / "decoder/config.json").write_text(json.dumps(settings | {"is_decoder": True}))
    assert (
        train(place, tmp_path / "out", model_name_or_path=str(tmp_path / "decoder"), max_steps=1)[
            "steps"
        ]
        == 1
    )
