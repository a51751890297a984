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
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from hf_ga.engine.look.inside import BackwardCode, nodes_below
from hf_ga.engine.sums.divisors import Reading, TermKey
from hf_ga.errors import LossNotAdditive
from hf_ga.loading.batches import structure_of
from hf_ga.loading.window import Window
from hf_ga.loss import undivided
from hf_ga.loss.nodes.saved import inputs, output_shape
from hf_ga.loss.penalty import PARAMETER, Penalties
from hf_ga.model.outputs import named_tensors
from hf_ga.model.precision import LOW_PRECISION

NUM_FIRST_WINDOWS = 3  # are rehearsed
INTERVAL = 100  # one window in this many is rehearsed afterwards
TOLERANCE = 1e-3  # relative, in float32: other batch sizes use other kernels
FLOOR = 1e-6  # of the largest value: what is smaller is rounding
# A relative difference between two widths above which it is tried whether padding removes it. That
# of rounding alone is about this large.
WIDTH_TOLERANCE = 3e-6
WIDTH_FLOOR = 1e-3  # of the largest value: the relative difference of less is rounding
LOW_PRECISION_TOLERANCE = 0.2  # bf16 keeps 8 bits, and outputs add up many roundings
MAX_ELEMENTS = 2**20  # of the samples' gradients that are compared at once
MAX_NODES = 200  # of the graph that are searched for edges with rows of samples
MAX_EDGES = 16
NUM_FORM_NODES = 24  # of the graph of a loss, that are compared with those of a rehearsed one
# Nodes of functions that choose among values by their size.
CHOICES = {
    "KthvalueBackward0": "torch.kthvalue",
    "MaxBackward0": "torch.max",
    "MedianBackward1": "torch.median",
    "MinBackward0": "torch.min",
    "SortBackward0": "torch.sort",
    "TopkBackward0": "torch.topk",
}
Place = Hashable  # which output, or (`INSIDE`, which edge)
INSIDE = "inside"
SMALLER = 2.0**-4  # times which a gradient is tried, for backward code that is not linear
# (term, output, position of the sample)
FootprintKey = tuple[TermKey, Place, int]


def is_rehearsed(window_index: int) -> bool:
    """Whether the n-th window of a run, counted from 0, is rehearsed."""
    return window_index < NUM_FIRST_WINDOWS or window_index % INTERVAL == 0


def number_of(window: Window) -> int:
    """Return the number of a window that decides whether it is rehearsed: its own, so that a run
    that is resumed rehearses the same windows.
    """
    return window.index if window.epoch == 0 else max(window.index, NUM_FIRST_WINDOWS)


def form_of(loss: Tensor) -> Hashable:
    """Return the names of the nodes that compute a loss, from the last one on, as far as
    `NUM_FORM_NODES`: what a loss function does differently for other data shows there.
    """
    queue = deque([loss.grad_fn])
    seen: set[Node] = set()
    names = []
    while queue and len(names) < NUM_FORM_NODES:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        queue.extend(child for child, _ in node.next_functions)
    return tuple(names)


def kind_of(batch: Any) -> Hashable:
    """Return the names of a batch's entries, and what they are: types, number of dims."""
    return structure_of(batch) if isinstance(batch, Mapping) else type(batch)


@dataclass(frozen=True)
class Choice:
    """What decides which samples of a window are rehearsed.

    Attributes:
        spare: Offsets of other ranks' samples, which may keep the rehearsed samples company.
        lengths: About how long each sample of the window is, shape (samples of the window,).
        preferred: Offsets of samples that are rehearsed in any case.
        is_first: Whether no window of the run was rehearsed so far. Later rehearsals are half as
            large.
    """

    spare: np.ndarray
    lengths: np.ndarray
    preferred: np.ndarray
    is_first: bool

    @property
    def is_large(self) -> bool:
        """Whether the rehearsal is about as large as a micro-batch: the first one, and one with
        preferred samples, which need company.
        """
        return self.is_first or len(self.preferred) > 0


