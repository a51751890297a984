"""Masks of masked LMs: BERT's rates, and one mask for a sample, whatever stands beside it, in every
split of a window.
"""

from functools import partial

import helpers as h
import numpy as np
import pytest
from accelerate import Accelerator
from datasets import Dataset
from test_data import SPECIAL as TOKENS
from test_data import letter_tokenizer
from transformers import DataCollatorForLanguageModeling

from hf_ga import ConfigError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.scores.evaluation import evaluation_windows
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.order.plan import plan_by_sizes

PAD, EOS, MASK, CLS, SEP = 0, 1, 15, 13, 14  # of `letter_tokenizer`
SPECIAL = {PAD, EOS, 2, CLS, SEP, MASK}
LAYOUTS = {"1x16": [16], "4x4": [4], "uneven": [7, 1, 5, 3], "16x1": [1]}


def samples_of(count, seed=3):
    rng = np.random.default_rng(seed)
    return [
        {"input_ids": [CLS, *rng.integers(3, 13, rng.integers(4, 40)).tolist(), SEP]}
        for _ in range(count)
    ]


def prepared(samples, probability=0.4, tokenizer=None):
    options = DataOptions(task="masked-lm", mlm_probability=probability)
    tokenizer = tokenizer or letter_tokenizer(**TOKENS)
    rows = samples if isinstance(samples, Dataset) else Dataset.from_list(samples)
    return PreparedData(options, TASKS["masked-lm"], {"train": rows}, tokenizer, {}, "")


def masked_samples(samples, probability=0.4):
    return prepared(samples, probability).samples("train")


def loader(samples, sizes=(16,), seed=0, **more):
    return WindowLoader(
        masked_samples(samples),
        prepared(samples).collate,
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
    samples = [{"input_ids": [CLS, EOS, 2, MASK, 5, SEP]}, {"input_ids": [CLS, 3]}]
    data = prepared(samples, probability=1 - 1e-12)
    masked = data.samples("train")
    batch = data.collate([masked[0], masked[1]])
    assert batch["labels"].tolist() == [[-100] * 4 + [5, -100], [-100, 3] + [-100] * 4]
    assert batch["input_ids"][0, [0, 1, 2, 3, 5]].tolist() == [CLS, EOS, 2, MASK, SEP]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]


def test_no_mask_token_is_refused():
    with pytest.raises(ConfigError, match="mask token"):
        prepared([{"input_ids": [5]}], tokenizer=letter_tokenizer()).samples("train")


M = 2**64


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % M
    return x ^ (x >> 31)


def masked_alone(ids, seed: int, epoch: int, position: int):
    """By transformers' collator for a batch of this sample alone, with numpy's generator seeded by
    seed, epoch and position.
    """
    key = 0
    for part in (2, seed, epoch, position):
        key = mix(((key ^ part) + 0x9E3779B97F4A7C15) % M)
    np.random.seed(key % 2**32)
    collator = DataCollatorForLanguageModeling(
        letter_tokenizer(**TOKENS), mlm_probability=0.4, return_tensors="np"
    )
    batch = collator([{"input_ids": ids}])
    return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


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
            alone = masked_alone(samples[sample]["input_ids"], 5, epoch, position)
            assert alone == tuple(masked)


def test_evaluation_windows_keep_their_masks_whatever_their_batch_size():
    samples = samples_of(41)

    def windows_of(batch_size, pad_to_window=False):
        lengths = [len(s["input_ids"]) for s in samples]
        accelerator = Accelerator(cpu=True)
        return evaluation_windows(
            masked_samples(samples),
            prepared(samples).collate,
            accelerator=accelerator,
            batch_size=batch_size,
            lengths=lengths,
            pad_to_window=pad_to_window,
        )

    reference = {i: (i, *masked_alone(s["input_ids"], 0, 0, i)) for i, s in enumerate(samples)}
    windows = windows_of(8)
    assert seen_in(windows) == reference
    assert seen_in(windows) != reference  # the control: it is `set_epoch(0)` that keeps them
    np.random.seed(1)  # whatever training did to the generators
    for again in (windows, windows_of(1), windows_of(5), windows_of(41, pad_to_window=True)):
        again.set_epoch(0)
        assert seen_in(again) == reference


def test_shares_within_four_sigma():
    """The mask token, the token itself and others are 80, 10 and 10 % of the targets. A random token
    is the token itself once in the size of the vocabulary.
    """
    size = len(letter_tokenizer(**TOKENS))
    samples = masked_samples([{"input_ids": [5] * 128}] * 4000, probability=0.15)
    np.random.seed(0)
    read = [samples[i] for i in range(4000)]
    inputs = np.array([sample["input_ids"] for sample in read])
    target = np.array([sample["labels"] for sample in read]) != h.IGNORED
    assert (inputs[~target] == 5).all()
    number = int(target.sum())
    counts = [
        (number, inputs.size, 0.15),
        (int((inputs[target] == MASK).sum()), number, 0.8 + 0.1 / size),
        (int((inputs[target] == 5).sum()), number, 0.1 + 0.1 / size),
    ]
    for count, total, share in counts:
        assert abs(count - total * share) < 4 * (total * share * (1 - share)) ** 0.5
    # of each column and each sample the variance of a binomial
    for axis, count in ((0, 4000), (1, 128)):
        z = (target.sum(axis) - count * 0.15) / (count * 0.15 * 0.85) ** 0.5
        assert np.abs(z).max() < 5
        assert abs(z.var() - 1) < 4 * (2 / len(z)) ** 0.5
