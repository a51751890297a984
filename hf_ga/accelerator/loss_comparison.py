"""Compares the loss that a loop passes to `accelerator.backward` with the one that was proven.

A loop may pass anything: the model's own loss, a criterion of its own on the logits, a loss that it
has divided already. What it passes is exact if its gradient with respect to the model's outputs is
that of the model's own proven loss, or of one mean of a torch loss function, whose divisor is
known. Then the two losses differ only by something that does not depend on data (a penalty on the
weights). The shares of the micro-batches sum to 1, so such a penalty counts once a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hf_ga.accelerator.criteria import CriterionMean
from hf_ga.accelerator.outputs import model_loss_of, output_tensors
from hf_ga.errors import LossNotAdditive
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss, Sums

# Relative tolerance of the factor between two gradients, which is averaged over many elements.
FACTOR_TOLERANCE = 1e-4
# Relative tolerance of single elements of a gradient, by dtype.
ELEMENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
ELEMENT_TOLERANCE_HALF = 2e-2

REMEDY = (
    "Pass the model's own loss to accelerator.backward, undivided, or pass a sum and what it is "
    "summed over: accelerator.backward(loss_sum, num_targets=n)."
)


class SumPassedByLoop(Loss):
    """A loss whose sum and number of targets the user's loop passes to `accelerator.backward` for
    each micro-batch.

    hf_ga itself passes a torch criterion's mean the same way, as mean x divisor with the divisor.
    """

    name = "num_targets"
    counts_in_forward = True
    is_audited = False  # only the loop can compute it

    def count(self, batch: Any, num_samples: int) -> Counts:
        """Return no counts: the user's loop counts the targets itself, after the forward."""
        return ()

    def contributes(self, counts: Counts) -> bool:
        """Return True: each micro-batch of the user's loop has a backward, also with
        `num_targets=0`.
        """
        return True  # a sum may have a gradient although its number is 0

    def sums(self, outputs: tuple[Tensor | float, float], call: Call) -> tuple[Sums, Counts]:
        """Return the loss sum and the number of targets that the user's loop passed to
        `accelerator.backward` for a micro-batch.

        Args:
            outputs: (sum of the loss, number of targets), in place of a model's outputs.
            call: The micro-batch, not used.
        """
        loss_sum, num_targets = outputs
        return (loss_sum,), (num_targets,)


@dataclass(frozen=True)
class MicroBatchRecord:
    """What was recorded of a micro-batch of a user's loop between its forward and its backward.

    Attributes:
        outputs: What the model returned, or None if it was not called.
        means: The means that torch's loss functions returned to the loop, outside of the model.
        submodules_run_by_loop: Names of the model's submodules that the loop called directly.
        num_samples: The number of samples in the micro-batch.
        num_accumulation_steps: The gradient accumulation steps, to recognize a loss that the loop
            divided by them.
        batch_storages: Memory addresses of the storages of the batch's tensors.
    """

    outputs: Any
    means: Sequence[CriterionMean]
    submodules_run_by_loop: Sequence[str]
    num_samples: int
    num_accumulation_steps: int
    batch_storages: frozenset[int]


def find_criterion_mean(loss: Tensor, record: MicroBatchRecord) -> CriterionMean:
    """Find the mean of a torch loss function, such as `cross_entropy`, that a user's loop passed as
    its loss.

    The loss may also contain a term that does not depend on data, such as a penalty on the weights.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        record: The record of the micro-batch, with the means that such functions returned.

    Returns:
        The mean, with what it was divided by.

    Raises:
        LossNotAdditive: If the loss is not such a mean, if the loop multiplied it by a factor, or
            if it compares samples with each other.
    """
    _check_origin(loss, record)
    tensors = output_tensors(record.outputs)
    edges = [_gradient_edge(tensor) for tensor in tensors]
    for mean in record.means:
        factor = 1.0
        if loss is not mean.value:
            factor = _factor_of_term(loss, mean.value, edges)
        if factor is None or _depends_on_data(loss, {mean.value.grad_fn}, record):
            continue
        _check_factor(factor, record.num_accumulation_steps)
        _check_rows_are_independent(mean, tensors, record.num_samples)
        return mean
    raise LossNotAdditive(
        "the loss of this loop is neither the model's own nor one mean of a loss function of torch "
        f"(another mean, or more than one term), so what it averages over is unknown. {REMEDY}"
    )


