"""Keyed dropout: masks that belong to samples, drawn at the model's dropout sites.

While a window is computed, torch's dropout functions are replaced by keyed ones
(`dropout_functions.py`). A dropout site is a path of module calls plus the index of the draw
within the last module's forward; forward hooks keep track of the path. The hooks find the same path
when activation checkpointing recomputes a module inside `backward()`, where the outer modules are
not running.
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

cached_key = lru_cache(1 << 16)(fold_in)  # every forward computes the same path keys


@dataclass(frozen=True)
class SampleMasks:
    """Draws the dropout masks of a padded micro-batch from one random key per sample.

    Attributes:
        keys: One key per sample of the micro-batch: int64, shape (samples,).
        window_key: The key of masks that have no sample dim, so that all samples of the window
            share them: int64, shape (1,).
    """

    keys: Tensor
    window_key: Tensor

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the mask of a dropout site in the model from the random keys of the samples: bool,
        of the given shape, True where dropout keeps.

        Raises:
            UnkeyedRandomness: If the size of the sample dim is not a multiple of the number of
                samples.
        """
        self._check_sample_dim(site, shape)
        return keep_mask(
            self._keys_of(site),
            site=site.key,
            shape=shape,
            sample_dim=site.sample_dim,
            drop_probability=drop_probability,
        )

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """Apply keyed dropout to a tensor, elementwise: with the mask that the random keys of the
        samples give at this dropout site.

        Uses one fused kernel where there is one, otherwise draws the mask and multiplies by it.

        Raises:
            UnkeyedRandomness: If the size of the sample dim is not a multiple of the number of
                samples.
        """
        self._check_sample_dim(site, input.shape)
        dropped = drop(
            input,
            self._keys_of(site),
            site=site.key,
            sample_dim=site.sample_dim,
            drop_probability=drop_probability,
        )
        if dropped is not None:
            return dropped
        kept = self.mask(site, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _keys_of(self, site: DropoutSite) -> Tensor:
        """Return the random keys of a site's masks: the window's key if all samples share the
        mask, otherwise the keys of the samples.
        """
        return self.window_key if site.sample_dim is None else self.keys

    def _check_sample_dim(self, site: DropoutSite, shape: torch.Size) -> None:
        """Check that the sample dim of a dropout mask holds the same number of rows per sample.

        Raises:
            UnkeyedRandomness: If its size is not a multiple of the number of samples.
        """
        dim = site.sample_dim
        if dim is not None and shape[dim] % len(self.keys):
            raise UnkeyedRandomness(
                f"{site.name} draws a dropout mask of shape {list(shape)} for {len(self.keys)} "
                f"samples: the size of dim {dim} is not a multiple of the number of samples "
                "(packed tokens?). Set this dropout to 0, or use padded batches."
            )


class Frame:
    """One entry of the stack of module forwards that are running, outermost first.

    Attributes:
        module: The module whose forward is running.
        key: 64-bit hash of the path of module calls from the model down to this one.
        call_counts: How often this forward has called each submodule so far.
        num_calls: How many calls of submodules it has made so far, all of them together.
        num_draws: How many dropout masks it has drawn so far.
    """

    __slots__ = ("call_counts", "key", "module", "num_calls", "num_draws")

    def __init__(self, module: nn.Module, key: int) -> None:
        """Create an entry for a module whose forward begins, on keyed dropout's stack of running
        forwards. It counts the submodule calls and the dropout draws of this forward, from 0.
        """
        self.module = module
        self.key = key
        self.call_counts: Counter[nn.Module] = Counter()
        self.num_calls = 0
        self.num_draws = 0


class RecordedCall(NamedTuple):
    """A call of a module in the last forward, recorded so that a recomputation by activation
    checkpointing can be matched with it.

    Attributes:
        key: 64-bit hash of the path of module calls from the model down to this one.
        inputs: Identifies the tensors that were passed to the module, see `_identity`.
        parent: The `key` of the module call that made this one; None if no other module was
            running.
        index: This is the index-th call that the parent made, counted from 0.
    """

    key: int
    inputs: tuple[Any, ...]
    parent: int | None = None
    index: int = 0


class KeyedDropout(Hook):
    """Replaces the dropout of one model by keyed dropout: masks are drawn from one random key per
    sample, so they do not depend on how a window is split into micro-batches.

    Created by `proof.sites.find_dropout_sites`.

    Attributes:
        sites: The dropout sites of the model by their keys.
        names: The qualified name of each module of the model.
        hooked: The modules that get forward hooks, because their calls are on the path to a site.
        unkeyed: The modules that draw random numbers in a way that depends on the split, which the
            user allowed.
        mask_source: Draws the masks of the next forward: `SampleMasks`, or a speed-up in its place.
        attend: Computes attention with a given dropout mask of its weights: `dropped_attention`, or
            a faster function that a speed-up puts in its place.

    Example:
        def forward(num_samples):
            return model(**collate([sample] * num_samples))

        dropout = find_dropout_sites(model, forward)
        with dropout.scope(model):
            dropout.set_keys(sample_keys(seed, epoch, positions), window_key(seed, epoch, index))
            model(**batch).loss.backward()
    """

    def __init__(self, model: nn.Module) -> None:
        """Create keyed dropout for a model, without dropout sites: `find_dropout_sites` adds them.

        All modules of the model get forward hooks, unless `hooked` is restricted later.
        """
        self.model = model
        self.sites: dict[int, DropoutSite] = {}
        self.unkeyed: list[nn.Module] = []
        self.attend: Callable[..., Tensor] = dropped_attention
        self.names = {
            module: name or "(the model itself)" for name, module in model.named_modules()
        }
        # The hash of each module's name.
        self._name_keys = {module: name_key(name) for module, name in self.names.items()}
        self.hooked = list(self.names)
        self._stack: list[Frame] = []  # of running forwards, outermost first
        self._calls: dict[nn.Module, list[RecordedCall]] = {}  # of the last forward
        # The call that checkpointing recomputed last, and the autograd node whose backward
        # triggered it.
        self._last_recomputed: tuple[RecordedCall, Any] | None = None
        self.mask_source: Any = None
        self._compiled: CompiledDropout | None = None  # draws the masks of compiled modules

    def set_keys(self, keys: Tensor, window_key: Tensor) -> None:
        """Set the random keys from which the next forward draws its dropout masks.

        Args:
            keys: One key per sample: int64, shape (samples,), on the model's device.
            window_key: The key of masks that all samples of a window share: int64, shape (1,), on
                the model's device.
        """
        self.mask_source = SampleMasks(keys, window_key)
        if self._compiled is not None:
            self._compiled.set_keys(keys, window_key)

    def before(self, call: Call) -> None:
        """Set the random keys of a micro-batch's samples before its forward, so that its dropout
        masks are drawn from them.
        """
        self.set_keys(call.keys, call.window_key)

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model's dropout is keyed: masks are derived from the random
        keys of the samples, in every forward and in what `backward()` recomputes.

        It is a no-op for a model without dropout. If compiled code cannot draw such masks, compiled
        modules get forward hooks as all others.
        """
        if not self.sites:
            return nullcontext()  # without patches a compiled model stays compiled
        compiled = self._find_compiled()
        if compiled is None or compiled.problem is not None:
            return self._patched()
        return self._patched_with_compiled(compiled)

    def check_compiled(self, model: nn.Module) -> None:
        """Check that compiled modules can draw keyed dropout: masks that are derived from the
        random keys of the samples.

        Args:
            model: The prepared model, with the wrappers of DDP or FSDP.

        Raises:
            ConfigError: If they cannot, or if a wrapper around the model is compiled.
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
        """Return the object that draws the dropout masks of the model's compiled modules, or None
        if no module is compiled now. It is reused until other modules are compiled.
        """
        roots = compiled_modules(self.model)
        if not roots:
            self._compiled = None
        elif self._compiled is None or self._compiled.roots != roots:
            self._compiled = CompiledDropout(roots, self.sites.values())
        return self._compiled

    @contextmanager
    def _patched_with_compiled(self, compiled: CompiledDropout) -> Iterator[None]:
        """Within the block, derive all dropout masks from the random keys of the samples, in a
        model with compiled modules.

        Modules outside of compiled code get forward hooks, which keep track of the path of module
        calls; compiled modules get the keys of their dropout sites beforehand.

        Args:
            compiled: The keyed dropout of the compiled modules.
        """
        eager_masks = proxy(self)  # weak: torch.compile never frees the functions that it traced

        def replacement(owner: object, name: str, keyed: Callable) -> Callable:
            """Return the function that is called in place of a dropout function of torch
            (`owner.name`), in eager and compiled code, and that draws keyed masks.
            """
            return compiled.replacement_of(getattr(owner, name), keyed, eager_masks)

        hooked = [module for module in self.hooked if module not in compiled.modules]
        device = next(self.model.parameters(), torch.empty(0)).device
        with compiled.scope(device), self._patch_functions(hooked, replacement):
            yield

    def _patched(self) -> AbstractContextManager[None]:
        """Return a context in which dropout masks are derived from the random keys of the samples,
        with forward hooks on all modules on the path to a dropout site, also on compiled ones.
        """
        return self._patch_functions(self.hooked, self._replacement)

    @contextmanager
    def _patch_functions(
        self, hooked: Iterable[nn.Module], replacement: Callable[..., Callable]
    ) -> Iterator[None]:
        """Within the block, replace torch's dropout functions by functions that draw keyed masks
        (one random key per sample), and register the forward hooks that keep track of the path of
        module calls.

        Args:
            hooked: The modules that get the hooks.
            replacement: (owner of a torch function, its name, its keyed version in
                `DRAWING_FUNCTIONS`) -> the function that takes its place.
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
        """Return the function that is called in place of a dropout function of torch, and that
        draws its masks from this object (one random key per sample).

        It keeps the name of the original, because torch.compile looks up the names of all torch
        functions. It refers to this object weakly, because torch.compile never frees the functions
        that it traced.

        Args:
            owner: Where the original is, such as `torch.nn.functional`.
            name: The name of the original there, such as "dropout".
            keyed: Its keyed version from `dropout_functions`, which gets this object and the
                original as first arguments.
        """
        original = getattr(owner, name)
        return update_wrapper(partial(keyed, proxy(self), original), original)

    def join_forward(self, args: tuple, kwargs: dict) -> None:
        """Let keyed dropout (masks drawn from one random key per sample) handle a forward of the
        model that had already begun when `scope` was entered.

        The pre-forward hook of the model itself was not registered in time, so do its work here.

        Args:
            args: The positional arguments of the forward.
            kwargs: The keyword arguments of the forward.
        """
        if self._compiled is not None and self.model in self._compiled.modules:
            self._compiled.join_forward(self.model)
        elif self.model in self.hooked and self.sites:
            self._enter(self.model, args, kwargs)

    @property
    def running(self) -> nn.Module | None:
        """The innermost module whose forward is running, which draws the next keyed dropout mask;
        None if no forward is running.
        """
        return self._stack[-1].module if self._stack else None

    def needs_mask(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call of a dropout function needs a mask from the random keys of the samples.
        Otherwise it is left to torch.

        It needs none if it drops nothing or everything, is not in training mode, is called outside
        of the model's forward, or is at a site that the user allowed to depend on the split. In the
        last case, this method counts the draw of the running module.

        Args:
            drop_probability: The `p` of the call.
            training: The `training` argument of the call.

        Raises:
            UnkeyedRandomness: If checkpointing recomputes a function that draws outside of any
                module's forward.
        """
        if not training or drop_probability in (0, 1):
            return False
        if not self._stack:
            if is_in_backward():
                raise UnkeyedRandomness(
                    "activation checkpointing recomputes a function that draws dropout outside of "
                    "a module's forward, so its masks cannot be identified. Put the function into "
                    "a module, or turn checkpointing off."
                )
            return False
        frame = self._stack[-1]
        site = self.sites.get(cached_key(frame.key, frame.num_draws))
        if site is None or site.is_keyed:
            return True
        frame.num_draws += 1  # allowed to depend on the split
        return False

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the next dropout mask of the running module from the random keys of the samples:
        bool, of the given shape, True where dropout keeps.
        """
        return self._draw(self._next_key(), shape, drop_probability)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply keyed dropout to a tensor, elementwise, with the next mask of the running module,
        drawn from the random keys of the samples.
        """
        return self._dropped(self._next_key(), input, drop_probability)

    def _next_key(self) -> int:
        """Return the key of the dropout site (path of module calls, index of the draw) at which the
        running module draws its next mask, and count the draw.
        """
        frame = self._stack[-1]
        key = cached_key(frame.key, frame.num_draws)
        frame.num_draws += 1
        return key

    def _dropped(self, key: int, input: Tensor, drop_probability: float) -> Tensor:
        """Apply keyed dropout to a tensor, elementwise, with the mask of the dropout site that has
        this key, drawn from the random keys of the samples.

        Raises:
            UnkeyedRandomness: If the proof's forward drew no mask there.
        """
        return self.mask_source.drop(self._site(key), input, drop_probability)

    def next_site(self) -> DropoutSite | None:
        """Return the dropout site of the running module's next draw without counting the draw, for
        a speed-up whose kernel draws the mask from the random keys of the samples itself.

        Returns None if the proof's forward drew no mask there.
        """
        frame = self._stack[-1]
        return self.sites.get(cached_key(frame.key, frame.num_draws))

    def skip_draw(self) -> None:
        """Count a draw of the running module without drawing its keyed dropout mask, because the
        kernel of a speed-up draws it from the random keys of the samples itself.
        """
        self._stack[-1].num_draws += 1

    def _draw(self, key: int, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the mask of the dropout site that has this key from the random keys of the samples:
        bool, of the given shape.

        Raises:
            UnkeyedRandomness: If the proof's forward drew no mask there.
        """
        return self.mask_source.mask(self._site(key), shape, drop_probability)

    def _site(self, key: int) -> DropoutSite:
        """Return the dropout site with this key.

        Raises:
            UnkeyedRandomness: If the proof's forward drew no mask there.
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
        """Push a module onto keyed dropout's stack of running forwards, with the key (hash) of its
        path of module calls; a pre-forward hook.

        In a forward, the call is recorded, too. In a recomputation by activation checkpointing, the
        path key is that of the recorded call that is recomputed, so that the masks are the same.
        """
        if self._compiled is not None:
            self._compiled.leave_all()
        inputs = tuple(_identity(v) for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if self._stack:
            # A submodule call, in a forward or in a recomputation.
            parent = self._stack[-1]
            key = cached_key(parent.key, self._name_keys[module], parent.call_counts[module])
            call = RecordedCall(key, inputs, parent.key, parent.num_calls)
            parent.call_counts[module] += 1
            parent.num_calls += 1
            if not is_in_backward():
                self._calls.setdefault(module, []).append(call)
        elif module is not self.model and is_in_backward():
            # The first module of a recomputation: its outer modules are not running.
            key = self._key_of_recomputed(module, inputs)
        else:
            # The model itself, or a submodule that is called directly from outside.
            if module is self.model:
                self._forget_calls()
            calls = self._calls.setdefault(module, [])
            key = cached_key(self._name_keys[module], len(calls))
            calls.append(RecordedCall(key, inputs))
        self._stack.append(Frame(module, key))

    def _forget_calls(self) -> None:
        """Delete the recorded module calls of the last forward, with which keyed dropout finds out
        what activation checkpointing recomputes.
        """
        self._calls.clear()
        self._last_recomputed = None

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Pop a module from keyed dropout's stack of running forwards; a forward hook that is
        called also if the forward raises.
        """
        is_on_top = bool(self._stack) and self._stack[-1].module is module
        if is_on_top:  # otherwise `_enter` raised for this call and pushed nothing
            self._stack.pop()

    def _key_of_recomputed(self, module: nn.Module, inputs: tuple[Any, ...]) -> int:
        """Return the path key of the recorded call that activation checkpointing recomputes, from
        which keyed dropout draws the same masks again.

        If the last forward called the module several times (an encoder of two texts), the call is
        identified as follows. Of the modules that one checkpoint recomputes, the first gets the
        same input tensors as in the forward, because checkpointing saves them. The others come in
        the order of the forward.

        Args:
            module: The module whose recomputation begins.
            inputs: Identifies its input tensors, see `_identity`.

        Raises:
            UnkeyedRandomness: If not exactly one recorded call matches.
        """
        calls = self._calls.get(module, [])
        node = torch._C._current_autograd_node()  # the same for all modules of one checkpoint
        last_call, last_node = self._last_recomputed or (None, None)
        if len(calls) == 1:
            matching = calls
        elif node is last_node:
            matching = [call for call in calls if _follows(call, last_call)]
        else:
            matching = [call for call in calls if call.inputs == inputs]
        if len(matching) != 1:
            raise UnkeyedRandomness(
                f"activation checkpointing recomputes {self.names[module]}, which the forward "
                f"called {len(calls)} times, and {len(matching)} of these calls had the same "
                "inputs: its masks cannot be identified. Turn gradient checkpointing off, or set "
                "its dropout to 0."
            )
        call = matching[0]
        self._last_recomputed = (call, node)
        return call.key


def _identity(tensor: Tensor) -> tuple[Any, int, int]:
    """Return a value that is equal for two tensors only if they share storage, offset and version,
    so that they hold the same values. Keyed dropout compares the inputs of module calls by it, to
    find the one that activation checkpointing recomputes.

    The memory address is not enough: the allocator reuses memory of freed tensors, and in-place
    operations change the values.
    """
    if tensor.layout != torch.strided:  # a sparse tensor has no storage of its own
        return proxy(tensor), 0, tensor._version
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor._version


def _follows(call: RecordedCall, last: RecordedCall) -> bool:
    """Whether one forward of a parent module made both module calls, `call` directly after `last`,
    so that activation checkpointing recomputes them in this order.
    """
    return call.parent is not None and call.parent == last.parent and call.index == last.index + 1


def is_in_backward() -> bool:
    """Whether autograd's backward is running, so that a module forward now is a recomputation by
    activation checkpointing, in which keyed dropout must repeat the masks.
    """
    return torch._C._current_graph_task_id() != -1
