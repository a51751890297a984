"""Flags of TrainingArguments and of transformers' example scripts (run_clm, run_glue, ... and their
_no_trainer forms).

Many of them are options of `FinetuneConfig` under the same name. The others are in the tables
here: those in RENAMED and CONVERTED become its options, those in REQUIRED are checked against
them, those in IGNORED have no effect, which the run prints, and those in REFUSED raise ConfigError,
unless their value changes nothing.
"""

from collections.abc import Mapping
from typing import Any

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.flags.config_checks import check_one_of
from hf_ga.finetuning.run.model.models import load_base_config, num_positions

# Example script -> task. The flag --task takes the names of both; those of scripts also with the
# suffix _no_trainer.
TASK_OF_SCRIPT = {
    "run_clm": "causal-lm",
    "run_mlm": "masked-lm",
    "run_glue": "text-classification",
    "run_ner": "token-classification",
    "run_qa": "question-answering",
    "run_swag": "multiple-choice",
    "run_summarization": "seq2seq",
    "run_translation": "seq2seq",
}
# The defaults of TrainingArguments, with which the example scripts train.
TRAINING_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.0,
    "num_train_epochs": 3.0,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
# The scripts' default maximum lengths of samples in tokens.
MAX_LENGTHS = {
    "text-classification": 128,
    "regression": 128,
    "multi-label": 128,
    "question-answering": 384,
}

