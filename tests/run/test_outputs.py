"""What a run leaves: models in the type in which they came."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from runs import lines_of, saved_weights, train_job
from safetensors.torch import load_file

from hf_ga.run.models import own_dtype
from hf_ga.run.outputs import save_best


@pytest.fixture(scope="module")
def half_run(place):
    """A run that starts from a model in bf16, its summary, and the same model in float32."""
    model = tf.AutoModelForMaskedLM.from_pretrained(place / "job-bert", dtype=torch.bfloat16)
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "job-bert")
    for name, dtype in (("half", torch.bfloat16), ("same", torch.float32)):
        model.to(dtype).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    summary = train_job(place, place / "half run", "classes", model_name_or_path=str(place / "half"))
    return summary, place / "half run"


def dtypes(folder):
    return {value.dtype for value in load_file(folder / "model.safetensors").values()}


def test_a_bf16_model_is_trained_in_float32_and_saved_in_bf16(half_run):
    """What is saved is what was trained, rounded once: the checkpoint has it in float32."""
    summary, output = half_run
    trained, saved = saved_weights(output / "checkpoint-8"), load_file(output / "model.safetensors")
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name].bfloat16()) for name in saved)
    assert any(not torch.equal(saved[name].float(), trained[name]) for name in saved)
    for folder in (output, output / "best"):
        assert dtypes(folder) == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert tf.AutoModelForSequenceClassification.from_pretrained(folder).dtype == torch.bfloat16
    assert summary["precision"] == "float32"


@pytest.mark.slow("whole runs; quick tests cover its parts")
def test_the_type_of_the_files_does_not_matter_for_the_training(half_run, place, tmp_path):
    """The same values in float32: the same run, and saved in float32."""
    summary = train_job(place, tmp_path / "out", "classes", model_name_or_path=str(place / "same"))
    assert summary["weights_sha256"] == half_run[0]["weights_sha256"]
    assert [line["loss"] for line in lines_of(tmp_path / "out")] == [line["loss"] for line in lines_of(half_run[1])]
    for folder in (tmp_path / "out", tmp_path / "out" / "best"):
        assert dtypes(folder) == {torch.float32}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_a_model_that_was_saved_in_another_type_is_what_it_was(place, tmp_path):
    """Its parameters are the same tensors with the same bits, and its configuration tells of float32."""
    model = tf.AutoModelForMaskedLM.from_pretrained(place / "job-bert", dtype=torch.float32)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "job-bert")
    save_best(tmp_path, model, SimpleNamespace(tokenizer=tokenizer), torch.bfloat16)
    assert dtypes(tmp_path) == {torch.bfloat16}
    assert all(p is q and torch.equal(p, value) for p, (q, value) in zip(model.parameters(), before, strict=True))
    assert model.dtype == model.config.dtype == torch.float32


def test_own_type_of_a_model():
    assert own_dtype(None) == own_dtype(tf.BertConfig()) == torch.float32
    assert own_dtype(tf.BertConfig(dtype="bfloat16")) == own_dtype(tf.BertConfig(dtype=torch.bfloat16)) == torch.bfloat16


def test_a_finished_run_has_all_of_its_files(half_run):
    _, output = half_run
    names = {path.name for path in output.iterdir()}
    files = {"metrics.jsonl", "summary.json", "curves.png", "config.json", "model.safetensors", "tokenizer.json"}
    assert files | {"best", "checkpoint-6", "checkpoint-8"} <= names
    assert not [name for name in names if "partial" in name]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (output / "best").iterdir()}
