"""Whether a part of a loss depends on parameters only: a penalty on weights."""

from torch.autograd.graph import Node

from hf_ga.loss.nodes.saved import inputs, output_shape

PARAMETER = "torch::autograd::AccumulateGrad"

# Nodes of one input.
UNARY = {
    "AbsBackward0", "AliasBackward0", "AmaxBackward0", "AminBackward0", "ClampBackward1",
    "ClampMaxBackward0", "ClampMinBackward0", "CloneBackward0", "DiagonalBackward0",
    "ExpBackward0", "HuberLossBackward0", "LinalgSvdBackward0", "LinalgVectorNormBackward0",
    "LogBackward0", "LogSoftmaxBackward0", "LogsumexpBackward0", "MaxBackward1", "MeanBackward0",
    "MeanBackward1", "MinBackward1", "MseLossBackward0", "NegBackward0", "NormBackward0",
    "NormBackward1", "PermuteBackward0", "PowBackward0", "ReluBackward0", "ReshapeAliasBackward0",
    "RsubBackward1", "SelectBackward0", "SigmoidBackward0", "SmoothL1LossBackward0",
    "SoftmaxBackward0", "SoftplusBackward0", "SqrtBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "StdBackward0", "SumBackward0", "SumBackward1",
    "TBackward0", "TanhBackward0", "ToCopyBackward0", "TraceBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "VarBackward0", "ViewBackward0",
}  # fmt: skip
# Those of them that reduce many elements.
REDUCTIONS = {
    "AmaxBackward0", "AminBackward0", "HuberLossBackward0", "LinalgSvdBackward0",
    "LinalgVectorNormBackward0", "LogsumexpBackward0", "MaxBackward1", "MeanBackward0",
    "MeanBackward1", "MinBackward1", "MseLossBackward0", "NormBackward0", "NormBackward1",
    "SelectBackward0", "SmoothL1LossBackward0", "StdBackward0", "SumBackward0", "SumBackward1",
    "TraceBackward0", "VarBackward0",
}  # fmt: skip
# Nodes of several inputs, element by element. A constant input must not broadcast a parameter to
# the shape of a batch.
ELEMENTWISE = {
    "AddBackward0", "AddBackward1", "DivBackward0", "DivBackward1", "MaximumBackward0",
    "MinimumBackward0", "MulBackward0", "MulBackward1", "RsubBackward0", "SubBackward0",
    "SubBackward1",
}  # fmt: skip
# Nodes whose inputs must all be parameters: a constant one may be data.
JOINS = {"BmmBackward0", "CatBackward0", "DotBackward0", "MmBackward0", "StackBackward0"}


class Penalties:
    """Tells which nodes of one loss depend on parameters only.

    Attributes:
        known: The answers so far; a loss of hundreds of terms asks for the same nodes again.
    """

    def __init__(self) -> None:
        """Start without an answer."""
        self.known: dict[Node, bool] = {}

    def has(self, node: Node) -> bool:
        """Whether all paths from a node end in parameters, through nodes of the tables above.

        The walk ends at the first node that is in none of them.
        """
        path = [node]  # a node stays on it until all that is below it is known
        while path:
            current = path[-1]
            if current in self.known:
                path.pop()
            elif not _may_be_penalty(current):
                self.known.update(dict.fromkeys(path, False))
                return False
            else:
                below = [child for child, _ in inputs(current)]
                if any(self.known.get(child) is False for child in below):
                    self.known.update(dict.fromkeys(path, False))
                    return False
                unknown = [child for child in below if child not in self.known]
                if unknown:
                    path.append(unknown[0])
                else:
                    self.known[current] = True
        return self.known[node]


def _may_be_penalty(node: Node) -> bool:
    """Whether a node, without what is below it, may be part of a penalty."""
    kind = node.name()
    if kind == PARAMETER or kind in UNARY:
        return True
    if kind in JOINS:
        return len(inputs(node)) == len(node.next_functions)
    return kind in ELEMENTWISE and _keeps_shape(node)


def _keeps_shape(node: Node) -> bool:
    """Whether the output has the shape of an input that needs a gradient, or is one number."""
    shape = output_shape(node)
    return any(output_shape(child, index) == shape for child, index in inputs(node))
