"""Warnings for loops of which something is not tried, or may not be meant."""

from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS

WITHOUT_REHEARSAL = (
    "hf_ga: it is not tried whether a sample's loss depends on the other samples of its process "
    "(BatchNorm, in-batch negatives), nor whether the loss divides by a constant (sum / 100): put "
    "the loop's body into `with accelerator.accumulate(model):`."
)

WITHOUT_OTHER_WIDTHS = (
    "hf_ga: it was not tried whether padding changes the loss of a sample, as those rehearsed so "
    "far had one width: pad all batches to one length, or put the loop's body into `with "
    "accelerator.accumulate(model):`, and leave the division out."
)

WITHOUT_GRADIENT = (
    "hf_ga: within a window, `.grad` is None: it appears with the last backward. Read or change it "
    "below `if accelerator.sync_gradients:`."
)

WITHOUT_TARGETS = (
    f"hf_ga: the first {NUM_FIRST_WINDOWS} windows have no target, so nothing was updated: check "
    "the labels. A loss over pairs of samples needs whole_batch."
)

WITHOUT_SECOND_BATCH = (
    "hf_ga: an iteration took no batch of the loop's second loader. If it uses an earlier one, as "
    "itertools.cycle does, the update depends on the split of the window: iterate over the loader "
    "again (`while True: yield from loader`)."
)

WITHOUT_BACKWARD = (
    "hf_ga: the loop ran no backward for a batch. If it skips batches by their samples or losses, "
    "windows depend on how they are split: leave samples out in the dataset."
)

WITHOUT_A_TERM = (
    "hf_ga: a micro-batch lacks a term of the loss that others have. That is right if none of its "
    "samples has a target of it, but not if the loop leaves it out by the loss itself, which is "
    "not tried here: put the loop's body into `with accelerator.accumulate(model):`, and leave the "
    "division out."
)


def more_iterations(reason: str) -> str:
    """Return the warning for a window that has more iterations than its loader has batches."""
    return (
        f"hf_ga: this window has more iterations than batches, as {reason}, and others may have: "
        "count updates (accelerator.sync_gradients), not iterations, also for skip_first_batches, "
        "which skips updates x gradient_accumulation_steps batches."
    )


def not_collated(reason: str) -> str:
    """Return the warning for samples of several micro-batches that cannot be put together."""
    return (
        "hf_ga: it is not tried whether a sample's loss depends on the other samples of its "
        f"micro-batch, as samples of several micro-batches cannot be collated together ({reason}). "
        "A collate function that pads them, or that returns lists, lets it be tried."
    )


def other_sizes(num_samples: int) -> str:
    """Return what explains an error of the loop in a rehearsed window."""
    return (
        f"hf_ga: this micro-batch has {num_samples} samples, as its window is rehearsed in "
        "micro-batches of other sizes: take sizes from the batch, not from a setting."
    )