def rehearsal_parts(
    planned: Sequence[np.ndarray], num_parts: int, choice: Choice
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Choose the samples to rehearse in a window, and split the window into other micro-batches.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        num_parts: Number of micro-batches after the rehearsal.
        choice: What decides.

    Returns:
        (offsets of the rehearsed samples, micro-batches that follow), of different sizes.
    """
    own = np.concatenate(planned) if len(planned) else np.empty(0, np.int64)
    parts = [part for part in np.array_split(own, num_parts) if len(part)]
    size = max((len(micro_batch) for micro_batch in planned), default=0)
    if not choice.is_large:
        size = _half(size)
    if len(planned):
        size = min(size, _num_that_fit(planned, choice))
    size = max(size, 2)  # a sample alone has no company
    if len(parts) == 1:
        size = max(size - 1, 2)
        if size == len(parts[0]):
            size += 1 if len(choice.spare) else -1
        # The shortest ones, for another width than that of the only part.
        shortest_first = np.argsort(choice.lengths[parts[0]], kind="stable")
        rehearsed = _with_company(parts[0][shortest_first], choice, size)
    else:
        rehearsed = _of_all_parts(sorted(parts, key=len, reverse=True), choice, size)
    return rehearsed[::-1].copy(), parts


def rehearsed_offsets(planned: Sequence[np.ndarray], choice: Choice) -> np.ndarray:
    """Choose the samples to rehearse in a window that follows as it was planned.

    Their number differs from that of all planned micro-batches, where the window has enough.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        choice: What decides.
    """
    sizes = {len(micro_batch) for micro_batch in planned}
    size = max(sizes) - 1 if choice.is_large else _half(max(sizes))
    size = min(size, _num_that_fit(planned, choice))
    others = [number for number in range(2, max(sizes) + 2) if number not in sizes]
    size = min(others or [max(sizes) + 1], key=lambda number: (abs(number - size), number))
    if len(planned) == 1:
        own = _longest_first(planned[0], choice.lengths)
        first = np.array([*dict.fromkeys([*choice.preferred.tolist(), *own.tolist()])], np.int64)
        return _with_company(first, choice, size)[::-1].copy()
    return _of_all_parts(planned, choice, size)[::-1].copy()


def _num_that_fit(planned: Sequence[np.ndarray], choice: Choice) -> int:
    """Return how many samples, padded to the longest one, take the memory of the largest planned
    micro-batch; at least 3. A plan by length has its most samples where they are short.
    """
    longest = max(1, choice.lengths.max(initial=0))
    padded = [len(part) * choice.lengths[part].max() for part in planned if len(part)]
    return max(3, int(max(padded) / longest)) if max(padded, default=0) else max(map(len, planned))


def _half(size: int) -> int:
    """Return about half of a number of samples, an odd number of at least 3 if there are as many:
    dims of layers are even, and a draw of such a size is not taken for one of rows of samples.
    """
    return min(size, max(3, size // 2 | 1))


def _with_company(own: np.ndarray, choice: Choice, size: int) -> np.ndarray:
    """Return the first samples of this rank together with others, half of each, `size` in total;
    more of its own if there are fewer others, or more preferred ones.
    """
    spare = np.setdiff1d(choice.spare, own)
    num_own = min(len(own), max(len(choice.preferred), (size + 1) // 2, size - len(spare)))
    return np.concatenate([own[:num_own], spare[: max(0, size - num_own)]])


def _of_all_parts(parts: Sequence[np.ndarray], choice: Choice, size: int) -> np.ndarray:
    """Return `size` samples: all preferred ones; the longest one, which has no padding in any
    company; then the first ones of all parts in turn, those of other ranks last.
    """
    own = np.concatenate(parts)
    longest = _longest_first(own, choice.lengths)[:1]
    in_turn = _in_turn([_longest_first(part, choice.lengths) for part in parts], size)
    preferred = _longest_first(choice.preferred, choice.lengths)
    size = max(size, len(preferred))
    ordered = np.concatenate([preferred, longest, in_turn, choice.spare])
    return np.array([*dict.fromkeys(ordered.tolist())][:size], np.int64)


def _longest_first(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return samples with the longest one in front."""
    if not len(offsets):
        return offsets
    longest = int(lengths[offsets].argmax())
    return np.concatenate([offsets[longest : longest + 1], np.delete(offsets, longest)])


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


class Arrangement(NamedTuple):
    """Where a tensor may hold the samples.

    Attributes:
        dim: The dim of the samples. None: there is a tensor for each sample.
        rows: "one": a row for each sample. "next": several, next to each other. "blocks": one in
            each block of rows, as in torch.cat([chosen, rejected]).
    """

    dim: int | None
    rows: Literal["one", "next", "blocks"]


OF_CALLS = Arrangement(None, "one")


@dataclass(frozen=True)
class Watched:
    """What the loss is computed from, where the gradients of samples are compared.

    Attributes:
        targets: Tensors or edges of the graph.
        values: The values of the tensors. None: unknown.
        arrangements: All that its shape allows: 4 channels may look like 4 samples. The true one
            is possible for other numbers of samples, too.
        kind: What it is, equal in the rehearsal and in the window.
    """

    targets: Sequence[Tensor | GradientEdge]
    values: Sequence[Tensor] | None
    arrangements: Sequence[Arrangement]
    kind: Place


class OutputRecorder:
    """Records what models return in a micro-batch, while it is switched on.

    Attributes:
        outputs: Tensors of the models' outputs that need a gradient, in the order of the calls.
        nested: Those within tuples or lists of the outputs, such as hidden states.
        inner: Outputs of submodules, for a model that returns nothing but its loss.
        backward_code: Finds backward code inside of the models that torch does not provide.
    """

    def __init__(self) -> None:
        """Start switched off."""
        self.backward_code = BackwardCode()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.outputs: list[Tensor] = []
        self.nested: list[Tensor] = []
        self.inner: list[Tensor] = []
        self.backward_code.clear()

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
            with self.backward_code.recording():
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
                inner = named_tensors(value).values()
                self.nested += [tensor for tensor in inner if _needs_gradient(tensor)]

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


def widths_of(batch: Any) -> list[torch.Size]:
    """Return the sizes of all tensors of a batch, but for the number of samples."""
    return [tensor.shape[1:] for tensor in named_tensors(batch).values()]


def _needs_gradient(value: Any) -> bool:
    """Whether a value is a tensor of numbers through which samples may have a gradient, and not a
    parameter or a function of parameters alone.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or value.dim() == 0:
        return False
    if value.grad_fn is None:
        return not isinstance(value, nn.Parameter)
    return not Penalties().has(value.grad_fn)


def _with_rows(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the tensors with one row, or with equally many rows, for each sample."""
    found = []
    for index, tensor in enumerate(tensors):
        arrangements = _arrangements(tensor.shape, num_samples)
        if arrangements:
            found.append(Watched([tensor], [tensor.detach()], arrangements, ("rows", index)))
    return found


def _arrangements(shape: torch.Size, num_samples: int) -> list[Arrangement]:
    """Return the possible arrangements of samples: in any dim of their number, as the second one
    where time is first, or in the first dim with several rows for each.
    """
    found = [Arrangement(dim, "one") for dim, size in enumerate(shape) if size == num_samples]
    if shape[0] > num_samples and shape[0] % num_samples == 0:
        found += [Arrangement(0, "next"), Arrangement(0, "blocks")]
    return found


def _calls(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the outputs of calls with one sample each, as a loop over samples makes them."""
    is_of_samples = len(tensors) >= num_samples and len(tensors) % num_samples == 0
    has_rows = num_samples > 1 and any(
        _arrangements(tensor.shape, num_samples) for tensor in tensors
    )
    if not tensors or not is_of_samples or has_rows:
        return []
    values = [tensor.detach() for tensor in tensors]
    return [Watched(list(tensors), values, [OF_CALLS], ("calls",))]


def _inside(edges: Sequence[GradientEdge], num_samples: int) -> list[Watched]:
    """Return the edges inside of a model at which there are rows of samples."""
    found = []
    for number, edge in enumerate(edges):
        shape = output_shape(edge.node, edge.output_nr)
        arrangements = _arrangements(shape, num_samples) if len(shape) else []
        if arrangements:
            found.append(Watched([edge], None, arrangements, (INSIDE, number, edge.node.name())))
    return found


def _edges_with_rows(nodes: Sequence[Node], num_samples: int) -> list[Watched]:
    """Return edges of the graph below a term whose first dim is that of the samples."""
    found = []
    for number, node in enumerate(nodes_below(nodes, MAX_NODES), start=1):
        children = [child for child, _ in inputs(node)]
        is_parameter = bool(children) and all(child.name() == PARAMETER for child in children)
        shape = output_shape(node)
        if len(shape) and shape[0] == num_samples and not is_parameter:
            kind = ("edge", number, node.name())
            found.append(Watched([GradientEdge(node, 0)], None, [Arrangement(0, "one")], kind))
        if len(found) == MAX_EDGES:
            break
    return found


def choices_among_samples(nodes: Sequence[Node], num_samples: int) -> set[str]:
    """Return the functions below a term that choose among one number for each sample, such as the
    largest losses. Samples that are chosen both times by luck do not show it.

    Args:
        nodes: The nodes of the term.
        num_samples: Number of samples of the micro-batch.
    """
    found = set()
    for node in nodes_below(nodes, MAX_NODES):
        if node.name() in CHOICES:
            shapes = [output_shape(child, index) for child, index in inputs(node)]
            if shapes == [(num_samples,)]:
                found.add(CHOICES[node.name()])
    return found


@dataclass
class Footprint:
    """What a sample's undivided gradient at an output looks like, in one arrangement.

    Attributes:
        norm: Its L2 norm.
        product: Its product with the output.
        scale: The product of both norms, which bounds the rounding of `product`.
    """

    norm: float
    product: float
    scale: float


Footprints = dict[Arrangement, Footprint]  # of one sample, in all possible arrangements


class Difference(NamedTuple):
    """A sample whose gradient differs from that in its rehearsal."""

    term: TermKey
    place: Place
    before: float
    now: float


def is_inside(place: Place) -> bool:
    """Whether a place is inside of a model, not at its outputs."""
    return isinstance(place, tuple) and place[0] == INSIDE


class Rehearsal:
    """Compares the samples of a window that were rehearsed with what they give in the window.

    Attributes:
        is_low_precision: Whether outputs were in half precision.
        num_reclassified: `KeyedDraws.num_reclassified` after the rehearsal; None before it.
        positions: Positions of the rehearsed samples in the epoch.
        is_compared: Whether any came again. They do not in a window that is one micro-batch.
        uncompared: The terms of which no sample was found again in the window.
        choices: (term, function that chooses among the samples), of the rehearsal.
        widths: `widths_of` its batch.
        largest_difference: The largest relative difference of a sample so far.
    """

    def __init__(self) -> None:
        """Start without any rehearsed sample."""
        self.num_reclassified: int | None = None
        self._rehearsed: dict[FootprintKey, Footprints] = {}
        self._names_of_terms: dict[int, dict[TermKey, str]] = {}  # by the number of the loss
        self.positions: set[int] = set()
        self.is_compared = False
        self.uncompared: set[TermKey] = set()
        self.choices: set[tuple[TermKey, str]] = set()
        self.widths: list[torch.Size] = []
        self.largest_difference = 0.0
        self.is_low_precision = False

    def record(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
        num_reclassified: int,
        positions: Sequence[int],
    ) -> None:
        """Keep the footprints of the rehearsed samples.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
            num_reclassified: `KeyedDraws.num_reclassified` after it.
            positions: The rehearsed samples, of which the loss may have no term at all.
        """
        names = {reading.key: reading.name for reading in readings}
        self._names_of_terms.setdefault(number, {}).update(names)
        self._rehearsed.update(footprints)
        self.positions.update(positions)
        self.uncompared.update(names)
        self.num_reclassified = num_reclassified

    def difference(self, footprints: Mapping[FootprintKey, Footprints]) -> Difference | None:
        """Return the first difference between a sample and its rehearsal, or None.

        Args:
            footprints: By term, output and sample.
        """
        self.is_compared = True
        compared = self._compared(footprints)
        floors = _largest_values(compared.values())
        used = _with_gradient(footprints) | _with_gradient(self._rehearsed)
        for (term, place), by_arrangement in compared.items():
            if not by_arrangement:
                continue
            # A gradient of 0 at an output says little if the term uses another one.
            if term not in used or any(map(_is_any_used, by_arrangement)):
                self.uncompared.discard(term)
            differences = [_largest_difference(pairs, floors) for pairs in by_arrangement]
            if not is_inside(place):  # where gradients add up more roundings
                self.largest_difference = max(self.largest_difference, min(differences))
            # One arrangement must fit all samples.
            found = [_first_difference(pairs, self._tolerance, floors) for pairs in by_arrangement]
            if all(difference is not None for difference in found):
                before, now = found[0]
                return Difference(term, place, before, now)
        return None

    def _compared(
        self, footprints: Mapping[FootprintKey, Footprints]
    ) -> dict[tuple[TermKey, Place], list[list[tuple[Footprint, Footprint]]]]:
        """Return the footprints before and now of each term at each output, by arrangement."""
        by_output: dict[tuple[TermKey, Place], list[tuple[Footprints, Footprints]]] = {}
        for key, now in footprints.items():
            before = self._rehearsed.get(key)
            if before is not None:
                by_output.setdefault(key[:2], []).append((before, now))
        return {
            key: _in_common_arrangements(pairs, keeps_unused=is_inside(key[1]))
            for key, pairs in by_output.items()
        }

    def has_term(self, term: TermKey) -> bool:
        """Whether the loss of the rehearsal had a term."""
        return any(term in names for names in self._names_of_terms.values())

    def missing_term(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
        positions: Sequence[int],
    ) -> str | None:
        """Return the name of a term that a sample has only now, or only had in its rehearsal.

        A loss may lack terms of which none of its samples has a part.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
            positions: The samples of the micro-batch, which may have no term at all.
        """
        names = {reading.key: reading.name for reading in readings}
        rehearsed_names = self._names_of_terms.get(number, {})
        largest_norm, _ = _largest_values(self._compared(footprints).values())
        floor = FLOOR * largest_norm
        for (term, _, sample), now in footprints.items():
            is_new = sample in self.positions and term not in rehearsed_names
            if is_new and _smallest_norm(now) > floor:
                return names[term]
        for (term, _, sample), before in self._rehearsed.items():
            is_missing = sample in positions and term in rehearsed_names and term not in names
            if is_missing and _smallest_norm(before) > floor:
                return rehearsed_names[term]
        return None

    def same_term(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
    ) -> tuple[TermKey, TermKey] | None:
        """Return a term that a sample had in its rehearsal, and another one that it has in place
        of it now, with the same gradient at the same output. None if there is none, or if several
        terms could be the one before.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
        """
        rehearsed = self._names_of_terms.get(number, {}).keys()
        names = {reading.key for reading in readings}
        for (term, place, sample), now in footprints.items():
            if term in rehearsed or not _smallest_norm(now):
                continue
            found = [
                other
                for other in rehearsed - names
                if self._are_equal(self._rehearsed.get((other, place, sample), {}), now)
            ]
            if len(found) == 1:
                return found[0], term
        return None

    def _are_equal(self, before: Footprints, now: Footprints) -> bool:
        """Whether a sample's footprints are equal in an arrangement, and not 0."""
        floors = (0.0, 0.0)
        return any(
            before[arrangement].norm
            and not _first_difference(
                [(before[arrangement], now[arrangement])], self._tolerance, floors
            )
            for arrangement in before.keys() & now.keys()
        )

    @property
    def _tolerance(self) -> float:
        """Relative tolerance of the comparison."""
        return LOW_PRECISION_TOLERANCE if self.is_low_precision else TOLERANCE


def _in_common_arrangements(
    pairs: Sequence[tuple[Footprints, Footprints]], *, keeps_unused: bool
) -> list[list[tuple[Footprint, Footprint]]]:
    """Return the pairs of footprints in each arrangement that is possible before and now.

    Several rows without any gradient are left out at outputs: they would agree in a wrong
    arrangement, too, such as steps of time whose outputs are not used. Inside of a model they are
    kept: rows of heads of attention, of samples without targets, would differ in a wrong one.
    """
    before, now = pairs[0]
    found = []
    for arrangement in now:
        if arrangement not in before:
            continue
        of_arrangement = [(before[arrangement], now[arrangement]) for before, now in pairs]
        if keeps_unused or _is_any_used(of_arrangement) or arrangement.rows == "one":
            found.append(of_arrangement)
    return found


def _is_any_used(pairs: Sequence[tuple[Footprint, Footprint]]) -> bool:
    """Whether a sample has a gradient there, before or now."""
    return any(before.norm or now.norm for before, now in pairs)


def _smallest_norm(footprints: Footprints) -> float:
    """Return the norm of a sample's gradient, whatever its arrangement is: 0 if one has none."""
    return min((footprint.norm for footprint in footprints.values()), default=0.0)


def _with_gradient(footprints: Mapping[FootprintKey, Footprints]) -> set[TermKey]:
    """Return the terms with a gradient at any output of any sample."""
    return {key[0] for key, of_sample in footprints.items() if _smallest_norm(of_sample)}


def _largest_values(
    compared: Iterable[Sequence[Sequence[tuple[Footprint, Footprint]]]],
) -> tuple[float, float]:
    """Return the largest norm and the largest bound of a product, against which others may be
    nothing but rounding.
    """
    footprints = [
        footprint
        for by_arrangement in compared
        for pairs in by_arrangement
        for pair in pairs
        for footprint in pair
    ]
    norms = [footprint.norm for footprint in footprints]
    scales = [footprint.scale for footprint in footprints]
    return max(norms, default=0.0), max(scales, default=0.0)


def _largest_difference(
    pairs: Sequence[tuple[Footprint, Footprint]], largest: tuple[float, float]
) -> float:
    """Return the largest relative difference of the samples' norms and products."""
    largest_norm, largest_scale = largest
    found = [0.0]
    for before, now in pairs:
        norm = max(before.norm, now.norm) + WIDTH_FLOOR * largest_norm
        scale = max(before.scale, now.scale) + WIDTH_FLOOR * largest_scale
        found.append(abs(before.norm - now.norm) / (norm or 1.0))
        found.append(abs(before.product - now.product) / (scale or 1.0))
    return max(found)


def _first_difference(
    pairs: Sequence[tuple[Footprint, Footprint]], tolerance: float, largest: tuple[float, float]
) -> tuple[float, float] | None:
    """Return the values of the first sample that differs, or None."""
    largest_norm, largest_scale = largest
    for before, now in pairs:
        bound = tolerance * max(before.norm, now.norm) + FLOOR * largest_norm
        if abs(before.norm - now.norm) > bound:
            return before.norm, now.norm
        scale = max(before.scale, now.scale)
        if abs(before.product - now.product) > tolerance * scale + FLOOR * largest_scale:
            return before.product, now.product
    return None


def footprints_of(
    loss: Tensor,
    readings: Sequence[Reading],
    recorder: OutputRecorder,
    positions: Sequence[int],
    chosen: Sequence[int],
) -> tuple[dict[FootprintKey, Footprints], bool]:
    """Compute the footprints of some samples of a micro-batch, for each term of its loss.

    Only the graph between the loss and the outputs is run backward, so no parameter gets a
    gradient.

    Args:
        loss: The loss.
        readings: Its terms.
        recorder: The recorded outputs.
        positions: Positions of the samples in the epoch.
        chosen: Indices of the samples whose footprints are computed.

    Returns:
        (footprints, whether an output is in half precision).
    """
    footprints: dict[FootprintKey, Footprints] = {}
    is_low_precision = False
    num_samples = len(positions)
    for number, reading in enumerate(readings if chosen else ()):
        gradients_of = _gradient_function(loss, readings, number)
        nodes = _nodes_of(reading, loss)
        for level, all_watched in enumerate(recorder.candidates(num_samples, nodes)):
            targets = [target for watched in all_watched for target in watched.targets]
            of_all = iter(gradients_of(targets) if targets else ())
            gradients = [[next(of_all) for _ in watched.targets] for watched in all_watched]
            for watched, of_watched in zip(all_watched, gradients, strict=True):
                is_low_precision |= any(
                    gradient is not None and gradient.dtype in LOW_PRECISION
                    for gradient in of_watched
                )
                of_samples = _footprints(watched, of_watched, num_samples, chosen)
                for sample, footprint in zip(chosen, of_samples, strict=False):
                    key = (reading.key, (level, watched.kind), positions[sample])
                    footprints[key] = footprint
            # Terms share a graph, so the gradient at an output that a term does not use is 0.
            if any(map(_is_any_nonzero, gradients)):
                break
    return footprints, is_low_precision


def footprints_inside(
    loss: Tensor,
    readings: Sequence[Reading],
    recorder: OutputRecorder,
    positions: Sequence[int],
    chosen: Sequence[int],
    *,
    can_run: bool,
) -> dict[FootprintKey, Footprints]:
    """Compute footprints as `footprints_of` does, but below backward code inside of the models that
    torch does not provide. Empty if they have none.

    Args:
        loss, readings, recorder, positions, chosen: See `footprints_of`.
        can_run: Whether a backward into the models can be run twice.

    Raises:
        LossNotAdditive: If such code is not linear in the gradient, as far as a smaller one shows.
    """
    footprints: dict[FootprintKey, Footprints] = {}
    num_samples = len(positions)
    for number, reading in enumerate(readings if chosen else ()):
        inside = recorder.backward_code.below(_nodes_of(reading, loss))
        if inside.names and (inside.is_blocked or not can_run):
            recorder.backward_code.warn_of(inside)
            continue
        all_watched = _inside(inside.edges, num_samples)
        if not all_watched:
            continue
        edges = [watched.targets[0] for watched in all_watched]
        gradients = _gradient_function(loss, readings, number)(edges)
        smaller = _gradient_function(loss, readings, number, SMALLER)(edges)
        if not all(map(_is_multiple, gradients, smaller)):
            raise LossNotAdditive(
                f"{reading.name}: {' or '.join(inside.names)} inside of the model is not linear in "
                "the gradient (it clips or normalises it), so no split of the window is the full "
                "batch. Do it in a hook on parameters (parameter.register_hook), which gets the "
                "gradient of the window, or to parameter.grad before optimizer.step()."
            )
        for watched, gradient in zip(all_watched, gradients, strict=True):
            of_samples = _footprints(watched, [gradient], num_samples, chosen)
            for sample, footprint in zip(chosen, of_samples, strict=False):
                footprints[reading.key, watched.kind, positions[sample]] = footprint
    return footprints


def _is_multiple(gradient: Tensor | None, smaller: Tensor | None) -> bool:
    """Whether a gradient is that of a loss which is `SMALLER` times the other one's."""
    if gradient is None or smaller is None:
        return gradient is smaller
    tolerance = LOW_PRECISION_TOLERANCE if gradient.dtype in LOW_PRECISION else TOLERANCE
    norm = gradient.double().norm()
    return not bool((smaller.double() / SMALLER - gradient.double()).norm() > tolerance * norm)


def _nodes_of(reading: Reading, loss: Tensor) -> Sequence[Node]:
    """Return the nodes of a term, which is the whole loss if it was not read."""
    return [loss.grad_fn] if reading.term is None else reading.term.nodes


def _is_any_nonzero(gradients: Sequence[Tensor | None]) -> bool:
    """Whether any gradient is not 0."""
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _gradient_function(
    loss: Tensor, readings: Sequence[Reading], number: int, scale: float = 1.0
) -> Callable[[Sequence[Tensor | GradientEdge]], Sequence[Tensor | None]]:
    """Return a function that computes the undivided gradient of one term, times `scale`, at some
    outputs.
    """
    terms = [reading.term for reading in readings if reading.term is not None]
    # Without its factor, which may change from window to window.
    factor = readings[number].factor
    inverse = 1.0 / factor if isinstance(factor, Tensor) or factor else 0.0
    scales = [inverse * scale if index == number else 0.0 for index in range(len(terms))]

    def gradient_of(outputs: Sequence[Tensor | GradientEdge]) -> Sequence[Tensor | None]:
        """Return the gradient at each output; None where the term does not depend on it."""
        if not terms:
            scaled = loss * scale
            return torch.autograd.grad(scaled, outputs, retain_graph=True, allow_unused=True)
        with undivided(terms, scales):
            return torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)

    return gradient_of


def _footprints(
    watched: Watched,
    gradients: Sequence[Tensor | None],
    num_samples: int,
    chosen: Sequence[int],
) -> list[Footprints]:
    """Compute the footprints of chosen samples. Empty if the term does not depend on them."""
    if watched.arrangements == [OF_CALLS]:
        return _footprints_of_calls(watched, gradients, num_samples, chosen)
    (gradient,) = gradients
    if gradient is None:
        return []
    footprints: list[Footprints] = [{} for _ in chosen]
    for arrangement in watched.arrangements:
        of_samples = _by_sample(gradient, num_samples, arrangement)
        values = None
        if watched.values is not None:
            values = _by_sample(watched.values[0], num_samples, arrangement)
        numbers = _numbers_of(values, of_samples, chosen)
        for of_sample, (norm, product, scale) in zip(footprints, numbers, strict=True):
            of_sample[arrangement] = Footprint(norm, product, scale)
    return footprints


def _numbers_of(
    values: Tensor | None, gradients: Tensor, chosen: Sequence[int]
) -> list[list[float]]:
    """Return (norm, product, scale) of each chosen sample, few samples at a time: logits are large,
    and the numbers take several copies.

    Args:
        values: Shape (samples, ...). None: zeros.
        gradients: Of the same shape.
        chosen: Indices of samples.
    """
    num_elements = max(1, gradients[0].numel())
    at_once = max(1, MAX_ELEMENTS // num_elements)
    found = []
    for start in range(0, len(chosen), at_once):
        some = list(chosen[start : start + at_once])
        rows = _flat_rows(gradients, some)
        of_values = torch.zeros_like(rows) if values is None else _flat_rows(values, some)
        found.append(_norms_and_products(of_values, rows).T)
    return torch.cat(found).tolist()


def _flat_rows(tensor: Tensor, chosen: list[int]) -> Tensor:
    """Return the chosen samples of a tensor, a row each, shape (chosen, elements of a sample)."""
    rows = tensor[chosen].reshape(len(chosen), -1)
    return rows.float() if rows.dtype in LOW_PRECISION else rows


def _footprints_of_calls(
    watched: Watched,
    gradients: Sequence[Tensor | None],
    num_samples: int,
    chosen: Sequence[int],
) -> list[Footprints]:
    """Compute the footprint of each chosen sample, which has calls of its own."""
    calls_per_sample = len(gradients) // num_samples
    footprints: list[Footprints] = []
    for sample in chosen:
        calls = range(sample * calls_per_sample, (sample + 1) * calls_per_sample)
        used = [call for call in calls if gradients[call] is not None]
        footprint = Footprint(0.0, 0.0, 0.0)
        if used:
            values = torch.cat([watched.values[call].double().reshape(1, -1) for call in used], 1)
            of_calls = torch.cat([gradients[call].double().reshape(1, -1) for call in used], 1)
            footprint = Footprint(*_norms_and_products(values, of_calls)[:, 0].tolist())
        footprints.append({OF_CALLS: footprint})
    return footprints


def _norms_and_products(values: Tensor, gradients: Tensor) -> Tensor:
    """Return the norms of gradients, their products with values, and bounds of these products,
    shape (3, samples). Padding of values may hold infinities, where the gradient is 0.
    """
    if not gradients.shape[1]:
        return torch.zeros(3, len(gradients), dtype=torch.float64, device=gradients.device)
    used, largest_used = _scaled(values.masked_fill(gradients == 0, 0.0))
    scaled, largest = _scaled(gradients)
    # torch.linalg.vecdot adds up pairwise; vector_norm in float32 rounds to 1e-4 of a large one.
    norms = torch.linalg.vecdot(scaled, scaled).double().sqrt() * largest
    products = torch.linalg.vecdot(used, scaled).double() * largest_used * largest
    bounds = torch.linalg.vecdot(used, used).double().sqrt() * largest_used * norms
    return torch.stack([norms, products, bounds])


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows over their largest absolute values, whose squares neither overflow nor underflow,
    and these values, as float64.
    """
    largest = rows.abs().amax(1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    return rows / largest, largest[:, 0].double()


def _by_sample(tensor: Tensor, num_samples: int, arrangement: Arrangement) -> Tensor:
    """Return a view of a tensor with the samples in front, shape (samples, ...)."""
    rows = tensor.movedim(arrangement.dim, 0)
    if arrangement.rows == "next":
        rows = rows.unflatten(0, (num_samples, -1))
    elif arrangement.rows == "blocks":
        rows = rows.unflatten(0, (-1, num_samples)).transpose(0, 1)
    return rows
