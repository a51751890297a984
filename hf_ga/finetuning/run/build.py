"""Build a run from a configuration and prepared data: model, optimizer, schedule, windows, and a
trial of the loss.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import get_scheduler

from hf_ga.draws.dropout.masks import has_kernels
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.data import PreparedData, prepare_data
from hf_ga.finetuning.data.formats.files import is_pattern
from hf_ga.finetuning.data.options import as_list
from hf_ga.finetuning.run.flags.config import AUTO, FinetuneConfig
from hf_ga.finetuning.run.losses import (
    WeightedCrossEntropy,
    weights_of_classes,
)
from hf_ga.finetuning.run.model.adapters import add_adapters, freeze
from hf_ga.finetuning.run.model.embeddings import check_embedding, evaluate_embeddings, window_loss
from hf_ga.finetuning.run.model.models import (
    complete_config,
    known_labels,
    load_base_config,
    load_model,
    load_tokenizer,
    new_token_ids,
)
from hf_ga.finetuning.run.optimizers import ADAM, build_optimizer
from hf_ga.finetuning.run.results.report import print_fact
from hf_ga.finetuning.run.run import Run, Setup
from hf_ga.finetuning.run.scores.evaluation import evaluate_samples, evaluation_windows
from hf_ga.finetuning.run.scores.readers import make_reader
from hf_ga.finetuning.run.train_windows import train_windows
from hf_ga.model.forward import LossFunction, restored_modes, unwrapped
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.processes import broadcast_from_main, call_on_main, raise_on_all_ranks
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.rows.compiling import compile_layers, repeated_layers
from hf_ga.rows.packing import can_run_rows
from hf_ga.training import NUM_TRIED_SAMPLES, LossSettings, prepare_with, try_before

# Flags whose value is a path, of which only the name must be equal when a run is resumed.
LOCATIONS = (
    "model_name_or_path",
    "adapter_name_or_path",
    "dataset_name",
    "validation_file",
    "test_file",
)
# Micro-batches of a process from which `--torch_compile auto` compiles. On an H200, full rows of
# GPT-2-small make 133,700 tokens/s eagerly and 277,300 compiled, so a row of 8,192 tokens saves
# 8,192 / 133,700 - 8,192 / 277,300 = 0.032 s. To compile three lengths of rows takes about 60 s (an
# estimate): as much as 1,900 rows save. Larger models save more.
MIN_ROWS_TO_COMPILE = 2000
NO_LIMIT = 2**62  # `max_windows` of a run whose length is given in steps
# Flags that may change when a run is resumed, because they do not affect its results: outputs;
# evaluations; resuming; speed and memory; and those that are checked as `window_size` and `chunks`.
FREE_TO_CHANGE = """
    output_dir report_to run_name project save_steps save_total_limit push_to_hub hub_model_id
    hub_private_repo predict_file max_predict_samples show_samples
    eval_steps per_device_eval_batch_size predict_with_generate max_new_tokens num_beams
    early_stopping_patience
    resume_from_checkpoint resume_with_changes on_nonfinite
    dataloader_num_workers full_determinism gradient_checkpointing torch_compile
    fsdp_reduce_each_micro_batch
    per_device_train_batch_size gradient_accumulation_steps global_batch_size
    max_tokens_per_micro_batch same_bits
