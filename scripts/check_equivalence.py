"""Check that every split of a window gives the full batch's gradient: `python
scripts/check_equivalence.py --help`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate import Accelerator

import hf_ga.finetuning.run  # noqa: F401  (first: its error names the packages that are missing)
from hf_ga.check.arms import ARMS
from hf_ga.check.check import check_equivalence
from hf_ga.check.layouts import NAMES, min_samples
from hf_ga.check.report import EquivalenceReport
from hf_ga.check.rows import OURS
from hf_ga.check.steps import StepFunction
from hf_ga.errors import ConfigError
from hf_ga.exact.order import epoch_order
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.run.accelerator import make_accelerator
from hf_ga.finetuning.run.build import build_model, chosen_loss, prepare_setup, proof_samples
from hf_ga.finetuning.run.cli import guarded, parse_config
from hf_ga.finetuning.run.config import FinetuneConfig, option
from hf_ga.finetuning.run.config_checks import check_output_dir
from hf_ga.parallel.processes import end_training, main_process_first, print_on_main

# Names of the arms in a report.
TITLES = {"trainer": "Trainer", "accelerate": "accelerate loop"}
MOST_SAMPLES = 64
QUICK_SAMPLES = 16
QUICK_LAYOUTS = ["uneven", "one by one", "short last window"]


@dataclass
class CheckConfig(FinetuneConfig):
    """The flags of the check, besides those of `FinetuneConfig` (flags of training and output files
    have no effect).
    """

    output_dir: str = option(
        "outputs/check", "Folder for report.json and report.html; other files in it are unchanged."
    )
    compare: str = option(
        "trainer,accelerate",
        f"Comma-separated steps to compare, of: {', '.join(ARMS)}; or none (faster).",
    )
    check_layouts: str = option(
        "auto", f"Comma-separated layouts, of: {', '.join(NAMES)}; or auto (all that apply)."
    )
    quick: bool = option(False, "Check a window of 16 samples, in three layouts.")
    assert_passed: bool = field(
        default=False,
        metadata={
            "help": "Exit with code 1 if hf_ga fails; compared steps may fail.",
            "aliases": ["--assert"],  # a field cannot be named by a keyword
        },
    )

    def check(self) -> None:
        """Check the flags of a run and those of the check.

        Raises:
            ConfigError: If a rule is broken; the first one.
        """
        super().check()
        for name, known in (("compare", ARMS), ("check_layouts", NAMES)):
            for value in self.listed(name):
                if value not in known:
                    raise ConfigError(
                        f"{name} must name some of {', '.join(known)}, got {value!r}."
                    )

    def check_output_dir(self) -> None:
        """Allow any content of the folder, as only the two report files are written."""
        check_output_dir(self.output_dir, only_adds=True)

    def listed(self, name: str) -> list[str]:
        """Split the value of a comma-separated flag; an empty list for `auto` and `none`."""
        values = [value.strip() for value in getattr(self, name).split(",")]
        if values in (["auto"], ["none"], [""]):
            return []
        return values


def run_check(config: CheckConfig, accelerator: Accelerator) -> EquivalenceReport:
    """Build the model and a window of training samples as in finetune, and check them."""
    with main_process_first(accelerator):
        setup = prepare_setup(config, accelerator)
    loss = {name: value for name, value in chosen_loss(setup).items() if value is not None}
    # They compute the head's own loss, so they cannot be compared under another one.
    steps: dict[str, StepFunction] = {
        TITLES[name]: ARMS[name]() for name in config.listed("compare") if not loss
    }
    report = check_equivalence(
        build_model(setup),
        window_samples(config, setup.data, accelerator.num_processes),
        setup.data.collate,
        config.listed("check_layouts") or (QUICK_LAYOUTS if config.quick else "auto"),
        steps,
        **loss,
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        seed=config.seed,
        allow_split_dependent_randomness=config.allow_split_dependent_randomness,
        same_bits=config.same_bits,
    )
    if loss and config.listed("compare"):
        report.facts.append(
            "no other step is compared: they compute the head's own loss, not one with label "
            "smoothing or weights, nor one of whole windows"
        )
    return report


def window_samples(config: CheckConfig, data: PreparedData, num_processes: int) -> list[Any]:
    """Choose the samples of a window as large as in training (8 to 64 samples) over the whole range
    of lengths, in hash order.
    """
    samples = list(proof_samples(data, "train"))
    most = QUICK_SAMPLES if config.quick else MOST_SAMPLES
    window_size = min(config.layout(num_processes).window_size, most)
    window_size = max(window_size, min_samples(num_processes))
    window_size = min(window_size, len(samples))
    evenly_spread = np.linspace(0, len(samples) - 1, window_size).astype(int)
    picked = [samples[i] for i in evenly_spread]
    return [picked[i] for i in epoch_order(len(picked), config.seed, 0)]


def _run(arguments: Sequence[str]) -> int:
    """Run the check with the flags of the command line, and return the exit code."""
    config = parse_config(arguments, CheckConfig)
    assert isinstance(config, CheckConfig)
    config.check()
    accelerator = make_accelerator(config)
    report = run_check(config, accelerator)
    if accelerator.is_main_process:
        report.save(config.output_dir)
    print_on_main(accelerator, f"{report}\nreport: {config.output_dir}/report.html and report.json")
    end_training(accelerator)
    return 1 if config.assert_passed and not report.arm(OURS).passed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if hf_ga fails with --assert, 2 for bad input, explained in one line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(_run, arguments)


if __name__ == "__main__":
    sys.exit(main())
