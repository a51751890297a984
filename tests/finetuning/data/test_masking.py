"""Masks of masked LMs: BERT's rates, and one mask for a sample, whatever stands beside it, in every
split of a window.
"""

from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from test_data import SPECIAL as TOKENS
from test_data import letter_tokenizer

from hf_ga import ConfigError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.encoding.masking import KeyedMasks, mask_tokens
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.scores.evaluation import evaluation_windows
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.order.plan import plan_by_sizes

PAD, EOS, MASK, CLS, SEP = 0, 1, 15, 13, 14  # of `letter_tokenizer`
SPECIAL = {PAD, EOS, 2, CLS, SEP, MASK}
SETTINGS = {"special_ids": (0, 1), "mask_token_id": 2, "vocab_size": 1000, "probability": 0.15}
LAYOUTS = {"1x16": [16], "4x4": [4], "uneven": [7, 1, 5, 3], "16x1": [1]}


def samples_of(count, seed=3):
    rng = np.random.default_rng(seed)
    return [
        {"input_ids": [CLS, *rng.integers(3, 13, rng.integers(4, 40)).tolist(), SEP]}
        for _ in range(count)
    ]


def collate_masked(probability=0.4, tokenizer=None):
    options = DataOptions(task="masked-lm", mlm_probability=probability)
    tokenizer = tokenizer or letter_tokenizer(**TOKENS)
    return PreparedData(options, TASKS["masked-lm"], {}, tokenizer, {}, "").collate


def loader(samples, sizes=(16,), seed=0, **more):
    return WindowLoader(
        KeyedMasks(samples),
        collate_masked(),
        accelerator=Accelerator(cpu=True),
        per_device_batch_size=max(sizes),
        global_batch_size=16,
        seed=seed,
        planner=partial(plan_by_sizes, sizes=list(sizes)),
        lengths=[len(sample["input_ids"]) for sample in samples],
        **more,
    )


def seen_in(windows) -> dict[int, tuple[int, list[int], list[int]]]:
    """Position -> (sample, its ids as the model sees them, its labels), without padding."""
    seen = {}
    for window in windows:
        for micro_batch in window.micro_batches:
            batch = micro_batch.batch
            for row, (position, sample_id) in enumerate(
                zip(micro_batch.positions, micro_batch.sample_ids, strict=True)
            ):
                kept = batch["attention_mask"][row].bool()
                assert (batch["labels"][row][~kept] == h.IGNORED).all()
                assert (batch["input_ids"][row][~kept] == PAD).all()
                seen[int(position)] = (
                    int(sample_id),
                    batch["input_ids"][row][kept].tolist(),
                    batch["labels"][row][kept].tolist(),
                )
    return seen


def test_special_and_padding_tokens_are_never_targets():
    samples = [
        {"input_ids": [CLS, EOS, 2, MASK, 5, SEP], "mask_key": 8},
        {"input_ids": [CLS, 3], "mask_key": 9},
    ]
    batch = collate_masked(probability=1 - 1e-12)(samples)
    assert batch["labels"].tolist() == [[-100] * 4 + [5, -100], [-100, 3] + [-100] * 4]
    assert batch["input_ids"][0, [0, 1, 2, 3, 5]].tolist() == [CLS, EOS, 2, MASK, SEP]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]


def test_no_mask_token_is_refused():
    with pytest.raises(ConfigError, match="mask token"):
        collate_masked(tokenizer=letter_tokenizer())


SIZE_OF_VOCABULARY = 16
M = 2**64


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % M
    return x ^ (x >> 31)


def mask_key(seed: int, epoch: int, position: int) -> int:
    """What `KeyedMasks` draws in a window: from numpy's generator, seeded by seed, epoch,
    position.
    """
    key = 0
    for part in (2, seed, epoch, position):
        key = mix(((key ^ part) + 0x9E3779B97F4A7C15) % M)
    return int(np.random.RandomState(key % 2**32).randint(0, 2**63 - 1, dtype=np.int64))


def masked_by_hand(
    ids, key, vocab_size=SIZE_OF_VOCABULARY, probability=0.4, mask=MASK, special=SPECIAL
):
    inputs = []
    labels = []
    for column, token in enumerate(ids):
        chosen, fate, other = (
            mix((mix((key + 0x9E3779B97F4A7C15) % M) + mix(4 * column + lane)) % M)
            for lane in range(3)
        )
        is_target = chosen / M < probability and token not in special
        labels.append(token if is_target else h.IGNORED)
        if not is_target or fate / M >= 0.9:
            inputs.append(token)
        else:
            inputs.append(mask if fate / M < 0.8 else other % vocab_size)
    return inputs, labels


