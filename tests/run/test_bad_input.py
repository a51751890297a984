"""Bad input: one line with rule, values and remedy, exit code 2, no traceback, no model built, no file touched."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import datasets
import pytest
import transformers as tf
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import hf_ga
from hf_ga.data import corpus
from hf_ga.run import cli, finetune
from hf_ga.run.config import FinetuneConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
VALID = "--num_train_epochs 1 --per_device_train_batch_size 4 --max_length 32"
CLASSIFY = "--task text-classification"
ANSWER, CHOOSE, WRITE = "--task question-answering", "--task multiple-choice", "--task seq2seq"


def rows(*values: dict) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def asked(context: str, text: str, start: int, question: str = "what?") -> dict:
    return {"question": question, "context": context, "answers": {"text": [text], "answer_start": [start]}}


FILES = {
    "good.jsonl": rows(*({"text": f"word {i} " * (1 + i % 5), "label": i % 2} for i in range(20))),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "broken.jsonl": '{"text": "one"}\n{"text": \n',
    "broken.csv": 'text,label\none,1\n"two,2,3,4\nthree,3,3,3\n',
    "header.csv": "text,label\n",
    "no_text.jsonl": rows({"body": "a b", "title": "c"}, {"body": "d e", "title": "f"}),
    "no_label.jsonl": rows(*({"text": "some words"} for _ in range(9))),
    "numbers.jsonl": rows(*({"text": i} for i in range(9))),
    "lists.jsonl": rows(*({"text": ["a", "b"]} for i in range(9))),
    "blank_texts.jsonl": rows(*({"text": ""} for _ in range(9))),
    "one_token.jsonl": rows(*({"text": "<eos>"} for _ in range(9))),
    "new_label.jsonl": rows({"text": "a b c", "label": 7}),
    "float_labels.jsonl": rows(*({"text": "a b c", "label": i / 2} for i in range(9))),
    "list_labels.jsonl": rows(*({"text": "a b c", "label": [i, 1]} for i in range(9))),
    "null_labels.jsonl": rows(*({"text": "a b c", "label": None} for i in range(9))),
    "one_label.jsonl": rows(*({"text": "a b c", "label": "same"} for i in range(9))),
    "one_row.jsonl": rows({"text": "a b c"}),
    "numbers_wanted.jsonl": rows(*({"text": "a b c", "label": f"{i} stars"} for i in range(9))),
    "no_number.jsonl": rows(*({"text": "a b c", "label": None if i == 4 else i / 2} for i in range(9))),
    "tags.jsonl": rows(*({"tokens": ["a", "b"], "tags": ["x", "y"][: 1 + i % 2]} for i in range(9))),
    "messages.jsonl": rows(*({"messages": [{"role": "user", "content": "a"}]} for _ in range(9))),
    "answers.jsonl": rows(*(asked("some words", "words", 5) for _ in range(9))),
    "misplaced.jsonl": rows(*(asked("some words", "words", 4 if i == 6 else 5) for i in range(9))),
    "answer_numbers.jsonl": rows(*({"question": "a", "context": "b c", "answers": {"text": ["c"]}} for _ in range(9))),
    "long_question.jsonl": rows(*(asked("some words", "words", 5, question="why " * 40) for _ in range(9))),
    "choices.jsonl": rows(*({"question": "a", "choices": ["b", "c"], "label": i % 2} for i in range(9))),
    "ragged_choices.jsonl": rows(*({"question": "a", "choices": ["b", "c", "d"][: 3 - (i == 6)], "label": 0} for i in range(9))),
    "beyond_choices.jsonl": rows(*({"question": "a", "choices": ["b", "c"], "label": 2 * (i == 6)} for i in range(9))),
    "one_choice.jsonl": rows(*({"question": "a", "choices": ["b"], "label": 0} for i in range(9))),
    "text_choices.jsonl": rows(*({"question": "a", "choices": "b, c", "label": 0} for i in range(9))),
    "targets.jsonl": rows(*({"source": "a b", "target": "c"} for _ in range(9))),
    "number_targets.jsonl": rows(*({"source": "a b", "target": i} for i in range(9))),
    "blank_targets.jsonl": rows(*({"source": "a b", "target": ""} for _ in range(9))),
    "good.xyz": "some text\n",
    "good.yaml": "max_steps: 3\n",
    "malformed.yaml": "max_steps: [3\nseed: 1\n",
    "malformed.json": '{"max_steps": 3,}',
    "list.yaml": "- max_steps\n- seed\n",
    "nothing.yaml": "",
    "wrong_type.yaml": "max_steps: many\n",
    "nested.yaml": "text_column: [a, b]\n",
    "dict_in_list.yaml": "freeze: [{a: 1}]\n",
    "null_in_list.yaml": "freeze: [a, null]\n",
    "flag_in_list.yaml": "freeze: [a, --seed=5]\n",
    "empty_list.yaml": "freeze: []\n",
    "float_for_int.yaml": "max_steps: 3.0\n",
    "code.yaml": "seed: !!python/object/apply:os.getpid []\n",
    "bytes.yaml": b"seed: \xff\xfe",
    "bytes.json": b'{"seed": "\xff"}',
    "unknown_name.yaml": "learning_rates: 0.1\n",
    "used/metrics.jsonl": '{"step": 1}\n',
    "half/dataset_dict.json": '{"splits": ["train"]}',
    "no_weights/config.json": '{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300}',
    "no_folder/notes.txt": "no model here",
}

# name: arguments, words that the message must hold. {d} is the folder of FILES. --output_dir is {d}/out where it is left out.
CASES = {
    # values of flags
    "unknown task": ("--task summarise", ["unknown task 'summarise'", "causal-lm", "text-classification"]),
    "unknown optimizer": ("--optim adamx", ["unknown optim 'adamx'", "adamw", "sgd"]),
    "unknown schedule": ("--lr_scheduler_type step", ["unknown lr_scheduler_type 'step'", "cosine", "linear"]),
    "batch size 0": ("--per_device_train_batch_size 0", ["per_device_train_batch_size must be at least 1", "got 0"]),
    "negative batch size": ("--per_device_train_batch_size=-4", ["per_device_train_batch_size must be at least 1", "got -4"]),
    "evaluation batch size 0": ("--per_device_eval_batch_size 0", ["per_device_eval_batch_size must be at least 1", "got 0"]),
    "accumulation 0": ("--gradient_accumulation_steps 0", ["gradient_accumulation_steps must be at least 1", "got 0"]),
    "no tokens": ("--max_tokens_per_micro_batch 0", ["max_tokens_per_micro_batch must be at least 1", "got 0"]),
    "negative global batch": ("--global_batch_size -64", ["global_batch_size must be at least 1", "got -64"]),
    "unreachable global batch": (
        "--global_batch_size 64 --per_device_train_batch_size 8 --gradient_accumulation_steps 4",
        ["global_batch_size 64 cannot be reached", "gradient_accumulation_steps 4", "= 32", "would be 8"],
    ),
    "negative learning rate": ("--learning_rate -0.1", ["learning_rate must be greater than 0", "got -0.1"]),
    "negative learning rate with exponent": ("--learning_rate=-1e-4", ["learning_rate must be greater than 0", "got -0.0001"]),
    "learning rate 0": ("--learning_rate 0", ["learning_rate must be greater than 0", "got 0"]),
    "learning rate nan": ("--learning_rate nan", ["learning_rate must be greater than 0", "got nan"]),
    "learning rate inf": ("--learning_rate inf", ["learning_rate", "finite", "got inf"]),
    "weight decay inf": ("--weight_decay inf", ["weight_decay", "finite", "got inf"]),
    "weight decay nan": ("--weight_decay nan", ["weight_decay must be at least 0", "got nan"]),
    "clip at nan": ("--max_grad_norm nan", ["max_grad_norm must be at least 0", "got nan"]),
    "endless epochs": ("--num_train_epochs inf", ["num_train_epochs", "finite", "got inf"]),
    "no epochs": ("--num_train_epochs 0", ["num_train_epochs must be greater than 0", "got 0"]),
    "negative seed": ("--seed -1", ["seed", "at least 0", "got -1"]),
    "seed beyond 32 bits": ("--seed 4294967296", ["seed", "4294967295", "got 4294967296"]),
    "max_length 1": ("--max_length 1", ["max_length must be at least 2", "got 1"]),
    "max_length beyond the positions": ("--max_length 65", ["max_length 65 is beyond the 64 positions", "at most 64"]),
    "max_steps 0": ("--max_steps 0", ["max_steps must be at least 1", "got 0"]),
    "negative warm-up": ("--warmup_steps -1", ["warmup_steps must be at least 0", "got -1"]),
    "eval_steps 0": ("--eval_steps 0", ["eval_steps must be at least 1", "got 0"]),
    "save_steps 0": ("--save_steps 0", ["save_steps must be at least 1", "got 0"]),
    "no checkpoints to keep": ("--save_total_limit 0", ["save_total_limit must be at least 1", "got 0"]),
    "all rows for validation": ("--validation_split_percentage 100", ["validation_split_percentage must be below 100", "100"]),
    "metric of another task": (
        "--metric_for_best_model accuracy",
        ["unknown metric_for_best_model 'accuracy'", "loss, perplexity"],
    ),
    "unknown metric": (
        f"{CLASSIFY} --metric_for_best_model eval_acc",
        ["unknown metric_for_best_model 'acc'", "loss, accuracy, f1"],
    ),
    "no patience": ("--early_stopping_patience 0", ["early_stopping_patience must be at least 1", "got 0"]),
    "unknown tracker": ("--report_to tensorbord", ["report_to tensorbord is not an installed tracker", "none, all", "tensorboard"]),
    "missing tracker": (
        "--report_to tensorboard,comet_ml",
        ["report_to comet_ml is not an installed tracker", "install its package"],
    ),
    "rank 0": ("--lora_r 0", ["lora_r must be at least 1", "got 0"]),
    "scale of LoRA 0": ("--lora_r 2 --lora_alpha 0", ["lora_alpha must be greater than 0", "got 0"]),
    "negative dropout in LoRA": ("--lora_r 2 --lora_dropout -0.1", ["lora_dropout must be at least 0", "got -0.1"]),
    "dropout of all in LoRA": ("--lora_r 2 --lora_dropout 1", ["lora_dropout must be below 1", "got 1"]),
    "dropout of LoRA alone": ("--lora_dropout 0.1", ["lora_dropout", "need lora_r"]),
    "scale of LoRA alone": ("--lora_alpha 8", ["lora_alpha", "need lora_r"]),
    "layers of LoRA alone": ("--lora_target_modules c_attn", ["lora_target_modules", "need lora_r"]),
    "freeze and LoRA": ("--freeze transformer.wte --lora_r 2", ["freeze has no effect with lora_r", "omit one"]),
    "share of masks 0": ("--task masked-lm --mlm_probability 0", ["mlm_probability must be greater than 0", "got 0"]),
    "share of masks 1": ("--task masked-lm --mlm_probability 1", ["mlm_probability must be below 1", "got 1"]),
    "smoothing of all": ("--label_smoothing_factor 1", ["label_smoothing_factor must be below 1", "got 1"]),
    "negative smoothing": ("--label_smoothing_factor -0.1", ["label_smoothing_factor must be at least 0", "got -0.1"]),
    "smoothing nan": ("--label_smoothing_factor nan", ["label_smoothing_factor must be at least 0", "got nan"]),
    "smoothing of numbers": (
        "--task regression --label_smoothing_factor 0.1",
        ["applies to the task", "not regression"],
    ),
    "pair of a language model": ("--text_pair_column label", ["text_pair_column applies to the task", "not causal-lm"]),
    "missing pair": (
        f"{CLASSIFY} --text_pair_column second",
        ["text_pair_column 'second' is not in the train rows", "text, label"],
    ),
    "pair of one column": (f"{CLASSIFY} --text_pair_column text", ["text_column and text_pair_column", "'text', 'text'"]),
    "block of one token": ("--block_size 1", ["block_size must be at least 2", "got 1"]),
    "blocks of a classifier": (f"{CLASSIFY} --block_size 16", ["block_size applies to the task causal-lm", "omit it"]),
    "block beyond the positions": ("--block_size 65", ["block_size 65 is beyond the 64 positions", "at most 64"]),
    "blocks of conversations": (
        "--block_size 16 --dataset_name {d}/messages.jsonl",
        ["block_size concatenates plain texts", "messages", "omit block_size"],
    ),
    "no new tokens": ("--max_new_tokens 0", ["max_new_tokens must be at least 1", "got 0"]),
    "predictions of a language model": (
        "--predict_file {d}/good.jsonl",
        ["predict_file applies to the task text-classification", "not causal-lm"],
    ),
    "missing file to predict": (f"{CLASSIFY} --predict_file {{d}}/absent.jsonl", ["absent.jsonl", "does not exist"]),
    "file to predict of another kind": (f"{CLASSIFY} --predict_file {{d}}/good.xyz", ["good.xyz", "unknown extension", ".jsonl"]),
    "file to predict without the column": (
        f"{CLASSIFY} --predict_file {{d}}/no_text.jsonl",
        ["text_column 'text' is not in the predict rows", "body, title"],
    ),
    "evaluating and resuming": (
        "--eval_only --resume_from_checkpoint auto",
        ["eval_only does not resume", "model_name_or_path"],
    ),
    "evaluating a missing file": ("--eval_only --validation_file {d}/absent.jsonl", ["absent.jsonl", "does not exist"]),
    "evaluating a missing column": (
        f"{CLASSIFY} --eval_only --validation_file {{d}}/no_label.jsonl",
        ["label_column 'label' is not in the validation rows", "--label_column"],
    ),
    "names for numbers": (
        "--task regression --dataset_name {d}/numbers_wanted.jsonl",
        ["regression must be finite float32 numbers", "stars"],
    ),
    "a number missing": (
        "--task regression --dataset_name {d}/no_number.jsonl",
        ["regression must be finite float32 numbers", "1 of 8 train rows have None"],
    ),
    "one label for a list": ("--task multi-label", ["labels must be lists", "19 of 19 train rows have 0", "--label_column"]),
    "a tag missing": (
        "--task token-classification --dataset_name {d}/tags.jsonl",
        ["every word needs one tag", "(['a', 'b'], ['x'])"],
    ),
    "an answer somewhere else": (
        f"{ANSWER} --dataset_name {{d}}/misplaced.jsonl --validation_file {{d}}/answers.jsonl",
        ["answers must be in their contexts", "1 of 9 train rows", "('words', 4)"],
    ),
    "answers of another shape": (
        f"{ANSWER} --dataset_name {{d}}/answer_numbers.jsonl",
        ["answers must be", "8 of 8 train rows", '"answer_start"'],
    ),
    "no answers": (f"{ANSWER} --dataset_name {{d}}/good.jsonl", ["text_column 'question' is not", "--text_column"]),
    "a question that fills a sample": (
        f"{ANSWER} --dataset_name {{d}}/long_question.jsonl",
        ["cannot read the train rows", "too short to respect the provided max_length"],
    ),
    "another number of choices": (
        f"{CHOOSE} --dataset_name {{d}}/ragged_choices.jsonl --validation_file {{d}}/choices.jsonl",
        ["all rows need the same number of choices", "rows with 2 and 3"],
    ),
    "a label beyond the choices": (
        f"{CHOOSE} --dataset_name {{d}}/choices.jsonl --validation_file {{d}}/beyond_choices.jsonl",
        ["a label must be", "1 of 9 validation rows", "'label': 2"],
    ),
    "one choice": (
        f"{CHOOSE} --dataset_name {{d}}/one_choice.jsonl",
        ["same number of choices, and at least 2", "rows with 1"],
    ),
    "choices in one text": (
        f"{CHOOSE} --dataset_name {{d}}/text_choices.jsonl",
        ["choices must be lists of strings", "b, c", "--choices_column"],
    ),
    "no choices": (f"{CHOOSE} --dataset_name {{d}}/good.jsonl", ["choices_column 'choices' is not", "--choices_column"]),
    "targets of numbers": (
        f"{WRITE} --dataset_name {{d}}/number_targets.jsonl",
        ["target_column must name a column of strings", "have 0, 1, 2", "--target_column"],
    ),
    "no target column": (f"{WRITE} --text_column text --dataset_name {{d}}/good.jsonl", ["target_column 'target'", "text, label"]),
    "targets without a word": (f"{WRITE} --dataset_name {{d}}/blank_targets.jsonl", ["none of the 8 train rows has a target"]),
    "writing with a decoder alone": (
        f"{WRITE} --dataset_name {{d}}/targets.jsonl",
        ["seq2seq needs an encoder with a decoder", "a gpt2 has only one", "--task causal-lm"],
    ),
    "more to write than positions": (
        f"{WRITE} --dataset_name {{d}}/targets.jsonl --model_name_or_path {{d}}/bart --predict_with_generate",
        ["max_new_tokens 64 must be below the 64 positions"],
    ),
    "choices of a language model": ("--choices_column x", ["choices_column applies to the task multiple-choice", "not causal-lm"]),
    "target of a language model": ("--target_column x", ["target_column applies to the task seq2seq", "not causal-lm"]),
    "generating for a classifier": (f"{CLASSIFY} --predict_with_generate", ["predict_with_generate applies to the task seq2seq"]),
    "metric of texts that are not generated": (
        f"{WRITE} --metric_for_best_model rougeL",
        ["metric_for_best_model rougeL compares generated texts", "--predict_with_generate"],
    ),
    "smoothing of answers": (
        f"{ANSWER} --label_smoothing_factor 0.1",
        ["applies to the task", "not question-answering"],
    ),
    "smoothing of choices": (
        f"{CHOOSE} --label_smoothing_factor 0.1",
        ["applies to the task", "not multiple-choice"],
    ),
    "no beams": (f"{WRITE} --num_beams 0", ["num_beams must be at least 1", "got 0"]),
    "conversations without a template": ("--dataset_name {d}/messages.jsonl", ["no chat template", "columns of strings"]),
    # flags that nothing else asks about
    "what to do about numbers": ("--on_nonfinite ignore", ["unknown on_nonfinite 'ignore'", "stop, skip"]),
    "changes without a checkpoint": (
        "--resume_with_changes",
        ["resume_with_changes needs a checkpoint", "resume_from_checkpoint"],
    ),
    "negative workers": ("--dataloader_num_workers -1", ["dataloader_num_workers must be at least 0", "got -1"]),
    "negative buffer": ("--shuffle_buffer_size=-1", ["shuffle_buffer_size must be at least 0", "got -1"]),
    "more than 32 bits": ("--eval_steps 4294967296", ["eval_steps must be at most 4294967295", "got 4294967296"]),
    "an endless number": (f"--save_steps {'9' * 300}", ["save_steps must be at most 4294967295", "got 9999"]),
    "share of the rows nan": (
        "--validation_split_percentage nan",
        ["validation_split_percentage must be greater than 0", "got nan"],
    ),
    "a part of the corpus": (
        "--dataset_name stdlib --dataset_config_name en",
        ["dataset_config_name en applies to hub datasets only, not to stdlib"],
    ),
    "a part of a file": ("--dataset_config_name en", ["dataset_config_name en applies to hub datasets only", "good.jsonl"]),
    "a part of an unknown dataset": ("--dataset_name nobody/nothing --dataset_config_name en", ["cannot read nobody/nothing"]),
    "test file without the column": ("--test_file {d}/no_text.jsonl", ["'text' is not in the test rows", "body, title"]),
    "evaluating without a model to name": (
        "--eval_only --model_name_or_path {d}/absent",
        ["cannot load the tokenizer of model_name_or_path", "absent"],
    ),
    # flags that contradict each other
    "stream without an end": ("--streaming --validation_file {d}/good.jsonl", ["streaming needs max_steps"]),
    "stream of a corpus": ("--streaming --max_steps 2 --dataset_name stdlib", ["streaming does not support", "stdlib"]),
    "stream of answers": (f"{ANSWER} --streaming --max_steps 2", ["streaming does not support the task question-answering"]),
    "stream in blocks": ("--streaming --max_steps 2 --block_size 8", ["streaming does not support block_size"]),
    "stream to evaluate": ("--streaming --max_steps 2 --eval_only", ["streaming does not support eval_only"]),
    "stream with many readers": (
        "--streaming --max_steps 2 --dataloader_num_workers 2",
        ["streaming does not support dataloader_num_workers 2", "one worker reads ahead"],
    ),
    "stream without validation rows": ("--streaming --max_steps 2", ["has no validation rows", "--validation_file"]),
    "stream of a missing file": (
        "--streaming --max_steps 2 --dataset_name {d}/absent.jsonl --validation_file {d}/good.jsonl",
        ["absent.jsonl", "does not exist"],
    ),
    "stream of broken lines": (
        "--streaming --max_steps 2 --dataset_name {d}/broken.jsonl --validation_file {d}/good.jsonl",
        ["cannot read", "broken.jsonl: ArrowInvalid: JSON parse error"],
    ),
    # the command line and its file
    "wrong type": ("--max_steps ten", ["--max_steps", "invalid int value", "'ten'"]),
    "wrong truth value": ("--full_determinism perhaps", ["--full_determinism", "perhaps"]),
    "unknown flag": ("--learning_rat 1e-4", ["unknown flag --learning_rat.", "Did you mean --learning_rate?"]),
    "unknown flag with dashes": ("--max-step=3", ["unknown flag --max-step.", "Did you mean --max-steps?"]),
    "shortened flag": ("--per_device_train 3", ["unknown flag --per_device_train.", "Did you mean --per_device_train_batch_size?"]),
    "a word too many": ("--seed 1 extra", ["extra"]),
    "missing configuration": ("{d}/absent.yaml", ["cannot read", "absent.yaml", "No such file"]),
    "configuration of another kind": ("{d}/good.xyz", ["unexpected argument", "good.xyz", ".yaml or .json"]),
    "malformed YAML": ("{d}/malformed.yaml", ["malformed.yaml is malformed", "line 2"]),
    "malformed JSON": ("{d}/malformed.json", ["malformed.json is malformed", "line 1"]),
    "YAML list": ("{d}/list.yaml", ["list.yaml must be a mapping of names to values", "list"]),
    "empty YAML": ("{d}/nothing.yaml", ["nothing.yaml must be a mapping of names to values"]),
    "wrong type in YAML": ("{d}/wrong_type.yaml", ["--max_steps", "invalid int value", "'many'"]),
    "list for a value in YAML": ("{d}/nested.yaml", ["text_column must be a string", "list"]),
    "dict in a list in YAML": ("{d}/dict_in_list.yaml", ["freeze must be a list of strings", "[{'a': 1}]"]),
    "null in a list in YAML": ("{d}/null_in_list.yaml", ["freeze must be a list of strings", "None"]),
    "fraction for a whole number in YAML": ("{d}/float_for_int.yaml", ["max_steps must be a whole number", "got 3.0"]),
    "code in YAML": ("{d}/code.yaml", ["code.yaml is malformed", "could not determine a constructor", "python/object/apply"]),
    "no UTF-8 in YAML": ("{d}/bytes.yaml", ["bytes.yaml is malformed", "utf-8"]),
    "no UTF-8 in JSON": ("{d}/bytes.json", ["bytes.json is malformed", "utf-8"]),
    "unknown name in YAML": ("{d}/unknown_name.yaml", ["unknown flag --learning_rates.", "Did you mean --learning_rate?"]),
    # data
    "missing file": ("--dataset_name {d}/absent.jsonl", ["absent.jsonl", "does not exist"]),
    "missing relative file": ("--dataset_name absent.csv", ["absent.csv", "does not exist"]),
    "missing folder": ("--dataset_name {d}/absent", ["absent", "does not exist", "stdlib"]),
    "missing validation file": ("--validation_file {d}/absent.jsonl", ["absent.jsonl", "does not exist"]),
    "unknown extension": ("--dataset_name {d}/good.xyz", ["good.xyz", "unknown extension", ".jsonl", ".parquet"]),
    "unknown extension of a test file": ("--test_file {d}/good.xyz", ["good.xyz", "unknown extension", ".jsonl"]),
    "embedded corpus without labels": (
        f"{ANSWER} --dataset_name stdlib",
        ["the embedded corpus has no data for question-answering", "--dataset_name"],
    ),
    "unknown hub dataset": ("--dataset_name nobody/nothing", ["cannot read nobody/nothing"]),
    "empty file": ("--dataset_name {d}/empty.jsonl", ["empty.jsonl is empty"]),
    "blank lines only": ("--dataset_name {d}/blank.jsonl", ["blank.jsonl"]),
    "empty validation file": ("--validation_file {d}/empty.jsonl", ["empty.jsonl is empty"]),
    "malformed JSON lines": ("--dataset_name {d}/broken.jsonl", ["cannot read", "broken.jsonl: ArrowInvalid: JSON parse error"]),
    "malformed CSV": ("--dataset_name {d}/broken.csv", ["cannot read", "broken.csv"]),
    "malformed folder": ("--dataset_name {d}/half", ["cannot read", "half"]),
    "header only": ("--dataset_name {d}/header.csv", ["header.csv has no rows"]),
    "validation file with a header only": ("--validation_file {d}/header.csv", ["header.csv has no rows"]),
    "one row": ("--dataset_name {d}/one_row.jsonl", ["1 training rows are too few", "--validation_file"]),
    "missing text column": ("--dataset_name {d}/no_text.jsonl", ["text_column 'text' is not", "body, title", "--text_column"]),
    "missing named column": ("--text_column speech", ["text_column 'speech' is not", "text, label", "--text_column"]),
    "missing column in validation": (
        "--validation_file {d}/no_text.jsonl",
        ["'text' is not in the validation rows", "body, title"],
    ),
    "missing label column": (f"{CLASSIFY} --dataset_name {{d}}/no_label.jsonl", ["label_column 'label'", "--label_column"]),
    "label column is the text column": (f"{CLASSIFY} --label_column text", ["label_column", "text_column", "'text'"]),
    "text of numbers": (
        "--dataset_name {d}/numbers.jsonl",
        ["text_column must name a column of strings", "have 0, 1, 2", "--text_column"],
    ),
    "text of lists": (
        "--dataset_name {d}/lists.jsonl",
        ["text_column must name a column of strings", "['a', 'b']", "--text_column"],
    ),
    "all texts empty": ("--dataset_name {d}/blank_texts.jsonl", ["rows are empty", "rows are empty"]),
    "no targets": ("--dataset_name {d}/one_token.jsonl", ["none of the 8 train rows has a target", "at least 2 tokens"]),
    "no targets in validation": ("--validation_file {d}/one_token.jsonl", ["none of the 9 validation rows has a target"]),
    "new label in validation": (
        f"{CLASSIFY} --validation_file {{d}}/new_label.jsonl",
        ["unknown labels in the validation rows: '7'", "in the training rows"],
    ),
    "float labels": (f"{CLASSIFY} --dataset_name {{d}}/float_labels.jsonl", ["labels must be names or whole numbers", "0.5"]),
    "labels in lists": (f"{CLASSIFY} --dataset_name {{d}}/list_labels.jsonl", ["labels must be names or whole numbers", "[1, 1]"]),
    "no labels": (f"{CLASSIFY} --dataset_name {{d}}/null_labels.jsonl", ["labels must be names or whole numbers", "None"]),
    "one label": (f"{CLASSIFY} --dataset_name {{d}}/one_label.jsonl", ["all training rows have the label 'same'"]),
    "validation folder": ("--validation_file {d}/gpt", ["gpt is a folder"]),
    "window larger than the data": (
        "--drop_last_window --global_batch_size 64",
        ["drop_last_window", "19 samples", "64", "smaller global batch"],
    ),
    # model
    "missing model folder": ("--model_name_or_path {d}/absent", ["cannot load", "absent", "hub id or a folder"]),
    "folder without a model": ("--model_name_or_path {d}/no_folder", ["cannot load", "no_folder", "hub id or a folder"]),
    "model without weights": ("--model_name_or_path {d}/no_weights", ["cannot load the model", "no_weights", "safetensors"]),
    "more tokens than positions": ("--model_name_or_path {d}/gpt --task causal-lm --max_length 999", ["999", "64 positions"]),
    "model of another kind": ("--model_name_or_path {d}/bert --task causal-lm", ["bert is an encoder", "--task masked-lm"]),
    "max_length beyond the usable positions": (
        f"{CLASSIFY} --model_name_or_path {{d}}/roberta --max_length 63",
        ["max_length 63 is beyond the 62 positions"],
    ),
    # output
    "output of another run": (
        "--output_dir {d}/used",
        ["used contains another run", "--resume_from_checkpoint", "delete it"],
    ),
    "output is a file": ("--output_dir {d}/good.xyz", ["good.xyz is a file", "folder"]),
    "output below a file": ("--output_dir {d}/good.xyz/run", ["good.xyz", "is a file", "folder"]),
    "resume from no checkpoint": ("--resume_from_checkpoint {d}/used", ["used is not a checkpoint", "manifest.json"]),
    "resume from a missing folder": ("--resume_from_checkpoint {d}/absent", ["absent", "checkpoint"]),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """FILES, a tiny GPT-2 in `gpt`, a tiny BERT in `bert`, and the configuration of a BART, all of 64 positions."""
    folder = tmp_path_factory.mktemp("input")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    tokenizer = corpus.train_tokenizer(["some words to train on", "more words"], 280)
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    gpt2 = tf.GPT2Config(**sizes, n_positions=64, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    bert = tf.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=64)
    tf.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt")
    tf.BertForMaskedLM(bert).save_pretrained(folder / "bert")
    roberta = tf.RobertaConfig(**sizes, intermediate_size=16, max_position_embeddings=64, pad_token_id=1)
    tf.RobertaForMaskedLM(roberta).save_pretrained(folder / "roberta")
    tf.BartConfig(vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(folder / "bart")
    for name in ("gpt", "bert", "bart", "roberta", "no_weights"):
        tokenizer.save_pretrained(folder / name)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(FILES["good.jsonl"].encode())[:60])
    return folder


@pytest.fixture
def no_model(monkeypatch, tmp_path):
    """Building any transformers model fails the test; the data's cache stays in the test's folder; no progress bars."""

    def build(self, *args, **kwargs):
        raise AssertionError(f"a {type(self).__name__} was built before the input was checked")

    monkeypatch.setattr(tf.PreTrainedModel, "__init__", build)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def arguments_of(text: str, folder: Path, output: Path) -> list[str]:
    """The case's own arguments, and valid ones for what it leaves out."""
    own = text.format(d=folder).split()
    defaults = {"--model_name_or_path": folder / "gpt", "--dataset_name": folder / "good.jsonl", "--output_dir": output}
    if CLASSIFY in text or ANSWER in text or CHOOSE in text:
        defaults["--model_name_or_path"] = folder / "bert"
    for name, value in [*defaults.items(), *zip(VALID.split()[::2], VALID.split()[1::2], strict=True)]:
        if not any(argument.partition("=")[0] == name for argument in own):
            own += [name, str(value)]
    return own