"""


def prepare_setup(config: FinetuneConfig, accelerator: Accelerator, **functions: Any) -> Setup:
    """Load the tokenizer, the data and the model's configuration for a fine-tuning run, and check
    that they fit each other.

    Args:
        config: The configuration of the run.
        accelerator: The accelerator of the run.
        **functions: The user's functions, by the names of the arguments of `finetune`.

    Returns:
        The setup, without the rows of `predict_file`.

    Raises:
        ConfigError, DataError: If options, data and model do not fit each other.
    """
    base_config = load_base_config(config)
    data = prepare_data(config, load_tokenizer(config), known_labels(base_config))
    model_config = complete_config(base_config, config, data)
    setup = Setup(
        config=config,
        accelerator=accelerator,
        data=data,
        model_config=model_config,
        class_weights=weights_of_classes(config, data),
        **functions,
    )
    if data.task.labels == "pairs":
        check_embedding(setup)
    return setup


def build_model(setup: Setup) -> nn.Module:
    """Build the model of a fine-tuning run, in training mode, and print which of its weights are
    new. All processes must call it.

    Trainable parameters are float32. Weights that are frozen under adapters may be in the dtype of
    autocast, see `loading_dtype`.
    """
    if loads_on_main(setup.accelerator):
        model, new_weights = _load_on_main(setup)
    else:
        model, new_weights = _load(setup)
    if setup.config.resize_token_embeddings:
        new_ids = new_token_ids(setup.model_config, setup.data.tokenizer)
        line = "resize_token_embeddings has no effect: the model has a row for every token"
        if new_ids:
            line = f"{len(new_ids)} new rows in the embeddings, {new_ids.start} to {new_ids[-1]}"
        print_fact(setup.accelerator, "tokens", line)
    if new_weights:
        listed = ", ".join(new_weights[:2])
        if len(new_weights) > 2:
            listed += ", ..."
        print_fact(setup.accelerator, "weights", f"{len(new_weights)} new: {listed}")
    return model


def mergeable(setup: Setup, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Load a second copy of a run's trained model whose LoRA adapters can be merged or saved: it is
    neither sharded nor in 4 bits. Call on the main process only.

    Args:
        setup: The setup of the run.
        weights: The full `state_dict()` of the trained model. The copy gets its trained weights;
            frozen ones are loaded anew.
    """
    not_quantized = replace(setup, config=replace(setup.config, load_in_4bit=False))
    model, _ = _load(not_quantized)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.load_state_dict({name: weights[name] for name in trained}, strict=False)
    return model


def _load(setup: Setup) -> tuple[nn.Module, list[str]]:
    """Load the model of a fine-tuning run, with adapters and frozen parameters as configured. The
    seed is set first, so new weights are the same on every process.
    """
    set_seed(setup.config.seed)
    model, new_weights = load_model(setup)
    return _trainable(setup, model, new_weights), new_weights


def _load_on_main(setup: Setup) -> tuple[nn.Module, list[str]]:
    """Load the model of a fine-tuning run as `_load` does, but the weights on the main process
    only, from which FSDP distributes them; on the others the model is on the meta device.
    """
    with raise_on_all_ranks(setup.accelerator):
        loaded = setup.accelerator.on_main_process(_load)(setup)
    model, new_weights = loaded or (None, [])
    new_weights = broadcast_from_main(setup.accelerator, new_weights)
    if model is None:
        model, _ = load_model(setup, is_empty=True)
        model = _trainable(setup, model, new_weights)
    return model, new_weights


def _trainable(setup: Setup, model: nn.Module, new_weights: Sequence[str]) -> nn.Module:
    """Add LoRA adapters and freeze parameters as a run's flags say, move the model to the device
    (unless FSDP will do so), and return it in training mode.
    """
    config = setup.config
    new_tokens = new_token_ids(setup.model_config, setup.data.tokenizer)
    if config.has_adapters:
        model = add_adapters(model, config, setup.data.task.lora_type, new_weights, new_tokens)
    if config.freeze:
        freeze(model, config.freeze)
        plain: Any = model.encoder if isinstance(model, EmbeddingModel) else model
        if new_tokens and not plain.get_input_embeddings().weight.requires_grad:
            raise ConfigError(
                "freeze freezes the embedding, whose new rows (resize_token_embeddings) would stay "
                "as they were drawn: omit one of them."
            )
    # A model that is loaded on the main process, to be sharded, may not fit on one device.
    if not loads_on_main(setup.accelerator):
        model = model.to(setup.accelerator.device)
    return model.train()  # also the model within PEFT's wrapper


def build_run(setup: Setup) -> Run:
    """Build a fine-tuning run: its windows, model, optimizer and schedule. The loss is tried on a
    few samples. Model and optimizer are prepared for training. All processes must call it.

    Args:
        setup: The configuration, accelerator and data of the run.

    Raises:
        ConfigError: If sizes, options and model do not fit each other.
        LossNotAdditive, UnkeyedRandomness: If the model cannot be trained exactly.
    """
    config = setup.config
    accelerator = setup.accelerator
    windows = train_windows(setup)  # checks sizes before the model is built
    model = build_model(setup)
    max_windows = NO_LIMIT
    if config.max_steps is None:
        max_windows = math.ceil(config.num_train_epochs * len(windows))
    max_steps = config.max_steps or max_windows
    if _compiles(setup, model, max_steps, windows.layout.accumulation_steps):
        compile_layers(model)
    _print_size(setup, model)
    settings = LossSettings(
        **chosen_loss(setup),
        allow_split_dependent_randomness=config.allow_split_dependent_randomness,
    )
    samples = samples_to_try(setup.data)
    loss_facts = try_before(accelerator, model, samples, setup.data.collate, settings)
    loss_facts.note_padding(windows.state)
    optimizer, scheduler = _optimizer(setup, model, max_steps)
    # Before the weights are sharded, which the main process alone may hold.
    identity = call_on_main(accelerator, _identity, setup, model, windows.layout.window_size)
    model, optimizer = prepare_with(accelerator, model, optimizer, settings)
    steps_per_epoch = max_steps
    if setup.data.stream is None:
        steps_per_epoch = min(len(windows), max_steps)
    return Run(
        **vars(setup),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        windows=windows,
        loss_facts=loss_facts,
        max_windows=max_windows,
        max_steps=max_steps,
        eval_steps=config.eval_steps or steps_per_epoch,
        save_steps=config.save_steps or steps_per_epoch,
        identity=identity,
    )


