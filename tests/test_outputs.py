"""What a run leaves: models in the type in which they came, cards, and another run's folder taken along."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
import yaml
from runs import filled_place, lines_of, save_jobs, saved_weights, train_job
from safetensors.torch import load_file

from hf_ga import FinetuneConfig
from hf_ga.recovery.versions import versions
from hf_ga.run.model_card import write_model_card
from hf_ga.run.models import own_dtype
from hf_ga.run.outputs import save_best


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("outputs")) as folder:
        save_jobs(folder)
        yield folder


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


def test_the_type_of_the_files_does_not_matter_for_the_training(half_run, place, tmp_path):
    """The same values in float32: the same run, and saved in float32."""
    summary = train_job(place, tmp_path / "out", "classes", model_name_or_path=str(place / "same"))
    assert summary["weights_sha256"] == half_run[0]["weights_sha256"]
    assert [line["loss"] for line in lines_of(tmp_path / "out")] == [line["loss"] for line in lines_of(half_run[1])]
    for folder in (tmp_path / "out", tmp_path / "out" / "best"):
        assert dtypes(folder) == {torch.float32}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_saving_the_best_leaves_the_training_in_float32(half_run, place, tmp_path):
    often = {"eval_steps": 1, "model_name_or_path": str(place / "half")}
    assert train_job(place, tmp_path / "out", "classes", **often)["weights_sha256"] == half_run[0]["weights_sha256"]


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
    files = {"metrics.jsonl", "summary.json", "curves.png", "README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert files | {"best", "checkpoint-6", "checkpoint-8"} <= names
    assert not [name for name in names if "partial" in name]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (output / "best").iterdir()}


# -- cards ------------------------------------------------------------------------------------------------------------------

SUMMARY = {
    "train_loss": 0.5,
    "eval_loss": 0.25,
    "eval_accuracy": 0.875,
    "test_f1": 0.75,
    "best_eval_loss": 0.125,
    "steps": 40,
    "layout": "window of 64 samples = 1 process(es) x 8 micro-batch(es) of at most 8",
    "precision": "float32",
    "learning_rate": 2e-5,
    "data": "imdb: {'train': 9} rows",
    "versions": versions(),
}


def card(folder, **flags):
    write_model_card(FinetuneConfig(task="text-classification", output_dir=str(folder), **flags), SUMMARY, folder)
    text = (folder / "README.md").read_text()
    start, metadata, rest = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(metadata), rest


def test_card_of_things_from_a_hub(tmp_path):
    metadata, text = card(tmp_path, model_name_or_path="google/bert_tiny", dataset_name="stanfordnlp/imdb", seed=3)
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "base_model": "google/bert_tiny",
        "datasets": ["stanfordnlp/imdb"],
        "tags": ["hf_ga"],
    }
    for line in (
        f"# {tmp_path.name}",
        "| layout | window of 64 samples = 1 process(es) x 8 micro-batch(es) of at most 8 |",
        "| optimizer | adamw, peak learning rate 2e-05, cosine schedule |",
        "| seed | 3 |",
        "| first weights | bert_tiny |",
        "| eval_accuracy | 0.8750 |",
        "| test_f1 | 0.7500 |",
    ):
        assert f"{line}\n" in text
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize("kind", ["file", "folder", "missing file", "embedded"])
def test_card_of_local_things(kind, tmp_path, monkeypatch):
    """A hub knows no paths."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows.jsonl").touch()
    names = {"file": "rows.jsonl", "folder": "rows", "missing file": "gone.csv", "embedded": "stdlib"}
    data = names[kind] if kind == "embedded" else str(tmp_path / names[kind])
    monkeypatch.setitem(SUMMARY, "data", f"{data}: {{'train': 9}} rows")
    metadata, text = card(tmp_path, model_name_or_path=str(tmp_path), dataset_name=data)
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["hf_ga"]}
    assert str(tmp_path) not in text


def test_card_of_a_model_from_scratch(tmp_path):
    metadata, text = card(tmp_path, dataset_name="stdlib")
    assert "base_model" not in metadata and "| first weights | random |\n" in text


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "regression", "multi-label", "token-classification"])
def test_cards_of_all_tasks_name_their_pipeline(task, tmp_path):
    write_model_card(FinetuneConfig(task=task), SUMMARY, tmp_path)
    metadata = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    tags = {"causal-lm": "text-generation", "masked-lm": "fill-mask", "token-classification": "token-classification"}
    assert metadata["pipeline_tag"] == tags.get(task, "text-classification")
