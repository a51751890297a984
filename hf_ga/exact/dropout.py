"""Keyed dropout: masks that belong to samples, drawn at the model's dropout sites.

While a window is computed, torch's dropout functions are replaced by keyed ones
(`dropout_functions.py`). A dropout site is a path of module calls plus the number of the draw
within the last module's forward; forward hooks keep the path. The hooks find the same path when
activation checkpointing runs a module again inside `backward()`, where the outer modules are not
running.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.exact.compiled_dropout import CompiledDropout
from hf_ga.exact.dropout_functions import DRAWING_FUNCTIONS, dropped_attention
from hf_ga.exact.dropout_site import DropoutSite
from hf_ga.exact.forward import compiled_modules
from hf_ga.exact.hashing import fold_in, name_key
from hf_ga.exact.hooks import Call, Hook
from hf_ga.exact.masks import apply_dropout_mask, drop, keep_mask
from hf_ga.exact.override import override

cached_key = lru_cache(1 << 16)(fold_in)  # each forward uses the same ones


@dataclass(frozen=True)
class SampleMasks:
    """Draws the masks of padded samples.

    Attributes:
        keys: Of the samples: int64, shape (samples,).
        window_key: Of masks that the window shares: int64, shape (1,).
    """

    keys: Tensor
    window_key: Tensor

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw a mask: bool, of the given shape.

        Raises:
            UnkeyedRandomness: If the sample axis does not hold whole samples.
        """
        self._check(site, shape)
        return keep_mask(self._keys_of(site), site.key, shape, site.axis, drop_probability)

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of an input.

        Raises:
            UnkeyedRandomness: If the sample axis does not hold whole samples.
        """
        self._check(site, input.shape)
        dropped = drop(input, self._keys_of(site), site.key, site.axis, drop_probability)
        if dropped is not None:
            return dropped
        kept = self.mask(site, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _keys_of(self, site: DropoutSite) -> Tensor:
        return self.window_key if site.axis is None else self.keys

    def _check(self, site: DropoutSite, shape: torch.Size) -> None:
        if site.axis is not None and shape[site.axis] % len(self.keys):
            raise UnkeyedRandomness(
                f"{site.name} draws a dropout mask of shape {list(shape)} for {len(self.keys)} "
                f"samples: axis {site.axis} does not contain whole samples (packed tokens?). Set "
                "this dropout to 0, or feed padded batches."
            )


class Frame:
    """A call of a module that is running.

    Attributes:
        module: The module.
        key: Of its path: the calls from the model down to this one.
        calls: How often it called each submodule.
        num_calls: How often it called any.
        draws: How many masks it drew.
    """

    __slots__ = ("calls", "draws", "key", "module", "num_calls")

    def __init__(self, module: nn.Module, key: int) -> None:
        self.module = module
        self.key = key
        self.calls: Counter[nn.Module] = Counter()
        self.num_calls = 0
        self.draws = 0


class SeenCall(NamedTuple):
    """A call of a module in the last forward.

    Attributes:
        key: Of its path.
        inputs: Which tensors it got, see `_identity`.
        parent: Key of the call that made it.
        index: Of this call among those that its parent made.
    """

    key: int
    inputs: tuple[Any, ...]
    parent: int | None = None
    index: int = 0


class KeyedDropout(Hook):
    """The dropout of one model. `proof.sites.find_dropout_sites` makes it.

    Attributes:
        sites: By their keys.
        hooked: Modules whose calls make the paths of the sites.
        unkeyed: Modules that draw in a way that depends on the split, where that was allowed.
        source: Draws the masks of the next forward; a speed-up may put its own there.
        attend: Attention with a given mask of its weights; a speed-up may put its own there.

    Example:
        def forward(num_samples):
            return model(**collate([sample] * num_samples))

        dropout = find_dropout_sites(model, forward)
        with dropout.scope(model):
            dropout.set_keys(sample_keys(seed, epoch, positions), window_key(seed, epoch, index))
            model(**batch).loss.backward()
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sites: dict[int, DropoutSite] = {}
        self.unkeyed: list[nn.Module] = []
        self.attend: Callable[..., Tensor] = dropped_attention
        self.names = {
            module: name or "(the model itself)" for name, module in model.named_modules()
        }
        self._name_keys = {module: name_key(name) for module, name in self.names.items()}
        self.hooked = list(self.names)
        self._stack: list[Frame] = []
        self._calls: dict[nn.Module, list[SeenCall]] = {}  # of the last forward
        # What checkpointing ran again last, and the node of the graph whose backward needed it.
        self._run_again: tuple[SeenCall, Any] | None = None
        self.source: Any = None
        self._compiled: CompiledDropout | None = None

    def set_keys(self, keys: Tensor, shared: Tensor) -> None:
        """Set whose masks the next forward draws: int64 keys of shape (samples,) and (1,), on the
        model's device.
        """
        self.source = SampleMasks(keys, shared)
        if self._compiled is not None:
            self._compiled.set_keys(keys, shared)

    def before(self, call: Call) -> None:
        self.set_keys(call.keys, call.window_key)

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Make dropout keyed inside every forward of the model, and in what `backward()` runs
        again.
        """
        if not self.sites:
            return nullcontext()  # without patches a compiled model stays compiled
        compiled = self._find_compiled()
        if compiled is None or compiled.problem is not None:
            return self._patched()
        return self._patched_around(compiled)

    def check_compiled(self, model: nn.Module) -> None:
        """Check that the masks of compiled modules can be drawn.

        Args:
            model: As it was prepared.

        Raises:
            ConfigError: If compiled modules draw dropout in a way that cannot be keyed.
        """
        if not self.sites:
            return
        compiled = self._find_compiled()
        known = frozenset() if compiled is None else compiled.modules
        problem = None if compiled is None else compiled.problem
        if not known.issuperset(compiled_modules(model)):
            problem = "a wrapper around the model is compiled"
        if problem is not None:
            raise ConfigError(
                "the model is compiled and draws dropout that compiled code cannot key: "
                f"{problem}. Set its dropout to 0, or do not compile it."
            )

    def _find_compiled(self) -> CompiledDropout | None:
        """Return the keyed dropout of the modules that are compiled now; None if none is."""
        roots = compiled_modules(self.model)
        if not roots:
            self._compiled = None
        elif self._compiled is None or self._compiled.roots != roots:
            self._compiled = CompiledDropout(roots, self.sites.values())
        return self._compiled

    @contextmanager
    def _patched_around(self, compiled: CompiledDropout) -> Iterator[None]:
        """Let hooks keep the path outside of compiled modules, whose paths are resolved before."""
        outside = proxy(self)  # torch.compile keeps the functions for ever

        def replacement(owner: object, name: str, keyed: Callable) -> Callable:
            return compiled.replacement(getattr(owner, name), keyed, outside)

        hooked = [module for module in self.hooked if module not in compiled.modules]
        device = next(self.model.parameters(), torch.empty(0)).device
        with compiled.scope(device), self._replaced(hooked, replacement):
            yield

    def _patched(self) -> AbstractContextManager[None]:
        """Let hooks on all modules keep the path."""
        return self._replaced(self.hooked, self._replacement)

    @contextmanager
    def _replaced(
        self, hooked: Iterable[nn.Module], replacement: Callable[..., Callable]
    ) -> Iterator[None]:
        """Replace the dropout functions of torch, and let hooks of modules keep the path.

        Args:
            hooked: These modules.
            replacement: From the owner and the name of a function and its keyed one to what is
                called.
        """
        with ExitStack() as stack:
            for module in hooked:
                stack.callback(
                    module.register_forward_pre_hook(
                        self._enter, with_kwargs=True, prepend=True
                    ).remove
                )
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for owner, name, keyed in DRAWING_FUNCTIONS:
                stack.enter_context(override(owner, **{name: replacement(owner, name, keyed)}))
            stack.callback(self._stack.clear)
            stack.callback(self._forget_calls)
            yield

    def _replacement(self, owner: object, name: str, keyed: Callable) -> Callable:
        """Return what is called in place of a function of torch.

        It has the function's own name, which torch.compile reads of all functions of torch. It
        refers to the model weakly, because torch.compile keeps these functions for ever.

        Has the function's own name, which torch.compile reads of all functions of torch. Refers to
        the model weakly, because torch.compile keeps these functions for ever.
        """
        original = getattr(owner, name)
        return update_wrapper(partial(keyed, proxy(self), original), original)

    def join_forward(self, args: tuple, kwargs: dict) -> None:
        """Called where a scope is entered while the model's forward begins: the hook that starts a
        forward was not registered yet.
        """
        if self._compiled is not None and self.model in self._compiled.modules:
            self._compiled.join_forward(self.model)
        elif self.model in self.hooked and self.sites:
            self._enter(self.model, args, kwargs)

    @property
    def running(self) -> nn.Module | None:
        """The innermost module whose forward is running; None outside of the model."""
        return self._stack[-1].module if self._stack else None

    def is_keyed(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call of a dropout function draws a mask that is keyed here.

        Raises:
            UnkeyedRandomness: If checkpointing runs a function again that draws outside of any
                module's forward.
        """
        if not training or drop_probability in (0, 1):
            return False
        if not self._stack:
            if is_in_backward():
                raise UnkeyedRandomness(
                    "activation checkpointing repeats a function that draws dropout outside of a "
                    "module's forward, so its masks cannot be identified. Put the function into a "
                    "module, or turn checkpointing off."
                )
            return False
        frame = self._stack[-1]
        site = self.sites.get(cached_key(frame.key, frame.draws))
        if site is None or site.is_keyed:
            return True
        frame.draws += 1  # allowed to depend on the split
        return False

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the next mask of the module that is running: bool, of the given shape."""
        return self._draw(self._next_key(), shape, drop_probability)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of an input, at the next draw of the module that is
        running.
        """
        return self._dropped(self._next_key(), input, drop_probability)

    def _next_key(self) -> int:
        frame = self._stack[-1]
        key = cached_key(frame.key, frame.draws)
        frame.draws += 1
        return key

    def _dropped(self, key: int, input: Tensor, drop_probability: float) -> Tensor:
        return self.source.drop(self._site(key), input, drop_probability)

    def next_site(self) -> DropoutSite | None:
        """Return the site of the next draw of the module that is running, for a mask that is drawn
        elsewhere, as by a kernel.

        Returns None if the probing forward drew no mask there.
        """
        frame = self._stack[-1]
        return self.sites.get(cached_key(frame.key, frame.draws))

    def skip_draw(self) -> None:
        """Count a draw of the module that is running whose mask is drawn elsewhere."""
        self._stack[-1].draws += 1

    def _draw(self, key: int, shape: torch.Size, drop_probability: float) -> Tensor:
        return self.source.mask(self._site(key), shape, drop_probability)

    def _site(self, key: int) -> DropoutSite:
        """Return the site with this key.

        Raises:
            UnkeyedRandomness: If the probing forward did not reach it.
        """
        site = self.sites.get(key)
        if site is None:
            raise UnkeyedRandomness(
                f"{self.names[self._stack[-1].module]} draws dropout at a site that the probing "
                "forward did not reach: the model's path depends on its data or has changed. Prove "
                "the model again, or set this dropout to 0."
            )
        return site

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Push a module whose forward begins onto the stack, with the key of its path."""
        if self._compiled is not None:
            self._compiled.leave_all()
        inputs = tuple(_identity(v) for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if self._stack:
            parent = self._stack[-1]
            key = cached_key(parent.key, self._name_keys[module], parent.calls[module])
            call = SeenCall(key, inputs, parent.key, parent.num_calls)
            parent.calls[module] += 1
            parent.num_calls += 1
            if not is_in_backward():
                self._calls.setdefault(module, []).append(call)
        elif module is not self.model and is_in_backward():
            key = self._key_of_recomputed(module, inputs)
        else:
            if module is self.model:
                self._forget_calls()
            calls = self._calls.setdefault(module, [])
            key = cached_key(self._name_keys[module], len(calls))
            calls.append(SeenCall(key, inputs))
        self._stack.append(Frame(module, key))

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._run_again = None

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._stack and self._stack[-1].module is module:  # else `_enter` raised for this call
            self._stack.pop()

    def _key_of_recomputed(self, module: nn.Module, inputs: tuple[Any, ...]) -> int:
        """Return the path key of the call that checkpointing runs again.

        Where a forward called the module several times (an encoder of two texts): of the modules
        that run again together, the first one has the inputs that it had in the forward, because
        checkpointing keeps them. The others follow each other as they did there.
        """
        calls = self._calls.get(module, [])
        node = torch._C._current_autograd_node()  # the same for modules that run again together
        last_call, last_node = self._run_again or (None, None)
        if len(calls) == 1:
            matching = calls
        elif node is last_node:
            matching = [call for call in calls if _follows(call, last_call)]
        else:
            matching = [call for call in calls if call.inputs == inputs]
        if len(matching) != 1:
            raise UnkeyedRandomness(
                f"activation checkpointing runs {self.names[module]} again, which the forward "
                f"called {len(calls)} times, and {len(matching)} of these calls had the same "
                "inputs: its masks cannot be identified. Turn gradient checkpointing off, or set "
                "its dropout to 0."
            )
        call = matching[0]
        self._run_again = (call, node)
        return call.key


def _identity(tensor: Tensor) -> tuple[Any, int, int]:
    """Identify the values of a tensor.

    An address does not: memory is used again, by other tensors once it is free, or for other
    values.
    """
    if tensor.layout != torch.strided:  # a sparse tensor has no storage of its own
        return proxy(tensor), 0, tensor._version
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor._version


def _follows(call: SeenCall, last: SeenCall) -> bool:
    """Whether one module made two calls, one directly after the other."""
    return call.parent is not None and call.parent == last.parent and call.index == last.index + 1


def is_in_backward() -> bool:
    """Whether autograd is running: a forward now is one that activation checkpointing runs
    again.
    """
    return torch._C._current_graph_task_id() != -1
