"""`hf_ga.loss` against the full batch, for the losses that users write.

21 samples of different lengths are split unevenly. For each term of a loss, the gradient of its
numerator is accumulated over the parts (all other terms have scale 0) and divided by the sum of the
term's divisors. The sum over the terms must be the gradient of the full batch in float64, and the
mean of the parts' gradients must not be.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.loss import StackSizes, read_terms, undivided

NUM_SAMPLES = 21
WIDTH = 7
FEATURES = 6
CLASSES = 5
PARTS = ((0, 8), (8, 9), (9, 14), (14, 21))


class Batch:
    """Samples of different lengths."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x = x
        self.y = y

    @property
    def is_target(self) -> Tensor:
        return self.y >= 0

    def part(self, start: int, stop: int) -> "Batch":
        return Batch(self.x[start:stop], self.y[start:stop])

    def __len__(self) -> int:
        return len(self.y)


class Model(nn.Module):
    """A network of one hidden layer with three heads and a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 16)
        self.classes = nn.Linear(16, CLASSES)
        self.other_classes = nn.Linear(16, CLASSES)
        self.value = nn.Linear(16, 1)
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def hidden(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        return self.classes(self.hidden(x))


def make_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_SAMPLES, WIDTH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (NUM_SAMPLES, WIDTH), generator=generator)
    lengths = torch.randint(1, WIDTH + 1, (NUM_SAMPLES,), generator=generator)
    y[torch.arange(WIDTH)[None] >= lengths[:, None]] = -100
    return Batch(x, y)


def make_model() -> Model:
    torch.manual_seed(1)
    return Model().double()


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 2.0, 9.0], dtype=torch.float64)
FORMS: dict[str, Callable[[Model, Batch], Tensor]] = {}


def form(function):
    FORMS[function.__name__] = function
    return function


def cross_entropy(model, b, **options):
    return F.cross_entropy(model(b.x).flatten(0, 1), b.y.flatten(), **options)


def per_token(model, b):
    return cross_entropy(model, b, reduction="none").view(b.y.shape)


def gradients(model) -> Tensor:
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in flat])


def backward(model, loss) -> Tensor:
    model.zero_grad()
    loss.backward()
    return gradients(model)


@form
def plain(m, b):
    return cross_entropy(m, b)


@form
def two_dimensional(m, b):
    return F.cross_entropy(m(b.x).transpose(1, 2), b.y)


@form
def weighted(m, b):
    return cross_entropy(m, b, weight=CLASS_WEIGHTS)


@form
def smoothed(m, b):
    return cross_entropy(m, b, label_smoothing=0.1)


@form
def smoothed_and_weighted(m, b):
    return cross_entropy(m, b, label_smoothing=0.1, weight=CLASS_WEIGHTS)


@form
def probabilities(m, b):
    return F.cross_entropy(m(b.x[:, 0]), m.teacher(b.x[:, 0]).softmax(-1))


@form
def probabilities_weighted_and_smoothed(m, b):
    targets = m.teacher(b.x[:, 0]).softmax(-1)
    return F.cross_entropy(m(b.x[:, 0]), targets, weight=CLASS_WEIGHTS, label_smoothing=0.1)


@form
def sum_over_targets(m, b):
    return cross_entropy(m, b, reduction="sum") / b.is_target.sum()


@form
def sum_over_a_number(m, b):
    return cross_entropy(m, b, reduction="sum") / int(b.is_target.sum())


@form
def half_a_sum(m, b):
    return cross_entropy(m, b, reduction="sum") / 2 / int(b.is_target.sum())


@form
def masked(m, b):
    k = b.is_target.double()
    return (per_token(m, b) * k).sum() / k.sum()


@form
def focal(m, b):
    losses = per_token(m, b)[b.is_target]
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@form
def distillation(m, b):
    z = m(b.x[:, 0])
    target = F.softmax(m.teacher(b.x[:, 0]) / 2, -1)
    kl = F.kl_div(F.log_softmax(z / 2, -1), target, reduction="batchmean")
    return 0.3 * cross_entropy(m, b) + 0.7 * 4 * kl


@form
def kl_of_elements(m, b):
    return F.kl_div(m(b.x[:, 0]).log_softmax(-1), m.teacher(b.x[:, 0]).softmax(-1))


@form
def kl_of_logs(m, b):
    log_targets = m.teacher(b.x[:, 0]).log_softmax(-1)
    return F.kl_div(m(b.x[:, 0]).log_softmax(-1), log_targets, log_target=True)


@form
def smoothing_by_hand(m, b):
    logs = m(b.x).log_softmax(-1)
    return 0.9 * cross_entropy(m, b) + 0.1 * -logs[b.is_target].mean(-1).mean()


@form
def several_terms(m, b):
    z = m(b.x)
    return (
        cross_entropy(m, b, weight=CLASS_WEIGHTS)
        + F.mse_loss(z[:, 0], b.x[:, 0, :5]) / 3
        - 0.01 * m.value(m.hidden(b.x)).pow(2).mean()
        + 0.5 * F.huber_loss(z[..., 0], b.x[..., 0])
    )


@form
def per_sample_means(m, b):
    k = b.is_target.double()
    return ((per_token(m, b) * k).sum(1) / k.sum(1)).mean()


@form
def mean_of_means(m, b):
    return m(b.x).pow(2).mean(-1).mean(1).mean()


@form
def mean_over_samples_first(m, b):
    return m(b.x[:, 0]).pow(2).mean(0).sum() + m(b.x[:, 1]).pow(2).mean(0).mean()


@form
def sum_then_mean(m, b):
    return -0.5 * (1 + m(b.x[:, 0]) - m(b.x[:, 0]).exp()).sum(1).mean(0)


@form
def mean_of_dims(m, b):
    return m(b.x).pow(2).mean((0, 1, 2))


@form
def nanmean(m, b):
    return m(b.x).masked_fill(~b.is_target[..., None], torch.nan).nanmean()


@form
def divided_before_sum(m, b):
    k = b.is_target.double()
    return (per_token(m, b) * k / k.sum()).sum()


@form
def selected(m, b):
    return per_token(m, b).masked_select(b.is_target).mean()


@form
def chosen(m, b):
    return torch.where(b.is_target, m(b.x).pow(2).sum(-1), 0.0).sum() / b.is_target.sum()


@form
def filled(m, b):
    losses = m(b.x).pow(2).sum(-1).masked_fill(~b.is_target, 0.0)
    return losses.sum() / b.is_target.sum()


@form
def weighted_mse(m, b):
    weights = b.x[:, 0, :5].abs()
    return F.mse_loss(m(b.x[:, 0]), b.x[:, 0, :5], weight=weights)


@form
def python_sum_of_heads(m, b):
    h = m.hidden(b.x)
    losses = [
        F.cross_entropy(m.classes(h).flatten(0, 1), b.y.flatten()),
        F.cross_entropy(m.other_classes(h).flatten(0, 1), (b.y - (b.y == 0) * 100).flatten()),
    ]
    return sum(losses) / len(losses)


@form
def stacked_heads(m, b):
    h = m.hidden(b.x)
    first = F.cross_entropy(m.classes(h).flatten(0, 1), b.y.flatten())
    second = F.mse_loss(m.value(h), b.x[..., :1])
    return torch.stack([first, second]).mean()


@form
def weighted_stack(m, b):
    h = m.hidden(b.x)
    losses = [
        F.cross_entropy(m.classes(h).flatten(0, 1), b.y.flatten()),
        F.mse_loss(m.value(h), b.x[..., :1]),
        m.other_classes(h).pow(2).mean(),
    ]
    return (torch.stack(losses) * torch.tensor([0.3, 0.6, 0.1])).sum()


@form
def concatenated_heads(m, b):
    h = m.hidden(b.x)
    first = F.cross_entropy(m.classes(h).flatten(0, 1), b.y.flatten())
    second = F.mse_loss(m.value(h), b.x[..., :1])
    return torch.cat([first[None], second.view(1)]).sum()


@form
def unbound_stack(m, b):
    h = m.hidden(b.x)
    first = F.cross_entropy(m.classes(h).flatten(0, 1), b.y.flatten())
    second = F.mse_loss(m.value(h), b.x[..., :1])
    losses = torch.stack([first, second])
    one, two = losses.unbind()
    return losses[0] + one + 3 * two


@form
def loop_over_samples(m, b):
    losses = [F.cross_entropy(m(x), y) for x, y in zip(b.x, b.y, strict=True)]
    return torch.stack(losses).mean()


@form
def sum_of_loop_over_samples(m, b):
    losses = [F.cross_entropy(m(x), y) for x, y in zip(b.x, b.y, strict=True)]
    return torch.stack(losses).sum() / len(b)


@form
def python_sum_over_samples(m, b):
    losses = [F.cross_entropy(m(x), y) for x, y in zip(b.x, b.y, strict=True)]
    return sum(losses) / len(losses)


def losses_of_samples(m, b):
    """(sum over the targets of a sample, number of targets), sample by sample."""
    for x, y in zip(b.x, b.y, strict=True):
        is_target = (y >= 0).double()
        losses = F.cross_entropy(m(x), y.clamp(min=0), reduction="none")
        yield (losses * is_target).sum(), is_target.sum()


@form
def dot_products_with_a_mask(m, b):
    losses = per_token(m, b)
    k = b.is_target.double()
    weights = b.x[:, 0, 0].abs()
    of_targets = torch.dot(losses.flatten(), k.flatten()) + torch.einsum("bt,bt->", k, losses)
    of_samples = (losses * k).sum(1)
    weighted = weights @ of_samples + (weights[None] @ of_samples[:, None]).squeeze()
    return of_targets / k.sum() + (weighted + torch.mv(weights[None], of_samples)) / weights.sum()


@form
def python_sum_of_divided_sums(m, b):
    return sum(total / count for total, count in losses_of_samples(m, b)) / len(b)


@form
def shares_added_in_a_loop(m, b):
    loss = 0.0
    for total, count in losses_of_samples(m, b):
        loss = loss + 0.5 * total * 3 / count / len(b)
    return loss


@form
def sums_of_samples_divided_by_their_number(m, b):
    return sum(total for total, _ in losses_of_samples(m, b)) / len(b)


@form
def sums_of_samples_divided_by_all_targets(m, b):
    return sum(total for total, _ in losses_of_samples(m, b)) / b.is_target.sum()


@form
def r_drop_of_divided_sums(m, b):
    """Two calls of one model are no two samples."""
    number = b.is_target.sum()
    p = (per_token(m, b) * b.is_target).sum() / number
    q = (per_token(m, Batch(2 * b.x, b.y)) * b.is_target).sum() / number
    return (p + q) / 2


@form
def r_drop(m, b):
    p = m(b.x[:, 0])
    q = m(b.x[:, 1])
    y = b.y[:, 0]
    kl = F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
    return (F.cross_entropy(p, y) + F.cross_entropy(q, y)) / 2 + kl


@form
def views(m, b):
    loss = cross_entropy(m, b).view(1).squeeze().unsqueeze(0).reshape(1, 1).expand(1, 1)
    loss = loss.clone().contiguous().flatten()[0].float().double()
    return 1 - torch.rsub(loss, loss, alpha=3).mean() + torch.add(loss, loss, alpha=0.5)


@form
def in_place(m, b):
    return cross_entropy(m, b).add_(m(b.x).pow(2).mean()).mul_(2).div_(3).neg_()


@form
def with_penalty(m, b):
    penalty = 0.01 * sum(p.pow(2).sum() for p in m.parameters() if p.requires_grad)
    return cross_entropy(m, b) + penalty


@form
def repeated_mean(m, b):
    """The `sft` loss of TRL's DPO."""
    return cross_entropy(m, b).expand(len(b)).mean() * 0.5


