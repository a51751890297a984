"""Train the same 100 optimizer steps in several layouts (micro-batch size x accumulation steps) and
compare losses and weights: `accelerate launch scripts/run_ga_experiment.py`.

Every run (arm) starts from the same weights. Layouts use `train_step`; the usual mistakes, one at a
time, use `mistaken_step`, written in plain torch, which differs from the correct step in one thing.
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
from common import Shape, build_model, table
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_ga.check.gradients import relative_error
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.data import PreparedData, prepare_data
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.model.models import load_tokenizer
from hf_ga.finetuning.run.optimizers import build_optimizer
from hf_ga.finetuning.run.scores.evaluation import evaluate_samples, evaluation_windows
from hf_ga.loading.window import Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.order.plan import Planner, plan_by_sizes
from hf_ga.training import prepare, train_step

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
    """The settings of one training run of the experiment: a layout, or a usual mistake.

    Attributes:
        name: Name of the run in the table.
        micro_batch_size: Samples in a micro-batch.
        dropout: Dropout probability at all sites.
        planner: Splits a window into micro-batches. None: evenly by number of samples.
        weights: For a mistake, the function (targets of each micro-batch, micro-batches of a full
            window) -> the factor of each micro-batch's mean loss; the run uses `mistaken_step`.
            None: the run uses hf_ga's `train_step`.
        keyed: Whether dropout is keyed by sample; False keeps torch's own dropout.
        same_window: Whether micro-batches have the samples of the window; False draws samples
            independently for every micro-batch.
        token_weighted_validation: Whether the validation loss is the mean over all tokens; False
            averages the mean losses of the batches.
    """

    name: str
    micro_batch_size: int
    dropout: float = 0.1
    planner: Planner | None = None
    weights: Callable[[np.ndarray, int], np.ndarray] | None = None
    keyed: bool = True
    same_window: bool = True
    token_weighted_validation: bool = True

    @property
    def is_mistake(self) -> bool:
        """Whether the run has a mistake; otherwise it must match the full batch."""
        return self.weights is not None or not self.token_weighted_validation


@dataclass
class ArmResult:
    """The results of one training run of the experiment.

    Attributes:
        arm: The settings of the run.
        train_losses: Training loss of each optimizer step.
        validation_loss: Validation loss after the last step.
        final_weights: All weights after the last step, as one float64 vector.
        steps_per_second: Optimizer steps per second.
    """

    arm: Arm
    train_losses: list[float]
    validation_loss: float
    final_weights: Tensor
    steps_per_second: float


def correct_weights(counts: np.ndarray, full: int) -> np.ndarray:
    """Weight each micro-batch's mean loss by its share of the window's targets, as hf_ga does.

    Args:
        counts: Targets of each micro-batch, shape (micro-batches,).
        full: Micro-batches of a full window; not used.

    Returns:
        The weight of each micro-batch, shape (micro-batches,).
    """
    return counts / counts.sum()


def mean_of_means(counts: np.ndarray, full: int) -> np.ndarray:
    """Weight all micro-batches equally, although they have different numbers of targets: a usual
    mistake of training loops.

    Args:
        counts: Targets of each micro-batch, shape (micro-batches,).
        full: Micro-batches of a full window.

    Returns:
        The factor of each micro-batch's mean loss, shape (micro-batches,).
    """
    return np.full(len(counts), 1 / len(counts))


def divided_by_full(counts: np.ndarray, full: int) -> np.ndarray:
    """Weight micro-batches correctly, but divide by the number of micro-batches of a full window in
    the short last window of an epoch too, whose gradient is then too small: a usual mistake of
    training loops.

    Args:
        counts: Targets of each micro-batch, shape (micro-batches,).
        full: Micro-batches of a full window.

    Returns:
        The factor of each micro-batch's mean loss, shape (micro-batches,).
    """
    return counts / counts.sum() * len(counts) / full


def not_divided(counts: np.ndarray, full: int) -> np.ndarray:
    """Sum the micro-batches' gradients instead of averaging them: a usual mistake of training
    loops.

    Args:
        counts: Targets of each micro-batch, shape (micro-batches,).
        full: Micro-batches of a full window.

    Returns:
        The factor of each micro-batch's mean loss, shape (micro-batches,).
    """
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
    """Runs the same training with different layouts and mistakes, on the same data and from the
    same initial weights.

    Args:
        steps: Optimizer steps of each run.
        num_samples: Number of training samples. With the default the last window of an epoch has
            fewer samples than the others.
        max_length: Maximum number of tokens of a sample.
        same_bits: Samples in one chunk: gradients have the same bits in every layout. None: windows
            are not split into chunks.

    Raises:
        ConfigError: If it runs on several processes.
    """

    def __init__(
        self, steps: int, num_samples: int = 600, max_length: int = 48, same_bits: int | None = None
    ) -> None:
        num_processes = PartialState().num_processes
        if num_processes > 1:
            raise ConfigError(
                f"the experiment compares layouts of one process, but runs on {num_processes}: "
                "start it without a launcher."
            )
        config = FinetuneConfig(max_length=max_length)
        self.data: PreparedData = prepare_data(config, load_tokenizer(config))
        train = self.data.splits["train"]
        first_rows = range(min(num_samples, len(train)))
        self.train = train.select(first_rows).with_format(None)
        self.steps = steps
        self.same_bits = same_bits
        torch.manual_seed(SEED)
        shape = Shape("gpt", layers=2, width=64, heads=4, words=len(self.data.tokenizer))
        self.model = build_model(shape, positions=max_length)

    def run(self, arm: Arm, on_step: Callable[[], Any] = lambda: None) -> ArmResult:
        """Train a copy of the initial model with the settings of one run, and evaluate it.

        Args:
            arm: The settings of the run.
            on_step: Called after each optimizer step, to update a progress bar.
        """
        accelerator = Accelerator()
        model = copy.deepcopy(self.model).to(accelerator.device).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = arm.dropout
        optimizer = build_optimizer(model, "adamw", LEARNING_RATE, weight_decay=0.01)
        model, optimizer = prepare(accelerator, model, optimizer)
        # torch's own dropout draws from the global generator.
        torch.manual_seed(SEED)
        losses = []
        start = time.perf_counter()
        for window in self._windows(arm, accelerator):
            if arm.weights is None:
                result = train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
                losses.append(result.loss)
            else:
                losses.append(mistaken_step(model, optimizer, window, arm))
            on_step()
        steps_per_second = self.steps / (time.perf_counter() - start)
        return ArmResult(
            arm=arm,
            train_losses=losses,
            validation_loss=self._validate(arm, accelerator, model),
            final_weights=parameters_to_vector(model.parameters()).detach().double().cpu(),
            steps_per_second=steps_per_second,
        )

    def _windows(self, arm: Arm, accelerator: Accelerator) -> Iterator[Window]:
        """Yield one window (the samples of an optimizer step) for each step of a training run,
        epoch after epoch; for the mistake `same_window=False`, with other samples.
        """
        # Without lengths, windows are split by number of samples, as the runs' names say.
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
        endless = chain.from_iterable(repeat(loader))
        for window in islice(endless, self.steps):
            if arm.same_window:
                yield window
            else:
                yield _draw_other_samples(window, generator, len(self.train))

    def _validate(self, arm: Arm, accelerator: Accelerator, model: nn.Module) -> float:
        """Compute the validation loss of a trained model: the mean over all tokens or, if that is
        the run's mistake, the mean of the batches' mean losses.
        """
        rows = self.data.splits["validation"]
        make_windows = partial(
            evaluation_windows,
            rows,
            self.data.collate,
            accelerator=accelerator,
            batch_size=self.same_bits or arm.micro_batch_size,
            lengths=rows["length"],
        )
        if arm.token_weighted_validation:
            return evaluate_samples(accelerator, model, make_windows)["loss"]
        model.eval()
        losses = []
        with torch.no_grad():
            for start in range(0, len(rows), arm.micro_batch_size):
                end = min(start + arm.micro_batch_size, len(rows))
                batch = self.data.collate([rows[i] for i in range(start, end)])
                losses.append(model(**batch).loss.item())
        return float(np.mean(losses))


def mistaken_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Window, arm: Arm
) -> float:
    """Make one optimizer step in plain torch, with the mistake of a run.

    Args:
        model: The model in training mode.
        optimizer: The optimizer of its parameters.
        window: The samples of the step.
        arm: The settings of the run, with its mistake.

    Returns:
        The loss that such a loop would log: the weighted sum of the micro-batches' losses.
    """
    micro_batches = window.micro_batches
    # The targets of a causal language model: all labels but the first one of each sample.
    counts = np.array([int((m.batch["labels"][:, 1:] != -100).sum()) for m in micro_batches])
    weights = arm.weights(counts, WINDOW_SIZE // arm.micro_batch_size)
    seed = window.request.seed
    key_of_window = window_key(seed, window.epoch, window.index)
    logged_loss = 0.0
    optimizer.zero_grad()
    draws = KeyedDraws()
    with draws.scope() if arm.keyed else nullcontext():
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            keys_of_samples = sample_keys(seed, window.epoch, micro_batch.positions)
            draws.begin(keys_of_samples, key_of_window)
            loss = model(**micro_batch.batch).loss * float(weight)
            loss.backward()
            logged_loss += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return logged_loss


def step_errors(result: ArmResult, reference: ArmResult) -> np.ndarray:
    """Compute the relative difference of the training loss of each step, shape (steps,)."""
    expected = np.array(reference.train_losses)
    return np.abs(np.array(result.train_losses) - expected) / expected


def differences(result: ArmResult, reference: ArmResult) -> dict[str, float]:
    """Compute the relative differences of a training run from the reference run.

    Returns:
        "train loss": the largest relative difference over all steps; "validation loss"; "final
        weights": the L2 norm of the difference over that of the reference's weights.
    """
    validation_error = abs(result.validation_loss - reference.validation_loss)
    return {
        "train loss": float(np.max(step_errors(result, reference))),
        "validation loss": validation_error / reference.validation_loss,
        "final weights": relative_error(result.final_weights, reference.final_weights),
    }


def _draw_other_samples(window: Window, generator: np.random.Generator, num_samples: int) -> Window:
    """Return a window with micro-batches of the same sizes, but of samples that are drawn
    independently, with replacement.
    """
    sample_ids = generator.integers(num_samples, size=window.num_samples)
    request = replace(window.request, sample_ids=sample_ids)
    return replace(window, request=request, batches=window.fetcher[request])


def main() -> int:
    """Run the experiment with the flags of the command line: train all runs, print and write the
    table, and plot it.

    Returns:
        The exit code: 1 if a layout differs from the full batch by more than the limits.
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
    arms = [*LAYOUTS, *WITHOUT_DROPOUT, *MISTAKES]
    limits = LIMITS
    if flags.same_bits:
        sizes = [size for size in (64, 32, 16, 8, 4, 2, 1) if size >= flags.same_bits]
        arms = [Arm(f"{size} x {64 // size}", size) for size in sizes]
        limits = dict.fromkeys(LIMITS, 0.0)
    with tqdm(total=flags.steps * len(arms), unit="step", dynamic_ncols=True) as bar:
        results = [experiment.run(arm, bar.update) for arm in arms]
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    results_table = make_table(results)
    failures = broken_limits(results, limits)
    (flags.output_dir / "experiment.md").write_text(results_table + "\n")
    plot(results, flags.output_dir / "experiment.png")
    print(results_table)
    if failures:
        print("\n".join(failures))
        return 1
    if flags.same_bits:
        print("every layout has the same bits")
        return 0
    within = ", ".join(f"{name} within {limit:.0e}" for name, limit in limits.items())
    print(f"every layout matches the full batch: {within}")
    return 0


