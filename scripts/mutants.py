"""Mutation testing: insert faults as an engineer makes them, one at a time, each of which the tests
of its room (subpackage) must find.

    python scripts/mutants.py  # all of tests/mutants.yaml: half an hour on one core
    python scripts/mutants.py --only order 17 --jobs 2

Each fault is put into a copy of the repository, whose tests must fail. The exit code is 1 if some
survived, if the text that they change does not occur exactly once, or if pytest gave no verdict (no
test was run, or it took too long).
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
    """One fault for mutation testing: a replacement in a source file of hf_ga. Tests must find it.

    Attributes:
        number: Position in tests/mutants.yaml, from 1.
        room: The subpackage of hf_ga whose tests find the fault.
        reason: What the fault does wrong.
        file: The changed file, relative to hf_ga/.
        old: The text that is replaced; it must occur once in the file.
        new: The faulty text.
        tests: The tests that must fail, relative to tests/, separated by spaces.
    """

    number: int
    room: str
    reason: str
    file: str
    old: str
    new: str
    tests: str


def all_mutants() -> list[Mutant]:
    """Read all faults from tests/mutants.yaml, in the order of the file."""
    rooms = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    mutants: list[Mutant] = []
    for room, entries in rooms.items():
        for entry in entries:
            mutants.append(Mutant(number=len(mutants) + 1, room=room, **entry))
    return mutants


def judge(mutant: Mutant) -> tuple[str, str]:
    """Insert a fault into a temporary copy of the repository, and run the tests that must find it.

    Returns:
        The verdict (`KILLED`, `SURVIVED`, `DOES_NOT_APPLY` or `NO_VERDICT`), and the reason: the
        first test that failed, the tests that passed, or why there is no verdict.
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
            "-m",
            "not report",  # also the slow ones
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        # The tests use an empty cache, because the user's cache may have results without the fault.
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
    """Test the faults that the command-line flags choose, and print one line for each.

    Returns:
        The exit code: 0 if tests found all of them, otherwise 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROOM_OR_NUMBER",
        help="rooms and numbers of mutants; default: all",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    arguments = parser.parse_args()
    chosen = all_mutants()
    if arguments.only:
        chosen = [m for m in chosen if {m.room, str(m.number)} & set(arguments.only)]

    def judge_timed(mutant: Mutant) -> tuple[str, str, float]:
        """Return the verdict on a fault, its reason, and the seconds that its tests took."""
        start = time.monotonic()
        verdict, reason = judge(mutant)
        return verdict, reason, time.monotonic() - start

    verdicts = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(judge_timed, chosen)
        for mutant, (verdict, reason, seconds) in zip(chosen, results, strict=True):
            print(
                f"{mutant.number:3}  {mutant.room:8}  {mutant.reason:70}  {verdict:14}  "
                f"{seconds:3.0f} s  {reason}",
                flush=True,
            )
            verdicts.append(verdict)
    print(f"{verdicts.count(KILLED)} of {len(verdicts)} mutants killed")
    return int(set(verdicts) != {KILLED})


if __name__ == "__main__":
    sys.exit(main())
