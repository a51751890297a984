"""Finds modules that are not the same on all ranks when a window begins: a centre or a balance of
experts that each rank computes from its own samples, a teacher with weights of another seed.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

from torch import nn

from hf_ga.engine.checks.weight_check import Weight, norms_by_kind
from hf_ga.errors import ConfigError
from hf_ga.model.forward import unwrapped

NUM_NAMES = 4  # of weights in a message
ROUNDING = 1e-5  # relative, of norms that were computed on other hardware
NormsByName = Mapping[str, Sequence[float]]


def norms_by_name(
    modules: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[tuple[Mapping, str, str]],
) -> NormsByName:
    """Return the norms of weights that must be the same on all ranks, by their names, of which
    several modules may have the same one.

    Args:
        modules: Modules that the loop calls.
        parameters: Those that are trained, which may belong to no module.
        buffers: Buffers that forwards do not change, as (mapping, name in it, name in messages).
    """
    weights: dict[int, Weight] = {}
    for module in map(unwrapped, modules):
        named = dict(module.named_parameters())
        kind = type(module).__name__
        for name, parameter in named.items():
            weights.setdefault(id(parameter), Weight(named, name, f"{kind}.{name}"))
    others = dict(enumerate(parameters))
    for key, parameter in others.items():
        name = f"a parameter of shape {list(parameter.shape)}"
        weights.setdefault(id(parameter), Weight(others, key, name))
    found: dict[str, list[float]] = {}
    for norms in norms_by_kind([*weights.values(), *(Weight(*buffer) for buffer in buffers)]):
        for weight, value in zip(norms.weights, norms.values.tolist(), strict=True):
            found.setdefault(weight.name, []).append(value)
    return {name: sorted(values) for name, values in sorted(found.items())}


def digest(norms: NormsByName) -> float:
    """Return a number from 1 to 2 that almost surely differs for other norms."""
    return 1 + zlib.crc32(repr(norms).encode()) / 2**32


def check_ranks(of_ranks: Sequence[NormsByName | None]) -> None:
    """Check that weights of one name have the same norms on all ranks that have as many of them,
    but for rounding.

    Args:
        of_ranks: The `norms_by_name` of each rank.

    Raises:
        ConfigError: If they have not.
    """
    known = [norms for norms in of_ranks if norms is not None]
    first = known[0] if known else {}
    differing = [
        name
        for name, values in first.items()
        for other in known[1:]
        if len(other.get(name, ())) == len(values) and not all(map(_is_close, other[name], values))
    ]
    if differing:
        names = ", ".join(dict.fromkeys(differing[:NUM_NAMES]))
        raise ConfigError(
            f"weights or buffers differ between processes at the beginning of a window ({names}), "
            "so their losses are not those of one model. Add up over all processes what a centre, "
            "a balance or a normalisation is computed from (accelerator.reduce(total)), and "
            "initialise modules that are not prepared with the same seed."
        )


def _is_close(first: float, second: float) -> bool:
    """Whether two norms differ by rounding only."""
    return math.isclose(first, second, rel_tol=ROUNDING)
