"""Small whole runs for the tests of the loop and of checkpoints: data, models, settings,
comparisons.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import hf_ga
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.run.results import outputs

TRAIN, VALIDATION, WINDOW = 60, 13, 16  # 3 windows of 16 and one of 12 in an epoch
SENTENCE = (
    "the window of samples is one step and every split gives same update while dropout stays "
    "keyed by position"
)
WORDS = SENTENCE.split()


def ragged_rows(count: int, seed: int) -> list[dict]:
    """Texts of 1 to 12 words that tell their label by one word."""
    rng = np.random.default_rng(seed)
    return [
        {
            "text": " ".join([WORDS[i % 3], *rng.choice(WORDS[3:], rng.integers(0, 12))]),
            "label": ("red", "green", "blue")[i % 3],
        }
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_tiny_models(folder: Path) -> None:
    """A GPT-2 in `gpt` and a BERT in `bert`, with their own dropout of 0.1 and a tokenizer of 300
    tokens.
    """
    tokenizer = corpus.train_tokenizer([SENTENCE] * 3, 300)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(5)
    for name, model in {
        "gpt": tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, n_positions=64, **ends)),
        "bert": tf.BertForMaskedLM(
            tf.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
        ),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@contextmanager
def without_curves() -> Iterator[None]:
    """Runs leave an empty file in place of the plot, which takes a fifth of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "plot_curves", lambda metrics, path, *title: path.touch())
        yield