# Flag -> the option of FinetuneConfig with the same meaning and values.
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
# Converted to options of FinetuneConfig with other values.
CONVERTED = [
    *("do_train", "do_eval", "do_predict", "bf16", "fp16", "eval_strategy", "evaluation_strategy"),
    *("save_strategy", "checkpointing_steps", "with_tracking", "task_name", "source_lang"),
    *("target_lang", "line_by_line"),
]
# Checked against options of FinetuneConfig: flag -> the requirement.
REQUIRED = {
    "data_seed": "must equal --seed, which the order of samples depends on",
    "hub_strategy": "must be end with --push_to_hub: the model is uploaded once, after the run",
    "greater_is_better": "must match --metric_for_best_model: lower is better for loss, "
    "perplexity and mae",
    "config_name": "must equal --model_name_or_path: save configuration, tokenizer and weights "
    "in one folder",
    "tokenizer_name": "must equal --model_name_or_path: save configuration, tokenizer and "
    "weights in one folder",
}
# Accepted without an effect: what happens instead, which the run prints -> flags.
IGNORED = {
    "metrics.jsonl has every optimizer step": """
        logging_strategy logging_steps logging_first_step logging_nan_inf_filter
        include_num_input_tokens_seen
    """,
    "messages only": "log_level log_level_replica log_on_each_node disable_tqdm",
    "padding never changes the update": "pad_to_max_length",
    "when memory runs out, micro-batches become smaller; the update is the same": (
        "auto_find_batch_size torch_empty_cache_steps"
    ),
    "speed only, and hf_ga chooses its own speed-ups": """
        use_liger_kernel liger_kernel_config use_cache dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters
        ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph low_cpu_mem_usage
        preprocessing_num_workers overwrite_cache skip_memory_metrics
    """,
    "results do not depend on how an evaluation is split, and have all metrics": """
        eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics
        include_for_metrics prediction_loss_only return_entity_level_metrics
    """,
    "`accelerate launch` sets it": "local_rank ddp_backend ddp_timeout",
    "checkpoints are complete, and written on a stop signal": """
        save_only_model enable_jit_checkpoint save_on_each_node save_safetensors
        restore_callback_states_from_checkpoint
    """,
    "columns are chosen by their role": "remove_unused_columns length_column_name",
    "the model is uploaded once, after the run": "hub_always_push",
    "a head for other labels is always replaced": "ignore_mismatched_sizes",
    "rows without an answer are always allowed": "version_2_with_negative",
    "an output_dir with another run is never overwritten": "overwrite_output_dir",
    "output_dir has the last model, best/ the best one": "load_best_model_at_end",
    "evaluations begin with the first epoch": "eval_delay eval_on_start",
    "batches are random, their micro-batches have similar lengths": (
        "group_by_length sortish_sampler"
    ),
    "the best span is the answer": "n_best_size",
    "answers of any length are predicted": "max_answer_length",
    "no answer is predicted where it is the best span": "null_score_diff_threshold",
    "texts end with the end-of-text token, not with a line break": "keep_linebreaks",
}
# Not supported: remedy -> flags.
REFUSED = {
    "use a schedule that needs only the numbers of steps": "lr_scheduler_kwargs",
    "omit it: only adam_beta1, adam_beta2, adam_epsilon and weight_decay can be set": (
        "optim_args"
    ),
    "use lora_target_modules": "optim_target_modules",
    "omit it: every update averages over all targets of the global batch": (
        "average_tokens_across_devices"
    ),
    "use bf16 or fp16, for training and evaluation": (
        "bf16_full_eval fp16_full_eval fp16_opt_level"
    ),
    "use gradient_checkpointing alone": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
    ),
    "use torch_compile alone": "torch_compile_backend torch_compile_mode",
    "omit it: its noise depends on the padding": "neftune_noise_alpha",
    "omit it: the upload is to the branch main": "hub_revision",
    "set the environment variable, such as TRACKIO_SPACE_ID": (
        "trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "omit it: a resumed run continues at the next sample": "ignore_data_skip",
    "set ACCELERATE_USE_CPU=true, or use `accelerate launch --cpu`": "use_cpu no_cuda",
    "use `accelerate launch` with a profile of accelerate_configs/ (FSDP instead of "
    "DeepSpeed)": "accelerator_config parallelism_config fsdp fsdp_config deepspeed",
    "omit it: on a non-finite loss the run stops and names the sample": "debug",
    "use label_column": "label_names",
    "omit it: batches are random, their micro-batches have similar lengths": (
        "train_sampling_strategy"
    ),
    "use max_new_tokens and num_beams": "generation_config",
    "build it with from_config, save it with its tokenizer, and set model_name_or_path": (
        "model_type config_overrides"
    ),
    "set HF_HOME": "cache_dir",
    "set model_name_or_path to the folder that `hf download --revision` prints": ("model_revision"),
    "log in with `hf auth login`, or set HF_TOKEN": "token use_auth_token hub_token",
    "omit it: a fast tokenizer is used where there is one": (
        "use_fast_tokenizer use_slow_tokenizer"
    ),
    "use bf16 or fp16: weights are float32, autocast computes in another precision": (
        "torch_dtype dtype"
    ),
    "use a max_length within the model's positions": "resize_position_embeddings",
    "save the tokenizer with its language codes set, and forced_bos_token_id in the "
    "generation config": "lang forced_bos_token",
    "omit it: padding is never a target": "ignore_pad_token_for_loss",
    "omit it: a tag counts at the first token of its word": "label_all_tokens",
}
# Values that turn a flag off.
_OFF = ("", "false", "no", "none", "0", "[]", "{}")
# Values of REFUSED flags that change nothing, so they are accepted; for the other flags, `_OFF`.
_ALLOWED_VALUES = {
    "average_tokens_across_devices": ("true",),
    "train_sampling_strategy": ("random",),
    "model_revision": ("main",),
    "hub_revision": ("main",),
    "use_fast_tokenizer": ("true",),
    "ignore_pad_token_for_loss": ("true",),
    "torch_dtype": ("auto", "float32"),
    "dtype": ("auto", "float32"),
}
# Flags of which no option of FinetuneConfig has the meaning and the values.
_OF_REASONS = " ".join((*IGNORED.values(), *REFUSED.values())).split()
WITHOUT_OPTION = (*CONVERTED, *REQUIRED, *_OF_REASONS)
# Flags of TrainingArguments and of the example scripts that FinetuneConfig does not have under the
# same name.
SCRIPT_FLAGS = (*RENAMED, *WITHOUT_OPTION)


