"""What a term says: factor, divisor, count, identity; zero divisors, zero scales, other devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.loss import StackSizes, describe, read_terms, undivided
from hf_ga.loss.nodes.saved import SAVED

WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 2.0, 9.0])


class Heads(nn.Module):
    """A body and two heads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.first = nn.Linear(8, 5)
        self.second = nn.Linear(8, 5)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.first(hidden), self.second(hidden)


def make(num_samples=8, labels=None):
    torch.manual_seed(0)
    model = Heads()
    x = torch.randn(num_samples, 6)
    y = torch.randint(5, (num_samples,)) if labels is None else torch.tensor(labels)
    return model, x, y


def only_term(loss, num_samples=8):
    [term] = read_terms(loss, num_samples=num_samples)
    return term


def test_by_hand():
    """loss = 0.5 * (1 + 2 + 3) / 3 * w: the numerator's gradient is 6, with scale 10 and factor 0.5 30."""
    w = nn.Parameter(torch.ones(1))
    x = torch.tensor([1.0, 2.0, 3.0])
    loss = 0.5 * (x * w).mean()
    terms = read_terms(loss, num_samples=3)
    assert [(term.factor, term.divisor) for term in terms] == [(0.5, 3.0)]
    with undivided(terms, [10.0]):
        loss.backward()
    assert w.grad.item() == 30.0


def test_hooks_are_removed_and_a_multiple_scales():
    w = nn.Parameter(torch.ones(1))
    x = torch.tensor([1.0, 2.0, 3.0])
    loss = (x * w).sum() / 4
    terms = read_terms(loss, num_samples=3)
    with undivided(terms, [1.0]):
        (128 * loss).backward(retain_graph=True)  # as a gradient scaler does
    assert w.grad.item() == 128 * 6.0
    w.grad = None
    loss.backward()
    assert w.grad.item() == 1.5


def test_a_mean_used_twice():
    w = nn.Parameter(torch.ones(1))
    mean = (torch.tensor([1.0, 2.0, 3.0]) * w).mean()
    loss = mean + 0.5 * mean
    terms = read_terms(loss, num_samples=3)
    with undivided(terms, [1.0, 1.0]):
        loss.backward()
    assert w.grad.item() == 9.0


def losses_with_counts():
    """(loss, divisor, count) of 8 samples, 5 of them with a target."""
    model, x, _ = make()
    z, _ = model(x)
    y = torch.tensor([0, 1, -100, 4, 2, -100, -100, 1])
    k = y >= 0
    losses = F.cross_entropy(z, y, reduction="none")
    weights = F.cross_entropy(z, y, reduction="none", weight=WEIGHTS)
    total = 1 + 5 + 9 + 1 + 5
    wide = z.pow(2)
    return {
        "cross entropy": (F.cross_entropy(z, y), 5, 5),
        "class weights": (F.cross_entropy(z, y, weight=WEIGHTS), total, total),
        "sum": (F.cross_entropy(z, y, reduction="sum") / 100, 100, 5),
        "weighted sum": (F.cross_entropy(z, y, reduction="sum", weight=WEIGHTS) / 7, 7, total),
        "ignored": (losses.sum() / (k.sum() + 1), 6, 5),
        "2d": (F.cross_entropy(z.T[None], y[None], reduction="none").sum() / 3, 3, 5),
        "weights of targets": (weights.sum() / 5, 5, total),
        "masked": ((losses * k).sum() / 8, 8, 5),
        "mask and eps": ((wide.sum(1) * k).sum() / (k.sum() + 0.5), 5.5, 5),
        "wide mask": ((wide * k[:, None]).sum() / k.sum(), 5, 25),
        "sums of a mask": ((wide * k[:, None]).sum(1).sum() / k.sum(), 5, 25),
        "two masks": ((wide * k[:, None] * (k[:, None] * 2)).sum() / 5, 5, 50),
        "squares of masked": (((z - 1) * k[:, None]).pow(2).sum() / 25, 25, 25),
        "where": (torch.where(k, wide.sum(1), 0.0).sum() / 5, 5, 5),
        "where not": (torch.where(~k, 0.0, wide.sum(1)).sum() / 5, 5, 5),
        "filled": (wide.sum(1).masked_fill(~k, 0).sum() / 5, 5, 5),
        "selected": (wide.sum(1)[k].sum() / 9, 9, 5),
        "masked_select": (wide.sum(1).masked_select(k).mean(), 5, 5),
        "focal": ((losses * (1 - (-losses).exp()) ** 2).sum() / 5, 5, 5),
        "reshaped": ((losses.view(2, 4) * k.view(2, 4)).sum() / 5, 5, 5),
        "transposed": ((losses.view(2, 4).T * k.view(2, 4).T).sum() / 5, 5, 5),
        "elements": (wide.sum() / 3, 3, 40),
        "sum of squares": (F.mse_loss(z, z.detach() + 1, reduction="sum") / 3, 3, 40),
        "squares": (F.mse_loss(z, z.detach() + 1), 40, 40),
        "inner division": ((losses / 5).sum(), 5, 5),
        "dot product": (torch.dot(losses, k.float()) / 9, 9, 5),
        "divided by one each": ((losses[:1] / k[:1]).sum() / 3, 3, 1),
    }


