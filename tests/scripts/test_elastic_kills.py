"""`scripts/kill_test.py --elastic`: machines come and go, and the run ends as the undisturbed one;
its ledger sees a sample that is left out, counted twice, or lost with a process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic import worker
from elastic.ledger import Ledger, LedgerWriter
from elastic.run import KINDS, ElasticRun, Event, draw_events, print_lost, runs_of
from forked import on_ranks, without_errors

MACHINES = Path(__file__).with_name("machines_worker.py")
KILLED_AFTER = 4  # windows; the last checkpoint has three


def ledger_of(folder, windows, start=0.0, num_processes=1):
    """Write the ledger of one start of a run, whose processes share the samples of a window."""
    for rank in range(num_processes):
        writer = LedgerWriter(folder, rank, 1)
        writer.start = start
        writer.num_processes = num_processes
        writer.path = folder / f"{start}-{rank}.ledger"
        for window, samples in windows.items():
            writer.write(window, samples[rank::num_processes], 1.0 + window)


def miscounts(folder):
    """Two epochs of two windows, with the samples 0 to 3."""
    return Ledger.read(folder).miscounts(num_windows=4, windows_per_epoch=2, num_samples=4)


RIGHT = {0: [2, 0], 1: [1, 3], 2: [0, 1], 3: [2, 3]}


def test_a_window_that_is_computed_again_counts_once(tmp_path):
    """Two processes are killed within their third window, and one goes on after the first."""
    ledger_of(tmp_path, {0: RIGHT[0], 1: RIGHT[1], 2: RIGHT[2]}, 1.0, 2)
    ledger_of(tmp_path, {1: RIGHT[1], 2: RIGHT[2], 3: RIGHT[3]}, 2.0)
    path = tmp_path / "1.0-0.ledger"
    path.write_text(path.read_text() + '{"window": 3, "samp')
    assert miscounts(tmp_path) == []
    ledger = Ledger.read(tmp_path)
    assert ledger.losses() == [1.0, 2.0, 3.0, 4.0]
    assert ledger.num_processes() == [2, 1, 1, 1]
    assert runs_of(ledger.num_processes()) == "2 (1 windows), 1 (3 windows)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: [2, 2]}, "epoch 1 has 3 of 4 samples, 1 of them more than once"),
        ({1: [1]}, "epoch 0 has 3 of 4 samples, 0 of them more than once"),
        ({1: [1, 3, 0]}, "epoch 0 has 4 of 4 samples, 1 of them more than once"),
        ({4: [0]}, "windows [4] are missing, or too many"),
    ],
)
def test_a_wrong_count_is_seen(tmp_path, change, message):
    ledger_of(tmp_path, RIGHT | change)
    assert miscounts(tmp_path) == [message]


def test_a_process_without_its_line_is_seen(tmp_path):
    ledger_of(tmp_path, RIGHT, num_processes=2)
    path = tmp_path / "0.0-1.ledger"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert miscounts(tmp_path) == [
        "window 3 has lines of the ranks [0] only",
        "epoch 1 has 3 of 4 samples, 0 of them more than once",
    ]


def test_all_kinds_of_events_are_drawn_in_order():
    events = draw_events(np.random.default_rng(0), 20, 100)
    afters = [event.after for event in events]
    assert afters == sorted(afters) and 1 <= afters[0] < afters[-1] < 98
    kinds = [event.kind for event in events]
    assert all(kinds.count(kind) == 4 for kind in KINDS)


def test_the_lost_time_is_printed(tmp_path, capsys):
    lines = [(10.0, 0, 1.0), (11.0, 1, 1.0), (12.0, 2, 1.0)]  # time, window, start
    lines += [(30.0, 2, 20.0), (31.0, 3, 20.0)]
    keys = ("time", "window", "start")
    content = [dict(zip(keys, line, strict=True)) | {"rank": 0} for line in lines]
    (tmp_path / "a.ledger").write_text("".join(f"{json.dumps(one)}\n" for one in content))
    events = [
        Event("a worker is killed", 2, 0.0, (2, 2), 12.5),
        Event("an agent joins", 3, 0.0, (2, 3), 30.5),
    ]
    print_lost(events, Ledger.read(tmp_path))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("2 -> 2 agents    19.0 s without a new window, 1 computed again")
    assert second.endswith("2 -> 3 agents")  # the run ended before it noticed


class ForkedRun(ElasticRun):
    """Its processes are forked from this one: three, of which one is killed, then two."""

    def undisturbed(self) -> None:
        without_errors(on_ranks(self._training("undisturbed"), 1))

    def killed(self) -> None:
        train = self._training("elastic")

        def train_and_die() -> None:
            write = LedgerWriter.write

            def write_or_die(writer: LedgerWriter, window: int, *line: Any) -> None:
                if window == KILLED_AFTER and writer.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(writer, window, *line)

            LedgerWriter.write = write_or_die
            train()

        assert on_ranks(train_and_die, 3)[1].startswith("EOFError")
        without_errors(on_ranks(train, 2))

    def _training(self, name: str) -> Callable[[], None]:
        words = self._worker(self.folder / name, pace=0.0)

        def train() -> None:
            sys.argv = words
            worker.main()

        return train


@pytest.mark.slow("starts torch's agents, and kills them")
def test_machines_come_and_go(tmp_path):
    """SIGTERM to an agent; a worker and an agent are killed at once. The other doors handle no
    signals: see `ForkedRun`.
    """
    flags = ["--elastic", "--kills", "2", "--same_bits", "4", "--seed", "2"]
    done = subprocess.run(
        [sys.executable, str(MACHINES), *flags, "--output_dir", str(tmp_path / "runs")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    printed = done.stdout
    assert done.returncode == 0, (printed + done.stderr)[-4000:]
    assert "SIGTERM to an agent after window" in printed
    assert "two at once after window" in printed
    assert "each sample counted exactly once in each epoch" in printed
    assert printed.count("agents\n") + printed.count("computed again") >= 2


def problems_of(folder: Path, door: str) -> list[str]:
    forked = ForkedRun(folder, door, epochs=3, same_bits=None, pace=0.0)
    forked.undisturbed()
    forked.killed()
    found = forked.report([])
    assert set(Ledger.read(folder / "elastic" / "ledger").num_processes()) == {2, 3}
    return found


@pytest.mark.slow("trains on up to three processes")
@pytest.mark.parametrize("door", ["accelerate", "trainer"])
def test_processes_come_and_go(door, tmp_path):
    assert problems_of(tmp_path, door) == []


@pytest.mark.slow("trains on up to three processes")
def test_the_control_ends_elsewhere(tmp_path):
    """Accelerate's own loop."""
    assert any(problem.startswith("losses differ by") for problem in problems_of(tmp_path, "stock"))
