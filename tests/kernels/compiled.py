"""Kernels without a GPU: compiled for real architectures, and run by Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_KIB = {80: 163, 90: 227, 100: 227}
"""By compute capability, shared memory a block may use."""


def check_compiled(
    kernel, signature, constants, warps, capability, folder, *, aligned=(), fused=False
):
    """It compiles, fits the shared memory and spills nothing.

    Args:
        signature: types of the arguments that are no constants, by name.
        aligned: strides and sizes that are multiples of 16, as pointers are: the widest loads,
            the most registers.
        fused: whether products and sums may be fused.
    """
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or argument in aligned
    }
    binary = triton.compile(
        ASTSource(kernel, types, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": fused},
    )
    assert binary.metadata.shared <= SHARED_KIB[capability] * 1024
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    # What does not fit the registers goes to the stack, or to other local memory.
    name = kernel.fn.__name__
    assert re.search(rf"Function {name}:\s+REG:\d+ STACK:0 SHARED:\d+ LOCAL:0", usage.stdout), (
        usage.stdout
    )


def rerun_interpreted(file):
    """Run a test file again with the kernels interpreted; returns how many tests passed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return int(re.search(r"(\d+) passed", run.stdout)[1])
