"""Train only a part of a model: freeze parameters by name, or add LoRA adapters with PEFT (extra
`peft`), save them, and merge them into the model.
"""

import difflib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.model.forward import unwrapped


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze all parameters whose names match a pattern of the flag `freeze`: set their
    `requires_grad` to False.

    Args:
        model: The model.
        patterns: Names of parameters or modules, with the wildcards `*`, `?` and `[0-3]`. The name
            of a module freezes all its parameters.

    Raises:
        ConfigError: If a pattern matches no parameter, or no parameter remains trainable.

    Example:
        freeze(model, ["bert.embeddings", "bert.encoder.layer.[0-2].*"])
    """
    # A tied parameter with all of its names.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        matched = [
            name
            for name in names
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not matched:
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"freeze: no parameter is named {pattern!r}; the nearest is {nearest}."
            )
        for name in matched:
            model.get_parameter(name).requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"freeze {' '.join(patterns)} freezes all {len(names)} parameters: leave some to train."
        )


def add_adapters(
    model: nn.Module,
    config: FinetuneConfig,
    task_type: str | None,
    new_weights: Sequence[str],
    new_tokens: Sequence[int],
) -> nn.Module:
    """Add new LoRA adapters to the model of a fine-tuning run (flag `lora_r`), or load existing
    ones to train them further (`adapter_name_or_path`).

    The model's own weights are frozen, except modules without any pretrained weights, such as a new
    head, and the embeddings of new tokens. All trainable parameters are converted to float32.

    Args:
        model: The model with pretrained weights.
        config: The configuration of the run.
        task_type: The `peft.TaskType` of the task, or None if PEFT has none for it.
        new_weights: Names of parameters that the pretrained checkpoint lacks.
        new_tokens: Ids of tokens whose rows in the token embeddings are new.

    Returns:
        The model in a `peft.PeftModel`.

    Raises:
        ConfigError: If no layer has the names in `lora_target_modules`, `adapter_name_or_path`
            cannot be loaded, or the rows of new tokens cannot be trained.
    """
    import peft

    token_indices: dict[str, list[int]] = {}
    if config.lora_r is not None:
        token_indices = _trainable_token_indices(model, config, new_tokens)
    try:
        with _quiet_peft():
            if config.adapter_name_or_path is not None:
                peft_model = peft.PeftModel.from_pretrained(
                    model, config.adapter_name_or_path, is_trainable=True
                )
            else:
                modules_to_save = _modules_without_pretrained_weights(model, new_weights)
                modules_to_save += config.lora_modules_to_save or ()
                lora_config = peft.LoraConfig(
                    r=config.lora_r,
                    lora_alpha=config.lora_alpha or 2 * config.lora_r,
                    lora_dropout=config.lora_dropout,
                    target_modules=config.lora_target_modules or "all-linear",
                    modules_to_save=modules_to_save or None,
                    trainable_token_indices=token_indices or None,
                    use_dora=config.use_dora,
                    task_type=task_type,
                )
                peft_model = peft.get_peft_model(model, lora_config)
    except (OSError, ValueError, RuntimeError) as error:
        problem = "LoRA cannot be added"
        if config.lora_r is None:
            problem = f"cannot load the adapter {config.adapter_name_or_path!r}"
        raise ConfigError(f"{problem}: {str(error).splitlines()[0]}") from error
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            # A head that PEFT trains in full has the dtype of the model, which may be bf16.
            parameter.data = parameter.data.float()
    _check_trainable(peft_model, config, new_tokens)
    keep_4_bit_layout(peft_model)
    return peft_model


def _check_trainable(peft_model: Any, config: FinetuneConfig, new_tokens: Sequence[int]) -> None:
    """Check, in a run with LoRA adapters, that no two trainable parameters share memory, so that an
    optimizer step updates each once, and that the embeddings of all new tokens are trained: their
    rows alone, or the embeddings in full.
    """
    from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

    if getattr(peft_model.peft_config["default"], "target_modules_to_tie", None):
        raise ConfigError(
            f"the adapter {config.adapter_name_or_path!r} has ensure_weight_tying: the matrices of "
            "its tied layers share memory, so that each update would be made twice. Train a new "
            "adapter with lora_r."
        )
    if not new_tokens:
        return
    embedding = peft_model.get_base_model().get_input_embeddings()
    trained: Iterable[int] = new_tokens if isinstance(embedding, ModulesToSaveWrapper) else ()
    if isinstance(embedding, TrainableTokensWrapper):
        trained = embedding.token_adapter.token_indices["default"]
    if not set(new_tokens) <= set(trained):
        raise ConfigError(
            f"the adapter {config.adapter_name_or_path!r} does not train the rows of the "
            f"{len(new_tokens)} new tokens: train a new one with lora_r, or omit "
            "resize_token_embeddings and use the model's own tokenizer."
        )


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Suppress, within the block, warnings of PEFT that do not apply to fine-tuning runs."""
    with warnings.catch_warnings():
        # PEFT sets fan_in_fan_out itself for GPT-2's Conv1D, and warns.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        # `merge_adapters` merges adapters of tied weights correctly.
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings")
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        # With `save_embedding_layers="auto"`, PEFT warns when it saves embeddings.
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        # PEFT's FutureWarnings are about future versions of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        yield


