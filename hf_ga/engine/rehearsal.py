"""Rehearsals: some samples of a window are computed twice, in other company.

If the loss of a window is a sum over samples, then the undivided gradient of each term at the
model's outputs of a sample depends on that sample alone. So its norm, and its product with the
outputs, are the same among other samples, at another place in another micro-batch. Whatever makes
them differ is refused: BatchNorm, in-batch negatives, rewards that are normalised over the
micro-batch, mixed samples, hard example mining, a queue, a random number that is not keyed.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from hf_ga.engine.divisors import Reading, TermKey
from hf_ga.exact.precision import LOW_PRECISION
from hf_ga.loss import undivided
from hf_ga.loss.penalty import PARAMETER
from hf_ga.loss.saved import inputs, output_shape

NUM_FIRST_WINDOWS = 3  # are rehearsed
INTERVAL = 100  # one window in this many is rehearsed afterwards
TOLERANCE = 1e-3  # relative, in float32: other batch sizes use other kernels
FLOOR = 1e-6  # of the largest value: what is smaller is rounding
LOW_PRECISION_TOLERANCE = 0.2  # bf16 keeps 8 bits, and outputs add up many roundings
# Whether the rows of a sample in the outputs are next to each other, or one in each block of rows
# (as in torch.cat([chosen, rejected])).
ARRANGEMENTS = ("rows", "blocks")
MAX_NODES = 200  # of the graph that are searched for edges with rows of samples
MAX_EDGES = 16
Place = Hashable  # which output
# (term, output, position of the sample)
FootprintKey = tuple[TermKey, Place, int]


def is_rehearsed(window_index: int) -> bool:
    """Whether the n-th window of a run, counted from 0, is rehearsed."""
    return window_index < NUM_FIRST_WINDOWS or window_index % INTERVAL == 0


def rehearsal_parts(
    planned: Sequence[np.ndarray], num_parts: int, spare: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Choose the samples to rehearse in a window, and split the window into other micro-batches.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        num_parts: Number of micro-batches after the rehearsal.
        spare: Offsets of other ranks' samples, which may keep the rehearsed samples company.

    Returns:
        (offsets of the rehearsed samples, micro-batches that follow), of different sizes.
    """
    own = np.concatenate(planned) if len(planned) else np.empty(0, np.int64)
    parts = [part for part in np.array_split(own, num_parts) if len(part)]
    size = max((len(micro_batch) for micro_batch in planned), default=0)
    size = max(size, 2)  # a sample alone has no company
    if len(parts) == 1:
        rehearsed = _with_company(parts[0], spare, size - 1)
    else:
        rehearsed = _in_turn(sorted(parts, key=len, reverse=True), size)
    return rehearsed[::-1].copy(), parts


def rehearsed_offsets(planned: Sequence[np.ndarray], spare: np.ndarray) -> np.ndarray:
    """Choose the samples to rehearse in a window that follows as it was planned.

    Their number differs from that of all planned micro-batches, where the window has enough.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        spare: Offsets of other ranks' samples, which may keep them company.
    """
    sizes = {len(micro_batch) for micro_batch in planned}
    size = max(sizes) - 1
    if size < 2 or size in sizes:
        size = max(sizes) + 1
    if len(planned) == 1:
        return _with_company(planned[0], spare, size)[::-1].copy()
    in_turn = np.concatenate([_in_turn(planned, size), spare])
    return in_turn[:size][::-1].copy()


