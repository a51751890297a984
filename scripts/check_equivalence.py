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
from hf_ga.check.steps import StepFunction
from hf_ga.check.verdict.report import EquivalenceReport
from hf_ga.check.verdict.rows import OURS
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.run.accelerator import make_accelerator
from hf_ga.finetuning.run.build import build_model, chosen_loss, prepare_setup, samples_to_try
from hf_ga.finetuning.run.flags.cli import guarded, parse_config
from hf_ga.finetuning.run.flags.config import FinetuneConfig, option
from hf_ga.finetuning.run.flags.config_checks import check_output_dir
from hf_ga.order.order import epoch_order
from hf_ga.parallel.processes import end_training, main_process_first, print_on_main

# Value of --compare -> name of the compared training step in the report.
TITLES = {"trainer": "Trainer", "accelerate": "accelerate loop"}
MAX_SAMPLES = 64
QUICK_SAMPLES = 16
QUICK_LAYOUTS = ["uneven", "one by one", "short last window"]


@dataclass
class CheckConfig(FinetuneConfig):
    """The command-line flags of scripts/check_equivalence.py: its own, and those of
    `FinetuneConfig`, of which the flags of training and output files have no effect.
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
        """Validate the flags of a fine-tuning run and those of the check.

        Raises:
            ConfigError: For the first invalid flag.
        """
        super().check()
        for flag, known in (("compare", ARMS), ("check_layouts", NAMES)):
            for value in self.comma_separated(flag):
                if value not in known:
                    raise ConfigError(
                        f"{flag} must name some of {', '.join(known)}, got {value!r}."
                    )

    def check_output_dir(self) -> None:
        """Check that report files can be added to the output folder, which may contain any other
        files: only report.json and report.html are written.

        Raises:
            ConfigError: If the folder cannot be used.
        """
        check_output_dir(self.output_dir, only_adds=True)

    def comma_separated(self, flag: str) -> list[str]:
        """Split the value of a comma-separated flag into its parts; return an empty list for
        `auto`, `none` and an empty value.
        """
        values = [value.strip() for value in getattr(self, flag).split(",")]
        if values in (["auto"], ["none"], [""]):
            return []
        return values


def run_check(config: CheckConfig, accelerator: Accelerator) -> EquivalenceReport:
    """Build the model and a window of training samples as scripts/finetune.py does, and compare the
    gradients of hf_ga, and of the training steps in --compare, with the full batch's.

    Trainer and the Accelerate loop compute the loss of the model's head, so they are not compared
    if the flags choose another loss; the report then says so.
    """
    with main_process_first(accelerator):
        setup = prepare_setup(config, accelerator)
    loss = {name: value for name, value in chosen_loss(setup).items() if value is not None}
    compared = config.comma_separated("compare")
    steps: dict[str, StepFunction] = {}
    if not loss:
        steps = {TITLES[name]: ARMS[name]() for name in compared}
    precision = accelerator.mixed_precision
    report = check_equivalence(
        build_model(setup),
        window_samples(config, setup.data, accelerator.num_processes),
        setup.data.collate,
        config.comma_separated("check_layouts") or (QUICK_LAYOUTS if config.quick else "auto"),
        steps,
        **loss,
        precision="fp32" if precision == "no" else precision,
        seed=config.seed,
        allow_split_dependent_randomness=config.allow_split_dependent_randomness,
        same_bits=config.same_bits,
    )
    if loss and compared:
        report.facts.append(
            "no other step is compared: they compute the head's own loss, not one with label "
            "smoothing or weights, nor one of whole windows"
        )
    return report


def window_samples(config: CheckConfig, data: PreparedData, num_processes: int) -> list[Any]:
    """Choose the training samples of the window to check: samples of all lengths, shuffled
    reproducibly.

    Args:
        config: Its window size is used, but at most 64 samples (16 with --quick).
        data: The tokenized data.
        num_processes: Processes of the check, which set the smallest window (8 samples on one).
    """
    samples = list(samples_to_try(data))
    max_samples = QUICK_SAMPLES if config.quick else MAX_SAMPLES
    window_size = min(config.layout(num_processes).window_size, max_samples)
    window_size = max(window_size, min_samples(num_processes))
    window_size = min(window_size, len(samples))
    evenly_spread = np.linspace(0, len(samples) - 1, window_size).astype(int)
    chosen = [samples[i] for i in evenly_spread]
    return [chosen[i] for i in epoch_order(len(chosen), config.seed, 0)]


def _run(arguments: Sequence[str]) -> int:
    """Run the check with the given command-line flags, print and save the report, and return the
    exit code: 1 if hf_ga failed and --assert is set.
    """
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
    """Run the command scripts/check_equivalence.py.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 1 if hf_ga fails with --assert, 2 for bad input, explained in one line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(_run, arguments)


if __name__ == "__main__":
    sys.exit(main())
