"""What a check costs, in steps of the full batch: `python scripts/benchmark_checker.py --help`.

A random BERT of 23 million parameters and a window of 64 ragged samples. The full-batch step (one forward and one backward of the
64 at once, with torch's own dropout) and both kinds of check are measured in turn, and medians are compared: of CPU time, to which
other processes of the machine add nothing, and of the clock. Freed memory is kept for what comes next, as `check_equivalence.py`
does it: the system's clearing of pages is in neither. Exits with code 1 where a check costs more CPU time than it may.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from check_equivalence import QUICK_LAYOUTS, QUICK_SAMPLES
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import hf_ga

MOST_STEPS = {"check": 12.0, "quick check": 4.0}
VOCABULARY, NUM_SAMPLES = 30522, 64


def main() -> int:
    """Measure, print a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each kind (default: 3)")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest sample; the shortest has 8 (default: 64)")
    flags = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
    model, samples = BertForSequenceClassification(config).train(), make_samples(flags.longest)
    by_length = sorted(samples, key=lambda sample: len(sample["input_ids"]))
    quick_samples = [by_length[i * (NUM_SAMPLES - 1) // (QUICK_SAMPLES - 1)] for i in range(QUICK_SAMPLES)]
    kinds: dict[str, Callable[[], Any]] = {
        "full-batch step": lambda: full_batch_step(model, samples),
        "check": lambda: passed(hf_ga.check_equivalence(model, samples, collate)),
        "quick check": lambda: passed(hf_ga.check_equivalence(model, quick_samples, collate, QUICK_LAYOUTS)),
    }
    full_batch_step(model, samples)  # the first one is slower: memory is fetched
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    clock: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(flags.repeats):
        for kind, run in kinds.items():
            for _ in range(3 if kind == "full-batch step" else 1):
                began = time.process_time(), time.perf_counter()
                run()
                cpu[kind].append(time.process_time() - began[0])
                clock[kind].append(time.perf_counter() - began[1])
    return report(cpu, clock, sum(p.numel() for p in model.parameters()))


def make_samples(longest: int) -> list[dict[str, Any]]:
    """Lengths spread evenly from 8 to the longest, in random order; one class each."""
    lengths = torch.linspace(8, longest, NUM_SAMPLES).long()[torch.randperm(NUM_SAMPLES)].tolist()
    return [{"input_ids": torch.randint(5, VOCABULARY, (length,)), "labels": i % 2} for i, length in enumerate(lengths)]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([s["labels"] for s in samples])}


def full_batch_step(model: torch.nn.Module, samples: list[dict[str, Any]]) -> None:
    """One forward and one backward of all samples."""
    model.zero_grad(set_to_none=True)
    model(**collate(samples)).loss.backward()


def passed(result: hf_ga.EquivalenceReport) -> None:
    """A check that fails is not worth measuring."""
    if not result.passed:
        raise SystemExit(f"the check did not pass:\n{result}")


def report(cpu: dict[str, list[float]], clock: dict[str, list[float]], num_parameters: int) -> int:
    """Print medians and ratios; 1 where a limit is broken."""
    print(f"{num_parameters:,} parameters, window of {NUM_SAMPLES} samples, {torch.get_num_threads()} thread(s), float32")
    print("| | CPU seconds (median) | all | full-batch steps | by the clock | limit |\n| --- | ---: | --- | ---: | ---: | ---: |")
    broken = 0
    for kind, values in cpu.items():
        ratio, by_clock = (statistics.median(t[kind]) / statistics.median(t["full-batch step"]) for t in (cpu, clock))
        limit = MOST_STEPS.get(kind)
        broken += limit is not None and ratio > limit
        listed = ", ".join(f"{value:.2f}" for value in values)
        print(f"| {kind} | {statistics.median(values):.2f} | {listed} | {ratio:.1f} | {by_clock:.1f} | {limit or ''} |")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
