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

WINDOW_SIZE = 64
LEARNING_RATE = 5e-4
SEED = 0
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
    """One run.

    Attributes:
        name: Its name in the table.
        micro_batch_size: Samples in a micro-batch.
        dropout: Probability at all sites.
        planner: Plans the micro-batches of a window. None: by number of samples.
        weights: A function (targets of each micro-batch, micro-batches of a full window) -> factor
            of each micro-batch's mean loss. None: the correct step.
        keyed: Whether dropout is keyed.
        same_window: Whether micro-batches hold the samples of the window, or others.
        token_weighted_validation: Whether the validation loss is the mean over tokens.
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
    """The results of an arm.

    Attributes:
        arm: The arm.
        train_losses: The loss of each step.
        validation_loss: The validation loss at the end.
        final_weights: All weights, float64 of shape (parameters,).
        steps_per_second: Optimizer steps per second.
    """

    arm: Arm
    train_losses: list[float]
    validation_loss: float
    final_weights: Tensor
    steps_per_second: float


def correct_weights(counts: np.ndarray, full: int) -> np.ndarray:
    """Weight each micro-batch by its share of the window's targets, as `backward_window` does."""
    return counts / counts.sum()


def mean_of_means(counts: np.ndarray, full: int) -> np.ndarray:
    """Weight all micro-batches equally."""
    return np.full(len(counts), 1 / len(counts))


def divided_by_full(counts: np.ndarray, full: int) -> np.ndarray:
    """Divide by the micro-batches of a full window, in the short last window too."""
    return counts / counts.sum() * len(counts) / full


def not_divided(counts: np.ndarray, full: int) -> np.ndarray:
    """Sum the micro-batches' gradients instead of averaging them."""
    return counts / counts.sum() * len(counts)


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
    Arm("mean of means (ragged lengths)", 16, weights=mean_of_means),
    Arm("last window divided by the full GA", 16, weights=divided_by_full),
    Arm("gradients not divided", 16, weights=not_divided),
    Arm("native dropout", 16, weights=correct_weights, keyed=False),
    Arm("validation as a mean over batches of 16", 16, token_weighted_validation=False),
]


class Experiment:
    """Data, initial weights and settings of all arms.

    Args:
        steps: Optimizer steps of each arm.
        num_samples: Training rows; the default makes the last window of an epoch a short one.
        max_length: Largest number of tokens of a sample.
        same_bits: Samples in one chunk. None: windows are not cut into chunks.

    Raises:
        ConfigError: If it runs on several processes.
    """

    def __init__(
        self, steps: int, num_samples: int = 600, max_length: int = 48, same_bits: int | None = None
    ) -> None:
        count = PartialState().num_processes
        if count > 1:
            raise ConfigError(
                f"the experiment compares layouts of one process, but runs on {count}: start it "
                "without a launcher."
            )
        config = FinetuneConfig(max_length=max_length)
        self.data: PreparedData = prepare_data(config, load_tokenizer(config))
        train = self.data.splits["train"]
        first = range(min(num_samples, len(train)))
        self.train = train.select(first).with_format(None)
        self.steps = steps
        self.same_bits = same_bits
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
        """Train one arm from the initial weights, and evaluate it.

        Args:
            arm: The arm.
            on_step: Called after each step.
        """
        accelerator = Accelerator()
        model = copy.deepcopy(self.model).to(accelerator.device).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = arm.dropout
        optimizer = build_optimizer(model, "adamw", LEARNING_RATE, weight_decay=0.01)
        samples = [self.train[i] for i in range(32)]
        rule = prove_targets(model, samples, self.data.collate)
        model, optimizer = prepare(accelerator, model, optimizer, rule=rule)
        # For native dropout.
        torch.manual_seed(SEED)
        losses = []
        began = time.perf_counter()
        for window in self._windows(arm, accelerator):
            if arm.weights is None:
                result = train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
                losses.append(result.loss)
            else:
                losses.append(mistaken_step(model, optimizer, window, rule, arm))
            on_step()
        rate = self.steps / (time.perf_counter() - began)
        flat = [p.detach().double().flatten().cpu() for p in model.parameters()]
        validation_loss = self._validate(arm, accelerator, model, rule)
        return ArmResult(arm, losses, validation_loss, torch.cat(flat), rate)

    def _windows(self, arm: Arm, accelerator: Accelerator) -> Iterator[Window]:
        """Yield the windows of an arm, epoch after epoch."""
        # Without lengths, windows are split by number of samples, as in the arms' names.
        lengths = None if arm.planner is None else self.train["length"]
        loader = WindowLoader(
            self.train,
            self.data.collate,
            accelerator=accelerator,
            per_device_batch_size=arm.micro_batch_size,
            global_batch_size=WINDOW_SIZE,
            lengths=lengths,
            planner=arm.planner,
            seed=SEED,
            canonical_micro_batch=self.same_bits,
        )
        generator = np.random.default_rng(SEED)
        epochs = repeat(loader)
        for window in islice(chain.from_iterable(epochs), self.steps):
            yield window if arm.same_window else _resampled(window, generator, len(self.train))

    def _validate(self, arm: Arm, accelerator: Accelerator, model: nn.Module, rule: Rule) -> float:
        """Compute the validation loss, by the arm's mistake if that is one of validation."""
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
        losses = []
        with torch.no_grad():
            for start in range(0, len(rows), arm.micro_batch_size):
                end = min(start + arm.micro_batch_size, len(rows))
                batch = self.data.collate([rows[i] for i in range(start, end)])
                losses.append(model(**batch).loss.item())
        return float(np.mean(losses))


