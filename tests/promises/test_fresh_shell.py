"""ExactTrainer, the checker and a whole run with the threads, allocator and variables that a fresh
shell has.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fresh_shell_worker.py")
PRIVATE = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "GLIBC_TUNABLES",
    "MALLOC_",
    "ACCELERATE_",
)


@pytest.mark.slow("starts a process")
def test_splits_agree_with_all_threads():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)
    }
    command = [sys.executable, str(WORKER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    num_threads, errors = json.loads(done.stdout.splitlines()[-1])
    assert num_threads == len(os.sched_getaffinity(0))
    assert errors.keys() == {"ExactTrainer", "check_equivalence", "finetune.py"}
    assert max(errors.values()) < 1e-6
