"""The default arm on two ranks of a CPU, launched by `accelerate launch` with
accelerate_configs/cpu_2.yaml.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState

from benchmark.arms import default
from benchmark.lap import Lap, Measured
from benchmark.setting import Setting

ROOT = Path(__file__).parents[2]


def measure_two_ranks(setting: Setting) -> Measured:
    """Measure the default arm on two ranks.

    Returns:
        The measurements of rank 0. The ranks synchronize in every step, so its time is that of
        both.

    Raises:
        subprocess.CalledProcessError: If the launch fails; its output is on the terminal.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "setting.json")
        written = Path(folder, "measured.json")
        given.write_text(json.dumps(asdict(setting)))
        profile = str(ROOT / "accelerate_configs" / "cpu_2.yaml")
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        launch += ["--config_file", profile, "-m", "benchmark.ranks"]
        paths = os.pathsep.join([str(ROOT / "scripts"), *sys.path])
        environment = os.environ | {
            "PYTHONPATH": paths,
            "ACCELERATE_USE_CPU": "true",
            "PYTHONWARNINGS": "ignore",
        }
        subprocess.run([*launch, str(given), str(written)], env=environment, check=True)
        return Measured(**json.loads(written.read_text()))


@contextmanager
def busy_core() -> Iterator[None]:
    """Run the block with another program busy on one core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()


def main(given: str, written: str) -> None:
    """Run one of the ranks.

    Args:
        given: The file of the setting.
        written: The file for the measurements.
    """
    values = json.loads(Path(given).read_text())
    setting = Setting(**values)
    state = PartialState(cpu=True)
    torch.set_num_threads(max(1, setting.num_threads // state.num_processes))
    measured = Lap(setting).run(default)
    if state.is_main_process:
        Path(written).write_text(json.dumps(asdict(measured)))
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
