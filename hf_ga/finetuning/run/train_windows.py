"""Load the training windows of a run: sample lengths from which micro-batches are planned, the
token limit of micro-batches, and the padding ratio in the log.
"""

from operator import itemgetter
from typing import Any

import numpy as np

from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.run.run import Setup
from hf_ga.loading.base_loader import check_limit
from hf_ga.loading.streams.stream_loader import StreamLoader
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.order.length_plan import padded_tokens
from hf_ga.order.order import epoch_order

# The padding ratio in the log is that of the first windows: at most so many that planning them
# takes less than a second.
MAX_PLANNED_WINDOWS = 100
MAX_PLANNED_SAMPLES = 20_000


def planned_lengths(data: PreparedData) -> np.ndarray:
    """Return the lengths in tokens of the training samples of a fine-tuning run, by which its
    windows are split into micro-batches of similar lengths.

    If samples have a source and a target text (seq2seq), memory depends on both: the length is the
    larger one of the source's length and the target's length, which is scaled so that the longest
    target counts as much as the longest source. So the token limit of micro-batches bounds both.

    Args:
        data: The prepared data. Of a stream, only the rows that were read ahead have lengths.

    Returns:
        The lengths, of shape (num_samples,).
    """
    train = data.splits["train"]
    # Converted to lists first: numpy would index a column of a dataset row by row.
    lengths = np.asarray(train["length"][:])
    if data.task.labels != "target":
        return lengths
    target_lengths = np.asarray(train["num_targets"][:])
    longest_target = max(target_lengths.max(), 1)
    # Integer division that rounds up.
    scaled = -(-target_lengths * lengths.max() // longest_target)
    return np.maximum(lengths, scaled)


def train_windows(setup: Setup) -> WindowLoader | StreamLoader:
    """Build the loader of the training windows of a fine-tuning run, which splits each window into
    micro-batches of samples with similar lengths.

    Args:
        setup: The configuration, accelerator and data of the run.

    Returns:
        A `StreamLoader` if the run streams its training rows, otherwise a `WindowLoader`.

    Raises:
        ConfigError: If the longest sample (of a stream, a sample of maximum length) exceeds the
            token limit of a micro-batch.
        DataError: If `drop_last_window` drops all samples.
    """
    config = setup.config
    data = setup.data
    layout = config.layout(setup.accelerator.num_processes)
    token_limit = config.max_tokens_per_micro_batch
    common_arguments: dict[str, Any] = {
        "accelerator": setup.accelerator,
        "per_device_batch_size": layout.micro_batch_size,
        "global_batch_size": layout.window_size,
        "seed": config.seed,
        "drop_last_window": config.drop_last_window,
        "num_workers": config.dataloader_num_workers,
        "canonical_micro_batch": config.same_bits,
    }
    if data.stream is None:
        return WindowLoader(
            data.samples("train"),
            data.collate,
            lengths=planned_lengths(data),
            max_tokens_per_micro_batch=token_limit,
            **common_arguments,
        )
    # The lengths in a stream are not known yet, only their maximum.
    check_limit(token_limit, config.sequence_length, "max_length's")
    if not token_limit:
        max_samples_per_forward = config.same_bits or layout.micro_batch_size
        token_limit = max_samples_per_forward * config.sequence_length
    return StreamLoader(
        data.stream,
        data.collate,
        shuffle_buffer_size=config.shuffle_buffer_size,
        length_of=itemgetter("length"),
        max_tokens_per_micro_batch=token_limit,
        **common_arguments,
    )


def padding_ratio(windows: WindowLoader | StreamLoader, lengths: np.ndarray) -> float:
    """Compute the padding ratio in the log of a fine-tuning run, (tokens + padding) / tokens, of
    its first training windows, from the lengths of the samples alone.

    Args:
        windows: The loader of the training windows. A stream is planned without shuffling.
        lengths: The lengths of the training samples, see `planned_lengths`.
    """
    window_size = windows.layout.window_size
    pads_to_window = windows.state.pad_to_window
    order = np.arange(len(lengths))
    if not isinstance(windows, StreamLoader):
        order = epoch_order(len(lengths), windows.seed, 0, windows.shuffle)
    num_windows = max(1, min(MAX_PLANNED_WINDOWS, MAX_PLANNED_SAMPLES // window_size))
    planned = lengths[order[: num_windows * window_size]]
    num_padded_tokens = 0
    for start in range(0, len(planned), window_size):
        of_window = planned[start : start + window_size]
        # The padded length of a micro-batch whose longest sample is this one.
        padded = np.full_like(of_window, of_window.max()) if pads_to_window else of_window
        micro_batches = windows.splitter.plan(of_window, pads_to_window)
        num_padded_tokens += padded_tokens(micro_batches, padded)
    return num_padded_tokens / max(int(planned.sum()), 1)