def reference_of(results: list[ArmResult], result: ArmResult) -> ArmResult:
    """Return the run with which a run is compared: the first one with the same dropout, whose
    micro-batches of 64 samples are the full batch.
    """
    return next(other for other in results if other.arm.dropout == result.arm.dropout)


def make_table(results: list[ArmResult]) -> str:
    """Format the results as a Markdown table with one row per run: losses, relative differences
    from the reference run (`reference_of`), and speed.
    """
    rows = []
    for result in results:
        prefix = "**mistake:** " if result.arm.is_mistake else ""
        errors = differences(result, reference_of(results, result)).values()
        rows.append(
            [
                prefix + result.arm.name,
                f"{result.train_losses[-1]:.12f}",
                f"{result.validation_loss:.12f}",
                *("0" if error == 0 else f"{error:.1e}" for error in errors),
                f"{result.steps_per_second:.1f}",
            ]
        )
    return table(COLUMNS, rows)


def broken_limits(results: list[ArmResult], limits: dict[str, float] = LIMITS) -> list[str]:
    """Compare all layouts, with and without dropout, with their reference runs, and return one line
    for each difference that exceeds its limit; mistakes are not compared.

    Args:
        results: The results of the runs.
        limits: Name of the difference -> its largest accepted value.
    """
    lines = []
    for result in results:
        if result.arm.is_mistake:
            continue
        reference = reference_of(results, result)
        errors = differences(result, reference)
        if not result.arm.dropout:
            validation_error = abs(result.validation_loss - reference.validation_loss)
            errors["validation loss, dropout 0"] = validation_error
        lines += [
            f"{result.arm.name}: {name} differs by {value:.1e}, limit {limits[name]:.0e}"
            for name, value in errors.items()
            if not value <= limits[name]
        ]
    return lines


def plot(results: list[ArmResult], path: Path) -> None:
    """Plot, for each run, the relative difference of the training loss from the reference run over
    the optimizer steps, on a logarithmic axis, and save the plot.

    Args:
        results: The results of the runs.
        path: The PNG file to write.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        reference = reference_of(results, result)
        # A run whose mistake is in the validation only trains like a layout.
        trains_like_a_layout = not result.arm.token_weighted_validation
        if result is reference or trains_like_a_layout:
            continue
        errors = step_errors(result, reference)
        kind = "mistake" if result.arm.is_mistake else "layout"
        axes.semilogy(
            range(1, len(errors) + 1),
            np.maximum(errors, 1e-9),  # a logarithmic axis cannot show 0
            "--" if result.arm.is_mistake else "-",
            linewidth=1.2,
            label=f"{kind}: {result.arm.name}",
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