def content(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_one_line(stderr: str, words: list[str]) -> None:
    assert stderr.startswith("error: ") and stderr.endswith("\n") and stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    for word in words:
        assert word in stderr, f"{word!r} is not in {stderr!r}"


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


# Flags that no value makes wrong, whatever the others are; a value of another type does, see `test_wrong_types`.
CANNOT_BE_WRONG = {
    "trust_remote_code": "says nothing where no model is named",
    "gradient_checkpointing": "only the class of the built model knows whether it can",
    "fsdp_reduce_each_micro_batch": "says nothing where weights are not cut into shards",
    "allow_split_dependent_randomness": "only allows",
}
FIELDS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}


def asked_about() -> set[str]:
    """The flags of all cases."""
    return {word.lstrip("-").partition("=")[0] for text, _ in CASES.values() for word in text.split() if word.startswith("--")}


def test_every_flag_has_a_case():
    """A new flag needs a wrong value in CASES, or a reason why there is none."""
    assert set(FIELDS) - asked_about() <= set(CANNOT_BE_WRONG) <= set(FIELDS)
    assert all(FIELDS[name].type is bool and reason for name, reason in CANNOT_BE_WRONG.items())


# What is no value of a flag: on the command line, in a file, in Python; and the words of the message.
NO_VALUES = {
    int: ([("ten", "invalid int value"), ("1.5", "invalid int value"), ("nan", "invalid int value")], [1.5, True, "3", [1], {}]),
    float: ([("much", "invalid float value"), ("1,5", "invalid float value")], [True, "3", [1.0], {}]),
    bool: ([("perhaps", "perhaps"), ("2", "2")], [1, "true", [True], {}]),
    str: ([("", "is an empty string")], [5, True, ["a"], {}]),
    list[str]: ([("", "is an empty string")], [5, "a", [1], {}, [""]]),
}
TYPED = {
    name: next(kind for kind in NO_VALUES if kind in (hint if isinstance(hint, tuple) else (hint,)))
    for name, hint in (
        (n, get_args(h) or h) if get_origin(h) is not list else (n, h) for n, h in get_type_hints(FinetuneConfig).items()
    )
}


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_types(name, tmp_path, monkeypatch, capsys):
    """Every flag refuses what is of another type, wherever it is given: in one line that names it."""
    monkeypatch.chdir(tmp_path)
    texts, values = NO_VALUES[TYPED[name]]
    for text, words in texts:
        refused([f"--{name}={text}"], [name, words], capsys)
    for value in ({"a": 1}, [{"a": 1}], [["a"]]):
        (tmp_path / "run.json").write_text(json.dumps({name: value}))
        refused([str(tmp_path / "run.json")], [f"{name} must be"], capsys)
    for value in [*values, *([] if FIELDS[name].default is None else [None])]:
        with pytest.raises(hf_ga.ConfigError, match=rf"^{name} (must be|is an empty)"):
            FinetuneConfig(**{name: value}).check()


