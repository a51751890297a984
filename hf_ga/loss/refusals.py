"""The errors for losses that are not sums of means: what, why, and what to do."""

from torch.autograd.graph import Node

from hf_ga.errors import LossNotAdditive

WHY = "so the loss of a batch is not a sum over its samples"
REMEDY = (
    "Pass a sum and its number of targets, accelerator.backward(sum, num_targets=n), or, for a "
    "loss of all samples together, whole_batch=..."
)
WORDS = {
    "AmaxBackward0": "a maximum over the batch",
    "AminBackward0": "a minimum over the batch",
    "ErfBackward0": "the error function of a mean",
    "ExpBackward0": "the exponential of a mean",
    "IndexBackward0": "one element of a tensor of several",
    "LogBackward0": "the logarithm of a mean",
    "Log1PBackward0": "the logarithm of a mean",
    "LogsumexpBackward0": "a logsumexp over the batch",
    "LinalgVectorNormBackward0": "a norm over the batch",
    "MaxBackward0": "a maximum over the batch",
    "MaxBackward1": "a maximum over the batch",
    "MaximumBackward0": "the larger one of two losses",
    "MedianBackward0": "a median over the batch",
    "MinBackward1": "a minimum over the batch",
    "MinimumBackward0": "the smaller one of two losses",
    "PowBackward0": "a power of a mean",
    "ReciprocalBackward0": "a number divided by a mean",
    "SigmoidBackward0": "the sigmoid of a mean",
    "SqrtBackward0": "the square root of a mean",
    "StdBackward0": "a standard deviation over the batch",
    "TanhBackward0": "the tanh of a mean",
    "VarBackward0": "a variance over the batch",
}


def refusal(node: Node, what: str | None = None) -> LossNotAdditive:
    """Return the error for a node that makes the loss something other than a sum of means."""
    kind = node.name()
    if "CompiledFunction" in kind:
        return LossNotAdditive(
            f"the loss is inside of a compiled graph ({kind}), where its mean cannot be read. "
            "Compile the layers (hf_ga.compile_layers), not the whole model."
        )
    if what is None:
        what = WORDS.get(kind)
    if what is None and not kind.endswith(tuple("0123456789")):
        return LossNotAdditive(
            f"the loss comes from a custom autograd function ({kind}), and what it divides by "
            f"cannot be read. {REMEDY}"
        )
    if what is None:
        what = "an operation that is not a sum or a mean"
    return LossNotAdditive(f"the loss contains {what} ({kind}), {WHY}. {REMEDY}")


def undivided_sum(node: Node) -> LossNotAdditive:
    """Return the error for a sum over samples without a divisor."""
    return LossNotAdditive(
        f"the loss is a sum, not a mean ({node.name()}): divide it by what it is summed over, or "
        "pass num_targets=... to accelerator.backward. Of several means, add them up (a + b) "
        "instead of stacking them."
    )


def samples_or_heads(node: Node, number: int, num_samples: int) -> LossNotAdditive:
    """Return the error for a mean of means that may be of single samples or of all of them.

    Args:
        node: The node of the first mean.
        number: How many means there are.
        num_samples: Number of samples of the micro-batch.
    """
    return LossNotAdditive(
        f"the loss is the mean of {number} means of the same kind ({node.name()}) in a micro-batch "
        f"of {num_samples} samples: they may be the losses of these samples, or as many losses of "
        "all of them. Use another micro-batch size, or pass a sum and its number of targets: "
        "accelerator.backward(sum, num_targets=n)."
    )


def product_of_two(node: Node) -> LossNotAdditive:
    """Return the error for a product of two losses."""
    what = "a product of two quantities that both need gradients"
    return refusal(node, what)


def quotient_of_two(node: Node) -> LossNotAdditive:
    """Return the error for a division by something that needs a gradient."""
    return refusal(node, "a division by a quantity that needs a gradient")


def weight_of_several(node: Node) -> LossNotAdditive:
    """Return the error for a trained weight of a sum of losses, each of which may have another
    divisor.
    """
    return LossNotAdditive(
        f"the loss multiplies a sum of several losses by a trained weight ({node.name()}): "
        "multiply each of them, weight * first + weight * second."
    )
