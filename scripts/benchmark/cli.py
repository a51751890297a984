"""The flags of `scripts/benchmark.py`, and what it writes."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmark.arms import ARMS
from benchmark.figures import Section
from benchmark.sections import SECTIONS, Plan
from benchmark.setting import BASE_VOCABULARY, EMBEDDED_VOCABULARY, SIZES, TASKS, Setting
from hf_ga.data.corpus import load_stdlib_tokenizer
from hf_ga.errors import ConfigError, HfGaError

CHECKER = "checker"
METHOD = """Arms in turn, round after round, every measurement in a process of its own (forked of one that has imported all);
medians over the rounds, ratios of medians. One measurement is an epoch behind a warm-up, timed from the first request
for data to the end of the last step, so start-up is not in it. All arms have the same samples, model (new weights),
window, micro-batch, precision, AdamW without decay in its fused form, constant learning rate and clipping to 1.0;
each has its own order of samples and its own dropout masks. Trainer accumulates 8 micro-batches of 8; that its update
is then another one (see the README) does not matter here. GPT-2 is a causal LM; `bert` tells which package a text
comes from, `bert-mlm` is a masked LM whose masks were drawn beforehand. What training adds is the peak of the process
(its resident set; on a GPU what is allocated) above what it held when imports, samples and model were there. Inside
forward and backward: Trainer's `training_step`; elsewhere the model's forward and every backward. Useful FLOPs: 6 x
body parameters x real tokens + 6 x head parameters x targets (embeddings, and attention's products of tokens with
tokens, count as nothing), over the rate of one large square matrix product in the same rounds and with the same
threads. CPU seconds are of all threads, waiting ones included. All arms start in the same way with the same environment.
On lengths within 10 %, where arms differ little, on a CPU they take turns window by
window: all processes of a round live at the same time, and one of them is at work. Splits of a window compute the same
padded tokens: its micro-batches are padded to its longest sample. Beside them a window of short samples, where what
comes with a micro-batch weighs most.
"hf_ga, packed" is what it does by itself on a CPU, and bounds are about that: layers compute real tokens, so the plan
pads more for fewer micro-batches; "padded / real" is that of the batches as collated."""
QUICK = {"size": "tiny", "num_samples": 48, "max_length": 32, "rounds": 1, "window": 16, "micro_batch": 4, "most_samples": 10_000}


def main(arguments: Sequence[str] | None = None, checker: Path | None = None) -> int:
    """Measure what is asked for, print and write it. Returns the exit code: 1 with --assert where a bound is broken, 2 refused.

    Args:
        checker: the script that measures the checker's cost.
    """
    try:
        return _run(_parser().parse_args(arguments), checker)
    except HfGaError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def _run(flags: argparse.Namespace, checker: Path | None) -> int:
    names = _listed("sections", flags.sections, [*SECTIONS, CHECKER])
    plan = _plan(flags)
    found: list[Section] = []
    print(f"{_machine(plan)}\n", flush=True)
    for name in names:
        sections = [_checker_section(checker, flags.rounds)] if name == CHECKER else SECTIONS[name](plan)
        for section in sections:
            print(section.to_markdown(), flush=True)
        found += sections
    _write(flags, plan, found)
    broken = [bound for section in found for bound in section.bounds if bound.is_broken]
    if flags.assert_bounds:
        print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken and flags.assert_bounds else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Speed and memory of Trainer, TRL, a raw Accelerate loop and hf_ga: arms in turn, medians and ratios.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    everything = ",".join([*SECTIONS, CHECKER])
    add("--sections", default=everything, help=f"parts to run, with commas between (default: {everything})")
    add("--model", default="gpt,bert", help=f"models, with commas between, of: {', '.join(TASKS)} (default: gpt,bert)")
    add("--arms", default=";".join(ARMS), help=f"arms of whole windows, with semicolons between (default: {';'.join(ARMS)})")
    add("--rounds", type=int, help="measurements of each arm, in turn (default: 3)")
    add("--rounds_of_others", type=int, default=1, help="on real lengths, of the arms that no bound is about (default: 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a CUDA device where there is one")
    add("--num_threads", type=int, default=torch.get_num_threads(), help="threads of torch (default: as torch chooses)")
    add("--mixed_precision", choices=("no", "bf16"), default="no", help="what autocast computes in (default: no, float32)")
    add("--size", choices=tuple(SIZES), help="small: 4 layers x 256; base: GPT-2-small and BERT-base (default: small)")
    add("--dropout", type=float, default=0.1, help="of all places of the model (default: 0.1)")
    add("--num_samples", type=int, help="samples of an epoch, which is one measurement (default: 512)")
    add("--max_length", type=int, help="tokens at which a sample is cut (default: 256)")
    add("--window", type=int, help="samples of an optimizer step (default: 64)")
    add("--micro_batch", type=int, help="samples of a micro-batch (default: 8)")
    add("--warmup_windows", type=int, default=1, help="windows of each arm before the clock runs (default: 1)")
    add("--most_samples", type=int, help="samples of the largest dataset of the section plan (default: 10,000,000)")
    add("--quick", action="store_true", help="tiny sizes, for a test: other flags win; nothing that it measures means anything")
    add("--assert", dest="assert_bounds", action="store_true", help="exit with 1 where something that must show does not")
    add("--output", help="file for all figures (JSON)")
    add("--output_dir", help="folder for benchmark.md, the tables, and benchmark.json")
    return parser


def _plan(flags: argparse.Namespace) -> Plan:
    usual = {"size": "small", "num_samples": 512, "max_length": 256, "rounds": 3, "window": 64, "micro_batch": 8}
    for name, value in (QUICK if flags.quick else {**usual, "most_samples": 10_000_000}).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    _check(flags)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if flags.device == "auto" else flags.device
    settings = [
        Setting(
            model=model,
            size=flags.size,
            vocabulary=BASE_VOCABULARY[model] if flags.size == "base" else EMBEDDED_VOCABULARY,
            device=device,
            num_threads=flags.num_threads,
            mixed_precision=flags.mixed_precision,
            dropout=flags.dropout,
            micro_batch_size=flags.micro_batch,
            window_size=flags.window,
            max_length=flags.max_length,
            warmup_windows=flags.warmup_windows,
            pad_token_id=load_stdlib_tokenizer().pad_token_id,
        )
        for model in _listed("model", flags.model, list(TASKS))
    ]
    arms = _listed("arms", flags.arms, list(ARMS), ";")
    return Plan(settings, flags.num_samples, arms, flags.rounds, flags.rounds_of_others, flags.most_samples)


def _check(flags: argparse.Namespace) -> None:
    for name in ("rounds", "rounds_of_others", "num_threads", "num_samples", "window", "micro_batch", "warmup_windows"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(flags, name)}.")
    if flags.window % flags.micro_batch or flags.num_samples % flags.window:
        raise ConfigError(
            f"num_samples ({flags.num_samples}) must be whole windows ({flags.window}), and a window whole micro-batches "
            f"({flags.micro_batch}): Trainer drops or repeats what is left over."
        )


def _listed(flag: str, value: str, known: list[str], separator: str = ",") -> list[str]:
    names = [name.strip() for name in value.split(separator)]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{flag} {unknown[0]!r} is not known: choose of {f'{separator} '.join(known)}.")
    return names


def _checker_section(checker: Path | None, rounds: int) -> Section:
    """What the script for it prints; it knows its own bounds."""
    if checker is None:
        raise ConfigError("the section checker needs scripts/benchmark_checker.py: run scripts/benchmark.py.")
    done = subprocess.run([sys.executable, checker, "--repeats", str(rounds)], capture_output=True, text=True)
    printed = done.stdout + (done.stderr[-2000:] if done.returncode else "")  # else there are only progress bars
    return Section.quoted("Cost of check_equivalence, in full-batch steps", printed, done.returncode)


def _machine(plan: Plan) -> str:
    setting = plan.settings[0]
    device = torch.cuda.get_device_name() if setting.device == "cuda" else f"{platform.machine()} CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    return (
        f"{device}, {setting.num_threads} thread(s), {versions}; size {setting.size}, precision {setting.mixed_precision}, dropout "
        f"{setting.dropout}, window {setting.window_size}, micro-batch {setting.micro_batch_size}, {plan.num_samples} samples cut "
        f"at {setting.max_length} tokens, {plan.rounds} round(s), medians. AdamW (fused) everywhere, clipping 1.0."
    )


def _write(flags: argparse.Namespace, plan: Plan, found: Sequence[Section]) -> None:
    text = "\n".join(["# Benchmark", "", _machine(plan), "", METHOD, "", *(section.to_markdown() for section in found)])
    figures: dict[str, Any] = {"machine": _machine(plan), "flags": vars(flags), "sections": [s.to_dict() for s in found]}
    if flags.output_dir:
        folder = Path(flags.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "benchmark.md").write_text(text)
        (folder / "benchmark.json").write_text(json.dumps(figures, indent=1))
    if flags.output:
        Path(flags.output).write_text(json.dumps(figures, indent=1))
