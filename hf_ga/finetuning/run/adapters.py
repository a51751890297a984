"""Training a part of a model: parameters frozen by name, LoRA adapters through PEFT (extra
`peft`).
"""

import difflib
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

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
    model: nn.Module, config: FinetuneConfig, task_type: str | None, new_weights: Sequence[str] = ()
) -> nn.Module:
    """A `peft.PeftModel` around the model: adapters in float32, heads fully trained, the rest
    frozen.

    Args:
        task_type: a `peft.TaskType`, or None for heads without one.
        new_weights: names of parameters missing from the checkpoint: their modules are fully
            trained too.

    Raises:
        ConfigError: no layer has the names in `lora_target_modules`, or `adapter_name_or_path`
            cannot be loaded.
    """
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "fan_in_fan_out"
            )  # for GPT-2's Conv1D, which PEFT handles
            warnings.simplefilter("ignore", FutureWarning)  # from PEFT, about transformers
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
    for module in (
        adapted.modules()
    ):  # some CPUs: bitsandbytes would repack 4-bit weights in evaluations, and compute in bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return adapted


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


def is_lora(model: nn.Module) -> bool:
    """Whether the model is a PEFT model."""
    return hasattr(unwrapped(model), "merge_and_unload")