def masked(ids, keys, **settings):
    found = mask_tokens(torch.from_numpy(ids), torch.from_numpy(keys), **settings)
    return [tensor.numpy() for tensor in found]


def test_one_call_against_plain_python():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, (30, 50))
    keys = rng.integers(0, 2**63 - 1, 30)
    keys[:3] = 0, 1, 2**63 - 2
    before = ids.copy(), keys.copy()
    inputs, labels = masked(ids, keys, **SETTINGS)
    assert inputs.dtype == labels.dtype == np.int64
    assert np.array_equal(ids, before[0])
    assert np.array_equal(keys, before[1])
    for row in range(30):
        by_hand = masked_by_hand(
            ids[row].tolist(), int(keys[row]), 1000, 0.15, mask=2, special=(0, 1)
        )
        assert by_hand == (inputs[row].tolist(), labels[row].tolist())


def test_probability_1_and_0_and_nothing_to_mask():
    ids = np.random.default_rng(0).integers(0, 20, (200, 40))
    everything = masked(ids, np.arange(200), **{**SETTINGS, "probability": 1.0})[1]
    assert np.array_equal(everything, np.where(ids > 1, ids, h.IGNORED))
    assert np.array_equal(
        masked(ids, np.arange(200), **{**SETTINGS, "probability": 1.0, "special_ids": ()})[1],
        ids,
    )
    assert (masked(ids, np.arange(200), **{**SETTINGS, "probability": 0.0})[1] == h.IGNORED).all()
    for shape in ((0, 5), (3, 0), (0, 0)):
        found = masked(np.zeros(shape, np.int64), np.zeros(shape[0], np.int64), **SETTINGS)
        assert [array.shape for array in found] == [shape, shape]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        *((layout, {}) for layout in LAYOUTS),
        ("uneven", {"num_workers": 2}),
        ("4x4", {"pad_to_window": True}),
    ],
    ids=str,
)
def test_masks_of_a_window_are_those_of_seed_epoch_position(layout, more):
    """In every split of every window, whoever collates it, from a list and from a dataset; the rest
    is as it was.
    """
    samples = samples_of(41)
    windows = loader(
        Dataset.from_list(samples) if layout == "4x4" else samples, LAYOUTS[layout], seed=5, **more
    )
    for epoch in range(2):  # the second begins by itself
        found = seen_in(windows)
        assert sorted(found) == list(range(41))
        for position, (sample, *masked) in found.items():
            assert masked_by_hand(
                samples[sample]["input_ids"], mask_key(5, epoch, position)
            ) == tuple(masked)


def test_evaluation_windows_keep_their_masks_whatever_their_batch_size():
    samples = samples_of(41)

    def windows_of(batch_size, pad_to_window=False):
        lengths = [len(s["input_ids"]) for s in samples]
        accelerator = Accelerator(cpu=True)
        return evaluation_windows(
            KeyedMasks(samples),
            collate_masked(),
            accelerator=accelerator,
            batch_size=batch_size,
            lengths=lengths,
            pad_to_window=pad_to_window,
        )

    reference = {
        i: (i, *masked_by_hand(s["input_ids"], mask_key(0, 0, i))) for i, s in enumerate(samples)
    }
    windows = windows_of(8)
    assert seen_in(windows) == reference
    assert seen_in(windows) != reference  # the control: it is `set_epoch(0)` that keeps them
    np.random.seed(1)  # whatever training did to the generators
    for again in (windows, windows_of(1), windows_of(5), windows_of(41, pad_to_window=True)):
        again.set_epoch(0)
        assert seen_in(again) == reference


def test_shares_within_four_sigma():
    """Of keys in steps of 4, as columns are. Ids outside of the vocabulary of the random tokens:
    hidden, kept and random tokens cannot be confused.
    """
    size = 97
    keys = np.arange(4000) * 4
    ids = np.full((4000, 128), 97)
    inputs, labels = masked(ids, keys, **{**SETTINGS, "mask_token_id": 98, "vocab_size": size})
    target = labels != h.IGNORED
    others = inputs[target & (inputs < size)]
    number = int(target.sum())
    counts = [(number, ids.size, 0.15), (int((inputs[target] == 98).sum()), number, 0.8)]
    counts += [(int((inputs[target] == 97).sum()), number, 0.1), (len(others), number, 0.1)]
    for count, total, share in counts:
        assert abs(count - total * share) < 4 * (total * share * (1 - share)) ** 0.5
    for axis, count in (
        (0, len(keys)),
        (1, 128),
    ):  # of each column and each sample the variance of a binomial
        z = (target.sum(axis) - count * 0.15) / (count * 0.15 * 0.85) ** 0.5
        assert np.abs(z).max() < 5
        assert abs(z.var() - 1) < 4 * (2 / len(z)) ** 0.5
