"""Outputs of a model whose loss can be read alone: all else is computed, and reported, when it is
read first.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

from hf_ga.model.loaded import loaded_class
from hf_ga.speed.lazy_logits import LazyLogits

OnRead = Callable[[], None]
_ON_READ = "_hf_ga_on_read"  # the attribute of watched outputs with what is to be called


def watched(outputs: Any, on_read: OnRead) -> Any:
    """Let `on_read` be called when anything but the loss is read from a model's outputs.

    The class of a `ModelOutput` is replaced, in place, until then; its lazy logits are computed
    then. Outputs of another kind count as read at once, except a tensor alone.

    Args:
        outputs: What a model returned.
        on_read: Called once, before the first reading.

    Returns:
        The outputs, without lazy logits unless they are a `ModelOutput`.
    """
    model_output = loaded_class("transformers.utils.generic", "ModelOutput")
    if isinstance(outputs, model_output) and not isinstance(outputs, _WatchedOutputs):
        vars(outputs)[_ON_READ] = on_read
        object.__setattr__(outputs, "__class__", _watched_class_of(type(outputs)))
        return outputs
    if not isinstance(outputs, Tensor) or isinstance(outputs, LazyLogits):
        on_read()
    return _computed(outputs)


def _computed(value: Any) -> Any:
    """Return a value with the logits in place of lazy ones, also in dicts, lists and tuples."""
    if isinstance(value, LazyLogits):
        return value.materialize()
    if type(value) is dict:
        return {name: _computed(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_computed, value))
    return value


@lru_cache(None)  # making a class registers it with torch's pytrees, so make it once
def _watched_class_of(output_class: type) -> type:
    """Return the subclass of a `ModelOutput` class that notices what is read."""
    bases = (_WatchedOutputs, output_class)
    return type(output_class.__name__, bases, {"_output_class": output_class})


class _WatchedOutputs:
    """Mixin for the class of a model's outputs of which at most the loss has been read so far."""

    _output_class: type  # the original class

    def __getattribute__(self, name: str) -> Any:
        """Read an attribute: any but the loss is reported."""
        if name not in ("loss", "get", "__class__", "__dict__"):
            _open(self)
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        """Read an entry by name or index: any but the loss is reported."""
        is_first_loss = key == 0 and next(iter(dict.keys(self)), None) == "loss"
        if key == "loss" or is_first_loss:
            return dict.__getitem__(self, "loss")
        return _open(self)[key]

    def get(self, name: Any, default: Any = None) -> Any:
        """Read an entry by name: any but the loss is reported."""
        return dict.get(self if name == "loss" else _open(self), name, default)

    def __contains__(self, name: Any) -> bool:
        """Return whether there is an output of this name."""
        return dict.__contains__(self, name)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the names, which is reported."""
        return iter(_open(self))

    def __len__(self) -> int:
        """Return the number of outputs."""
        return dict.__len__(self)

    def __reduce__(self) -> Any:
        """Pickle as the original class does, which is reported."""
        return _open(self).__reduce__()


def _open(outputs: Any) -> Any:
    """Report that outputs are read, give them their class back, and compute their lazy logits."""
    object.__setattr__(outputs, "__class__", type(outputs)._output_class)
    on_read = vars(outputs).pop(_ON_READ, None)  # None: a copy, which DDP makes of outputs
    if on_read is not None:
        on_read()
    for name, value in list(dict.items(outputs)):
        if isinstance(value, LazyLogits):
            logits = value.materialize()
            dict.__setitem__(outputs, name, logits)
            vars(outputs)[name] = logits
    return outputs
