"""Compares splits of a window in a process that inherits nothing from the test; run by
`test_fresh_shell.py`.

python fresh_shell_worker.py

The last line of its output is a JSON object: the number of torch's threads, and for each case the
largest relative error between splits.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from helpers import gpt2, pad_right, token_samples
from runs import filled_place, relative_distance, small_config
from trainers import Case, weight_error

from hf_ga import check_equivalence

FINETUNE = Path(__file__).parents[2] / "scripts" / "finetune.py"


def error_of_trainer(folder: Path) -> float:
    """Train with ExactTrainer in two layouts.

    It once planned micro-batches for two threads where Trainer takes `gradient_accumulation_steps`
    of them.
    """
    case = Case(folder, gpt2, token_samples(48))
    split = case.run(layout=(4, 4), num_train_epochs=1)
    whole = case.run(layout=(16, 1), num_train_epochs=1)
    return weight_error(split, whole)


def error_of_check(folder: Path) -> float:
    """Check the gradients of one window."""
    return check_equivalence(gpt2(0.1), token_samples(12), pad_right).max_error


def error_of_command(folder: Path) -> float:
    """Run the command with two sizes of micro-batches."""
    outputs = [folder / f"micro-batches of {size}" for size in (3, 16)]
    with filled_place(folder) as place:
        for size, output in zip((3, 16), outputs, strict=True):
            config = small_config(place, output, per_device_train_batch_size=size, max_steps=4)
            run_command(folder / "config.json", config.to_dict())
    return relative_distance(*outputs)


def run_command(file: Path, config: dict) -> None:
    """Run scripts/finetune.py with a configuration file in this process."""
    file.write_text(json.dumps(config))
    sys.argv[1:] = [str(file)]
    try:
        runpy.run_path(str(FINETUNE), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0


CASES = {
    "ExactTrainer": error_of_trainer,
    "check_equivalence": error_of_check,
    "finetune.py": error_of_command,
}


def main() -> None:
    """Compute all cases, each with a fresh state of Accelerate."""
    folder = Path(tempfile.mkdtemp())
    errors = {}
    for name, error_of in CASES.items():
        errors[name] = error_of(folder)
        AcceleratorState._reset_state(True)
    print(json.dumps([torch.get_num_threads(), errors]))


if __name__ == "__main__":
    main()
