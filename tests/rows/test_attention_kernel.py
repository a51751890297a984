"""The attention kernels on a GPU or, elsewhere, in Triton's interpreter, against dense attention.

Oracle: attention written out in plain PyTorch in float64, dropped by the masks of `keep_mask`.
Tolerance: twice the error of the same code in the kernel's own precision. Negative controls: other
seeds, and a mask that is wrong in one element.
"""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from hf_ga.draws.dropout.masks import keep_mask
from hf_ga.draws.hashing import signed

pytest.importorskip("triton", reason="the kernels need Triton")
from hf_ga.rows.attention_kernel import Attention
from hf_ga.rows.options import AttentionOptions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SITE = 2**64 - 12345
FLOOR = 1 / 16  # of one rounding, relative to the norm


@dataclass(frozen=True)
class Case:
    """A call of `Attention.apply`."""

    lengths: tuple[int, ...]
    heads: int = 2
    key_heads: int = 2
    size: int = 16
    drop_probability: float = 0.1
    is_causal: bool = True
    window: int | None = None

    @property
    def options(self):
        return AttentionOptions(self.drop_probability, self.size**-0.5, self.is_causal, self.window)


CASES = {
    "bidirectional": Case((1, 2, 17, 64, 65, 150), heads=1, key_heads=1, is_causal=False),
    "causal": Case((160, 1, 70), heads=1, key_heads=1, size=64),
    "grouped": Case((9, 70), heads=6, key_heads=2),
    "window": Case((150, 20, 1), window=40),
    "window of a block": Case((150,), heads=1, key_heads=1, window=64, drop_probability=0.0),
    "no dropout": Case((70, 45), drop_probability=0.0),
    "size 80": Case((50, 21), heads=2, key_heads=1, size=80),
    "size 8": Case((30, 5), size=8, is_causal=False, drop_probability=0.5),
}
IN_HALF_PRECISION = {"grouped": torch.float16, "size 80": torch.bfloat16}
PRECISIONS = [(name, IN_HALF_PRECISION.get(name, torch.float32)) for name in CASES]


def inputs(case, dtype=torch.float32):
    """(q, k, v), gradient of the output, keys of the samples."""
    num_tokens = sum(case.lengths)
    shapes = [(num_tokens, heads, case.size) for heads in (case.heads, *[case.key_heads] * 2)]
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    gradient = torch.randn(shapes[0], device=DEVICE).to(dtype)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(case.lengths),), device=DEVICE)
    return tensors, gradient, keys


def masks(case, keys):
    """The kept weights of all samples: (samples, heads, longest, longest)."""
    longest = max(case.lengths)
    shape = (len(case.lengths), case.heads, longest, longest)
    return keep_mask(keys, SITE, shape, 0, case.drop_probability)


def dense(case, kept, q, k, v):
    """Sample by sample, as models write attention."""
    group = case.heads // case.key_heads
    outputs = []
    start = 0
    for index, length in enumerate(case.lengths):
        rows = slice(start, start + length)
        query = q[rows].transpose(0, 1)
        key = k[rows].transpose(0, 1).repeat_interleave(group, 0)
        value = v[rows].transpose(0, 1).repeat_interleave(group, 0)
        scores = query @ key.mT * case.size**-0.5
        hidden = torch.zeros(length, length, dtype=torch.bool, device=q.device)
        positions = torch.arange(length, device=q.device)
        if case.is_causal:
            hidden |= positions > positions[:, None]
        if case.window is not None:
            hidden |= positions <= positions[:, None] - case.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if case.drop_probability:
            dropped = ~kept[index, :, :length, :length]
            weights = weights.masked_fill(dropped, 0.0) / (1 - case.drop_probability)
        outputs.append((weights @ value).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def kernel(case, keys, q, k, v):
    starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=DEVICE)
    seeds = keys ^ signed(SITE) if case.drop_probability else None
    return Attention.apply(q, k, v, starts, max(case.lengths), seeds, case.options)