@form
def dpo(m, b):
    """As TRL's DPO computes it: log probabilities of sequences, less those of a reference."""
    k = b.is_target.double()
    chosen = -(per_token(m, b) * k).sum(1)
    rejected = -m.other_classes(m.hidden(b.x)).log_softmax(-1)[..., 0].sum(1)
    delta = chosen.detach() * 0.5 - chosen - rejected
    losses = -F.logsigmoid(0.1 * delta) * 0.9 - F.logsigmoid(-0.1 * delta) * 0.1
    total = 0.0
    total += losses.mean() * 0.7
    total += torch.relu(1 - 0.1 * delta).mean() * 0.3
    return total


@form
def grpo(m, b):
    """As TRL's GRPO computes it: clipped ratios, a mean over each sample's tokens."""
    k = b.is_target.double()
    logs = -per_token(m, b)
    ratio = (logs - logs.detach()).exp()
    advantage = b.x[:, 0, :1]
    losses = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    return ((losses * k).sum(-1) / k.sum(-1).clamp(min=1.0)).mean()


@form
def dft(m, b):
    """As TRL's SFT computes it with loss_type="dft"."""
    losses = per_token(m, b)
    losses = losses * (-losses).exp().detach()
    return losses.sum() / b.is_target.sum().clamp(min=1)


