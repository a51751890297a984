"""Where a model draws random numbers, and keyed dropout put in at these places.

Inside a training forward the functions through which torch draws dropout are replaced by keyed ones. A place is a path of
module calls plus the number of the draw within the last module's forward; forward hooks keep the path. The same hooks give the
same path when activation checkpointing runs a module again inside `backward()`, where the outer modules are not active.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from threading import Thread, current_thread
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.draws import DRAWING_FUNCTIONS
from hf_ga.exact.dropped_attention import LastBias
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.hashing import make_key, name_key
from hf_ga.exact.masks_ahead import MasksAhead
from hf_ga.exact.packed_tokens import PackedTokens
from hf_ga.exact.place_probe import LARGE, SMALL, Place, Recorder, refuse_other_shapes, sample_axis

cached_key = lru_cache(1 << 16)(make_key)  # each forward asks for the same ones


class Frame:
    """One call of a module: its path key, how often it called each submodule, how many draws it made."""

    __slots__ = ("calls", "draws", "key", "module")

    def __init__(self, module: nn.Module, key: int) -> None:
        self.module, self.key, self.calls, self.draws = module, key, Counter(), 0


class KeyedPlaces:
    """The places of one model. `find` probes once; `active` puts keyed dropout in; `set_keys` says whose masks to draw.

    Example:
        places = KeyedPlaces(model)
        places.find(lambda num_samples: model(**collate([sample] * num_samples)))
        with places.active():
            places.set_keys(sample_keys(seed, epoch, positions), window_key(seed, epoch, index))
            model(**batch).loss.backward()
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: dict[int, Place] = {}
        self.unkeyed: list[nn.Module] = []  # modules that draw in another way, where that was allowed
        self.packed: PackedTokens | None = None  # the tokens that `_packed_modules` see in place of padded samples (`packing.py`)
        self._packed_modules: frozenset[nn.Module] = frozenset()
        self.thread: Thread | None = None  # that runs the model; None: any
        self._names = {module: name or "(the model itself)" for name, module in model.named_modules()}
        self._name_keys = {module: name_key(name) for module, name in self._names.items()}
        self._hooked: list[nn.Module] = list(self._names)  # after `find`: only those that lead to a place, or draw
        self._path_keys: dict[nn.Module, int] = {}  # after `find`, where each module that draws is called once in a forward
        self._entered: set[nn.Module] = set()  # of these, in the last forward
        self._stack: list[Frame] = []
        self._recorded: dict[nn.Module, list[tuple[int, tuple[int, ...]]]] = {}  # calls of the last forward
        self._recorder: Recorder | None = None
        self._num_samples = 0  # of the next forward
        self.ahead = MasksAhead({})
        self.last_bias = LastBias()

    @property
    def is_empty(self) -> bool:
        """Whether the model draws nothing, so that `active` has nothing to do."""
        return not self.places

    def find(self, forward: Callable[[int], Any], allow_unkeyed: bool = False) -> None:
        """Run two training forwards with 2 and 3 equal samples, without dropout, and learn every place and its sample axis.

        Args:
            forward: runs the model in training mode on a batch of the given number of samples.
            allow_unkeyed: do not refuse draws that cannot be keyed.

        Raises:
            UnkeyedRandomness: a module draws random numbers in another way, or a mask has no single sample axis.
        """
        self._recorder = Recorder()
        try:
            with preserved_random_states(), torch.no_grad(), restored_buffers(self.model), self.active(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpointing under no_grad
                for num_samples in (SMALL, LARGE):
                    self._recorder.start()
                    forward(num_samples)
                    self._recorder.boundary(self.model)  # what a loss function drew behind the last module
                path_keys = self._found_path_keys(self._recorder)
        finally:
            recorder, self._recorder = self._recorder, None
        problems = [f"{self._names[m]} ({type(m).__name__}) draws from {g}" for m, g in recorder.unkeyed.items()]
        for place in recorder.places.values():
            try:
                place.axis = sample_axis(place.shapes)
            except ValueError as error:
                place.can_be_keyed = False
                problems.append(f"{place.name} draws a mask whose sample axis cannot be told: {error}")
        if problems and not allow_unkeyed:
            raise UnkeyedRandomness(
                "any split of a window draws the same randomness only if each draw can be tied to its sample, but "
                + "; ".join(problems)
                + ". Set this probability to 0, use attn_implementation='eager' or 'sdpa' if it is attention dropout, or "
                "accept that the split changes the randomness with allow_unkeyed (--allow_unkeyed)."
            )
        self.unkeyed = [*recorder.unkeyed, *(place.module for place in recorder.places.values() if not place.can_be_keyed)]
        self.places = recorder.places
        self.ahead = MasksAhead(recorder.places)
        self._path_keys = path_keys
        self._hooked = [m for m in self._hooked if m in (path_keys or recorder.on_the_way)]

    @property
    def running(self) -> nn.Module | None:
        """The module whose forward is running, the innermost one; None outside of the model."""
        return self._stack[-1].module if self._stack and self._is_of_this_thread else None

    @property
    def _is_of_this_thread(self) -> bool:
        return self.thread is None or self.thread is current_thread()

    def set_keys(self, sample_keys: Tensor, window_key: Tensor, num_samples: int | None = None) -> None:
        """Whose masks the next forward draws: int64 keys of shape (samples,) and (1,), on the model's device.

        Args:
            num_samples: how many of the samples are in the next forward; the others follow in forwards of as many samples and of
                the same shapes, for which it is set anew, with what is left of the same tensor. None: all.
        """
        self._num_samples = len(sample_keys) if num_samples is None else num_samples
        self.ahead.set_keys(sample_keys, self._num_samples, window_key)
        self.last_bias.forget()

    def set_packed(self, tokens: PackedTokens | None, modules: frozenset[nn.Module]) -> None:
        """In the next forward `modules` see these tokens as (1, T, ...); None: padded samples."""
        if tokens is not None or self.packed is not None:
            self.ahead.forget()
        self.packed, self._packed_modules = tokens, modules

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Inside packed modules: what is drawn now is drawn for padded samples."""
        tokens, self.packed = self.packed, None
        try:
            yield
        finally:
            self.packed = tokens

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keyed dropout inside every forward of the model, and in what `backward()` runs again. Nothing is left behind."""
        with ExitStack() as stack:
            for module in self._hooked:
                if self._path_keys:
                    handle = module.register_forward_pre_hook(self._enter_once, prepend=True)
                else:
                    handle = module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for owner, name, keyed in DRAWING_FUNCTIONS:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, partial(keyed, self, original))
            stack.callback(self._stack.clear)
            stack.callback(self._recorded.clear)
            stack.callback(self._entered.clear)
            stack.callback(self.ahead.forget)
            stack.callback(self.last_bias.forget)
            yield

    def _found_path_keys(self, recorder: Recorder) -> dict[nn.Module, int]:
        """The path key of each module that draws, and of the model, if the forward calls each of them once: then no other module
        needs hooks, each of which takes Python's time. Empty otherwise.
        """
        calls = {m: self._recorded.get(m, []) for m in (self.model, *(place.module for place in recorder.places.values()))}
        once = recorder.places and all(len(of) == 1 for of in calls.values())
        return {m: of[0][0] for m, of in calls.items()} if once else {}

    def _enter_once(self, module: nn.Module, args: tuple) -> None:
        """For modules with a path key. A second call, or one from outside of the model's forward, draws at no known place."""
        key = self._path_keys[module]
        if module is self.model:
            self._entered.clear()
        elif torch._C._current_graph_task_id() == -1:  # else checkpointing runs it again
            if module in self._entered or not self._stack:
                key = self._name_keys[module]
            self._entered.add(module)
        self._stack.append(Frame(module, key))

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = tuple(v.data_ptr() for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if self._stack:
            parent = self._stack[-1]
            key = cached_key(parent.key, self._name_keys[module], parent.calls[module])
            parent.calls[module] += 1
            self._recorded.setdefault(module, []).append((key, inputs))
        elif module is not self.model and torch._C._current_graph_task_id() != -1:
            key = self._key_of_recomputed(module, inputs)
        else:
            if module is self.model:
                self._recorded.clear()
            calls = self._recorded.setdefault(module, [])
            key = cached_key(self._name_keys[module], len(calls))
            calls.append((key, inputs))
        self._stack.append(Frame(module, key))
        if self._recorder:
            self._recorder.boundary(self._stack[-2].module if len(self._stack) > 1 else module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._stack or self._stack[-1].module is not module:
            return  # `_enter` refused this call
        self._stack.pop()
        if self._recorder:
            self._recorder.boundary(module)

    def _key_of_recomputed(self, module: nn.Module, inputs: tuple[int, ...]) -> int:
        """The path key of the call that checkpointing runs again: checkpointing keeps its inputs, so they tell which one."""
        calls = self._recorded.get(module, [])
        matching = {key for key, seen in calls if seen == inputs} if len(calls) > 1 else {key for key, _ in calls}
        if len(matching) != 1:
            raise UnkeyedRandomness(
                f"activation checkpointing runs {self._names[module]} again, which the forward called {len(calls)} times, and "
                f"{len(matching)} of these calls had the same inputs: which masks it drew cannot be told. Turn gradient "
                "checkpointing off, or set its dropout to 0."
            )
        return matching.pop()

    def is_keyed(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call draws a mask that is ours to key.

        Raises:
            UnkeyedRandomness: checkpointing runs a function again that draws outside of any module's forward.
        """
        if not training or drop_probability in (0, 1) or not self._is_of_this_thread:
            return False
        if not self._stack:
            if torch._C._current_graph_task_id() != -1:
                raise UnkeyedRandomness(
                    "activation checkpointing runs a function again that draws dropout by itself, not in the forward of a module: "
                    "which masks it drew cannot be told. Put the function into a module, or turn checkpointing off."
                )
            return False
        frame = self._stack[-1]
        place = self.places.get(cached_key(frame.key, frame.draws))
        if place is None or place.can_be_keyed:
            return True
        frame.draws += 1  # allowed to depend on the split
        return False

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor | None:
        """The mask of the next draw of the module that is running; None while probing."""
        frame = self._stack[-1]
        key = cached_key(frame.key, frame.draws)
        frame.draws += 1
        name = self._names[frame.module]
        if self._recorder:
            self._recorder.record(key, name, drop_probability, shape, [frame.module for frame in self._stack])
            return None
        place = self.places.get(key)
        if place is None:
            raise UnkeyedRandomness(
                f"{name} draws dropout at a place that the probing forward did not reach: the model's path depends on its data "
                "or changed since. Prove the model again, or set this dropout to 0."
            )
        packed = self.packed if frame.module in self._packed_modules else None
        refuse_other_shapes(place, shape, self._num_samples, packed)
        return self.ahead.mask(key, shape, drop_probability, packed)


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what a training forward does to buffers (running statistics)."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
