"""fp16 with a loss scaler, for real on a CPU: skipped windows, the scale, clipping and several
optimizers.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from steps import Training, backward_window, same, train_step
from torch import nn

import hf_ga
from hf_ga.parallel.prepare import enable_fp16_on_cpu

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
WINDOW = 8
MICRO_BATCH = 2
SCALE = 2.0**10
FP16 = 2.0**-11  # unit roundoff: the relative error of one rounding


def fp16_accelerator(init_scale=SCALE, growth_interval=2000):
    AcceleratorState._reset_state(True)
    handler = GradScalerKwargs(init_scale=init_scale, growth_interval=growth_interval)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[handler])
    enable_fp16_on_cpu(accelerator)
    return accelerator


class Regression(nn.Module):
    """Mean squared error, computed in float32 from a linear layer in half precision; or its
    outputs, without y.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x, y=None):
        out = self.linear(x).squeeze(-1).float()
        return out if y is None else F.mse_loss(out, y)


def squared_error(outputs, batch):
    return (outputs - batch["target"]).square().sum(), len(outputs)


TOO_LARGE = {
    "in the forward": 1e5,
    "in the backward": 3e4,
}  # float16 ends at 65504; 3e4 fits, its scaled gradient does not


def points(num_samples, overflows_at=(), value=1e5, target="y"):
    generator = torch.Generator().manual_seed(5)
    samples = [
        {"x": torch.randn(3, generator=generator), target: torch.randn((), generator=generator)}
        for _ in range(num_samples)
    ]
    for index in overflows_at:
        samples[index]["x"] = torch.full((3,), value)
    return samples


def loader(samples, micro_batch=MICRO_BATCH, window=WINDOW, collate=h.pad_right):
    return hf_ga.WindowLoader(
        samples,
        collate,
        accelerator=Accelerator(),
        global_batch_size=window,
        per_device_batch_size=micro_batch,
        shuffle=False,
    )


def training_of(accelerator, model=None, **more):
    return Training(accelerator, model or Regression(), **more)


