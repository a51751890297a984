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
KILLED = "killed"
SURVIVED = "SURVIVED"
DOES_NOT_APPLY = "DOES NOT APPLY"
NO_VERDICT = "NO VERDICT"


@dataclass(frozen=True)
class Mutant:
    """One fault, which tests must find.

    Attributes:
        number: Its number in tests/mutants.yaml, from 1.
        room: The part of the package whose tests find it.
        reason: What is wrong.
        file: The changed file, below hf_ga/.
        old: The text that is replaced.
        new: What takes its place.
        tests: The tests that must fail, below tests/, separated by spaces.
    """

    number: int
    room: str
    reason: str
    file: str
    old: str
    new: str
    tests: str


def all_mutants() -> list[Mutant]:
    """Read the mutants of tests/mutants.yaml."""
    rooms = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    entries = [(room, entry) for room, of_room in rooms.items() for entry in of_room]
    return [Mutant(number, room, **entry) for number, (room, entry) in enumerate(entries, start=1)]


def judge(mutant: Mutant) -> tuple[str, str]:
    """Run the tests of a mutant in a copy of the repository.

    Returns:
        The verdict, and what it rests on: the test that failed, or why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder, name))
        path = Path(folder, "hf_ga", mutant.file)
        text = path.read_text(encoding="utf-8")
        count = text.count(mutant.old)
        if count != 1:
            return DOES_NOT_APPLY, f"the text occurs {count} times in hf_ga/{mutant.file}"
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
        # A cache of its own, because the common one would hide the fault.
        variables = os.environ | {"PYTHONPATH": folder, "HF_HOME": str(Path(folder, "cache"))}
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
    if done.returncode == 0:
        return SURVIVED, mutant.tests
    return NO_VERDICT, (done.stdout + done.stderr).strip()[-200:]


def main() -> int:
    """Judge the chosen mutants, and print a line for each.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROOM_OR_NUMBER",
        help="rooms and numbers of mutants; default: all",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    arguments = parser.parse_args()
    chosen = all_mutants()
    if arguments.only:
        chosen = [m for m in chosen if {m.room, str(m.number)} & set(arguments.only)]

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