def _with_company(own: np.ndarray, spare: np.ndarray, size: int) -> np.ndarray:
    """Return half of this rank's samples together with others, `size` in total, at least one."""
    num_own = max(1, min(len(own), (size + 1) // 2))
    return np.concatenate([own[:num_own], spare[: max(0, size - num_own)]])


def _in_turn(parts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return up to `size` samples: the first of each part, then the second of each, ...

    If there are more parts than `size`, they are taken at equal distances, from the first to the
    last: parts are often in the order of their lengths, and samples of one length would not show
    what depends on the padded width.
    """
    if len(parts) > size:
        spread = np.linspace(0, len(parts) - 1, size).round().astype(int)
        parts = [parts[index] for index in spread]
    longest = max((len(part) for part in parts), default=0)
    taken = [part[i] for i in range(longest) for part in parts if i < len(part)]
    return np.array(taken[:size], np.int64)


@dataclass(frozen=True)
class Watched:
    """What the loss is computed from, where the gradients of samples are compared.

    Attributes:
        targets: Tensors or edges of the graph.
        values: The values of the tensors. None: unknown.
        sample_dim: The dim that holds the samples. None: there is a tensor for each sample.
        kind: What it is, equal in the rehearsal and in the window.
    """

    targets: Sequence[Tensor | GradientEdge]
    values: Sequence[Tensor] | None
    sample_dim: int | None
    kind: Place


class OutputRecorder:
    """Records what models return in a micro-batch, while it is switched on.

    Attributes:
        outputs: Tensors of the models' outputs that need a gradient, in the order of the calls.
        nested: Those within tuples or lists of the outputs, such as hidden states.
        inner: Outputs of submodules, for a model that returns nothing but its loss.
    """

    def __init__(self) -> None:
        """Start switched off."""
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.outputs: list[Tensor] = []
        self.nested: list[Tensor] = []
        self.inner: list[Tensor] = []

    @contextmanager
    def recording(self, models: Sequence[nn.Module], *, with_submodules: bool) -> Iterator[None]:
        """Record the outputs of these models (without wrappers) in the block."""
        handles = []
        for model in models:
            if with_submodules:
                handles += [
                    module.register_forward_hook(self._record_inner)
                    for module in model.modules()
                    if module is not model and not list(module.children())
                ]
            handles.append(model.register_forward_hook(self._record))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.clear()

    def _record(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Record the outputs of a model; a forward hook."""
        for value in _values(outputs):
            if _needs_gradient(value):
                self.outputs.append(value)
            elif not isinstance(value, Tensor):
                self.nested += [inner for inner in _leaves(value) if _needs_gradient(inner)]

    def _record_inner(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Record the outputs of a submodule; a forward hook."""
        self.inner += [value for value in _values(outputs) if _needs_gradient(value)]

    def candidates(self, num_samples: int, nodes: Sequence[Node]) -> Iterator[list[Watched]]:
        """Yield lists of what a term may be computed from, the nearest to the loss first.

        Args:
            num_samples: Number of samples of the micro-batch.
            nodes: The nodes of the term, for loops that use parameters without their model.
        """
        yield [*_calls(self.outputs, num_samples), *_with_rows(self.outputs, num_samples)]
        yield _with_rows(self.nested, num_samples)
        for watched in reversed(_with_rows(self.inner, num_samples)):
            yield [watched]
        yield _edges_with_rows(nodes, num_samples)


def _values(outputs: Any) -> list[Any]:
    """Return the values of a model's outputs: of a mapping, a tuple, or a single one."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    if isinstance(outputs, tuple | list):
        return list(outputs)
    return [outputs]


def _leaves(value: Any) -> list[Any]:
    """Return all tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for inner in value for leaf in _leaves(inner)]
    return []


def _needs_gradient(value: Any) -> bool:
    """Whether a value is a tensor of numbers through which the loss may have a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and value.dim() > 0


def _with_rows(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the tensors with one dim of samples, or with the same number of rows for each."""
    found = []
    for index, tensor in enumerate(tensors):
        dim = _sample_dim(tensor.shape, num_samples)
        if dim is not None:
            kind = ("rows", index, dim, tensor.shape[dim] == num_samples)
            found.append(Watched([tensor], [tensor.detach()], dim, kind))
    return found


def _sample_dim(shape: torch.Size, num_samples: int) -> int | None:
    """Return the dim of an output that holds the samples: the first, another one of their number
    (time first), or the first with several rows for each. None: there is none.
    """
    if num_samples in shape:
        return shape.index(num_samples)
    is_multiple = shape[0] > 0 and shape[0] % num_samples == 0
    return 0 if is_multiple else None


def _calls(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the outputs of calls with one sample each, as a loop over samples makes them."""
    is_of_samples = len(tensors) >= num_samples and len(tensors) % num_samples == 0
    has_rows = num_samples > 1 and any(
        _sample_dim(tensor.shape, num_samples) is not None for tensor in tensors
    )
    if not tensors or not is_of_samples or has_rows:
        return []
    return [Watched(list(tensors), [tensor.detach() for tensor in tensors], None, ("calls",))]


def _edges_with_rows(nodes: Sequence[Node], num_samples: int) -> list[Watched]:
    """Return edges of the graph below a term whose first dim is that of the samples."""
    found = []
    waiting = deque(nodes)
    seen = set(nodes)
    number = 0
    while waiting and number < MAX_NODES and len(found) < MAX_EDGES:
        node = waiting.popleft()
        number += 1
        children = [child for child, _ in inputs(node)]
        is_parameter = bool(children) and all(child.name() == PARAMETER for child in children)
        shape = output_shape(node)
        if len(shape) and shape[0] == num_samples and not is_parameter:
            kind = ("edge", number, node.name())
            found.append(Watched([GradientEdge(node, 0)], None, 0, kind))
        for child in children:
            if child not in seen and child.name() != PARAMETER:
                seen.add(child)
                waiting.append(child)
    return found


@dataclass
class Footprint:
    """What a sample's undivided gradient at an output looks like, in both arrangements of rows.

    Attributes:
        norms: Its L2 norm, by arrangement.
        products: Its product with the output.
        scales: The product of both norms, which bounds the rounding of `products`.
    """

    norms: dict[str, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


class Rehearsal:
    """Compares the samples of a window that were rehearsed with what they give in the window.

    Attributes:
        is_low_precision: Whether outputs were in half precision.
        num_reclassified: `KeyedDraws.num_reclassified` after the rehearsal; None before it.
        uncompared: The terms of which no sample was found again in the window.
    """

    def __init__(self) -> None:
        """Start without any rehearsed sample."""
        self.num_reclassified: int | None = None
        self._rehearsed: dict[FootprintKey, Footprint] = {}
        self.uncompared: set[TermKey] = set()
        self.is_low_precision = False

    def record(
        self,
        footprints: Mapping[FootprintKey, Footprint],
        terms: Iterable[TermKey],
        num_reclassified: int,
    ) -> None:
        """Keep the footprints of the rehearsed samples, for all terms of the loss."""
        self._rehearsed.update(footprints)
        self.uncompared.update(terms)
        self.num_reclassified = num_reclassified

    def difference(
        self, footprints: Mapping[FootprintKey, Footprint]
    ) -> tuple[TermKey, float, float] | None:
        """Return the first difference between a sample and its rehearsal.

        Args:
            footprints: By term, output and sample.

        Returns:
            (term, value in the rehearsal, value now), or None if there is none.
        """
        by_output: dict[tuple[TermKey, Place], list[tuple[Footprint, Footprint]]] = {}
        for key, now in footprints.items():
            before = self._rehearsed.get(key)
            if before is not None:
                self.uncompared.discard(key[0])
                by_output.setdefault(key[:2], []).append((before, now))
        floors = _largest_values([pair for pairs in by_output.values() for pair in pairs])
        for (term, _), pairs in by_output.items():
            # One arrangement must fit all samples.
            found = [
                _first_difference(pairs, name, self._tolerance, floors) for name in ARRANGEMENTS
            ]
            if all(difference is not None for difference in found):
                before, now = found[0]
                return term, before, now
        return None

    @property
    def _tolerance(self) -> float:
        """Relative tolerance of the comparison."""
        return LOW_PRECISION_TOLERANCE if self.is_low_precision else TOLERANCE


def _largest_values(pairs: Sequence[tuple[Footprint, Footprint]]) -> tuple[float, float]:
    """Return the largest norm and the largest bound of a product, against which others may be
    nothing but rounding.
    """
    norms = [max(before.norms["rows"], now.norms["rows"]) for before, now in pairs]
    scales = [max(before.scales["rows"], now.scales["rows"]) for before, now in pairs]
    return max(norms, default=0.0), max(scales, default=0.0)


def _first_difference(
    pairs: Sequence[tuple[Footprint, Footprint]],
    name: str,
    tolerance: float,
    largest: tuple[float, float],
) -> tuple[float, float] | None:
    """Return the values of the first sample that differs in an arrangement of rows, or None."""
    largest_norm, largest_scale = largest
    for before, now in pairs:
        norm_before = before.norms[name]
        norm_now = now.norms[name]
        bound = tolerance * max(norm_before, norm_now) + FLOOR * largest_norm
        if abs(norm_before - norm_now) > bound:
            return norm_before, norm_now
        product_before = before.products[name]
        product_now = now.products[name]
        scale = max(before.scales[name], now.scales[name])
        if abs(product_before - product_now) > tolerance * scale + FLOOR * largest_scale:
            return product_before, product_now
    return None


def footprints_of(
    loss: Tensor,
    readings: Sequence[Reading],
    recorder: OutputRecorder,
    positions: Sequence[int],
    num_levels: int | None = None,
) -> tuple[dict[FootprintKey, Footprint], bool]:
    """Compute the footprints of all samples of a micro-batch, for each term of its loss.

    Only the graph between the loss and the outputs is run backward, so no parameter gets a
    gradient.

    Args:
        loss: The loss.
        readings: Its terms.
        recorder: The recorded outputs.
        positions: Positions of the samples in the epoch.
        num_levels: How many of the recorder's candidates to try at most. None: all.

    Returns:
        (footprints, whether an output is in half precision).
    """
    footprints: dict[FootprintKey, Footprint] = {}
    is_low_precision = False
    num_samples = len(positions)
    for number, reading in enumerate(readings):
        gradients_of = _gradient_function(loss, readings, number)
        nodes = [loss.grad_fn] if reading.term is None else reading.term.nodes
        candidates = islice(recorder.candidates(num_samples, nodes), num_levels)
        for level, all_watched in enumerate(candidates):
            targets = [target for watched in all_watched for target in watched.targets]
            of_all = iter(gradients_of(targets) if targets else ())
            gradients = [[next(of_all) for _ in watched.targets] for watched in all_watched]
            # Terms share a graph, so the gradient at an output that a term does not use is 0.
            if not any(_is_any_nonzero(of_watched) for of_watched in gradients):
                continue
            for watched, of_watched in zip(all_watched, gradients, strict=True):
                is_low_precision |= any(
                    gradient is not None and gradient.dtype in LOW_PRECISION
                    for gradient in of_watched
                )
                of_samples = _footprints(watched, of_watched, num_samples)
                for position, footprint in zip(positions, of_samples, strict=False):
                    footprints[reading.key, (level, watched.kind), position] = footprint
            break
    return footprints, is_low_precision


def _is_any_nonzero(gradients: Sequence[Tensor | None]) -> bool:
    """Whether any gradient is not 0."""
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _gradient_function(
    loss: Tensor, readings: Sequence[Reading], number: int
) -> Callable[[Sequence[Tensor | GradientEdge]], Sequence[Tensor | None]]:
    """Return a function that computes the undivided gradient of one term at some outputs."""
    terms = [reading.term for reading in readings if reading.term is not None]
    # Without its factor, which may change from window to window.
    factor = readings[number].factor
    inverse = 1.0 / factor if isinstance(factor, Tensor) or factor else 0.0
    scales = [inverse if index == number else 0.0 for index in range(len(terms))]

    def gradient_of(outputs: Sequence[Tensor | GradientEdge]) -> Sequence[Tensor | None]:
        """Return the gradient at each output; None where the term does not depend on it."""
        if not terms:
            return torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        with undivided(terms, scales):
            return torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)

    return gradient_of


def _footprints(
    watched: Watched, gradients: Sequence[Tensor | None], num_samples: int
) -> list[Footprint]:
    """Compute the footprint of each sample. Empty if the term does not depend on it."""
    if watched.sample_dim is None:
        return _footprints_of_calls(watched, gradients, num_samples)
    (gradient,) = gradients
    if gradient is None:
        return []
    footprints = [Footprint() for _ in range(num_samples)]
    rows = gradient.movedim(watched.sample_dim, 0)
    for name in ARRANGEMENTS:
        of_samples = _by_sample(rows, num_samples, name)
        values = torch.zeros_like(of_samples)
        if watched.values is not None:
            values = _by_sample(watched.values[0].movedim(watched.sample_dim, 0), num_samples, name)
        numbers = _norms_and_products(values, of_samples)
        for footprint, norm, product, bound in zip(footprints, *numbers.tolist(), strict=True):
            footprint.norms[name] = norm
            footprint.products[name] = product
            footprint.scales[name] = bound
    return footprints


def _footprints_of_calls(
    watched: Watched, gradients: Sequence[Tensor | None], num_samples: int
) -> list[Footprint]:
    """Compute the footprint of each sample, which has calls of its own."""
    calls_per_sample = len(gradients) // num_samples
    footprints = []
    for sample in range(num_samples):
        calls = range(sample * calls_per_sample, (sample + 1) * calls_per_sample)
        used = [call for call in calls if gradients[call] is not None]
        footprint = Footprint(*(dict.fromkeys(ARRANGEMENTS, 0.0) for _ in range(3)))
        if used:
            values = torch.cat([watched.values[call].double().reshape(1, -1) for call in used], 1)
            of_calls = torch.cat([gradients[call].double().reshape(1, -1) for call in used], 1)
            norm, product, bound = _norms_and_products(values, of_calls)[:, 0].tolist()
            footprint = Footprint(
                *(dict.fromkeys(ARRANGEMENTS, number) for number in (norm, product, bound))
            )
        footprints.append(footprint)
    return footprints


def _norms_and_products(values: Tensor, gradients: Tensor) -> Tensor:
    """Return the norms of gradients, their products with values, and bounds of these products.

    Args:
        values: Shape (samples, elements of a sample). Padding may hold infinities, where the
            gradient is 0.
        gradients: Of the same shape.

    Returns:
        Shape (3, samples).
    """
    norms = gradients.norm(dim=1)
    products = torch.where(gradients == 0, 0.0, values * gradients).sum(1)
    bounds = torch.where(gradients == 0, 0.0, values).norm(dim=1) * norms
    return torch.stack([norms, products, bounds])


def _by_sample(tensor: Tensor, num_samples: int, arrangement: str) -> Tensor:
    """Return a tensor as one row a sample, float64, shape (samples, elements of a sample)."""
    if arrangement == "rows":
        return tensor.double().reshape(num_samples, -1)
    in_blocks = tensor.double().reshape(-1, num_samples, *tensor.shape[1:])
    return in_blocks.transpose(0, 1).reshape(num_samples, -1)
