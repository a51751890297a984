"""Compile the repeated layers of a model: one graph serves all layers of a class."""

from typing import Any

from torch import nn

from hf_ga.errors import ConfigError


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile each of the repeated layers of a model in place, for all batch sizes and lengths.

    Layers of one class share their graphs, so a run compiles two or three graphs, in much less time
    than for the whole model: one for batches with padding, one for those without, and one for
    single samples. Keyed dropout works within them. Call it before `prepare`.

    Args:
        model: With lists of equal layers, as transformers models have.
        options: Of `torch.compile`, such as `backend` or `mode`.

    Raises:
        ConfigError: If the model has no list of equal layers.

    Example:
        model = AutoModelForCausalLM.from_pretrained("gpt2")
        hf_ga.compile_layers(model)
    """
    layers = repeated_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal layers to compile: call its method "
            "compile(), or do not compile it."
        )
    for layer in layers:
        layer.compile(dynamic=True, **options)


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers in the outermost lists of equal layers, such as encoder and decoder."""
    is_stack = isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    if is_stack:
        return list(module)
    return [layer for child in module.children() for layer in repeated_layers(child)]
