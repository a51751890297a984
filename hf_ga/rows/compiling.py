"""Compile the repeated layers of a model: one graph serves all layers of a class."""

from typing import Any

from torch import nn

from hf_ga.errors import ConfigError

OPTIONS = "_hf_ga_compile_options"  # attribute of a compiled layer: options of torch.compile


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile each repeated layer of a model with `torch.compile`, in place.

    Layers of one class share their graphs, so a run compiles two or three graphs, much faster than
    the whole model: one for batches with padding, one for those without, and one for single
    samples. Shapes are dynamic: the graphs serve all batch sizes and lengths. Keyed dropout works
    within them. Call it before `prepare`.

    Args:
        model: A model with lists of equal layers, as transformers models have.
        options: Options of `torch.compile`, such as `backend` or `mode`.

    Raises:
        ConfigError: If the model has no list of equal layers.

    Example:
        model = AutoModelForCausalLM.from_pretrained("gpt2")
        hf_ga.compile_layers(model)
    """
    layers = repeated_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal layers to compile: call the method "
            "compile() of those of its modules that do not compute its loss, or do not compile it."
        )
    for layer in layers:
        layer.compile(dynamic=True, **options)
        setattr(layer, OPTIONS, options)


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a model to compile: those of its lists of equal layers."""
    return [layer for layers in layer_lists(module) for layer in layers]


def layer_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of equal layers of a model: each `nn.ModuleList` of layers of one class.

    There may be several, such as those of an encoder and of a decoder. A list within a layer is
    left out. Empty if there is none.
    """
    is_list = isinstance(module, nn.ModuleList)
    if is_list and len({type(layer) for layer in module}) == 1:
        return [module]
    return [layers for child in module.children() for layers in layer_lists(child)]
