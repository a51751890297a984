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

NUM_WINDOWS, NUM_SAMPLES = (
    100,
    20_000,
)  # at most, for the log: planning them takes less than a second


def planned_lengths(data: PreparedData) -> np.ndarray:
    """Lengths of the training samples for planning windows; for a stream, of the rows read ahead.

    If samples have source and target texts, memory depends on both: target lengths are scaled so
        that the longest target counts
    as much as the longest source. So the token limit applies to sources and targets alike.
    """
    train = data.splits["train"]
    lengths = np.asarray(train["length"][:])  # a list: numpy would index a column row by row
    if data.task.labels != "target":
        return lengths
    targets = np.asarray(train["num_targets"][:])
    return np.maximum(lengths, -(-targets * lengths.max() // max(targets.max(), 1)))


def train_windows(setup: Setup) -> WindowLoader | StreamLoader:
    """The loader of the training samples, planned by length.

    Raises:
        ConfigError: the longest (for a stream, the longest possible) sample exceeds the token limit
            of a micro-batch.
        DataError: `drop_last_window` drops all samples.
    """
    config, accelerator, data = setup.config, setup.accelerator, setup.data
    layout, limit = config.layout(accelerator.num_processes), config.max_tokens_per_micro_batch
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
    return StreamLoader(
        data.stream,
        data.collate,
        shuffle_buffer_size=config.shuffle_buffer_size,
        length_of=itemgetter("length"),
        max_tokens_per_micro_batch=limit
        or (config.same_bits or layout.micro_batch_size) * config.sequence_length,
        **shared,
    )


def padding_ratio(windows: WindowLoader | StreamLoader, lengths: np.ndarray) -> float:
    """Tokens with padding per token without, in the first windows of the first epoch; computed from
    lengths alone. Of a stream, as if its first rows came in their own order.
    """
    size, pads_to_window = windows.layout.window_size, windows.state.pad_to_window
    is_stream = isinstance(windows, StreamLoader)
    order = (
        np.arange(len(lengths))
        if is_stream
        else epoch_order(len(lengths), windows.seed, 0, windows.shuffle)
    )
    real = padded = 0
    for start in range(0, len(lengths), size)[: max(1, min(NUM_WINDOWS, NUM_SAMPLES // size))]:
        chosen = lengths[order[start : start + size]]
        widths = np.full_like(chosen, chosen.max()) if pads_to_window else chosen
        real += int(chosen.sum())
        padded += padded_tokens(windows.splitter.plan(chosen, pads_to_window), widths)
    return padded / max(real, 1)
