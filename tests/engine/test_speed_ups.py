"""Speed-ups in loops that run their own forwards: used where the loop passes the model's own loss,
with the same gradients as without them, and not elsewhere.
"""

import itertools
from collections import Counter
from contextlib import contextmanager, suppress
from functools import cache, partial

import helpers as h
import pytest
import torch
from documented_loop import CASES, Case, reset_states
from torch.utils.data import DataLoader
from trainers import arguments, make_trainer
from transformers.activations import NewGELUActivation

from hf_ga import Accelerator, ExactTrainer
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine import speed_ups
from hf_ga.errors import LossNotAdditive
from hf_ga.rows.packed_tokens import PackedMasks, PackedTokens
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.speed_up import SpeedUp

WINDOW = 8
MICRO_BATCH = 4
NUM_WINDOWS = 6
USED = NUM_WINDOWS - 3  # the first three windows are rehearsed
CLOSE = 2e-6
ALL = ["lean forward", "chunked loss", "fused attention", "packing"]


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def own_loss(model, batch, index):
    return model(**batch).loss


def train(case, monkeypatch, loss_of=own_loss, candidates=None, prepare=lambda model: None):
    """Train with the loop of Accelerate's documentation.

    Returns: (gradients of the windows, the speed-ups, the prepared model).
    """
    reset_states()
    with monkeypatch.context() as patch:
        if candidates is not None:
            patch.setattr(speed_ups, "candidates", lambda model: candidates)
        accelerator = Accelerator(gradient_accumulation_steps=WINDOW // MICRO_BATCH)
        model = case.build()
        prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = case.make_samples(NUM_WINDOWS * WINDOW)
        loader = DataLoader(samples, MICRO_BATCH, collate_fn=case.collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gradients = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch, len(gradients)))
                if accelerator.sync_gradients:
                    gradients.append(h.gradients(model))
                optimizer.step()
                optimizer.zero_grad()
    return gradients, accelerator.training_loop.engine.speed_ups, model


@cache
def plain_gradients(name):
    """Of a training without speed-ups."""
    with pytest.MonkeyPatch.context() as patch:
        gradients, _, _ = train(CASES[name], patch, candidates=[])
    return gradients


