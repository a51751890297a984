"""Collectives with gradients: what torch has, on two gloo processes against one process, as the ground for whole-batch losses.

torch's own suffice, so nothing is ours: `torch.distributed._functional_collectives.all_gather_single_autograd` (before torch 2.13
`all_gather_tensor_autograd`; `torch.distributed.nn.functional` gives the same and is deprecated since 2.13) and `all_reduce`.
Three rules, all tested here:
- The gradient of all_gather is summed over processes, that of all_reduce is itself all-reduced: both give the gradient of the sum
  of all processes' losses. Where each process's loss is its own samples' share of the window's, and gradients are summed, as in
  hf_ga, there is no factor. Where all compute the same loss from an all-reduced value, the gradient is W times too large.
- all_gather takes equal shapes, and windows are not: pad to the largest share, cut off after gathering.
- backward is a collective, too: a process without samples calls it as the others do.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _functional_collectives as collectives
from torch.distributed.nn.functional import all_gather as older_gather
from torch.nn.functional import cross_entropy

WORLD, TEMPERATURE = 2, 0.5
SPLITS = {"even": (3, 3), "ragged": (4, 2), "one has nothing": (6, 0)}
gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def problem():
    """Rows of queries and keys, and the two weights that map them; float64."""
    draw = np.random.default_rng(0).standard_normal
    return [torch.tensor(draw(shape)) for shape in ((6, 5), (6, 5), (5, 4), (5, 4))]


def contrast(queries, keys, first, total):
    """These queries' share of the softmax loss over all keys: the key of row i is the right one for query i."""
    targets = torch.arange(first, first + len(queries))
    return cross_entropy(queries @ keys.T / TEMPERATURE, targets, reduction="sum") / total


def gather_ragged(rows, counts, older=False):
    """Rows of all processes in order, of which this one's are given, with gradients."""
    padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), rows.shape[1])])
    blocks = older_gather(padded) if older else gather(padded, 0, dist.group.WORLD).chunk(len(counts))
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


def gather_without_gradient(rows, counts, own):
    """The plain collective. `own`: with this process's rows put back in, as many a script does."""
    padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), rows.shape[1])]).detach()
    blocks = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(blocks, padded)
    blocks = [block[:count] for block, count in zip(blocks, counts, strict=True)]
    return torch.cat([rows if own and i == dist.get_rank() else block for i, block in enumerate(blocks)])


def sum_of_gradients(loss, weights):
    """The loss and the gradients, summed over the processes; with None where a weight is not reached."""
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient)
    return loss.item(), [None if gradient is None else gradient.numpy() for gradient in gradients]


