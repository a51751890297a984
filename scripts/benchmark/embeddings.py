"""Compare hf_ga with CachedMultipleNegativesRankingLoss of sentence-transformers: both compute
InfoNCE over a window of text pairs in micro-batches, with the same model, pairs and temperature.

    cd scripts && python -m benchmark.embeddings --model_name_or_path FOLDER --pairs pairs.jsonl

prints:
- without dropout: the difference of losses and gradients, and the ratios of time and memory;
- with dropout 0.1: how much the gradient changes with the size of the micro-batches;
- the memory of hf_ga with a large window and with one micro-batch.

Times are medians over windows that both compute in turns in one process. Memory is the peak of a
separate process, minus its memory after building model and pairs.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from common import seconds_of
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import hf_ga
from benchmark.measuring import memory_now, peak_memory
from hf_ga.check.gradients import relative_error
from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.losses import InfoNCE
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.finetuning.data.encoding.pairs import collate_pairs, tokenize_pairs
from hf_ga.model.forward import unwrapped

TEMPERATURE = 0.05
MAX_LENGTH = 64
SEED = 0
NUM_WINDOWS = 4  # of different pairs, without equal texts, which sentence-transformers would count
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
MIB = 2**20

Step = Callable[[], float]  # computes the gradient of the next window, and returns its loss


@dataclass(frozen=True)
class Setting:
    """The setting of the embedding benchmark that both libraries share.

    Attributes:
        folder: Folder of the pretrained encoder and tokenizer.
        pairs: Anchor and positive text of each pair.
        window_size: Pairs of one gradient.
        micro_batch_size: Pairs of one forward.
        dropout: Dropout probability at all sites.
    """

    folder: str
    pairs: list[tuple[str, str]]
    window_size: int
    micro_batch_size: int
    dropout: float = 0.0


def prepare_hf_ga(setting: Setting) -> tuple[nn.Module, Step]:
    """Prepare the model, data and loss of the embedding benchmark with hf_ga.

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
        {"input_ids": input_ids, "text_ids": text_ids}
        for input_ids, text_ids in zip(rows["input_ids"], rows["text_ids"], strict=True)
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

    endless_windows = itertools.chain.from_iterable(itertools.repeat(windows))

    def step() -> float:
        """Compute the gradient of the next window, and return its loss."""
        model.zero_grad()
        result = hf_ga.backward_window(accelerator, model, next(endless_windows))
        return float(result.loss)

    return unwrapped(model).encoder, step


