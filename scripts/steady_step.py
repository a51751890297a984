"""Count the functions and files of hf_ga that one optimizer step runs in the steady state, after
the rehearsals, trials and other work of the first windows.

    python scripts/steady_step.py
    python scripts/steady_step.py --own_time  # measure what these functions take for themselves
"""

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from common import Shape, build_model, collate

import hf_ga
from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS

PACKAGE = str(Path(hf_ga.__file__).parent)
NUM_WARM_UP = NUM_FIRST_WINDOWS + 2  # rehearsals, then trials of speed-ups
NUM_REHEARSED = 32  # windows: none of as many after these is rehearsed


class Profile:
    """Profiler for `sys.setprofile` that records which functions of hf_ga are called, and how many
    of its frames are on the call stack when the model's forward starts.

    Attributes:
        functions: (file, qualified name) of each function of hf_ga that was called.
        depth: Number of hf_ga's frames between `train_step` and the model's forward, both excluded.
            0 before the first forward.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a function of hf_ga when it is called; the arguments are those of a profiler."""
        if event != "call":
            return
        code = frame.f_code
        # Comprehensions are not counted: since Python 3.12 they are no functions any more.
        is_comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
        if code.co_filename.startswith(PACKAGE) and not is_comprehension:
            self.functions.add((code.co_filename, code.co_qualname))
        if code.co_qualname == "GPT2LMHeadModel.forward" and not self.depth:
            self.depth = _count_package_frames(frame)


def _count_package_frames(frame: FrameType | None) -> int:
    """Count the frames of hf_ga on the call stack above `frame`, up to that of `train_step`, which
    is not counted.
    """
    count = 0
    while frame is not None and frame.f_code.co_name != "train_step":
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


def part_of(file: str) -> str:
    """Return the part of a step to which a file of hf_ga belongs: "keyed draws", "speed-ups" or
    "engine".
    """
    path = Path(file).relative_to(PACKAGE)
    if path.parts[0] in ("speed", "rows") or path.stem == "speed_ups":
        return "speed-ups"
    if path.parts[0] == "draws":
        return "keyed draws"
    return "engine"


def print_counts(name: str, functions: set[tuple[str, str]]) -> None:
    """Print the number of functions, and of the files that they are in.

    Args:
        name: What ran them.
        functions: (file, qualified name) of each.
    """
    files = {file for file, _ in functions}
    print(f"{name}: {len(functions)} functions in {len(files)} files")


def measure_own_time(*, with_forward: bool) -> float:
    """Return what the functions of hf_ga take for themselves in a micro-batch of a GPT-2 with 12
    layers and no dropout, in ms, the median of some windows: without the functions that they call,
    and with the profiler.

    Args:
        with_forward: Whether to count those within the model's forward, too.
    """
    accelerator = Accelerator(cpu=True)
    samples = [{"input_ids": list(range(1, 9 + i % 30))} for i in range(16 * NUM_REHEARSED * 2)]
    model = build_model(Shape("gpt", layers=12, width=32, heads=2, words=99))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters())
    windows = hf_ga.WindowLoader(
        samples, collate, accelerator=accelerator, per_device_batch_size=4, global_batch_size=16
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    profiler = cProfile.Profile()
    forward = model.forward

    @wraps(forward)
    def not_counted(*args: Any, **kwargs: Any) -> Any:
        profiler.disable()
        outputs = forward(*args, **kwargs)
        profiler.enable()
        return outputs

    iterator = iter(windows)
    times = []
    for number in range(2 * NUM_REHEARSED):
        if number == NUM_REHEARSED + 1 and not with_forward:
            model.forward = not_counted
        profiler = cProfile.Profile()
        profiler.enable()
        window = next(iterator)
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        profiler.disable()
        of_functions = pstats.Stats(profiler).stats
        own = sum(of[2] for (file, *_), of in of_functions.items() if file.startswith(PACKAGE))
        times.append(1000 * own / len(window.micro_batches))
    return statistics.median(times[NUM_REHEARSED + 1 :])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a small GPT-2 on some windows, count the functions of hf_ga in the last one, and print
    the counts.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--own_time", action="store_true", help="measure time, count nothing")
    if parser.parse_args(arguments).own_time:
        outside = measure_own_time(with_forward=False)
        in_all = measure_own_time(with_forward=True)
        print(f"{in_all:.2f} ms of hf_ga's own functions in a micro-batch")
        print(f"{outside:.2f} ms of them outside of the model's forward")
        return
    accelerator = Accelerator(cpu=True)
    samples = [{"input_ids": list(range(1, 5 + i % 20))} for i in range(32 * (NUM_WARM_UP + 1))]
    model = build_model(Shape("gpt", layers=2, width=32, heads=2, words=99))
    optimizer = torch.optim.AdamW(model.parameters())
    windows = hf_ga.WindowLoader(
        samples, collate, accelerator=accelerator, per_device_batch_size=8, global_batch_size=32
    )
    profile = Profile()
    model, optimizer = accelerator.prepare(model, optimizer)
    iterator = iter(windows)
    for _ in range(NUM_WARM_UP):
        hf_ga.train_step(accelerator, model, optimizer, next(iterator), max_grad_norm=1.0)
    window = next(iterator)
    sys.setprofile(profile)
    hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
    sys.setprofile(None)
    print(f"{profile.depth} frames of hf_ga from train_step to the model's forward")
    print_counts("a steady step", profile.functions)
    for part in ("engine", "keyed draws", "speed-ups"):
        functions = {function for function in profile.functions if part_of(function[0]) == part}
        print_counts(f"  {part}", functions)


if __name__ == "__main__":
    main()
