"""The flags of `scripts/benchmark.py`, its sections, and its output files."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

import hf_ga
from benchmark import gpu
from benchmark.arms import ABLATION, DEFAULT, REBALANCED, SPEED
from benchmark.lap import measure_apart, measure_in_turn
from benchmark.ranks import busy_core, measure_two_ranks
from benchmark.report import (
    TWO_RANKS,
    Section,
    ablation_section,
    planning_section,
    ranks_section,
    speed_section,
)
from benchmark.setting import MODELS, SIZES, Setting, documentation_strings

METHOD = """Every arm runs in a separate process with the same environment, forked from one with all imports. They take turns
window by window: one process runs at a time. A first epoch is not measured. Real tokens per second: those of an epoch over the
median of the epochs' seconds, from the end of one optimizer step to the end of the next, data loading included. All arms have the
same samples (documentation strings of the standard library), model (new weights), window, micro-batch, precision,
AdamW (fused) without weight decay, constant learning rate and clipping to 1.0; each has its own order of samples. Memory is the
peak of the process (resident set size, or allocated GPU memory) minus the memory after imports and construction of samples and
model. No allocator options are set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the selected sections.

    Returns:
        The exit code: 1 if a bound fails with --assert.
    """
    flags = _flags(arguments)
    sections: list[Section] = []
    print(f"{_machine(flags)}\n", flush=True)
    for name in flags.sections:
        for section in _measured(name, flags):
            print(section, flush=True)
            sections.append(section)
            if flags.output_dir:
                _write(flags, sections)
    failed = [bound for section in sections for bound in section.bounds if not bound.holds]
    if flags.assert_bounds:
        print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed and flags.assert_bounds else 0


def _measured(name: str, flags: argparse.Namespace) -> Iterator[Section]:
    """Measure a section, and yield its table for each model."""
    if name == "plan":
        yield _plan(flags.most_samples)
        return
    measure = SECTIONS[name]
    for setting in _settings(flags):
        yield measure(setting)


def _speed(setting: Setting) -> Section:
    """Measure all arms in turn."""
    measured = measure_in_turn(setting, SPEED, f"{setting.model}, speed")
    return speed_section(setting, measured)


def _ablation(setting: Setting) -> Section:
    """Measure the default arm, and that without each speed-up."""
    measure = measure_in_turn if setting.device == "cpu" else measure_apart
    measured = measure(setting, ABLATION, f"{setting.model}, ablation")
    return ablation_section(setting, measured)


def _ranks(setting: Setting) -> Section:
    """Measure one process and two ranks, idle and beside a busy loop."""
    measured = {}
    arms = {name: SPEED[name] for name in (REBALANCED, DEFAULT)}
    for when, load in (("idle", nullcontext()), ("busy", busy_core())):
        with load:
            measured[when] = measure_in_turn(setting, arms, f"{setting.model}, one process, {when}")
            measured[when][TWO_RANKS] = measure_two_ranks(setting)
    return ranks_section(setting, measured)


def seconds_to_first_window(num_samples: int) -> float:
    """Measure the seconds from a dataset with known lengths to its first window of 64 samples."""
    drawn = np.random.default_rng(0).lognormal(3.5, 1.0, num_samples)
    lengths = np.clip(drawn, 2, 256).astype(np.int64)
    accelerator = Accelerator(cpu=True)
    began = time.perf_counter()
    windows = hf_ga.WindowLoader(
        # Samples whose content does not matter.
        range(num_samples),
        lambda samples: {"input_ids": torch.tensor(samples)[:, None]},
        accelerator=accelerator,
        per_device_batch_size=8,
        global_batch_size=64,
        lengths=lengths,
    )
    next(iter(windows))
    return time.perf_counter() - began


def _plan(most_samples: int) -> Section:
    """Measure the time to the first window of datasets with at most `most_samples` samples."""
    sizes = [size for size in (10**4, 10**5, 10**6, 10**7) if size <= most_samples]
    return planning_section({size: seconds_to_first_window(size) for size in sizes})


SECTIONS = {"speed": _speed, "ablation": _ablation, "ranks": _ranks, **gpu.SECTIONS}
DEFAULT_SECTIONS = ["speed", "ablation", "ranks", "plan"]


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags."""
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
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: a GPU if any",
    )
    add(
        "--num_threads",
        type=int,
        default=torch.get_num_threads(),
        help="torch's threads (default: torch's)",
    )
    add("--mixed_precision", choices=("no", "bf16"), default="no", help="default: no")
    add(
        "--dropout", type=float, default=0.1, help="dropout probability at all sites (default: 0.1)"
    )
    add("--num_samples", type=int, default=512, help="samples of an epoch (default: 512)")
    add("--max_length", type=int, default=256, help="maximum tokens of a sample (default: 256)")
    add(
        "--window",
        dest="window_size",
        type=int,
        default=64,
        help="samples of an optimizer step (default: 64)",
    )
    add(
        "--micro_batch",
        dest="micro_batch_size",
        type=int,
        default=8,
        help="samples of a micro-batch (default: 8)",
    )
    add("--epochs", type=int, default=3, help="measured epochs, after one unmeasured (default: 3)")
    add("--arms", nargs="+", default=(), help="arms of the section peers (default: all)")
    add(
        "--most_samples",
        type=int,
        default=10**7,
        help="size of the largest dataset of the section plan (default: 10,000,000)",
    )
    add(
        "--assert",
        dest="assert_bounds",
        action="store_true",
        help="exit with code 1 if a bound fails",
    )
    add("--output_dir", type=Path, help="folder for benchmark.md and benchmark.json")
    flags = parser.parse_args(arguments)
    is_multiple = not (
        flags.window_size % flags.micro_batch_size or flags.num_samples % flags.window_size
    )
    if not is_multiple or flags.epochs < 1:
        parser.error(
            f"num_samples ({flags.num_samples}) must be a multiple of window "
            f"({flags.window_size}), and window of micro_batch "
            f"({flags.micro_batch_size}), because Trainer drops or repeats the rest; epochs must "
            f"be at least 1, got {flags.epochs}"
        )
    return flags


