"""Finds weights that change between the backwards of a window, of any module that the loop calls.

The full batch has one iteration: a clamp, a decay, or a teacher that follows the model by a moving
average would do in each one what it does once there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.model.forward import before_all_forwards

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # that have norms
NUM_NAMES = 4  # of weights in a message


class Weight(NamedTuple):
    """A weight or a buffer that must stay as it is within a window.

    Attributes:
        holder: The mapping that holds it.
        key: Its key there.
        name: Its name in messages.
    """

    holder: Mapping[Any, Tensor | None]
    key: Any
    name: str

    @property
    def place(self) -> tuple[int, Any]:
        """What identifies it."""
        return id(self.holder), self.key

    @property
    def tensor(self) -> Tensor | None:
        """Its value now; None if it has no norm."""
        tensor = self.holder.get(self.key)
        if tensor is None or tensor.dtype not in DTYPES or tensor.is_meta:
            return None
        return tensor.detach()


@dataclass(frozen=True)
class Norms:
    """The norms of weights of one device and dtype.

    Attributes:
        weights: The weights.
        values: Their norms, shape (weights,).
    """

    weights: Sequence[Weight]
    values: Tensor

    def changed(self) -> list[str]:
        """Return the names of the weights that have another norm now, or another place."""
        device = self.values.device
        tensors = [weight.tensor for weight in self.weights]
        if any(tensor is None or tensor.device != device for tensor in tensors):  # offloaded
            return []
        now = _norms_of(tensors)
        if torch.equal(now, self.values):
            return []
        is_changed = (now != self.values).tolist()
        return [
            weight.name for weight, is_so in zip(self.weights, is_changed, strict=True) if is_so
        ]


class WeightCheck:
    """Compares the norms of weights at the first backward after their module was called with those
    at the window's end.
    """

    def __init__(self) -> None:
        """Start switched off, with no module known."""
        self._called: dict[int, ref[nn.Module]] = {}  # by identity: they may define equality
        self.stop()

    def stop(self) -> None:
        """End a window."""
        self._is_on = False
        self._sees_modules = False
        self._parameters: Mapping[int, nn.Parameter] = {}
        self._buffers: Sequence[Weight] = ()
        self._before: list[Norms] = []

    def start(self, parameters: Sequence[nn.Parameter], *, sees_modules: bool) -> None:
        """Watch a window, until `stop`: the modules that were called so far.

        Args:
            parameters: Those that are trained, which a loop may use without a module.
            sees_modules: Whether other modules are called in it, which are then watched, too.
        """
        self._is_on = True
        self._sees_modules = sees_modules
        self._parameters = dict(enumerate(parameters))

    def restart(self) -> None:
        """Forget the norms so far, because an optimizer has stepped."""
        self._before = []

    def seeing_modules(self) -> AbstractContextManager[None]:
        """Return a context, around a micro-batch, in which called modules are noted."""
        return before_all_forwards(self._note_module) if self._sees_modules else nullcontext()

    def _note_module(self, module: nn.Module, args: tuple) -> None:
        """Note a module that is called; a forward pre-hook of all modules."""
        if not torch.compiler.is_compiling():
            self._called[id(module)] = ref(module)

    def note_buffers(self, buffers: Sequence[tuple[Mapping, str, str]]) -> None:
        """Note buffers that forwards do not change, as (mapping, name in it, name in messages)."""
        self._buffers = [Weight(*buffer) for buffer in buffers]

    def note(self) -> None:
        """After a backward, note the norms of weights that are new in this window."""
        if not self._is_on or (self._before and not self._sees_modules):
            return
        known = {weight.place for norms in self._before for weight in norms.weights}
        self._before += norms_by_kind([w for w in self._weights() if w.place not in known])

    def _weights(self) -> Iterator[Weight]:
        """Yield the weights of the called modules, and those beside them; not of embeddings that
        renormalise what they look up.
        """
        called = [module for known in self._called.values() if (module := known()) is not None]
        embeddings = [m for m in called if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        renormalised = {id(m.weight) for m in embeddings if m.max_norm is not None}
        for module in called:
            for key, weight in module._parameters.items():
                if id(weight) not in renormalised:
                    yield Weight(module._parameters, key, f"{type(module).__name__}.{key}")
        of_modules = {id(weight) for m in called for weight in m._parameters.values()}
        for key, weight in self._parameters.items():
            if id(weight) not in of_modules:
                yield Weight(self._parameters, key, f"a parameter of shape {list(weight.shape)}")
        yield from self._buffers

    def check(self) -> None:
        """Check that the window's weights are those of before.

        Raises:
            ConfigError: If one is not.
        """
        changed = [name for norms in self._before for name in norms.changed()]
        if not changed:
            return
        names = ", ".join(dict.fromkeys(changed[:NUM_NAMES]))
        raise ConfigError(
            f"weights changed within a window ({names}): the loop clamps, decays or copies them, "
            "or lets a teacher or a centre follow by a moving average, in each iteration, so the "
            "window's micro-batches used different ones. Do it after optimizer.step(), below "
            "`if accelerator.sync_gradients:`."
        )


def norms_by_kind(weights: Sequence[Weight]) -> list[Norms]:
    """Return the norms of those weights that have one, by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Weight], list[Tensor]]] = {}
    for weight in weights:
        tensor = weight.tensor
        if tensor is None:
            continue
        of_kind, tensors = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        of_kind.append(weight)
        tensors.append(tensor)
    return [Norms(of_kind, _norms_of(tensors)) for of_kind, tensors in groups.values()]


def _norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors of one device and dtype, shape (tensors,). NaN becomes 0."""
    return torch.stack(torch._foreach_norm(tensors)).nan_to_num()
