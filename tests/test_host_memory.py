"""Memory of freed tensors on a CPU: counted by the page faults of a process of its own."""

import subprocess
import sys

import helpers as h
import pytest
import torch

import hf_ga
from hf_ga.run import host_memory

# The module is run as a file: the package would import much more.
FAULTS = """
import resource, runpy, statistics, sys, torch
from concurrent.futures import ThreadPoolExecutor
keep_freed_memory = runpy.run_path(sys.argv[1])["keep_freed_memory"]

def faults():
    counted = []
    for _ in range(14):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        [torch.zeros(int(size) * 2**18).add_(1) for size in sys.argv[3:]]
        counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return int(statistics.median(counted[3:])), sum(counted[3:])

run = ThreadPoolExecutor(1).submit if sys.argv[2] == "a thread" else None
left_alone = run(faults).result() if run else faults()
print(keep_freed_memory(torch.device("cpu")), *left_alone, *(run(faults).result() if run else faults()))
"""


GIVEN_BACK = """
import runpy, sys, torch
from pathlib import Path
module = runpy.run_path(sys.argv[1])

def mebibytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

cpu = torch.device("cpu")
module["keep_freed_memory"](cpu)
tensors = [torch.zeros(2**18 if i % 2 else 64) for i in range(400)]  # 200 MiB, with small blocks between
held, kept = mebibytes(), [tensor for tensor in tensors if len(tensor) == 64]
del tensors
freed = mebibytes()
print(module["give_back_freed_memory"](cpu), held, freed, mebibytes(), all(not tensor.any() for tensor in kept))
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("where", "sizes"),
    [("the main thread", [48]), ("a thread", [40, 40, 40])],  # MiB; a thread's heap has parts of 64 MiB, one for each of these
)
def test_freed_tensors_leave_their_memory_to_the_next_ones(where, sizes):
    """Of such tensors again and again, the median: up to 12,288 pages if the system has to give them again.

    The median, as a small block may come to lie behind a tensor, so that the next one does not fit into its place.
    """
    command = [sys.executable, "-c", FAULTS, host_memory.__file__, where, *map(str, sizes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    done, left_alone, all_left_alone, kept, all_kept = run.stdout.split()
    if done != "True":
        pytest.skip("the C library is not glibc: nothing is done here")
    assert int(kept) < 40 and int(all_kept) < int(all_left_alone) / 4
    assert int(left_alone) > 400, "control: by itself glibc gives blocks of this size back"


@pytest.mark.launch
def test_freed_memory_is_given_back():
    """Also what lies between blocks that are in use. Control: before, the process held it."""
    command = [sys.executable, "-c", GIVEN_BACK, host_memory.__file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    done, held, freed, given_back, unharmed = run.stdout.split()
    if done != "True":
        pytest.skip("the C library is not glibc: nothing is done here")
    assert int(given_back) < int(held) - 150 and unharmed == "True"
    assert int(freed) > int(held) - 50, "control: freeing alone gives nothing back"


def test_a_proof_gives_its_memory_back(monkeypatch):
    given_back = []
    monkeypatch.setattr("hf_ga.proof.targets.give_back_freed_memory", given_back.append)
    hf_ga.prove_targets(h.bert_classifier(), h.class_samples(8), h.pad_right)
    assert given_back == [torch.device("cpu")]


def test_nothing_is_done_on_other_devices():
    assert not host_memory.keep_freed_memory(torch.device("meta"))
    assert not host_memory.give_back_freed_memory(torch.device("meta"))
