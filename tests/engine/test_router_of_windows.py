"""The balancing loss of mixtures of experts in a user's own loop: any split of a window is the full
batch, with the choices of the whole window.
"""

import accelerate
import helpers as h
import pytest
import torch
import transformers as tf
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader
from transformers.models.mixtral import modeling_mixtral

import hf_ga
from hf_ga.errors import ConfigError, LossNotAdditive

WINDOW = 16
NUM_SAMPLES = 40
COEFFICIENT = 0.5  # large, so that an error of the balancing loss shows
CLOSE = 1e-6


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@h.seeded
def qwen():
    sizes = {
        "vocab_size": h.VOCABULARY,
        "hidden_size": h.WIDTH,
        "intermediate_size": 2 * h.WIDTH,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = tf.Qwen2MoeConfig(**sizes, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    return tf.Qwen2MoeForCausalLM(config)


FAMILIES = {"mixtral": lambda: h.mixtral(COEFFICIENT), "qwen": qwen}


def own_loss(accelerator, model, batch):
    accelerator.backward(model(**batch).loss)


def first_windows(
    kind=hf_ga.Accelerator, batch_size=4, step=own_loss, build=FAMILIES["mixtral"], **options
):
    """The gradient of each window, and its loss."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    options = {"gradient_accumulation_steps": WINDOW // batch_size, **options}
    accelerator = kind(cpu=True, **options)
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(h.token_samples(NUM_SAMPLES), batch_size, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            step(accelerator, model, batch)
            if accelerator.sync_gradients:
                loss = getattr(accelerator, "window_loss", None)
                found.append((h.gradients(model), loss))
            optimizer.step()
            optimizer.zero_grad()
    return found


def full_batch(build=FAMILIES["mixtral"], coefficient=None):
    """Gradient and loss of the first window in one float64 forward.

    coefficient: That of a balancing loss that the loop adds again.
    """
    model = build().train()
    model.set_experts_implementation("eager")  # the others have no float64
    outputs = model.double()(**h.pad_right(h.token_samples(NUM_SAMPLES)[:WINDOW]))
    loss = outputs.loss
    if coefficient is not None:
        loss = loss + coefficient * outputs.aux_loss
    loss.backward()
    return h.gradients(model), loss.item()


@pytest.mark.parametrize(("name", "batch_size"), [("mixtral", 1), ("mixtral", 16), ("qwen", 4)])
def test_every_split_is_the_full_batch(name, batch_size):
    build = FAMILIES[name]
    reference, loss = full_batch(build)
    windows = first_windows(batch_size=batch_size, build=build)
    gradient, window_loss = windows[0]
    assert len(windows) == 3
    assert h.relative_error(gradient, reference) < CLOSE
    assert float(window_loss) == pytest.approx(loss, rel=1e-6)


def test_accelerates_splits_are_not():
    """Control; and the balancing loss is large enough to show."""
    reference, _ = full_batch()
    gradient, _ = first_windows(accelerate.Accelerator)[0]
    assert h.relative_error(gradient, reference) > 0.1
    without, _ = full_batch(lambda: h.mixtral(0.0))
    assert h.relative_error(without, reference) > 0.03


def sum_of_targets(accelerator, model, batch):
    number = (batch["labels"][:, 1:] != h.IGNORED).sum()
    accelerator.backward(model(**batch).loss * number, num_targets=number)


def added_again(accelerator, model, batch):
    outputs = model(**batch)
    accelerator.backward(outputs.loss + 0.25 * outputs.aux_loss)


def in_two_backwards(accelerator, model, batch):
    outputs = model(**batch)
    accelerator.backward(outputs.loss, retain_graph=True)
    accelerator.backward(0.25 * outputs.aux_loss)


@pytest.mark.parametrize(
    ("step", "coefficient"),
    [(sum_of_targets, None), (added_again, 0.25), (in_two_backwards, 0.25)],
)
def test_the_loops_own_multiples(step, coefficient):
    reference, loss = full_batch(coefficient=coefficient)
    gradient, window_loss = first_windows(step=step)[0]
    assert h.relative_error(gradient, reference) < CLOSE
    assert float(window_loss) == pytest.approx(loss, rel=1e-6)


def test_another_model_of_the_family_is_not_counted():
    """A teacher in the loop, whose experts choose otherwise."""
    teacher = h.mixtral(COEFFICIENT)
    for parameter in teacher.parameters():
        parameter.data = parameter.data.flip(0)

    def step(accelerator, model, batch):
        with torch.no_grad():
            taught = teacher(**batch)
        outputs = model(**batch)
        assert taught.aux_loss != outputs.aux_loss
        accelerator.backward(outputs.loss)

    gradient, _ = first_windows(step=step)[0]
    assert h.relative_error(gradient, full_batch()[0]) < CLOSE


def test_the_loop_sees_the_loss_of_its_micro_batch():
    plain = h.mixtral(COEFFICIENT).train()

    def step(accelerator, model, batch):
        outputs = model(**batch)
        expected = plain(**batch)
        if accelerator.step == 1 and not seen:
            assert outputs.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
            assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        seen.append(outputs.loss.item())
        accelerator.backward(outputs.loss)

    seen = []
    before = modeling_mixtral.load_balancing_loss_func
    first_windows(step=step)
    assert len(seen) == NUM_SAMPLES // 4
    assert modeling_mixtral.load_balancing_loss_func is before


def squared(accelerator, model, batch):
    outputs = model(**batch)
    accelerator.backward(outputs.loss + outputs.aux_loss.square())


def of_the_step(accelerator, model, batch):
    outputs = model(**batch)
    accelerator.backward(outputs.loss + accelerator.step * outputs.aux_loss)


def without_mask(accelerator, model, batch):
    ids = batch["input_ids"]
    accelerator.backward(model(input_ids=ids, labels=batch["labels"]).loss)


def two_forwards(accelerator, model, batch):
    accelerator.backward(model(**batch).loss + model(**batch).loss)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (squared, "in PowBackward0, so it is not the full batch's"),
        (of_the_step, r"has coefficients \[2.5, 3.5, 4.5\] in 3 of 3 micro-batches"),
        (without_mask, "differ from those in the first pass"),
        (two_forwards, "computed it 1 times and the loop 2 times"),
    ],
)
def test_other_uses_are_refused(step, message):
    with pytest.raises(LossNotAdditive, match=message):
        first_windows(step=step)


def by_hand(num_backwards):
    """The gradient of the first step of a loop without `accumulate`."""
    accelerator = hf_ga.Accelerator(cpu=True)
    model = h.mixtral(COEFFICIENT).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch_size = WINDOW // num_backwards
    loader = DataLoader(h.token_samples(NUM_SAMPLES), batch_size, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gradients = []
    for index, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss / num_backwards)
        if index % num_backwards == num_backwards - 1:
            gradients.append(h.gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return gradients[0]


def test_a_loop_that_accumulates_by_hand_is_refused():
    """Only then: one with a step after each backward is exact."""
    assert h.relative_error(by_hand(1), full_batch()[0]) < CLOSE
    with pytest.raises(ConfigError, match=r"accumulate\(model\)"):
        by_hand(4)
