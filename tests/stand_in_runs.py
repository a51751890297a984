"""Whole runs on the stand-in device and on the CPU, one of every task, and one that is stopped and goes on.

    python tests/stand_in_runs.py OUTPUT_DIR

Each job leaves its folders there; `found.json` has what the host waited for in the windows of each.
"""

import json
import os
import sys
from pathlib import Path

import runs
import stand_in_device
import torch
import transformers as tf
from accelerate.state import AcceleratorState

from hf_ga.run import loop

STEPS = 3


class Stopped(Exception):
    pass


def noting(train_step, waits, stop_after):
    """Adds what each step waits for, and ends the run behind one of them."""

    def step(*args, **kwargs):
        stand_in_device.waits.clear()
        result = train_step(*args, **kwargs)
        waits.append(list(stand_in_device.waits))
        if len(waits) == stop_after:
            raise Stopped
        return result

    return step


def run(device, train, *args, stop_after=None, **more):
    """On the device, or on the CPU (None); what each of its steps waited for."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = str(device is None).lower()
    original, waits = loop.train_step, []
    loop.train_step = noting(original, waits, stop_after)
    try:
        train(*args, **more)
    except Stopped:
        assert stop_after == len(waits)
    finally:
        loop.train_step = original
    assert AcceleratorState().device == (device or torch.device("cpu"))
    return waits


if __name__ == "__main__":
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    device, folder = stand_in_device.set_up(), Path(sys.argv[1])
    with runs.filled_place(folder) as place:
        runs.save_jobs(place)
        found = {}
        for name in runs.JOBS:
            more = {"max_steps": STEPS, "eval_steps": 2, "save_steps": 2}
            found[name] = run(device, runs.train_job, place, folder / f"{name} there", name, **more)
            run(None, runs.train_job, place, folder / f"{name} on the CPU", name, **more)
        run(device, runs.train, place, folder / "whole")
        run(device, runs.train, place, folder / "cut", stop_after=5)
        found["after the stop"] = run(device, runs.train, place, folder / "cut", resume_from_checkpoint="auto")
    (folder / "found.json").write_text(json.dumps(found))
