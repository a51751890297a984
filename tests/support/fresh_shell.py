"""Run code as a user's fresh shell does: none of the thread and allocator settings that `conftest.py` makes."""

import os
import subprocess
import sys

OFFLINE = {f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS", "EVALUATE")}
PRIVATE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLIBC_TUNABLES", "MALLOC_", "ACCELERATE_")


def run_python(code: str, *, timeout: float = 300) -> str:
    """What the code prints. It may import the helpers of this folder; a failure shows what it wrote to stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    environment |= OFFLINE | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout
