"""Resuming depends on the rows, the tokenizer, the chat template's text and the settings, and not
on the day on which the template was rendered.
"""

import datetime
import json
import shutil

import datasets
import pytest
import transformers as tf
from runs import train, write_rows

import hf_ga
from hf_ga.finetuning.data.data import prepare_data
from hf_ga.finetuning.run.model.models import load_tokenizer

TEMPLATE = (
    "{{ strftime_now('%d %B %Y') }}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STOP = 2


def turns(i: int, end: str = "same") -> dict:
    user = {"role": "user", "content": f"the window {i}"}
    return {"messages": [user, {"role": "assistant", "content": f"one step every split {end}"}]}


def save_tokenizer(folder, template: str = TEMPLATE) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def fill(place, folder) -> None:
    """Write a model `gpt` whose template has the date, and rows."""
    shutil.copytree(place / "gpt", folder / "gpt")
    save_tokenizer(folder / "gpt")
    for name in ("chats.jsonl", "validation.jsonl"):
        write_rows(folder / name, [turns(i) for i in range(16)])


@pytest.fixture
def chats(place, tmp_path, monkeypatch):
    """A folder as `fill` writes it, on the 1st of May."""
    fill(place, tmp_path)
    set_day(monkeypatch, tmp_path, 1)
    return tmp_path


def set_day(monkeypatch, folder, day: int) -> None:
    """A day in May, on a machine whose cache of datasets has no rows of another day."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, *zone):
            return cls(2026, 5, day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / f"cache {day}")


def flags(folder, **more) -> dict:
    return {
        "model_name_or_path": str(folder / "gpt"),
        "dataset_name": str(folder / "chats.jsonl"),
        "validation_file": str(folder / "validation.jsonl"),
        "text_column": None,
        "max_length": 64,
        "max_steps": 4,
        "save_steps": STOP,
        "save_total_limit": 9,
        **more,
    }


def resumed(folder, output: str = "again", **more) -> dict:
    checkpoint = folder / "out" / f"checkpoint-{STOP}"
    more["resume_from_checkpoint"] = str(checkpoint)
    return train(folder, folder / output, **flags(folder, **more))


def hashes(folder) -> tuple[str, dict]:
    """Hash of the tokens, and the identity of the data."""
    config = hf_ga.FinetuneConfig(**flags(folder))
    data = prepare_data(config, load_tokenizer(config))
    return data.content_hash, data.identity


def test_another_day_is_the_same_run(chats, monkeypatch, capsys):
    """The control: its tokens are others, which made the run refuse its own checkpoint."""
    train(chats, chats / "out", **flags(chats))
    assert "the chat template renders the current date" in capsys.readouterr().out
    tokens, identity = hashes(chats)
    saved = json.loads((chats / "out" / f"checkpoint-{STOP}" / "state.json").read_text())[
        "identity"
    ]
    assert {name: saved[name] for name in identity} == identity
    assert all(identity.values())
    # As in checkpoints of releases before.
    assert saved["dataset_name"] == "chats.jsonl"
    assert saved["test_file"] is None
    assert tokens not in identity.values()
    set_day(monkeypatch, chats, 2)
    other_tokens, other_identity = hashes(chats)
    assert other_tokens != tokens
    assert other_identity == identity
    assert resumed(chats)["steps"] == 4


def change_rows(folder):
    write_rows(folder / "chats.jsonl", [turns(i, "gives" if i == 9 else "same") for i in range(16)])


def change_validation(folder):
    """The best metric so far would be that of other rows."""
    write_rows(folder / "validation.jsonl", [turns(i, "gives") for i in range(4)])


def change_order(folder):
    write_rows(folder / "chats.jsonl", [turns(i) for i in reversed(range(16))])


def change_template(folder):
    save_tokenizer(folder / "gpt", TEMPLATE.replace("%d %B", "%B %d"))


def change_tokenizer(folder):
    """Exchange the ids of two tokens."""
    file = folder / "gpt" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    file.write_text(json.dumps(content))


CHANGES = {
    "rows": (change_rows, {}, "other settings: data '"),
    "validation": (change_validation, {}, "other settings: validation '"),
    "order of the rows": (change_order, {}, "other settings: data '"),
    "template": (change_template, {}, "other settings: chat_template '"),
    "tokenizer": (change_tokenizer, {}, "other settings: tokenizer '"),
    "setting": (None, {"max_length": 48}, "other settings: max_length 64 -> 48"),
    "number of rows": (None, {"max_train_samples": 12}, "max_train_samples None -> 12, data '"),
}


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    """A folder with a run of 4 steps and what it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    fill(place, folder)
    with pytest.MonkeyPatch.context() as patch:
        set_day(patch, folder, 1)
        train(folder, folder / "out", **flags(folder))
    return folder


@pytest.mark.parametrize("name", [*CHANGES, "nothing"])
def test_changes_are_refused_by_name(name, trained, tmp_path, monkeypatch):
    change, more, message = CHANGES.get(name, (None, {}, None))
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    set_day(monkeypatch, tmp_path, 1)
    if change is not None:
        change(folder)
    if message is None:  # the control
        assert resumed(folder)["steps"] == 4
        return
    with pytest.raises(hf_ga.CheckpointError) as error:
        resumed(folder, **more)
    assert message in str(error.value)


def test_a_template_of_texts_is_not_compared(chats):
    """Nor is it of a run that does not use it."""
    write_rows(chats / "texts.jsonl", [{"text": f"the window {i}"} for i in range(16)])
    config = hf_ga.FinetuneConfig(**flags(chats, dataset_name=str(chats / "texts.jsonl")))
    config.validation_file = config.dataset_name
    found = []
    for template in (TEMPLATE, "{{ messages }}"):
        save_tokenizer(chats / "gpt", template)
        found.append(prepare_data(config, load_tokenizer(config)).identity)
    assert found[0] == found[1]
    assert found[0]["chat_template"] is None


@pytest.mark.slow("five runs")
def test_rows_of_a_stream(chats, monkeypatch):
    """Those that are read ahead; the rest is rendered when it comes."""
    streamed = {"streaming": True, "shuffle_buffer_size": 4}
    train(chats, chats / "out", **flags(chats, **streamed))
    set_day(monkeypatch, chats, 2)
    assert resumed(chats, **streamed)["steps"] == 4
    change_rows(chats)
    with pytest.raises(hf_ga.CheckpointError, match="other settings: data '"):
        resumed(chats, "other", **streamed)