@contextmanager
def filled_place(folder: Path) -> Iterator[Path]:
    """Tiny models, train.jsonl and validation.jsonl; the cache of datasets goes there too."""
    save_tiny_models(folder)
    write_rows(folder / "train.jsonl", ragged_rows(TRAIN, seed=1))
    write_rows(folder / "validation.jsonl", ragged_rows(VALIDATION, seed=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def small_config(place: Path, output: Path, **more) -> hf_ga.FinetuneConfig:
    """8 optimizer steps (two epochs) in windows of 16, two micro-batches each, with everything
    named.
    """
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


def checkpointed(folder: Path) -> dict:
    """`model` and `optimizer` of a checkpoint that was not written by FSDP, by names of
    parameters.
    """
    tensors = {
        name: tensor
        for file in (folder / "shards").iterdir()
        for name, tensor in load_file(file).items()
    }
    parts = {"model": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, name = name.partition(".")
        parts[part][name] = tensor
    return parts


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a saved model or a checkpoint; tied weights have one name."""
    return (
        load_file(folder / "model.safetensors")
        if (folder / "config.json").exists()
        else checkpointed(folder)["model"]
    )


def relative_distance(folder: Path, other: Path) -> float:
    """Global L2 norm of the difference of two saved models, relative to the second."""
    found = saved_weights(folder)
    expected = saved_weights(other)
    names = sorted(found.keys() & expected.keys())
    found, expected = (
        torch.cat([weights[name].double().flatten() for name in names])
        for weights in (found, expected)
    )
    return float((found - expected).norm() / expected.norm())


# One small job for every task: the model it starts from, what makes a row, its flags. `save_jobs`
# writes what they need.

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLOURS = {"the": "red", "window": "green", "of": "blue"}  # what a text is about, by its first word


def told(i: int, rng: np.random.Generator, least: int = 0, most: int = 8) -> list[str]:
    """Words of a text, of which the first tells what it is about."""
    return [list(COLOURS)[i % 3], *rng.choice(WORDS[3:], rng.integers(least, most)).tolist()]


def conversation(i: int, rng: np.random.Generator) -> dict:
    """One or two turns, each answered by the colour."""
    turns = [told(i + k, rng, most=3) for k in range(1 + i % 2)]
    pairs = [(" ".join(words), COLOURS[words[0]]) for words in turns]
    return {
        "messages": [
            {"role": r, "content": c}
            for pair in pairs
            for r, c in zip(("user", "assistant"), pair, strict=True)
        ]
    }


def completion(i: int, rng: np.random.Generator) -> dict:
    words = told(i, rng)
    return {
        "prompt": " ".join(words) + " :",
        "completion": " " + " ".join([COLOURS[words[0]]] * (1 + i % 4)),
    }


def instruction(i: int, rng: np.random.Generator) -> dict:
    words = told(i, rng, most=3)
    return {
        "instruction": " ".join(words),
        "input": "dropout" if i % 2 else "",
        "output": " ".join([COLOURS[words[0]]] * (1 + i % 3)),
    }


def cycle(i: int, rng: np.random.Generator) -> dict:
    """A piece of the endless sentence: every word follows from the one before it."""
    start = rng.integers(len(WORDS))
    length = rng.integers(4, 16)
    return {"text": " ".join(WORDS[(start + k) % len(WORDS)] for k in range(length))}


def repeated(i: int, rng: np.random.Generator) -> dict:
    """One word over and over: what is hidden is what stands around it."""
    return {"text": " ".join([["red", "green", "blue", "dropout"][i % 4]] * rng.integers(3, 13))}


def of_text(
    label: Callable[[list[str]], object], name: str = "label"
) -> Callable[[int, np.random.Generator], dict]:
    def make(i: int, rng: np.random.Generator) -> dict:
        words = told(i, rng)
        return {"text": " ".join(words), name: label(words)}

    return make


def pair(i: int, rng: np.random.Generator) -> dict:
    first = told(i // 3, rng, most=5)
    second = told(i, rng, most=5)
    return {
        "sentence1": " ".join(first),
        "sentence2": " ".join(second),
        "label": COLOURS[second[0]],
    }


def tagged(i: int, rng: np.random.Generator) -> dict:
    words = rng.permutation(told(i, rng)).tolist()
    return {"tokens": words, "tags": [COLOURS.get(word, "other") for word in words]}


def label_set(words: list[str]) -> list[str]:
    return [COLOURS[words[0]], "long"] if len(words) > 5 else [COLOURS[words[0]]]


def question(i: int, rng: np.random.Generator) -> dict:
    """The answer is the colour in the context; every seventh has none."""
    words = rng.choice(WORDS, rng.integers(3, 12)).tolist()
    colour = list(COLOURS.values())[i % 3]
    place = int(rng.integers(len(words)))
    if i % 7 == 3:
        return {
            "question": "position",
            "context": " ".join(words),
            "answers": {"text": [], "answer_start": []},
        }
    words.insert(place, colour)
    start = len(" ".join([*words[:place], ""]))
    return {
        "question": "position",
        "context": " ".join(words),
        "answers": {"text": [colour], "answer_start": [start]},
    }


def choice(i: int, rng: np.random.Generator) -> dict:
    """The right one of three texts is that with a colour."""
    texts = [rng.choice(WORDS, rng.integers(1, 8)).tolist() for _ in range(3)]
    texts[i % 3].append(list(COLOURS.values())[i % 2])
    return {"question": "position", "choices": [" ".join(words) for words in texts], "label": i % 3}


def translated(i: int, rng: np.random.Generator) -> dict:
    """Word for word."""
    words = [list(COLOURS)[i % 3], *rng.choice(list(COLOURS), rng.integers(0, 5)).tolist()]
    return {"source": " ".join(words), "target": " ".join(COLOURS[word] for word in words)}


JOBS = {
    "causal LM, row by row": ("gpt", cycle, {}),
    "causal LM, blocks": ("gpt", cycle, {"block_size": 16}),
    "messages": ("chat", conversation, {"max_length": 48}),
    "prompt and completion": ("chat", completion, {"max_length": 48}),
    "instruction": ("gpt", instruction, {"max_length": 48}),
    "masked LM": ("bert", repeated, {"task": "masked-lm", "mlm_probability": 0.3}),
    "classes": ("bert", of_text(lambda words: COLOURS[words[0]]), {"task": "text-classification"}),
    "pairs": ("bert", pair, {"task": "text-classification"}),
    "numbers": (
        "bert",
        of_text(lambda words: len(COLOURS[words[0]]) - 2.0),
        {"task": "regression"},
    ),
    "label sets": ("bert", of_text(label_set, "labels"), {"task": "multi-label"}),
    "tags": ("bert", tagged, {"task": "token-classification"}),
    "smoothed tags": (
        "bert",
        tagged,
        {"task": "token-classification", "label_smoothing_factor": 0.2},
    ),
    "smoothed causal LM": ("gpt", cycle, {"label_smoothing_factor": 0.1}),
    "LoRA": ("gpt", cycle, {"lora_r": 4, "lora_dropout": 0.1}),
    "answers": ("bert", question, {"task": "question-answering", "max_length": 16}),
    "choices": ("bert", choice, {"task": "multiple-choice"}),
    "smoothed translations": ("t5", translated, {"task": "seq2seq", "label_smoothing_factor": 0.3}),
    "translations": (
        "t5",
        translated,
        {
            "task": "seq2seq",
            "predict_with_generate": True,
            "max_new_tokens": 8,
            "per_device_eval_batch_size": 13,
        },
    ),
}


def save_jobs(folder: Path) -> None:
    """Train, validation and test rows of every job, and models whose tokenizer has a token for each
    word: `job-gpt`, `job-bert`, `job-t5` and `job-chat` (a GPT-2 with a chat template). Those
    without dropout end in `-still`.
    """
    text = " ".join([SENTENCE, *COLOURS.values(), *COLOURS, "dropout :"])
    ends = ["<|user|>", "<|assistant|>", "<|end|>"]
    for name in ("gpt", "bert", "chat", "t5"):
        tokenizer = corpus.train_tokenizer([text] * 3, 420)
        if name == "chat":
            tokenizer.add_special_tokens({"additional_special_tokens": ends})
            tokenizer.chat_template = CHATML
            tokenizer.eos_token = "<|end|>"
        more = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        for dropout, end in ((0.1, ""), (0.0, "-still")):
            torch.manual_seed(6)
            job_model(folder, name, dropout, more).save_pretrained(folder / f"job-{name}{end}")
            tokenizer.save_pretrained(folder / f"job-{name}{end}")
    for name in JOBS:
        for seed, (split, count) in enumerate(
            {"train": TRAIN, "validation": VALIDATION, "test": 7}.items()
        ):
            write_rows(folder / f"{name}.{split}.jsonl", job_rows(name, count, seed))


def job_rows(name: str, count: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [JOBS[name][1](i, rng) for i in range(count)]


def job_model(folder: Path, name: str, dropout: float, tokens: dict) -> tf.PreTrainedModel:
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        return tf.T5ForConditionalGeneration(
            tf.T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0, **tokens)
        )
    # Larger first weights than the usual 0.02: at this size those leave some seeds on a plateau,
    # and rounding decides which.
    more = {"initializer_range": 0.1, "hidden_size": 32} if name == "bert" else {}
    config = tf.AutoConfig.from_pretrained(folder / name.replace("chat", "gpt"), **tokens, **more)
    for place in (
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    ):
        if hasattr(config, place):
            setattr(config, place, dropout)
    return (tf.BertForMaskedLM if name == "bert" else tf.GPT2LMHeadModel)(config)


def job_config(place: Path, output: Path, name: str, **more) -> hf_ga.FinetuneConfig:
    """`small_config` of a job; `still=True` starts from the model without dropout."""
    model, _, flags = JOBS[name]
    model = f"job-{model}{'-still' * more.pop('still', False)}"
    files = {
        split: str(place / f"{name}.{split}.jsonl") for split in ("train", "validation", "test")
    }
    settings = {
        "dataset_name": files["train"],
        "validation_file": files["validation"],
        "test_file": files["test"],
    }
    settings |= {"model_name_or_path": str(place / model), "text_column": None}
    return small_config(place, output, **{**settings, **flags, **more})


def train_job(place: Path, output: Path, name: str, **more) -> dict:
    return hf_ga.finetune(job_config(place, output, name, **more))


def learn_job(place: Path, output: Path, name: str, **more) -> dict:
    """120 steps without dropout, which are enough to learn the job."""
    settings = {
        "still": True,
        "max_steps": 120,
        "eval_steps": 40,
        "save_steps": 120,
        "warmup_steps": 10,
    }
    return train_job(
        place,
        output,
        name,
        **{**settings, "learning_rate": 1e-2, "lr_scheduler_type": "linear", **more},
    )