def convert_script_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert flags of transformers' example scripts to options of `FinetuneConfig`.

    If `task` names an example script, or `do_train` is set, the script's defaults are included.

    Args:
        given: Name -> value of all flags that the user set: options of `FinetuneConfig`, and flags
            in SCRIPT_FLAGS. The value of a flag in WITHOUT_OPTION is a string, "true" for a switch
            without a value; that of a flag in RENAMED is the value of the option.

    Returns:
        Name of the option -> value.

    Raises:
        ConfigError: If a flag of REFUSED has a value that would change the run, or a value cannot
            be converted.

    >>> convert_script_flags({"warmup_ratio": 0.1, "logging_steps": "10"})
    {'warmup_steps': 0.1}
    """
    for remedy, flags in REFUSED.items():
        for flag in given.keys() & flags.split():
            if given[flag].lower() not in _ALLOWED_VALUES.get(flag, _OFF):
                raise ConfigError(f"{flag} {given[flag]} is not supported: {remedy}.")
    # The flag --task names an example script, such as run_glue, or a task of FinetuneConfig.
    name = _script_name(given)
    task = TASK_OF_SCRIPT.get(name, name or "causal-lm")
    # Flags of the user override the script's defaults, and options the flags with other names.
    options = _script_defaults(given, task) if _uses_script_defaults(given) else {}
    options |= {RENAMED[flag]: value for flag, value in given.items() if flag in RENAMED}
    options |= _training_options(given)
    options |= _data_options(given, task)
    options |= {flag: value for flag, value in given.items() if flag not in SCRIPT_FLAGS}
    if name in TASK_OF_SCRIPT:
        options["task"] = task
    # Values that the scripts spell differently.
    if options.get("optim") in ("adamw_torch", "adamw_torch_fused"):
        options["optim"] = "adamw"
    if options.get("max_steps") == -1:
        options["max_steps"] = None
    if _is_on(given, "do_predict") and "test_file" in options and "predict_file" not in options:
        options["predict_file"] = options.pop("test_file")
    return options


def adjust_to_script_flags(config: FinetuneConfig, given: Mapping[str, Any]) -> list[str]:
    """Check the flags of transformers' example scripts that must agree with other options of the
    run, and limit lengths, in place, to the model's positions where the scripts do so.

    Args:
        config: The configuration of the run, made of what `convert_script_flags` returned.
        given: See `convert_script_flags`.

    Returns:
        Notes to print: which defaults are in use, and which flags have no effect.

    Raises:
        ConfigError: If a flag does not agree with another option.
    """
    _check_agreement(config, given)
    notes = []
    for reason, flags in IGNORED.items():
        ignored = [flag for flag in flags.split() if _is_on(given, flag)]
        if ignored:
            notes.append(f"{', '.join(ignored)}: {reason}")
    if not _uses_script_defaults(given):
        return notes
    notes.append("unset flags have the defaults of the example script (docs/cli.md)")
    if "train_file" in given and config.validation_file is None:
        notes.append(
            f"validation_file: not given, so {config.validation_split_percentage:g} % of the rows "
            "are for validation only"
        )
    return [*notes, *_limit_lengths_to_positions(config)]


def _check_agreement(config: FinetuneConfig, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a flag of transformers' example scripts must equal an option of the run,
    and does not: `data_seed` must equal `seed`, for example.
    """
    required_values: dict[str, Any] = {
        "data_seed": config.seed,
        "config_name": config.model_name_or_path,
        "tokenizer_name": config.model_name_or_path,
        "greater_is_better": not config.lower_is_better,
    }
    if config.push_to_hub:
        required_values["hub_strategy"] = "end"
    for name, required in required_values.items():
        value = given.get(name, "none")
        if value.lower() not in ("none", str(required).lower()):
            raise ConfigError(f"{name} {value} is not supported: it {REQUIRED[name]}.")


def _limit_lengths_to_positions(config: FinetuneConfig) -> list[str]:
    """Lower `max_length` and `block_size` in place to the number of positions of the pretrained
    model, as the example scripts do, and `doc_stride` in proportion to `max_length`.
    """
    limit = num_positions(load_base_config(config))
    notes: list[str] = []
    if not limit:
        return notes
    for name in ("max_length", "block_size"):
        length = getattr(config, name)
        # The types of options are checked later.
        if not isinstance(length, int) or length <= limit:
            continue
        setattr(config, name, limit)
        notes.append(f"{name}: {limit}, the positions of the model")
        if name == "max_length" and config.doc_stride is not None:
            config.doc_stride = config.doc_stride * limit // length
            notes.append(f"doc_stride: {config.doc_stride}, the same share of max_length")
    return notes


def _is_on(given: Mapping[str, Any], name: str) -> bool:
    """Whether a switch of transformers' example scripts, such as `do_train`, is among the flags and
    not turned off.
    """
    return given.get(name, "false").lower() not in _OFF


