"""The training windows of a run: lengths for planning, the token limit of micro-batches, and the
logged padding ratio.
"""

from operator import itemgetter
from typing import Any

import numpy as np

from hf_ga.exact.base_loader import check_limit
from hf_ga.exact.length_plan import padded_tokens
from hf_ga.exact.order import epoch_order
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.run.run import Setup

# The most that are planned for the padding ratio in the log, which takes less than a second.
NUM_WINDOWS = 100
NUM_SAMPLES = 20_000


def planned_lengths(data: PreparedData) -> np.ndarray:
    """Return the lengths of the training samples for planning windows; of a stream, those of the
    rows read ahead.

    If samples have source and target texts, memory depends on both: target lengths are scaled so
    that the longest target counts as much as the longest source. So the token limit applies to
    sources and targets alike.
    """
    train = data.splits["train"]
    # From a list: numpy would index a column row by row.
    lengths = np.asarray(train["length"][:])
    if data.task.labels != "target":
        return lengths
    targets = np.asarray(train["num_targets"][:])
    # Rounded up.
    scaled = -(-targets * lengths.max() // max(targets.max(), 1))
    return np.maximum(lengths, scaled)


def train_windows(setup: Setup) -> WindowLoader | StreamLoader:
    """Return the loader of the training samples, planned by length.

    Args:
        setup: What the parts of the run share.

    Raises:
        ConfigError: If the longest (for a stream, the longest possible) sample exceeds the token
            limit of a micro-batch.
        DataError: If `drop_last_window` drops all samples.
    """
    config = setup.config
    accelerator = setup.accelerator
    data = setup.data
    layout = config.layout(accelerator.num_processes)
    limit = config.max_tokens_per_micro_batch
    shared: dict[str, Any] = {
        "accelerator": accelerator,
        "per_device_batch_size": layout.micro_batch_size,
        "global_batch_size": layout.window_size,
        "seed": config.seed,
        "drop_last_window": config.drop_last_window,
        "num_workers": config.dataloader_num_workers,
        "canonical_micro_batch": config.same_bits,
    }
    if data.stream is None:
        lengths = planned_lengths(data)
        return WindowLoader(
            data.samples("train"),
            data.collate,
            lengths=lengths,
            max_tokens_per_micro_batch=limit,
            **shared,
        )
    check_limit(limit, config.sequence_length, "max_length's")
    if not limit:
        micro_batch_size = config.same_bits or layout.micro_batch_size
        limit = micro_batch_size * config.sequence_length
    return StreamLoader(
        data.stream,
        data.collate,
        shuffle_buffer_size=config.shuffle_buffer_size,
        length_of=itemgetter("length"),
        max_tokens_per_micro_batch=limit,
        **shared,
    )


def padding_ratio(windows: WindowLoader | StreamLoader, lengths: np.ndarray) -> float:
    """Compute the number of tokens with padding per token without, in the first windows of the
    first epoch, from lengths alone.

    Args:
        windows: The loader of the training windows. A stream is planned as if its first rows came
            in their own order.
        lengths: See `planned_lengths`.
    """
    size = windows.layout.window_size
    pads_to_window = windows.state.pad_to_window
    order = np.arange(len(lengths))
    if not isinstance(windows, StreamLoader):
        order = epoch_order(len(lengths), windows.seed, 0, windows.shuffle)
    num_windows = max(1, min(NUM_WINDOWS, NUM_SAMPLES // size))
    starts = range(0, len(lengths), size)
    num_tokens = 0
    num_padded_tokens = 0
    for start in starts[:num_windows]:
        chosen = lengths[order[start : start + size]]
        widths = chosen
        if pads_to_window:
            widths = np.full_like(chosen, chosen.max())
        micro_batches = windows.splitter.plan(chosen, pads_to_window)
        num_tokens += int(chosen.sum())
        num_padded_tokens += padded_tokens(micro_batches, widths)
    return num_padded_tokens / max(num_tokens, 1)
