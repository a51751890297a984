"""TRL's DPOTrainer and RewardTrainer with the mixin: two rows a sample, a loss that is the mean
over pairs.
"""

import copy
import random
from functools import partial

import helpers as h
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from datasets import Dataset
from test_exact_trainer import CLOSE, NUM_SAMPLES, STILL, WINDOW
from trainers import LAYOUTS, WORDS, arguments, make_trainer, mixed, weight_error, word_tokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

BETA = 0.5
ONE_EPOCH = {"num_train_epochs": 1}


def pairs(num_samples: int) -> list[dict[str, str]]:
    """Answers of 1 to 9 words."""
    rng = random.Random(0)

    def text(length):
        return " " + " ".join(rng.choices(WORDS, k=length))

    names = ("prompt", "chosen", "rejected")
    return [
        dict(zip(names, map(text, (rng.randint(2, 6), *rng.sample((1, 2, 9), 2))), strict=True))
        for _ in range(num_samples)
    ]


def finished(trainer, folder, layout, config, num_samples=NUM_SAMPLES, **more):
    """The run of a trainer, with dropout."""
    args = arguments(folder, layout, config, bf16=False, disable_dropout=False, **more)
    trainer = trainer(
        args=args, samples=Dataset.from_list(pairs(num_samples)), processing_class=word_tokenizer()
    )
    trainer.train()
    return trainer.run


def dpo(folder, trainer_class, model, layout, **more):
    trainer = partial(
        make_trainer, trainer_class, copy.deepcopy(model), ref_model=copy.deepcopy(model).eval()
    )
    return finished(trainer, folder, layout, DPOConfig, beta=BETA, **more)


def reward(folder, trainer_class, model, layout, **more):
    model = tf.GPT2ForSequenceClassification(
        tf.GPT2Config(**model.config.to_diff_dict() | {"num_labels": 1, "pad_token_id": 0})
    )
    return finished(
        partial(make_trainer, trainer_class, model), folder, layout, RewardConfig, **more
    )


@pytest.mark.slow("a quick test has the gradient of one layout")
@pytest.mark.parametrize(
    ("run", "base"),
    [
        (reward, RewardTrainer),
        (dpo, DPOTrainer),
    ],
)
def test_all_layouts_make_the_same_updates_and_trls_do_not(run, base, tmp_path):
    """TRL's masks depend on the layout."""

    def in_layouts(trainer_class, layouts):
        for layout in layouts:
            torch.manual_seed(0)
            yield run(tmp_path, trainer_class, h.gpt2(0.1), layout, **ONE_EPOCH)

    full, *split = in_layouts(mixed(base), LAYOUTS)
    for found in split:
        assert h.relative_error(found.gradients[0], full.gradients[0]) < CLOSE
        assert weight_error(found, full) < CLOSE
        assert found.losses == pytest.approx(full.losses, rel=CLOSE)
    plain_full, plain = in_layouts(base, LAYOUTS[:2])
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 0.05


def test_the_gradient_is_that_of_the_full_batch(tmp_path):
    """By plain PyTorch in float64: the mean of -log sigmoid(beta (margin - margin of the
    reference)), which is 0 at first.
    """
    model = h.llama(0.0)
    encode = word_tokenizer()
    run = dpo(tmp_path, mixed(DPOTrainer), model, (4, 4), **STILL)
    reference = copy.deepcopy(model).double()
    frozen = copy.deepcopy(reference).requires_grad_(False)

    def log_probability(net, row, name):
        prompt = encode(row["prompt"]).input_ids
        answer = [*encode(row[name]).input_ids, encode.eos_token_id]
        ids = torch.tensor([prompt + answer])
        scores = net(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()

    losses = []
    for row in pairs(NUM_SAMPLES)[:WINDOW]:
        chosen, rejected = (
            log_probability(reference, row, n) - log_probability(frozen, row, n)
            for n in ("chosen", "rejected")
        )
        losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
    torch.stack(losses).mean().backward()
    assert h.relative_error(run.gradients[0], h.gradients(reference)) < CLOSE
