"""Flags, configuration files, and what is derived from them."""

import dataclasses
import json
import re
from typing import get_args, get_type_hints

import pytest

import hf_ga
from hf_ga.finetuning.run.flags.cli import finetune_main, parse_config
from hf_ga.finetuning.run.flags.config import DEFAULT_ACCUMULATION_STEPS, FinetuneConfig

FIELDS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}
# By type: another value, as a command line has it, and what it must become.
VALUES_OF = {
    bool: ("true", True),
    int: ("12", 12),
    float: ("0.3", 0.3),
    str: ("other", "other"),
    list[str]: ("a.*", ["a.*"]),
}
VALUES_OF[list[float]] = ("2", [2.0])
VALUES_OF[list[int]] = ("2", [2])
HINTS = get_type_hints(FinetuneConfig)
OTHER = {
    name: VALUES_OF[
        next(kind for kind in VALUES_OF if kind in (HINTS[name], *get_args(HINTS[name])))
    ]
    for name in FIELDS
}


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """The default output_dir is relative, and the launcher's accumulation comes from the
    environment.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", raising=False)


@pytest.mark.parametrize("name", FIELDS)
def test_flag_sets_its_field_and_no_other(name):
    text, value = OTHER[name]
    for flag in ([f"--{name}", text], [f"--{name.replace('_', '-')}={text}"]):
        config = parse_config(flag)
        assert config == dataclasses.replace(FinetuneConfig(), **{name: value})
        assert type(getattr(config, name)) is type(value)
        assert value != FIELDS[name].default


def test_proportions_may_be_numbers_of_tokens():
    """Only what must be a whole number has a largest value."""
    FinetuneConfig(dataset_name=["a", "b"], dataset_weights=[2**40, 2**33]).check()


def test_truth_values_and_defaults():
    assert parse_config(["--full_determinism"]).full_determinism is True
    assert parse_config(["--full_determinism", "false"]).full_determinism is False
    assert parse_config(["--full_determinism", "--seed", "3"]).seed == 3
    FinetuneConfig().check()
    assert parse_config([]) == FinetuneConfig()


def test_compilation_is_on_off_or_automatic(tmp_path):
    values = {"": True, "true": True, "False": False, "auto": "auto", "AUTO": "auto"}
    for text, value in values.items():
        config = parse_config(["--seed", "3", "--torch_compile", *text.split()])
        assert config.torch_compile == value
        config.check()
    for text, value in {"true": True, "off": False, "auto": "auto"}.items():
        (tmp_path / "run.yaml").write_text(f"torch_compile: {text}")
        assert parse_config([str(tmp_path / "run.yaml")]).torch_compile == value
        (tmp_path / "run.json").write_text(json.dumps({"torch_compile": value}))
        assert parse_config([str(tmp_path / "run.json")]).torch_compile == value
        FinetuneConfig(torch_compile=value).check()


def test_help_lists_all_flags_with_a_sentence_and_their_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        finetune_main(["--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    text = " ".join(captured.out.split())
    for name, field in FIELDS.items():
        assert f"--{name}" in text and re.match(
            r"[a-zA-Z`].{8,}[.]$", field.metadata.get("help", "")
        ), name
        if field.default not in (None, False):
            assert f"(default: {field.default})" in text, name


VALUES = {
    "learning_rate": 2e-5,
    "max_steps": 40,
    "text_column": None,
    "gradient_checkpointing": True,
    "full_determinism": False,
    "output_dir": "some folder with = and 'quotes'",
    "label_column": "-dash",
}
YAML = """
learning_rate: 2e-5   # PyYAML takes this for a string
max_steps: 40
text_column: null
gradient_checkpointing: yes
full_determinism: off
output_dir: "some folder with = and 'quotes'"
label_column: "-dash"
"""


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json"])
def test_file_gives_values_and_flags_win(name, tmp_path):
    path = tmp_path / name
    path.write_text(json.dumps(VALUES) if name.endswith("json") else YAML)
    expected = FinetuneConfig(**VALUES)
    assert parse_config([str(path)]) == expected
    changed = parse_config(
        [str(path), "--max-steps", "7", "--gradient_checkpointing", "false", "--seed", "3"]
    )
    assert changed == dataclasses.replace(
        expected, max_steps=7, gradient_checkpointing=False, seed=3
    )


def test_saved_configuration_is_a_configuration_file(tmp_path):
    """The `config` of a summary.json starts the same run again."""
    config = FinetuneConfig(**{name: value for name, (_, value) in OTHER.items()})
    (tmp_path / "again.json").write_text(json.dumps(config.to_dict()))
    assert parse_config([str(tmp_path / "again.json")]) == config


@pytest.mark.parametrize(
    ("flags", "processes", "expected"),
    [  # micro-batch, accumulation, window
        ({}, 1, (8, DEFAULT_ACCUMULATION_STEPS, 8 * DEFAULT_ACCUMULATION_STEPS)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 1, (4, 3, 12)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 2, (4, 3, 24)),
        ({"per_device_train_batch_size": 8, "global_batch_size": 64}, 4, (8, 2, 64)),
        ({"per_device_train_batch_size": 10, "global_batch_size": 64}, 1, (10, 7, 64)),
        ({"per_device_train_batch_size": 16, "global_batch_size": 5}, 1, (16, 1, 5)),
        (
            {
                "per_device_train_batch_size": 16,
                "global_batch_size": 64,
                "gradient_accumulation_steps": 4,
            },
            1,
            (16, 4, 64),
        ),
    ],
)
def test_layout(flags, processes, expected):
    layout = FinetuneConfig(**flags).layout(processes)
    assert (layout.micro_batch_size, layout.accumulation_steps, layout.window_size) == expected
    assert layout.num_processes == processes


@pytest.mark.parametrize(
    ("launched", "own", "window"),
    [("4", None, 32), ("4", 4, 32), ("4", 2, 16), ("1", 2, 16), ("", 2, 16), ("auto", 2, 16)],
)
def test_accumulation_of_the_launcher(launched, own, window, monkeypatch):
    """`accelerate launch` always sets it; its default of 1 says nothing, and the flag wins."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", launched)
    config = FinetuneConfig(per_device_train_batch_size=8, gradient_accumulation_steps=own)
    assert config.layout(1).window_size == window
    config.check()
    if launched == "4":
        with pytest.raises(hf_ga.ConfigError, match="cannot be reached"):
            FinetuneConfig(per_device_train_batch_size=8, global_batch_size=64).check()


def test_output_below_a_read_only_folder(tmp_path, monkeypatch):
    """Root may write anywhere, so the answer of the system is given here; only the nearest folder
    that exists is asked.
    """
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "closed")
    FinetuneConfig(output_dir=str(tmp_path / "open")).check()
    with pytest.raises(hf_ga.ConfigError, match=r"closed is read-only"):
        FinetuneConfig(output_dir=str(tmp_path / "closed" / "a" / "b")).check()


def test_an_evaluation_needs_a_model_and_may_write_beside_a_run(tmp_path):
    with pytest.raises(hf_ga.ConfigError, match="eval_only needs model_name_or_path"):
        FinetuneConfig(eval_only=True).check()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    FinetuneConfig(
        eval_only=True, model_name_or_path="gpt2", output_dir=str(tmp_path / "run")
    ).check()


def test_the_name_of_a_metric_may_be_that_of_the_log():
    config = FinetuneConfig(task="text-classification", metric_for_best_model="eval_f1")
    config.check()
    assert config.metric_for_best_model == "f1"
    assert not config.lower_is_better
    for name in ("loss", "perplexity"):  # the others: test_metrics.py
        assert FinetuneConfig(metric_for_best_model=name).lower_is_better
