"""What autograd nodes keep of their forward. All `_saved_*` attributes are read here.

The attributes are not documented by PyTorch, so SAVED lists all that this package relies on, and a
test checks that they exist.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from hf_ga.errors import LossNotAdditive

Number = float | Tensor

# For each kind of node, the attributes that are read, without the prefix `_saved_`.
SAVED = {
    "AddBackward0": ("alpha",),
    "BinaryCrossEntropyBackward0": ("self", "target", "reduction"),
    "BinaryCrossEntropyWithLogitsBackward0": ("self", "target", "reduction"),
    "BmmBackward0": ("self", "mat2"),
    "DivBackward0": ("self", "other"),
    "DivBackward1": ("other",),
    "DotBackward0": ("self", "tensor"),
    "HuberLossBackward0": ("self", "target", "reduction"),
    "MaskedFillBackward0": ("mask",),
    "MeanBackward1": ("dim",),
    "MmBackward0": ("self", "mat2"),
    "MseLossBackward0": ("self", "target", "reduction"),
    "MulBackward0": ("self", "other"),
    "MulBackward1": ("other",),
    "MultiMarginLossBackward0": ("self", "reduction"),
    "MultilabelMarginLossBackward0": ("self", "reduction"),
    "MvBackward0": ("self", "vec"),
    "NllLossBackward0": ("self", "reduction", "total_weight", "target", "weight", "ignore_index"),
    "NllLoss2DBackward0": ("self", "reduction", "total_weight", "target", "weight", "ignore_index"),
    "PermuteBackward0": ("dims",),
    "PowBackward0": ("exponent",),
    "RsubBackward0": ("alpha",),
    "RsubBackward1": ("alpha",),
    "SelectBackward0": ("index",),
    "SmoothL1LossBackward0": ("self", "target", "reduction"),
    "SoftMarginLossBackward0": ("self", "target", "reduction"),
    "SubBackward0": ("alpha",),
    "SumBackward1": ("dim", "keepdim"),
    "TransposeBackward0": ("dim0", "dim1"),
    "WhereBackward0": ("condition",),
}

# Custom functions of wrappers (DDP, FSDP) that return their inputs.
PASSED_THROUGH = {"_DDPSinkBackward", "RegisterPostBackwardFunctionBackward"}


def saved(node: Node, name: str) -> Any:
    """Return what a node keeps under a name of SAVED.

    Raises:
        LossNotAdditive: If the node of this version of PyTorch does not keep it.
    """
    kind = node.name()
    assert name in SAVED[kind], f"{kind}.{name} is not in SAVED"
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError:
        raise LossNotAdditive(
            f"{kind} of PyTorch {torch.__version__} has no _saved_{name}, so the loss cannot be "
            "read. Pass the sum and its number of targets: "
            "accelerator.backward(sum, num_targets=n)."
        ) from None


def number(value: Any) -> Number:
    """Return a number, or a tensor of one element, as a float if it is on the CPU.

    One on another device stays a tensor: to read it would wait for the device.
    """
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu":
        # A TorchDispatchMode, such as one that counts operations, would get a Python number in
        # place of a tensor that stands for one, and fail.
        with _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext():
            return float(value.detach())
    value = value.detach().reshape(())
    return value.float() if value.dtype == torch.bool else value


def quotient(value: Number, divisor: Number) -> Number:
    """Return value / divisor; infinite for a divisor of 0."""
    if isinstance(divisor, float) and divisor == 0.0:
        return value * float("inf")
    return value / divisor


def signed(index: int) -> int:
    """Return a saved index, which autograd shows as an unsigned number of 64 bits."""
    return index - 2**64 if index >= 2**63 else index


def inputs(node: Node) -> list[tuple[Node, int]]:
    """Return (node, output index) of the inputs that need a gradient, below wrappers' functions."""
    found = []
    for child, index in node.next_functions:
        while child is not None and child.name() in PASSED_THROUGH:
            child, index = child.next_functions[index]
        if child is not None:
            found.append((child, index))
    return found


def output_shape(node: Node, index: int = 0) -> torch.Size:
    """Return the shape of an output of a node's forward."""
    return torch.Size(node._input_metadata[index].shape)
