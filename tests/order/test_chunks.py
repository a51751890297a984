"""Same bits, the arithmetic: for any number of ranks, the sum along the tree of a window's chunks
is the same number.

tests/promises/test_same_bits.py trains on several processes.
"""

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from steps import backward_window
from windows import one_window, window_gradient

from hf_ga.errors import ConfigError, OutOfMemory
from hf_ga.order.chunks import ChunkTree, TreeSum
from hf_ga.parallel.backend import ALIGNMENT


def sum_over(chunks: ChunkTree, values: np.ndarray) -> np.float32:
    """As the ranks compute it: each its own roots, then all roots in order."""
    whole = TreeSum(chunks, np.add)
    for run in chunks.chunks_per_rank:
        own = TreeSum(chunks, np.add)
        for chunk in run:
            own.add((chunk, chunk + 1), values[chunk])
        for node, value in own.nodes:
            whole.add(node, value)
    (((first, end), total),) = whole.nodes
    assert (first, end) == (0, len(values))
    return total


@pytest.mark.parametrize("num_chunks", range(1, 65))
def test_any_number_of_ranks_gives_the_same_bits(num_chunks):
    generator = np.random.default_rng(num_chunks)
    costs = tuple(generator.integers(1, 100, num_chunks).tolist())
    values = (
        generator.standard_normal((num_chunks, 64))
        * 10.0 ** generator.integers(-3, 4, (num_chunks, 64))
    ).astype(np.float32)
    by_ranks = [sum_over(ChunkTree(costs, ranks), values).tobytes() for ranks in range(1, 10)]
    assert set(by_ranks) == {by_ranks[0]}
    if num_chunks > 3:  # the values' sums do depend on the order
        halves = [
            np.add.reduce([np.add.reduce(part) for part in np.split(values, [cut])])
            for cut in range(1, num_chunks)
        ]
        assert len({total.tobytes() for total in halves}) > 1


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=64), st.integers(1, 9))
def test_chunks_are_shared_out_evenly_in_few_roots(costs, num_processes):
    chunks = ChunkTree(tuple(costs), num_processes)
    assert [chunk for run in chunks.chunks_per_rank for chunk in run] == list(range(len(costs)))
    busiest = max(sum(costs[run.start : run.stop]) for run in chunks.chunks_per_rank)
    assert busiest <= sum(costs) / num_processes + max(costs)
    for rank, run in enumerate(chunks.chunks_per_rank):
        roots = chunks.subtrees_per_rank[rank]
        assert [chunk for start, stop in roots for chunk in range(start, stop)] == list(run)
        assert (
            num_processes > 2 or len(roots) <= 1
        )  # so two ranks send no more than in an all-reduce


def chunked_window(samples, **more):
    options = {
        "planner": None,
        "per_device_batch_size": 4,
        "canonical_micro_batch": 2,
        "shuffle": False,
    }
    return one_window(samples, 4, **{**options, **more})


def test_a_window_without_targets_is_skipped():
    """ChunkTree without targets in other windows: test_step.py."""
    samples = h.plain_samples(12)
    model = h.plain_tagger()
    window = chunked_window([h.without_targets(s) for s in samples])
    assert window_gradient(model, window)[1].skipped


def test_what_cannot_have_the_same_bits_is_refused(monkeypatch):
    samples = h.weighted_samples(8)
    with pytest.raises(
        ConfigError,
        match="at most the per-device batch size 4, as one forward computes a chunk of that many samples, got 5",
    ):
        chunked_window(samples, **{"canonical_micro_batch": 5})
    window = chunked_window(samples)
    model = h.plain_tagger()
    accelerator = Accelerator()
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.FSDP)
    with pytest.raises(ConfigError, match="FSDP does not support same_bits"):
        backward_window(accelerator, model, window, loss_fn=h.weighted_token_loss)


def test_weights_begin_where_torch_begins_tensors():
    """MKL's products may depend on it, and safetensors lays weights anywhere."""
    model = h.plain_tagger()
    window = chunked_window(h.plain_samples(8))
    for parameter in model.parameters():
        parameter.data = (
            torch.empty(parameter.numel() + 1)[1:].view(parameter.shape).copy_(parameter.data)
        )
    assert any(parameter.data_ptr() % ALIGNMENT for parameter in model.parameters())
    window_gradient(model, window)
    assert not any(parameter.data_ptr() % ALIGNMENT for parameter in model.parameters())


def test_a_chunk_that_does_not_fit_is_never_cut():
    window = chunked_window(h.plain_samples(8), planner=h.by_number(2))
    model = h.plain_tagger()
    window.state.max_elements = 1  # of an earlier run without chunks

    def fail(module, args, kwargs):
        raise torch.OutOfMemoryError("on purpose")

    with (
        model.register_forward_pre_hook(fail, with_kwargs=True),
        pytest.raises(OutOfMemory, match="a chunk of same_bits"),
    ):
        backward_window(Accelerator(), model, window)
