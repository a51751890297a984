"""What a run prints and leaves: models in the type in which they came."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from matplotlib.figure import Figure
from runs import saved_weights, small_config, train_job
from safetensors.torch import load_file

from hf_ga import FinetuneConfig, finetune
from hf_ga.finetuning.run.flags.cli import finetune_main
from hf_ga.finetuning.run.results.outputs import save_best
from hf_ga.finetuning.run.results.report import describe_world_change, plot_curves


def dtypes(folder):
    return {value.dtype for value in load_file(folder / "model.safetensors").values()}


def test_a_bf16_model_is_trained_in_float32_and_saved_in_bf16(place, tmp_path):
    """What is saved is what was trained, rounded once: the checkpoint has it in float32."""
    tf.AutoModelForMaskedLM.from_pretrained(
        place / "job-bert", dtype=torch.bfloat16
    ).save_pretrained(tmp_path / "half")
    tf.AutoTokenizer.from_pretrained(place / "job-bert").save_pretrained(tmp_path / "half")
    output = tmp_path / "out"
    summary = train_job(place, output, "classes", model_name_or_path=str(tmp_path / "half"))
    trained = saved_weights(output / "checkpoint-8")
    saved = load_file(output / "model.safetensors")
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name].bfloat16()) for name in saved)
    assert any(not torch.equal(saved[name].float(), trained[name]) for name in saved)
    for folder in (output, output / "best"):
        assert dtypes(folder) == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert tf.AutoModelForSequenceClassification.from_pretrained(folder).dtype == torch.bfloat16
    assert summary["precision"] == "float32"


def test_a_model_that_was_saved_in_another_type_is_what_it_was(place, tmp_path):
    """Its parameters are the same tensors with the same bits, and its configuration tells of
    float32.
    """
    model = tf.AutoModelForMaskedLM.from_pretrained(place / "job-bert", dtype=torch.float32)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "job-bert")
    own = {"accelerator": Accelerator(cpu=True), "output_dir": tmp_path, "dtype": torch.bfloat16}
    save_best(SimpleNamespace(data=SimpleNamespace(tokenizer=tokenizer), **own), model)
    assert dtypes(tmp_path / "best") == {torch.bfloat16}
    assert all(
        p is q and torch.equal(p, value)
        for p, (q, value) in zip(model.parameters(), before, strict=True)
    )
    assert model.dtype == model.config.dtype == torch.float32


def test_a_run_fits_one_screen(place, monkeypatch, capsys):
    """By the command: aligned lines in this order, one progress bar and no other, a table whose
    rows are the summary's.
    """
    monkeypatch.chdir(place)
    flags = {
        "model_name_or_path": "gpt",
        "dataset_name": "train.jsonl",
        "validation_file": "validation.jsonl",
    }
    config = small_config(place, "printed", **flags, test_file="validation.jsonl", seed=7).to_dict()
    (place / "run.json").write_text(json.dumps(config))
    assert finetune_main(["run.json"]) == 0
    printed, bars = capsys.readouterr()
    lines = printed.splitlines()
    facts = ["data", "sample", "model", "layout", "loss"]
    facts += ["draws", "precision", "padding", "speed-ups"]
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *facts,
        "step",
        "step",
        "step",
        "results",
        "output",
        "files",
    ]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "layout     window of 16 samples = 1 process x 2 micro-batches x 8" in lines
    shown = re.compile(
        r" *\d+%\|.*\| \d/8 steps, .* left(, loss \d\.\d{4}, lr \d\.\de[-+]\d\d, [\d,]+ "
        r"tokens/s)? *"
    )
    assert [
        line for line in re.split(r"[\r\n]+", bars) if line.strip() and not shown.fullmatch(line)
    ] == []
    summary = json.loads((place / "printed" / "summary.json").read_text())
    names, *rows = (
        line.split()
        for line in lines[lines.index("results                 loss  perplexity") :][:4]
    )
    assert names == ["results", "loss", "perplexity"]
    assert rows[0] == ["last", "step", f"{summary['train_loss']:.4f}"]
    assert rows[1] == ["validation", *(f"{summary[f'eval_{name}']:.4f}" for name in names[1:])]
    assert rows[2] == ["test", *(f"{summary[f'test_{name}']:.4f}" for name in names[1:])]


def test_curves(monkeypatch, tmp_path):
    """Each window's loss, its mean over 5 windows (fewer at the ends), validation losses and rates;
    a skipped window is left out; a line where the number of processes changes, but not where it is
    unknown.
    """
    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **kwargs: (drawn.append(figure), savefig(figure, *args, **kwargs)),
    )
    losses = np.random.default_rng(0).random(100)
    lines = [
        {"step": i + 1, "loss": loss, "learning_rate": 1e-3 * i, "skipped": False}
        for i, loss in enumerate(losses)
    ]
    lines.insert(7, {"step": 7, "loss": None, "learning_rate": 1.0, "skipped": True})
    lines[-1] |= {"eval_loss": 0.25}
    for line in lines:
        line["num_processes"] = 1 if line["step"] > 40 else 2
    plot_curves(lines, tmp_path / "curves.png", "a title")
    upper, lower = drawn[0].axes
    (raw, smooth, validation, change), (rates,) = (
        [line.get_xydata() for line in axes.lines] for axes in (upper, lower)
    )
    steps = np.arange(1, 101)
    assert np.array_equal(raw, np.c_[steps, losses])
    assert np.array_equal(rates, np.c_[steps, 1e-3 * np.arange(100)])
    assert validation.tolist() == [[100.0, 0.25]]
    assert change.tolist() == [[40.5, 0.0], [40.5, 1.0]]
    assert [text.get_text() for text in upper.texts] == ["2 -> 1 processes"]
    middle = np.convolve(losses, np.ones(5) / 5, "valid")
    ends = [losses[:3], losses[:4], losses[-4:], losses[-3:]]
    first, second, third, last = map(np.mean, ends)
    expected = [first, second, *middle, third, last]
    assert smooth == pytest.approx(np.c_[steps, expected])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert len(list(tmp_path.iterdir())) == 1


def test_the_line_of_a_changed_world(tmp_path):
    """What a killed run left: a whole last line, and perhaps a part of one."""
    path = tmp_path / "metrics.jsonl"
    assert describe_world_change(path, 8, 1) is None
    lines = [{"step": step, "num_processes": 2} for step in range(1, 12)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 12, "num_pro')
    assert describe_world_change(path, 8, 2) is None
    assert describe_world_change(path, 8, 1) == (
        "2 -> 1 processes after step 11: same updates, resumed at step 8, 3 steps computed again"
    )
    assert "resumed at step 10, 1 step computed again" in describe_world_change(path, 10, 3)


def train_classes(place, tmp_path, capsys, **settings) -> str:
    """What a run of 8 steps on 8 rows of "no" and 4 of "yes" prints."""
    rows = [{"text": f"text {i}", "label": "yes" if i % 3 == 0 else "no"} for i in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = FinetuneConfig(
        task="text-classification",
        model_name_or_path=str(place / "bert"),
        max_length=16,
        dataset_name=str(file),
        validation_file=str(file),
        output_dir=str(tmp_path / "out"),
        max_steps=8,
        global_batch_size=4,
        **settings,
    )
    finetune(config)
    return capsys.readouterr().out


def test_a_run_prints_the_rows_of_each_class_and_a_warmup_that_is_too_long(place, tmp_path, capsys):
    printed = train_classes(place, tmp_path, capsys, warmup_steps=8)
    assert "classes    no 8, yes 4\n" in printed
    assert "warning    8 warmup steps, but only 8 optimizer steps" in printed


def test_no_warning_of_a_warmup_that_ends(place, tmp_path, capsys):
    printed = train_classes(place, tmp_path, capsys, warmup_steps=7)
    assert "warmup steps, but only" not in printed


def test_no_warning_of_a_constant_learning_rate(place, tmp_path, capsys):
    printed = train_classes(place, tmp_path, capsys, warmup_steps=8, lr_scheduler_type="constant")
    assert "warmup steps, but only" not in printed
