"""Build a run from a configuration and prepared data: model, proof, optimizer, schedule,
windows.
"""

import math
from collections.abc import Mapping, Sequence
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

from hf_ga.embedding.model import EmbeddingModel
from hf_ga.errors import ConfigError
from hf_ga.exact.forward import LossFunction, restored_modes, unwrapped
from hf_ga.exact.rule import Rule
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.finetuning.data.data import PreparedData, prepare_data
from hf_ga.finetuning.data.files import is_pattern
from hf_ga.finetuning.data.options import as_list
from hf_ga.finetuning.run.adapters import add_adapters, freeze, is_lora
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.embeddings import check_embedding, evaluate_embeddings, window_loss
from hf_ga.finetuning.run.evaluation import evaluate, evaluation_windows
from hf_ga.finetuning.run.losses import (
    SmoothedCrossEntropy,
    WeightedCrossEntropy,
    weights_of_classes,
)
from hf_ga.finetuning.run.models import (
    complete_config,
    empty_model,
    known_labels,
    load_base_config,
    load_model,
    load_tokenizer,
    new_token_ids,
)
from hf_ga.finetuning.run.optimizers import ADAM, build_optimizer
from hf_ga.finetuning.run.readers import make_reader
from hf_ga.finetuning.run.report import print_fact
from hf_ga.finetuning.run.run import Run, Setup
from hf_ga.finetuning.run.train_windows import train_windows
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.processes import broadcast_from_main, raise_on_all_ranks
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.speed.compiling import compile_layers
from hf_ga.training import NUM_PROOF_SAMPLES, prepare, prove_targets

# Flags of which only the last part of a path must be equal on resume.
LOCATIONS = (
    "model_name_or_path",
    "adapter_name_or_path",
    "dataset_name",
    "validation_file",
    "test_file",
)
# Flags that may change on resume, as they do not affect the results. reason: flags
FREE_TO_CHANGE = {
    "outputs": """output_dir report_to run_name project save_steps save_total_limit push_to_hub
        hub_model_id hub_private_repo predict_file max_predict_samples show_samples""",
    "evaluations": "eval_steps per_device_eval_batch_size predict_with_generate max_new_tokens "
    "num_beams early_stopping_patience",
    "resuming": "resume_from_checkpoint resume_with_changes on_nonfinite",
    "speed and memory": "dataloader_num_workers full_determinism gradient_checkpointing "
    "torch_compile fsdp_reduce_each_micro_batch",
    "checked as `window_size` and `chunks`": """per_device_train_batch_size
        gradient_accumulation_steps global_batch_size max_tokens_per_micro_batch same_bits""",
}


def prepare_setup(config: FinetuneConfig, accelerator: Accelerator, **functions: Any) -> Setup:
    """Load the tokenizer, the data and the configuration of the model, and check that they fit.
    `functions`: see `finetune`.
    """
    base = load_base_config(config)
    data = prepare_data(config, load_tokenizer(config), known_labels(base))
    model_config = complete_config(base, config, data)
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
    """Build the model with float32 trainable parameters; weights frozen under adapters keep the
    compute dtype.
    """
    if loads_on_main(setup.accelerator):
        model, new = _load_on_main(setup)
    else:
        model, new = _load(setup)
    if setup.config.resize_token_embeddings:
        print_fact(setup.accelerator, "tokens", _fact_of_new_tokens(setup))
    if new:
        print_fact(
            setup.accelerator,
            "weights",
            f"{len(new)} new: {', '.join(new[:2])}{', ...' * (len(new) > 2)}",
        )
    return model


def _fact_of_new_tokens(setup: Setup) -> str:
    new_ids = new_token_ids(setup.model_config, setup.data.tokenizer)
    if not new_ids:
        return "resize_token_embeddings has no effect: the model has a row for every token"
    return f"{len(new_ids)} new rows in the embeddings, {new_ids.start} to {new_ids[-1]}"


