"""Bad input: one line with rule, values and remedy, exit code 2, no traceback, no model built, no
file touched.
"""

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from accelerate.utils import DistributedType
from bad_files import ANSWER, CHOOSE, CLASSIFY, WRITE, arguments_of, assert_one_line
from runs import lines_of, small_config, train

import hf_ga
from hf_ga.finetuning.run import finetune
from hf_ga.finetuning.run.flags import cli
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.results import outputs
from hf_ga.finetuning.run.results.report import plot_curves

SCRIPT = Path(__file__).parents[3] / "scripts" / "finetune.py"

# Value, what it must be, flags.
LIMITS = [
    (
        "0",
        "at least 1",
        "per_device_train_batch_size per_device_eval_batch_size max_tokens_per_micro_batch "
        "save_total_limit",
    ),
    (
        "0",
        "at least 1",
        "gradient_accumulation_steps max_steps eval_steps save_steps early_stopping_patience "
        "lora_r",
    ),
    (
        "0",
        "at least 1",
        "max_new_tokens num_beams max_train_samples max_eval_samples max_predict_samples "
        "max_target_length doc_stride",
    ),
    ("-64", "at least 1", "global_batch_size"),
    ("1", "at least 2", "max_length block_size"),
    (
        "0",
        "greater than 0",
        "learning_rate num_train_epochs mlm_probability validation_split_percentage adam_epsilon",
    ),
    ("-0.1", "greater than 0", "learning_rate"),
    ("nan", "greater than 0", "learning_rate validation_split_percentage"),
    ("nan", "at least 0", "weight_decay max_grad_norm label_smoothing_factor"),
    (
        "-1",
        "at least 0",
        "seed warmup_steps dataloader_num_workers shuffle_buffer_size show_samples",
    ),
    ("1", "below 1", "label_smoothing_factor mlm_probability adam_beta1 adam_beta2"),
    ("100", "below 100", "validation_split_percentage"),
    ("4294967296", "at most 4294967295", "eval_steps seed"),
]
# name: arguments, words that the message must hold. {d} is the folder of FILES. --output_dir is
# {d}/out where it is left out.
CASES = {
    # values of flags
    "unknown task": (
        "--task summarise",
        ["unknown task 'summarise'", "causal-lm", "text-classification"],
    ),
    "unknown optimizer": ("--optim adamx", ["unknown optim 'adamx'", "adamw", "sgd"]),
    "unknown schedule": (
        "--lr_scheduler_type step",
        ["unknown lr_scheduler_type 'step'", "cosine", "linear"],
    ),
    "unknown pooling": ("--task embedding --pooling max", ["unknown pooling 'max'", "lasttoken"]),
    "half compiled": (
        "--torch_compile half",
        ["unknown torch_compile 'half': use one of True, False, auto"],
    ),
    "a temperature of 0": (
        "--task embedding --temperature 0",
        ["temperature must be greater than 0"],
    ),
    "vectors of 0 numbers": (
        "--task embedding --matryoshka_dims 0",
        ["matryoshka_dims must be at least 1"],
    ),
    "a temperature without embeddings": (
        "--learn_temperature",
        ["learn_temperature applies to the task embedding"],
    ),
    "two directions without embeddings": (
        "--symmetric_loss",
        ["symmetric_loss applies to the task embedding"],
    ),
    "unknown precision": ("--mixed_precision fp8", ["unknown mixed_precision 'fp8'", "bf16"]),
    "betas of another optimizer": (
        "--optim sgd --adam_beta2 0.98",
        ["apply to adamw, adam, nadam, radam, not sgd", "omit"],
    ),
    "unreachable global batch": (
        "--global_batch_size 64 --per_device_train_batch_size 8 --gradient_accumulation_steps 4",
        [
            "global_batch_size 64 cannot be reached",
            "gradient_accumulation_steps 4",
            "= 32",
            "would be 8",
        ],
    ),
    "endless epochs": ("--num_train_epochs inf", ["num_train_epochs", "finite", "got inf"]),
    "max_length beyond the positions": (
        "--max_length 65",
        ["max_length 65 is beyond the 64 positions", "at most 64"],
    ),
    "unknown metric": (
        f"{CLASSIFY} --metric_for_best_model eval_acc",
        ["unknown metric_for_best_model 'acc'", "loss, accuracy, f1"],
    ),
    "unknown tracker": (
        "--report_to tensorbord",
        ["report_to tensorbord is not an installed tracker", "none, all", "tensorboard"],
    ),
    "chunks that do not fit": (
        "--same_bits 9",
        ["per_device_train_batch_size 4", "one chunk of same_bits 9"],
    ),
    "dropout of LoRA alone": ("--lora_dropout 0.1", ["lora_dropout", "needs lora_r"]),
    "scale of LoRA alone": ("--lora_alpha 8", ["lora_alpha", "needs lora_r"]),
    "layers of LoRA alone": (
        "--lora_target_modules c_attn",
        ["lora_target_modules", "needs lora_r"],
    ),
    "magnitudes alone": ("--use_dora", ["use_dora needs lora_r"]),
    "whole modules alone": ("--lora_modules_to_save ln_f", ["lora_modules_to_save needs lora_r"]),
    "4 bits without adapters": (
        "--load_in_4bit",
        ["load_in_4bit needs lora_r or adapter_name_or_path"],
    ),
    "new and old adapters": (
        "--lora_r 2 --adapter_name_or_path a",
        ["lora_r and adapter_name_or_path exclude each other", "Omit one"],
    ),
    "freeze and LoRA": (
        "--freeze transformer.wte --lora_r 2",
        ["freeze and lora_r exclude each other", "Omit one"],
    ),
    "new rows that were never trained": (
        "--resize_token_embeddings --eval_only",
        ["resize_token_embeddings would evaluate new rows that were never trained", "omit it"],
    ),
    "smoothing of numbers": (
        "--task regression --label_smoothing_factor 0.1",
        ["applies to the task", "not regression"],
    ),
    "class weights of numbers": (
        "--task regression --class_weights balanced",
        ["class_weights applies to the task text-classification", "not regression"],
    ),
    "class weights of label sets": (
        "--task multi-label --class_weights balanced",
        ["class_weights applies to the task", "not multi-label"],
    ),
    "class weights in words": (
        f"{CLASSIFY} --class_weights even",
        ["class_weights must be balanced, or one number above 0", "got 'even'"],
    ),
    "a class weight of 0": (
        f"{CLASSIFY} --class_weights 1 0",
        ["class_weights must be greater than 0", "got 0.0"],
    ),
    "a class weight that is no number": (
        f"{CLASSIFY} --class_weights 1 nan",
        ["class_weights must be greater than 0 and finite", "got nan"],
    ),
    "class weights of other classes": (
        f"{CLASSIFY} --class_weights 1 2 3 --dataset_name {{d}}/good.jsonl",
        ["class_weights has 3 numbers for 2 labels", "in this order: 0, 1"],
    ),
    "balanced class weights in an evaluation": (
        f"{CLASSIFY} --class_weights balanced --eval_only --model_name_or_path {{d}}/bert",
        ["class_weights balanced counts", "eval_only", "give the numbers"],
    ),
    "balanced class weights of a stream": (
        f"{CLASSIFY} --class_weights balanced --streaming --max_steps 1 "
        "--dataset_name {d}/good.jsonl",
        ["class_weights balanced counts", "streaming", "give the numbers"],
    ),
    "weights of questions": (
        "--task question-answering --weight_column w",
        ["weight_column applies to the task causal-lm", "not question-answering"],
    ),
    "weights of blocks": (
        "--block_size 16 --weight_column w",
        ["weight_column and block_size exclude each other", "Omit one"],
    ),
    "no column of weights": (
        f"{CLASSIFY} --weight_column w --dataset_name {{d}}/good.jsonl",
        ["weight_column 'w' is not in the train rows", "text, label", "--weight_column"],
    ),
    "pair of a language model": (
        "--text_pair_column label",
        ["text_pair_column applies to the task", "not causal-lm"],
    ),
    "pair of one column": (
        f"{CLASSIFY} --text_pair_column text",
        ["text_column and text_pair_column", "'text', 'text'"],
    ),
    "blocks of a classifier": (
        f"{CLASSIFY} --block_size 16",
        ["block_size applies to the task causal-lm", "omit it"],
    ),
    "block beyond the positions": (
        "--block_size 65",
        ["block_size 65 is beyond the 64 positions", "at most 64"],
    ),
    "blocks of conversations": (
        "--block_size 16 --dataset_name {d}/messages.jsonl",
        ["block_size concatenates plain texts", "messages"],
    ),
    "samples of a classifier": (
        f"{CLASSIFY} --show_samples 2",
        ["show_samples applies to the task causal-lm, not text-classification"],
    ),
    "preferences": (
        "--dataset_name {d}/preferences.jsonl",
        [
            "labels of preferences",
            "completion, label have",
            "keep the completions",
        ],
    ),
    "predictions of a language model": (
        "--predict_file {d}/good.jsonl",
        ["predict_file applies to the task", "not causal-lm"],
    ),
    "missing file to predict": (
        f"{CLASSIFY} --predict_file {{d}}/absent.jsonl",
        ["absent.jsonl", "does not exist"],
    ),
    "no column to predict from": (
        f"{CLASSIFY} --predict_file {{d}}/no_text.jsonl",
        ["'text' is not in the predict rows", "body"],
    ),
    "evaluating and resuming": (
        "--eval_only --resume_from_checkpoint auto",
        ["eval_only and resume_from_checkpoint exclude each other", "model_name_or_path"],
    ),
    "writing with a decoder alone": (
        f"{WRITE} --dataset_name {{d}}/targets.jsonl",
        ["needs an encoder with a decoder", "--task causal-lm"],
    ),
    "more to write than positions": (
        f"{WRITE} --dataset_name {{d}}/targets.jsonl --model_name_or_path {{d}}/bart "
        "--predict_with_generate",
        ["max_new_tokens 64 must be below the 64 positions"],
    ),
    "choices of a language model": (
        "--choices_column x",
        ["choices_column applies to the task multiple-choice", "not causal-lm"],
    ),
    "prefix of a language model": (
        "--source_prefix x",
        ["source_prefix applies to the task seq2seq", "not causal-lm"],
    ),
    "target of a language model": (
        "--target_column x",
        ["target_column applies to the task seq2seq", "not causal-lm"],
    ),
    "generating for a classifier": (
        f"{CLASSIFY} --predict_with_generate",
        ["predict_with_generate applies to the task seq2seq"],
    ),
    "metric of no texts": (
        f"{WRITE} --metric_for_best_model rougeL",
        ["compares generated texts", "--predict_with_generate"],
    ),
    "unknown side": ("--truncation_side end", ["unknown truncation_side 'end'", "right, left"]),
    "a side of blocks": (
        "--truncation_side left --block_size 16",
        ["truncation_side and block_size exclude each other", "Omit one"],
    ),
    "windows of plain texts": (
        "--doc_stride 8",
        ["doc_stride applies to the task question-answering", "omit it"],
    ),
    "windows that share all their tokens": (
        f"{ANSWER} --doc_stride 32",
        ["doc_stride 32 must be below max_length 32"],
    ),
    "windows with long questions": (
        f"{ANSWER} --dataset_name {{d}}/long_question.jsonl --doc_stride 16",
        ["doc_stride 16 is not below the", "the question 'what is what", "lower doc_stride"],
    ),
    "windows that leave no room": (
        f"{ANSWER} --dataset_name {{d}}/answers.jsonl --doc_stride 30",
        ["doc_stride 30 is not below the 29 tokens", "3 special tokens"],
    ),
    # flags that nothing else asks about
    "what to do about numbers": (
        "--on_nonfinite ignore",
        ["unknown on_nonfinite 'ignore'", "stop, skip"],
    ),
    "changes without a checkpoint": (
        "--resume_with_changes",
        ["resume_with_changes needs resume_from_checkpoint"],
    ),
    "a part of the corpus": (
        "--dataset_name stdlib --dataset_config_name en",
        ["dataset_config_name has 1 values for 0 hub datasets among stdlib"],
    ),
    "test file without the column": (
        "--test_file {d}/no_text.jsonl",
        ["'text' is not in the test rows", "body, title"],
    ),
    # flags that contradict each other
    "stream without an end": (
        "--streaming --validation_file {d}/good.jsonl",
        ["streaming needs max_steps"],
    ),
    "stream of answers": (
        f"{ANSWER} --streaming --max_steps 2",
        ["streaming applies to the task causal-lm", "not question-answering"],
    ),
    "stream of a corpus in the order of its labels": (
        f"{CLASSIFY} --streaming --max_steps 2 --dataset_name stdlib",
        ["streaming does not support", "stdlib"],
    ),
    "stream in blocks": (
        "--streaming --max_steps 2 --block_size 8",
        ["streaming and block_size exclude each other"],
    ),
    "stream of some rows": (
        "--streaming --max_steps 2 --max_train_samples 8",
        ["streaming and max_train_samples exclude each other"],
    ),
    "stream to evaluate": (
        "--streaming --max_steps 2 --eval_only",
        ["streaming and eval_only exclude each other"],
    ),
    "stream with many readers": (
        "--streaming --max_steps 2 --dataloader_num_workers 2",
        ["streaming does not support dataloader_num_workers 2"],
    ),
    "stream without validation rows": (
        "--streaming --max_steps 2",
        ["has no validation rows", "--validation_file"],
    ),
    # the command line and its file
    "wrong truth value": ("--full_determinism perhaps", ["--full_determinism", "perhaps"]),
    "unknown flag": (
        "--learning_rat 1e-4",
        ["unknown flag --learning_rat.", "Did you mean --learning_rate?"],
    ),
    "unknown flag with dashes": (
        "--max-step=3",
        ["unknown flag --max-step.", "Did you mean --max-steps?"],
    ),
    "a word too many": ("--seed 1 extra", ["extra"]),
    "missing configuration": ("{d}/absent.yaml", ["cannot read", "absent.yaml", "No such file"]),
    "configuration of another kind": (
        "{d}/good.xyz",
        ["unexpected argument", "good.xyz", ".yaml or .json"],
    ),
    "malformed YAML": ("{d}/malformed.yaml", ["malformed.yaml is malformed", "line 2"]),
    "malformed JSON": ("{d}/malformed.json", ["malformed.json is malformed", "line 1"]),
    "YAML list": ("{d}/list.yaml", ["list.yaml must be a mapping of names to values", "list"]),
    "wrong type in YAML": ("{d}/wrong_type.yaml", ["--max_steps", "invalid int value", "'many'"]),
    "null in a list in YAML": (
        "{d}/null_in_list.yaml",
        ["freeze must be a list of strings", "None"],
    ),
    "fraction for a whole number in YAML": (
        "{d}/float_for_int.yaml",
        ["max_steps must be a whole number", "got 3.0"],
    ),
    "no UTF-8 in YAML": ("{d}/bytes.yaml", ["bytes.yaml is malformed", "utf-8"]),
    "unknown name in YAML": (
        "{d}/unknown_name.yaml",
        ["unknown flag --learning_rates.", "Did you mean --learning_rate?"],
    ),
    # data
    "missing file": ("--dataset_name {d}/absent.jsonl", ["absent.jsonl", "does not exist"]),
    "pattern without a match": (
        "--dataset_name {d}/absent-*.jsonl",
        ["no file matches the pattern", "absent-*.jsonl"],
    ),
    "files of two types": (
        "--validation_file {d}/good.jsonl {d}/header.csv",
        ["different types", "good.jsonl (json)", "header.csv (csv)"],
    ),
    "files of other columns": (
        "--dataset_name {d}/good.jsonl {d}/no_text.jsonl",
        ["different columns", "good.jsonl has label, text;", "no_text.jsonl has body, title."],
    ),
    "datasets of other columns": (
        "--dataset_name stdlib {d}/good.jsonl",
        ["different columns: stdlib has text;", "has label, text."],
    ),
    "one weight for two": (
        "--dataset_name {d}/good.jsonl stdlib --dataset_weights 1",
        ["dataset_weights [1.0] do not match the 2 of dataset_name"],
    ),
    "a weight of 0": (
        "--dataset_name {d}/good.jsonl stdlib --dataset_weights 1 0",
        ["[1.0, 0.0] do not match", "above 0"],
    ),
    "two configurations of one": (
        "--dataset_name me/rows stdlib --dataset_config_name en de",
        ["dataset_config_name has 2 values for 1 hub datasets among me/rows"],
    ),
    "missing folder": ("--dataset_name {d}/absent", ["absent", "does not exist", "stdlib"]),
    "unknown extension": (
        "--dataset_name {d}/good.xyz",
        ["good.xyz", "unknown extension", ".jsonl", ".parquet"],
    ),
    "key of no file": (
        "--dataset_name stdlib --field rows",
        ["field rows names a key of a JSON file", "stdlib is not a file", "omit it"],
    ),
    "key of lines": (
        "--dataset_name {d}/good.jsonl --field rows",
        ["field rows names a key", "good.jsonl has one row per line"],
    ),
    "key that is not there": (
        "--dataset_name {d}/nested.json --field rows",
        ["field rows: there is no list of rows", "version, data"],
    ),
    "several keys": (
        "--dataset_name {d}/keys.json",
        ["keys.json is one JSON object with several lists of rows (a, b)", "--field"],
    ),
    "pointer of git-lfs": (
        "--dataset_name {d}/pointer.parquet",
        ["pointer.parquet is a git-lfs pointer", "git lfs pull"],
    ),
    "fields without quotes": (
        "--dataset_name {d}/fields.csv",
        ["fields.csv have more fields than its header (text, label)", "double quotes"],
    ),
    "unknown hub dataset": ("--dataset_name nobody/nothing", ["cannot read nobody/nothing"]),
    "empty file": ("--dataset_name {d}/empty.jsonl", ["empty.jsonl is empty"]),
    "blank lines only": ("--dataset_name {d}/blank.jsonl", ["blank.jsonl"]),
    "header only": ("--dataset_name {d}/header.csv", ["header.csv has no rows"]),
    "one row": (
        "--dataset_name {d}/one_row.jsonl",
        ["1 training rows are too few", "--validation_file"],
    ),
    "missing named column": (
        "--text_column speech",
        ["text_column 'speech' is not", "text, label", "--text_column"],
    ),
    "label column is the text column": (
        f"{CLASSIFY} --label_column text",
        ["label_column", "text_column", "'text'"],
    ),
    "all texts empty": (
        "--dataset_name {d}/blank_texts.jsonl",
        ["rows are empty", "rows are empty"],
    ),
    "no targets": (
        "--dataset_name {d}/one_token.jsonl",
        ["none of the 8 train rows has a target", "at least 2 tokens"],
    ),
    "no room for a text": (
        f"{CLASSIFY} --max_length 2",
        ["error: max_length 2 leaves no room besides the 2 special tokens"],
    ),
    "validation folder": ("--validation_file {d}/gpt", ["gpt is a folder"]),
    "window larger than the data": (
        "--drop_last_window --global_batch_size 64",
        ["drop_last_window", "19 samples", "64", "smaller global batch"],
    ),
    # model
    "missing model folder": (
        "--model_name_or_path {d}/absent",
        ["cannot load", "absent", "hub id or a folder"],
    ),
    "folder without a model": (
        "--model_name_or_path {d}/no_folder",
        ["cannot load", "no_folder", "hub id or a folder"],
    ),
    "model without weights": (
        "--model_name_or_path {d}/no_weights",
        ["cannot load the model", "no_weights", "safetensors"],
    ),
    "max_length beyond the usable positions": (
        f"{CLASSIFY} --model_name_or_path {{d}}/roberta --max_length 63",
        ["max_length 63 is beyond the 62 positions"],
    ),
    # output
    "upload to nowhere": (
        "--push_to_hub --hub_model_id user/a--b --hub_private_repo",
        ["cannot upload to user/a--b", "hf auth login", "omit push_to_hub"],
    ),
    "output of another run": (
        "--output_dir {d}/used",
        ["used contains another run", "--resume_from_checkpoint", "delete it"],
    ),
    "output is a file": ("--output_dir {d}/good.xyz", ["good.xyz is a file", "folder"]),
    "output below a file": ("--output_dir {d}/good.xyz/run", ["good.xyz", "is a file", "folder"]),
    "resume from no checkpoint": (
        "--resume_from_checkpoint {d}/used",
        ["used is not a checkpoint", "manifest.json"],
    ),
    "resume from a missing folder": (
        "--resume_from_checkpoint {d}/absent",
        ["absent", "checkpoint"],
    ),
}

