"""--torch_compile: the layers of a transformers model compiled one by one, once for all lengths, batch sizes and layers.

The layers, not the model: masks, head and loss stay as they are (also a head whose logits are never made), layers of one class
share what was compiled, and a start takes seconds.
"""

from collections.abc import Sequence

from torch import nn

from hf_ga.errors import ConfigError
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import unwrapped


def compile_layers(model: nn.Module, dropout: KeyedDropout) -> int:
    """Compile the layers of `model` in place, for any length. Names, weights and what is saved stay as they are.

    Call it after `prove_targets`, whose hooks need plain modules; compiling itself happens in the first window.

    Args:
        dropout: as proven.

    Returns:
        how many layers.

    Raises:
        ConfigError: the model draws dropout, whose masks are keyed by hooks and functions that a compiler does not see, it names no
            layers, or it checkpoints activations.
    """
    if dropout.sites:
        site = next(iter(dropout.sites.values())).name
        raise ConfigError(
            f"torch_compile needs a model without dropout, but this one draws at {len(dropout.sites)} sites ({site} first), "
            "where compiled code would not draw the masks that belong to the samples: set the dropout probabilities of its "
            "configuration to 0, or leave torch_compile out."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError("torch_compile and gradient_checkpointing were never tried together: leave one of them out.")
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"torch_compile compiles the layers that a transformers model names in _no_split_modules, but {type(model).__name__} "
            "names none: leave torch_compile out."
        )
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated layers: modules of the classes that the model names as not to be split, outermost ones, several of a class."""
    plain = unwrapped(model)
    names = set(getattr(plain, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in plain.named_modules() if type(module).__name__ in names]
    outermost = [m for name, m in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    classes = [type(m) for m in outermost]
    return [m for m in outermost if classes.count(type(m)) > 1]
