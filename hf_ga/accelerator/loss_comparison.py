"""Whether the loss that a loop passes to `accelerator.backward` is the one that was proven.

A loop may pass anything: the head's own loss, a criterion of its own on the logits, a loss that it
has divided already. What it passes is exact if its gradient with respect to the model's outputs is
that of the head's proven loss, or of one mean of a loss function of torch, whose divisor is known.
Then both differ by something without data only (a penalty on the weights). The shares of the
micro-batches sum to 1, so it counts once a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hf_ga.accelerator.criteria import Mean
from hf_ga.accelerator.outputs import loss_of, tensors_of
from hf_ga.errors import LossNotAdditive
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss, Sums

FACTOR_TOLERANCE = 1e-4  # a factor is averaged over many elements
SHAPE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of single elements
HALF_TOLERANCE = 2e-2

REMEDY = (
    "Pass the model's own loss to accelerator.backward, undivided, or pass a sum and what it is "
    "summed over: accelerator.backward(loss_sum, num_targets=n)."
)


class GivenSum(Loss):
    """The sums and numbers of targets that a loop passes to `accelerator.backward`, or the means of
    its own criterion with what they divide by.
    """

    name = "num_targets"
    counts_in_forward = True
    is_audited = False  # the loop computes it

    def count(self, batch: Any, num_samples: int) -> Counts:
        return ()

    def contributes(self, counts: Counts) -> bool:
        return True  # a sum may have a gradient although its number is 0

    def sums(self, outputs: tuple[Tensor | float, float], call: Call) -> tuple[Sums, Counts]:
        """Take what the loop passed as `outputs`: (sum of the loss, number of targets)."""
        total, number = outputs
        return (total,), (number,)


@dataclass(frozen=True)
class Seen:
    """What was seen of a micro-batch until its backward.

    Attributes:
        outputs: What the model returned.
        means: What torch's loss functions returned outside of the model.
        ran_outside: Names of parts of the model that ran outside of its forward.
        num_samples: Samples in the micro-batch.
        num_steps: Gradient accumulation steps, to recognise a division by hand.
        storages: Where the tensors of the batch lie in memory.
    """

    outputs: Any
    means: Sequence[Mean]
    ran_outside: Sequence[str]
    num_samples: int
    num_steps: int
    storages: frozenset[int]


def mean_of(loss: Tensor, seen: Seen) -> Mean:
    """Find the mean of one of torch's loss functions that a loop's own loss is.

    Args:
        loss: What the loop passed to `backward`.
        seen: What was seen of the micro-batch.

    Raises:
        LossNotAdditive: If it is none, one multiplied by a number, or one that compares samples
            with each other.
    """
    _check_origin(loss, seen)
    tensors = tensors_of(seen.outputs)
    edges = [_edge(tensor) for tensor in tensors]
    for mean in seen.means:
        factor = 1.0
        if loss is not mean.value:
            factor = _factor_through(loss, mean.value, edges)
        if factor is not None and not _depends_on_data(loss, {mean.value.grad_fn}, seen):
            _check_factor(factor, seen.num_steps)
            _check_rows(mean, tensors, seen.num_samples)
            return mean
    raise LossNotAdditive(
        "the loss of this loop is neither the model's own nor one mean of a loss function of torch "
        f"(another mean, or more than one term), so what it averages over is unknown. {REMEDY}"
    )


def check_loss(loss: Tensor, seen: Seen) -> None:
    """Check that a loss is the head's own, up to something that does not depend on the data.

    Args:
        loss: What the loop passed to `backward`.
        seen: What was seen of the micro-batch; the outputs have a loss.

    Raises:
        LossNotAdditive: If it is another loss, or the head's multiplied by a number.
    """
    head = loss_of(seen.outputs)
    _check_origin(loss, seen)
    edges = [_edge(tensor) for tensor in tensors_of(seen.outputs)]
    stops = {head.grad_fn}
    factor = _factor_through(loss, head, edges)
    if factor is None and edges:
        stops = {edge.node for edge in edges}
        own = _gradients(loss, edges)
        proven = _gradients(head, edges)
        factor = _factor(own, proven)
        if factor is not None and not _is_close(own, proven, factor):
            factor = None
    if factor is None or _depends_on_data(loss, stops, seen):
        raise LossNotAdditive(
            "the loss of this loop is not the mean that was proven for the model's own loss "
            f"(another mean, or more than one term), so what it averages over is unknown. {REMEDY}"
        )
    _check_factor(factor, seen.num_steps)


def check_factor(loss: Tensor, seen: Seen) -> None:
    """Check that a loss, which was found to be the head's own before, is not scaled now.

    Raises:
        LossNotAdditive: If it is multiplied by a number.
    """
    through = _gradients(loss, [get_gradient_edge(loss_of(seen.outputs))])[0]
    if through is not None:
        _check_factor(float(through), seen.num_steps)


def _depends_on_data(loss: Tensor, stops: set[Node | None], seen: Seen) -> bool:
    """Whether a loss uses something of the model's forward in another way than through `stops`.

    Args:
        loss: What the loop passed to `backward`.
        stops: Where the accepted part of the loss begins in the graph.
        seen: What was seen of the micro-batch.
    """
    if seen.ran_outside:
        return True
    of_forward: set[Node] = set()
    for tensor in (*tensors_of(seen.outputs), loss_of(seen.outputs)):
        if tensor is not None:
            _add_nodes(tensor.grad_fn, of_forward, stops=set())
    of_loss: set[Node] = set()
    _add_nodes(loss.grad_fn, of_loss, stops)
    if any(_saves(node, seen.storages) for node in of_loss):
        return True
    shared = (of_loss & of_forward) - stops
    return any(node.name() != "torch::autograd::AccumulateGrad" for node in shared)


def _saves(node: Node, storages: frozenset[int]) -> bool:
    """Whether an operation keeps a tensor of the batch for its backward."""
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        value = getattr(node, name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in storages:
                return True
    return False


def _add_nodes(start: Node | None, found: set[Node], stops: set[Node | None]) -> None:
    """Add the nodes of a graph from `start` up to `stops`, which are left out."""
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node in stops:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions]


def _check_rows(mean: Mean, tensors: list[Tensor], num_samples: int) -> None:
    """Check that what a loss function compares with one target depends on one sample only, in three
    rows of its input.
    """
    if num_samples == 1 or not mean.input.requires_grad:
        return
    # A loss of one row for all samples is looked at element by element.
    compared = mean.input if len(mean.input) > 1 else mean.input.reshape(-1)
    by_sample = [tensor for tensor in tensors if tensor.dim() and len(tensor) % num_samples == 0]
    for row in sorted({0, len(compared) // 2, len(compared) - 1}):
        direction = torch.zeros_like(compared)
        direction[row] = torch.rand(
            compared[row].shape, generator=_generator(compared), device=compared.device
        )
        found = torch.autograd.grad(
            compared, by_sample, direction, retain_graph=True, allow_unused=True
        )
        touched = torch.zeros(num_samples, dtype=torch.bool, device=compared.device)
        for gradient in found:
            if gradient is not None:
                touched |= gradient.reshape(num_samples, -1).ne(0).any(1)
        if int(touched.sum()) > 1:
            raise LossNotAdditive(
                "the loss of this loop compares the samples of a micro-batch with each other "
                "(in-batch negatives, a normalisation over the batch), so no sum over "
                "micro-batches is the full batch: pass it as Accelerator(whole_batch=...), which "
                "gets all samples of a window."
            )


def _generator(tensor: Tensor) -> torch.Generator:
    return torch.Generator(device=tensor.device).manual_seed(0)


def _check_origin(loss: Tensor, seen: Seen) -> None:
    """Check that a loss comes from a forward of the model, and can be differentiated."""
    if seen.outputs is None:
        raise LossNotAdditive(
            "the loss does not come from a training forward of the prepared model on this batch. "
            f"{REMEDY}"
        )
    if not loss.requires_grad:
        raise LossNotAdditive("the loss has no gradient: it was detached, or nothing is trained.")


def _factor_through(loss: Tensor, mean: Tensor, edges: list[GradientEdge]) -> float | None:
    """Find the number c for which loss = c x mean + something that does not depend on the outputs.

    None if there is no such number.
    """
    through = _gradients(loss, [get_gradient_edge(mean)])[0]
    if through is None:
        return None
    factor = float(through)
    if edges and not _is_zero(_gradients(loss - mean * factor, edges), _gradients(mean, edges)):
        return None
    return factor


def _check_factor(factor: float, num_steps: int) -> None:
    """Check that a loss is not scaled.

    Raises:
        LossNotAdditive: If the factor is not 1.
    """
    if abs(factor - 1) <= FACTOR_TOLERANCE:
        return
    by_hand = num_steps > 1 and abs(factor * num_steps - 1) <= FACTOR_TOLERANCE
    division = f" (1 / gradient_accumulation_steps = 1 / {num_steps})" if by_hand else ""
    raise LossNotAdditive(
        f"the loss of this loop is {factor:.6g} times the model's own{division}, but "
        "accelerator.backward already divides by the targets of the whole window. Pass the "
        "undivided loss; if the loop accumulates by hand, pass gradient_accumulation_steps to "
        "Accelerator and use `with accelerator.accumulate(model)` instead."
    )


def _edge(tensor: Tensor) -> GradientEdge:
    """Return where a tensor's gradient arrives, before Accelerate's conversion to float32."""
    edge = get_gradient_edge(tensor)
    if edge.node.name() == "ToCopyBackward0" and edge.node.next_functions[0][0] is not None:
        return GradientEdge(*edge.node.next_functions[0])
    return edge


def _gradients(value: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    if not value.requires_grad:
        return [None] * len(edges)
    found = torch.autograd.grad(value, edges, retain_graph=True, allow_unused=True)
    return list(found)


def _is_zero(gradients: list[Tensor | None], scale: list[Tensor | None]) -> bool:
    """Whether gradients vanish, beside those of the head."""
    size = sum(float(g.detach().float().norm()) for g in scale if g is not None)
    rest = sum(float(g.detach().float().norm()) for g in gradients if g is not None)
    return rest <= FACTOR_TOLERANCE * size


def _factor(own: list[Tensor | None], proven: list[Tensor | None]) -> float | None:
    """Find the number c for which own = c x proven fits best; None without a common tensor."""
    product = 0.0
    square = 0.0
    for a, b in zip(own, proven, strict=True):
        if (a is None) != (b is None):
            return None
        if a is not None and b is not None:
            product += float((a.double() * b.double()).sum())
            square += float((b.double() * b.double()).sum())
    return product / square if square else None


def _is_close(own: list[Tensor | None], proven: list[Tensor | None], factor: float) -> bool:
    """Whether own = factor x proven in every element, up to rounding."""
    for a, b in zip(own, proven, strict=True):
        if a is None or b is None:
            continue
        tolerance = SHAPE_TOLERANCE.get(b.dtype, HALF_TOLERANCE)
        expected = b.double() * factor
        error = float((a.double() - expected).abs().max())
        if error > tolerance * float(expected.abs().max()):
            return False
    return True
