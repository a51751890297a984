"""What the probing forwards find: places that draw, their sample axes, which of them draw masks that are alike."""

from dataclasses import dataclass, field

import torch
from torch import nn

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.packed_tokens import PackedTokens

SMALL, LARGE = 2, 3  # numbers of samples in the two forwards that find the sample axis


@dataclass
class Place:
    """Where a mask is drawn: the module's name, the probability and the mask's shapes seen while probing, the sample axis found
    from them.
    """

    name: str
    module: nn.Module
    drop_probability: float
    shapes: list[torch.Size] = field(default_factory=list)
    axis: int | None = None
    can_be_keyed: bool = True


def refuse_other_shapes(place: Place, shape: torch.Size, num_samples: int, packed: PackedTokens | None) -> None:
    """Raises UnkeyedRandomness where a mask of this shape has no whole samples, or no tokens of packed ones, at its sample axis."""
    if packed is None:
        if place.axis is not None and shape[place.axis] % num_samples:
            raise UnkeyedRandomness(
                f"{place.name} draws a mask of shape {list(shape)} for {num_samples} samples: axis {place.axis} does not hold "
                "whole samples (packed tokens?). Set this dropout to 0, or feed padded batches."
            )
    elif place.axis != 0 or len(shape) < 3 or shape[:2] != packed.packed_shape or len(shape) != len(place.shapes[0]):
        raise UnkeyedRandomness(
            f"{place.name} draws a mask of shape {list(shape)} for packed tokens, of shape {list(place.shapes[0])} for padded "
            "samples: its draws cannot be tied to tokens. Compute this model padded, or set this dropout to 0."
        )


def alike_places(places: dict[int, Place]) -> dict[int, tuple[list[int], int]]:
    """Of each place, the places whose masks had its shapes and probability, in the order of their draws, and its index there."""
    alike: dict[tuple, list[int]] = {}
    for key, place in places.items():
        if place.can_be_keyed:
            alike.setdefault((*place.shapes, place.axis, place.drop_probability), []).append(key)
    return {key: (group, index) for group in alike.values() for index, key in enumerate(group)}


class Recorder:
    """What the probing forwards see: places with their shapes, modules on the way to them, and who moved a generator."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.on_the_way: set[nn.Module] = set()
        self.unkeyed: dict[nn.Module, str] = {}
        self._states: dict[str, bytes] = {}

    def start(self) -> None:
        self._states = random_states()

    def boundary(self, module: nn.Module) -> None:
        """A submodule of `module` begins or `module` ends: what moved since the last boundary was moved by `module` itself."""
        if moved := moved_generators(self._states):
            self.unkeyed[module] = " and ".join(moved)
            self._states = random_states()

    def record(self, key: int, name: str, drop_probability: float, shape: torch.Size, modules: list[nn.Module]) -> None:
        self.places.setdefault(key, Place(name, modules[-1], drop_probability)).shapes.append(shape)
        self.on_the_way.update(modules)


def sample_axis(shapes: list[torch.Size]) -> int | None:
    """The axis that grew from SMALL to LARGE samples; None if none did (a table shared by the window).

    Raises:
        ValueError: no single axis grew in that ratio.
    """
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        raise ValueError(f"{SMALL} and {LARGE} samples drew the shapes {[list(s) for s in shapes]}")
    small, large = shapes
    changed = [axis for axis in range(len(small)) if small[axis] != large[axis]]
    if not changed:
        return None
    if len(changed) > 1 or small[changed[0]] * LARGE != large[changed[0]] * SMALL:
        raise ValueError(f"from {SMALL} to {LARGE} samples the shape went from {list(small)} to {list(large)}")
    return changed[0]
