"""scripts/compile_kernels.py compiles the attention kernels for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")
import compile_kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.slow("compiles kernels")
def test_kernels_spill_no_registers_and_fit_into_shared_memory():
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "scripts/compile_kernels.py"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 3 * 2 * 2, done.stdout
    assert {row[0] for row in rows} == {"8.0", "9.0"}
    assert {row[2] for row in rows} == {"64", "128"}


@pytest.mark.parametrize(
    ("compiled", "why"),
    [
        (compile_kernels.KernelResources("kernel", 255, 8, 1024), "spills 8 bytes"),
        (compile_kernels.KernelResources("kernel", 200, 0, 164 * 1024), "shared memory"),
    ],
)
def test_a_kernel_that_does_not_fit_is_an_error(compiled, why):
    with pytest.raises(SystemExit, match=why):
        compile_kernels.check_limits(compiled, 80)
    compile_kernels.check_limits(compile_kernels.KernelResources("kernel", 255, 0, 163 * 1024), 80)
