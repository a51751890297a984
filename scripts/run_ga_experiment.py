"""Train the same 100 optimizer steps in several layouts and compare: `accelerate launch
scripts/run_ga_experiment.py`.

Every arm starts from the same weights. Layouts use `train_step`; the usual mistakes, one at a time,
use `mistaken_step`, written with plain torch, which differs from the correct step in one thing.
Prints a table, writes it as experiment.md with experiment.png to --output_dir, and exits with code
1 if a layout differs from 64 x 1 by more than the limits.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from hf_ga.errors import ConfigError
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.plan import Planner, plan_by_sizes
from hf_ga.exact.rule import Rule
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.finetuning.data.data import PreparedData, prepare_data
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.evaluation import evaluate, evaluation_windows
from hf_ga.finetuning.run.models import load_tokenizer
from hf_ga.finetuning.run.optimizers import build_optimizer
from hf_ga.training import prepare, prove_targets, train_step

WINDOW_SIZE, LEARNING_RATE, SEED = 64, 5e-4, 0
LIMITS = {
    "train loss": 2e-6,
    "validation loss": 5e-6,
    "final weights": 5e-5,
    "validation loss, dropout 0": 5e-7,
}
COLUMNS = [
    "run",
    "last train loss",
    "validation loss",
    "train loss, largest",
    "validation",
    "final weights",
    "steps/s",
]


@dataclass(frozen=True)
class Arm:
    """One run. `weights`: (targets of each micro-batch, micro-batches of a full window) -> factor
    of each micro-batch's mean loss;
    None: the correct step.
    """

    name: str
    micro_batch_size: int
    dropout: float = 0.1
    planner: Planner | None = None
    weights: Callable[[np.ndarray, int], np.ndarray] | None = None
    keyed: bool = True
    same_window: bool = True
    token_weighted_validation: bool = True


@dataclass
class ArmResult:
    """The results of an arm: loss of each step, validation loss at the end, final weights (flat,
    float64), steps per second.
    """

    arm: Arm
    train_losses: list[float]
    validation_loss: float
    final_weights: Tensor
    steps_per_second: float


def correct_weights(counts: np.ndarray, full: int) -> np.ndarray:
    """n_k / sum of n, as in `backward_window`."""
    return counts / counts.sum()


LAYOUTS = [
    Arm("64 x 1", 64),
    Arm("16 x 4", 16),
    Arm("4 x 16", 4),
    Arm("1 x 64", 1),
    Arm(
        "sorted by length, uneven (5, 11, 1, 20)",
        20,
        planner=partial(plan_by_sizes, sizes=[5, 11, 1, 20]),
    ),
]
WITHOUT_DROPOUT = [
    Arm("64 x 1, dropout 0", 64, dropout=0.0),
    Arm("16 x 4, dropout 0", 16, dropout=0.0),
]
MISTAKES = [
    Arm("micro-batches sampled independently", 16, weights=correct_weights, same_window=False),
    Arm("mean of means (ragged lengths)", 16, weights=lambda n, full: np.full(len(n), 1 / len(n))),
    Arm(
        "last window divided by the full GA",
        16,
        weights=lambda n, full: n / n.sum() * len(n) / full,
    ),
    Arm("gradients not divided", 16, weights=lambda n, full: n / n.sum() * len(n)),
    Arm("native dropout", 16, weights=correct_weights, keyed=False),
    Arm("validation as a mean over batches of 16", 16, token_weighted_validation=False),
]


class Experiment:
    """Data, initial weights and settings of all arms. `num_samples`: training rows, with a short
    last window of an epoch.
    """

    def __init__(
        self, steps: int, num_samples: int = 600, max_length: int = 48, same_bits: int | None = None
    ) -> None:
        if (count := PartialState().num_processes) > 1:
            raise ConfigError(
                f"the experiment compares layouts of one process, but runs on {count}: start it "
                "without a launcher."
            )
        config = FinetuneConfig(max_length=max_length)
        self.data: PreparedData = prepare_data(config, load_tokenizer(config))
        train = self.data.splits["train"]
        self.train = train.select(range(min(num_samples, len(train)))).with_format(None)
        self.steps, self.same_bits = steps, same_bits
        torch.manual_seed(SEED)
        tokenizer = self.data.tokenizer
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=max_length,
                n_embd=64,
                n_layer=2,
                n_head=4,
                **special,
            )
        )

    def run(self, arm: Arm, on_step: Callable[[], Any] = lambda: None) -> ArmResult:
        """Train one arm from the initial weights."""
        accelerator = Accelerator()
        model = copy.deepcopy(self.model).to(accelerator.device).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = arm.dropout
        optimizer = build_optimizer(model, "adamw", LEARNING_RATE, weight_decay=0.01)
        samples = [self.train[i] for i in range(32)]
        rule = prove_targets(model, samples, self.data.collate)
        model, optimizer = prepare(accelerator, model, optimizer, rule=rule)
        torch.manual_seed(SEED)  # for native dropout
        losses, began = [], time.perf_counter()
        for window in self._windows(arm, accelerator):
            if arm.weights is None:
                result = train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
                losses.append(result.loss)
            else:
                losses.append(mistaken_step(model, optimizer, window, rule, arm))
            on_step()
        rate = self.steps / (time.perf_counter() - began)
        weights = torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])
        return ArmResult(arm, losses, self._validate(arm, accelerator, model, rule), weights, rate)

    def _windows(self, arm: Arm, accelerator: Accelerator) -> Iterator[Window]:
        loader = WindowLoader(
            self.train,
            self.data.collate,
            accelerator=accelerator,
            per_device_batch_size=arm.micro_batch_size,
            global_batch_size=WINDOW_SIZE,
            lengths=None
            if arm.planner is None
            else self.train["length"],  # split by number of samples, as in the arms' names
            planner=arm.planner,
            seed=SEED,
            canonical_micro_batch=self.same_bits,
        )
        generator = np.random.default_rng(SEED)
        for window in islice(chain.from_iterable(repeat(loader)), self.steps):  # epoch after epoch
            yield window if arm.same_window else _resampled(window, generator, len(self.train))

    def _validate(self, arm: Arm, accelerator: Accelerator, model: nn.Module, rule: Rule) -> float:
        rows = self.data.splits["validation"]
        windows = evaluation_windows(
            rows,
            self.data.collate,
            accelerator=accelerator,
            batch_size=self.same_bits or arm.micro_batch_size,
            lengths=rows["length"],
            rule=rule,
        )
        if arm.token_weighted_validation:
            return evaluate(accelerator, model, windows, rule)["loss"]
        model.eval()
        starts = range(0, len(rows), arm.micro_batch_size)
        batches = [
            self.data.collate([rows[j] for j in range(i, min(i + arm.micro_batch_size, len(rows)))])
            for i in starts
        ]
        with torch.no_grad():
            return float(np.mean([model(**batch).loss.item() for batch in batches]))


def mistaken_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Window, rule: Rule, arm: Arm
) -> float:
    """One optimizer step with the arm's mistake. Returns the loss that such a loop would log: its
    weighted sum.
    """
    micro_batches = window.micro_batches
    counts = np.array([sum(rule.loss.count(m.batch, len(m))) for m in micro_batches])
    weights = arm.weights(counts, WINDOW_SIZE // arm.micro_batch_size)
    reported, for_window = 0.0, window_key(window.request.seed, window.epoch, window.index)
    optimizer.zero_grad()
    with rule.dropout.scope(model) if arm.keyed else nullcontext():
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            rule.dropout.set_keys(
                sample_keys(window.request.seed, window.epoch, micro_batch.positions), for_window
            )
            loss = model(**micro_batch.batch).loss * float(weight)
            loss.backward()
            reported += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return reported


def differences(result: ArmResult, reference: ArmResult) -> dict[str, float]:
    """Relative differences to the reference arm: the largest over all steps, of the validation
    loss, of the final weights (L2).
    """
    losses, right = np.array(result.train_losses), np.array(reference.train_losses)
    weights = (
        result.final_weights - reference.final_weights
    ).norm() / reference.final_weights.norm()
    return {
        "train loss": float(np.max(np.abs(losses - right) / right)),
        "validation loss": abs(result.validation_loss - reference.validation_loss)
        / reference.validation_loss,
        "final weights": float(weights),
    }


def _resampled(window: Window, generator: np.random.Generator, num_samples: int) -> Window:
    """The same micro-batch sizes, each filled with independently drawn samples."""
    request = replace(
        window.request, sample_ids=generator.integers(num_samples, size=window.num_samples)
    )
    return replace(window, request=request, batches=window.fetcher[request])


def main() -> int:
    """Parse flags, run all arms, report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of each run (default: 100)"
    )
    parser.add_argument(
        "--same_bits",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        help="samples in one chunk: compare the layouts whose micro-batches hold one, down to the "
        "last bit",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("outputs/ga_experiment"),
        help="folder for table and plot",
    )
    flags = parser.parse_args()
    logging.set_verbosity_error()
    experiment = Experiment(flags.steps, same_bits=flags.same_bits)
    groups, limits = (
        {"layouts": LAYOUTS, "dropout 0": WITHOUT_DROPOUT, "mistakes": MISTAKES},
        LIMITS,
    )
    if flags.same_bits:
        sizes = [size for size in (64, 32, 16, 8, 4, 2, 1) if size >= flags.same_bits]
        groups, limits = (
            {"layouts": [Arm(f"{size} x {64 // size}", size) for size in sizes]},
            dict.fromkeys(LIMITS, 0.0),
        )
    with tqdm(
        total=flags.steps * sum(map(len, groups.values())), unit="step", dynamic_ncols=True
    ) as bar:
        results = {
            group: [experiment.run(arm, bar.update) for arm in arms]
            for group, arms in groups.items()
        }
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    table, failures = make_table(results), broken_limits(results, limits)
    (flags.output_dir / "experiment.md").write_text(table + "\n")
    plot(results, flags.output_dir / "experiment.png")
    print(table)
    within = "matches the full batch: " + ", ".join(
        f"{name} within {limit:.0e}" for name, limit in limits.items()
    )
    print(
        "\n".join(failures)
        if failures
        else f"every layout {'has the same bits' if flags.same_bits else within}"
    )
    return 1 if failures else 0


