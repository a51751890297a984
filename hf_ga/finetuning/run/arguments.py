"""The flags of TrainingArguments and of transformers' example scripts (run_clm, run_glue, ... and
their _no_trainer forms).

`FinetuneConfig` has many of them under the same name. `translate` converts RENAMED and CONVERTED to
its options. NO_EFFECT is accepted, DIFFERENT too, with a printed reason. REFUSED raises ConfigError
unless the value changes nothing. `docs/flags.md` is generated from these tables.
"""

from collections.abc import Mapping
from typing import Any

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.config_checks import check_one_of
from hf_ga.finetuning.run.models import load_base_config, num_positions

SCRIPTS = {  # --task takes these names, too, also with _no_trainer
    "run_clm": "causal-lm",
    "run_mlm": "masked-lm",
    "run_glue": "text-classification",
    "run_ner": "token-classification",
    "run_qa": "question-answering",
    "run_swag": "multiple-choice",
    "run_summarization": "seq2seq",
    "run_translation": "seq2seq",
}
# What the scripts train with if a flag is not given: the defaults of TrainingArguments, and the
# scripts' lengths in tokens.
TRAINING_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.0,
    "num_train_epochs": 3.0,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
LENGTHS = {
    "text-classification": 128,
    "regression": 128,
    "multi-label": 128,
    "question-answering": 384,
}
OTHER_LENGTH, TARGET_LENGTH, DOC_STRIDE = 1024, 128, 128