@pytest.mark.parametrize("name", losses_with_counts())
def test_divisor_and_count(name):
    loss, divisor, count = losses_with_counts()[name]
    term = only_term(loss)
    assert term.divisor == divisor
    assert term.count() == count
    assert type(term.divisor) is float


def empty_losses():
    """(loss, divisor) of micro-batches without targets."""
    model, x, y = make(4, [-100, -100, -100, -100])
    z, _ = model(x)
    k = y >= 0
    losses = F.cross_entropy(z, y, reduction="none")
    return model, {
        "mean": (F.cross_entropy(z, y), 0.0),
        "weighted mean": (F.cross_entropy(z, y, weight=WEIGHTS), 0.0),
        "0 / 0": ((losses * k).sum() / k.sum(), 0.0),
        "clamped": ((losses * k).sum() / k.sum().clamp(min=1), 1.0),
        "max": ((losses * k).sum() / max(int(k.sum()), 1), 1.0),
        "nothing selected": (losses[k].mean(), 0.0),
        "nothing to sum": (losses[k].sum() / k.sum(), 0.0),
        "smoothed": (F.cross_entropy(z, y, label_smoothing=0.1), 0.0),
        "divided first": ((losses / k.sum()).sum(), 0.0),
    }


@pytest.mark.parametrize("name", empty_losses()[1])
def test_no_targets_give_zero_gradients(name):
    model, losses = empty_losses()
    loss, divisor = losses[name]
    terms = read_terms(loss, num_samples=4)
    assert all(term.divisor == divisor for term in terms)
    assert all(term.count() == 0 for term in terms)
    with undivided(terms, [0.25] * len(terms)):
        loss.backward()
    for parameter in model.parameters():
        if parameter is not model.second.weight and parameter is not model.second.bias:
            assert not parameter.grad.any()


def test_targets_of_weight_zero_give_zero_gradients():
    model, x, _ = make(2)
    loss = F.cross_entropy(model(x)[0], torch.tensor([0, 0]), weight=torch.zeros(5))
    with undivided(read_terms(loss, num_samples=2), [1.0]):
        loss.backward()
    assert not model.first.weight.grad.any()


def test_scale_zero_stops_nan():
    """A node that computes 0 / 0: the targets of a micro-batch have class weight 0."""
    model, x, _ = make(2)
    first, second = model(x)
    y = torch.tensor([0, 0])
    loss = F.cross_entropy(first, y) + F.cross_entropy(second, y, weight=torch.zeros(5))
    with undivided(read_terms(loss, num_samples=2), [1.0, 0.0]):
        loss.backward()
    assert not model.second.weight.grad.any()
    assert model.body.weight.grad.isfinite().all()
    assert model.body.weight.grad.any()


