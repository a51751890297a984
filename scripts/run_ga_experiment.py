"""Train the same 100 optimizer steps in several layouts and compare: `accelerate launch scripts/run_ga_experiment.py`.

Prints a table, writes it as experiment.md with experiment.png to --output_dir, and exits with code 1 if a layout differs from 64
x 1 by more than the limits.
"""

import argparse
import sys
from pathlib import Path

from experiment import LAYOUTS, LIMITS, MISTAKES, WITHOUT_DROPOUT, Arm, ArmResult, Experiment, differences
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers.utils import logging

COLUMNS = ["run", "last train loss", "validation loss", "train loss, largest", "validation", "final weights", "steps/s"]


def main() -> int:
    """Parse flags, run all arms, report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (default: 100)")
    parser.add_argument(
        "--same_bits",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        help="samples in one chunk: compare the layouts whose micro-batches hold one, down to the last bit",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/ga_experiment"), help="folder for table and plot")
    flags = parser.parse_args()
    logging.set_verbosity_error()
    experiment = Experiment(flags.steps, same_bits=flags.same_bits)
    groups, limits = {"layouts": LAYOUTS, "dropout 0": WITHOUT_DROPOUT, "mistakes": MISTAKES}, LIMITS
    if flags.same_bits:
        sizes = [size for size in (64, 32, 16, 8, 4, 2, 1) if size >= flags.same_bits]
        groups, limits = {"layouts": [Arm(f"{size} x {64 // size}", size) for size in sizes]}, dict.fromkeys(LIMITS, 0.0)
    with tqdm(total=flags.steps * sum(map(len, groups.values())), unit="step", dynamic_ncols=True) as bar:
        results = {group: [experiment.run(arm, bar.update) for arm in arms] for group, arms in groups.items()}
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    table, failures = make_table(results), broken_limits(results, limits)
    (flags.output_dir / "experiment.md").write_text(table + "\n")
    plot(results, flags.output_dir / "experiment.png")
    print(table)
    within = "matches the full batch: " + ", ".join(f"{name} within {limit:.0e}" for name, limit in limits.items())
    print("\n".join(failures) if failures else f"every layout {'has the same bits' if flags.same_bits else within}")
    return 1 if failures else 0


def reference_of(results: dict[str, list[ArmResult]], group: str) -> ArmResult:
    """The run to compare with: 64 x 1, with the same dropout."""
    return results["dropout 0" if group == "dropout 0" else "layouts"][0]


def make_table(results: dict[str, list[ArmResult]]) -> str:
    """A Markdown table, one row per run; differences are relative to the first row (for dropout 0, to its first row)."""
    rows = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    for group, members in results.items():
        for result in members:
            errors = differences(result, reference_of(results, group)).values()
            shown = ["0" if value == 0 else f"{value:.1e}" for value in errors]
            losses = [f"{result.train_losses[-1]:.12f}", f"{result.validation_loss:.12f}"]
            prefix = "**mistake:** " if group == "mistakes" else ""
            rows.append([prefix + result.arm.name, *losses, *shown, f"{result.steps_per_second:.1f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def broken_limits(results: dict[str, list[ArmResult]], limits: dict[str, float] = LIMITS) -> list[str]:
    """One line for every exceeded limit."""
    lines = []
    for group in ("layouts", "dropout 0"):
        for result in results.get(group, []):
            reference = reference_of(results, group)
            errors = differences(result, reference)
            if group == "dropout 0":
                errors["validation loss, dropout 0"] = abs(result.validation_loss - reference.validation_loss)
            lines += [
                f"{result.arm.name}: {name} differs by {value:.1e}, limit {limits[name]:.0e}"
                for name, value in errors.items()
                if not value <= limits[name]
            ]
    return lines


def plot(results: dict[str, list[ArmResult]], path: Path) -> None:
    """Relative difference of the training loss over the steps, logarithmic: layouts below, mistakes above."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for group, style in (("layouts", "-"), ("mistakes", "--")):
        reference = reference_of(results, group)
        for result in results.get(group, []):
            if result is not reference and result.arm.token_weighted_validation:  # this mistake trains like a layout
                pairs = zip(result.train_losses, reference.train_losses, strict=True)
                errors = [max(abs(a - b) / b, 1e-9) for a, b in pairs]
                axes.semilogy(range(1, len(errors) + 1), errors, style, linewidth=1.2, label=f"{group[:-1]}: {result.arm.name}")
    axes.axhline(LIMITS["train loss"], color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="optimizer step", ylabel="relative difference of the train loss to 64 x 1", ylim=(5e-10, 10))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