@form
def chosen_loss(m, b):
    return torch.where(torch.tensor(True), cross_entropy(m, b), torch.zeros(()).double())


@form
def ctc(m, b):
    logs = m(b.x).log_softmax(-1).transpose(0, 1)
    targets = b.y[:, :3].clamp(min=1)
    lengths = b.is_target[:, :3].sum(1)
    return F.ctc_loss(logs, targets, torch.full((len(b),), WIDTH), lengths)


def element_losses():
    """Losses of torch between outputs `z` of one row a sample and targets like them."""
    return {
        "mse": lambda z, t, y: F.mse_loss(z, t),
        "l1": lambda z, t, y: F.l1_loss(z, t),
        "smooth_l1": lambda z, t, y: F.smooth_l1_loss(z, t),
        "huber": lambda z, t, y: F.huber_loss(z, t, delta=0.3),
        "bce": lambda z, t, y: F.binary_cross_entropy(z.sigmoid(), t.sigmoid()),
        "bce_with_logits": lambda z, t, y: F.binary_cross_entropy_with_logits(
            z, t.sigmoid(), weight=CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS
        ),
        "soft_margin": lambda z, t, y: F.soft_margin_loss(z, t.sign()),
        "multi_margin": lambda z, t, y: F.multi_margin_loss(z, y),
        "multilabel_margin": lambda z, t, y: F.multilabel_margin_loss(
            z, t.argsort().masked_fill(torch.arange(CLASSES) > 1, -1)
        ),
        "multilabel_soft_margin": lambda z, t, y: F.multilabel_soft_margin_loss(z, t.sigmoid()),
        "hinge_embedding": lambda z, t, y: F.hinge_embedding_loss(z, t.sign()),
        "margin_ranking": lambda z, t, y: F.margin_ranking_loss(z[:, 0], z[:, 1], t[:, 0].sign()),
        "cosine_embedding": lambda z, t, y: F.cosine_embedding_loss(z, t, t[:, 0].sign()),
        "triplet": lambda z, t, y: F.triplet_margin_loss(z, t, t.flip(1)),
        "gaussian_nll": lambda z, t, y: F.gaussian_nll_loss(z, t, z.exp()),
        "poisson_nll": lambda z, t, y: F.poisson_nll_loss(z, t.abs()),
    }