@pytest.mark.usefixtures("no_model")
def test_good_input_reaches_the_model(files, tmp_path):
    """The control of the table: nothing else in its arguments is refused, and the trap for built models works."""
    files_of = {ANSWER: "answers", CHOOSE: "choices"}
    for task in ("", CLASSIFY, *(f"{task} --dataset_name {{d}}/{file}.jsonl" for task, file in files_of.items())):
        with pytest.raises(AssertionError, match="was built before"):
            cli.finetune_main(arguments_of(task, files, tmp_path / "out"))


@pytest.mark.usefixtures("no_model")
def test_cut_gzip(files, tmp_path, capsys):
    refused(arguments_of("--dataset_name {d}/cut.jsonl.gz", files, tmp_path / "out"), ["cannot read", "cut.jsonl.gz"], capsys)


@pytest.mark.usefixtures("no_model")
def test_mixed_precision(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        refused(arguments_of("", files, tmp_path / "out"), ["Accelerate cannot start", "fp8"], capsys)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("no_model")
def test_deepspeed(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finetune.Accelerator, "distributed_type", property(lambda self: DistributedType.DEEPSPEED))
    refused(
        arguments_of("", files, tmp_path / "out"), ["unsupported: DEEPSPEED", "averages over targets", "accelerate_configs"], capsys
    )


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("name", ["unknown flag", "malformed JSON lines"])
def test_bad_input_of_the_script(name, files, tmp_path):
    """As a user sees it: exit code 2 and, in the end, the same one line, without a traceback before it."""
    text, words = CASES[name]
    command = [sys.executable, str(SCRIPT), *arguments_of(text, files, tmp_path / "out")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, words)
    assert not (tmp_path / "out").exists()