RENAMED = {
    "train_file": "dataset_name",
    "dataset_config": "dataset_config_name",
    "max_seq_length": "max_length",
    "max_source_length": "max_length",
    "val_max_target_length": "max_new_tokens",
    "generation_max_length": "max_new_tokens",
    "generation_num_beams": "num_beams",
    "text_column_name": "text_column",
    "label_column_name": "label_column",
    "summary_column": "target_column",
    "warmup_ratio": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "max_train_steps": "max_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "dataloader_drop_last": "drop_last_window",
    "activation_checkpointing": "gradient_checkpointing",
    "max_val_samples": "max_eval_samples",
    "max_test_samples": "max_predict_samples",
}
CONVERTED = {
    "do_train": "flags that you leave out have the defaults of TrainingArguments and of the "
    "task's script",
    "do_eval": "`--eval_only` without `--do_train`; a training run always evaluates",
    "do_predict": "`--predict_file` with the file of `--test_file`; `--eval_only` without "
    "`--do_train`",
    "bf16": "`--mixed_precision bf16`",
    "fp16": "`--mixed_precision fp16`",
    "eval_strategy": "steps: `--eval_steps 500` unless given; epoch: the default; no: evaluates "
    "once per epoch, too",
    "evaluation_strategy": "as `eval_strategy`",
    "save_strategy": "steps: `--save_steps 500` unless given; others: once per epoch; `best/` "
    "always has the best model",
    "checkpointing_steps": "a number: `--save_steps`; epoch: the default",
    "with_tracking": "`--report_to all` unless given",
    "task_name": "token-classification: `--label_column NAME_tags`; else `--dataset_name "
    "nyu-mll/glue --dataset_config_name NAME`",
    "source_lang": "`--text_column translation.LANGUAGE`",
    "target_lang": "`--target_column translation.LANGUAGE`",
    "line_by_line": "masked-lm with the script's defaults: without it, `--block_size` is set, as "
    "the script concatenates rows",
    "data_seed": "must equal `--seed`, which the order of samples depends on",
    "hub_strategy": "must be `end` with `--push_to_hub`: the model is uploaded once, after the run",
    "greater_is_better": "must fit `--metric_for_best_model`: lower is better for loss, "
    "perplexity and mae",
    "config_name": "must equal `--model_name_or_path`: save configuration, tokenizer and weights "
    "in one folder",
    "tokenizer_name": "must equal `--model_name_or_path`: save configuration, tokenizer and "
    "weights in one folder",
}
NO_EFFECT = {  # reason: flags
    "metrics.jsonl has every optimizer step": """logging_strategy logging_steps logging_first_step logging_nan_inf_filter
        include_num_input_tokens_seen""",
    "messages only": "log_level log_level_replica log_on_each_node disable_tqdm",
    "padding never changes the update": "pad_to_max_length",
    "when memory runs out, micro-batches become smaller; the update is the same": "auto_find_batch_size torch_empty_cache_steps",
    "speed only; hf_ga chooses its own speed-ups": """use_liger_kernel liger_kernel_config use_cache dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph low_cpu_mem_usage
        preprocessing_num_workers overwrite_cache skip_memory_metrics""",
    "results do not depend on how an evaluation is split, and have all metrics": """eval_accumulation_steps eval_do_concat_batches
        eval_use_gather_object batch_eval_metrics include_for_metrics prediction_loss_only return_entity_level_metrics""",
    "`accelerate launch` sets it": "local_rank ddp_backend ddp_timeout",
    "checkpoints are complete, and written on a stop signal": """save_only_model enable_jit_checkpoint save_on_each_node
        save_safetensors restore_callback_states_from_checkpoint""",
    "columns are chosen by their role": "remove_unused_columns length_column_name",
    "the model is uploaded once, after the run": "hub_always_push",
    "a head for other labels is always replaced": "ignore_mismatched_sizes",
    "rows without an answer are always allowed": "version_2_with_negative",
}
DIFFERENT = {
    "overwrite_output_dir": "an output_dir with another run is never overwritten",
    "load_best_model_at_end": "output_dir has the last model, best/ the best one",
    "eval_delay": "evaluations begin with the first epoch",
    "eval_on_start": "evaluations begin with the first epoch",
    "group_by_length": "batches are random, their micro-batches have similar lengths",
    "sortish_sampler": "batches are random, their micro-batches have similar lengths",
    "n_best_size": "the best span is the answer",
    "max_answer_length": "answers of any length are predicted",
    "null_score_diff_threshold": "no answer is predicted where it is the best span",
    "keep_linebreaks": "texts end with the end-of-text token, not with a line break",
}
REFUSED = {  # remedy: flags
    "use a schedule that needs only the numbers of steps": "lr_scheduler_kwargs",
    "omit it: only adam_beta1, adam_beta2, adam_epsilon and weight_decay can be set": "optim_args",
    "use lora_target_modules": "optim_target_modules",
    "omit it: every update averages over all targets of the global batch": "average_tokens_across_devices",
    "use bf16 or fp16, for training and evaluation": "bf16_full_eval fp16_full_eval fp16_opt_level",
    "use gradient_checkpointing alone": "gradient_checkpointing_kwargs "
    "activation_checkpointing_kwargs",
    "use torch_compile alone": "torch_compile_backend torch_compile_mode",
    "omit it: its noise depends on the padding": "neftune_noise_alpha",
    "omit it: the upload is to the branch main": "hub_revision",
    "set the environment variable, such as TRACKIO_SPACE_ID": "trackio_space_id trackio_bucket_id "
    "trackio_static_space_id",
    "omit it: a resumed run continues at the next sample": "ignore_data_skip",
    "set ACCELERATE_USE_CPU=true, or use `accelerate launch --cpu`": "use_cpu no_cuda",
    "use `accelerate launch` with a profile of accelerate_configs/ (FSDP instead of DeepSpeed)": """accelerator_config
        parallelism_config fsdp fsdp_config deepspeed""",
    "omit it: on a non-finite loss the run stops and names the sample": "debug",
    "use label_column": "label_names",
    "omit it: batches are random, their micro-batches have similar lengths": "train_sampling_strategy",
    "use max_new_tokens and num_beams": "generation_config",
    "build the model with from_config, save it with its tokenizer, and set model_name_or_path": "model_type config_overrides",
    "set HF_HOME": "cache_dir",
    "set model_name_or_path to the folder that `hf download --revision` prints": "model_revision",
    "log in with `hf auth login`, or set HF_TOKEN": "token use_auth_token",
    "omit it: a fast tokenizer is used where there is one": "use_fast_tokenizer use_slow_tokenizer",
    "use bf16 or fp16: weights are float32, autocast computes in another precision": "torch_dtype "
    "dtype",
    "use a max_length within the model's positions": "resize_position_embeddings",
    "save the tokenizer with its language codes set, and forced_bos_token_id in the generation "
    "config": "lang forced_bos_token",
    "omit it: padding is never a target": "ignore_pad_token_for_loss",
    "omit it: a tag counts at the first token of its word": "label_all_tokens",
}
_REMEDIES = {name: remedy for remedy, names in REFUSED.items() for name in names.split()}
_OFF = ("", "false", "no", "none", "0", "[]", "{}")
_ALLOWED = {  # values of REFUSED that change nothing; of the others, those that are off
    "average_tokens_across_devices": ("true",),
    "train_sampling_strategy": ("random",),
    "model_revision": ("main",),
    "hub_revision": ("main",),
    "use_fast_tokenizer": ("true",),
    "ignore_pad_token_for_loss": ("true",),
    "torch_dtype": ("auto", "float32"),
    "dtype": ("auto", "float32"),
}


