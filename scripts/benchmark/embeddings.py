"""hf_ga beside CachedMultipleNegativesRankingLoss of sentence-transformers: InfoNCE over a window
of pairs in micro-batches, with the same model, pairs and temperature.

    cd scripts && python -m benchmark.embeddings --model_name_or_path FOLDER --pairs pairs.jsonl

prints:
- without dropout: the difference of losses and gradients, and the ratios of time and memory;
- with dropout 0.1: how much the gradient changes with the size of the micro-batches;
- the memory of hf_ga with a large window and with one micro-batch.

Times are medians over windows that the two compute in turn in one process. Memory is the peak of a
process of its own, minus the memory after building model and pairs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import hf_ga
from benchmark.lap import memory_now, peak_memory
from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.losses import InfoNCE
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.exact.forward import unwrapped
from hf_ga.finetuning.data.pairs import collate_pairs, tokenize_pairs

TEMPERATURE = 0.05
MAX_LENGTH = 64
SEED = 0
NUM_WINDOWS = 4  # of different pairs, without equal texts, which sentence-transformers would count
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
MIB = 2**20

Gradients = dict[str, Tensor]
Step = Callable[[], float]  # computes the gradient of the next window; returns its loss


@dataclass(frozen=True)
class Setting:
    """What both arms have in common.

    Attributes:
        folder: Of the model.
        pairs: Anchors and positives.
        window_size: Pairs in one gradient.
        micro_batch_size: Pairs in one forward.
        dropout: Probability at all sites.
    """

    folder: str
    pairs: list[tuple[str, str]]
    window_size: int
    micro_batch_size: int
    dropout: float = 0.0


def ours(setting: Setting) -> tuple[nn.Module, Step]:
    """Prepare the arm of hf_ga.

    Returns:
        The encoder, and a function that computes the gradient of the next window and returns its
        loss.
    """
    config = AutoConfig.from_pretrained(setting.folder, **dict.fromkeys(DROPOUTS, setting.dropout))
    encoder = AutoModel.from_pretrained(setting.folder, config=config)
    tokenizer = AutoTokenizer.from_pretrained(setting.folder)
    anchors, positives = map(list, zip(*setting.pairs, strict=True))
    rows = tokenize_pairs({"anchor": anchors, "positive": positives}, tokenizer, MAX_LENGTH)
    samples = [
        {"input_ids": ids, "text_ids": of_texts}
        for ids, of_texts in zip(rows["input_ids"], rows["text_ids"], strict=True)
    ]
    accelerator = Accelerator()
    windows = hf_ga.WindowLoader(
        samples,
        partial(collate_pairs, pad_token_id=tokenizer.pad_token_id),
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        lengths=rows["length"],
        shuffle=False,
        seed=SEED,
    )
    model = EmbeddingModel(encoder, saved_pooling(setting.folder) or "mean")
    model, _ = hf_ga.prepare(
        accelerator,
        model,
        torch.optim.SGD(model.parameters()),
        windows,
        whole_batch=InfoNCE(TEMPERATURE),
    )
    model.train()

    def forever() -> Any:
        while True:
            yield from windows

    iterator = forever()

    def step() -> float:
        """Compute the gradient of the next window."""
        model.zero_grad()
        result = hf_ga.backward_window(accelerator, model, next(iterator))
        return float(result.loss)

    return unwrapped(model).encoder, step


def theirs(setting: Setting) -> tuple[nn.Module, Step]:
    """Prepare the arm of sentence-transformers.

    Returns:
        The encoder, and a function that computes the gradient of the next window and returns its
        loss.
    """
    model = SentenceTransformer(
        setting.folder, config_kwargs=dict.fromkeys(DROPOUTS, setting.dropout)
    )
    model.max_seq_length = MAX_LENGTH
    model.train()
    loss_fn = CachedMultipleNegativesRankingLoss(
        model, scale=1 / TEMPERATURE, mini_batch_size=setting.micro_batch_size
    )
    starts = range(0, len(setting.pairs), setting.window_size)
    windows = [setting.pairs[start : start + setting.window_size] for start in starts]
    torch.manual_seed(SEED)
    position = 0

    def step() -> float:
        """Compute the gradient of the next window."""
        nonlocal position
        window = windows[position % len(windows)]
        position += 1
        model.zero_grad()
        features = [model.preprocess(list(texts)) for texts in zip(*window, strict=True)]
        loss = loss_fn(send_to_device(features, model.device), None)
        loss.backward()
        return float(loss.detach())

    return model[0].auto_model, step


ARMS = {"hf_ga": ours, "sentence-transformers": theirs}


def gradients(encoder: nn.Module) -> Gradients:
    """Copy the gradients of an encoder, by name, of the parameters that have one."""
    return {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Compute the L2 norm of the difference over that of `expected`, of all parameters together.

    Raises:
        ValueError: If they are of other parameters.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"other parameters: {found.keys() ^ expected.keys()}")
    difference = sum(_sum_of_squares(found[name] - expected[name]) for name in found)
    size = sum(_sum_of_squares(gradient) for gradient in expected.values())
    return (difference / size) ** 0.5


def _sum_of_squares(tensor: Tensor) -> float:
    """Add the squares of all numbers, in float64."""
    return float(tensor.double().square().sum())


def without_dropout(setting: Setting, num_windows: int) -> None:
    """Compare losses and gradients of the first window, then measure windows in turn."""
    made = {name: make(setting) for name, make in ARMS.items()}
    losses = {name: step() for name, (_, step) in made.items()}
    found = {name: gradients(encoder) for name, (encoder, _) in made.items()}
    error = relative_error(*found.values())
    shown = ", ".join(f"{name} {loss:.7f}" for name, loss in losses.items())
    print(f"dropout 0: loss {shown}; relative difference of the gradients {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(num_windows):
        for name, (_, step) in made.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["hf_ga"] / medians["sentence-transformers"]
    shown = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    print(f"time of a window: {shown}; ratio {ratio:.2f}", flush=True)


def with_dropout(setting: Setting, sizes: tuple[int, int]) -> None:
    """Measure how much the gradient of the first window changes with the size of micro-batches."""
    for name, make in ARMS.items():
        found = []
        for size in sizes:
            encoder, step = make(
                Setting(setting.folder, setting.pairs, setting.window_size, size, dropout=0.1)
            )
            step()
            found.append(gradients(encoder))
        error = relative_error(*found)
        print(f"dropout 0.1, micro-batches of {sizes[0]} and {sizes[1]}: {name} {error:.1e}")


def memory_of_window(arm: str, setting: Setting) -> int:
    """Measure the bytes that a window adds to this process's memory."""
    _, step = ARMS[arm](setting)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = memory_now(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    return peak_memory(device) - before


def measured_apart(flags: argparse.Namespace, arm: str, window_size: int) -> int:
    """Call `memory_of_window` in a new process."""
    command = [sys.executable, "-m", "benchmark.embeddings", "--memory_of", arm]
    command += ["--model_name_or_path", flags.model_name_or_path, "--pairs", flags.pairs]
    command += ["--window_size", str(window_size)]
    command += ["--micro_batch_size", str(flags.micro_batch_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def memory(flags: argparse.Namespace) -> None:
    """Print the memory of both arms for a window, and of hf_ga for a single micro-batch."""
    found = {arm: measured_apart(flags, arm, flags.window_size) for arm in ARMS}
    shown = ", ".join(f"{arm} {value / MIB:.0f} MiB" for arm, value in found.items())
    ratio = found["hf_ga"] / found["sentence-transformers"]
    print(f"memory of a window of {flags.window_size}: {shown}; ratio {ratio:.2f}")
    small = measured_apart(flags, "hf_ga", flags.micro_batch_size)
    print(
        f"memory of hf_ga, windows of {flags.window_size} and {flags.micro_batch_size}: "
        f"{found['hf_ga'] / MIB:.0f} and {small / MIB:.0f} MiB; ratio {found['hf_ga'] / small:.2f}",
        flush=True,
    )


def main() -> None:
    """Compare memory, losses, gradients and times of both arms, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_name_or_path", required=True, help="A BERT of sentence vectors.")
    parser.add_argument("--pairs", required=True, help="jsonl with anchor and positive.")
    parser.add_argument("--window_size", type=int, default=512, help="Pairs.")
    parser.add_argument("--micro_batch_size", type=int, default=32, help="Pairs.")
    parser.add_argument("--num_windows", type=int, default=3, help="To take the time of.")
    parser.add_argument("--memory_of", choices=ARMS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    with open(flags.pairs, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pairs = [(row["anchor"], row["positive"]) for row in rows]
    pairs = list({anchor: (anchor, positive) for anchor, positive in pairs}.values())
    pairs = list({positive: (anchor, positive) for anchor, positive in pairs}.values())
    setting = Setting(
        flags.model_name_or_path,
        pairs[: NUM_WINDOWS * flags.window_size],
        flags.window_size,
        flags.micro_batch_size,
    )
    if flags.memory_of:
        print(memory_of_window(flags.memory_of, setting))
        return
    # First, because a process inherits the peak of the one that starts it.
    memory(flags)
    without_dropout(setting, flags.num_windows)
    with_dropout(setting, (flags.micro_batch_size, flags.micro_batch_size // 2))


if __name__ == "__main__":
    main()