def compute(counts, rank):
    """All ways to compute the losses in this process, which has `counts[rank]` of the rows."""
    x, y, a, b = problem()
    weights = [a.requires_grad_(), b.requires_grad_()]
    first, total = sum(counts[:rank]), sum(counts)
    own = slice(first, first + counts[rank])
    queries, keys = x[own] @ a, y[own] @ b
    everywhere = collectives.all_reduce(queries.sum(0), "sum", dist.group.WORLD) / total
    share = max(counts[rank], 1)
    losses = {
        "gathered": contrast(queries, gather_ragged(keys, counts), first, total),
        "gathered, older name": contrast(queries, gather_ragged(keys, counts, older=True), first, total),
        "average of means": contrast(queries, gather_ragged(keys, counts), first, share) / len(counts),
        "cut": contrast(queries, gather_without_gradient(keys, counts, own=False), first, total),
        "own rows put back": contrast(queries, gather_without_gradient(keys, counts, own=True), first, total),
        "local negatives": contrast(queries, keys, 0, total),
        "reduced, own share": ((queries - everywhere) ** 2).sum() / total,
        "reduced, same loss": (everywhere**2).sum(),
        "reduced, same loss over W": (everywhere**2).sum() / len(counts),
    }
    return {name: sum_of_gradients(loss, weights) for name, loss in losses.items()}


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    found = {name: compute(counts, rank) for name, counts in SPLITS.items()}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{split: {way: (loss, gradients)}} of two processes, summed over them."""
    folder = tmp_path_factory.mktemp("collectives")
    context = mp.spawn(worker, (str(folder),), nprocs=WORLD, join=False)
    try:
        if not context.join(timeout=120) and not context.join(timeout=10):
            pytest.fail("the processes wait for each other")
    finally:
        for process in context.processes:
            process.kill()
    return torch.load(folder / "found.pt", weights_only=False)


def oracle(loss_of):
    """Loss and gradients of all rows in one process, without collectives."""
    x, y, a, b = problem()
    weights = [a.requires_grad_(), b.requires_grad_()]
    loss = loss_of(x @ a, y @ b)
    return loss.item(), [g.numpy() if g is not None else None for g in torch.autograd.grad(loss, weights, allow_unused=True)]


def softmax_by_hand(queries, keys):
    """`contrast` of the whole batch, in other words."""
    scores = queries @ keys.T / TEMPERATURE
    return (scores.exp().sum(1).log() - scores.diagonal()).mean()


def difference(ours, theirs):
    """Largest relative difference of the gradients; a weight that is not reached counts as zeros."""
    pairs = [(np.zeros_like(b) if a is None else a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


pytestmark = pytest.mark.launch


@pytest.mark.parametrize("split", SPLITS)
def test_gathered_negatives_give_the_whole_batchs_gradient(found, split):
    loss, gradients = oracle(softmax_by_hand)
    for way in ("gathered", "gathered, older name"):
        assert found[split][way][0] == pytest.approx(loss, rel=1e-12)
        assert difference(found[split][way][1], gradients) < 1e-12


@pytest.mark.parametrize("split", SPLITS)
def test_naive_ways_fail_the_same_comparison(found, split):
    """Controls. The plain collective gives the right loss and the wrong gradient, local negatives not even the loss."""
    loss, gradients = oracle(softmax_by_hand)
    cut, put_back, local = (found[split][way] for way in ("cut", "own rows put back", "local negatives"))
    assert cut[0] == put_back[0] == pytest.approx(loss, rel=1e-12)
    assert cut[1][1] is None and difference(cut[1], gradients) == 1.0
    alone = split == "one has nothing"  # then all keys are the one process's own
    assert (difference(put_back[1], gradients) > 0.1) != alone
    assert (local[0] < 0.9 * loss and difference(local[1], gradients) > 0.1) != alone


def test_average_of_means_is_right_for_even_shares_only(found):
    """What DDP would do: each process's mean, gradients averaged."""
    _, gradients = oracle(softmax_by_hand)
    assert difference(found["even"]["average of means"][1], gradients) < 1e-12
    for split in ("ragged", "one has nothing"):
        assert difference(found[split]["average of means"][1], gradients) > 0.05


@pytest.mark.parametrize("split", SPLITS)
def test_gradient_of_all_reduce(found, split):
    """Own share of a loss that uses the mean of all rows: right as it is. The same loss everywhere: W times too large."""
    loss, gradients = oracle(lambda queries, keys: ((queries - queries.mean(0)) ** 2).sum() / 6)
    assert found[split]["reduced, own share"][0] == pytest.approx(loss, rel=1e-12)
    assert difference(found[split]["reduced, own share"][1], gradients) < 1e-12
    loss, gradients = oracle(lambda queries, keys: (queries.mean(0) ** 2).sum())
    same, divided = (found[split][way] for way in ("reduced, same loss", "reduced, same loss over W"))
    assert same[0] == pytest.approx(WORLD * loss, rel=1e-12) and divided[0] == pytest.approx(loss, rel=1e-12)
    assert difference(divided[1], gradients) < 1e-12
    assert difference(same[1], gradients) == pytest.approx(WORLD - 1, rel=1e-12), "control: W times too large"
