"""Kernels compiled for an H200, which needs no GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_overlap.kernels.compiled import CompiledKernel


def compile_for_h200(made: CompiledKernel, types: Mapping[str, str]) -> Any:
    """Return the stages of a compiled kernel by name, such as its `ptx`; not under TRITON_INTERPRET.

    Args:
        made: the kernel, its constants and its options.
        types: name of a run-time argument -> type, as Triton writes it: `*bf16`, `i64`. Others are i32; names that
            the kernel does not have are ignored.
    """
    kernel: Any = made._kernel
    types = {**types, **dict.fromkeys(made.constants, "constexpr")}
    pointers = [name for name in kernel.arg_names if types.get(name, "").startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in made.constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(made._options)).asm


def run_without_interpreter(module: str) -> None:
    """Run a module in another process: this one interprets kernels, and cannot compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv, root = [sys.executable, "-m", module], Path(__file__).parents[2]
    result = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
