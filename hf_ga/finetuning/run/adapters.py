"""Training a part of a model: parameters frozen by name, LoRA adapters through PEFT (extra
`peft`).
"""

import difflib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError
from hf_ga.exact.forward import unwrapped
from hf_ga.finetuning.run.config import FinetuneConfig


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze all parameters whose names match a pattern (`*`, `?`, `[0-3]`; a module's name
    includes all its parameters).

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter remains trainable.

    Example:
        freeze(model, ["bert.embeddings", "bert.encoder.layer.[0-2].*"])
    """
    names = [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]  # all names of a shared parameter
    for pattern in patterns:
        matched = [
            name
            for name in names
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            raise ConfigError(f"freeze: no parameter is named {pattern!r}; the nearest is {near}.")
        for name in matched:
            model.get_parameter(name).requires_grad = False
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            f"freeze {' '.join(patterns)} freezes all {len(names)} parameters: leave some to train."
        )


def add_adapters(
    model: nn.Module,
    config: FinetuneConfig,
    task_type: str | None,
    new_weights: Sequence[str] = (),
    new_tokens: Sequence[int] = (),
) -> nn.Module:
    """A `peft.PeftModel` around the model: adapters in float32, heads fully trained, the rest
    frozen.

    Args:
        task_type: a `peft.TaskType`, or None for heads without one.
        new_weights: names of parameters missing from the checkpoint: their modules are fully
            trained too.
        new_tokens: ids of tokens whose rows in the embeddings are new: these rows are trained too.

    Raises:
        ConfigError: no layer has the names in `lora_target_modules`, `adapter_name_or_path` cannot
            be loaded, or new rows cannot be trained.
    """
    import peft

    rows = _rows_to_train(model, config, new_tokens) if config.lora_r is not None else {}
    try:
        with _quiet_peft():
            if config.adapter_name_or_path is not None:
                adapted = peft.PeftModel.from_pretrained(
                    model, config.adapter_name_or_path, is_trainable=True
                )
            else:
                settings = peft.LoraConfig(
                    r=config.lora_r,
                    lora_alpha=config.lora_alpha or 2 * config.lora_r,
                    lora_dropout=config.lora_dropout,
                    target_modules=config.lora_target_modules or "all-linear",
                    modules_to_save=[
                        *_new_modules(model, new_weights),
                        *(config.lora_modules_to_save or ()),
                    ]
                    or None,
                    trainable_token_indices=rows or None,
                    use_dora=config.use_dora,
                    task_type=task_type,
                )
                adapted = peft.get_peft_model(model, settings)
    except (OSError, ValueError, RuntimeError) as error:
        what = (
            "LoRA cannot be added"
            if config.lora_r is not None
            else f"cannot load the adapter {config.adapter_name_or_path!r}"
        )
        raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # heads of a half-precision model
            parameter.data = parameter.data.float()
    _check_trained(adapted, config, new_tokens)
    keep_4_bit_layout(adapted)
    return adapted


def _check_trained(adapted: Any, config: FinetuneConfig, new_tokens: Sequence[int]) -> None:
    """Check that each parameter would be updated once, and all new rows of the embedding.

    Raises:
        ConfigError: See `add_adapters`.
    """
    if getattr(adapted.peft_config["default"], "target_modules_to_tie", None):
        raise ConfigError(
            f"the adapter {config.adapter_name_or_path!r} has ensure_weight_tying: the matrices of "
            "its tied layers share memory, so that each update would be made twice. Train a new "
            "adapter with lora_r."
        )
    if new_tokens and not _trains_rows(adapted, new_tokens):
        raise ConfigError(
            f"the adapter {config.adapter_name_or_path!r} does not train the rows of the "
            f"{len(new_tokens)} new tokens: train a new one with lora_r, or omit "
            "resize_token_embeddings and use the model's own tokenizer."
        )


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Without PEFT's warnings about what is right here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # GPT-2's Conv1D, which PEFT handles
        # See `merge_adapters`.
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings")
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        warnings.simplefilter("ignore", FutureWarning)  # about transformers
        yield


def keep_4_bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for bf16 products in evaluations, as it does on
    some CPUs.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _rows_to_train(
    model: PreTrainedModel, config: FinetuneConfig, new_tokens: Sequence[int]
) -> dict[str, list[int]]:
    """PEFT's `trainable_token_indices`: new rows by the name of their embedding. None where the
    whole embedding is trained.

    Raises:
        ConfigError: PEFT cannot train these rows alone.
    """
    if not new_tokens:
        return {}
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is e for e in embeddings)]
    adapted = [name for name in names if _is_named(name, config.lora_target_modules)]
    if adapted:
        raise ConfigError(
            f"resize_token_embeddings trains the new rows of {adapted[0]} themselves, but "
            "lora_target_modules names it: remove it there, or train it in full with "
            f"--lora_modules_to_save {' '.join(names)}."
        )
    whole = [name for name in names if _is_named(name, config.lora_modules_to_save)]
    if whole == names:
        return {}
    if whole:
        raise ConfigError(
            f"lora_modules_to_save trains {whole[0]} in full, but not the other embedding with new "
            f"rows: use --lora_modules_to_save {' '.join(names)}, or name neither."
        )
    if getattr(embeddings[1], "bias", None) is not None:
        raise ConfigError(
            f"PEFT cannot train the new rows of {names[-1]} alone, as it has a bias: train it in "
            f"full with --lora_modules_to_save {' '.join(names)}, or train without lora_r."
        )
    return {name: list(new_tokens) for name in names}


def _is_named(module: str, names: Sequence[str] | None) -> bool:
    """Whether PEFT would choose a module by one of the names."""
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _trains_rows(model: nn.Module, token_ids: Sequence[int]) -> bool:
    """Whether the adapters train the rows of these tokens in the input embedding."""
    from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

    embedding = model.get_base_model().get_input_embeddings()
    if isinstance(embedding, TrainableTokensWrapper):
        return set(token_ids) <= set(embedding.token_adapter.token_indices["default"])
    return isinstance(embedding, ModulesToSaveWrapper)


def _new_modules(model: nn.Module, new_weights: Sequence[str]) -> list[str]:
    """The largest modules with only new parameters."""
    new = set(new_weights)
    is_new = {
        name: {f"{name}.{p}" for p, _ in module.named_parameters()}
        for name, module in model.named_modules()
        if name
    }
    whole = [name for name, names in is_new.items() if names and names <= new]
    return [name for name in whole if name.rpartition(".")[0] not in whole]


def save_adapter(
    folder: Path, model: nn.Module, weights: dict[str, Tensor], config: FinetuneConfig
) -> None:
    """Save the adapters, and what is trained beside them.

    Args:
        folder: An existing one.
        model: The trained model.
        weights: Its full `state_dict()`.
        config: Of the run.
    """
    plain: Any = unwrapped(model)
    # Frozen embeddings are those of the base, unless a loaded adapter brought its own.
    embeddings = False if config.adapter_name_or_path is None else "auto"
    with _quiet_peft():
        plain.save_pretrained(folder, state_dict=weights, save_embedding_layers=embeddings)


def merge_adapters(model: nn.Module) -> PreTrainedModel:
    """Merge the adapters into the weights in place, and return the model within PEFT's wrapper.

    PEFT adds an adapter's product to a weight in place. A tied weight has several modules, of which
    only some have the adapter, so each module gets a copy of its own first. If the copies are still
    equal after merging, they are tied again; otherwise the model is saved untied.

    Args:
        model: A PEFT model, neither sharded nor in 4 bits.
    """
    plain: Any = model.get_base_model()
    was_tied = getattr(plain.config, "tie_word_embeddings", False)
    _untie(plain)
    with _quiet_peft():
        plain = model.merge_and_unload(safe_merge=True)
    if not was_tied:
        return plain
    copies = [
        (plain.get_parameter(name), plain.get_parameter(source))
        for name, source in plain.all_tied_weights_keys.items()
    ]
    if all(torch.equal(copy, weight) for copy, weight in copies):
        plain.config.tie_word_embeddings = True
        plain.tie_weights()
    else:
        plain.config.tie_word_embeddings = False
        plain.all_tied_weights_keys = {}
    return plain


def _untie(model: nn.Module) -> None:
    """Give every module its own copy of a shared parameter."""
    seen = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in seen:
                copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, copy)
            seen.add(parameter)


def is_lora(model: nn.Module) -> bool:
    """Whether the model is a PEFT model."""
    return hasattr(unwrapped(model), "merge_and_unload")
