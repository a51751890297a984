"""What reducing gradients costs on several processes: against DDP's overlapped reducer; under FSDP, memory against traffic.

    accelerate launch --multi_gpu --num_processes 2 scripts/benchmark_processes.py
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 scripts/benchmark_processes.py

Forward and backward of one window of a random GPT-2, without dropout, arms in turn, medians over the rounds. DDP's arm is the usual
loop (`no_sync` but for the last micro-batch, whose backward overlaps with the all-reduce), with the right divisor. Under FSDP the
arms are one reduction a window, and one a micro-batch.
"""

import argparse
import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
from accelerate import Accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_ga
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.prepare import enable_fsdp_on_cpu, prepare

VOCABULARY = 8192


def main() -> None:
    """Measure and print one table."""
    flags = parse()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    enable_fsdp_on_cpu(accelerator)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"n_embd": flags.hidden_size, "n_layer": flags.num_layers, "n_head": 8, "n_positions": flags.sequence_length}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **no_dropout)).to(accelerator.device)
    size, gradient_bytes = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    rule = hf_ga.prove_targets(model, make_samples(8, flags.sequence_length), collate)
    model, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters()))
    accelerator.print(
        f"{size:,} parameters ({gradient_bytes / 2**20:.0f} MiB of gradients), {accelerator.num_processes} processes, "
        f"{accelerator.distributed_type.value}, micro-batches of {flags.micro_batch_size} x {flags.sequence_length} tokens"
    )
    accelerator.print("| micro-batches | arm | seconds a window (median) | all | ratio | memory above before, MiB |")
    accelerator.print("| ---: | --- | ---: | --- | ---: | ---: |")
    for accumulation in flags.accumulation:
        window = make_window(accelerator, accumulation, flags)
        measure(accelerator, arms_of(accelerator, model, window, rule), accumulation, flags.rounds, model)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 8], help="micro-batches a process (default: 1 8)")
    parser.add_argument("--micro_batch_size", type=int, default=4, help="samples in a micro-batch (default: 4)")
    parser.add_argument("--sequence_length", type=int, default=64, help="tokens in a sample (default: 64)")
    parser.add_argument("--hidden_size", type=int, default=384, help="width of the model (default: 384)")
    parser.add_argument("--num_layers", type=int, default=6, help="layers (default: 6)")
    parser.add_argument("--rounds", type=int, default=5, help="windows measured of each arm (default: 5)")
    return parser.parse_args()


def make_samples(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(0, VOCABULARY, (length - i % 2,))} for i in range(count)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest; padding is no label."""
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True, padding_value=-1)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids.masked_fill(ids < 0, -100)}


def make_window(accelerator: Accelerator, accumulation: int, flags: argparse.Namespace) -> hf_ga.Window:
    count = accelerator.num_processes * accumulation * flags.micro_batch_size
    loader = hf_ga.WindowLoader(
        make_samples(count, flags.sequence_length),
        collate,
        accelerator=accelerator,
        per_device_batch_size=flags.micro_batch_size,
        global_batch_size=count,
    )
    return next(iter(loader))


def arms_of(
    accelerator: Accelerator, model: nn.Module, window: hf_ga.Window, rule: hf_ga.ProvenLoss
) -> dict[str, Callable[[], object]]:
    """Each computes the gradient of the same window."""

    def ours(each: bool = False) -> object:
        return hf_ga.backward_window(accelerator, model, window, targets=rule, fsdp_reduce_each_micro_batch=each)

    if is_sharded(accelerator):
        return {"reduced once a window": ours, "reduced in each micro-batch": lambda: ours(each=True)}
    total = sum(int((m.batch["labels"][:, 1:] != -100).sum()) for m in window.micro_batches) * accelerator.num_processes
    return {"DDP, overlapped": lambda: usual_loop(accelerator, model, window, total), "hf_ga, one sum at the end": ours}


def usual_loop(accelerator: Accelerator, model: nn.Module, window: hf_ga.Window, total: int) -> None:
    """DDP reduces in the last backward."""
    micro_batches = window.micro_batches
    for i, micro_batch in enumerate(micro_batches):
        batch = {name: tensor.to(accelerator.device) for name, tensor in micro_batch.batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        model.require_backward_grad_sync = i == len(micro_batches) - 1  # what `no_sync` sets, the forward included
        (model(**batch).loss * (count * accelerator.num_processes / total)).backward()


def measure(
    accelerator: Accelerator, arms: dict[str, Callable[[], object]], accumulation: int, rounds: int, model: nn.Module
) -> None:
    """Arms in turn; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    memory: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, run in arms.items():
            model.zero_grad(set_to_none=True)
            accelerator.wait_for_everyone()
            with peak_memory(accelerator, memory[name]):
                began = time.perf_counter()
                run()
                accelerator.wait_for_everyone()  # the slowest process counts; on a GPU this waits for the device too
                seconds[name].append(time.perf_counter() - began)
    first = statistics.median(next(iter(seconds.values()))[1:])
    for name, values in seconds.items():
        median, listed = statistics.median(values[1:]), ", ".join(f"{v:.3f}" for v in values[1:])
        above = statistics.median(memory[name][1:])
        accelerator.print(f"| {accumulation} | {name} | {median:.3f} | {listed} | {median / first:.3f} | {above:.0f} |")


@contextmanager
def peak_memory(accelerator: Accelerator, found: list[float]) -> Iterator[None]:
    """Appends the most memory above that at the begin, in MiB: the device's, or on a CPU the process's, looked at every 2 ms."""
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        found.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        return
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before does not count as free room now
    process, done, seen = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    found.append(max(seen) / 2**20)


if __name__ == "__main__":
    main()
