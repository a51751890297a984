"""Mutants: faults as an engineer makes them, each of which the tests of its room must find.

    python scripts/mutants.py  # all of tests/mutants.yaml: half an hour on one core
    python scripts/mutants.py --only exact 17 --jobs 2

Each fault is put into a copy of the repository, whose tests must fail. The exit code is 1 if some
survived, if the text that they change no longer occurs exactly once, or if pytest gave no verdict
(no test was run, or it took too long).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hf_ga", "scripts", "tests", "docs", "pyproject.toml")
TIME_LIMIT = 300  # seconds for the tests of one mutant
KILLED, SURVIVED, DOES_NOT_APPLY, NO_VERDICT = "killed", "SURVIVED", "DOES NOT APPLY", "NO VERDICT"


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` (below hf_ga/) `new` takes the place of `old`, and `tests` (below
    tests/, by spaces) must fail.
    """

    number: int
    room: str
    reason: str
    file: str
    old: str
    new: str
    tests: str


def all_mutants() -> list[Mutant]:
    """Those of tests/mutants.yaml, numbered from 1."""
    rooms = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    entries = [(room, entry) for room, of_room in rooms.items() for entry in of_room]
    return [Mutant(number, room, **entry) for number, (room, entry) in enumerate(entries, start=1)]


def judge(mutant: Mutant) -> tuple[str, str]:
    """The verdict, and what it rests on: the test that failed, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(
                ROOT / name, Path(folder, name)
            )
        path = Path(folder, "hf_ga", mutant.file)
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return (
                DOES_NOT_APPLY,
                f"the text occurs {text.count(mutant.old)} times in hf_ga/{mutant.file}",
            )
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        tests = [f"tests/{test}" for test in mutant.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        variables = os.environ | {
            "PYTHONPATH": folder,
            "HF_HOME": str(Path(folder, "cache")),
        }  # a cache would hide the fault
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired:
            return NO_VERDICT, f"took more than {TIME_LIMIT} s"
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return KILLED, failed[0]
    return (
        (SURVIVED, mutant.tests)
        if done.returncode == 0
        else (NO_VERDICT, (done.stdout + done.stderr).strip()[-200:])
    )


def main() -> int:
    """Judge the chosen mutants; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROOM_OR_NUMBER",
        help="rooms and numbers of mutants; default: all",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    arguments = parser.parse_args()
    chosen = [
        m
        for m in all_mutants()
        if not arguments.only or {m.room, str(m.number)} & set(arguments.only)
    ]

    def timed(mutant: Mutant) -> tuple[str, str, float]:
        began = time.monotonic()
        return *judge(mutant), time.monotonic() - began

    verdicts = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, (verdict, why, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            print(
                f"{mutant.number:3}  {mutant.room:8}  {mutant.reason:70}  {verdict:14}  "
                f"{seconds:3.0f} s  {why}",
                flush=True,
            )
            verdicts.append(verdict)
    print(f"{verdicts.count(KILLED)} of {len(verdicts)} mutants killed")
    return int(set(verdicts) != {KILLED})


if __name__ == "__main__":
    sys.exit(main())
