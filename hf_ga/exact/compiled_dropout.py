"""Keyed dropout within compiled modules.

torch.compile cannot trace the hooks of `dropout.py`, whose keys depend on the whole path of module
calls: it would compile every window anew. Within a compiled module, the path is resolved before:
each module that draws keeps the keys of its dropout sites as tensors, and a draw is one operator of
torch. The keys of sites, samples and window are inputs of the compiled graphs, so layers of one
class share them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.dropout_functions import MaskDrawer, dropped_attention
from hf_ga.exact.dropout_site import DropoutSite
from hf_ga.exact.hashing import signed
from hf_ga.exact.masks import apply_dropout_mask, drop, keep_mask
from hf_ga.exact.override import override

SITES = "_hf_ga_sites"  # attribute of a module that draws, within a scope


@torch.library.custom_op("hf_ga::keep_mask", mutates_args=())
def draw_mask(
    seeds: Tensor, shape: Sequence[int], axis: int | None, drop_probability: float
) -> Tensor:
    """Call `masks.keep_mask` as an operator.

    Args:
        seeds: int64, shape (samples,) or (1,): keys of samples or window, XOR the key of the site.
        shape: Of the mask.
        axis: The sample axis, or None.
        drop_probability: See `masks.keep_mask`.

    Raises:
        UnkeyedRandomness: If the sample axis does not hold whole samples.
    """
    _check(seeds, shape, axis)
    return keep_mask(seeds, 0, shape, axis, drop_probability).contiguous()


@draw_mask.register_fake
def _(seeds: Tensor, shape: Sequence[int], axis: int | None, drop_probability: float) -> Tensor:
    return seeds.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("hf_ga::drop", mutates_args=())
def draw_and_drop(x: Tensor, seeds: Tensor, axis: int | None, drop_probability: float) -> Tensor:
    """Apply dropout to all elements of x as an operator.

    Nothing is stored for the backward: it draws the same mask again.

    Args:
        x: What to drop from.
        seeds: See `draw_mask`.
        axis: See `draw_mask`.
        drop_probability: See `draw_mask`.

    Raises:
        UnkeyedRandomness: If the sample axis does not hold whole samples.
    """
    _check(seeds, x.shape, axis)
    x = x.contiguous()
    dropped = drop(x, seeds, 0, axis, drop_probability)
    if dropped is None:
        kept = keep_mask(seeds, 0, x.shape, axis, drop_probability)
        dropped = apply_dropout_mask(x, drop_probability, kept)
    return dropped.contiguous()


@draw_and_drop.register_fake
def _(x: Tensor, seeds: Tensor, axis: int | None, drop_probability: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, seeds, ctx.axis, ctx.drop_probability = inputs
    ctx.save_for_backward(seeds)


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (seeds,) = ctx.saved_tensors
    return draw_and_drop(gradient, seeds, ctx.axis, ctx.drop_probability), None, None, None


draw_and_drop.register_autograd(_drop_gradient, setup_context=_save)


class SiteInput(NamedTuple):
    """A dropout site of a compiled module, as its graph reads it.

    Attributes:
        key: int64, of shape (1,), on the device: an input of the graph.
        axis: The sample axis, or None; the same for all layers of a graph.
    """

    key: Tensor
    axis: int | None


class Running:
    """The modules of compiled code that are running, outermost first, and how many masks each drew.

    Its methods are hooks of these modules, which torch.compile traces with them.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.draws: list[int] = []

    def enter(self, module: nn.Module, args: tuple) -> None:
        self.modules.append(module)
        self.draws.append(0)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.modules.pop()
        self.draws.pop()

    def enter_root(self, module: nn.Module, args: tuple) -> None:
        self.clear()
        self.enter(module, args)

    def leave_root(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.clear()

    def clear(self) -> None:
        """Let no module be running.

        That is so also after an error, or where checkpointing stopped a forward that it ran again
        as soon as it had what it needed.
        """
        self.modules.clear()
        self.draws.clear()

    def next_site(self) -> SiteInput:
        """Return the site of the next draw of the innermost module.

        Raises:
            UnkeyedRandomness: If the proof's forward did not draw there.
        """
        module = self.modules[-1]
        sites = getattr(module, SITES, ())
        index = self.draws[-1]
        if index >= len(sites):
            raise UnkeyedRandomness(
                f"a compiled {type(module).__name__} draws dropout that the probing forward did "
                "not draw: the model's path depends on its data or has changed. Prove the model "
                "again, or set this dropout to 0."
            )
        self.draws[-1] += 1
        return sites[index]


class CompiledMasks:
    """Draws the masks of compiled modules: what `dropout_functions` needs.

    Attributes:
        keys: int64, shape (samples,): whose masks the next forward draws.
        window_key: int64, shape (1,).
        attend: Attention with a given mask of its weights.
    """

    attend = staticmethod(dropped_attention)

    def __init__(self, calls: Running) -> None:
        self.calls = calls
        self.keys = torch.empty(0, dtype=torch.int64)
        self.window_key = torch.empty(0, dtype=torch.int64)

    @property
    def running(self) -> nn.Module:
        """The innermost module whose forward is running."""
        return self.calls.modules[-1]

    def is_keyed(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call of a dropout function draws a mask."""
        return training and drop_probability not in (0, 1)

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the next mask of the module that is running: bool, of the given shape."""
        site = self.calls.next_site()
        return draw_mask(self._seeds(site), shape, site.axis, drop_probability)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of an input, at the next draw of the module that is
        running.
        """
        site = self.calls.next_site()
        return draw_and_drop(input, self._seeds(site), site.axis, drop_probability)

    def _seeds(self, site: SiteInput) -> Tensor:
        keys = self.window_key if site.axis is None else self.keys
        return keys ^ site.key


class CompiledDropout:
    """The keyed dropout of the compiled modules of one model.

    Args:
        roots: The outermost compiled modules of the model.
        sites: The dropout sites of the model, in the order of their draws.

    Attributes:
        roots: As given.
        modules: All modules of compiled code.
    """

    def __init__(self, roots: list[nn.Module], sites: Iterable[DropoutSite]) -> None:
        self.roots = roots
        self.modules = frozenset(module for root in roots for module in root.modules())
        self._sites: dict[nn.Module, list[DropoutSite]] = {}
        for site in sites:
            if site.module in self.modules:
                self._sites.setdefault(site.module, []).append(site)
        self._calls = Running()
        self._masks = CompiledMasks(self._calls)
        self._inputs: dict[nn.Module, tuple[SiteInput, ...]] = {}
        # Kept, because torch.compile guards on the identity of functions: other ones in the next
        # window would be compiled again.
        self._functions: dict[Callable, Callable] = {}

    @property
    def problem(self) -> str | None:
        """Why the dropout of the compiled modules cannot be keyed; None if it can."""
        if not self._sites:
            return None
        problems = map(_problem_of, self._sites.values())
        return _checkpointing_in(self.modules) or next(filter(None, problems), None)

    def set_keys(self, keys: Tensor, window_key: Tensor) -> None:
        """Set whose masks the next forward draws. Arguments as in `KeyedDropout.set_keys`."""
        self._calls.clear()
        self._masks.keys = keys
        self._masks.window_key = window_key

    def replacement(self, original: Callable, keyed: Callable, outside: MaskDrawer) -> Callable:
        """Return what is called in place of a function of torch, always the same function.

        Args:
            original: The function of torch.
            keyed: Its replacement, from `dropout_functions`.
            outside: What draws the masks of modules that are not compiled.
        """
        if original not in self._functions:
            calls = self._calls
            inside = self._masks

            @wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                masks = inside if calls.modules else outside
                return keyed(masks, original, *args, **kwargs)

            self._functions[original] = replaced
        return self._functions[original]

    @contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Let compiled modules know, within the block, which of them is running, and its sites.

        Args:
            device: Where the model is.
        """
        with ExitStack() as stack:
            # Sizes that are equal in the first micro-batch only, as a length and the size of a
            # head, must not become one: longer micro-batches would be compiled again.
            stack.enter_context(_config.patch(use_duck_shape=False))
            for module, inputs in self._inputs_on(device).items():
                stack.enter_context(override(module, **{SITES: inputs}))
            for root in self.roots:
                enter = root.register_forward_pre_hook(self._calls.enter_root, prepend=True)
                leave = root.register_forward_hook(self._calls.leave_root, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            for module in self._sites.keys() - set(self.roots):
                enter = module.register_forward_pre_hook(self._calls.enter, prepend=True)
                leave = module.register_forward_hook(self._calls.leave)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.callback(self._calls.clear)
            yield

    def join_forward(self, model: nn.Module) -> None:
        """Called where a scope is entered while the model's forward begins."""
        if model in self.roots:
            self._calls.enter_root(model, ())

    def leave_all(self) -> None:
        """Called when a module that is not compiled starts its forward."""
        self._calls.clear()

    def _inputs_on(self, device: torch.device) -> dict[nn.Module, tuple[SiteInput, ...]]:
        """Return the sites of each module that draws, as inputs of graphs."""
        if any(site.key.device != device for sites in self._inputs.values() for site in sites):
            self._inputs = {}
        if not self._inputs:
            self._inputs = {
                module: tuple(
                    SiteInput(torch.tensor([signed(site.key)], device=device), site.axis)
                    for site in sites
                )
                for module, sites in self._sites.items()
            }
        return self._inputs


def _checkpointing_in(modules: Iterable[nn.Module]) -> str | None:
    """Find a module that runs activation checkpointing within compiled code; None if none does.

    torch.compile would leave it uncompiled, because it changes the list of running modules.
    """
    for module in modules:
        if getattr(module, "gradient_checkpointing", False):
            return f"gradient checkpointing runs within a compiled {type(module).__name__}"
    return None


def _problem_of(sites: list[DropoutSite]) -> str | None:
    """Find out why the sites of a compiled module cannot be keyed; None if they can.

    Args:
        sites: All of one module.
    """
    first = sites[0]
    if not all(site.is_keyed for site in sites):
        return f"{first.name} draws a mask without a single sample axis"
    if len({site.path for site in sites}) > 1:
        return f"one forward calls {first.name} several times, and compiled code cannot tell which"
    return None


def _check(seeds: Tensor, shape: Sequence[int], axis: int | None) -> None:
    if axis is not None and shape[axis] % len(seeds):
        raise UnkeyedRandomness(
            f"a compiled layer draws a dropout mask of shape {list(shape)} for {len(seeds)} "
            f"samples: axis {axis} does not contain whole samples (packed tokens?). Set this "
            "dropout to 0, or feed padded batches."
        )