def _settings(flags: argparse.Namespace) -> list[Setting]:
    """Return the setting of each model."""
    common = {
        name: value for name, value in vars(flags).items() if name in Setting.__dataclass_fields__
    }
    settings = []
    for model in flags.models:
        samples = documentation_strings(model, flags.max_length, flags.num_samples)
        settings.append(Setting(model, **common, **samples))
    return settings


def _machine(flags: argparse.Namespace) -> str:
    """Return a line with the machine, the versions and the setting."""
    device = f"{platform.machine()} CPU"
    if flags.device == "cuda":
        device = torch.cuda.get_device_name()
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")
    )
    return (
        f"{device}, {flags.num_threads} thread(s), {versions}; size {flags.size}, precision "
        f"{flags.mixed_precision}, dropout "
        f"{flags.dropout}, window {flags.window_size}, micro-batch {flags.micro_batch_size}, "
        f"{flags.num_samples} samples of at "
        f"most {flags.max_length} tokens, {flags.epochs} epoch(s) measured."
    )


def _write(flags: argparse.Namespace, sections: Sequence[Section]) -> None:
    """Write benchmark.md and benchmark.json with the sections so far."""
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    machine = _machine(flags)
    lines = ["# Benchmark", "", machine, "", METHOD, "", *map(str, sections)]
    (flags.output_dir / "benchmark.md").write_text("\n".join(lines))
    figures = [vars(section) | {"bounds": list(map(str, section.bounds))} for section in sections]
    content = {"machine": machine, "sections": figures}
    (flags.output_dir / "benchmark.json").write_text(json.dumps(content, indent=1))
