"""Footprints: what the undivided gradient of a sample looks like at the outputs of the models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hf_ga.engine.look.recorder import (
    OF_CALLS,
    Arrangement,
    OutputRecorder,
    Place,
    Watched,
    edges_inside,
)
from hf_ga.engine.sums.readings import Reading, TermKey
from hf_ga.errors import LossNotAdditive
from hf_ga.loss import undivided
from hf_ga.model.precision import LOW_PRECISION

TOLERANCE = 1e-3  # relative, in float32: other batch sizes use other kernels
LOW_PRECISION_TOLERANCE = 0.2  # bf16 keeps 8 bits, and outputs add up many roundings
MAX_ELEMENTS = 2**20  # of the samples' gradients that are compared at once
SMALLER = 2.0**-4  # times which a gradient is tried, for backward code that is not linear
# (term, output, position of the sample)
FootprintKey = tuple[TermKey, Place, int]


@dataclass
class Footprint:
    """What a sample's undivided gradient at an output looks like, in one arrangement.

    Attributes:
        norm: Its L2 norm.
        product: Its product with the output.
        scale: The product of both norms, which bounds the rounding of `product`.
        num_rows: Number of rows of a sample.
    """

    norm: float
    product: float
    scale: float
    num_rows: int = 1


Footprints = dict[Arrangement, Footprint]  # of one sample, in all possible arrangements


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
            # Terms share a graph, so the gradient at an output that a term does not use is 0. Rows
            # may be of targets, of which samples happen to have equally many.
            have_one_row = [any(a.rows == "one" for a in w.arrangements) for w in all_watched]
            if any(map(_is_any_nonzero, compress(gradients, have_one_row))):
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
        all_watched = edges_inside(inside.edges, num_samples)
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
        num_rows = 1 if arrangement.rows == "one" else len(gradient) // num_samples
        for of_sample, (norm, product, scale) in zip(footprints, numbers, strict=True):
            of_sample[arrangement] = Footprint(norm, product, scale, num_rows)
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
