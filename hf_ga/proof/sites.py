"""Finds a model's dropout sites and the sample dim of their masks, by two training forwards with 2
and 3 copies of one sample.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.dropout_site import DropoutSite
from hf_ga.exact.forward import restored_buffers
from hf_ga.exact.generators import moved_generators, preserved_random_states, random_states
from hf_ga.exact.masks import apply_dropout_mask

# Batch sizes of the two forwards.
SMALL = 2
LARGE = 3


def find_dropout_sites(
    model: nn.Module,
    forward: Callable[[int], Any],
    *,
    allow_split_dependent_randomness: bool = False,
) -> KeyedDropout:
    """Find all places where a model draws dropout, and which dim of each mask is the sample dim.

    A proof calls it, so that dropout can be keyed by sample afterwards. Runs two training
    forwards, with 2 and 3 samples and without gradients, in which nothing is dropped. Random states
    and buffers are restored afterwards.

    Args:
        model: The model, in training mode.
        forward: Runs the model on a batch of the given number of samples.
        allow_split_dependent_randomness: Accept draws that cannot be tied to a sample. Their
            modules are listed in `unkeyed` of the result.

    Returns:
        The model's keyed dropout.

    Raises:
        UnkeyedRandomness: If a module draws random numbers other than for dropout, or a mask has no
            unique sample dim, unless `allow_split_dependent_randomness`.
    """
    finder = _SiteFinder(model)
    _run_forwards(finder, forward)
    unkeyed_modules = list(finder.generators_drawn_from)
    problems = [
        f"{finder.names[module]} ({type(module).__name__}) draws from {generators}"
        for module, generators in finder.generators_drawn_from.items()
    ]
    for site in finder.sites.values():
        try:
            site.sample_dim = sample_dim(site.shapes)
        except ValueError as error:
            site.is_keyed = False
            unkeyed_modules.append(site.module)
            problems.append(f"{site.name} draws a mask without a single sample axis: {error}")
    if problems and not allow_split_dependent_randomness:
        raise UnkeyedRandomness(
            "unsupported: random draws that hf_ga cannot tie to a sample, so they would depend on "
            f"the split of a window: {'; '.join(problems)}. Set this probability to 0, use "
            "attn_implementation='eager' or 'sdpa' if it is attention dropout, or accept "
            "split-dependent randomness with allow_split_dependent_randomness."
        )
    dropout = KeyedDropout(model)
    dropout.sites = finder.sites
    dropout.hooked = [module for module in finder.names if module in finder.modules_to_hook]
    dropout.unkeyed = unkeyed_modules
    return dropout


def _run_forwards(finder: "_SiteFinder", forward: Callable[[int], Any]) -> None:
    """Run two training forwards while a finder records the model's random draws.

    Random states and buffers are restored afterwards.

    Args:
        finder: Records dropout sites, and other random draws.
        forward: Runs the model on a batch of the given number of samples, `SMALL` then `LARGE`.
    """
    model = finder.model
    with (
        preserved_random_states(),
        torch.no_grad(),
        restored_buffers(model),
        finder._patched(),
        warnings.catch_warnings(),
    ):
        # Activation checkpointing warns under no_grad.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        for num_samples in (SMALL, LARGE):
            finder.start_forward()
            forward(num_samples)
            finder.record_draws(model)  # draws of a loss function after the last module


def sample_dim(shapes: list[torch.Size]) -> int | None:
    """Find the sample dim of a dropout mask: the one that grew with the number of samples.

    Args:
        shapes: The mask's shape in the proof's forward with 2 samples, and in that with 3 samples.

    Returns:
        The dim. None if both shapes are equal: all samples share the mask.

    Raises:
        ValueError: If several dims grew, or one grew in another ratio than 2 to 3, or the mask was
            not drawn exactly once in both forwards with the same number of dims.

    >>> sample_dim([torch.Size([2, 8]), torch.Size([3, 8])])
    0
    """
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        raise ValueError(
            f"for {SMALL} and {LARGE} samples the masks have shapes {[list(s) for s in shapes]}"
        )
    small, large = shapes
    changed_dims = [dim for dim in range(len(small)) if small[dim] != large[dim]]
    if not changed_dims:
        return None
    dim = changed_dims[0]
    if len(changed_dims) > 1 or small[dim] * LARGE != large[dim] * SMALL:
        raise ValueError(
            f"the mask of {SMALL} samples has shape {list(small)}, that of {LARGE} samples "
            f"{list(large)}"
        )
    return dim


class _SiteFinder(KeyedDropout):
    """A stand-in for keyed dropout that records where a model draws masks, and drops nothing.

    Attributes:
        modules_to_hook: Modules that draw masks, and all modules around them.
        generators_drawn_from: For each module that drew random numbers itself instead of by a
            dropout function, the names of the random generators it drew from.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start with no sites. `_patched` lets a model's dropout functions call this object."""
        super().__init__(model)
        self.modules_to_hook: set[nn.Module] = set()
        self.generators_drawn_from: dict[nn.Module, str] = {}
        self._random_states: dict[str, bytes] = {}

    def start_forward(self) -> None:
        """Save the random states at the start of a forward, so that draws can be noticed."""
        self._random_states = random_states()

    def record_draws(self, module: nn.Module) -> None:
        """Record that a module drew random numbers, if any generator has advanced.

        Called at each start and end of a module's forward, so all draws since the last call were
        made by `module` itself, not by a submodule.
        """
        generators = moved_generators(self._random_states)
        if generators:
            self.generators_drawn_from[module] = " and ".join(generators)
            self._random_states = random_states()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of every module: attribute earlier draws to the calling module."""
        super()._enter(module, args, kwargs)
        caller = self._stack[-2].module if len(self._stack) > 1 else module
        self.record_draws(caller)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of every module: attribute the draws since the last hook to it."""
        is_running = bool(self._stack) and self._stack[-1].module is module
        super()._leave(module, args, output)
        if is_running:
            self.record_draws(module)

    def _dropped(self, key: int, input: Tensor, drop_probability: float) -> Tensor:
        """Record the dropout site of an input, and return the input times 1 / (1 - p), all kept."""
        kept = self._draw(key, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _draw(self, key: int, shape: torch.Size, drop_probability: float) -> Tensor:
        """Record a dropout site and the shape of its mask, and return a mask that keeps all.

        Args:
            key: 64-bit key of the dropout site.
            shape: Shape of the mask.
            drop_probability: Not used.
        """
        frame = self._stack[-1]
        site = DropoutSite(self.names[frame.module], frame.module, key, path=frame.key)
        self.sites.setdefault(key, site).shapes.append(shape)
        self.modules_to_hook.update(frame.module for frame in self._stack)
        device = next(self.model.parameters(), torch.empty(0)).device
        return torch.ones(shape, dtype=torch.bool, device=device)