for value, rule, flags in LIMITS:
    CASES |= {
        f"{flag} {value}": (f"--{flag}={value}", [f"{flag} must be {rule}", f"got {value}"])
        for flag in flags.split()
    }


def content(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(arguments: list[str], words: list[str], capsys) -> None:
    assert cli.finetune_main(arguments) == 2
    assert_one_line(capsys.readouterr().err, words)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, files, tmp_path, capsys):
    text, words = CASES[name]
    before = content(files)
    refused(arguments_of(text, files, tmp_path / "out"), words, capsys)
    assert content(files) == before
    assert not (tmp_path / "out").exists()


# Flags that no value makes wrong, whatever the others are; a value of another type does, see
# `test_wrong_types`.
CANNOT_BE_WRONG = {
    "trust_remote_code": "says nothing where no model is named",
    "gradient_checkpointing": "only the class of the built model knows whether it can",
    "fsdp_reduce_each_micro_batch": "says nothing where weights are not cut into shards",
    "allow_split_dependent_randomness": "only allows",
    "torch_compile": "layers that cannot be compiled run as they are",
    "tf32": "only allows, on a GPU",
    "run_name": "any name",
    "project": "any name",
}
FIELDS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}


def asked_about() -> set[str]:
    """The flags of all cases."""
    return {
        word.lstrip("-").partition("=")[0]
        for text, _ in CASES.values()
        for word in text.split()
        if word.startswith("--")
    }


