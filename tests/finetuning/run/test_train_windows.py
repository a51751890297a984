"""From prepared data to planned windows: limits of tokens, what is said of the plans, runs that are
the same whatever the limit.
"""

from types import SimpleNamespace

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from runs import train

import hf_ga
from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.train_windows import padding_ratio, planned_lengths
from hf_ga.order.length_plan import CPU_OVERHEAD, ByLength


def loader(of, **options):
    samples = [{"input_ids": [1] * n, "labels": [1] * n} for n in of]
    options = {"per_device_batch_size": 4, "global_batch_size": 32, "lengths": of, **options}
    return hf_ga.WindowLoader(samples, h.pad_right, accelerator=Accelerator(cpu=True), **options)


def first_of_three(kind=DistributedType.MULTI_CPU):
    more = {
        "gradient_accumulation_steps": 1,
        "distributed_type": kind,
        "device": torch.device("cpu"),
    }
    return SimpleNamespace(num_processes=3, process_index=0, **more)


def tokens_of(windows):
    """[[padded tokens of each micro-batch] of each window], from the tensors."""
    return [[m.batch["input_ids"].numel() for m in window.micro_batches] for window in windows]


LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 100), 2, 120).astype(int)


def test_windows_are_planned_by_their_lengths():
    """No more memory than four of the longest, every sample once, little padding. Control: by
    number, twice the tokens and more.
    """
    windows = list(loader(LENGTHS))
    tokens = tokens_of(windows)
    assert max(map(max, tokens)) <= 4 * max(LENGTHS)
    assert sorted(i for w in windows for m in w.micro_batches for i in m.sample_ids) == list(
        range(100)
    )
    by_number = sum(map(sum, tokens_of(loader(LENGTHS, planner=h.by_number(4)))))
    assert sum(map(sum, tokens)) < 0.75 * by_number
    assert by_number > 2 * LENGTHS.sum()
    assert max(map(max, tokens_of(loader(LENGTHS, max_tokens_per_micro_batch=150)))) <= 150


def test_a_window_that_must_have_one_width_is_planned_anew():
    """As when a trial asks for it after windows were planned. Control: the same micro-batches,
    padded, take more than the limit.
    """
    limit = 4 * max(LENGTHS)
    for window in loader(LENGTHS):
        padded = window.padded_to_window()
        widths = {m.batch["input_ids"].shape[1] for m in padded.micro_batches}
        assert len(widths) == 1
        assert max(tokens_of([padded])[0]) <= limit
        assert sorted(i for m in padded.micro_batches for i in m.sample_ids) == sorted(
            window.sample_ids
        )
        assert max(map(len, (m.sample_ids for m in window.micro_batches))) * widths.pop() > (
            limit if window.num_samples > 4 else 0
        )
    one = window.split([np.array([0, 1]), np.array([2, 3])])  # a split of one's own is kept
    assert [len(m) for m in one.padded_to_window().micro_batches] == [2, 2]


def test_the_loader_refuses():
    for options, message in [
        (
            {"max_tokens_per_micro_batch": 119},
            "119 is less than the longest sample's 120 tokens.* Allow at least 120",
        ),
        (
            {"max_tokens_per_micro_batch": 200, "planner": lambda *_: []},
            "give lengths .* and no custom planner",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            loader(np.append(LENGTHS, 120), **options)


@pytest.mark.parametrize("sharded", [True, False])
def test_under_fsdp_processes_wait_in_every_forward(sharded):
    """So plans are those for that: one micro-batch more or less at most, as whoever has fewer
    repeats one.
    """
    accelerator = first_of_three(DistributedType.FSDP) if sharded else first_of_three()
    windows = hf_ga.WindowLoader(
        [{}] * 100, dict, accelerator=accelerator, lengths=LENGTHS, global_batch_size=50
    )
    found = windows.splitter.plan(LENGTHS[:50], False)
    expected = ByLength(8, 8 * max(LENGTHS), CPU_OVERHEAD, sharded)(LENGTHS[:50], 3)
    assert [[m.tolist() for m in share] for share in found] == [
        [m.tolist() for m in share] for share in expected
    ]
    numbers = [len(share) for share in found]
    assert max(numbers) - min(numbers) <= 1 or not sharded


def prepared(lengths, targets=None, labels="tokens", stream=None):
    columns = {"length": lengths, "num_targets": targets}
    return SimpleNamespace(
        splits={"train": columns}, task=SimpleNamespace(labels=labels), stream=stream
    )


def test_targets_count_as_much_as_sources():
    """The longest target stands for the longest source: a limit on one is one on both."""
    data = prepared([100, 10, 50, 10], [5, 20, 10, 0], labels="target")
    assert planned_lengths(data).tolist() == [
        100,
        100,
        50,
        10,
    ]  # 5 of 20 is 25 of 100; 20 of 20 is 100; 10 of 20 is 50
    assert planned_lengths(prepared([3, 4], [1, 9])).tolist() == [3, 4]
    sources, targets = np.random.default_rng(0).integers(1, 200, (2, 500))
    targets = targets // 7 + 1
    for m in loader(
        planned_lengths(prepared(sources, targets, "target")), global_batch_size=100
    ).requests():
        for offsets in m.micro_batches:
            ids = m.sample_ids[offsets]
            assert len(ids) * sources[ids].max() <= 4 * sources.max()
            assert len(ids) * targets[ids].max() <= 4 * targets.max() + len(
                ids
            )  # rounding: below one token a sample


@pytest.mark.parametrize("pad_to_window", [False, True])
def test_padding_ratio(pad_to_window):
    """Against the tensors of the first epoch."""
    padded = sum(map(sum, tokens_of(loader(LENGTHS, pad_to_window=pad_to_window))))
    assert padding_ratio(loader(LENGTHS, pad_to_window=pad_to_window), LENGTHS) == pytest.approx(
        padded / LENGTHS.sum()
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "23 is less than the longest sample's 24"),
        ({"streaming": True}, "23 is less than max_length's 24"),
    ],
)
def test_a_run_refuses_a_limit_below_its_longest_sample(
    place, tmp_path, more, message, monkeypatch
):
    """Before a model is built."""
    monkeypatch.setattr("hf_ga.finetuning.run.build.build_model", None)
    with pytest.raises(
        ConfigError, match=f"max_tokens_per_micro_batch {message} tokens.* Allow at least 24"
    ):
        train(place, tmp_path / "out", max_tokens_per_micro_batch=23, **more)
