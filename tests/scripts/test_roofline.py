"""The roofline's counts, against counts by hand and by torch's own counter of operations."""

from dataclasses import replace

import numpy as np
import pytest
import roofline
import torch
from common import Shape
from roofline import HF_GA, MODES, SHAPES, TRAINER, CountKernels, Device, Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

STORED = replace(TRAINER, keeps_scores=True)
SMALL = {
    kind: replace(shape, layers=1, width=32, heads=2, words=100) for kind, shape in SHAPES.items()
}


def counted(kind: str, mode: roofline.Mode, lengths: list[int]) -> CountKernels:
    with FakeTensorMode():
        return roofline.count(
            roofline.build(SMALL[kind], mode), SMALL[kind], mode, np.array(lengths)
        )


@pytest.mark.parametrize("kind", SMALL)
def test_operations_are_those_of_torchs_counter(kind):
    lengths = np.array([3, 7, 5])
    shape = SMALL[kind]
    with FakeTensorMode():
        model = roofline.build(shape, STORED)
        with FlopCounterMode(display=False) as counter:
            roofline.count(model, shape, STORED, lengths)
    beside = 0
    if kind == "bert":  # the pooler and two classes, for each of three samples
        beside = 3 * 6 * (shape.width**2 + 2 * shape.width)
    assert counter.get_total_flops() == roofline.flops(shape, STORED, lengths) + beside
    assert counter.get_total_flops() != roofline.flops(shape, HF_GA, lengths) + beside


def test_packed_operations_by_hand():
    """A layer of width 2 has 48 weights; of 3 and 1 tokens (9 + 1) / 2 pairs attend, causally; 2 + 0
    targets choose one of 10 words.
    """
    shape = Shape("gpt", layers=1, width=2, heads=1, words=10)
    by_hand = 6 * 48 * 4 + 12 * 2 * 5 + 6 * 10 * 2 * 2
    assert roofline.flops(shape, HF_GA, np.array([3, 1])) == by_hand
    padded = 6 * 48 * 6 + 12 * 2 * 18 + 6 * 10 * 2 * 6
    assert roofline.flops(shape, TRAINER, np.array([3, 1])) == padded


def test_kernels_and_bytes_by_hand():
    x = torch.zeros(4)
    table = torch.zeros(1000, 2)
    rows = torch.tensor([1, 5])
    with CountKernels() as counter:
        total = x + x  # reads two times 16 bytes, writes 16
        total.add_(x)  # the same
        total.view(2, 2).t()  # nothing
        table[rows]  # 16 bytes written, about as many read: not the table
        x[:1].expand(100) * 2.0  # reads 4 elements, as many as are there; writes 400 bytes
    assert counter.kernels == 4
    assert counter.num_bytes == 48 + 48 + 32 + 416


def test_compiled_kernels_and_bytes_by_hand():
    """16 floats are 64 bytes, a parameter of 16 in bf16 32 bytes."""
    x = torch.zeros(4, 4)
    weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    gradient = torch.zeros(4, 4)
    with CountKernels() as counter:
        counter.is_compiled = True
        y = (x + x).tanh() * x  # one kernel, of whose three results one is read: 64 + 64
        z = y @ x  # reads two, writes one: 192
        w = z.relu() + y  # one kernel: reads two, 128; nobody reads the result
        w.sum(0)  # alone: reads 64, which the kernel above must write, too; writes 16
        weight.bfloat16()  # alone: 64 + 32
        gradient.add_(z)  # alone: reads two, writes one
    assert counter.kernels == 6
    assert counter.num_bytes == 128 + 192 + 128 + (64 + 64 + 16) + 96 + 192


@pytest.mark.parametrize("kind", SMALL)
def test_rows_have_fewer_kernels_and_compute_their_tail(kind):
    shape = SMALL[kind]
    lengths = np.array([40, 30])
    rows = replace(HF_GA, has_rows=True)
    with FakeTensorMode():
        packed = roofline.count(roofline.build(shape, HF_GA), shape, HF_GA, lengths)
        compiled = roofline.count(roofline.build(shape, rows), shape, rows, lengths)
        longer = roofline.count(roofline.build(shape, rows), shape, rows, lengths, tail=58)
    assert compiled.kernels < 0.75 * packed.kernels
    assert compiled.num_bytes < 0.9 * packed.num_bytes
    assert longer.kernels == compiled.kernels
    assert longer.num_bytes > compiled.num_bytes
    of_tail = 72 * shape.width**2 * 58 * shape.layers
    assert (
        roofline.flops(shape, rows, lengths, 58) == roofline.flops(shape, HF_GA, lengths) + of_tail
    )


def bends(kind: str, mode: roofline.Mode) -> int:
    """The second difference of bytes over widths 64, 128, 192: 0 if bytes grow with the tokens."""
    sizes = [counted(kind, mode, [width] * 4).num_bytes for width in (64, 128, 192)]
    return sizes[2] - 2 * sizes[1] + sizes[0]


@pytest.mark.slow("counts the bytes of six models")
@pytest.mark.parametrize("kind", SMALL)
def test_only_stored_scores_grow_with_the_square_of_the_length(kind):
    assert bends(kind, replace(HF_GA, is_lean=False)) == 0
    # In the layer at least scores and weights of 2 heads and 4 samples, written and read in bf16.
    assert bends(kind, STORED) > (2 * 2 * 2) * 2 * 4 * (2 * 64**2)


@pytest.mark.parametrize("kind", SMALL)
def test_the_number_of_kernels_does_not_depend_on_the_length(kind):
    assert counted(kind, TRAINER, [4, 9]).kernels == counted(kind, TRAINER, [30] * 5).kernels
    assert counted(kind, STORED, [4, 9]).kernels > counted(kind, TRAINER, [4, 9]).kernels


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_each_sample_is_in_one_micro_batch(mode):
    lengths = np.random.default_rng(0).integers(2, 60, 64)
    batches = mode.batches(lengths, 32, 4)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(64))
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    random = sum(len(b) * lengths[b].max() for b in TRAINER.batches(lengths, 32, 4))
    assert padded == random if mode.batches is TRAINER.batches else padded < 0.9 * random


def test_the_largest_bound_is_the_prediction():
    device = Device("any", flops=1e12, bandwidth=1e9)
    computing = Work(flops=4e12, num_bytes=1e9, kernels=1e5, tokens=30, micro_batches=2)
    memory = Work(flops=1e12, num_bytes=2e9, kernels=1e6, tokens=20, micro_batches=1)
    first, second = roofline.table({"a": computing, "b": memory}, device, 20).splitlines()[2:]
    first, second = ([c.strip() for c in line.split("|")][1:-1] for line in (first, second))
    assert first[:6] == ["a", "1.50", "2.0", "4.0", "1", "100,000"]
    assert first[6:] == ["4000", "1000", "200 to 500", "4000", "1.00"]
    assert second[-3:] == ["2000 to 5000", "2000 to 5000", "2.00 to 0.80"]


@pytest.mark.slow("counts the kernels of all models")
def test_the_command(capsys, monkeypatch):
    samples = [{"input_ids": [5] * length} for length in range(4, 8)]
    monkeypatch.setitem(roofline.SAMPLES, "docstrings", lambda *_: samples)
    sizes = ["--num_samples", "4", "--window", "4", "--micro_batch", "2", "--layers", "1"]
    roofline.main(["--models", "bert", "--devices", "h200", *sizes])
    printed = capsys.readouterr().out
    assert "BERT-base on one H200 SXM" in printed
    assert "computed, not measured" in printed
    assert all(f"| {mode.name} |" in printed for mode in MODES)
