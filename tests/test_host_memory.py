"""Memory of freed tensors on a CPU: counted by the page faults of a process of its own."""

import subprocess
import sys

import pytest
import torch

from hf_ga import host_memory

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


def test_nothing_is_done_on_other_devices():
    assert not host_memory.keep_freed_memory(torch.device("meta"))
