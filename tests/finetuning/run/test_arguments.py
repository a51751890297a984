"""Flags of TrainingArguments and of transformers' example scripts: all of the installed version are
known, defaults are accepted, and what would change the training is converted or refused by name.
"""

import dataclasses
import json

import pytest
import transformers as tf

import hf_ga
from hf_ga.finetuning.run.accelerator import make_accelerator, precision_name
from hf_ga.finetuning.run.flags import arguments
from hf_ga.finetuning.run.flags.cli import finetune_main, parse_config
from hf_ga.finetuning.run.flags.config import FinetuneConfig

OWN = {field.name for field in dataclasses.fields(FinetuneConfig)}
FIELDS = {field.name: field.default for field in dataclasses.fields(tf.Seq2SeqTrainingArguments)}

OF_SCRIPTS = """model_name_or_path config_name tokenizer_name config_overrides model_type model_revision token trust_remote_code
    train_file validation_file test_file task_name dataset_name dataset_config_name max_seq_length max_length block_size
    line_by_line mlm_probability pad_to_max_length max_train_samples max_eval_samples max_predict_samples overwrite_cache
    preprocessing_num_workers validation_split_percentage text_column text_column_name summary_column label_column_name doc_stride
    n_best_size max_answer_length null_score_diff_threshold version_2_with_negative source_lang target_lang source_prefix
    max_source_length max_target_length val_max_target_length num_beams ignore_pad_token_for_loss resize_position_embeddings
    forced_bos_token lang return_entity_level_metrics keep_linebreaks streaming low_cpu_mem_usage cache_dir use_fast_tokenizer
    use_slow_tokenizer ignore_mismatched_sizes dtype torch_dtype with_tracking num_warmup_steps max_train_steps
    checkpointing_steps overwrite_output_dir warmup_ratio evaluation_strategy group_by_length"""


def test_every_field_of_the_installed_version_is_known():
    assert [
        name
        for name in (*FIELDS, *OF_SCRIPTS.split())
        if name not in {*OWN, *arguments.SCRIPT_FLAGS}
    ] == []
    names = arguments.SCRIPT_FLAGS
    assert len(names) == len(set(names))
    assert not set(names) & OWN
    assert set(arguments.RENAMED.values()) <= OWN


@pytest.mark.parametrize(
    "name", [name for name, value in FIELDS.items() if value not in (None, dataclasses.MISSING)]
)
def test_defaults_are_accepted(name, capsys):
    parse_config([f"--{name}", str(getattr(FIELDS[name], "value", FIELDS[name]))])
    printed = capsys.readouterr().out
    reasons = [reason for reason, flags in arguments.IGNORED.items() if name in flags.split()]
    assert not printed or reasons[0] in printed


