"""The errors for samples that depend on the other samples of their micro-batch."""

from collections.abc import Sequence

from hf_ga.engine.look.rehearsal import Difference, is_inside
from hf_ga.errors import LossNotAdditive


def compared_with_statistic(term: str, function: str) -> LossNotAdditive:
    """Return the error for samples that are compared with a statistic of their micro-batch.

    Args:
        term: The term of the loss, in words.
        function: The name of the function of torch that compares.
    """
    return LossNotAdditive(
        f"{term}: torch.{function} compares samples with a statistic of their micro-batch (a mean, "
        "a quantile, their order), so which of them count, and how much, depends on the other "
        "samples, and no split of the window is the full batch. Compare with a constant, in the "
        "dataset, or over the whole window with whole_batch."
    )


def computed_in_two_ways(term: str) -> LossNotAdditive:
    """Return the error for a sample that has a term of the loss in some company only."""
    return LossNotAdditive(
        f"{term}: a sample has this term of the loss among some samples of the window, but not "
        "among others, so the loop computes its loss in two ways, or leaves some out by their own "
        "loss. Let each micro-batch have the same terms, and num_targets in all of them or in none."
    )


def depends_on_company(
    term: str, difference: Difference, backward_code: Sequence[str]
) -> LossNotAdditive:
    """Return the error for a sample whose gradient is another one among other samples.

    Args:
        term: The term of the loss, in words.
        difference: The sample's gradient before and now.
        backward_code: Names of the functions of the model's own with a backward.
    """
    found = f"{difference.before:.6g} among some samples of the window and {difference.now:.6g}"
    if is_inside(difference.place):
        return LossNotAdditive(
            f"{term}: the gradient of a sample inside of the model, below "
            f"{' or '.join(backward_code)}, was {found} among others, so its backward depends on "
            "the other samples of its micro-batch, and no split of the window is the full batch. "
            "Let it treat each sample alone."
        )
    return LossNotAdditive(
        f"{term}: the gradient of a sample at the model's outputs was {found} among others, so its "
        "loss depends on the other samples of its micro-batch (BatchNorm, in-batch negatives, "
        "statistics or mixtures over the batch, state that the loop keeps, draws for one sample "
        "after the other), and no split of the window is the full batch. Compute it for each "
        "sample alone, in the dataset or collate function, or over the whole window with "
        "whole_batch."
    )