def with_gradients(function, tensors, gradient, dtype=None):
    """[output, gradients of q, k and v], computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, gradient.to(output.dtype))
    return [output.detach(), *gradients]


def allowed_errors(usual, oracle):
    """Twice the errors of what is usual, in the same precision."""
    return [
        2 * float((x.double() - truth).norm())
        + FLOOR * torch.finfo(x.dtype).eps * float(truth.norm())
        for x, truth in zip(usual, oracle, strict=True)
    ]


def assert_near(found, oracle, allowed):
    """Output and gradients are within the allowed errors."""
    for name, x, truth, most in zip("oqkv", found, oracle, allowed, strict=True):
        error = float((x.double() - truth).norm())
        assert error <= most, f"{name}: {error:.2e} > {most:.2e}"


def all_three(case, dtype):
    """By the kernel, by dense attention in the same precision and in float64; of the latter, also
    with a mask that is wrong in one element.
    """
    tensors, gradient, keys = inputs(case, dtype)
    kept = masks(case, keys)
    wrong = kept.clone()
    row = case.lengths[0] // 2
    wrong[0, 0, row, row] ^= True
    found = with_gradients(lambda *x: kernel(case, keys, *x), tensors, gradient, dtype)
    usual = with_gradients(lambda *x: dense(case, kept, *x), tensors, gradient, dtype)
    oracle, wrong_oracle = (
        with_gradients(lambda *x, m=mask: dense(case, m, *x), tensors, gradient, torch.float64)
        for mask in (kept, wrong)
    )
    return found, usual, oracle, wrong_oracle


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS, ids=str)
def test_output_and_gradients_are_those_of_dense_attention(name, dtype):
    found, usual, oracle, wrong_oracle = all_three(CASES[name], dtype)
    allowed = allowed_errors(usual, oracle)
    assert_near(found, oracle, allowed)
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(found, usual, strict=True))
    if CASES[name].drop_probability and dtype == torch.float32:
        with pytest.raises(AssertionError, match="o: "):
            assert_near(found, wrong_oracle, allowed)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_are_those_of_padded_samples_bit_for_bit(is_causal):
    """Queries of zeros weigh all keys alike, and values that are unit vectors show which of 64 keys
    are kept. So do unit gradients, of 64 queries, in the gradient of the values.
    """
    size = 64
    heads = 2 if is_causal else 1
    lengths = (1, 70, 3)  # two blocks of 64; three: the test above
    options = {"size": size, "heads": heads, "key_heads": heads}
    case = Case(lengths, drop_probability=0.3, is_causal=is_causal, **options)
    (q, k, _), _, keys = inputs(case)
    q.zero_()
    kept = masks(case, keys)
    if is_causal:
        kept &= torch.ones_like(kept).tril()
    starts = [0, *accumulate(case.lengths)]
    for first in range(0, max(case.lengths), size):
        units = torch.zeros_like(q)
        for start, length in zip(starts, case.lengths, strict=False):
            count = max(0, min(size, length - first))
            units[start + first : start + first + count] = torch.eye(size)[:count, None]
        v = units.clone().requires_grad_()
        output = kernel(case, keys, q, k, v)
        (v_gradient,) = torch.autograd.grad(output, v, units)
        for index, (start, length) in enumerate(zip(starts, case.lengths, strict=False)):
            count = max(0, min(size, length - first))
            # (queries, heads, keys) and (keys, heads, queries)
            drawn = output[start : start + length, :, :count] > 0
            drawn_again = v_gradient[start : start + length, :, :count] > 0
            expected = kept[index, :, :length, :length]
            assert torch.equal(drawn.transpose(0, 1), expected[:, :, first : first + count])
            assert torch.equal(drawn_again.permute(1, 2, 0), expected[:, first : first + count, :])


def test_other_seeds_draw_other_masks_and_the_same_ones_the_same_bits():
    case = Case((30, 9), heads=4)
    tensors, gradient, keys = inputs(case)

    def compute(keys):
        return with_gradients(lambda *x: kernel(case, keys, *x), tensors, gradient)

    found = compute(keys)
    for x, same, other in zip(found, compute(keys), compute(keys ^ 1), strict=True):
        assert torch.equal(x, same)
        assert (x - other).norm() > 0.1 * x.norm()


def test_a_sample_does_not_depend_on_those_beside_it():
    case = Case((40, 75, 9))
    tensors, _, keys = inputs(case)
    together = kernel(case, keys, *tensors)
    alone = Case((75,))
    part = kernel(alone, keys[1:2], *(x[40:115] for x in tensors))
    assert torch.equal(together[40:115], part)


def test_views_of_one_projection_are_read_where_they_are():
    case = Case((40, 9))
    num_tokens = sum(case.lengths)
    tensors, gradient, keys = inputs(case)
    joined = torch.stack(tensors, dim=1).view(num_tokens, 3 * case.heads * case.size)
    views = [x.view(num_tokens, case.heads, case.size) for x in joined.chunk(3, dim=1)]
    assert not views[1].is_contiguous()
    found, expected = (
        with_gradients(lambda *x: kernel(case, keys, *x), given, gradient)
        for given in (views, tensors)
    )
    assert all(map(torch.equal, found, expected))