def test_what_is_ignored_is_printed_once_for_each_reason(capsys):
    parse_config(["--log_level", "info", "--disable_tqdm", "--use_cache", "--eval_on_start", "no"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(None, 1) == [
        "flags",
        "log_level, disable_tqdm: messages only; "
        "use_cache: speed only, and hf_ga chooses its own speed-ups",
    ]


def test_defaults_of_a_script_are_those_of_training_arguments(capsys):
    assert {
        name: FIELDS[name] for name in arguments.TRAINING_DEFAULTS
    } == arguments.TRAINING_DEFAULTS
    parse_config(["--do_train", "--n_best_size", "20"])
    (line,) = capsys.readouterr().out.splitlines()
    assert "have the defaults of the example script" in line
    assert "n_best_size: the best span" in line
    assert parse_config(["--do_train", "false"]) == FinetuneConfig()


CONVERTED = {
    "--fp16": {"mixed_precision": "fp16"},
    "--bf16 True --warmup_ratio 0.1": {"mixed_precision": "bf16", "warmup_steps": 0.1},
    "--warmup_ratio 0.1 --warmup_steps 5": {"warmup_steps": 5.0},
    "--eval_strategy steps --save-strategy=steps": {"eval_steps": 500, "save_steps": 500},
    "--evaluation_strategy steps --eval_steps 7": {"eval_steps": 7},
    "--eval_strategy epoch --save_strategy no --load_best_model_at_end": {},
    "--checkpointing_steps 10 --num_warmup_steps 3 --max_train_steps 9": {
        "save_steps": 10,
        "warmup_steps": 3.0,
        "max_steps": 9,
    },
    "--optim adamw_torch_fused --max_steps -1 --greater_is_better False --data_seed 0": {},
    "--report_to wandb tensorboard": {"report_to": "wandb,tensorboard"},
    "--with_tracking --report_to wandb": {"report_to": "wandb"},
    "--with_tracking": {"report_to": "all"},
    "--do_eval --validation_file a.csv": {"eval_only": True, "validation_file": "a.csv"},
    "--do_predict --test_file a.csv b.csv": {"eval_only": True, "predict_file": ["a.csv", "b.csv"]},
    "--train_file a,b.csv c.csv --validation_file v.csv": {
        "dataset_name": ["a,b.csv", "c.csv"],
        "validation_file": "v.csv",
    },
    "--do_predict --test_file a.csv": {"eval_only": True, "predict_file": "a.csv"},
    "--task token-classification --task_name pos": {
        "task": "token-classification",
        "label_column": "pos_tags",
    },
    "--task regression --task_name stsb": {
        "task": "regression",
        "dataset_name": "nyu-mll/glue",
        "dataset_config_name": "stsb",
    },
    "--gradient_checkpointing_kwargs none --model_revision main --dtype auto --use_fast_tokenizer "
    "True": {},
    "--model_name_or_path m --tokenizer_name m": {"model_name_or_path": "m"},
    "--push_to_hub --hub_strategy end": {"push_to_hub": True},
    "--generation_max_length 9 --generation_num_beams 2": {"max_new_tokens": 9, "num_beams": 2},
}


@pytest.mark.parametrize("line", CONVERTED)
def test_converted(line):
    assert parse_config(line.split()) == dataclasses.replace(FinetuneConfig(), **CONVERTED[line])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--torch_compile_mode max-autotune", "use torch_compile alone"),
        ("--neftune_noise_alpha 5", "neftune_noise_alpha 5 is not supported"),
        ("--deepspeed ds.json", "use `accelerate launch` with a profile"),
        ("--average_tokens_across_devices False", "every update averages over all targets"),
        ("--train_sampling_strategy sequential", "batches are random"),
        (
            "--push_to_hub --hub_strategy every_save",
            "hub_strategy every_save is not supported: it must be end with --push_to_hub",
        ),
        ("--model_type gpt2", "save it with its tokenizer, and set model_name_or_path"),
        ("--tokenizer_name gpt2", "must equal --model_name_or_path"),
        ("--data_seed 7", "must equal --seed"),
        ("--greater_is_better True", "lower is better for loss"),
        ("--fp16 --bf16", "exclude each other"),
        ("--eval_strategy often", "unknown eval_strategy 'often'"),
        ("--task text-classification --task_name stsb", "--task regression"),
        ("--source_lang en_XX", "language code of a tokenizer"),
        ("--max_train_steps many", "invalid int value: 'many'"),
        ("--load_best_model_at_ends", "Did you mean --load_best_model_at_end?"),
    ],
)
def test_refused_in_one_line(line, message, capsys):
    assert finetune_main(line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--task run_clm", {"task": "causal-lm", "block_size": 1024, "max_grad_norm": 1.0}),
        ("--task run_clm_no_trainer", {"block_size": 1024, "max_grad_norm": 0.0}),
        ("--task run_mlm --max_seq_length 64", {"block_size": 64}),
        (
            "--task run_mlm --max_seq_length 64 --line_by_line",
            {"block_size": None, "max_length": 64},
        ),
        ("--task run_ner_no_trainer", {"task": "token-classification", "max_length": 128}),
        ("--task run_qa", {"max_length": 384, "doc_stride": 128}),
        ("--task run_qa --doc_stride 64", {"max_length": 384, "doc_stride": 64}),
        ("--task question-answering", {"max_length": 128, "doc_stride": None}),
        (
            "--task seq2seq --do_train --max_target_length 32",
            {"max_length": 1024, "max_target_length": 32},
        ),
        (
            "--task regression --do_train --weight_decay 0.1",
            {"max_length": 128, "weight_decay": 0.1, "seed": 42},
        ),
        ("--task run_glue --global_batch_size 64", {"gradient_accumulation_steps": None}),
        (
            "--task run_glue --global_batch_size 64 --gradient_accumulation_steps 8",
            {"gradient_accumulation_steps": 8},
        ),
        ("--task run_swag", {"dataset_name": "allenai/swag", "dataset_config_name": "regular"}),
    ],
)
def test_defaults_of_scripts(line, expected):
    config = parse_config(line.split())
    assert {name: getattr(config, name) for name in expected} == expected


def test_flags_that_set_the_accelerator(launched):
    launched("no")
    accelerator = make_accelerator(parse_config(["--bf16", "--fsdp_reduce_each_micro_batch"]))
    assert precision_name(accelerator).startswith("bf16 autocast")
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True


def test_a_list_in_a_file_has_no_more_than_its_items(tmp_path):
    """Neither the values after it nor words of the command line."""
    path = tmp_path / "run.yaml"
    path.write_text("freeze: [a, -b]\nrun_name: one run\nvalidation_file: [a.csv]\n")
    config = parse_config([str(path)])
    found = (config.freeze, config.run_name, config.validation_file)
    assert found == (["a", "-b"], "one run", "a.csv")
    with pytest.raises(hf_ga.ConfigError, match=r"unknown flag other\.yaml"):
        parse_config([str(path), "other.yaml"])


def test_a_file_takes_the_same_names(tmp_path):
    path = tmp_path / "run.json"
    entries = {
        "task": "run_glue",
        "do_train": True,
        "max_seq_length": 64,
        "weight_decay": 0.2,
        "report_to": "wandb",
    }
    path.write_text(json.dumps(entries))
    config = parse_config([str(path), "--num_train_epochs", "1"])
    found = (
        config.task,
        config.max_length,
        config.weight_decay,
        config.report_to,
        config.num_train_epochs,
        config.seed,
    )
    assert found == ("text-classification", 64, 0.2, "wandb", 1.0, 42)
    assert (
        parse_config([str(path), "--task", "run_ner", "--do_train=False"]).task
        == "token-classification"
    )
    path.write_text(json.dumps({"torch_compile_backend": "inductor"}))
    with pytest.raises(hf_ga.ConfigError, match="torch_compile_backend inductor is not supported"):
        parse_config([str(path)])
