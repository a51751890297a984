"""Finds out, from a few samples of a window, which outputs of the model a loss of all samples of a
window uses, and whether they depend on padding.

    few = few_samples(window)
    used = find_used_outputs(whole_batch, few, [forward(slot) for slot in few.slots], ...)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.engine.look.recorder import widths_of
from hf_ga.engine.slots import Slot
from hf_ga.engine.whole.whole_window import UsedOutputs, WholeBatchLoss, loss_of_all, parameters_of
from hf_ga.errors import ConfigError, DataError, LossNotAdditive
from hf_ga.loading.batches import MicroBatch, row_lengths
from hf_ga.loading.window import Window
from hf_ga.model.forward import Batch
from hf_ga.model.outputs import named_tensors, with_tensors
from hf_ga.model.precision import at_least_float32

NUM_SAMPLES = 6
NUM_OF_OTHERS = 2  # samples of the other micro-batches: BatchNorm has no statistics of one


@dataclass(frozen=True)
class FewSamples:
    """Three small micro-batches of samples of a window.

    Attributes:
        all: Some samples, padded to the window's longest sample where batches can be.
        some: Another number of them, padded like them.
        shortest: The last ones, which are the shortest, without more padding than they need.
    """

    all: MicroBatch
    some: MicroBatch
    shortest: MicroBatch

    @property
    def slots(self) -> list[Slot]:
        """The micro-batches as iterations that add nothing."""
        batches = (self.all, self.some, self.shortest)
        return [Slot(micro_batch, is_filler=True) for micro_batch in batches]

    @property
    def have_two_widths(self) -> bool:
        """Whether the shortest samples have padding among the others."""
        return widths_of(self.all.batch) != widths_of(self.shortest.batch)


def few_samples(window: Window) -> FewSamples:
    """Choose some samples of this process, from the longest to the shortest one.

    Args:
        window: The window.
    """
    planned = window.request.micro_batches
    own = np.concatenate(planned) if len(planned) else window.offsets[:1]
    (together,) = window.split([own]).micro_batches
    by_length = own[np.argsort(-row_lengths(together.batch, len(together)), kind="stable")]
    number = min(NUM_SAMPLES, len(by_length))
    chosen = by_length[np.linspace(0, len(by_length) - 1, number).astype(int)]
    # With the longest one, so that both are equally wide also where nothing pads to the window.
    some = chosen[:NUM_OF_OTHERS] if number > NUM_OF_OTHERS else np.tile(chosen, 2)
    try:
        padded = window.split([chosen, some], pad_to_window=True).micro_batches
    except (ConfigError, DataError):
        padded = window.split([chosen, some]).micro_batches
    unpadded = replace(window, request=replace(window.request, pad_to_window=False))
    return FewSamples(*padded, *unpadded.split([chosen[-NUM_OF_OTHERS:]]).micro_batches)


def find_used_outputs(
    whole_batch: WholeBatchLoss,
    outputs: Any,
    outputs_of_some: Any,
    batch: Batch,
    numbers: tuple[int, int],
    parameters: Sequence[nn.Parameter],
) -> UsedOutputs:
    """Find out which outputs of a model a loss of whole windows uses.

    An output with one row per sample has as many rows as a micro-batch has samples, in two of
    different sizes. The loss and its gradient with respect to each output tell which it uses.

    Args:
        whole_batch: (outputs, batch) -> the loss of all samples, a scalar.
        outputs: What the model returned for a few samples, without gradients.
        outputs_of_some: What it returned for another number of them.
        batch: The batch of the few samples, on the device.
        numbers: The numbers of samples of both.
        parameters: The trainable parameters of the model.

    Returns:
        The names of the outputs that the loss uses, and whether it uses parameters directly.

    Raises:
        LossNotAdditive: If the loss uses an output that neither has one row per sample nor is the
            same for all samples, or does not depend on the model's outputs.
        ConfigError: If the loss is not a scalar, or depends on trained tensors that are not known.
        UnkeyedRandomness: If the loss draws random numbers.
    """
    known = list(dict.fromkeys([*parameters, *parameters_of(whole_batch)]))
    device = known[0].device
    tensors = {name: _as_leaf(value) for name, value in named_tensors(outputs).items()}
    of_some = named_tensors(outputs_of_some)

    def loss_of_outputs(names: set[str]) -> Tensor:
        """Compute the loss if only the outputs with these names are passed, the others as None."""
        passed = {name: value for name, value in tensors.items() if name in names}
        partial_outputs = with_tensors(outputs, passed)
        return loss_of_all(whole_batch, partial_outputs, batch, device, is_extra=True)

    loss = loss_of_outputs(set(tensors))
    _check_leaves(loss, [*tensors.values(), *known])
    with_gradient, uses_parameters = _find_gradients(loss, tensors, known)
    per_sample = {
        name for name in tensors if _has_row_per_sample(tensors[name], of_some.get(name), numbers)
    }
    shared = with_gradient - per_sample
    _check_shared(shared, tensors, of_some, numbers[0])

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
    """Return the names of the outputs (leaves of the graph) with respect to which a loss has a
    gradient, and whether it has one with respect to any parameter directly.
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
    names: set[str], tensors: dict[str, Tensor], of_some: dict[str, Tensor], number: int
) -> None:
    """Check that some outputs of a model are the same for all samples (a learned temperature)."""
    for name in sorted(names):
        if not _is_same_output(tensors[name], of_some.get(name)):
            raise LossNotAdditive(
                f"whole_batch uses the model's output {name!r}, which has shape "
                f"{list(tensors[name].shape)} for {number} samples: it must have one "
                "row per sample, computed from that sample alone, or be the same for all samples. "
                "Let whole_batch compute what compares samples (a matrix of similarities)."
            )


def _check_leaves(loss: Tensor, known_tensors: list[Tensor]) -> None:
    """Check that all leaves of a loss's autograd graph are known: the gradient of another one would
    be lost.
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
                "is not a parameter of this model: let the model return it "
                "among its outputs, or let whole_batch be a torch.nn.Module that has it."
            )
        next_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None}
        nodes_to_visit += next_nodes - visited
        visited |= next_nodes


def _as_leaf(output: Tensor) -> Tensor:
    """Detach an output of the model, so that a loss has a gradient with respect to it, in at least
    float32. Integers and bools are unchanged.
    """
    leaf = at_least_float32(output.detach())
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _has_row_per_sample(output: Tensor, of_some: Tensor | None, numbers: tuple[int, int]) -> bool:
    """Whether an output has one row per sample, of a shape that does not depend on their number,
    for two numbers of samples. None: the model did not return it.
    """
    if of_some is None or not output.dim() or not of_some.dim():
        return False
    has_rows = (len(output), len(of_some)) == numbers
    return has_rows and output.shape[1:] == of_some.shape[1:]


def _is_same_output(output: Tensor, of_some: Tensor | None) -> bool:
    """Whether an output is the same for two numbers of samples. False if the model did not return
    it for one of them (None).
    """
    if of_some is None or output.shape != of_some.shape:
        return False
    return torch.allclose(output, of_some.to(output))


def _is_same_loss(
    loss_of_outputs: Callable[[set[str]], Tensor], names: set[str], expected_loss: Tensor
) -> bool:
    """Whether a loss has the same value if it gets only the outputs with these names. False, too,
    if it fails because one is missing.
    """
    try:
        loss = loss_of_outputs(names)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
        return False
    return torch.allclose(loss, expected_loss, rtol=0, atol=0, equal_nan=True)
