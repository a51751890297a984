"""cuDNN's attention is off in every forward and backward of hf_ga's, and nowhere else."""

import contextlib

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.utils.data import DataLoader
from trainers import arguments, make_trainer
from windows import one_window, window_gradient

import hf_ga
from hf_ga.engine.evaluation import EvaluatedLoss
from hf_ga.parallel.fsdp import backend_for

NUM_SAMPLES = 4
NUM_PER_DEVICE = 2


@pytest.fixture(autouse=True, params=[True, False])
def user_setting(request):
    """What the user has set, which every test must find again."""
    before = cudnn_sdp_enabled()
    enable_cudnn_sdp(request.param)
    yield request.param
    enable_cudnn_sdp(before)


class Watched:
    """A model whose attention notes whether cuDNN may compute it, and its backward."""

    def __init__(self) -> None:
        self.model = h.gpt2()
        self.forwards = []
        self.backwards = []
        self.error = None
        self.model.transformer.h[0].attn.register_forward_hook(self._note)

    def _note(self, attention, args, outputs):
        self.forwards.append(cudnn_sdp_enabled())
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda _: self.backwards.append(cudnn_sdp_enabled()))
        if self.error is not None:
            raise self.error


def train_windows(model, tmp_path):
    window_gradient(model, one_window(h.token_samples(NUM_SAMPLES), NUM_PER_DEVICE))


def train_batch(model, tmp_path):
    hf_ga.backward(model, h.pad_right(h.token_samples(NUM_SAMPLES)), micro_batch_size=2)


def train_with_trainer(model, tmp_path):
    args = arguments(tmp_path, (NUM_PER_DEVICE, 2), num_train_epochs=1)
    samples = h.token_samples(NUM_SAMPLES)
    make_trainer(hf_ga.ExactTrainer, model, args, samples, data_collator=h.pad_right).train()


def train_with_accelerator(model, tmp_path):
    accelerator = hf_ga.Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(h.token_samples(NUM_SAMPLES), NUM_PER_DEVICE, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


DOORS = [train_windows, train_batch, train_with_trainer, train_with_accelerator]


@pytest.mark.parametrize("train", DOORS)
def test_off_in_windows_and_restored(train, user_setting, tmp_path):
    watched = Watched()
    batch = h.pad_right(h.token_samples(NUM_SAMPLES))
    watched.model(**batch).loss.backward()
    assert watched.forwards == watched.backwards == [user_setting], "control: no window"
    watched.forwards.clear()
    watched.backwards.clear()
    watched.model.zero_grad()
    train(watched.model, tmp_path)
    assert watched.forwards and watched.backwards
    assert not any(watched.forwards)
    assert not any(watched.backwards)
    assert cudnn_sdp_enabled() == user_setting


@pytest.mark.parametrize("train", DOORS)
def test_restored_after_an_error(train, user_setting, tmp_path):
    watched = Watched()
    watched.error = KeyError("of the model")
    with pytest.raises(KeyError, match="of the model"):
        train(watched.model, tmp_path)
    assert watched.forwards == [False]
    assert cudnn_sdp_enabled() == user_setting


def test_off_in_evaluations(user_setting):
    watched = Watched()
    loss = EvaluatedLoss(backend_for(Accelerator(cpu=True)), watched.model, None)
    batch = h.pad_right(h.token_samples(NUM_SAMPLES))
    with loss.trainable():
        loss.run(batch, NUM_SAMPLES)
        assert cudnn_sdp_enabled() == user_setting
        watched.error = KeyError("of the model")
        with contextlib.suppress(KeyError):
            loss.run(batch, NUM_SAMPLES)
    assert len(watched.forwards) >= 2
    assert not any(watched.forwards)
    assert cudnn_sdp_enabled() == user_setting
