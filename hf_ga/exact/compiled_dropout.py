"""Keyed dropout within compiled modules.

torch.compile cannot trace the hooks of `dropout.py`, whose keys depend on the whole path of module
calls: it would recompile in every window. Within a compiled module, the path is resolved
beforehand: each module that draws keeps the keys of its dropout sites as tensors, and a draw is a
custom operator. The keys of sites, samples and window are inputs of the compiled graphs, so layers
of one class share a graph.
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

# Within `CompiledDropout.scope`, a compiled module that draws has this attribute: the `SiteInput`s
# of its draws.
SITES_ATTRIBUTE = "_hf_ga_sites"


@torch.library.custom_op("hf_ga::keep_mask", mutates_args=())
def draw_mask(
    seeds: Tensor, shape: Sequence[int], sample_dim: int | None, drop_probability: float
) -> Tensor:
    """Draw a dropout mask from the random keys of samples: `masks.keep_mask` as a custom operator,
    for compiled code.

    Args:
        seeds: int64, shape (samples,) or (1,): keys of the samples, or of the window if all samples
            share the mask, XOR the key of the dropout site.
        shape: Shape of the mask.
        sample_dim: The dim of the mask that holds the samples. None: they share the mask.
        drop_probability: p, with 0 <= p < 1.

    Returns:
        bool, of the given shape, True where dropout keeps.

    Raises:
        UnkeyedRandomness: If the size of the sample dim is not a multiple of the number of samples.
    """
    _check_sample_dim(seeds, shape, sample_dim)
    # The seeds contain the key of the site, so none is passed.
    kept = keep_mask(
        seeds, site=0, shape=shape, sample_dim=sample_dim, drop_probability=drop_probability
    )
    return kept.contiguous()


@draw_mask.register_fake
def _(
    seeds: Tensor, shape: Sequence[int], sample_dim: int | None, drop_probability: float
) -> Tensor:
    """Return a tensor with the shape and dtype of `draw_mask`'s keyed dropout mask, with which
    torch.compile traces the operator.
    """
    return seeds.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("hf_ga::drop", mutates_args=())
def draw_and_drop(
    x: Tensor, seeds: Tensor, sample_dim: int | None, drop_probability: float
) -> Tensor:
    """Apply dropout to a tensor, elementwise, with a mask drawn from the random keys of samples. A
    custom operator, for compiled code.

    No mask is saved for the backward, which draws the same mask again.

    Args:
        x: The input of dropout.
        seeds: See `draw_mask`.
        sample_dim: See `draw_mask`.
        drop_probability: See `draw_mask`.

    Returns:
        x / (1 - p) where the mask keeps, 0 elsewhere; contiguous.

    Raises:
        UnkeyedRandomness: If the size of the sample dim is not a multiple of the number of samples.
    """
    _check_sample_dim(seeds, x.shape, sample_dim)
    x = x.contiguous()
    # The seeds contain the key of the site, so none is passed.
    dropped = drop(x, seeds, site=0, sample_dim=sample_dim, drop_probability=drop_probability)
    if dropped is None:  # there is no kernel for this input
        kept = keep_mask(
            seeds, site=0, shape=x.shape, sample_dim=sample_dim, drop_probability=drop_probability
        )
        dropped = apply_dropout_mask(x, drop_probability, kept)
    return dropped.contiguous()


@draw_and_drop.register_fake
def _(x: Tensor, seeds: Tensor, sample_dim: int | None, drop_probability: float) -> Tensor:
    """Return a tensor with the shape and dtype of the result of `draw_and_drop` (keyed dropout),
    with which torch.compile traces the operator.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Save what the backward of the keyed dropout operator `draw_and_drop` needs to draw the same
    mask again: all inputs but the tensor to which dropout is applied.
    """
    _, seeds, sample_dim, drop_probability = inputs
    ctx.save_for_backward(seeds)
    ctx.sample_dim = sample_dim
    ctx.drop_probability = drop_probability


def _backward_of_drop(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of the keyed dropout operator `draw_and_drop`: apply the same dropout to the
    gradient of its output.

    Returns the gradients of its four arguments, of which only the first has one.
    """
    (seeds,) = ctx.saved_tensors
    x_gradient = draw_and_drop(gradient, seeds, ctx.sample_dim, ctx.drop_probability)
    return x_gradient, None, None, None