def known_flags() -> list[str]:
    """Names that `translate` and `complete` take besides the options of `FinetuneConfig`; `task`
    and `report_to` are both.
    """
    no_effect = [name for names in NO_EFFECT.values() for name in names.split()]
    return [*RENAMED, *CONVERTED, *no_effect, *DIFFERENT, *_REMEDIES, "report_to"]


def translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of the example scripts as options of `FinetuneConfig`, among them the scripts'
    defaults.

    Args:
        given: `task`, and flags of `known_flags`, with their texts ("true" for a switch without a
            value, a list for several names).

    Raises:
        ConfigError: a flag of REFUSED with a value that would change the run, or a value that
            cannot be converted.

    >>> translate({"warmup_ratio": "0.1", "logging_steps": "10"})
    {'warmup_steps': '0.1'}
    """
    for name, value in given.items():
        if name in _REMEDIES and value.lower() not in _ALLOWED.get(name, _OFF):
            raise ConfigError(f"{name} {value} is not supported: {_REMEDIES[name]}.")
    task = SCRIPTS.get(_script_of(given), given.get("task", "causal-lm"))
    return {
        **({"task": task} if "task" in given else {}),
        **(_script_defaults(given, task) if _has_defaults(given) else {}),
        **{RENAMED[name]: value for name, value in given.items() if name in RENAMED},
        **_training_options(given),
        **_data_options(given, task),
    }


def complete(config: FinetuneConfig, given: Mapping[str, str]) -> list[str]:
    """Convert values of `config`, after all flags are parsed, and check flags of `given` against
    it; returns lines to print.
    """
    config.optim = "adamw" if config.optim in ("adamw_torch", "adamw_torch_fused") else config.optim
    config.max_steps = None if config.max_steps == -1 else config.max_steps
    if _is_on(given, "do_predict") and config.test_file and not config.predict_file:
        config.predict_file, config.test_file = config.test_file, None
    model, lower = config.model_name_or_path, config.lower_is_better
    must_equal = {
        "data_seed": config.seed,
        "config_name": model,
        "tokenizer_name": model,
        "greater_is_better": not lower,
    }
    must_equal |= {"hub_strategy": "end"} if config.push_to_hub else {}
    for name, value in must_equal.items():
        if given.get(name, "none").lower() not in ("none", str(value).lower()):
            raise ConfigError(
                f"{name} {given[name]} is not supported: it {CONVERTED[name].replace('`', '')}."
            )
    lines = [
        f"{name}: {DIFFERENT[name]}"
        for name, value in given.items()
        if name in DIFFERENT and value.lower() not in _OFF
    ]
    if not _has_defaults(given):
        return lines
    lines.insert(0, "unset flags have the defaults of the example script (docs/flags.md)")
    if config.gradient_accumulation_steps is None and config.global_batch_size is None:
        config.gradient_accumulation_steps = TRAINING_DEFAULTS["gradient_accumulation_steps"]
    if config.task == "multiple-choice" and config.dataset_name == "stdlib":
        config.dataset_name, config.dataset_config_name = (
            "allenai/swag",
            "regular",
        )  # the script's default
    if "train_file" in given and config.validation_file is None:
        lines.append(
            f"validation_file: not given, so {config.validation_split_percentage:g} % of the rows "
            "are for validation only"
        )
    limit = num_positions(load_base_config(config))
    for name in ("max_length", "block_size"):
        if limit and isinstance(value := getattr(config, name), int) and value > limit:
            setattr(config, name, limit)
            lines.append(f"{name}: {limit}, the positions of the model")
            if name == "max_length" and config.doc_stride is not None:
                config.doc_stride = config.doc_stride * limit // value
                lines.append(f"doc_stride: {config.doc_stride}, the same share of max_length")
    return lines


def _is_on(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "false").lower() not in _OFF


def _script_of(given: Mapping[str, str]) -> str:
    return given.get("task", "").removesuffix("_no_trainer")


def _has_defaults(given: Mapping[str, str]) -> bool:
    """Whether flags that are not given have the example scripts' defaults."""
    return _is_on(given, "do_train") or _script_of(given) in SCRIPTS