def keep_4_bit_layout(model: nn.Module) -> None:
    """Prevent bitsandbytes from repacking the 4-bit weights of a QLoRA run (`load_in_4bit`) in
    evaluation mode, as it does for bf16 on CPUs with AVX512. No-op without 4-bit layers.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _trainable_token_indices(
    model: PreTrainedModel, config: FinetuneConfig, new_tokens: Sequence[int]
) -> dict[str, list[int]]:
    """Return `trainable_token_indices` for PEFT, so that a run with LoRA and
    `resize_token_embeddings` trains the rows of new tokens in its embeddings, and no others.
    """
    if not new_tokens:
        return {}
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [
        name
        for name, module in model.named_modules()
        if any(module is embedding for embedding in embeddings)
    ]
    has_adapter = any(_has_name(name, config.lora_target_modules) for name in names)
    trained_in_full = [name for name in names if _has_name(name, config.lora_modules_to_save)]
    if trained_in_full == names and not has_adapter:
        return {}
    has_bias = getattr(embeddings[1], "bias", None) is not None
    if has_adapter or trained_in_full or has_bias:
        raise ConfigError(
            f"PEFT cannot train the new rows of {' and '.join(names)} alone, because one of them "
            "has a bias, is in lora_target_modules, or is in lora_modules_to_save without the "
            f"other: train them in full with --lora_modules_to_save {' '.join(names)}, without "
            "adapters of their own."
        )
    return {name: list(new_tokens) for name in names}


def _has_name(module_name: str, names: Sequence[str] | None) -> bool:
    """Return whether PEFT selects a module by one of the names in the flags `lora_target_modules`
    or `lora_modules_to_save`: its full name, or an end of it after a dot.
    """
    return any(module_name == name or module_name.endswith(f".{name}") for name in names or ())


def _modules_without_pretrained_weights(model: nn.Module, new_weights: Sequence[str]) -> list[str]:
    """Return the names of the modules all of whose parameters are new, such as a new head. A run
    with LoRA adapters trains them in full (PEFT's `modules_to_save`).
    """
    new_parameters = set(new_weights)
    new_modules = []
    for module_name, module in model.named_modules():
        parameters = {f"{module_name}.{name}" for name, _ in module.named_parameters()}
        if module_name and parameters and parameters <= new_parameters:
            new_modules.append(module_name)
    return [name for name in new_modules if name.rpartition(".")[0] not in new_modules]


def save_adapter(
    folder: Path, model: nn.Module, weights: dict[str, Tensor], config: FinetuneConfig
) -> None:
    """Save the LoRA adapters of a run's model, and its other trained parts (a new head, embeddings
    of new tokens), for `PeftModel.from_pretrained`.

    Args:
        folder: An existing folder.
        model: The trained PEFT model, which may be wrapped.
        weights: Its full state dict.
        config: The configuration of the run.
    """
    peft_model: Any = unwrapped(model)
    # Frozen embeddings are those of the base model, unless a loaded adapter has its own: then PEFT
    # decides.
    save_embedding_layers = False if config.adapter_name_or_path is None else "auto"
    with _quiet_peft():
        peft_model.save_pretrained(
            folder, state_dict=weights, save_embedding_layers=save_embedding_layers
        )


def merge_adapters(peft_model: nn.Module) -> PreTrainedModel:
    """Merge the trained LoRA adapters of a run into the weights of their base model in place, and
    return this model without PEFT's wrapper.

    PEFT adds an adapter's product to a weight in place. A tied weight belongs to several modules,
    of which only some may have an adapter, so each module first gets its own copy. If the copies
    are equal after merging, they are tied again; otherwise the model stays untied.

    Args:
        peft_model: A PEFT model, neither sharded nor in 4 bits.
    """
    base_model: Any = peft_model.get_base_model()
    was_tied = getattr(base_model.config, "tie_word_embeddings", False)
    _untie(base_model)
    with _quiet_peft():
        base_model = peft_model.merge_and_unload(safe_merge=True)
    if not was_tied:
        return base_model
    copies = [
        (base_model.get_parameter(name), base_model.get_parameter(source))
        for name, source in base_model.all_tied_weights_keys.items()
    ]
    if all(torch.equal(copy, weight) for copy, weight in copies):
        base_model.config.tie_word_embeddings = True
        base_model.tie_weights()
    else:
        base_model.config.tie_word_embeddings = False
        base_model.all_tied_weights_keys = {}
    return base_model


def _untie(model: nn.Module) -> None:
    """Replace, in place, a parameter that several modules share by a copy in each of them but the
    first, so that a run's LoRA adapters can be merged into one module without changing the others.
    """
    parameters = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in parameters:
                copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, copy)
            parameters.add(parameter)


def is_lora(model: nn.Module) -> bool:
    """Return whether the model of a fine-tuning run, which may be wrapped by DDP or FSDP, is a PEFT
    model with LoRA adapters.
    """
    return hasattr(unwrapped(model), "merge_and_unload")
