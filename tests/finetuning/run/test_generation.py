"""Texts that models generate, against one token at a time by hand; metrics of them, whatever the
batch.
"""

import json

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from runs import job_config, lines_of, train_job

from hf_ga.finetuning.data.encoding.collation import collate_samples
from hf_ga.finetuning.run.build import prepare_setup
from hf_ga.finetuning.run.scores.metrics import TEXT_METRICS, compute
from hf_ga.finetuning.run.scores.readers import generated_targets

NAME = "translations"
NOISE = 0.5
SOURCES = [
    "the window of",
    "window",
    "of of the window the of",
    "the the",
    "of window the",
    "window of",
]


@pytest.fixture(scope="module")
def trained(place):
    """A run of 24 steps, after which a T5 writes many texts, and most of them wrong."""
    train_job(
        place,
        place / "run",
        NAME,
        max_steps=24,
        learning_rate=1e-2,
        still=True,
        eval_steps=24,
        save_steps=24,
    )
    return place / "run"


@pytest.fixture(scope="module")
def model(trained):
    """Its weights with noise: less sure of what it writes, so that padding and search matter."""
    model = tf.T5ForConditionalGeneration.from_pretrained(trained)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += NOISE * parameter.data.std() * noise if parameter.dim() > 1 else 0.0
    return model.eval()


def setup_and_samples(place, num_beams=1):
    config = job_config(place, place / "unused", NAME, max_new_tokens=6, num_beams=num_beams)
    setup = prepare_setup(config, Accelerator(cpu=True))
    return setup, [{"input_ids": setup.data.tokenizer(text)["input_ids"]} for text in SOURCES]


@torch.no_grad()
def by_hand(model, ids, count):
    """The likeliest token each time, of one source without padding."""
    made = [model.config.decoder_start_token_id]
    while len(made) <= count and made[-1:] != [model.config.eos_token_id]:
        logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([made])).logits
        made.append(int(logits[0, -1].argmax()))
    return made


@pytest.mark.slow("a whole run")
def test_a_generated_text_is_that_of_its_source_alone(place, model):
    """In batches of every size; the control: without the mask, padding would change it."""
    setup, samples = setup_and_samples(place)
    tokenizer = setup.data.tokenizer
    expected = [
        tokenizer.decode(by_hand(model, s["input_ids"], 6), skip_special_tokens=True).strip()
        for s in samples
    ]
    for size in (1, 4):
        made = []
        unmasked = []
        for start in range(0, len(samples), size):
            batch = collate_samples(samples[start : start + size], tokenizer.pad_token_id)
            made += generated_targets(setup, model, batch)
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
            unmasked += generated_targets(setup, model, batch)
        assert made == expected
        assert len(set(made)) > 3
        assert size == 1 or unmasked != expected


def test_beams_reach_the_search(place, model):
    """Against `generate` with as many; the control: greedy search finds other texts."""
    greedy, samples = setup_and_samples(place)
    tokenizer = greedy.data.tokenizer
    batch = collate_samples(samples, tokenizer.pad_token_id)
    made = model.generate(**batch, max_new_tokens=6, num_beams=8, do_sample=False)
    expected = [text.strip() for text in tokenizer.batch_decode(made, skip_special_tokens=True)]
    assert generated_targets(setup_and_samples(place, num_beams=8)[0], model, batch) == expected
    assert generated_targets(greedy, model, batch) != expected


def test_metrics_of_generated_texts(place, trained, tmp_path):
    """As computed from the texts that are written to predictions.jsonl, and as at the end of
    training.
    """
    file = str(place / f"{NAME}.validation.jsonl")
    flags = {
        "eval_only": True,
        "model_name_or_path": str(trained),
        "per_device_eval_batch_size": 3,
        "predict_file": file,
    }
    results = train_job(place, tmp_path / "out", NAME, **flags)
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    texts = [row["prediction"]["text"] for row in rows]
    targets = [row["target"] for row in rows]
    for name, value in compute(TEXT_METRICS, zip(texts, targets, strict=True)).items():
        assert value == pytest.approx(results[f"eval_{name}"])
    assert 0 < results["eval_rougeL"] < 1  # the control: neither is what any text would give
    assert lines_of(trained)[-1]["eval_rougeL"] == pytest.approx(results["eval_rougeL"], rel=1e-6)
