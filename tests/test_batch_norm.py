"""replace_batch_norm: the model becomes exact for any split; scale, shift and frozen statistics are those that were there."""

import helpers as h
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from torch import nn

import hf_ga


@h.seeded
def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": h.NUM_CLASSES}
    model = tf.ResNetForImageClassification(tf.ResNetConfig(**sizes))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # trained-looking statistics and scales
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model


def images(n):
    rng = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 32, 32, generator=rng), "labels": i % h.NUM_CLASSES} for i in range(n)]


@pytest.mark.parametrize("by", ["group_norm", "frozen"])
def test_any_split_is_the_full_batch(by):
    samples = images(8)
    with pytest.raises(hf_ga.LossNotAdditive, match=r"BatchNorm2d.*normalises by the statistics"):  # the control
        hf_ga.prove_targets(resnet(), samples, h.pad_right)
    model = resnet()
    assert len(hf_ga.replace_batch_norm(model, by)) == 6
    full, full64 = (h.full_batch_gradient(model, h.pad_right(samples), dtype) for dtype in (torch.float32, torch.float64))
    for micro_batch_size in (1, 3):
        accelerator = Accelerator()
        loader = hf_ga.WindowLoader(
            samples, h.pad_right, accelerator=accelerator, per_device_batch_size=micro_batch_size, global_batch_size=8
        )
        model.zero_grad()
        hf_ga.backward_window(accelerator, model, next(iter(loader)))
        h.assert_promise_1(h.gradients(model), full, full64)


def test_frozen_is_what_evaluation_mode_computes():
    model, batch = resnet(), h.pad_right(images(4))
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        model.train()
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-3), "the control: training mode is another function"
    model = resnet()
    hf_ga.replace_batch_norm(model, "frozen")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        assert torch.allclose(model.train()(**batch).logits, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_group_norm_by_hand():
    model = nn.Sequential(nn.Conv1d(2, 24, 1), nn.BatchNorm1d(24, eps=1e-3))
    scale, shift = model[1].weight, model[1].bias
    scale.data.uniform_(), shift.data.uniform_()
    assert hf_ga.replace_batch_norm(model) == ["1"]
    assert model[1].weight is scale and model[1].bias is shift and model[1].num_groups == 3
    x = torch.randn(2, 24, 5, dtype=torch.float64)
    groups = x.view(2, 3, 40)
    normal = (groups - groups.mean(2, keepdim=True)) / (groups.var(2, unbiased=False, keepdim=True) + 1e-3).sqrt()
    expected = normal.view(2, 24, 5) * scale[:, None] + shift[:, None]
    assert torch.allclose(model[1].double()(x), expected, rtol=1e-6)


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (2, 1), (14, 1), (16, 2), (64, 8), (96, 12), (200, 25), (512, 32)])
def test_number_of_groups(channels, groups):
    model = nn.Sequential(nn.BatchNorm2d(channels))
    hf_ga.replace_batch_norm(model)
    assert model[0].num_groups == groups


def test_one_module_in_two_places_stays_one():
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    assert hf_ga.replace_batch_norm(model) == ["a"]
    assert model["a"] is model["b"][0] and isinstance(model["a"], nn.GroupNorm)


def test_a_model_without_batch_norm_stays():
    model = h.bert_classifier()
    assert hf_ga.replace_batch_norm(model) == [] and type(model) is tf.BertForSequenceClassification


def test_refusals():
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(hf_ga.ConfigError, match=r"0 \(BatchNorm1d\) has no running statistics.*group_norm"):
        hf_ga.replace_batch_norm(model, "frozen")
    assert isinstance(model[0], nn.BatchNorm1d)
    with pytest.raises(hf_ga.ConfigError, match="'group_norm' or 'frozen', not by 'layer_norm'"):
        hf_ga.replace_batch_norm(model, "layer_norm")
    with pytest.raises(hf_ga.ConfigError, match="the model itself is a BatchNorm"):
        hf_ga.replace_batch_norm(nn.BatchNorm1d(4))


def test_inputs_without_further_axes():
    """Features (samples, channels) behind BatchNorm1d, as in a classifier: group norm leaves them a gradient."""
    torch.manual_seed(0)

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, h.NUM_CLASSES))

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

    samples, model = [{"x": torch.randn(8), "labels": i % h.NUM_CLASSES} for i in range(8)], Features()
    with pytest.raises(hf_ga.LossNotAdditive):
        hf_ga.prove_targets(model, samples, h.pad_right)
    hf_ga.replace_batch_norm(model)
    assert hf_ga.prove_targets(model, samples, h.pad_right).residual < 1e-5