def _script_defaults(given: Mapping[str, str], task: str) -> dict[str, Any]:
    is_no_trainer = given.get("task", "").endswith("_no_trainer")
    is_short = is_no_trainer and task in ("token-classification", "multiple-choice")
    length = given.get("max_seq_length", LENGTHS.get(task, 128 if is_short else OTHER_LENGTH))
    in_blocks = task == "causal-lm" or (task == "masked-lm" and not _is_on(given, "line_by_line"))
    return {
        **TRAINING_DEFAULTS,
        "gradient_accumulation_steps": None,  # see `complete`: only without global_batch_size
        **({"max_grad_norm": 0.0} if is_no_trainer else {}),  # these scripts do not clip
        "block_size" if in_blocks else "max_length": length,
        **({"max_target_length": TARGET_LENGTH} if task == "seq2seq" else {}),
        **({"doc_stride": DOC_STRIDE} if task == "question-answering" else {}),
    }


def _training_options(given: Mapping[str, str]) -> dict[str, Any]:
    precisions = [name for name in ("bf16", "fp16") if _is_on(given, name)]
    if len(precisions) == 2:
        raise ConfigError("bf16 and fp16 exclude each other: use one of them.")
    options: dict[str, Any] = {"mixed_precision": precisions[0]} if precisions else {}
    for name, option in {
        "eval_strategy": "eval_steps",
        "evaluation_strategy": "eval_steps",
        "save_strategy": "save_steps",
    }.items():
        check_one_of(name, given.get(name, "no"), ("no", "steps", "epoch", "best"))
        options |= {option: 500} if given.get(name) == "steps" else {}
    if given.get("checkpointing_steps", "epoch") != "epoch":
        options["save_steps"] = given["checkpointing_steps"]
    if "report_to" in given or _is_on(given, "with_tracking"):
        options["report_to"] = given.get("report_to", "all")
    if not _is_on(given, "do_train") and (_is_on(given, "do_eval") or _is_on(given, "do_predict")):
        options["eval_only"] = True
    return options


def _data_options(given: Mapping[str, str], task: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    name = given.get("task_name")
    if name and task == "token-classification":
        options |= (
            {} if name == "ner" else {"label_column": f"{name}_tags"}
        )  # ner is among the usual names
    elif name:
        if name == "mnli" or (name == "stsb" and task != "regression"):
            raise ConfigError(
                f"task_name {name}: use "
                f"{'--task regression' if name == 'stsb' else 'files with its splits'}."
            )
        options |= {"dataset_name": "nyu-mll/glue", "dataset_config_name": name}
    for flag, option in {"source_lang": "text_column", "target_lang": "target_column"}.items():
        if "_" in given.get(flag, ""):
            raise ConfigError(
                f"{flag} {given[flag]} is a language code of a tokenizer: save the tokenizer with "
                "its codes set, and use the "
                "language alone."
            )
        if flag in given:
            options[option] = f"translation.{given[flag]}"
    return options
