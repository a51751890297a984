"""Is every split of a window the full batch? Takes the flags of finetune.py: `python scripts/check_equivalence.py --help`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from hf_ga.check.cli import CheckConfig, run_check
from hf_ga.check.report import OURS
from hf_ga.run.cli import guarded, parse_config


def check_main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 with --assert where hf_ga did not pass."""
    return guarded(_check, sys.argv[1:] if arguments is None else arguments)


def _check(arguments: Sequence[str]) -> int:
    config = parse_config(arguments, CheckConfig)
    assert isinstance(config, CheckConfig)
    logging.disable_progress_bar()
    report = run_check(config)
    print(report)
    print(f"written: {Path(config.output_dir) / 'report.json'} and report.html beside it")
    return 1 if config.assert_passed and not report.arm(OURS).passed else 0


if __name__ == "__main__":
    sys.exit(check_main())
