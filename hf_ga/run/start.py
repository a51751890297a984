"""The way in from a shell: settings of the C library that only the environment can make, then the command line.

Nothing heavy is imported before: a process that is started again has lost no time.
"""

import os
import platform
import sys

TUNABLES = "GLIBC_TUNABLES"
SETTINGS = {"glibc.malloc.tcache_count": 0, "glibc.malloc.hugetlb": 1}
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # of CUDA and ROCm


def finetune_main() -> int:
    """`finetune.py`. Returns the exit code."""
    start_again()
    from hf_ga.run.cli import finetune_main

    return finetune_main()


def main() -> int:
    """`hf-ga`. Returns the exit code."""
    start_again()
    from hf_ga.run.cli import main

    return main()


def start_again() -> None:
    """Start this process again with `environment`, where that holds anything: same command, same process id."""
    if added := environment():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})


def environment() -> dict[str, str]:
    """What a process that trains on a CPU under glibc needs in its environment, if it is not there.

    glibc keeps freed small blocks for the thread that freed them, and what is kept is not joined with its neighbours: some
    hundred of them between freed tensors, and tensors of other lengths found no room there. A BERT of 4 layers x 256 added 290
    MiB in its training, without this cache 180 MiB, in the same time. Large pages, where the system gives them when asked, took
    a tenth off the time of its windows (and of a GPT-2's) for no memory. Where there is a GPU, tensors live there. What is set
    already stays.
    """
    tunables = os.environ.get(TUNABLES, "")
    missing = [f"{name}={value}" for name, value in SETTINGS.items() if name not in tunables]
    nothing_to_do = not missing or platform.libc_ver()[0] != "glibc" or any(map(os.path.exists, DRIVERS))
    return {} if nothing_to_do else {TUNABLES: ":".join(filter(None, (tunables, *missing)))}
