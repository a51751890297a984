"""Small whole runs for the tests of the loop and of checkpoints: data, models, settings, comparisons."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import hf_ga
from hf_ga import corpus

TRAIN, VALIDATION, WINDOW = 60, 13, 16  # 3 windows of 16 and one of 12 in an epoch


SENTENCE = "the window of samples is one step and every split gives same update while dropout stays keyed by position"


WORDS = SENTENCE.split()


def ragged_rows(count: int, seed: int) -> list[dict]:
    """Texts of 1 to 12 words that tell their label by one word."""
    rng = np.random.default_rng(seed)
    return [
        {"text": " ".join([WORDS[i % 3], *rng.choice(WORDS[3:], rng.integers(0, 12))]), "label": ("red", "green", "blue")[i % 3]}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_tiny_models(folder: Path) -> None:
    """A GPT-2 in `gpt` and a BERT in `bert`, with their own dropout of 0.1 and a tokenizer of 300 tokens."""
    tokenizer = corpus.train_tokenizer([SENTENCE] * 3, 300)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(5)
    for name, model in {
        "gpt": tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, n_positions=64, **ends)),
        "bert": tf.BertForMaskedLM(tf.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@contextmanager
def filled_place(folder: Path) -> Iterator[Path]:
    """Tiny models, train.jsonl and validation.jsonl; caches of datasets and evaluate go there too."""
    save_tiny_models(folder)
    write_rows(folder / "train.jsonl", ragged_rows(TRAIN, seed=1))
    write_rows(folder / "validation.jsonl", ragged_rows(VALIDATION, seed=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        yield folder


def small_config(place: Path, output: Path, **more) -> hf_ga.FinetuneConfig:
    """8 optimizer steps (two epochs) in windows of 16, two micro-batches each, with everything named."""
    settings = {
        "model_name_or_path": str(place / "gpt"),
        "dataset_name": str(place / "train.jsonl"),
        "validation_file": str(place / "validation.jsonl"),
        "text_column": "text",
        "max_length": 24,
        "per_device_train_batch_size": 8,
        "global_batch_size": WINDOW,
        "learning_rate": 3e-4,
        "warmup_steps": 2,
        "max_steps": 8,
        "eval_steps": 3,
        "save_steps": 3,
        "seed": 7,
        "output_dir": str(output),
    }
    return hf_ga.FinetuneConfig(**{**settings, **more})


def train(place: Path, output: Path, **more) -> dict:
    return hf_ga.finetune(small_config(place, output, **more))


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def saved_weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.double().flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


def relative_distance(folder: Path, other: Path) -> float:
    """Global L2 norm of the difference of two saved models, relative to the second."""
    return float((saved_weights(folder) - saved_weights(other)).norm() / saved_weights(other).norm())