def test_every_flag_has_a_case():
    """A new flag needs a wrong value in CASES, or a reason why there is none."""
    assert set(FIELDS) - asked_about() <= set(CANNOT_BE_WRONG) <= set(FIELDS)
    assert all(
        FIELDS[name].type is bool or reason == "any name"
        for name, reason in CANNOT_BE_WRONG.items()
    )


# What is no value of a flag: on the command line, in a file, in Python; and the words of the
# message.
NO_VALUES = {
    int: (
        [("ten", "invalid int value"), ("1.5", "invalid int value"), ("nan", "invalid int value")],
        [1.5, True, "3", [1], {}],
    ),
    float: (
        [("much", "invalid float value"), ("1,5", "invalid float value")],
        [True, "3", [1.0], {}],
    ),
    bool: ([("perhaps", "perhaps"), ("2", "2")], [1, "true", [True], {}]),
    str: ([("", "is an empty string")], [5, True, ["a", 1], {}, []]),
    list[str]: ([("", "is an empty string")], [5, "a", [1], {}, [""]]),
    list[float]: ([("much", "invalid float value")], [5, "a", ["1"], {}, [True]]),
    list[int]: ([("1.5", "invalid int value")], [5, "a", ["1"], {}, [True], [1.5]]),
}
TYPED = {
    name: next(kind for kind in NO_VALUES if kind in (hint if isinstance(hint, tuple) else (hint,)))
    for name, hint in (
        (n, get_args(h) or h) if get_origin(h) is not list else (n, h)
        for n, h in get_type_hints(FinetuneConfig).items()
    )
}


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_types(name, tmp_path, monkeypatch, capsys):
    """Every flag refuses what is of another type, wherever it is given: in one line that names
    it.
    """
    monkeypatch.chdir(tmp_path)
    texts, values = NO_VALUES[TYPED[name]]
    for text, words in texts:
        refused([f"--{name}={text}"], [name, words], capsys)
    in_turn = ({"a": 1}, [{"a": 1}], [["a"]])
    value = in_turn[list(FIELDS).index(name) % len(in_turn)]
    (tmp_path / "run.json").write_text(json.dumps({name: value}))
    refused([str(tmp_path / "run.json")], [f"{name} must be"], capsys)
    for value in [*values, *([] if FIELDS[name].default is None else [None])]:
        with pytest.raises(hf_ga.ConfigError, match=rf"^(unknown )?{name} (must|is|.*use)"):
            FinetuneConfig(**{name: value}).check()


