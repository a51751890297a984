"""Compare the seconds of the first updates of a loop with `hf_ga.Accelerator` and with Accelerate's
own: rehearsals and trials of speed-ups fall into them.

    python scripts/first_updates.py
    python scripts/first_updates.py --num_processes 2

Both arms train copies of a GPT-2 on the same windows, in turn, in the same processes; the
medians of the runs are compared. The first run of each arm is not counted.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from common import Shape, build_model, collate, random_samples, table
from torch.utils.data import DataLoader
from transformers.utils import logging

import hf_ga

ARMS = {"Accelerate": accelerate.Accelerator, "hf_ga": hf_ga.Accelerator}
STEPS = 4  # micro-batches of an update
MICRO_BATCH = 4  # samples


def seconds_of_updates(
    make_accelerator: type[accelerate.Accelerator], flags: argparse.Namespace
) -> Iterator[float]:
    """Train the first updates with one of the arms.

    Args:
        make_accelerator: The class of the arm.
        flags: The flags of the command.

    Yields:
        The seconds of each update.
    """
    accelerator = make_accelerator(cpu=flags.cpu, gradient_accumulation_steps=STEPS)
    set_seed(0)
    model = build_model(Shape("gpt", flags.layers, flags.width, heads=8, words=8192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    number = flags.updates * STEPS * MICRO_BATCH * accelerator.num_processes
    samples = random_samples("gpt", flags.longest, number)
    # Not shuffled: the arms would shuffle differently, and compare windows of other lengths.
    loader = DataLoader(samples, MICRO_BATCH, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = time.perf_counter()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            yield now - start
            start = now


def forget_states() -> None:
    """Forget Accelerate's settings, which it keeps for the process, but not the process group."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def measure(flags: argparse.Namespace) -> None:
    """Measure all arms in turn, and print the table on the main process."""
    logging.set_verbosity_error()
    if flags.cpu:
        torch.set_num_threads(1)
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    for index in range(flags.runs + 1):
        for name, make_accelerator in ARMS.items():
            found = list(seconds_of_updates(make_accelerator, flags))
            forget_states()
            if index:
                seconds[name].append(found)
    if not PartialState().is_main_process:
        return
    rows = []
    for update in range(flags.updates):
        base, ours = (median(run[update] for run in seconds[name]) for name in ARMS)
        rows.append([update + 1, f"{base:.3f}", f"{ours:.3f}", f"{ours / base:.2f}"])
    print(table(["update", "Accelerate, s", "hf_ga, s", "ratio"], rows))


def main() -> None:
    """Parse the flags, and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num_processes", type=int, default=1, help="of DDP, on CPUs")
    parser.add_argument("--updates", type=int, default=8, help="that are measured in each run")
    parser.add_argument("--runs", type=int, default=5, help="of each arm")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT-2")
    parser.add_argument("--width", type=int, default=256, help="of its hidden states")
    parser.add_argument("--longest", type=int, default=160, help="sample, in tokens")
    parser.add_argument("--gpu", dest="cpu", action="store_false", help="train on a GPU")
    flags = parser.parse_args()
    if flags.num_processes == 1:
        measure(flags)
    else:
        accelerate.debug_launcher(measure, (flags,), num_processes=flags.num_processes)


if __name__ == "__main__":
    main()
