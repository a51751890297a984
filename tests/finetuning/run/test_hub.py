"""--push_to_hub, with the requests to the Hub replaced: what would be uploaded, and what a missing
login or a failure leaves.
"""

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import transformers as tf
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from runs import train_job

import hf_ga
from hf_ga.finetuning.run.flags.cli import parse_config
from hf_ga.finetuning.run.results import hub

DOCS = Path(__file__).parents[3] / "docs"
TOKEN = "hf_TheSecret"
FLAGS = {
    "push_to_hub": True,
    "hub_model_id": "me/colours",
    "max_steps": 2,
    "eval_steps": 2,
    "save_steps": 1,
}
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
REPORTS = {"README.md", "curves.png", "metrics.jsonl", "summary.json"}
ADAPTER = {"adapter/README.md", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


def uploaded(folder, ignored):
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return set(
        filter_repo_objects(files, ignore_patterns=ignored)
    )  # as HfApi.upload_folder selects them


@pytest.fixture
def calls(monkeypatch):
    """The requests; an exception under a method's name is raised there."""
    calls = {"role": "write"}

    class Fake(HfApi):
        def whoami(self):
            if "whoami" in calls:
                raise calls["whoami"]
            return {"name": "me", "auth": {"accessToken": {"role": calls["role"]}}}

        def create_repo(self, repo_id, **flags):
            calls["created"] = (repo_id, flags)
            return type("Url", (str,), {"repo_id": f"me/{repo_id.rpartition('/')[2]}"})(
                f"https://hub/me/{repo_id}"
            )

        def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
            calls["repo_id"], calls["files"] = repo_id, uploaded(folder_path, ignore_patterns)
            if "upload_folder" in calls:
                raise calls["upload_folder"]

    monkeypatch.setattr(hub, "HfApi", Fake)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return calls


def test_a_run_uploads_its_model_and_no_token(calls, place, tmp_path, capsys):
    (command,) = [
        line
        for line in (DOCS / "finetune.md").read_text().splitlines()
        if "--push_to_hub --" in line
    ]
    shown = parse_config(command.split()[3:])
    output = tmp_path / "out"
    copy = tmp_path / "copy"
    more = {
        name: getattr(shown, name) for name in ("push_to_hub", "hub_model_id", "hub_private_repo")
    }
    more |= {
        "lora_r": 2,
        "report_to": "tensorboard",
        "predict_file": str(place / "classes.test.jsonl"),
    }
    summary = train_job(place, output, "classes", **FLAGS | more)
    assert calls["created"] == (
        "user/stdlib-gpt",
        {"private": True, "exist_ok": True},
    )
    assert calls["files"] == MODEL | REPORTS | ADAPTER
    assert calls["repo_id"] == "me/stdlib-gpt"
    assert {path.name for path in output.iterdir()} >= {
        "checkpoint-2",
        "best",
        "trackers",
        "predictions.jsonl",
        "latest",
    }
    for name in calls["files"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(output / name, copy / name)
    assert tf.AutoModelForSequenceClassification.from_pretrained(copy).num_labels == 3
    assert tf.AutoTokenizer.from_pretrained(copy)
    card = ModelCard.load(copy / "README.md")
    found = card.data.library_name, card.data.tags, card.data.base_model
    assert found == ("transformers", ["hf_ga", "text-classification"], None)
    assert f"| eval_accuracy | {summary['eval_accuracy']:.4f} |" in card.text
    assert summary["data"] in card.text
    assert [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ] == []
    assert TOKEN not in capsys.readouterr().out + str(summary) + repr(hf_ga.FinetuneConfig(**FLAGS))


def test_a_failed_upload_leaves_the_model_and_the_command(calls, place, tmp_path):
    calls["upload_folder"], output = OSError("503 Server Error\nand more"), tmp_path / "stdlib-gpt"
    with pytest.raises(hf_ga.errors.UploadFailed) as failed:
        train_job(
            place, output, "classes", **FLAGS | {"hub_model_id": None, "hub_private_repo": True}
        )
    message = str(failed.value)
    assert "503 Server Error. The run has finished and" in message
    assert json.loads((output / "summary.json").read_text())["steps"] == 2
    assert tf.AutoModelForSequenceClassification.from_pretrained(output)
    words = shlex.split(message.split("`")[1])
    excluded = [word for before, word in pairwise(words) if before == "--exclude"]
    assert uploaded(output, excluded) == calls["files"] == MODEL | REPORTS


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (
            {"whoami": OSError("No token at hf.co. See more.")},
            {},
            "upload to me/colours: No token at hf.co. Log in with `hf auth",
        ),
        (
            {"whoami": ValueError(f"Illegal header value {TOKEN}")},
            {},
            r"Illegal header value \*\*\*\. Log in",
        ),
        (
            {"whoami": ValueError(f"Bearer {TOKEN}")},
            {},
            r"Bearer \*\*\*\. Log in",
        ),
        ({"role": "read"}, {}, "the token has no write access"),
        ({}, {"eval_only": True}, "eval_only and push_to_hub exclude each other"),
    ],
)
def test_what_would_fail_after_the_run_fails_before_it(
    change, flags, message, calls, place, tmp_path
):
    calls.update(change)
    with pytest.raises(hf_ga.ConfigError, match=message):
        train_job(place, tmp_path / "out", "classes", **FLAGS | flags, dataset_name="missing")
    assert "created" not in calls
    assert not (tmp_path / "out").exists()


def test_the_card_names_what_the_hub_has():
    names = ["stdlib", "me/rows", "part-*.jsonl", "a.csv"]
    config = hf_ga.FinetuneConfig(dataset_name=names, model_name_or_path="me/tiny")
    card = ModelCard(hub._model_card(config, "me/out", {"steps": 2, "data": "rows"}))
    assert (card.data.datasets, card.data.base_model) == (["me/rows"], "me/tiny")