@pytest.mark.usefixtures("no_model")
def test_good_input_reaches_the_model(files, tmp_path):
    """The control of the table: nothing else in its arguments is refused, and the trap for built
    models works.
    """
    files_of = {ANSWER: "answers", CHOOSE: "choices"}
    for task in (
        "",
        CLASSIFY,
        *(f"{task} --dataset_name {{d}}/{file}.jsonl" for task, file in files_of.items()),
    ):
        with pytest.raises(AssertionError, match="was built before"):
            cli.finetune_main(arguments_of(task, files, tmp_path / "out"))


@pytest.mark.usefixtures("no_model")
def test_mixed_precision(files, tmp_path, capsys, launched):
    launched("fp8")
    refused(arguments_of("", files, tmp_path / "out"), ["Accelerate cannot start", "fp8"], capsys)


@pytest.mark.usefixtures("no_model")
def test_deepspeed(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        finetune.Accelerator, "distributed_type", property(lambda self: DistributedType.DEEPSPEED)
    )
    refused(
        arguments_of("", files, tmp_path / "out"),
        ["unsupported: DEEPSPEED", "averages over targets", "accelerate_configs"],
        capsys,
    )


def exit_code(monkeypatch, *arguments) -> int:
    """Of scripts/finetune.py."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code


@pytest.mark.slow("two runs")
def test_the_script_makes_the_run_of_the_function(place, tmp_path, monkeypatch):
    """The whole way that a user goes, with curves; in a process of its own in the tests of README's
    commands.
    """
    monkeypatch.setattr(outputs, "plot_curves", plot_curves)
    settings = {"max_steps": 2, "eval_steps": 2}
    config = small_config(place, tmp_path / "out", **settings).to_dict()
    (tmp_path / "run.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    assert exit_code(monkeypatch, tmp_path / "run.json") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == len(lines_of(tmp_path / "out")) == 2
    files = {"metrics.jsonl", "summary.json", "curves.png", "checkpoint-2", "best"}
    model = {"config.json", "model.safetensors", "tokenizer.json"}
    found = set(os.listdir(tmp_path / "out"))
    assert files | model <= found
    assert not [name for name in found if "partial" in name]
    assert model <= set(os.listdir(tmp_path / "out" / "best"))
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (
        train(place, tmp_path / "again", **settings)["weights_sha256"] == summary["weights_sha256"]
    )


def test_bad_input_of_the_script(monkeypatch, capsys):
    assert exit_code(monkeypatch, "--learning_rat", "1e-4") == 2
    assert_one_line(capsys.readouterr().err, CASES["unknown flag"][1])
