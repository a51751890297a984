"""Stochastic depth of vision models: keyed by sample, so that the layouts agree, and as strong as
torch's own.
"""

from dataclasses import replace

import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.beit.modeling_beit import BeitDropPath
from transformers.models.swin.modeling_swin import SwinDropPath
from tried import keyed
from windows import one_window, window_gradient

SIZES = {"image_size": 16, "patch_size": 4, "num_labels": h.NUM_CLASSES}


@h.seeded
def beit(rate):
    sizes = {
        "hidden_size": h.WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tf.BeitForImageClassification(
        tf.BeitConfig(**SIZES, **sizes, **still, drop_path_rate=rate)
    )


@h.seeded
def swin(rate):
    sizes = {
        "embed_dim": 8,
        "depths": [1, 2],
        "num_heads": [1, 2],
        "window_size": 2,
        "hidden_dropout_prob": 0.0,
    }
    return tf.SwinForImageClassification(tf.SwinConfig(**SIZES, **sizes, drop_path_rate=rate))


class Skipping(nn.Module):
    """As transformers before 5.23 writes LayerDrop (Fan et al. 2020): it draws a number for each
    layer, also to skip none.
    """

    def __init__(self, layerdrop):
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)
        )

    def forward(self, x, labels):
        for layer in self.layers:
            if not self.training or torch.rand([]) >= self.layerdrop:
                x = layer(x)
        return {"loss": (x.mean(-1) - labels).square().mean()}


skipping = h.seeded(Skipping)


def images(n):
    return [{"pixel_values": torch.randn(3, 16, 16), "labels": i % h.NUM_CLASSES} for i in range(n)]


def numbers(n):
    return [{"x": torch.randn(4), "labels": torch.randn(())} for i in range(n)]


def gradient(model, samples, size):
    return window_gradient(model, one_window(samples, size))[0]


@pytest.mark.parametrize("build", [beit, swin], ids=["BEiT", "Swin"])
def test_the_layouts_agree(build):
    """Controls: branches are dropped, and torch's own draws of the same seed differ between
    layouts.
    """
    samples = images(12)
    whole = gradient(build(0.4), samples, 12)
    for size in (1, 5):
        assert h.relative_error(gradient(build(0.4), samples, size), whole) < 2e-6
    assert h.relative_error(gradient(build(0.0), samples, 12), whole) > 0.1
    batch = h.pad_right(samples)
    native = []
    for size in (12, 4):
        model = build(0.4)
        torch.manual_seed(0)
        for rows in torch.arange(12).split(size):
            (model(**{k: v[rows] for k, v in batch.items()}).loss * len(rows) / 12).backward()
        native.append(h.gradients(model))
    assert h.relative_error(*native) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.002, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("kind", [BeitDropPath, SwinDropPath])
def test_a_branch_is_dropped_or_kept_whole(kind, rate, dtype):
    """Every sample is 0 or 1 / (1 - p), as often as torch's own would be, within five standard
    deviations.
    """
    count = 4000
    module = kind(rate).train()
    with keyed(0, 0, np.arange(count)):
        out = module(torch.ones(count, 2, 3, dtype=dtype))
    assert out.dtype == dtype
    kept = out.flatten(1).float()
    one = torch.ones((), dtype=dtype).div(1 - rate).float()
    assert torch.all((kept == 0).all(1) | (kept == one).all(1))
    assert (
        abs((kept[:, 0] != 0).sum() - count * (1 - rate)) < 5 * (count * rate * (1 - rate)) ** 0.5
    )


def test_a_draw_that_skips_no_layer_is_nobodys():
    """Layouts agree, no generator moves, and the layers' own dropout is drawn."""
    samples = numbers(12)
    state = torch.get_rng_state()
    whole = gradient(skipping(0.0), samples, 12)
    for size in (1, 5):
        assert h.relative_error(gradient(skipping(0.0), samples, size), whole) < 2e-6
    assert torch.equal(torch.get_rng_state(), state)
    model = skipping(0.0).eval()
    model(**h.pad_right(samples))["loss"].backward()
    assert h.relative_error(h.gradients(model), whole) > 0.1, "control: without dropout"


def test_a_window_skips_the_same_layers_in_all_its_micro_batches():
    """A number for no sample belongs to the window. Control: other windows skip other layers."""
    samples = numbers(12)
    whole = gradient(skipping(0.5), samples, 12)
    for size in (1, 5):
        assert h.relative_error(gradient(skipping(0.5), samples, size), whole) < 2e-6
    skipped = []
    for index in range(8):
        window = one_window(samples, 5, shuffle=False)
        window = replace(window, request=replace(window.request, index=index))
        gradients, _ = window_gradient(skipping(0.5), window)
        skipped.append(tuple(name for name, value in gradients.items() if not value.any()))
    assert len(set(skipped)) > 1