def test_backward_of_scale_zero_reaches_all_parameters():
    """Sharded parameters need it: their backward is a collective."""
    model, x, y = make()
    loss = sum(F.cross_entropy(z, y) for z in model(x))
    with undivided(read_terms(loss, num_samples=8), [0.0, 0.0]):
        loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_identities_do_not_depend_on_sizes_or_order():
    def identities(num_samples, width, swapped):
        torch.manual_seed(num_samples)
        first, second = model(torch.randn(num_samples, width, 6))
        y = torch.randint(5, (num_samples, width))
        terms = [
            F.cross_entropy(first.flatten(0, 1), y.flatten()),
            F.cross_entropy(second[:, :-1].contiguous().view(-1, 5), y[:, 1:].reshape(-1)),
            0.1 * second.pow(2).mean(),
            0.01 * model.first.weight.abs().mean(),
        ]
        loss = sum(reversed(terms) if swapped else terms)
        return {term.identity for term in read_terms(loss, num_samples=num_samples)}

    model = Heads()
    expected = identities(8, 3, swapped=False)
    assert len(expected) == 4
    assert identities(1, 9, swapped=True) == expected
    assert identities(3, 2, swapped=False) == expected


def test_a_linear_layer_is_the_same_in_one_node_or_two():
    """Torch adds the bias in a node of its own if the rows of several samples are apart."""
    layer = nn.Linear(6, 5)

    def identity(num_samples):
        logits = layer(torch.randn(num_samples, 3, 6)[:, :-1]).transpose(1, 2)
        loss = F.cross_entropy(logits, torch.randint(5, (num_samples, 2)))
        (term,) = read_terms(loss, num_samples=num_samples)
        return term.identity

    assert identity(1) == identity(2)


def test_a_head_is_told_apart_where_the_other_is_missing():
    model, x, y = make()
    first, second = model(x)
    both = read_terms(F.cross_entropy(first, y) + F.cross_entropy(second, y), num_samples=8)
    alone = only_term(F.cross_entropy(model(x)[1], y))
    assert alone.identity == both[1].identity != both[0].identity


def test_two_calls_of_one_model_have_one_identity():
    model, x, y = make()
    loss = F.cross_entropy(model(x)[0], y) + F.cross_entropy(model(2 * x)[0], y)
    first, second = read_terms(loss, num_samples=8)
    assert first.identity == second.identity
    assert first.node is not second.node


def deep_supervision(model, x, y):
    """Two losses of one head, stacked."""
    losses = [F.cross_entropy(model(x)[0], y), F.cross_entropy(model(2 * x)[0], y)]
    return torch.stack(losses).mean()


def test_a_stack_is_read_by_its_sizes():
    sizes = StackSizes()
    model, x, y = make(3)
    terms = read_terms(deep_supervision(model, x, y), num_samples=3, stack_sizes=sizes)
    assert [(term.factor, term.divisor) for term in terms] == [(0.5, 3.0), (0.5, 3.0)]
    model_terms = read_terms(
        deep_supervision(model, x[:2], y[:2]), num_samples=2, stack_sizes=sizes
    )
    assert [(term.factor, term.divisor) for term in model_terms] == [(0.5, 2.0), (0.5, 2.0)]


def test_a_stack_that_was_misread_is_refused():
    """Two losses of two samples look like one for each sample, until another size is seen."""
    sizes = StackSizes()
    sizes.may_change = True
    model, x, y = make(3)
    (term,) = read_terms(deep_supervision(model, x[:2], y[:2]), num_samples=2, stack_sizes=sizes)
    assert (term.factor, term.divisor) == (1.0, 2.0)
    sizes.may_change = False
    with pytest.raises(LossNotAdditive, match="averages 2 values in a micro-batch of 3 samples"):
        read_terms(deep_supervision(model, x, y), num_samples=3, stack_sizes=sizes)


