"""Finds weights that change between the backwards of a window, of any module that the loop calls.

The full batch has one iteration: a clamp, a decay, or a teacher that follows the model by a moving
average would do in each one what it does once there.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import ref

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.model.forward import before_all_forwards
from hf_ga.model.precision import at_least_float32

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # that have norms
NUM_NAMES = 4  # of weights in a message


class WeightCheck:
    """Compares the norms of weights at the first backward after their module was called with those
    at the window's end.
    """

    def __init__(self) -> None:
        """Start switched off."""
        self.stop()

    def stop(self) -> None:
        """Forget the weights of a window."""
        self._is_on = False
        self._sees_modules = False
        self._called: dict[int, ref[nn.Module]] = {}  # by identity: they may define equality
        self._other_weights: Sequence[nn.Parameter] = ()
        self._noted: dict[int, tuple[str, Tensor, Tensor]] = {}  # (name, weight, norm)

    def start(self, parameters: Sequence[nn.Parameter], *, with_modules: bool) -> None:
        """Watch a window, until `stop`.

        Args:
            parameters: Those that are trained, which a loop may use without a module.
            with_modules: Whether the modules are watched that are called.
        """
        self._is_on = True
        self._sees_modules = with_modules
        self._other_weights = parameters

    def seeing_modules(self) -> AbstractContextManager[None]:
        """Return a context, around a micro-batch, in which called modules are noted."""
        if not self._sees_modules:
            return nullcontext()
        return before_all_forwards(self._note_module)

    def _note_module(self, module: nn.Module, args: tuple) -> None:
        """Note a module that is called; a forward pre-hook of all modules."""
        if not torch.compiler.is_compiling():
            self._called[id(module)] = ref(module)

    def note(self) -> None:
        """After a backward, note the norms of weights that are new in this window."""
        if not self._is_on:
            return
        for name, weight in self._weights():
            if id(weight) not in self._noted:
                self._noted[id(weight)] = (name, weight, _norm(weight))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the called modules, and those beside them; not of embeddings that
        renormalise what they look up.
        """
        called = [module for known in self._called.values() if (module := known()) is not None]
        embeddings = [m for m in called if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        renormalised = {id(m.weight) for m in embeddings if m.max_norm is not None}
        named = [
            (f"{type(module).__name__}.{name}", weight)
            for module in called
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        named += [(f"a parameter of shape {list(w.shape)}", w) for w in self._other_weights]
        for name, weight in named:
            has_norm = weight.dtype in DTYPES and not weight.is_meta
            if has_norm and id(weight) not in renormalised:
                yield name, weight

    def check(self) -> None:
        """Check that the window's weights are those of before.

        Raises:
            ConfigError: If one is not.
        """
        changed = [
            name
            for name, weight, norm in self._noted.values()
            if not torch.allclose(_norm(weight), norm, rtol=0, atol=0, equal_nan=True)
        ]
        if not changed:
            return
        names = ", ".join(dict.fromkeys(changed[:NUM_NAMES]))
        raise ConfigError(
            f"weights changed within a window ({names}): the loop clamps, decays or copies them, "
            "or lets a teacher follow by a moving average, in each iteration, so the window's "
            "micro-batches used different ones. Do it after optimizer.step(), below "
            "`if accelerator.sync_gradients:`."
        )


def _norm(weight: Tensor) -> Tensor:
    """Return the norm of a weight, of at least float32, on its device."""
    return torch.linalg.vector_norm(at_least_float32(weight.detach()))