def mergeable(setup: Setup, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A model like the trained one, but neither sharded nor in 4 bits, where adapters cannot be
    merged. For the main process.

    Args:
        weights: the full `state_dict()`.
    """
    model, _ = _load(replace(setup, config=replace(setup.config, load_in_4bit=False)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.load_state_dict({name: weights[name] for name in trained}, strict=False)
    return model


def _load(setup: Setup) -> tuple[nn.Module, list[str]]:
    """The model in training mode, and the names of parameters that the checkpoint lacks."""
    set_seed(setup.config.seed)
    model, new_weights = load_model(setup)
    return _trainable(setup, model, new_weights), new_weights


def _load_on_main(setup: Setup) -> tuple[nn.Module, list[str]]:
    """As `_load`, with weights on the main process only. All processes must call it."""
    model: nn.Module | None = None
    new_weights: list[str] = []
    with raise_on_all_ranks(setup.accelerator):
        if setup.accelerator.is_main_process:
            model, new_weights = _load(setup)
    new_weights = broadcast_from_main(setup.accelerator, new_weights)
    if model is None:
        model = _trainable(setup, empty_model(setup), new_weights)
    return model, new_weights


def _trainable(setup: Setup, model: nn.Module, new_weights: Sequence[str]) -> nn.Module:
    """The model in training mode, with adapters and frozen parameters as configured."""
    config = setup.config
    new_tokens = new_token_ids(setup.model_config, setup.data.tokenizer)
    if config.has_adapters:
        model = add_adapters(model, config, setup.data.task.lora_type, new_weights, new_tokens)
    if config.freeze:
        freeze(model, config.freeze)
        if new_tokens:
            _check_new_rows(model)
    if not loads_on_main(setup.accelerator):  # such a model may not fit on one device
        model = model.to(setup.accelerator.device)
    return model.train()  # also the model within PEFT's wrapper


def _check_new_rows(model: nn.Module) -> None:
    plain: Any = model.encoder if isinstance(model, EmbeddingModel) else model
    if not plain.get_input_embeddings().weight.requires_grad:
        raise ConfigError(
            "freeze freezes the embedding, whose new rows (resize_token_embeddings) would stay as "
            "they were drawn: omit one of them."
        )


def build_run(setup: Setup) -> Run:
    """Build model, optimizer, schedule and windows, and prove the loss."""
    config = setup.config
    accelerator = setup.accelerator
    loss = chosen_loss(setup)
    eval_loss = evaluation_loss(setup)
    windows = train_windows(setup)  # checks sizes before the model is built
    model = build_model(setup)
    if config.torch_compile:
        compile_layers(model)
    _print_size(setup, model)
    allowed = config.allow_split_dependent_randomness
    prove = partial(prove_on_split, setup, model, "train", allowed)
    eval_rule = prove(**eval_loss)
    rule = eval_rule if loss == eval_loss else prove(**loss)
    windows.state.pad_to_window = rule.pad_to_window
    max_windows = (
        math.ceil(config.num_train_epochs * len(windows)) if config.max_steps is None else 2**62
    )
    max_steps = config.max_steps or max_windows
    optimizer, scheduler = _optimizer(config, model, max_steps)
    _print_long_warmup(setup, max_steps)
    # before the weights are sharded, which the main process may hold alone
    identity: dict[str, Any] = {}
    if accelerator.is_main_process:
        identity = _identity(setup, model, windows.layout.window_size)
    identity = broadcast_from_main(accelerator, identity)
    model, optimizer = prepare(
        accelerator,
        model,
        optimizer,
        **loss,
        allow_split_dependent_randomness=allowed,
        rule=rule,
    )
    once_per_epoch = (
        max_steps if isinstance(windows, StreamLoader) else min(len(windows), max_steps)
    )  # streams have no length
    return Run(
        **vars(setup),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        windows=windows,
        rule=rule,
        evaluate=partial(evaluate_split, setup, model, eval_rule),
        max_windows=max_windows,
        max_steps=max_steps,
        eval_steps=config.eval_steps or once_per_epoch,
        save_steps=config.save_steps or once_per_epoch,
        identity=identity,
    )


def prove_on_split(
    setup: Setup,
    model: nn.Module,
    split: str,
    allow_split_dependent_randomness: bool,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
) -> Rule:
    """Prove a loss on samples of a split. All processes must call it.

    Raises:
        See `hf_ga.prove_targets`.
    """
    prove = partial(
        prove_targets,
        model,
        proof_samples(setup.data, split),
        setup.data.collate,
        loss_fn=loss_fn,
        whole_batch=whole_batch,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    return prove_where_weights_are(setup.accelerator, model, prove, (loss_fn, whole_batch))


def _print_size(setup: Setup, model: Any) -> None:
    trained, total = (model.num_parameters(only_trainable=only) for only in (True, False))
    size = f"{total:,} parameters, {'all' if trained == total else f'{trained:,}'} trained"
    source = setup.config.model_name_or_path or "new weights"
    print_fact(setup.accelerator, "model", f"{type(model).__name__}, {size}, {source}")


def _optimizer(
    config: FinetuneConfig, model: nn.Module, max_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the optimizer of a model and its learning rate schedule.

    Args:
        config: The configuration of the run.
        model: The model, not wrapped yet.
        max_steps: Optimizer steps of the run.
    """
    learning_rate = config.learning_rate or _usual_learning_rate(config)
    adam_settings: dict[str, Any] = {}
    if config.optim in ADAM:
        adam_settings["betas"] = (config.adam_beta1, config.adam_beta2)
        adam_settings["eps"] = config.adam_epsilon
    optimizer = build_optimizer(
        model, config.optim, learning_rate, config.weight_decay, **adam_settings
    )
    warmup_steps = warmup_steps_of(config, max_steps)
    return optimizer, get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, max_steps)