def _compiles(setup: Setup, model: nn.Module, num_steps: int, accumulation_steps: int) -> bool:
    """Whether to compile the layers of a run's model. Print what `--torch_compile auto` decides."""
    flag = setup.config.torch_compile
    if flag != AUTO:
        return bool(flag)
    device = setup.accelerator.device
    reason = reason_not_to_compile(model, device, num_steps * accumulation_steps)
    decision = "on" if reason is None else f"off, {reason}"
    facts = f"{num_steps:,} steps x {accumulation_steps} micro-batches, on {device.type}"
    print_fact(setup.accelerator, "compile", f"{decision} ({facts})")
    return reason is None


def reason_not_to_compile(
    model: nn.Module, device: torch.device, num_micro_batches: int
) -> str | None:
    """Return why compiled layers would not shorten a run; None if they should.

    Args:
        model: The model.
        device: The device that computes it.
        num_micro_batches: How many micro-batches a process computes in the run.
    """
    if not has_kernels(device):
        return "only a GPU with Triton gains time"
    if not can_run_rows(model, repeated_layers(model)):
        return "the model's layers cannot be computed on rows"
    if num_micro_batches < MIN_ROWS_TO_COMPILE:
        return f"compiling takes as long as {MIN_ROWS_TO_COMPILE:,} micro-batches save"
    return None


def _print_size(setup: Setup, model: Any) -> None:
    """Print, in the log of a fine-tuning run, the model's class, its numbers of parameters, and
    where its weights come from.
    """
    total = model.num_parameters()
    trained = model.num_parameters(only_trainable=True)
    trained_text = "all" if trained == total else f"{trained:,}"
    size = f"{total:,} parameters, {trained_text} trained"
    source = setup.config.model_name_or_path or "new weights"
    print_fact(setup.accelerator, "model", f"{type(model).__name__}, {size}, {source}")


