"""Compile the attention kernels for A100 and H100 and print their registers and shared memory.

Needs no GPU. Fails if a kernel spills registers, or needs more shared memory than a Triton program
(a CUDA thread block) may have.

    python scripts/compile_kernels.py
    python scripts/compile_kernels.py --sizes 64 128 --dtypes bf16 fp32 --capabilities 80 90
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_ga.rows import attention_kernel
from hf_ga.rows.attention_kernel import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Maximum bytes of shared memory of one program, by compute capability times 10.
MAX_SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Compile-time constants of the kernels.
KERNEL_OPTIONS = {
    "HEADS_PER_KV_HEAD": 2,
    "IS_CAUSAL": True,
    "HAS_SLIDING_WINDOW": False,
    "HAS_DROPOUT": True,
}
FLOAT_ARGUMENTS = ("scale", "product_scale", "dropout_scale")


@dataclass(frozen=True)
class KernelResources:
    """The GPU resources that one compiled attention kernel uses.

    Attributes:
        name: The name of the kernel.
        registers: Registers per thread.
        spilled_bytes: Bytes per thread that are spilled from registers to local memory.
        shared_bytes: Bytes of shared memory per program (thread block).
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the attention kernels for all combinations of the command-line flags, and print a
    table; exit with an error at the first kernel that is over a limit.

    Args:
        arguments: The command-line flags. None: those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90])
    options = parser.parse_args(arguments)
    print(
        "capability  type  size  kernel                     blocks   warps  registers  shared KiB"
    )
    for capability, dtype, head_dim in product(options.capabilities, options.dtypes, options.sizes):
        for kernel, launch in attention_kernels(head_dim, DTYPES[dtype], capability):
            resources = compile_kernel(kernel, launch, head_dim, dtype, capability)
            blocks = f"{launch.rows}x{launch.columns}"
            print(
                f"{capability / 10:10}  {dtype}  {head_dim:4}  {resources.name:25}  {blocks:7}  "
                f"{launch.num_warps:5}  {resources.registers:9}  "
                f"{resources.shared_bytes / 1024:10.1f}",
                flush=True,
            )
            check_limits(resources, capability)


def attention_kernels(
    head_dim: int, dtype: torch.dtype, capability: int
) -> list[tuple[triton.JITFunction, Launch]]:
    """List hf_ga's Triton kernels for attention, forward and backward, each with the block sizes,
    warps and stages that it is launched with.

    Args:
        head_dim: Elements of one attention head.
        dtype: The dtype of queries, keys and values.
        capability: Compute capability of the GPU times 10, such as 90.
    """
    kernels = [
        attention_kernel.forward_kernel,
        attention_kernel.query_gradient_kernel,
        attention_kernel.key_value_gradient_kernel,
    ]
    launches = attention_kernel.launch_settings(head_dim, dtype, capability)
    return list(zip(kernels, launches, strict=True))


def compile_kernel(
    kernel: triton.JITFunction, launch: Launch, head_dim: int, dtype: str, capability: int
) -> KernelResources:
    """Compile one attention kernel without running it, and return the resources that it uses.

    It is compiled for causal attention with dropout, and for pointers and strides that are
    multiples of 16, as in training.

    Args:
        kernel: The Triton kernel.
        launch: Its block sizes, warps and stages.
        head_dim: Elements of one attention head.
        dtype: A key of `DTYPES`.
        capability: Compute capability of the GPU times 10.
    """
    constants = {
        **KERNEL_OPTIONS,
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": attention_kernel.padded_head_dim(head_dim),
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
            signature[name] = argument_type(name, dtype)
            is_pointer = name.isupper()
            is_stride = name.endswith("_stride")
            if is_pointer or is_stride:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled_bytes = read_registers(compiled.asm["cubin"])
    return KernelResources(kernel.__name__, registers, spilled_bytes, compiled.metadata.shared)


def argument_type(name: str, dtype: str) -> str:
    """Return the Triton type of an attention kernel's argument.

    Args:
        name: Name of the argument: pointers to tensors are in upper case.
        dtype: Type of the tensors without a type of their own, a key of `DTYPES`.

    Returns:
        Such as "*bf16" for a pointer, "fp32" for a factor, "i32" for a stride or size.
    """
    types = {
        "LSE": "*fp32",
        "DELTA": "*fp32",
        "CU_SEQLENS": "*i32",
        "SEEDS": "*i64",
        "ROW_KEYS": "*i64",
    }
    if name in types:
        return types[name]
    if name in FLOAT_ARGUMENTS:
        return "fp32"
    return f"*{dtype}" if name.isupper() else "i32"


def read_registers(cubin: bytes) -> tuple[int, int]:
    """Run cuobjdump on a compiled kernel.

    Returns:
        The registers per thread, and the bytes of each thread's stack, which holds its spilled
        registers.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [CUOBJDUMP, "-res-usage", path]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, f"cuobjdump reports no registers: {report}"
    return int(usage[1]), int(usage[2])


def check_limits(resources: KernelResources, capability: int) -> None:
    """Exit with an error if a compiled kernel spills registers or needs more shared memory than a
    GPU of this compute capability (times 10) has for one program.
    """
    limit = MAX_SHARED_MEMORY[capability]
    if resources.shared_bytes > limit:
        raise SystemExit(
            f"{resources.name} needs {resources.shared_bytes} bytes of shared memory, limit "
            f"{limit}: use smaller blocks or fewer stages."
        )
    if resources.spilled_bytes:
        raise SystemExit(
            f"{resources.name} spills {resources.spilled_bytes} bytes of registers: use smaller "
            "blocks or more warps."
        )


if __name__ == "__main__":
    main()