def reference_of(results: dict[str, list[ArmResult]], group: str) -> ArmResult:
    """The run to compare with: 64 x 1, with the same dropout."""
    return results["dropout 0" if group == "dropout 0" else "layouts"][0]


def make_table(results: dict[str, list[ArmResult]]) -> str:
    """A Markdown table, one row per run; differences are relative to the first row (for dropout 0,
    to its first row).
    """
    rows = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    for group, members in results.items():
        for result in members:
            errors = differences(result, reference_of(results, group)).values()
            shown = ["0" if value == 0 else f"{value:.1e}" for value in errors]
            losses = [f"{result.train_losses[-1]:.12f}", f"{result.validation_loss:.12f}"]
            prefix = "**mistake:** " if group == "mistakes" else ""
            rows.append(
                [prefix + result.arm.name, *losses, *shown, f"{result.steps_per_second:.1f}"]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def broken_limits(
    results: dict[str, list[ArmResult]], limits: dict[str, float] = LIMITS
) -> list[str]:
    """One line for every exceeded limit."""
    lines = []
    for group in ("layouts", "dropout 0"):
        for result in results.get(group, []):
            reference = reference_of(results, group)
            errors = differences(result, reference)
            if group == "dropout 0":
                errors["validation loss, dropout 0"] = abs(
                    result.validation_loss - reference.validation_loss
                )
            lines += [
                f"{result.arm.name}: {name} differs by {value:.1e}, limit {limits[name]:.0e}"
                for name, value in errors.items()
                if not value <= limits[name]
            ]
    return lines


def plot(results: dict[str, list[ArmResult]], path: Path) -> None:
    """Relative difference of the training loss over the steps, logarithmic: layouts below, mistakes
    above.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for group, style in (("layouts", "-"), ("mistakes", "--")):
        reference = reference_of(results, group)
        for result in results.get(group, []):
            if (
                result is not reference and result.arm.token_weighted_validation
            ):  # this mistake trains like a layout
                pairs = zip(result.train_losses, reference.train_losses, strict=True)
                errors = [max(abs(a - b) / b, 1e-9) for a, b in pairs]
                axes.semilogy(
                    range(1, len(errors) + 1),
                    errors,
                    style,
                    linewidth=1.2,
                    label=f"{group[:-1]}: {result.arm.name}",
                )
    axes.axhline(LIMITS["train loss"], color="black", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="optimizer step",
        ylabel="relative difference of the train loss to 64 x 1",
        ylim=(5e-10, 10),
    )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