def _script_name(given: Mapping[str, Any]) -> str:
    """Return the value of `task` without the suffix `_no_trainer`: the name of an example script,
    such as `run_glue`, that of a task, or "" if it is not given.
    """
    return str(given.get("task", "")).removesuffix("_no_trainer")


def _uses_script_defaults(given: Mapping[str, Any]) -> bool:
    """Whether options that are not given have the defaults of transformers' example scripts instead
    of those of `FinetuneConfig`: if `task` names a script, or `do_train` is set.
    """
    return _is_on(given, "do_train") or _script_name(given) in TASK_OF_SCRIPT


def _script_defaults(given: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the defaults with which the example script of a task trains, as options of
    `FinetuneConfig`.
    """
    is_no_trainer = str(given.get("task")).endswith("_no_trainer")
    default_length = MAX_LENGTHS.get(task, 1024)
    if is_no_trainer and task in ("token-classification", "multiple-choice"):
        default_length = 128
    # Language models train on blocks of concatenated texts.
    splits_into_blocks = task == "causal-lm" or (
        task == "masked-lm" and not _is_on(given, "line_by_line")
    )
    length_option = "block_size" if splits_into_blocks else "max_length"
    defaults = dict(TRAINING_DEFAULTS)
    if "global_batch_size" in given:
        del defaults["gradient_accumulation_steps"]
    defaults[length_option] = given.get("max_seq_length", default_length)
    if is_no_trainer:
        # These scripts do not clip the gradient.
        defaults["max_grad_norm"] = 0.0
    if task == "seq2seq":
        defaults["max_target_length"] = 128
    if task == "question-answering":
        defaults["doc_stride"] = 128
    if task == "multiple-choice" and not given.keys() & {"train_file", "dataset_name"}:
        defaults["dataset_name"] = "allenai/swag"
        defaults["dataset_config_name"] = "regular"
    return defaults


def _training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the example scripts' flags of precision, evaluation, saving and trackers to options
    of `FinetuneConfig`.
    """
    options: dict[str, Any] = {}
    precisions = [name for name in ("bf16", "fp16") if _is_on(given, name)]
    if len(precisions) == 2:
        raise ConfigError("bf16 and fp16 exclude each other: use one of them.")
    if precisions:
        options["mixed_precision"] = precisions[0]
    interval_options = {
        "eval_strategy": "eval_steps",
        "evaluation_strategy": "eval_steps",
        "save_strategy": "save_steps",
    }
    for flag, interval_option in interval_options.items():
        strategy = given.get(flag, "no")
        check_one_of(flag, strategy, ("no", "steps", "epoch", "best"))
        if strategy == "steps":
            options[interval_option] = 500
    save_steps = given.get("checkpointing_steps", "epoch")
    if save_steps != "epoch":
        # Checked with the types of all options.
        options["save_steps"] = int(save_steps) if save_steps.isdecimal() else save_steps
    if _is_on(given, "with_tracking"):
        options["report_to"] = "all"
    trains = _is_on(given, "do_train")
    evaluates = _is_on(given, "do_eval") or _is_on(given, "do_predict")
    if evaluates and not trains:
        options["eval_only"] = True
    return options


def _data_options(given: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Convert `task_name`, `source_lang` and `target_lang`, with which the example scripts choose a
    dataset or its columns, to options of `FinetuneConfig`.
    """
    options: dict[str, Any] = {}
    task_name = given.get("task_name")
    if task == "token-classification":
        # `ner_tags` is found without being named.
        if task_name and task_name != "ner":
            options["label_column"] = f"{task_name}_tags"
    elif task_name:
        if task_name == "mnli":
            # It has two validation splits.
            raise ConfigError("task_name mnli: use files with its splits.")
        if task_name == "stsb" and task != "regression":
            raise ConfigError("task_name stsb: use --task regression.")
        options["dataset_name"] = "nyu-mll/glue"
        options["dataset_config_name"] = task_name
    for flag, option in {"source_lang": "text_column", "target_lang": "target_column"}.items():
        if flag not in given:
            continue
        language = given[flag]
        if "_" in language:
            raise ConfigError(
                f"{flag} {language} is a language code of a tokenizer: save the tokenizer with "
                "its codes set, and use the language alone."
            )
        options[option] = f"translation.{language}"
    return options
