"""TRL's SFTTrainer with the mixin: prompts and completions, its own loss, its metrics, activation
checkpointing on by default.
"""

import copy
import random

import helpers as h
import pytest
from datasets import Dataset
from test_exact_trainer import CLOSE, NUM_SAMPLES, STILL, WINDOW
from trainers import LAYOUTS, WORDS, arguments, make_trainer, mixed, weight_error, word_tokenizer
from trl import SFTConfig, SFTTrainer

from hf_ga import ConfigError

ExactSFTTrainer = mixed(SFTTrainer)


def rows(num_samples: int) -> list[dict[str, str]]:
    """Completions of 1, 2 or 9 words."""
    rng = random.Random(0)

    def text(length):
        return " ".join(rng.choices(WORDS, k=length))

    return [
        {"prompt": text(rng.randint(2, 6)) + " ", "completion": text(rng.choice([1, 2, 9]))}
        for _ in range(num_samples)
    ]


def sft(folder, trainer_class, model, layout, num_samples=NUM_SAMPLES, **more):
    """A finished run of a copy of the model."""
    args = arguments(folder, layout, SFTConfig, bf16=False, **more)
    dataset = Dataset.from_list(rows(num_samples))
    trainer = make_trainer(
        trainer_class, copy.deepcopy(model), args, dataset, processing_class=word_tokenizer()
    )
    trainer.train()
    return trainer.run


def test_all_layouts_make_the_same_updates_and_trls_do_not(tmp_path):
    """TRL divides right, but its dropout masks depend on the layout."""
    one = {"num_train_epochs": 1}
    full, split = (
        sft(tmp_path, ExactSFTTrainer, h.gpt2(0.1), layout, **one) for layout in LAYOUTS[:2]
    )
    assert h.relative_error(split.gradients[0], full.gradients[0]) < CLOSE
    assert weight_error(split, full) < CLOSE
    assert split.losses == pytest.approx(full.losses, rel=CLOSE)
    assert [log["num_tokens"] for log in split.logs] == [log["num_tokens"] for log in full.logs]
    plain_full, plain = (
        sft(tmp_path, SFTTrainer, h.gpt2(0.1), layout, **one) for layout in LAYOUTS[:2]
    )
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 0.05
    assert (
        full.logs[-1]["num_tokens"] == plain_full.logs[-1]["num_tokens"]
    )  # those of rehearsals are not among them


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_that_of_the_full_batch(tmp_path, smoothing):
    """Over the tokens of the completions, by plain PyTorch in float64; the tokens are made by
    hand.
    """
    model = h.llama(0.0)
    encode = word_tokenizer()
    samples = []
    for row in rows(NUM_SAMPLES)[:WINDOW]:
        prompt, completion = (encode(row[name]).input_ids for name in ("prompt", "completion"))
        ids = [*prompt, *completion, encode.eos_token_id]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        samples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})

    def smoothed(outputs, batch):
        chosen = batch["labels"][:, 1:] != -100
        losses = -outputs.logits[:, :-1][chosen].log_softmax(-1)
        right = losses.gather(1, batch["labels"][:, 1:][chosen][:, None])[:, 0]
        return ((1 - smoothing) * right + smoothing * losses.mean(1)).sum(), len(right)

    reference = h.full_batch_gradient(model, h.pad_right(samples), loss_fn=smoothed)
    run = sft(tmp_path, ExactSFTTrainer, model, (4, 4), label_smoothing_factor=smoothing, **STILL)
    assert h.relative_error(run.gradients[0], reference) < CLOSE


def test_the_balancing_loss_of_experts(tmp_path):
    model = h.mixtral(0.5)
    layouts = LAYOUTS[:2]
    one = {"num_train_epochs": 1}
    full, split = (sft(tmp_path, ExactSFTTrainer, model, layout, **one) for layout in layouts)
    assert weight_error(split, full) < CLOSE
    first = {"max_steps": 1}
    plain_full, plain = (sft(tmp_path, SFTTrainer, model, layout, **first) for layout in layouts)
    assert h.relative_error(split.gradients[0], full.gradients[0]) < CLOSE
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 100 * CLOSE


def test_joined_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="padding_free"):
        sft(tmp_path, ExactSFTTrainer, h.gpt2(0.0), (4, 4), padding_free=True, max_length=None)