def assert_same(gradients, others):
    assert len(gradients) == len(others) == NUM_WINDOWS
    for ours, plain in zip(gradients, others, strict=True):
        assert h.relative_error(ours, plain) < CLOSE


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("GPT-2", []),
        ("BERT masked LM", []),
        ("LoRA", []),
        ("BERT classification", ["chunked loss"]),
        ("questions", ["chunked loss", "packing"]),
    ],
)
def test_gradients_are_the_same_with_and_without(name, left_out, monkeypatch):
    gradients, used, model = train(CASES[name], monkeypatch)
    assert_same(gradients, plain_gradients(name))
    assert [speed_up.name for speed_up in used.used] == [n for n in ALL if n not in left_out]
    assert sorted(used.left_out) == sorted(left_out)
    assert set(used.num_used.values()) == {USED * WINDOW // MICRO_BATCH}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_that_layers_get_after_the_trial_see_padded_samples(monkeypatch):
    """This one depends on the column of a token."""

    def weigh(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        assert len(hidden) == MICRO_BATCH
        weighted = hidden * torch.linspace(0.5, 1.5, hidden.shape[1])[None, :, None]
        return (weighted, *output[1:]) if isinstance(output, tuple) else weighted

    def loss_of(model, batch, index):
        layer = model.transformer.h[0]
        if index == NUM_WINDOWS - 2 and not layer._forward_hooks:
            layer.register_forward_hook(weigh)
        return model(**batch).loss

    case = CASES["GPT-2"]
    plain, _, _ = train(case, monkeypatch, loss_of, candidates=[])
    gradients, used, _ = train(case, monkeypatch, loss_of)
    assert_same(gradients, plain)
    assert "hooks" in used.left_out["packing"]
    assert used.num_used["packing"]


def test_activation_checkpointing_repeats_packed_tokens(monkeypatch):
    def checkpoint(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})

    gradients, used, _ = train(CASES["GPT-2"], monkeypatch, prepare=checkpoint)
    assert_same(gradients, plain_gradients("GPT-2"))
    assert list(used.num_used) == ALL


class Wrong(SpeedUp):
    """Changes one gradient."""

    name = "wrong"

    def attach(self, model, draws):
        self.model = model

    def before(self, call):
        def change(module, args, outputs):
            outputs.register_hook(lambda gradient: gradient * 1.01)

        self.handle = self.model.get_input_embeddings().register_forward_hook(change)

    def after(self):
        self.handle.remove()


def passes_of(name, monkeypatch, candidates):
    """Returns: (forwards and backwards of a training, the speed-ups)."""
    passes = Counter()

    def note(module, args, outputs):
        passes.update(["forward"])
        outputs[0].register_hook(lambda _: passes.update(["backward"]))

    def watch(model):
        model.base_model.register_forward_hook(note)

    _, used, _ = train(CASES[name], monkeypatch, candidates=candidates, prepare=watch)
    return passes, used


def cost_of_trial(name, monkeypatch, candidates=None):
    """Returns: (forwards, backwards, the speed-ups), beside those of a run without any."""
    without, _ = passes_of(name, monkeypatch, [])
    # A rehearsal is an iteration like others, and no window is computed again.
    assert without["forward"] == NUM_WINDOWS * WINDOW // MICRO_BATCH
    passes, used = passes_of(name, monkeypatch, candidates)
    return *((passes - without)[kind] for kind in ("forward", "backward")), used


def test_a_trial_costs_two_micro_batches(monkeypatch):
    """One without any speed-up, and one with all. Where these change how the loss is read, a
    forward without packing, too.
    """
    assert cost_of_trial("BERT classification", monkeypatch)[:2] == (2, 2)
    assert cost_of_trial("GPT-2", monkeypatch)[:2] == (3, 2)


def test_a_trial_in_which_the_last_one_fails_costs_one_more(monkeypatch):
    candidates = [LeanForward(), Wrong()]
    *cost, used = cost_of_trial("GPT-2", monkeypatch, candidates)
    assert cost == [3, 3]
    assert used.used == candidates[:1]
    assert "relative error" in used.left_out["wrong"]


def test_a_wrong_speed_up_is_left_out(monkeypatch):
    gradients, used, _ = train(CASES["GPT-2"], monkeypatch, candidates=[Wrong()])
    assert_same(gradients, plain_gradients("GPT-2"))
    assert "relative error" in used.left_out["wrong"]
    assert not used.used


def loss_of_hidden_states(model, batch, index):
    outputs = model(**batch, output_hidden_states=True)
    return outputs.loss + outputs.hidden_states[-1].square().mean()


def two_forwards(model, batch, index):
    return (model(**batch).loss + model(**batch).loss) / 2


@pytest.mark.parametrize("loss_of", [loss_of_hidden_states, two_forwards])
def test_none_where_the_loop_has_another_loss(loss_of, monkeypatch):
    gradients, used, _ = train(CASES["GPT-2"], monkeypatch, loss_of)
    assert len(gradients) == NUM_WINDOWS
    assert not used.used
    assert not used.num_used
    assert sorted(used.left_out) == sorted(ALL)


def later(loss_of, model, batch, index):
    """The model's own loss, and from the fifth window on another one."""
    return own_loss(model, batch, index) if index < 4 else loss_of(model, batch, index)


def loss_of_logits(model, batch, index):
    """Of all positions, also those of the padding."""
    logits = model(**batch).logits
    return logits.square().mean((1, 2)).mean()


def test_a_term_of_one_call_is_refused_where_it_ends_the_speed_ups(monkeypatch):
    """Which read the keys of that attempt."""
    calls = itertools.count()

    def loss_of(model, batch, index):
        is_lazy = next(calls) == NUM_WINDOWS * WINDOW // MICRO_BATCH - 2
        return (loss_of_hidden_states if is_lazy else own_loss)(model, batch, index)

    with pytest.raises(LossNotAdditive, match="by what it counts"):
        train(CASES["GPT-2"], monkeypatch, loss_of)


@pytest.mark.parametrize("loss_of", [loss_of_hidden_states, loss_of_logits])
def test_a_window_is_repeated_if_the_loop_changes_its_loss(loss_of, monkeypatch):
    loss_of = partial(later, loss_of)
    gradients, used, _ = train(CASES["GPT-2"], monkeypatch, loss_of)
    plain, _, _ = train(CASES["GPT-2"], monkeypatch, loss_of, candidates=[])
    assert_same(gradients, plain)
    assert used.num_used["packing"] >= WINDOW // MICRO_BATCH
    assert not used.used


def test_logits_that_are_read_are_the_models_own(monkeypatch):
    """Then only speed-ups are used that leave them as they are."""

    def recording(seen, model, batch, index):
        outputs = model(**batch)
        if index >= 4:
            is_token = batch["attention_mask"].bool()
            seen.append(outputs.logits.detach()[is_token])
        return outputs.loss

    logits = []
    plain_logits = []
    gradients, used, _ = train(CASES["GPT-2"], monkeypatch, partial(recording, logits))
    plain, _, _ = train(
        CASES["GPT-2"], monkeypatch, partial(recording, plain_logits), candidates=[]
    )
    assert_same(gradients, plain)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-5)
    assert [speed_up.name for speed_up in used.used] == ["lean forward", "fused attention"]


