"""Count, on a CPU, what a GPU's host has to do: micro-batches, graphs and dispatched operators of
windows with and without compiled rows.

    python scripts/count_rows.py --layers 12

Trains a GPT-2 on ragged windows in three ways: as it is, with compiled layers but padding (an
earlier version of hf_ga), and with compiled layers on rows of real tokens. An operator is counted
if torch dispatches it from Python, in the forward, the backward or the update; those within a graph
are not. Seconds of a CPU say nothing about a GPU, so none are printed but those of compiling.
"""

import argparse
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from common import Shape, build_model, collate, seconds_of, table
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

import hf_ga
from hf_ga.engine import speed_ups
from hf_ga.engine.speed_ups import candidates
from hf_ga.model.override import override
from hf_ga.rows.packing import Packing
from hf_ga.speed.speed_up import SpeedUp

WINDOW = 64  # samples
MICRO_BATCH = 8  # samples of the longest length
GRAPH = "CompiledFunction"  # in the name of the profiler's event of a graph, and of its backward


@dataclass
class Counts:
    """What was counted.

    Attributes:
        num_micro_batches: Of each window.
        num_needed: Of each window: real tokens over the tokens that a micro-batch may have.
        num_graphs: After each window.
        num_operators: Of the last window, but for those of the operator of attention.
        num_in_attention: Those of the operator of attention of rows.
        seconds: Of the window that took longest, in which layers were compiled.
    """

    num_micro_batches: list[int]
    num_needed: list[int]
    num_graphs: list[int]
    num_operators: int
    num_in_attention: int
    seconds: float


def num_operators(profiler: profile) -> tuple[int, int]:
    """Return how many operators were dispatched outside of graphs, and not by other operators: of
    all, and of the operator of attention of rows, whose code is Python.
    """
    number = 0
    number_in_attention = 0
    for event in profiler.events():
        if not event.name.startswith("aten::"):
            continue
        parents = []
        parent = event.cpu_parent
        while parent is not None:
            parents.append(parent.name)
            parent = parent.cpu_parent
        in_operator = any(name.startswith("aten::") for name in parents)
        in_attention = any(name.startswith("hf_ga::") for name in parents)
        in_graph = any(GRAPH in name for name in parents)
        number_in_attention += in_attention and not in_operator
        number += not in_attention and not in_graph and not in_operator
    return number, number_in_attention


def samples(number: int, longest: int) -> list[dict[str, list[int]]]:
    """Return samples of 8 to `longest` tokens, most of them short."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(number, generator=generator) ** 2
    lengths = (8 + shares * (longest - 8)).int().tolist()
    return [{"input_ids": torch.arange(1, 1 + length).tolist()} for length in lengths]


def candidates_without_rows(model: nn.Module) -> list[SpeedUp]:
    """Return the speed-ups that hf_ga may use, but for packing."""
    return [speed_up for speed_up in candidates(model) if not isinstance(speed_up, Packing)]


def count(flags: argparse.Namespace, *, compiled: bool, with_rows: bool) -> Counts:
    """Train some windows in one of the ways."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch._dynamo.reset()
    counters.clear()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = build_model(Shape("gpt", flags.layers, flags.width, heads=8, words=8192))
    if compiled:
        hf_ga.compile_layers(model, backend=flags.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = samples(flags.windows * WINDOW, flags.longest)
    lengths = [len(row["input_ids"]) for row in rows]
    windows = hf_ga.WindowLoader(
        rows,
        collate,
        accelerator=accelerator,
        per_device_batch_size=MICRO_BATCH,
        global_batch_size=WINDOW,
        lengths=lengths,
    )
    counts = Counts([], [], [], 0, 0, 0.0)
    offered = candidates if with_rows else candidates_without_rows
    with override(speed_ups, candidates=offered):
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
        for index, window in enumerate(windows):
            is_last = index == len(windows) - 1
            profiler = profile(activities=[ProfilerActivity.CPU])
            step = partial(hf_ga.train_step, accelerator, model, optimizer, window)
            with profiler if is_last else nullcontext():
                seconds = seconds_of(step)
            counts.seconds = max(counts.seconds, seconds)
            counts.num_micro_batches.append(len(window.batches))
            num_tokens = sum(lengths[sample] for sample in window.sample_ids)
            counts.num_needed.append(math.ceil(num_tokens / (MICRO_BATCH * max(lengths))))
            counts.num_graphs.append(counters["stats"]["unique_graphs"])
            if is_last:
                counts.num_operators, counts.num_in_attention = num_operators(profiler)
    return counts


def main() -> None:
    """Parse the flags, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of the GPT-2")
    parser.add_argument("--width", type=int, default=64, help="of its hidden states")
    parser.add_argument("--longest", type=int, default=256, help="sample, in tokens")
    parser.add_argument("--windows", type=int, default=10, help="that are trained in each way")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    flags = parser.parse_args()
    logging.set_verbosity_error()
    ways = {
        "eager, padded": {"compiled": False, "with_rows": False},
        "eager, packed": {"compiled": False, "with_rows": True},
        "compiled, padded": {"compiled": True, "with_rows": False},
        "compiled rows": {"compiled": True, "with_rows": True},
    }
    header = ["way", "micro-batches", "needed", "graphs", "after window 5", "operators"]
    header += ["in attention", "slowest, s"]
    rows = []
    for name, way in ways.items():
        counts = count(flags, **way)
        rows.append(
            [
                name,
                f"{mean(counts.num_micro_batches[3:]):.1f}",
                f"{mean(counts.num_needed[3:]):.1f}",
                counts.num_graphs[-1],
                counts.num_graphs[-1] - counts.num_graphs[4],
                f"{counts.num_operators:,}",
                f"{counts.num_in_attention:,}",
                f"{counts.seconds:.1f}",
            ]
        )
    print(table(header, rows))


if __name__ == "__main__":
    main()