def _optimizer(
    setup: Setup, model: nn.Module, max_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the optimizer and the learning rate schedule of a fine-tuning run from its flags. Print
    a warning if the run ends before its warmup does.
    """
    config = setup.config
    learning_rate = config.learning_rate
    if learning_rate is None and config.has_adapters:
        learning_rate = 2e-4
    elif learning_rate is None:
        learning_rate = 1e-3 if config.model_name_or_path is None else 5e-5
    settings: dict[str, Any] = {}
    if config.optim in ADAM:
        betas = (config.adam_beta1, config.adam_beta2)
        settings = {"betas": betas, "eps": config.adam_epsilon}
    optimizer = build_optimizer(model, config.optim, learning_rate, config.weight_decay, **settings)
    warmup_steps = int(config.warmup_steps)
    if config.warmup_steps < 1:
        warmup_steps = math.ceil(config.warmup_steps * max_steps)
    if config.lr_scheduler_type != "constant" and warmup_steps >= max_steps:
        print_fact(
            setup.accelerator,
            "warning",
            f"{warmup_steps} warmup steps, but only {max_steps} optimizer steps: the learning rate",
            "never reaches its peak. Lower --warmup_steps (0.1: a tenth of all), or train longer.",
        )
    return optimizer, get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, max_steps)


def _identity(setup: Setup, model: nn.Module, window_size: int) -> dict[str, Any]:
    """Return the settings and hashes of data that must be equal when a fine-tuning run is resumed
    from a checkpoint.
    """
    config = setup.config
    free = FREE_TO_CHANGE.split()
    identity = {name: value for name, value in config.to_dict().items() if name not in free}
    for flag in LOCATIONS:
        names = list(map(_without_folder, as_list(identity[flag])))
        # One name is no list, and none is None: so are those in older checkpoints.
        identity[flag] = names if len(names) > 1 else next(iter(names), None)
    identity["window_size"] = window_size
    identity["chunks"] = None
    if config.same_bits:
        identity["chunks"] = [config.same_bits, config.max_tokens_per_micro_batch]
    identity |= setup.data.identity
    identity["mixed_precision"] = setup.accelerator.mixed_precision
    identity["base_model"] = None
    if config.has_adapters:  # its checkpoints have the adapter only
        named = unwrapped(model).named_parameters(remove_duplicate=False)
        frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        identity["base_model"] = state_sha256(frozen)
    return identity


def _without_folder(location: str) -> str:
    """Return the name of a data file, model folder or pattern of files without its parent folders,
    for the settings that must be equal when a run is resumed.
    """
    path = Path(location)
    if path.exists():
        return path.resolve().name
    if is_pattern(location):
        return path.name
    return location


def chosen_loss(setup: Setup) -> dict[str, Any]:
    """Return the training loss that a run's flags choose, as a keyword argument of `hf_ga.prepare`
    and `LossSettings`: `whole_batch` for embeddings, else `loss_fn`.
    """
    if setup.data.task.labels == "pairs":
        return {"whole_batch": window_loss(setup.config, setup.data)}
    return {"loss_fn": chosen_loss_fn(setup)}


def chosen_loss_fn(setup: Setup, *, is_smoothed: bool = True) -> LossFunction | None:
    """Return a cross entropy with the class weights, row weights and label smoothing of a run, or
    None for the model's own loss.

    Args:
        setup: The setup of the run.
        is_smoothed: Whether to use the flag `label_smoothing_factor`: in training, not in
            evaluations.
    """
    config = setup.config
    label_smoothing = config.label_smoothing_factor if is_smoothed else 0.0
    weights = tuple(setup.class_weights.values()) or None
    if not (weights or label_smoothing or config.weight_column is not None):
        return None
    return WeightedCrossEntropy(label_smoothing, config.task == "causal-lm", weights)


def evaluate_split(setup: Setup, model: nn.Module, split: str = "validation") -> dict[str, float]:
    """Evaluate a run's model on a split, and call the user's `on_evaluate`. All processes must call
    it.

    Args:
        setup: The setup of the run.
        model: The prepared model.
        split: The split to evaluate.

    Returns:
        The loss and the other metrics, named `eval_...` for the validation split, else
        `<split>_...`; of a loss that is a mean over tokens, also `perplexity` = exp(loss).
    """
    data = setup.data
    make_windows = partial(
        evaluation_windows,
        data.samples(split),
        data.collate,
        accelerator=setup.accelerator,
        batch_size=setup.config.per_device_eval_batch_size,
        lengths=data.splits[split]["length"][:],
        same_bits=setup.config.same_bits is not None,
    )
    prefix = "eval_" if split == "validation" else f"{split}_"
    if data.task.labels == "pairs":
        found = evaluate_embeddings(setup, model, make_windows(), split)
    else:
        reader = make_reader(setup, model, split)
        loss_fn = chosen_loss_fn(setup, is_smoothed=False)
        found = evaluate_samples(
            setup.accelerator, model, make_windows, loss_fn=loss_fn, reader=reader
        )
        if not data.task.metrics:
            found["perplexity"] = math.exp(min(found["loss"], 700.0))  # larger ones overflow
    results = {prefix + name.removeprefix("eval_"): value for name, value in found.items()}
    if setup.on_evaluate is not None:
        with torch.no_grad(), restored_modes(model):
            setup.on_evaluate(dict(results), model.eval())
    return results


def samples_to_try(data: PreparedData) -> Sequence[dict[str, Any]]:
    """Return the training samples on which a run tries its model's loss. They are spread over
    the whole range of lengths, so that the trial shows whether padding affects the loss, and none
    has weight 0.

    Args:
        data: The prepared data.

    Returns:
        At most `NUM_TRIED_SAMPLES` samples, sorted by length.
    """
    dataset = data.splits["train"]
    by_length = np.argsort(np.asarray(dataset["length"][:]), kind="stable")
    if "weight" in dataset.column_names:
        weights = np.asarray(dataset["weight"][:])
        by_length = by_length[weights[by_length] > 0]
    count = min(NUM_TRIED_SAMPLES, len(by_length))
    spread = np.linspace(0, len(by_length) - 1, count).astype(int)
    samples = data.samples("train")
    return [samples[int(i)] for i in by_length[spread]]
