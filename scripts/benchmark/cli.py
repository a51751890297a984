"""The command line of `scripts/benchmark.py`: its flags, its sections (one table each), and its
output files.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from common import MODELS, SAMPLES, seconds_of

import hf_ga
from benchmark import gpu
from benchmark.arms import ABLATION, DEFAULT, REBALANCED, SPEED, speed_arms
from benchmark.measuring import measure_interleaved, measure_one_by_one
from benchmark.ranks import busy_core, measure_two_ranks
from benchmark.report import (
    TWO_RANKS,
    Section,
    ablation_section,
    planning_section,
    ranks_section,
    speed_section,
)
from benchmark.setting import SIZES, Setting

PLANNED_SAMPLES = (10**4, 10**5, 10**6, 10**7)  # of the datasets of the section plan
METHOD = """Every arm runs in a separate process with the same environment, forked from one with all imports. They take turns
window by window: one process runs at a time. A first epoch is not measured. Real tokens per second: those of an epoch over the
median of the epochs' seconds, from the end of one optimizer step to the end of the next, data loading included. All arms have the
same samples, model (new weights), window, micro-batch, precision,
AdamW (fused) without weight decay, constant learning rate and clipping to 1.0; each has its own order of samples. Memory is the
peak of the process (resident set size, or allocated GPU memory) minus the memory after imports and construction of samples and
model. No allocator options are set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command scripts/benchmark.py: measure the sections in --sections, print each, and
    write all so far to --output_dir.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 1 if a bound fails and --assert is set.
    """
    flags = _parse_flags(arguments)
    sections: list[Section] = []
    print(f"{_describe_machine(flags)}\n", flush=True)
    for name in flags.sections:
        for section in _measure_section(name, flags):
            print(section, flush=True)
            sections.append(section)
            if flags.output_dir:
                _write_files(flags, sections)
    failed = [bound for section in sections for bound in section.bounds if not bound.holds]
    if flags.assert_bounds:
        print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed and flags.assert_bounds else 0


def _measure_section(name: str, flags: argparse.Namespace) -> Iterator[Section]:
    """Measure one section of the benchmark: a table for each model, but one for "plan"."""
    if name == "plan":
        seconds = {number: seconds_to_first_window(number) for number in PLANNED_SAMPLES}
        yield planning_section(seconds)
        return
    for model in flags.models:
        yield SECTIONS[name](_make_setting(model, flags))


def _measure_speed(setting: Setting) -> Section:
    """Measure all ways of training with hf_ga and Trainer, window by window in turns."""
    arms = speed_arms(setting.device)
    measured = measure_interleaved(setting, arms, f"{setting.model}, speed")
    return speed_section(setting, measured)


def _measure_ablation(setting: Setting) -> Section:
    """Measure hf_ga's default training, and the same with each speed-up disabled."""
    measure = measure_interleaved if setting.device == "cpu" else measure_one_by_one
    measured = measure(setting, ABLATION, f"{setting.model}, ablation")
    return ablation_section(setting, measured)


def _measure_ranks(setting: Setting) -> Section:
    """Compare one process with two CPU ranks, on an idle machine and while another process keeps
    one core busy.
    """
    measured = {}
    arms = {name: SPEED[name] for name in (REBALANCED, DEFAULT)}
    for load_name, load in (("idle", nullcontext()), ("busy", busy_core())):
        with load:
            title = f"{setting.model}, one process, {load_name}"
            measured[load_name] = measure_interleaved(setting, arms, title)
            measured[load_name][TWO_RANKS] = measure_two_ranks(setting)
    return ranks_section(setting, measured)


def seconds_to_first_window(num_samples: int) -> float:
    """Measure the seconds that `WindowLoader` needs to shuffle a dataset with known lengths, and to
    plan and collate its first window of 64 samples.

    Args:
        num_samples: Number of samples in the dataset; their lengths are random, 2 to 256 tokens.
    """
    drawn = np.random.default_rng(0).lognormal(3.5, 1.0, num_samples)
    lengths = np.clip(drawn, 2, 256).astype(np.int64)
    accelerator = Accelerator(cpu=True)

    def first_window() -> None:
        """Load the first window. The content of the samples does not matter."""
        windows = hf_ga.WindowLoader(
            range(num_samples),
            lambda samples: {"input_ids": torch.tensor(samples)[:, None]},
            accelerator=accelerator,
            per_device_batch_size=8,
            global_batch_size=64,
            lengths=lengths,
        )
        next(iter(windows))

    return seconds_of(first_window)


