"""Buffers that training forwards change: named, because a window has several forwards."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import hf_ga


class Codebook(nn.Module):
    """The nearest of 8 codes, which follow the mean of what they stood for (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 8))

    def forward(self, x):
        chosen = F.one_hot(torch.cdist(x, self.codes).argmin(1), 8).to(x)
        if self.training:
            with torch.no_grad():
                means = chosen.T @ x / chosen.sum(0).clamp(min=1).unsqueeze(1)
                self.codes.mul_(0.9).add_(0.1 * means)
        return x + chosen @ self.codes


class Recorder(nn.Module):
    """Records the mean of what it sees, which no forward reads (I-BERT's ranges, before it is
    quantized).
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x


class Counting(nn.Module):
    """Counts samples, which any split does alike, and forwards, as norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(()))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.samples += len(x)
        self.forwards += 1
        return x


class Scheduled(nn.Module):
    """Changes after a number of training forwards that a proof does not make."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.forwards += self.training
        return x if int(self.forwards) < 1000 else 2 * x


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, 4))).flatten(1)


class Classifier(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.Linear(8, 2))

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.layers(x), labels)}


def converged() -> nn.Module:
    """Whose power iteration changes nothing any more, as long as the weight does not change."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 8))
    for _ in range(200):
        layer(torch.zeros(1, 4))
    return layer


CASES = {
    "spectral norm": (
        lambda: [nn.utils.spectral_norm(nn.Linear(4, 8))],
        r"layers.0 \(Linear: weight_u, weight_v\)",
    ),
    "parametrized spectral norm": (
        lambda: [parametrizations.spectral_norm(nn.Linear(4, 8))],
        r"layers.0.parametrizations.weight.0 \(_SpectralNorm: _u, _v\)",
    ),
    "converged spectral norm": (
        lambda: [converged()],
        r"layers.0.parametrizations.weight.0 \(_SpectralNorm: _u, _v\)",
    ),
    "codebook": (lambda: [nn.Linear(4, 8), Codebook()], r"layers.1 \(Codebook: codes\)"),
    "observer": (
        lambda: [nn.Linear(4, 8), FakeQuantize(MovingAverageMinMaxObserver)],
        r"layers.1.activation_post_process \(MovingAverageMinMaxObserver: min_val, max_val\)",
    ),
    "schedule": (lambda: [nn.Linear(4, 8), Scheduled()], r"layers.1 \(Scheduled: forwards\)"),
    "instance norm": (
        lambda: [nn.Linear(4, 8), Channels()],
        r"layers.1.norm \(InstanceNorm1d: running_mean, running_var\)",
    ),
}


def stack(samples):
    return {
        "x": torch.stack([x for x, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


def features():
    return [(torch.randn(4), i % 2) for i in range(64)]


@pytest.mark.parametrize("case", CASES)
def test_state_is_named_with_its_module_and_buffers(case):
    layers, message = CASES[case]
    model = Classifier(*layers())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(hf_ga.LossNotAdditive, match=message) as raised:
        hf_ga.prove_targets(model, features(), stack)
    assert "number of micro-batches" in str(raised.value)
    assert "loss_fn" not in str(raised.value), "a loss_fn would not help"
    assert all(buffer.equal(before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("case", [case for case in CASES if case != "observer"])
def test_the_remedy_is_one(case):
    """In evaluation mode the buffers keep their values."""
    model = Classifier(*CASES[case][0]()).train()
    for layer in [*model.layers[:-1]]:
        layer.eval()
    assert hf_ga.prove_targets(model, features(), stack).name == "labels"


def test_records_that_no_forward_reads_are_accepted_with_a_warning():
    """The update is exact, but the records depend on the split."""
    model = Classifier(nn.Linear(4, 8), Recorder())
    with pytest.warns(UserWarning, match=r"layers.1 \(Recorder: mean\).*if a later forward reads"):
        assert hf_ga.prove_targets(model, features(), stack).name == "labels"


def test_counters_of_samples_and_forwards_are_accepted():
    model = Classifier(nn.Linear(4, 8), Counting(), nn.BatchNorm1d(8).eval())
    model.train().layers[2].eval()
    assert hf_ga.prove_targets(model, features(), stack).name == "labels"


def test_another_cause_is_not_taken_for_state():
    """BatchNorm's outputs depend on the other samples, whatever its running values are."""
    model = Classifier(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with pytest.raises(hf_ga.LossNotAdditive, match=r"layers.1 \(BatchNorm1d\) normalises"):
        hf_ga.prove_targets(model, features(), stack)
    for layer in (Channels(), Counting()):
        model = Classifier(nn.Linear(4, 8), layer)
        plain = model.forward
        model.forward = lambda x, labels, plain=plain: {"loss": plain(x, labels)["loss"] ** 2}
        with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
            hf_ga.prove_targets(model, features(), stack)