def check_is_model_loss(loss: Tensor, record: MicroBatchRecord) -> None:
    """Check that the loss of a user's loop is the model's own loss, plus at most a term that does
    not depend on data.

    It may have been computed in another way, such as by a criterion on the logits: what counts is
    its gradient with respect to the model's outputs.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        record: The record of the micro-batch, whose outputs contain a loss.

    Raises:
        LossNotAdditive: If it is another loss, or the model's own times a factor.
    """
    model_loss = model_loss_of(record.outputs)
    _check_origin(loss, record)
    edges = [_gradient_edge(tensor) for tensor in output_tensors(record.outputs)]
    # If the loss was computed from the model's loss, the common graph begins at the latter.
    accepted_nodes = {model_loss.grad_fn}
    factor = _factor_of_term(loss, model_loss, edges)
    if factor is None and edges:
        # It may have been computed from the model's other outputs: compare the gradients there.
        accepted_nodes = {edge.node for edge in edges}
        gradients = _gradients(loss, edges)
        model_gradients = _gradients(model_loss, edges)
        factor = _fitted_factor(gradients, model_gradients)
        if factor is not None and not _is_multiple(gradients, model_gradients, factor):
            factor = None
    if factor is None or _depends_on_data(loss, accepted_nodes, record):
        raise LossNotAdditive(
            "the loss of this loop is not the mean that was proven for the model's own loss "
            f"(another mean, or more than one term), so what it averages over is unknown. {REMEDY}"
        )
    _check_factor(factor, record.num_accumulation_steps)


def check_model_loss_is_unscaled(loss: Tensor, record: MicroBatchRecord) -> None:
    """Check that the loss of a user's loop contains the model's own loss with the factor 1.

    A quick check, for losses of a kind that passed `check_is_model_loss` before.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        record: The record of the micro-batch, whose outputs contain a loss.

    Raises:
        LossNotAdditive: If the factor is another one.
    """
    model_loss_edge = get_gradient_edge(model_loss_of(record.outputs))
    gradient = _gradients(loss, [model_loss_edge])[0]
    if gradient is not None:
        _check_factor(float(gradient), record.num_accumulation_steps)


def _depends_on_data(
    loss: Tensor, accepted_nodes: set[Node | None], record: MicroBatchRecord
) -> bool:
    """Return whether the loss of a user's loop has a term that depends on data besides its accepted
    term.

    It has if the loop called a submodule directly, or if the autograd graph of the loss, without
    what lies behind the accepted nodes, contains a tensor of the batch, or an operation of the
    model's forward.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        accepted_nodes: The autograd nodes at which the accepted term of the loss begins, such as
            the `grad_fn` of the model's own loss.
        record: The record of the micro-batch.
    """
    if record.submodules_run_by_loop:
        return True
    forward_nodes: set[Node] = set()
    for tensor in (*output_tensors(record.outputs), model_loss_of(record.outputs)):
        if tensor is not None:
            _add_graph_nodes(tensor.grad_fn, forward_nodes, stops=set())
    loss_nodes: set[Node] = set()
    _add_graph_nodes(loss.grad_fn, loss_nodes, accepted_nodes)
    if any(_saves_batch_tensor(node, record.batch_storages) for node in loss_nodes):
        return True
    shared_nodes = (loss_nodes & forward_nodes) - accepted_nodes
    # A parameter (AccumulateGrad) may be shared: a penalty on the weights does not depend on data.
    return any(node.name() != "torch::autograd::AccumulateGrad" for node in shared_nodes)