def prepare_sentence_transformers(setting: Setting) -> tuple[nn.Module, Step]:
    """Prepare the model, data and loss of the embedding benchmark with sentence-transformers.

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
    endless_windows = itertools.cycle(windows)

    def step() -> float:
        """Compute the gradient of the next window, and return its loss."""
        window = next(endless_windows)
        model.zero_grad()
        features = [model.preprocess(list(texts)) for texts in zip(*window, strict=True)]
        loss = loss_fn(send_to_device(features, model.device), None)
        loss.backward()
        return float(loss.detach())

    return model[0].auto_model, step


# Name of the library -> function that prepares it.
ARMS = {"hf_ga": prepare_hf_ga, "sentence-transformers": prepare_sentence_transformers}


def gradient(encoder: nn.Module) -> Tensor:
    """Return the gradient of all parameters that have one, as one vector."""
    parameters = encoder.parameters()
    return torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])


def without_dropout(setting: Setting, num_windows: int) -> None:
    """Compare the losses and gradients of both libraries on the first window, without dropout, then
    their times of a window; print the results.

    Args:
        setting: The setting of the embedding benchmark.
        num_windows: Number of windows to time; both libraries compute each in turns.
    """
    encoders = {}
    steps = {}
    for name, prepare in ARMS.items():
        encoders[name], steps[name] = prepare(setting)
    losses = {name: step() for name, step in steps.items()}
    error = relative_error(*map(gradient, encoders.values()))
    shown = ", ".join(f"{name} {loss:.7f}" for name, loss in losses.items())
    print(f"dropout 0: loss {shown}; relative difference of the gradients {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(num_windows):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["hf_ga"] / medians["sentence-transformers"]
    shown = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    print(f"time of a window: {shown}; ratio {ratio:.2f}", flush=True)


def with_dropout(setting: Setting, micro_batch_sizes: tuple[int, int]) -> None:
    """For each library, print the relative difference between the gradients of the first window
    with two micro-batch sizes, with dropout 0.1.
    """
    for name, prepare in ARMS.items():
        found = []
        for size in micro_batch_sizes:
            encoder, step = prepare(replace(setting, micro_batch_size=size, dropout=0.1))
            step()
            found.append(gradient(encoder))
        error = relative_error(*found)
        first, second = micro_batch_sizes
        print(f"dropout 0.1, micro-batches of {first} and {second}: {name} {error:.1e}")


def memory_of_window(arm: str, setting: Setting) -> int:
    """Measure how many bytes the gradient of one window adds to this process's peak memory.

    Args:
        arm: Name of the library, a key of `ARMS`.
        setting: The setting of the embedding benchmark.
    """
    _, step = ARMS[arm](setting)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = memory_now(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    return peak_memory(device) - before


def print_memory(setting: Setting) -> None:
    """Measure and print the memory that one window needs with each library, and that hf_ga needs
    for a window of a single micro-batch. Each is measured in a new process, whose peak memory is
    that of this window.
    """
    size = setting.window_size
    small_size = setting.micro_batch_size
    one_micro_batch = replace(
        setting, pairs=setting.pairs[: NUM_WINDOWS * small_size], window_size=small_size
    )
    measured = []
    windows = [(arm, setting) for arm in ARMS] + [("hf_ga", one_micro_batch)]
    for arm, window in windows:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            measured.append(pool.submit(memory_of_window, arm, window).result() / MIB)
    ours, theirs, small = measured
    print(
        f"memory of a window of {size}: hf_ga {ours:.0f} MiB, sentence-transformers "
        f"{theirs:.0f} MiB; ratio {ours / theirs:.2f}"
    )
    print(
        f"memory of hf_ga, windows of {size} and {small_size}: {ours:.0f} and "
        f"{small:.0f} MiB; ratio {ours / small:.2f}",
        flush=True,
    )


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Read (anchor, positive) text pairs from a jsonl file, without repeated texts: of pairs with
    the same anchor, and then with the same positive, only the last one is kept.
    """
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    by_anchor = {row["anchor"]: (row["anchor"], row["positive"]) for row in rows}
    by_positive = {positive: (anchor, positive) for anchor, positive in by_anchor.values()}
    return list(by_positive.values())


def main() -> None:
    """Run the embedding benchmark: compare memory, losses, gradients and times of hf_ga and
    sentence-transformers, and print them.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model_name_or_path", required=True, help="Folder of an embedding model (BERT)."
    )
    parser.add_argument("--pairs", required=True, help="jsonl with anchor and positive.")
    parser.add_argument("--window_size", type=int, default=512, help="Pairs.")
    parser.add_argument("--micro_batch_size", type=int, default=32, help="Pairs.")
    parser.add_argument("--num_windows", type=int, default=3, help="Windows to time.")
    flags = parser.parse_args()
    setting = Setting(
        folder=flags.model_name_or_path,
        pairs=read_pairs(flags.pairs)[: NUM_WINDOWS * flags.window_size],
        window_size=flags.window_size,
        micro_batch_size=flags.micro_batch_size,
    )
    # First, because a process inherits the peak of the one that starts it.
    print_memory(setting)
    without_dropout(setting, flags.num_windows)
    with_dropout(setting, (flags.micro_batch_size, flags.micro_batch_size // 2))


if __name__ == "__main__":
    main()
