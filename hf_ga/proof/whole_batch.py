"""Proves a loss of whole windows: which outputs it uses, that those of a sample do not depend on
other samples, and that the gradient of a window in two micro-batches is that of one forward.
"""

from typing import Any

import torch
from torch import Tensor

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
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, TOLERANCE, relative_error
from hf_ga.proof.prover import ALL_ROWS, GROUPS, Prover

FEW_ROWS = ALL_ROWS[:2]


def find_used_outputs(prover: Prover, whole_batch: WholeBatchLoss) -> UsedOutputs:
    """Find out which outputs a loss uses. The prover then tests whether those of a sample depend on
    others.

    Args:
        prover: Of the model.
        whole_batch: See `WholeWindow`.

    Raises:
        LossNotAdditive: If it uses an output that is neither one row per sample nor the same for
            all samples.
        Others: See `loss_of_all`.
    """
    prover.parameters = list(dict.fromkeys([*prover.parameters, *parameters_of(whole_batch)]))
    batch = prover.probe_batch()
    outputs = prover.plain_forward(batch)
    few = named_tensors(prover.plain_forward(take_rows(batch, FEW_ROWS, prover.entries)))
    tensors = {name: _as_leaf(value) for name, value in named_tensors(outputs).items()}
    differentiable = [name for name, value in tensors.items() if value.requires_grad]
    on_device = prover.on_device(batch)

    def loss_with(kept: set[str]) -> Tensor:
        given = {name: value for name, value in tensors.items() if name in kept}
        return loss_of_all(whole_batch, with_tensors(outputs, given), on_device, prover.device)

    loss = loss_with(set(tensors))
    _check_leaves(loss, [*tensors.values(), *prover.parameters])
    leaves = [tensors[name] for name in differentiable]
    found = torch.autograd.grad(loss, [*leaves, *prover.parameters], allow_unused=True)
    used = [
        name for name, gradient in zip(differentiable, found, strict=False) if gradient is not None
    ]
    of_samples = {name for name in tensors if _has_rows(tensors[name], few.get(name))}
    shared = {name for name in used if name not in of_samples}
    for name in shared:
        if not _is_same(tensors[name], few.get(name)):
            raise LossNotAdditive(
                f"whole_batch uses the model's output {name!r}, which has shape "
                f"{list(tensors[name].shape)} for {NUM_PROBE_SAMPLES} samples: it must have one "
                "row per sample, computed from that sample alone, or be the same for all samples. "
                "Let whole_batch compute what compares samples (a matrix of similarities)."
            )
    others = of_samples - set(used)
    # Another window may take a branch of the loss in which these have a gradient.
    may_be_used = others & set(differentiable)
    is_enough = _is_same_loss(loss_with, set(used), loss)
    if not is_enough and not _is_same_loss(loss_with, set(used) | of_samples, loss):
        raise LossNotAdditive(
            "whole_batch needs outputs of the model that do not have one row per sample: let it "
            "compute them from those that have."
        )
    return UsedOutputs(
        per_sample=frozenset(of_samples & set(used) | (set() if is_enough else may_be_used)),
        shared=frozenset(shared),
        without_gradient=frozenset() if is_enough else frozenset(others - may_be_used),
        uses_parameters=any(gradient is not None for gradient in found[len(leaves) :]),
    )


def check_same_in_both_passes(prover: Prover) -> None:
    """Check that both forwards of a micro-batch have the same outputs.

    Raises:
        ConfigError: If something draws random numbers that are not keyed by sample, which
            `allow_split_dependent_randomness` accepts.
    """
    if prover.dropout.unkeyed:
        names = ", ".join(prover.dropout.names[module] for module in prover.dropout.unkeyed)
        raise ConfigError(
            f"{names} draws random numbers that cannot be tied to samples, so the two forwards of "
            "whole_batch would differ, and its gradient would be wrong: set this randomness to 0."
        )


def prove_whole_batch(
    prover: Prover, whole_batch: WholeBatchLoss, used: UsedOutputs
) -> WholeWindow:
    """Test that two micro-batches give the gradient of one.

    Args:
        prover: Of the model; it has proven the outputs.
        whole_batch: See `WholeWindow`.
        used: From `find_used_outputs`.

    Raises:
        LossNotAdditive: If they do not.
    """

    def own(outputs: Any, batch: Batch) -> tuple[Tensor, float]:
        tensors = {name: at_least_float32(value) for name, value in named_tensors(outputs).items()}
        outputs = with_tensors(outputs, tensors)
        return loss_of_all(whole_batch, outputs, batch, prover.device), 1.0

    whole = prover.probe_batch()
    parts = [take_rows(whole, GROUPS[name], prover.entries) for name in ("A", "B")]
    rows = [GROUPS["A"], GROUPS["B"]]
    loss = WholeWindow(whole_batch, used)
    value, gradients = prover.compute(BatchLoss(own), [whole], [ALL_ROWS])
    split_value, split_gradients = prover.compute(loss, parts, rows, whole=whole)
    error = relative_error((split_value, 0.0, split_gradients), (value, 0.0, gradients))
    if not error <= max(TOLERANCE, prover.tolerance):
        raise LossNotAdditive(
            "the gradient of whole_batch for a window in two micro-batches is not that of one "
            f"forward of all samples (relative error {error:.1e}). Likely cause: it uses "
            "something of the model besides its outputs (what a hook or an attribute of the last "
            "forward holds). Let the model return it."
        )
    return loss


def _check_leaves(loss: Tensor, known: list[Tensor]) -> None:
    """Check that nothing else is to be trained through the loss than is known.

    Raises:
        ConfigError: If there is something else, whose gradient would be lost.
    """
    identities = {id(tensor) for tensor in known}
    waiting = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in identities:
            raise ConfigError(
                f"whole_batch depends on a tensor of shape {list(leaf.shape)} that is trained, but "
                "is not a parameter of this model (its copy, in a check): let the model return it "
                "among its outputs, or let whole_batch be a torch.nn.Module that has it."
            )
        following = {next_node for next_node, _ in node.next_functions if next_node is not None}
        waiting += following - seen
        seen |= following


def _as_leaf(value: Tensor) -> Tensor:
    value = at_least_float32(value.detach())
    return value.requires_grad_() if value.is_floating_point() else value


def _has_rows(value: Tensor, few: Tensor | None) -> bool:
    """Whether an output has one row per sample, whose shape does not depend on the number of
    samples.

    Args:
        value: The output for all probe samples.
        few: The same output for two of them. None: the model did not return it.
    """
    if few is None or not value.dim() or not few.dim():
        return False
    has_all = len(value) == NUM_PROBE_SAMPLES and len(few) == len(FEW_ROWS)
    return has_all and value.shape[1:] == few.shape[1:]


def _is_same(value: Tensor, few: Tensor | None) -> bool:
    return few is not None and value.shape == few.shape and torch.allclose(value, few.to(value))


def _is_same_loss(loss_with: Any, kept: set[str], expected: Tensor) -> bool:
    """Whether a loss is the same if it gets these outputs only."""
    try:
        found = loss_with(kept)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
        return False  # it needs another one
    return torch.equal(found, expected)