def _usual_learning_rate(config: FinetuneConfig) -> float:
    """Return the default learning rate: of adapters, of a new model, or of a pretrained one."""
    if config.has_adapters:
        return 2e-4
    if config.model_name_or_path is None:
        return 1e-3
    return 5e-5


def warmup_steps_of(config: FinetuneConfig, max_steps: int) -> int:
    """Return the optimizer steps of linear warmup; `warmup_steps` below 1 is a fraction of all.

    >>> warmup_steps_of(FinetuneConfig(warmup_steps=0.1), max_steps=75)
    8
    """
    if config.warmup_steps < 1:
        return math.ceil(config.warmup_steps * max_steps)
    return int(config.warmup_steps)


def _print_long_warmup(setup: Setup, max_steps: int) -> None:
    """Print a line if the run ends before its warmup, so that the learning rate never reaches the
    value that was asked for.
    """
    warmup_steps = warmup_steps_of(setup.config, max_steps)
    has_warmup = setup.config.lr_scheduler_type != "constant"
    if has_warmup and warmup_steps >= max_steps:
        print_fact(
            setup.accelerator,
            "warning",
            f"{warmup_steps} warmup steps, but only {max_steps} optimizer steps: the learning rate",
            "never reaches its peak. Lower --warmup_steps (0.1: a tenth of all), or train longer.",
        )


def _identity(setup: Setup, model: nn.Module, window_size: int) -> dict[str, Any]:
    """Settings that must be equal on resume. Only names of files and folders: their location may
    change.
    """
    config = setup.config
    free = {name for names in FREE_TO_CHANGE.values() for name in names.split()}
    flags = {k: v for k, v in config.to_dict().items() if k not in free}
    places = {k: [_without_folder(place) for place in as_list(flags[k])] for k in LOCATIONS}
    flags |= {k: names if len(names) > 1 else names[0] for k, names in places.items() if names}
    return flags | {
        "window_size": window_size,
        "chunks": [config.same_bits, config.max_tokens_per_micro_batch]
        if config.same_bits
        else None,
        **setup.data.identity,
        "mixed_precision": setup.accelerator.mixed_precision,
        "base_model": _frozen_sha256(model) if is_lora(model) else None,  # not in checkpoints
    }