def _saves_batch_tensor(node: Node, batch_storages: frozenset[int]) -> bool:
    """Return whether an operation in the autograd graph of a user's loss saves a tensor of the
    batch for its backward, so that its result depends on the batch.

    Args:
        node: The autograd node of the operation.
        batch_storages: Memory addresses of the storages of the batch's tensors.
    """
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        value = getattr(node, name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            is_tensor = isinstance(tensor, Tensor)
            if is_tensor and tensor.untyped_storage().data_ptr() in batch_storages:
                return True
    return False


def _add_graph_nodes(start: Node | None, nodes: set[Node], stops: set[Node | None]) -> None:
    """Add the nodes of an autograd graph that can be reached from `start` to a set, for the
    comparison of the graph of a user's loss with that of the model's forward.

    Args:
        start: The node to start from: the `grad_fn` of a tensor, or None.
        nodes: The set, changed in place. Nodes in it are not walked again.
        stops: Nodes where the walk ends; they are not added.
    """
    stack = [start]
    while stack:
        node = stack.pop()
        if node is None or node in nodes or node in stops:
            continue
        nodes.add(node)
        stack += [input_node for input_node, _ in node.next_functions]


def _check_rows_are_independent(
    mean: CriterionMean, outputs: list[Tensor], num_samples: int
) -> None:
    """Check that a torch loss function in a user's loop does not compare samples: each row of its
    input must depend on the model's outputs for one sample only.

    The first, the middle and the last row of the input are tested by differentiating them with
    respect to the outputs.

    Args:
        mean: The mean that the loss function returned, with its input.
        outputs: The tensors that the model returned.
        num_samples: The number of samples in the micro-batch.

    Raises:
        LossNotAdditive: If a row depends on several samples.
    """
    if num_samples == 1 or not mean.input.requires_grad:
        return
    # An input with a single row for all samples is tested element by element.
    rows = mean.input if len(mean.input) > 1 else mean.input.reshape(-1)
    per_sample_outputs = [
        tensor for tensor in outputs if tensor.dim() and len(tensor) % num_samples == 0
    ]
    for row in sorted({0, len(rows) // 2, len(rows) - 1}):
        # Random weights, so that the gradients of a row's elements do not cancel.
        grad_output = torch.zeros_like(rows)
        grad_output[row] = torch.rand(
            rows[row].shape, generator=_seeded_generator(rows.device), device=rows.device
        )
        gradients = torch.autograd.grad(
            rows, per_sample_outputs, grad_output, retain_graph=True, allow_unused=True
        )
        depends_on_sample = torch.zeros(num_samples, dtype=torch.bool, device=rows.device)
        for gradient in gradients:
            if gradient is not None:
                depends_on_sample |= gradient.reshape(num_samples, -1).ne(0).any(1)
        if int(depends_on_sample.sum()) > 1:
            raise LossNotAdditive(
                "the loss of this loop compares the samples of a micro-batch with each other "
                "(in-batch negatives, a normalisation over the batch), so no sum over "
                "micro-batches is the full batch: pass it as Accelerator(whole_batch=...), which "
                "gets all samples of a window."
            )


def _seeded_generator(device: torch.device) -> torch.Generator:
    """Return a new random generator with seed 0, so that the check of a user's loss leaves the
    global generators unchanged.
    """
    return torch.Generator(device=device).manual_seed(0)


def _check_origin(loss: Tensor, record: MicroBatchRecord) -> None:
    """Check that the loss of a user's loop can come from a training forward of the prepared model.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        record: The record of the micro-batch.

    Raises:
        LossNotAdditive: If there was no such forward on this batch, or if the loss does not require
            a gradient.
    """
    if record.outputs is None:
        raise LossNotAdditive(
            "the loss does not come from a training forward of the prepared model on this batch. "
            f"{REMEDY}"
        )
    if not loss.requires_grad:
        raise LossNotAdditive("the loss has no gradient: it was detached, or nothing is trained.")


def _factor_of_term(loss: Tensor, term: Tensor, edges: list[GradientEdge]) -> float | None:
    """Find the number c for which the loss of a user's loop is c x term + a rest that does not
    depend on the model's outputs.

    Args:
        loss: The loss of a user's loop, a scalar.
        term: A scalar from which the loss may have been computed: the model's own loss, or the mean
            of a criterion.
        edges: The gradient edges of the model's outputs.

    Returns:
        c, or None if the loss was not computed from the term, or if it depends on the outputs in
        another way, too.
    """
    gradient = _gradients(loss, [get_gradient_edge(term)])[0]
    if gradient is None:
        return None
    factor = float(gradient)
    if edges:
        rest_gradients = _gradients(loss - term * factor, edges)
        if not _is_negligible(rest_gradients, _gradients(term, edges)):
            return None
    return factor


def _check_factor(factor: float, num_accumulation_steps: int) -> None:
    """Check that the user's loop has not scaled its loss before `accelerator.backward`.

    Args:
        factor: The loop's loss divided by the loss that it was computed from.
        num_accumulation_steps: The gradient accumulation steps; the error says so if the loop
            divided by them.

    Raises:
        LossNotAdditive: If the factor is not 1.
    """
    if abs(factor - 1) <= FACTOR_TOLERANCE:
        return
    is_divided_by_steps = (
        num_accumulation_steps > 1 and abs(factor * num_accumulation_steps - 1) <= FACTOR_TOLERANCE
    )
    cause = ""
    if is_divided_by_steps:
        cause = f" (1 / gradient_accumulation_steps = 1 / {num_accumulation_steps})"
    raise LossNotAdditive(
        f"the loss of this loop is {factor:.6g} times the model's own{cause}, but "
        "accelerator.backward already divides by the targets of the whole window. Pass the "
        "undivided loss; if the loop accumulates by hand, pass gradient_accumulation_steps to "
        "Accelerator and use `with accelerator.accumulate(model)` instead."
    )


def _gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge of the autograd graph at which the gradient of a model's output arrives in
    the backward, for the comparison of a user's loss with the model's own.

    Accelerate converts outputs to float32 under mixed precision; the edge is then the one before
    this conversion, which the loss inside of the model shares.
    """
    edge = get_gradient_edge(tensor)
    if edge.node.name() == "ToCopyBackward0" and edge.node.next_functions[0][0] is not None:
        return GradientEdge(*edge.node.next_functions[0])
    return edge


def _gradients(value: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Compute the gradients of a scalar, such as the loss of a user's loop, at edges of its
    autograd graph. The graph is kept for the loop's `accelerator.backward`.

    Returns:
        One for each edge; None where the scalar does not depend on the edge.
    """
    if not value.requires_grad:
        return [None] * len(edges)
    gradients = torch.autograd.grad(value, edges, retain_graph=True, allow_unused=True)
    return list(gradients)


def _is_negligible(gradients: list[Tensor | None], reference: list[Tensor | None]) -> bool:
    """Return whether gradients of a user's loss are 0 up to rounding, by their norms relative to
    other gradients.

    Args:
        gradients: The gradients that may be 0, such as those of the difference of two losses.
        reference: Gradients of the usual size, such as those of one of the losses.
    """
    norm = sum(float(g.detach().float().norm()) for g in gradients if g is not None)
    reference_norm = sum(float(g.detach().float().norm()) for g in reference if g is not None)
    return norm <= FACTOR_TOLERANCE * reference_norm


def _fitted_factor(
    gradients: list[Tensor | None], model_gradients: list[Tensor | None]
) -> float | None:
    """Find the number c for which a user's loss has c times the gradients of the model's own loss,
    by least squares.

    Args:
        gradients: The gradients of the loss of a user's loop with respect to the model's outputs.
        model_gradients: Those of the model's own loss, in the same order.

    Returns:
        c, or None if an output has a gradient in one of the lists only, or if all of the model's
        gradients are 0.
    """
    product = 0.0
    square = 0.0
    for gradient, model_gradient in zip(gradients, model_gradients, strict=True):
        if (gradient is None) != (model_gradient is None):
            return None
        if gradient is not None and model_gradient is not None:
            product += float((gradient.double() * model_gradient.double()).sum())
            square += float((model_gradient.double() * model_gradient.double()).sum())
    return product / square if square else None


def _is_multiple(
    gradients: list[Tensor | None], model_gradients: list[Tensor | None], factor: float
) -> bool:
    """Return whether the gradients of a user's loss are `factor` times those of the model's own
    loss, in every element up to rounding.

    Args:
        gradients: The gradients of the loss of a user's loop with respect to the model's outputs.
        model_gradients: Those of the model's own loss, in the same order.
        factor: The factor between them.
    """
    for gradient, model_gradient in zip(gradients, model_gradients, strict=True):
        if gradient is None or model_gradient is None:
            continue
        tolerance = ELEMENT_TOLERANCE.get(model_gradient.dtype, ELEMENT_TOLERANCE_HALF)
        expected = model_gradient.double() * factor
        max_error = float((gradient.double() - expected).abs().max())
        if max_error > tolerance * float(expected.abs().max()):
            return False
    return True
