"""Finds a model's dropout sites and their sample axes, by two training forwards with 2 and 3 equal
samples.
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
    """Find a model's dropout sites, without dropping anything.

    Args:
        model: The model, in training mode.
        forward: Runs the model on a batch of the given number of samples.
        allow_split_dependent_randomness: Accept draws that cannot be tied to a sample.

    Raises:
        UnkeyedRandomness: If a module draws random numbers outside of dropout, or a mask has no
            single sample axis.
    """
    finder = _SiteFinder(model)
    with (
        preserved_random_states(),
        torch.no_grad(),
        restored_buffers(model),
        finder._patched(),
        warnings.catch_warnings(),
    ):
        # Checkpointing warns under no_grad.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        for num_samples in (SMALL, LARGE):
            finder.start()
            forward(num_samples)
            finder.record_draws(model)  # draws of a loss function after the last module
    problems = [
        f"{finder.names[module]} ({type(module).__name__}) draws from {generators}"
        for module, generators in finder.moved.items()
    ]
    unkeyed = list(finder.moved)
    for site in finder.sites.values():
        try:
            site.sample_dim = sample_axis(site.shapes)
        except ValueError as error:
            site.is_keyed = False
            unkeyed.append(site.module)
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
    dropout.hooked = [module for module in finder.names if module in finder.on_the_way]
    dropout.unkeyed = unkeyed
    return dropout


def sample_axis(shapes: list[torch.Size]) -> int | None:
    """Find the axis that grew from 2 to 3 samples.

    Args:
        shapes: Of a mask in the two forwards.

    Returns:
        None if no axis grew (a mask shared by the window).

    Raises:
        ValueError: If not exactly one axis grew in that ratio.
    """
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        raise ValueError(
            f"for {SMALL} and {LARGE} samples the masks have shapes {[list(s) for s in shapes]}"
        )
    small, large = shapes
    changed = [axis for axis in range(len(small)) if small[axis] != large[axis]]
    if not changed:
        return None
    axis = changed[0]
    if len(changed) > 1 or small[axis] * LARGE != large[axis] * SMALL:
        raise ValueError(
            f"the mask of {SMALL} samples has shape {list(small)}, that of {LARGE} samples "
            f"{list(large)}"
        )
    return axis


class _SiteFinder(KeyedDropout):
    """Records the masks to draw, and drops nothing.

    Attributes:
        on_the_way: Modules on the path to a site.
        moved: Modules that drew from random generators directly, and which.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.on_the_way: set[nn.Module] = set()
        self.moved: dict[nn.Module, str] = {}
        self._states: dict[str, bytes] = {}

    def start(self) -> None:
        self._states = random_states()

    def record_draws(self, module: nn.Module) -> None:
        """Note the draws since the last call of this, which are the module's own.

        Called when a submodule of the module begins, and when the module ends.
        """
        moved = moved_generators(self._states)
        if moved:
            self.moved[module] = " and ".join(moved)
            self._states = random_states()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        super()._enter(module, args, kwargs)
        self.record_draws(self._stack[-2].module if len(self._stack) > 1 else module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        is_open = bool(self._stack) and self._stack[-1].module is module
        super()._leave(module, args, output)
        if is_open:
            self.record_draws(module)

    def _dropped(self, key: int, input: Tensor, drop_probability: float) -> Tensor:
        kept = self._draw(key, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _draw(self, key: int, shape: torch.Size, drop_probability: float) -> Tensor:
        frame = self._stack[-1]
        site = DropoutSite(self.names[frame.module], frame.module, key, path=frame.key)
        self.sites.setdefault(key, site).shapes.append(shape)
        self.on_the_way.update(frame.module for frame in self._stack)
        device = next(self.model.parameters(), torch.empty(0)).device
        return torch.ones(shape, dtype=torch.bool, device=device)