# Name of the section -> function that measures it for the setting of one model.
SECTIONS = {
    "speed": _measure_speed,
    "ablation": _measure_ablation,
    "ranks": _measure_ranks,
    **gpu.SECTIONS,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT_SECTIONS = ["speed", "ablation", "ranks", "plan"]


def _parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and validate the command-line flags; exit with an error if sizes do not fit."""
    parser = argparse.ArgumentParser(
        description="Speed and memory of hf_ga and of Trainer, arms in turn.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--sections",
        nargs="+",
        choices=[*SECTIONS, "plan"],
        default=DEFAULT_SECTIONS,
        help="default: speed ablation ranks plan",
    )
    add(
        "--model",
        dest="models",
        nargs="+",
        choices=MODELS,
        default=[*MODELS],
        help="models to train (default: all)",
    )
    add(
        "--size",
        choices=SIZES,
        default="small",
        help="small: 4 layers x 256; base: 12 x 768 (default: small)",
    )
    add(
        "--num_threads",
        type=int,
        default=torch.get_num_threads(),
        help="torch's threads (default: torch's)",
    )
    add("--mixed_precision", choices=("no", "bf16"), default="no", help="default: no")
    add("--num_samples", type=int, default=512, help="samples of an epoch (default: 512)")
    add("--max_length", type=int, default=256, help="maximum tokens of a sample (default: 256)")
    add(
        "--lengths",
        choices=SAMPLES,
        default="docstrings",
        help="docstrings: those of the standard library; lognormal: random tokens, of lengths from "
        "8 to max_length, on average a quarter of it (default: docstrings)",
    )
    add(
        "--window",
        type=int,
        default=64,
        help="samples of an optimizer step (default: 64)",
    )
    add(
        "--micro_batch",
        type=int,
        default=8,
        help="samples of a micro-batch (default: 8)",
    )
    add("--epochs", type=int, default=3, help="measured epochs, after one unmeasured (default: 3)")
    add(
        "--assert",
        dest="assert_bounds",
        action="store_true",
        help="exit with code 1 if a bound fails",
    )
    add("--output_dir", type=Path, help="folder for benchmark.md and benchmark.json")
    flags = parser.parse_args(arguments)
    has_partial_batches = (
        flags.window % flags.micro_batch != 0 or flags.num_samples % flags.window != 0
    )
    if has_partial_batches or flags.epochs < 1:
        parser.error(
            f"num_samples ({flags.num_samples}) must be a multiple of window "
            f"({flags.window}), and window of micro_batch "
            f"({flags.micro_batch}), because Trainer drops or repeats the rest; epochs must "
            f"be at least 1, got {flags.epochs}"
        )
    return flags


def _make_setting(model: str, flags: argparse.Namespace) -> Setting:
    """Build the benchmark's setting of a model, with its tokenized samples."""
    return Setting(
        model=model,
        size=flags.size,
        device=DEVICE,
        num_threads=flags.num_threads,
        mixed_precision=flags.mixed_precision,
        max_length=flags.max_length,
        window_size=flags.window,
        micro_batch_size=flags.micro_batch,
        epochs=flags.epochs,
        samples=SAMPLES[flags.lengths](model, flags.max_length, flags.num_samples),
    )


def _describe_machine(flags: argparse.Namespace) -> str:
    """Describe the machine, the library versions and the benchmark's flags in one line."""
    device = f"{platform.machine()} CPU"
    if DEVICE == "cuda":
        device = torch.cuda.get_device_name()
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")
    )
    return (
        f"{device}, {flags.num_threads} thread(s), {versions}; size {flags.size}, precision "
        f"{flags.mixed_precision}, dropout {Setting.dropout}, window {flags.window}, micro-batch {flags.micro_batch}, "
        f"{flags.num_samples} samples ({flags.lengths}) of at "
        f"most {flags.max_length} tokens, {flags.epochs} epoch(s) measured."
    )


def _write_files(flags: argparse.Namespace, sections: Sequence[Section]) -> None:
    """Write benchmark.md and benchmark.json to the output folder, with the sections measured so far;
    existing files are replaced.
    """
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    machine = _describe_machine(flags)
    lines = ["# Benchmark", "", machine, "", METHOD, "", *map(str, sections)]
    (flags.output_dir / "benchmark.md").write_text("\n".join(lines))
    section_dicts = [
        vars(section) | {"bounds": list(map(str, section.bounds))} for section in sections
    ]
    content = {"machine": machine, "sections": section_dicts}
    (flags.output_dir / "benchmark.json").write_text(json.dumps(content, indent=1))