def test_micro_batches_of_another_structure_are_computed_without(monkeypatch):
    """Within one window: their terms are the same as those with speed-ups."""

    def sometimes_without_mask(samples):
        batch = h.pad_right(samples)
        if len(samples[0]["input_ids"]) % 2:
            del batch["attention_mask"]
        return batch

    case = Case(lambda: h.gpt2(0.1), collate=sometimes_without_mask)
    gradients, used, _ = train(case, monkeypatch)
    plain, _, _ = train(case, monkeypatch, candidates=[])
    assert_same(gradients, plain)
    assert 0 < used.num_used["chunked loss"] < USED * WINDOW // MICRO_BATCH


def test_by_hand(monkeypatch):
    def trained(candidates):
        reset_states()
        with monkeypatch.context() as patch:
            if candidates is not None:
                patch.setattr(speed_ups, "candidates", lambda model: candidates)
            accelerator = Accelerator()
            model = h.gpt2(0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(
                h.token_samples(NUM_WINDOWS * WINDOW), MICRO_BATCH, collate_fn=h.pad_right
            )
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            gradients = []
            for step, batch in enumerate(loader):
                accelerator.backward(model(**batch).loss / 2)
                if step % 2 == 1:
                    gradients.append(h.gradients(model))
                    optimizer.step()
                    optimizer.zero_grad()
        return gradients, accelerator.training_loop.engine.speed_ups

    gradients, used = trained(None)
    plain, _ = trained([])
    assert_same(gradients, plain)
    assert list(used.num_used) == ALL


def test_exact_trainer_uses_them(tmp_path, monkeypatch):
    """Trainer divides the loss by 1."""

    def trained(candidates):
        with monkeypatch.context() as patch:
            if candidates is not None:
                patch.setattr(speed_ups, "candidates", lambda model: candidates)
            trainer = make_trainer(
                ExactTrainer,
                h.gpt2(0.1),
                arguments(tmp_path, (MICRO_BATCH, WINDOW // MICRO_BATCH), num_train_epochs=1),
                h.token_samples(NUM_WINDOWS * WINDOW),
                data_collator=h.pad_right,
            )
            trainer.train()
        return trainer.run.gradients, trainer._window.engine.speed_ups

    gradients, used = trained(None)
    plain, _ = trained([])
    assert_same(gradients, plain)
    assert list(used.num_used) == ALL


@contextmanager
def drawing(draws):
    with draws.scope():
        draws.begin(sample_keys(0, 0, [4, 2, 9]), window_key(0, 0, 0))
        yield


def test_packed_tokens_have_the_masks_of_padded_samples():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    tokens = PackedTokens.of(mask, torch.device("cpu"))
    draws = KeyedDraws()
    x = torch.ones(3, 5, 8)
    with drawing(draws):
        padded = [torch.nn.functional.dropout(x, 0.4) for _ in range(2)]
    with drawing(draws):
        masks = PackedMasks(tokens, draws.keys)
        draws.mask_source = type("Source", (), {"masks_of_shape": lambda _, shape: masks})()
        packed = [torch.nn.functional.dropout(tokens.pack(x), 0.4) for _ in range(2)]
    for a, b in zip(packed, padded, strict=True):
        assert torch.equal(a, tokens.pack(b))
    assert not torch.equal(*packed)  # the draws differ


def test_nothing_is_left_of_an_interrupted_forward(monkeypatch):
    before = NewGELUActivation.forward

    def interrupted(model, batch, index):
        if index == 4:
            handle = model.transformer.register_forward_hook(lambda *_: 1 / 0)
            with suppress(ZeroDivisionError):
                model(**batch)
            assert NewGELUActivation.forward is before
            handle.remove()
            raise InterruptedError
        return model(**batch).loss

    with pytest.raises(InterruptedError):
        train(CASES["GPT-2"], monkeypatch, interrupted)
    assert NewGELUActivation.forward is before
