"""State that forwards leave in buffers: refused where it changes the update."""

import logging

import pytest
import torch
from splits import assert_every_split_is_exact
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from windows import one_window, window_gradient

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


def stack(samples):
    return {
        "x": torch.stack([x for x, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


def features():
    return [(torch.randn(4), i % 2) for i in range(16)]


CASES = {
    "spectral norm": (lambda: [nn.utils.spectral_norm(nn.Linear(4, 8))], r"layers\.0\.weight_u"),
    "parametrized spectral norm": (
        lambda: [parametrizations.spectral_norm(nn.Linear(4, 8))],
        r"layers\.0\.parametrizations\.weight\.0\._u",
    ),
    "codebook": (lambda: [nn.Linear(4, 8), Codebook()], r"layers\.1\.codes"),
    "observer": (
        lambda: [nn.Linear(4, 8), FakeQuantize(MovingAverageMinMaxObserver)],
        "depends on the other samples|buffers",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_state_is_refused_by_its_buffers(case):
    layers, message = CASES[case]
    for size in (1, 3):
        model = Classifier(*layers())
        with pytest.raises(hf_ga.LossNotAdditive, match=message):
            window_gradient(model, one_window(features(), size, stack))


@pytest.mark.parametrize("case", [case for case in CASES if case != "observer"])
def test_the_remedy_is_one(case):
    """In evaluation mode the buffers keep their values."""

    def build():
        torch.manual_seed(0)
        model = Classifier(*CASES[case][0]())
        for layer in [*model.layers[:-1]]:
            layer.eval()
        return model

    assert_every_split_is_exact(build, features(), stack)


@pytest.mark.parametrize("layer", [Recorder, Counting, Channels])
def test_records_that_no_forward_reads_are_accepted_with_a_warning(layer, caplog):
    """The update is exact, but the records depend on the split."""

    def build():
        torch.manual_seed(0)
        return Classifier(nn.Linear(4, 8), layer())

    with caplog.at_level(logging.WARNING):
        assert_every_split_is_exact(build, features(), stack)
    assert "training forwards change the buffers layers.1" in caplog.text
