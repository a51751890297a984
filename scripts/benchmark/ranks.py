"""Benchmark of hf_ga's default training on two CPU ranks, launched by `accelerate launch` with
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

from benchmark.arms import train_like_finetune
from benchmark.measuring import BenchmarkRun, Measurements
from benchmark.setting import Setting

ROOT = Path(__file__).parents[2]


def measure_two_ranks(setting: Setting) -> Measurements:
    """Measure hf_ga's default training on two CPU ranks, in new processes.

    Returns:
        The measurements of rank 0. The ranks synchronize in every step, so both take the same time.

    Raises:
        subprocess.CalledProcessError: If the launch fails; its output is on the terminal.
    """
    with tempfile.TemporaryDirectory() as folder:
        setting_file = Path(folder, "setting.json")
        measurements_file = Path(folder, "measurements.json")
        setting_file.write_text(json.dumps(asdict(setting)))
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        launch += ["--config_file", str(ROOT / "accelerate_configs" / "cpu_2.yaml")]
        launch += ["-m", "benchmark.ranks", str(setting_file), str(measurements_file)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *sys.path]),
            "ACCELERATE_USE_CPU": "true",
            "PYTHONWARNINGS": "ignore",
        }
        subprocess.run(launch, env=environment, check=True)
        return Measurements(**json.loads(measurements_file.read_text()))


@contextmanager
def busy_core() -> Iterator[None]:
    """Run the block while another process keeps one CPU core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()


def main(setting_file: str, measurements_file: str) -> None:
    """Measure hf_ga's default training as one rank; rank 0 writes its measurements.

    Args:
        setting_file: JSON file with the setting of the benchmark.
        measurements_file: JSON file to write.
    """
    setting = Setting(**json.loads(Path(setting_file).read_text()))
    state = PartialState(cpu=True)
    torch.set_num_threads(max(1, setting.num_threads // state.num_processes))
    measurements = BenchmarkRun(setting).measure(train_like_finetune)
    if state.is_main_process:
        Path(measurements_file).write_text(json.dumps(asdict(measurements)))
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