def test_a_stack_of_heads_of_as_many_samples():
    """Heads differ in their parameters, so two heads of two samples are no two samples."""
    model, x, y = make(2)
    first, second = model(x)
    loss = torch.stack([F.cross_entropy(first, y), F.cross_entropy(second, y)]).mean()
    terms = read_terms(loss, num_samples=2, stack_sizes=StackSizes())
    assert [(term.factor, term.divisor) for term in terms] == [(0.5, 2.0), (0.5, 2.0)]


def test_half_of_two_losses_of_two_samples_is_refused():
    model, x, y = make(2)
    loss = (F.cross_entropy(model(x)[0], y) + F.cross_entropy(model(2 * x)[0], y)) / 2
    with pytest.raises(LossNotAdditive, match="the mean of 2 means of the same kind"):
        read_terms(loss, num_samples=2)


def penalties(model):
    """Penalties, each with its factor."""
    p = model.first.weight
    start = p.detach().clone() + 1
    fisher = torch.rand_like(p)
    return {
        "squares": (0.01 * p.pow(2).sum(), 0.01),
        "norm": (0.5 * p.norm(), 0.5),
        "vector norm": (torch.linalg.vector_norm(p), 1.0),
        "absolute": (p.abs().mean(), 1.0),
        "to start": ((p - start).pow(2).sum().sqrt() / 2, 0.5),
        "elastic": ((fisher * (p - start) ** 2).sum(), 1.0),
        "itself": ((p * p).sum(), 1.0),
        "stack of norms": (torch.stack([q.norm() for q in model.parameters()]).sum(), 1.0),
        "orthogonal": ((p @ p.T - torch.eye(5)).pow(2).sum(), 1.0),
        "mse": (F.mse_loss(p, start), 1.0),
        "spectral": (torch.linalg.matrix_norm(p, 2), 1.0),
        "nuclear": (torch.linalg.matrix_norm(p, "nuc"), 1.0),
        "largest": (p.max() * p.amin() * p.logsumexp((0, 1)) * p.std() * p.var(), 1.0),
        "product of norms": (2 * (p.norm() * model.second.weight.norm()), 2.0),
    }


@pytest.mark.parametrize("name", penalties(Heads()))
def test_penalties(name):
    model, x, y = make()
    penalty, factor = penalties(model)[name]
    terms = read_terms(F.cross_entropy(model(x)[0], y) + penalty, num_samples=8)
    assert [term.is_penalty for term in terms] == [False, True]
    assert (terms[1].factor, terms[1].divisor, terms[1].count()) == (factor, 1.0, None)


def test_activations_are_no_penalty():
    model, x, _ = make()
    embedding = nn.Embedding(4, 6)
    shift = nn.Parameter(torch.zeros(6))
    for mean in (
        model(x)[0].pow(2).mean(),
        embedding(torch.arange(4)).pow(2).mean(),
        (x - shift).pow(2).mean(),
        (x * shift).abs().mean(),
        (x @ shift[:, None]).mean(),
        model.first.weight[torch.tensor([0, 0, 1])].pow(2).mean(),
    ):
        assert not only_term(mean).is_penalty


def test_numbers_of_other_devices_are_not_read():
    """`.item()` of a tensor on the meta device raises."""
    model = Heads().to("meta")
    x = torch.randn(8, 6, device="meta")
    y = torch.zeros(8, dtype=torch.long, device="meta")
    z, other = model(x)
    k = torch.zeros(8, device="meta")
    loss = (
        F.cross_entropy(z, y, weight=torch.ones(5, device="meta"))
        + k.mean() * (other.sum(1) * k).sum() / k.sum()
        + torch.stack([z.mean(), other.mean()]).mul(k[:2]).sum()
        + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    )
    terms = read_terms(loss, num_samples=8)
    assert [term.divisor.device.type for term in terms[:2]] == ["meta", "meta"]
    for term in terms:
        term.count()
        describe(term)
    with undivided(terms, [0.5] * len(terms)):
        loss.backward()
    assert model.first.weight.grad.shape == model.first.weight.shape