draw_and_drop.register_autograd(_backward_of_drop, setup_context=_save_for_backward)


class SiteInput(NamedTuple):
    """A dropout site as an input of a compiled graph.

    Attributes:
        key: 64-bit key of the site: int64, shape (1,), on the device. A tensor, so that layers with
            different keys share a graph.
        sample_dim: The dim of the mask that holds the samples. None: they share the mask.
    """

    key: Tensor
    sample_dim: int | None


class ModuleStack:
    """The compiled modules whose forward is running, outermost first, and how many dropout masks
    each has drawn in this forward.

    Its methods are hooks of these modules, which torch.compile traces with them.
    """

    def __init__(self) -> None:
        """Create an empty stack, with which keyed dropout (masks drawn from one random key per
        sample) tracks the compiled modules whose forward is running.
        """
        self.modules: list[nn.Module] = []  # outermost first
        self.num_draws: list[int] = []  # dropout masks drawn so far, for each of these modules

    def enter(self, module: nn.Module, args: tuple) -> None:
        """Push a compiled module onto the stack of running modules when its forward begins, so that
        keyed dropout finds the site of the module's next mask; a pre-forward hook.
        """
        self.modules.append(module)
        self.num_draws.append(0)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Pop a compiled module from the stack of running modules when its forward ends, so that
        keyed dropout continues in the module that called it; a forward hook.
        """
        self.modules.pop()
        self.num_draws.pop()

    def enter_root(self, module: nn.Module, args: tuple) -> None:
        """Empty the stack of running compiled modules, with which keyed dropout finds the site of
        its next mask, and push an outermost compiled module when its forward begins; a pre-forward
        hook.
        """
        self.clear()
        self.enter(module, args)

    def leave_root(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Empty the stack of running compiled modules, with which keyed dropout finds the site of
        its next mask, when the forward of an outermost one ends; a forward hook.
        """
        self.clear()

    def clear(self) -> None:
        """Empty the stack of compiled modules whose forward is running, with which keyed dropout
        finds the site of its next mask.

        Modules may be left on it by an error, and by checkpointing, which stops the recomputation
        of a forward as soon as it has all tensors that the backward needs.
        """
        self.modules.clear()
        self.num_draws.clear()

    def next_site(self) -> SiteInput:
        """Return the dropout site of the next draw of the innermost compiled module, and count the
        draw.

        Raises:
            UnkeyedRandomness: If the proof's forward drew no mask there.
        """
        module = self.modules[-1]
        sites = getattr(module, SITES_ATTRIBUTE, ())
        index = self.num_draws[-1]
        if index >= len(sites):
            raise UnkeyedRandomness(
                f"a compiled {type(module).__name__} draws dropout that the probing forward did "
                "not draw: the model's path depends on its data or has changed. Prove the model "
                "again, or set this dropout to 0."
            )
        self.num_draws[-1] += 1
        return sites[index]