# -- overflow
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["AdamW", "fused AdamW"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("loss_fn", [None, squared_error], ids=["own loss", "loss_fn"])
@pytest.mark.parametrize("where", TOO_LARGE)
def test_an_overflow_in_one_micro_batch_skips_the_whole_window(
    where, loss_fn, max_grad_norm, fused
):
    """The second of four micro-batches of the second of three windows."""
    samples = points(
        3 * WINDOW, [WINDOW + MICRO_BATCH], TOO_LARGE[where], "y" if loss_fn is None else "target"
    )
    training = training_of(fp16_accelerator(), fused=fused)
    options = {"loss_fn": loss_fn, "max_grad_norm": max_grad_norm}
    snapshots = [training.snapshot()]
    results = []
    for window in loader(samples):
        results.append(training.step(window, **options))
        snapshots.append(training.snapshot())
    assert [(r.skipped, r.overflowed) for r in results] == [
        (False, False),
        (True, True),
        (False, False),
    ]
    assert [r.loss_scale for r in results] == [SCALE, SCALE, SCALE / 2]
    assert [same(a, b) for a, b in itertools.pairwise(snapshots)] == [False, True, False]
    assert training.scheduler.last_epoch == 2
    assert training.accelerator.scaler.get_scale() == SCALE / 2
    assert all(p.grad is None for p in training.model.parameters())
    if where == "in the forward":
        assert not math.isfinite(results[1].loss)
    if max_grad_norm:
        assert [math.isfinite(r.grad_norm) for r in results] == [True, False, True]


def test_control_a_scaler_per_micro_batch_does_what_the_window_must_not():
    """The scale falls three times (what overflowed stays in .grad), and the first micro-batch moves
    the weights.
    """
    samples = points(WINDOW, [MICRO_BATCH])
    training = training_of(fp16_accelerator())
    before = training.snapshot()
    for micro_batch in next(iter(loader(samples))).micro_batches:
        training.accelerator.backward(training.model(**micro_batch.batch))
        training.optimizer.step()
    assert training.accelerator.scaler.get_scale() == SCALE / 8
    assert not same(training.snapshot(), before)


def test_accelerate_takes_a_skipped_fused_step_for_one_that_was_made():
    """Why `overflowed` of a fused optimizer is told from the scale."""
    training = training_of(fp16_accelerator(), fused=True)
    (window,) = loader(points(WINDOW, [MICRO_BATCH]))
    assert training.step(window).overflowed
    assert not training.accelerator.optimizer_step_was_skipped


def test_a_window_without_targets_does_not_count_for_the_scale():
    targets = h.tag_samples(WINDOW)
    training = training_of(fp16_accelerator(growth_interval=2), h.bert_token_classifier())
    with_targets, without = loader(targets + [h.without_targets(s) for s in targets])
    training.step(with_targets)
    before = training.snapshot()
    state = training.accelerator.scaler.state_dict()
    result = training.step(without, max_grad_norm=1.0)
    assert (result.skipped, result.overflowed, result.loss_scale, result.loss) == (
        True,
        False,
        None,
        0.0,
    )
    assert same(training.snapshot(), before)
    assert training.accelerator.scaler.state_dict() == state
    assert not training.step(with_targets).skipped
    assert training.accelerator.scaler.get_scale() == 2 * SCALE


@pytest.mark.parametrize(
    ("precision", "scale"), [("no", None), ("fp16", 1.0)], ids=["float32", "scaler switched off"]
)
def test_without_a_scaler_nothing_is_skipped(precision, scale):
    accelerator = Accelerator(
        mixed_precision=precision, cpu=True, kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    enable_fp16_on_cpu(accelerator)
    assert precision == "no" or accelerator.scaler.state_dict() == {}
    (window,) = loader(points(WINDOW))
    result = training_of(accelerator).step(window)
    assert (result.skipped, result.overflowed, result.loss_scale) == (False, False, scale)


class HalfLoss(nn.Module):
    """Its loss is half precision under autocast, in an object that Accelerate does not convert.
    Gradient: the mean of x.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return SimpleNamespace(loss=self.linear(x).mean())


def test_a_loss_in_half_precision_is_weighted_in_float32():
    """The default scale of 65536 is more than float16 holds: weighted in float16, every window's
    gradient would be infinite.
    """
    accelerator = fp16_accelerator(init_scale=2.0**16)
    torch.manual_seed(0)
    model = accelerator.prepare(HalfLoss())
    samples = [{"x": s["x"]} for s in points(WINDOW)]
    (window,) = loader(samples)
    backward_window(accelerator, model, window)
    by_hand = torch.stack([s["x"] for s in samples]).double().mean(0)
    assert (
        model.linear.weight.grad[0].double() / 2**16 - by_hand
    ).norm() <= 4 * FP16 * by_hand.norm()
    model.zero_grad()
    for micro_batch in window.micro_batches:  # the control
        loss = model(**micro_batch.batch).loss
        assert loss.dtype == torch.float16
        accelerator.backward(loss * (MICRO_BATCH / WINDOW))
    assert not model.linear.weight.grad.isfinite().any()


# -- clipping and the gradient
# ----------------------------------------------------------------------------------------------


def float32_gradient(model, samples):
    return {
        name: g.float()
        for name, g in h.full_batch_gradient(model, h.pad_right(samples), torch.float32).items()
    }


def test_clipping_comes_after_unscaling():
    """Against float32, plain: the norms and the clipped updates agree to fp16's rounding (4 of them
    in a row).
    """
    model = h.bert_classifier()
    samples = h.class_samples(WINDOW)
    max_norm = 0.1
    before = copy.deepcopy(model)
    reference = float32_gradient(model, samples)
    clipped = {name: g * (max_norm / h.norm(reference)) for name, g in reference.items()}
    accelerator = fp16_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    (window,) = loader(samples)
    result = train_step(accelerator, model, optimizer, window, max_grad_norm=max_norm)
    error = h.relative_error(update(before, model), clipped)
    assert h.norm(reference) > 3 * max_norm  # so clipping did something
    assert result.grad_norm == pytest.approx(h.norm(reference), rel=4 * FP16)
    assert error <= 4 * FP16

    other = copy.deepcopy(before)  # the control: clip, then unscale
    other, optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
    backward_window(accelerator, other, window)
    scaled_norm = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm).item()
    optimizer.step()
    assert scaled_norm != pytest.approx(h.norm(reference), rel=4 * FP16)
    assert h.relative_error(update(before, other), clipped) > 0.9


def update(before, after):
    return {
        name: (b - a).detach()
        for (name, b), a in zip(before.named_parameters(), after.parameters(), strict=True)
    }


def test_windows_are_added_under_one_scale_and_unscaled_once():
    """What backward_window's docstring says of the gradient under fp16."""
    model = h.bert_classifier()
    samples = h.class_samples(WINDOW)
    reference = float32_gradient(model, samples)
    accelerator = fp16_accelerator()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    (window,) = loader(samples)
    for _ in range(2):
        backward_window(accelerator, model, window)
    twice = {name: 2 * g for name, g in reference.items()}
    assert (
        h.relative_error({n: g / SCALE for n, g in h.gradients(model).items()}, twice) <= 4 * FP16
    )
    accelerator.unscale_gradients()
    assert h.relative_error(h.gradients(model), twice) <= 4 * FP16


# -- optimizers
# -------------------------------------------------------------------------------------------------------------


def test_an_unprepared_optimizer_is_refused():
    """It would step with gradients that are `SCALE` times too large, and go over an overflow."""
    accelerator = fp16_accelerator()
    plain = Regression()
    model = accelerator.prepare(plain)
    before = copy.deepcopy(plain.state_dict())
    (window,) = loader(points(WINDOW))
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    with pytest.raises(
        hf_ga.ConfigError, match=r"SGD does not use the accelerator's scaler.*accelerator\.prepare"
    ):
        train_step(accelerator, model, optimizer, window)
    assert all(torch.equal(v, before[name]) for name, v in plain.state_dict().items())
    backward_window(accelerator, model, window)  # the control: what it would have stepped with
    scaled = h.norm(h.gradients(plain))
    accelerator.prepare(optimizer)
    accelerator.unscale_gradients()
    assert scaled == pytest.approx(SCALE * h.norm(h.gradients(plain)), rel=1e-6)


def test_an_optimizer_prepared_before_the_scaler_is_refused():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    training = training_of(accelerator)
    enable_fp16_on_cpu(accelerator)
    (window,) = loader(points(WINDOW))
    with pytest.raises(hf_ga.ConfigError, match="after enable_fp16_on_cpu"):
        training.step(window)


def test_another_optimizer_keeps_its_gradients_and_does_not_move_the_scale():
    """Accelerate's clipping unscales all prepared optimizers: an infinity among the other's
    gradients would lower the scale.
    """
    accelerator = fp16_accelerator()
    ours = training_of(accelerator)
    other = training_of(accelerator, nn.Linear(2, 1))
    pending = torch.tensor([[3.0, math.inf]])
    other.model.weight.grad = pending.clone()
    (window,) = loader(points(WINDOW))
    result = ours.step(window, max_grad_norm=1.0)
    assert not result.skipped
    assert accelerator.scaler.get_scale() == SCALE
    assert torch.equal(other.model.weight.grad, pending)
    backward_window(accelerator, ours.model, window)  # the control
    accelerator.clip_grad_norm_(ours.model.parameters(), 1.0)
    assert other.model.weight.grad[0, 0] == 3.0 / SCALE
    ours.optimizer.step()
    assert accelerator.scaler.get_scale() == SCALE / 2


def test_a_skip_of_another_optimizer_is_not_ours():
    accelerator = fp16_accelerator()
    ours = training_of(accelerator)
    other = training_of(accelerator)
    good, bad = loader(points(2 * WINDOW, [WINDOW]))
    assert other.step(bad).overflowed
    result = ours.step(good)
    assert accelerator.optimizer_step_was_skipped  # of any of them: stale
    assert (result.skipped, result.overflowed) == (False, False)
    assert ours.scheduler.last_epoch == 1


def test_the_norm_is_of_what_the_optimizer_owns():
    """The other part of the model has gradients that still carry the scale."""
    model = h.bert_classifier()
    samples = h.class_samples(WINDOW)
    reference = float32_gradient(model, samples)
    accelerator = fp16_accelerator()
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.0)
    body = torch.optim.SGD(model.bert.parameters(), lr=0.0)
    model, head, body = accelerator.prepare(model, head, body)
    (window,) = loader(samples)
    result = train_step(accelerator, model, body, window, max_grad_norm=1e9)
    of_body = h.norm({name: g for name, g in reference.items() if name.startswith("bert")})
    assert result.grad_norm == pytest.approx(of_body, rel=4 * FP16)
    assert of_body < 0.9 * h.norm(reference)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_optimizer_without_any_gradient_skips(precision):
    """torch's scaler would raise an AssertionError; in float32 the schedule would go on and nothing
    be trained.
    """
    accelerator = fp16_accelerator() if precision == "fp16" else Accelerator(cpu=True)
    model = accelerator.prepare(Regression())
    unrelated = training_of(accelerator)
    before = unrelated.snapshot()
    (window,) = loader(points(WINDOW))
    state = accelerator.scaler and accelerator.scaler.state_dict()
    options = {"scheduler": unrelated.scheduler, "max_grad_norm": 1.0}
    result = train_step(accelerator, model, unrelated.optimizer, window, **options)
    assert (result.skipped, result.overflowed, result.num_targets) == (True, False, WINDOW)
    assert same(unrelated.snapshot(), before)
    assert (accelerator.scaler and accelerator.scaler.state_dict()) == state
    if precision == "fp16":  # the control
        backward_window(accelerator, model, window)
        with pytest.raises(AssertionError, match="No inf checks"):
            unrelated.optimizer.step()