def _without_folder(place: str) -> str:
    path = Path(place)
    return path.resolve().name if path.exists() else path.name if is_pattern(place) else place


def _frozen_sha256(model: nn.Module) -> str:
    named = unwrapped(model).named_parameters(remove_duplicate=False)
    return state_sha256(
        {name: parameter for name, parameter in named if not parameter.requires_grad}
    )


def chosen_loss(setup: Setup) -> dict[str, Any]:
    """The training loss, as an argument of `hf_ga.prepare` and `hf_ga.prove_targets`."""
    if setup.data.task.labels == "pairs":
        return {"whole_batch": window_loss(setup.config, setup.data)}
    return {"loss_fn": chosen_loss_fn(setup.config, setup.class_weights)}


def evaluation_loss(setup: Setup) -> dict[str, Any]:
    """The loss of evaluations, as `chosen_loss`."""
    if setup.data.task.labels == "pairs":
        return chosen_loss(setup)
    return {"loss_fn": evaluation_loss_fn(setup.config, setup.class_weights)}


def chosen_loss_fn(
    config: FinetuneConfig, class_weights: Mapping[str, float] | None = None
) -> LossFunction | None:
    """The training loss with label smoothing or weights; None: the head's own.

    Args:
        config: Of the run.
        class_weights: See `Setup`.
    """
    return _cross_entropy(config, class_weights, config.label_smoothing_factor)


def evaluation_loss_fn(
    config: FinetuneConfig, class_weights: Mapping[str, float] | None = None
) -> LossFunction | None:
    """The loss of evaluations: with the weights of the training loss, without label smoothing."""
    return _cross_entropy(config, class_weights, label_smoothing=0.0)


def _cross_entropy(
    config: FinetuneConfig, class_weights: Mapping[str, float] | None, label_smoothing: float
) -> LossFunction | None:
    shifted = config.task == "causal-lm"
    if class_weights:
        return WeightedCrossEntropy(label_smoothing, shifted, tuple(class_weights.values()))
    if config.weight_column is not None:
        return WeightedCrossEntropy(label_smoothing, shifted)
    return SmoothedCrossEntropy(label_smoothing, shifted) if label_smoothing else None


def evaluate_split(
    setup: Setup, model: nn.Module, rule: Rule, split: str = "validation"
) -> dict[str, float]:
    """Loss and metrics of a split, as `eval_loss` or `test_loss`, ..."""
    data = setup.data
    windows = evaluation_windows(
        data.samples(split),
        data.collate,
        accelerator=setup.accelerator,
        batch_size=setup.config.per_device_eval_batch_size,
        lengths=data.splits[split]["length"][:],
        rule=rule,
        same_bits=setup.config.same_bits is not None,
    )
    prefix = "eval_" if split == "validation" else f"{split}_"
    if data.task.labels == "pairs":
        found = evaluate_embeddings(setup, model, windows, rule, split)
    else:
        found = evaluate(setup.accelerator, model, windows, rule, make_reader(setup, model, split))
    results = {prefix + name.removeprefix("eval_"): value for name, value in found.items()}
    if setup.on_evaluate is not None:
        with torch.no_grad(), restored_modes(model):
            setup.on_evaluate(dict(results), model.eval())
    return results


def proof_samples(data: PreparedData, split: str) -> Sequence[dict[str, Any]]:
    """Samples over the whole range of lengths, to find out whether the loss depends on padding;
    none that weigh nothing.
    """
    dataset = data.splits[split]
    by_length = np.argsort(np.asarray(dataset["length"][:]), kind="stable")
    if "weight" in dataset.column_names:
        weights = np.asarray(dataset["weight"][:])
        by_length = by_length[weights[by_length] > 0]
    ids = by_length[
        np.linspace(0, len(by_length) - 1, min(NUM_PROOF_SAMPLES, len(by_length))).astype(int)
    ]
    samples = data.samples(split)
    return [samples[int(i)] for i in ids]