def test_description():
    model, x, y = make(5)
    loss = 0.5 * F.cross_entropy(model(x)[0], y)
    expected = "the mean of NllLossBackward0 (cross entropy), factor 0.5, divisor 5"
    assert describe(only_term(loss, 5)) == expected
    divided = model(x)[0].sum() / 3
    assert describe(only_term(divided, 5)) == "the divided sum of SumBackward0, factor 1, divisor 3"
    penalty = model.first.weight.pow(2).sum()
    assert "penalty on parameters" in describe(only_term(penalty, 5))


def nodes_with_saved():
    """One node of each kind whose saved attributes are read."""
    a = torch.rand(2, 3, requires_grad=True)
    b = torch.rand(2, 3)
    k = b > 0.5
    y = torch.tensor([0, 1])
    results = [
        a + a, a / b, a.mean(0), a * b, a * 2, a**2, a - b, a.sum(0), a.transpose(0, 1), a[0], a.T,
        a.masked_fill(k, 0), torch.where(k, a, b), 1 - a, torch.rsub(a, a),
        F.binary_cross_entropy(a, b), F.binary_cross_entropy_with_logits(a, b),
        F.huber_loss(a, b), F.mse_loss(a, b), F.smooth_l1_loss(a, b), F.soft_margin_loss(a, b),
        F.multi_margin_loss(a, y), F.multilabel_margin_loss(a, torch.tensor([[0, -1, -1]] * 2)),
        a @ b.T, a @ b[0], a[0] @ b[0], a[None] @ b.T[None],
        F.nll_loss(a, y), F.nll_loss(a[None].transpose(1, 2)[..., None], torch.zeros(1, 2, 1).long()),
        F.cross_entropy(a, b), F.cross_entropy(a, y, label_smoothing=0.1),
    ]  # fmt: skip
    nodes = {}
    waiting = [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        nodes[node.name()] = node
        waiting.extend(child for child, _ in node.next_functions if child is not None)
    return nodes


@pytest.mark.parametrize("kind", SAVED)
def test_saved_attributes_exist(kind):
    node = nodes_with_saved()[kind]
    for name in SAVED[kind]:
        assert hasattr(node, f"_saved_{name}")
    assert node._input_metadata[0].shape is not None


def passes(num_rows: int, stacked: bool) -> Tensor:
    """The mean of four losses of some rows, as of four forwards, or of four samples."""
    logits = torch.randn(4, num_rows, 3, requires_grad=True)
    labels = torch.zeros(num_rows, dtype=torch.int64)
    losses = [F.cross_entropy(of_pass, labels) for of_pass in logits]
    return torch.stack(losses).mean() if stacked else sum(losses) / 4


@pytest.mark.parametrize("stacked", [False, True])
def test_four_means_over_as_many_targets_may_be_of_four_samples_or_of_all(stacked):
    with pytest.raises(LossNotAdditive, match="the mean of 4 means of the same kind"):
        read_terms(passes(6, stacked), num_samples=4)
    (term,) = read_terms(passes(1, stacked), num_samples=4)
    assert term.divisor == 4
    sizes = StackSizes()
    sizes.may_change = True  # micro-batches of other sizes follow
    read_terms(passes(6, stacked), num_samples=4, stack_sizes=sizes)
    assert len(read_terms(passes(6, stacked), num_samples=3, stack_sizes=sizes)) == 4


def sums_of_samples(numbers: list[int], *, with_own_divisors: bool) -> Tensor:
    """The mean of divided sums over some targets, or the sum of all divided by their number."""
    elements = torch.randn(len(numbers), max(numbers), requires_grad=True)
    totals = [values[:n].sum() for values, n in zip(elements, numbers, strict=True)]
    if with_own_divisors:
        return sum(total / n for total, n in zip(totals, numbers, strict=True)) / len(numbers)
    return sum(totals) / sum(numbers)


@pytest.mark.parametrize("numbers", [[3, 1, 4], [1, 1, 1]])
def test_divided_sums_of_samples_are_one_mean(numbers):
    """In rehearsed windows, where micro-batches of other sizes follow."""
    loss = sums_of_samples(numbers, with_own_divisors=True)
    (term,) = read_terms(loss, num_samples=3, stack_sizes=StackSizes(may_change=True))
    assert (term.factor, term.divisor, term.count()) == (1.0, 3.0, 3.0)
    by_hand = loss / 8
    (term,) = read_terms(by_hand, num_samples=3, stack_sizes=StackSizes(may_change=True))
    assert (term.factor, term.divisor, term.count()) == (1.0, 24.0, 3.0)


def test_divided_sums_that_may_be_of_samples_or_of_all_are_read_one_by_one():
    """Masked losses of all samples have other numbers of targets, too."""
    for numbers in ([4, 4, 4], [3, 1, 4]):
        loss = sums_of_samples(numbers, with_own_divisors=True)
        terms = read_terms(loss, num_samples=3)
        assert [term.divisor for term in terms] == numbers
        assert len(read_terms(loss, num_samples=5)) == 3


def test_means_with_other_factors_on_a_device_are_not_one_mean():
    elements = torch.randn(3, 4, device="meta", requires_grad=True)
    weights = torch.randn(3, device="meta")
    sizes = StackSizes(may_change=True)
    loss = sum(w * values.mean() for w, values in zip(weights, elements, strict=True)) / 3
    assert len(read_terms(loss, num_samples=3, stack_sizes=sizes)) == 3
    loss = weights[0] * sum(values.mean() for values in elements) / 3
    (term,) = read_terms(loss, num_samples=3, stack_sizes=sizes)
    assert (term.divisor, len(term.nodes)) == (3.0, 3)


def test_a_mean_of_weights_that_add_up_to_0_is_not_empty():
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    model, x, _ = make(4)
    term = only_term((model(x)[0][:, 0] * signs).mean(), 4)
    assert (term.count(), term.num_nonzero()) == (0.0, 4.0)


def test_sums_of_samples_with_one_divisor_are_one_sum():
    sizes = StackSizes()
    loss = sums_of_samples([3, 1, 4], with_own_divisors=False)
    (term,) = read_terms(loss, num_samples=3, stack_sizes=sizes)
    assert (term.divisor, term.count(), term.num_elements) == (8.0, 8.0, 8)
    loss = sums_of_samples([3, 1], with_own_divisors=False)
    (term,) = read_terms(loss, num_samples=2, stack_sizes=sizes)
    assert (term.divisor, term.count(), term.num_elements) == (4.0, 4.0, 4)


def test_a_trained_weight_of_a_divided_sum_gets_its_gradient_once():
    """Such sums are not joined: the weight is below the division, which would reach it again."""
    scale = nn.Parameter(torch.tensor(2.0))
    elements = torch.randn(3, 4, requires_grad=True)
    numbers = (3, 1, 4)
    totals = [values[:n].sum() for values, n in zip(elements, numbers, strict=True)]
    loss = sum(total * scale / n for total, n in zip(totals, numbers, strict=True)) / 3
    terms = read_terms(loss, num_samples=3)
    assert len(terms) == 3
    (expected,) = torch.autograd.grad(loss, scale, retain_graph=True)
    with undivided(terms, [1 / term.divisor for term in terms]):
        loss.backward()
    torch.testing.assert_close(scale.grad, expected)


@pytest.mark.parametrize(
    ("selects", "loss_of"),
    [
        (True, lambda x, chosen: F.mse_loss(x[chosen], torch.ones(2, 3))),
        (True, lambda x, chosen: x[chosen].pow(2).mean()),
        (True, lambda x, chosen: x.masked_select(chosen[:, None]).mean()),
        (False, lambda x, chosen: (x.pow(2) * chosen[:, None]).mean()),
        (False, lambda x, chosen: F.mse_loss(x, torch.ones(4, 3))),
    ],
)
def test_a_mean_over_chosen_elements_is_told_from_a_masked_one(selects, loss_of):
    x = torch.randn(4, 3, requires_grad=True)
    chosen = torch.tensor([True, False, True, False])
    (term,) = read_terms(loss_of(x, chosen), num_samples=4)
    assert term.selects() is selects
