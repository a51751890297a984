"""Proves a loss of whole windows (`whole_batch`, such as in-batch negatives): which outputs of the
model it uses, that the outputs of a sample do not depend on other samples, and that a window in two
micro-batches has the gradient of one forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.batches import Batch, take_rows
from hf_ga.exact.outputs import named_tensors, with_tensors
from hf_ga.exact.precision import at_least_float32
from hf_ga.exact.whole_window import (
    UsedOutputs,
    WholeBatchLoss,
    WholeWindow,
    loss_of_all,
    parameters_of,
)
from hf_ga.proof.prober import BatchLoss
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, TOLERANCE, ProbeResult, relative_error
from hf_ga.proof.prover import ALL_ROWS, GROUP_ROWS, Prover

NUM_FEW = 2  # samples of a second, smaller batch


def find_used_outputs(prover: Prover, whole_batch: WholeBatchLoss) -> UsedOutputs:
    """Find out which outputs of a model a loss of whole windows uses.

    Runs the model on the probe batch and on two samples of it: an output with one row per sample
    has 6 and 2 rows. Then computes the loss and its gradient with respect to each output. Adds
    parameters of `whole_batch` itself to `prover.parameters`, so that the proof compares their
    gradients, too.

    Args:
        prover: The proof of the model.
        whole_batch: (outputs, batch) -> the loss of all samples, a scalar.

    Returns:
        The names of the outputs that the loss uses, and whether it uses parameters directly.

    Raises:
        LossNotAdditive: If the loss uses an output that neither has one row per sample nor is the
            same for all samples, or does not depend on the model's outputs.
        ConfigError: If the loss is not a scalar, or depends on trained tensors that are not known.
        UnkeyedRandomness: If the loss draws random numbers.
    """
    loss_parameters = parameters_of(whole_batch)
    prover.parameters = list(dict.fromkeys([*prover.parameters, *loss_parameters]))
    batch = prover.probe_batch()
    few_samples = take_rows(batch, ALL_ROWS[:NUM_FEW], prover.sample_entries)
    outputs = prover.plain_forward(batch)
    few_outputs = named_tensors(prover.plain_forward(few_samples))
    tensors = {name: _as_leaf(value) for name, value in named_tensors(outputs).items()}
    batch_on_device = prover.on_device(batch)

    def loss_of_outputs(names: set[str]) -> Tensor:
        """Compute the loss if only the outputs with these names are passed, the others as None."""
        passed = {name: value for name, value in tensors.items() if name in names}
        partial_outputs = with_tensors(outputs, passed)
        return loss_of_all(whole_batch, partial_outputs, batch_on_device, prover.device)

    loss = loss_of_outputs(set(tensors))
    _check_leaves(loss, [*tensors.values(), *prover.parameters])
    with_gradient, uses_parameters = _find_gradients(loss, tensors, prover.parameters)
    per_sample = {
        name for name in tensors if _has_row_per_sample(tensors[name], few_outputs.get(name))
    }
    shared = with_gradient - per_sample
    _check_shared(shared, tensors, few_outputs)

    # The loss may also read outputs without having a gradient with respect to them. If it needs
    # any, keep all with one row per sample. Those that are differentiable may have a gradient in
    # another window, where the loss takes another branch.
    needs_no_others = _is_same_loss(loss_of_outputs, with_gradient, loss)
    if not needs_no_others and not _is_same_loss(loss_of_outputs, with_gradient | per_sample, loss):
        raise LossNotAdditive(
            "whole_batch needs outputs of the model that do not have one row per sample: let it "
            "compute them from those that have."
        )
    differentiable_rows = per_sample & with_gradient
    read_only: set[str] = set()
    if not needs_no_others:
        differentiable_rows = {name for name in per_sample if tensors[name].requires_grad}
        read_only = per_sample - differentiable_rows
    return UsedOutputs(
        per_sample=frozenset(differentiable_rows),
        shared=frozenset(shared),
        without_gradient=frozenset(read_only),
        uses_parameters=uses_parameters,
    )


def _find_gradients(
    loss: Tensor, tensors: dict[str, Tensor], parameters: list[nn.Parameter]
) -> tuple[set[str], bool]:
    """Find out of which outputs and parameters a loss is a differentiable function.

    Args:
        loss: The loss, a scalar.
        tensors: The model's outputs by name, as leaves of the autograd graph.
        parameters: The trained parameters of model and loss.

    Returns:
        The names of the outputs with respect to which the loss has a gradient, and whether it has
        one with respect to any parameter (other than through the outputs).
    """
    names = [name for name, value in tensors.items() if value.requires_grad]
    leaves = [tensors[name] for name in names]
    gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
    output_gradients = gradients[: len(leaves)]
    parameter_gradients = gradients[len(leaves) :]
    with_gradient = {
        name for name, gradient in zip(names, output_gradients, strict=True) if gradient is not None
    }
    return with_gradient, any(gradient is not None for gradient in parameter_gradients)


def _check_shared(
    names: set[str], tensors: dict[str, Tensor], few_outputs: dict[str, Tensor]
) -> None:
    """Check that some outputs of a model are the same for all samples (a learned temperature).

    Args:
        names: Outputs that the loss uses and that do not have one row per sample.
        tensors: The model's outputs by name for all samples of the probe batch.
        few_outputs: Its outputs by name for the first `NUM_FEW` of them.

    Raises:
        LossNotAdditive: If one is not.
    """
    for name in sorted(names):
        if not _is_same_output(tensors[name], few_outputs.get(name)):
            raise LossNotAdditive(
                f"whole_batch uses the model's output {name!r}, which has shape "
                f"{list(tensors[name].shape)} for {NUM_PROBE_SAMPLES} samples: it must have one "
                "row per sample, computed from that sample alone, or be the same for all samples. "
                "Let whole_batch compute what compares samples (a matrix of similarities)."
            )


def check_same_in_both_passes(prover: Prover) -> None:
    """Check that both forwards of a micro-batch have the same outputs.

    A loss of whole windows needs two forwards: the first one gives the outputs of the window, the
    second one the gradient. They differ if the model draws random numbers that are not keyed.

    Raises:
        ConfigError: If the model draws random numbers that cannot be tied to samples.
    """
    if prover.dropout.unkeyed:
        names = ", ".join(prover.dropout.names[module] for module in prover.dropout.unkeyed)
        raise ConfigError(
            f"{names} draws random numbers that cannot be tied to samples, so the two forwards of "
            "whole_batch would differ, and its gradient would be wrong: set this randomness to 0."
        )


def prove_whole_batch(
    prover: Prover, whole_batch: WholeBatchLoss, used_outputs: UsedOutputs
) -> WholeWindow:
    """Test that a loss of whole windows has the same gradient in one and in two micro-batches.

    Args:
        prover: The proof of the model, which has proven that the outputs of a sample do not depend
            on other samples.
        whole_batch: (outputs, batch) -> the loss of all samples, a scalar.
        used_outputs: The outputs that the loss uses, from `find_used_outputs`.

    Returns:
        The loss that the engine trains with.

    Raises:
        LossNotAdditive: If loss or gradient differ by more than rounding.
    """

    def loss_of_one_batch(outputs: Any, batch: Batch) -> tuple[Tensor, float]:
        """Compute the loss of one batch with all samples; in the form of a `loss_fn`."""
        tensors = {name: at_least_float32(value) for name, value in named_tensors(outputs).items()}
        outputs = with_tensors(outputs, tensors)
        return loss_of_all(whole_batch, outputs, batch, prover.device), 1.0

    batch = prover.probe_batch()
    rows = [GROUP_ROWS["A"], GROUP_ROWS["B"]]
    parts = [take_rows(batch, part, prover.sample_entries) for part in rows]
    window_loss = WholeWindow(whole_batch, used_outputs)
    loss, gradients = prover.loss_and_gradients(BatchLoss(loss_of_one_batch), [batch], [ALL_ROWS])
    split_loss, split_gradients = prover.loss_and_gradients(
        window_loss, parts, rows, window_batch=batch
    )
    error = relative_error(
        ProbeResult(split_loss, 0.0, split_gradients), ProbeResult(loss, 0.0, gradients)
    )
    if not error <= max(TOLERANCE, prover.tolerance):
        raise LossNotAdditive(
            "the gradient of whole_batch for a window in two micro-batches is not that of one "
            f"forward of all samples (relative error {error:.1e}). Likely cause: it uses "
            "something of the model besides its outputs (what a hook or an attribute of the last "
            "forward holds). Let the model return it."
        )
    return window_loss


def _check_leaves(loss: Tensor, known_tensors: list[Tensor]) -> None:
    """Check that all leaves of a loss's autograd graph are known.

    Args:
        loss: The loss of a whole window.
        known_tensors: The model's outputs, and all parameters that are trained.

    Raises:
        ConfigError: If the graph has another leaf, whose gradient would be lost.
    """
    known_ids = {id(tensor) for tensor in known_tensors}
    nodes_to_visit = [loss.grad_fn]
    visited = set(nodes_to_visit)
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        leaf = getattr(node, "variable", None)  # only nodes that accumulate into `.grad` have it
        if leaf is not None and id(leaf) not in known_ids:
            raise ConfigError(
                f"whole_batch depends on a tensor of shape {list(leaf.shape)} that is trained, but "
                "is not a parameter of this model (its copy, in a check): let the model return it "
                "among its outputs, or let whole_batch be a torch.nn.Module that has it."
            )
        next_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None}
        nodes_to_visit += next_nodes - visited
        visited |= next_nodes


def _as_leaf(output: Tensor) -> Tensor:
    """Detach an output of the model, so that a loss has a gradient with respect to it.

    Returns:
        A tensor of at least float32 that requires gradients; other dtypes are unchanged.
    """
    leaf = at_least_float32(output.detach())
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _has_row_per_sample(output: Tensor, few_output: Tensor | None) -> bool:
    """Whether an output of a model has one row per sample, of a shape that does not depend on the
    number of samples.

    Args:
        output: The output for all samples of the probe batch.
        few_output: The same output for the first `NUM_FEW` of them. None if the model did not
            return it.
    """
    if few_output is None or not output.dim() or not few_output.dim():
        return False
    has_rows = len(output) == NUM_PROBE_SAMPLES and len(few_output) == NUM_FEW
    return has_rows and output.shape[1:] == few_output.shape[1:]


def _is_same_output(output: Tensor, few_output: Tensor | None) -> bool:
    """Whether an output is the same for all samples of the probe batch as for a few of them.

    False if the model did not return it for a few samples (None).
    """
    if few_output is None or output.shape != few_output.shape:
        return False
    return torch.allclose(output, few_output.to(output))


def _is_same_loss(
    loss_of_outputs: Callable[[set[str]], Tensor], names: set[str], expected_loss: Tensor
) -> bool:
    """Whether a loss has the same value if it gets only some outputs of the model.

    Args:
        loss_of_outputs: Computes the loss from the outputs with the given names.
        names: Names of the outputs to pass.
        expected_loss: The loss of all outputs.

    Returns:
        Also False if the loss fails because an output is missing.
    """
    try:
        loss = loss_of_outputs(names)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
        return False
    return torch.equal(loss, expected_loss)