def mistaken_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Window, rule: Rule, arm: Arm
) -> float:
    """Make one optimizer step with the arm's mistake.

    Returns:
        The loss that such a loop would log: the weighted sum of the micro-batches' losses.
    """
    micro_batches = window.micro_batches
    counts = np.array([sum(rule.loss.count(m.batch, len(m))) for m in micro_batches])
    weights = arm.weights(counts, WINDOW_SIZE // arm.micro_batch_size)
    seed = window.request.seed
    for_window = window_key(seed, window.epoch, window.index)
    reported = 0.0
    optimizer.zero_grad()
    with rule.dropout.scope(model) if arm.keyed else nullcontext():
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            for_samples = sample_keys(seed, window.epoch, micro_batch.positions)
            rule.dropout.set_keys(for_samples, for_window)
            loss = model(**micro_batch.batch).loss * float(weight)
            loss.backward()
            reported += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return reported


def differences(result: ArmResult, reference: ArmResult) -> dict[str, float]:
    """Compute relative differences to the reference arm.

    Returns:
        `train loss`, the largest difference over all steps; `validation loss`; `final weights`, by
        their L2 norm.
    """
    losses = np.array(result.train_losses)
    right = np.array(reference.train_losses)
    step_errors = np.abs(losses - right) / right
    validation_error = abs(result.validation_loss - reference.validation_loss)
    weight_error = (result.final_weights - reference.final_weights).norm()
    return {
        "train loss": float(np.max(step_errors)),
        "validation loss": validation_error / reference.validation_loss,
        "final weights": float(weight_error / reference.final_weights.norm()),
    }


def _resampled(window: Window, generator: np.random.Generator, num_samples: int) -> Window:
    """Fill micro-batches of the same sizes with independently drawn samples."""
    sample_ids = generator.integers(num_samples, size=window.num_samples)
    request = replace(window.request, sample_ids=sample_ids)
    return replace(window, request=request, batches=window.fetcher[request])


def main() -> int:
    """Parse flags, run all arms, report.

    Returns:
        The exit code.
    """
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
    groups = {"layouts": LAYOUTS, "dropout 0": WITHOUT_DROPOUT, "mistakes": MISTAKES}
    limits = LIMITS
    if flags.same_bits:
        sizes = [size for size in (64, 32, 16, 8, 4, 2, 1) if size >= flags.same_bits]
        groups = {"layouts": [Arm(f"{size} x {64 // size}", size) for size in sizes]}
        limits = dict.fromkeys(LIMITS, 0.0)
    num_arms = sum(map(len, groups.values()))
    with tqdm(total=flags.steps * num_arms, unit="step", dynamic_ncols=True) as bar:
        results = {
            group: [experiment.run(arm, bar.update) for arm in arms]
            for group, arms in groups.items()
        }
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    table = make_table(results)
    failures = broken_limits(results, limits)
    (flags.output_dir / "experiment.md").write_text(table + "\n")
    plot(results, flags.output_dir / "experiment.png")
    print(table)
    if failures:
        print("\n".join(failures))
        return 1
    if flags.same_bits:
        print("every layout has the same bits")
        return 0
    within = ", ".join(f"{name} within {limit:.0e}" for name, limit in limits.items())
    print(f"every layout matches the full batch: {within}")
    return 0


def reference_of(results: dict[str, list[ArmResult]], group: str) -> ArmResult:
    """Return the run to compare with: 64 x 1, with the same dropout."""
    of_reference = "dropout 0" if group == "dropout 0" else "layouts"
    return results[of_reference][0]


def make_table(results: dict[str, list[ArmResult]]) -> str:
    """Make a Markdown table, one row per run; differences are relative to the first row (for
    dropout 0, to its first row).
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
    """List the limits that are exceeded, one line for each."""
    lines = []
    for group in ("layouts", "dropout 0"):
        for result in results.get(group, []):
            reference = reference_of(results, group)
            errors = differences(result, reference)
            if group == "dropout 0":
                validation_error = abs(result.validation_loss - reference.validation_loss)
                errors["validation loss, dropout 0"] = validation_error
            lines += [
                f"{result.arm.name}: {name} differs by {value:.1e}, limit {limits[name]:.0e}"
                for name, value in errors.items()
                if not value <= limits[name]
            ]
    return lines


def plot(results: dict[str, list[ArmResult]], path: Path) -> None:
    """Plot the relative difference of the training loss over the steps, logarithmic: layouts below,
    mistakes above.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for group, style in (("layouts", "-"), ("mistakes", "--")):
        reference = reference_of(results, group)
        for result in results.get(group, []):
            # An arm with the mistake in validation trains like a layout.
            if result is not reference and result.arm.token_weighted_validation:
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