class CompiledMasks:
    """Draws the dropout masks of compiled modules from one random key per sample. Implements
    `dropout_functions.MaskDrawer`.

    Args:
        stack: The compiled modules whose forward is running.

    Attributes:
        keys: The keys of the samples of the next forward: int64, shape (samples,).
        window_key: The key of masks that all samples of a window share: int64, shape (1,).
        attend: Computes attention with a given dropout mask of its weights.
    """

    attend = staticmethod(dropped_attention)

    def __init__(self, stack: ModuleStack) -> None:
        """Create an object that draws dropout masks from one random key per sample in compiled
        code. It has no keys yet: set them before each forward.
        """
        self.stack = stack
        self.keys = torch.empty(0, dtype=torch.int64)
        self.window_key = torch.empty(0, dtype=torch.int64)

    @property
    def running(self) -> nn.Module:
        """The innermost compiled module whose forward is running, which draws the next keyed
        dropout mask.
        """
        return self.stack.modules[-1]

    def needs_mask(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call of a dropout function in compiled code needs a keyed mask: it is in
        training mode, and drops something but not everything.
        """
        return training and drop_probability not in (0, 1)

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the next dropout mask of the running compiled module from the random keys of the
        samples: bool, of the given shape, True where dropout keeps.
        """
        site = self.stack.next_site()
        return draw_mask(self._seeds(site), shape, site.sample_dim, drop_probability)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply keyed dropout to a tensor, elementwise, with the next mask of the running compiled
        module, drawn from the random keys of the samples.
        """
        site = self.stack.next_site()
        return draw_and_drop(input, self._seeds(site), site.sample_dim, drop_probability)

    def _seeds(self, site: SiteInput) -> Tensor:
        """Return the seeds of a dropout site's mask: the random keys of the samples, or that of the
        window if all samples share the mask, XOR the key of the site.
        """
        keys = self.window_key if site.sample_dim is None else self.keys
        return keys ^ site.key


class CompiledDropout:
    """Keyed dropout (masks drawn from one random key per sample) in the compiled modules of one
    model.

    Args:
        roots: The outermost compiled modules of the model.
        sites: All dropout sites of the model, in the order in which a forward draws.

    Attributes:
        roots: The outermost compiled modules, as passed.
        modules: All modules that run in compiled code: the roots and everything inside them.
    """

    def __init__(self, roots: list[nn.Module], sites: Iterable[DropoutSite]) -> None:
        """Create keyed dropout for compiled modules, and group their dropout sites by the module
        that draws there.
        """
        self.roots = roots
        self.modules = frozenset(module for root in roots for module in root.modules())
        # Compiled module -> its dropout sites, in the order in which it draws.
        self._sites: dict[nn.Module, list[DropoutSite]] = {}
        for site in sites:
            if site.module in self.modules:
                self._sites.setdefault(site.module, []).append(site)
        self._stack = ModuleStack()  # the running compiled modules
        self._masks = CompiledMasks(self._stack)
        # The same sites with their keys as tensors; empty until they are needed.
        self._inputs: dict[nn.Module, tuple[SiteInput, ...]] = {}
        # The keyed replacements of torch functions. Kept, because torch.compile guards on the
        # identity of functions: new ones in the next window would cause a recompilation.
        self._replacements: dict[Callable, Callable] = {}

    @property
    def problem(self) -> str | None:
        """Why the compiled modules cannot draw their dropout masks from the random keys of the
        samples, or None if they can.
        """
        if not self._sites:
            return None
        problem = _find_checkpointing(self.modules)
        if problem is not None:
            return problem
        for sites in self._sites.values():
            problem = _find_problem(sites)
            if problem is not None:
                return problem
        return None

    def set_keys(self, keys: Tensor, window_key: Tensor) -> None:
        """Set the random keys from which the next forward draws its dropout masks.

        Args:
            keys: One key per sample: int64, shape (samples,), on the device.
            window_key: The key of masks that all samples of the window share: int64, shape (1,).
        """
        self._stack.clear()
        self._masks.keys = keys
        self._masks.window_key = window_key

    def replacement_of(
        self, original: Callable, keyed: Callable, eager_masks: MaskDrawer
    ) -> Callable:
        """Return the function that is called in place of a dropout function of torch, both in
        compiled modules and in the rest of the model. It draws masks from per-sample random keys.

        Repeated calls return the same function object, as torch.compile recompiles for another one.

        Args:
            original: The function of torch, such as `F.dropout`.
            keyed: Its keyed version from `dropout_functions`, which gets the object that draws
                masks and the original as first arguments.
            eager_masks: Draws the masks of modules that are not compiled.
        """
        if original not in self._replacements:
            stack = self._stack
            compiled_masks = self._masks

            @wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                """Call the keyed version of a dropout function with the object that draws its
                masks: that of compiled code if a compiled module is running, else the eager one.
                """
                masks = compiled_masks if stack.modules else eager_masks
                return keyed(masks, original, *args, **kwargs)

            self._replacements[original] = replacement
        return self._replacements[original]

    @contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Prepare the compiled modules for drawing their dropout masks within the block: set the
        dropout sites of each, and register the hooks that keep track of which one is running.

        Args:
            device: The device of the model, where the keys of the sites are put.
        """
        with ExitStack() as stack:
            # Otherwise two sizes that happen to be equal in the first micro-batch, such as sequence
            # length and head_dim, become one symbol, and a longer micro-batch is recompiled.
            stack.enter_context(_config.patch(use_duck_shape=False))
            for module, inputs in self._inputs_on(device).items():
                stack.enter_context(override(module, **{SITES_ATTRIBUTE: inputs}))
            for root in self.roots:
                enter = root.register_forward_pre_hook(self._stack.enter_root, prepend=True)
                leave = root.register_forward_hook(self._stack.leave_root, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            for module in self._sites.keys() - set(self.roots):
                enter = module.register_forward_pre_hook(self._stack.enter, prepend=True)
                leave = module.register_forward_hook(self._stack.leave)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.callback(self._stack.clear)
            yield

    def join_forward(self, model: nn.Module) -> None:
        """Let keyed dropout handle a forward of a compiled model that had already begun when
        `scope` was entered, so that its pre-forward hook did not run. A no-op if the model itself
        is not compiled.
        """
        if model in self.roots:
            self._stack.enter_root(model, ())

    def leave_all(self) -> None:
        """Empty the stack of running compiled modules, with which keyed dropout finds the site of
        its next mask; called when the forward of a module that is not compiled begins.
        """
        self._stack.clear()

    def _inputs_on(self, device: torch.device) -> dict[nn.Module, tuple[SiteInput, ...]]:
        """Return the dropout sites of each compiled module that draws, with their keys on a device.

        They are created once and again only if the model has moved to another device.
        """
        if any(site.key.device != device for sites in self._inputs.values() for site in sites):
            self._inputs = {}
        if not self._inputs:
            self._inputs = {
                module: tuple(
                    SiteInput(torch.tensor([signed(site.key)], device=device), site.sample_dim)
                    for site in sites
                )
                for module, sites in self._sites.items()
            }
        return self._inputs


def _find_checkpointing(modules: Iterable[nn.Module]) -> str | None:
    """Return a message if a compiled module uses activation checkpointing, or None if none does.

    Keyed dropout does not support it: torch.compile does not compile a checkpointed function that
    changes a list outside of it, and the hooks change the stack of running modules.
    """
    for module in modules:
        if getattr(module, "gradient_checkpointing", False):
            return f"gradient checkpointing runs within a compiled {type(module).__name__}"
    return None


def _find_problem(sites: list[DropoutSite]) -> str | None:
    """Return why one compiled module cannot draw its dropout masks from the random keys of the
    samples, or None if it can.

    It cannot if a mask has no single sample dim, or if one forward calls the module several times.

    Args:
        sites: All dropout sites of the module.
    """
    first = sites[0]
    if not all(site.is_keyed for site in sites):
        return f"{first.name} draws a mask without a single sample dim"
    paths = {site.path for site in sites}
    if len(paths) > 1:
        return (
            f"one forward calls {first.name} several times, and compiled code cannot tell these "
            "calls apart"
        )
    return None


def _check_sample_dim(seeds: Tensor, shape: Sequence[int], sample_dim: int | None) -> None:
    """Check that the sample dim of a dropout mask holds the same number of rows per sample.

    Raises:
        UnkeyedRandomness: If its size is not a multiple of the number of samples.
    """
    if sample_dim is not None and shape[sample_dim] % len(seeds):
        raise UnkeyedRandomness(
            f"a compiled layer draws a dropout mask of shape {list(shape)} for {len(seeds)} "
            f"samples: the size of dim {sample_dim} is not a multiple of the number of samples "
            "(packed tokens?). Set this dropout to 0, or use padded batches."
        )
