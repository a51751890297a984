"""Runs that are stopped in the middle, and what is compared of runs."""

import pytest
from runs import lines_of, train

from hf_ga.finetuning.run import loop


class Stopped(Exception):
    """Where a test interrupts a run."""


def interrupted(place, output, windows, **more):
    """A run that is stopped while it computes the window after the given number, by an
    exception.
    """
    calls = []
    train_step = loop.train_step

    def step(*args, **kwargs):
        calls.append(0)
        if len(calls) > windows:
            raise Stopped
        return train_step(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "train_step", step)
        train(place, output, **more)


def without_speed(output):
    return [
        {k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(output)
    ]


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