def add_element_losses():
    for name, function in element_losses().items():

        def loss(m, b, function=function):
            return function(m(b.x[:, 0]), b.x[:, 0, :5], b.y[:, 0])

        FORMS[name] = loss


add_element_losses()


def accumulate(loss_of, model, parts) -> Tensor:
    """Return the gradient from the terms of all parts."""
    stack_sizes = StackSizes(may_change=True)  # as in a rehearsed window
    numerators = None
    for part in parts:
        terms = read_terms(loss_of(model, part), num_samples=len(part), stack_sizes=stack_sizes)
        num_terms = len(terms)
        if numerators is None:
            numerators = [0.0] * num_terms
            divisors = [0.0] * num_terms
            penalties = [False] * num_terms
        for k in range(num_terms):
            loss = loss_of(model, part)
            terms = read_terms(loss, num_samples=len(part), stack_sizes=stack_sizes)
            scales = [1.0 if i == k else 0.0 for i in range(num_terms)]
            model.zero_grad()
            with undivided(terms, scales):
                loss.backward()
            numerators[k] = numerators[k] + gradients(model)
            divisors[k] += terms[k].divisor
            penalties[k] = terms[k].is_penalty
    return sum(n / d for n, d in zip(numerators, divisors, strict=True))


def relative_error(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_terms_of_parts_are_the_full_batch(name):
    model = make_model()
    batch = make_batch()
    parts = [batch.part(start, stop) for start, stop in PARTS]
    full = backward(model, FORMS[name](model, batch))
    assert relative_error(accumulate(FORMS[name], model, parts), full) < 1e-12
    naive = sum(backward(model, FORMS[name](model, part)) for part in parts) / len(parts)
    assert relative_error(naive, full) > 1e-4
