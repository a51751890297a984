"""Compile the attention kernels for A100 and H100 and print their registers and shared memory.

Needs no GPU. Fails if a kernel spills registers, or needs more shared memory than a program may
have.

    python scripts/compile_kernels.py
    python scripts/compile_kernels.py --sizes 64 128 --dtypes bf16 fp32 --capabilities 80 90
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_ga.speed import attention_kernel
from hf_ga.speed.attention_kernel import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bytes of shared memory that one program may have, by compute capability.
MOST_SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SWITCHES = {
    "HEADS_PER_KV_HEAD": 2,
    "IS_CAUSAL": True,
    "HAS_SLIDING_WINDOW": False,
    "HAS_SOFTCAP": False,
    "HAS_DROPOUT": True,
}
FLOATS = ("scale", "product_scale", "tanh_scale", "dropout_scale")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel.

    Attributes:
        name: The name of the kernel.
        registers: Registers of a thread.
        spilled_bytes: Bytes of a thread that are kept in memory for want of registers.
        shared_bytes: Shared memory of a program.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all kernels, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="head sizes")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90])
    options = parser.parse_args(arguments)
    print(
        "capability  type  size  kernel                     blocks   warps  registers  shared KiB"
    )
    for capability in options.capabilities:
        for dtype in options.dtypes:
            for size in options.sizes:
                for kernel, launch in kernels(size, DTYPES[dtype], capability):
                    compiled = compile_kernel(kernel, launch, size, dtype, capability)
                    print_row(compiled, launch, size, dtype, capability)
                    check(compiled, capability)


def kernels(
    size: int, dtype: torch.dtype, capability: int
) -> list[tuple[triton.JITFunction, Launch]]:
    """List the attention kernels, each with its blocks, warps and stages.

    Args:
        size: Size of a head.
        dtype: The dtype of queries, keys and values.
        capability: Compute capability of the GPU times 10.
    """
    launches = attention_kernel.launch_settings(size, dtype, capability)
    delta_launch = Launch(attention_kernel.DELTA_ROWS, 0, num_warps=4, num_stages=2)
    return [
        (attention_kernel.forward_kernel, launches.forward),
        (attention_kernel.delta_kernel, delta_launch),
        (attention_kernel.query_gradient_kernel, launches.query_gradient),
        (attention_kernel.key_value_gradient_kernel, launches.key_value_gradient),
    ]


def compile_kernel(
    kernel: triton.JITFunction, launch: Launch, size: int, dtype: str, capability: int
) -> Compiled:
    """Compile one kernel, causal and with dropout, with aligned pointers and strides as in use."""
    constants = {
        **SWITCHES,
        "HEAD_DIM": size,
        "PADDED_HEAD_DIM": attention_kernel.padded_head_dim(size),
        "BLOCK_ROWS": launch.rows,
        "BLOCK_COLUMNS": launch.columns,
    }
    signature = {}
    constexprs = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        else:
            signature[name] = type_of(name, dtype)
            is_stride = name.endswith("_stride")
            if name.isupper() or is_stride:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled_bytes = resources_of(compiled.asm["cubin"])
    return Compiled(kernel.__name__, registers, spilled_bytes, compiled.metadata.shared)


def type_of(name: str, dtype: str) -> str:
    """Return the Triton type of a kernel's argument, by its name."""
    types = {
        "LSE": "*fp32",
        "DELTA": "*fp32",
        "CU_SEQLENS": "*i32",
        "SEEDS": "*i64",
        "ROW_KEYS": "*i64",
    }
    if name in types:
        return types[name]
    if name in FLOATS:
        return "fp32"
    return f"*{dtype}" if name.isupper() else "i32"


def resources_of(cubin: bytes) -> tuple[int, int]:
    """Read the registers of a thread and the bytes of its stack, where spilled registers go."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [CUOBJDUMP, "-res-usage", path]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, f"cuobjdump reports no registers: {report}"
    return int(usage[1]), int(usage[2])


def print_row(compiled: Compiled, launch: Launch, size: int, dtype: str, capability: int) -> None:
    """Print one line of the table."""
    blocks = f"{launch.rows}x{launch.columns}"
    shared = compiled.shared_bytes / 1024
    spills = f"  {compiled.spilled_bytes} bytes spilled" if compiled.spilled_bytes else ""
    print(
        f"{capability / 10:10}  {dtype}  {size:4}  {compiled.name:25}  {blocks:7}  "
        f"{launch.num_warps:5}  {compiled.registers:9}  {shared:10.1f}{spills}",
        flush=True,
    )


def check(compiled: Compiled, capability: int) -> None:
    """Exit with an error if a kernel spills registers or needs too much shared memory."""
    limit = MOST_SHARED_MEMORY[capability]
    if compiled.shared_bytes > limit:
        raise SystemExit(
            f"{compiled.name} needs {compiled.shared_bytes} bytes of shared memory, limit {limit}: "
            "use smaller blocks or fewer stages."
        )
    if compiled.spilled_bytes:
        raise SystemExit(
            f"{compiled.name} spills {compiled.spilled_bytes} bytes of registers: use smaller "
            "blocks or more warps."
        )


if __name__ == "__main__":
    main()
