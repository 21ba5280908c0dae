"""Kernels compiled for GPUs that need not be there."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.target import any_tensor_size, compile_options
from tests.kernels.specialisations import Specialisation

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


_HANGS_S = 1800  # all specialisations take minutes of all cores, and others may work on them
# Patterns of a kernel's registers, and of the spills of it and of the functions that it calls.
_NVIDIA = r"Used (\d+) registers", r"(\d+) bytes spill stores"  # in the log of ptxas
_AMD = r"\.vgpr_count: +(\d+)", r"\.vgpr_spill_count: +(\d+)"  # in the assembly


class Resources(NamedTuple):
    """What a compiled kernel needs."""

    registers: int
    """of a thread; AMD: vector registers"""
    spilled: int
    """bytes of registers that a thread stores to memory for want of more; AMD: number of vector registers"""
    shared: int
    """bytes of a program's shared memory"""

    def __str__(self) -> str:
        return "/".join(map(str, self))


def compile_for(made: Specialisation, target: str) -> tuple[Any, Resources]:
    """Compile a kernel for one of `TARGETS`; not under TRITON_INTERPRET."""
    kernel, constants = made.made._kernel, made.made.constants
    index, on_amd = kernel.arg_names.index, TARGETS[target].backend == "hip"
    source = ASTSource(
        fn=kernel,
        signature=made.signature,
        constexprs={(index(name),): value for name, value in constants.items()},
        attrs={(index(name),): [["tt.divisibility", 16]] for name in made.aligned},
    )
    options = compile_options(made.made._options, on_amd)
    log = io.StringIO()
    knobs: Any = triton.knobs  # pyright: ignore[reportAttributeAccessIssue]
    with any_tensor_size(on_amd), knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True  # the cache has no log
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=TARGETS[target], options=options)
    registers, spilled = _AMD if on_amd else _NVIDIA
    text = compiled.asm["amdgcn"] if on_amd else log.getvalue()
    (used,), saved = (list(map(int, re.findall(pattern, text))) for pattern in (registers, spilled))
    return compiled, Resources(used, sum(saved), compiled.metadata.shared)


def compile_for_h200(made: CompiledKernel, types: Mapping[str, str]) -> Any:
    """Return the stages of a compiled kernel by name, such as its `ptx`; not under TRITON_INTERPRET.

    Args:
        made: the kernel, its constants and its options.
        types: name of a run-time argument -> type, as Triton writes it: `*bf16`, `i64`. Others are i32; names that
            the kernel does not have are ignored.
    """
    return compile_for(Specialisation.with_types(made, types), "sm_90")[0].asm


def run_without_interpreter(module: str, *argv: str) -> None:
    """Run a module in another process: this one interprets kernels, and cannot compile them.

    It collects garbage only where it asks for it: by itself it would do so while it imports, in vain.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = f"import gc, runpy; gc.disable(); runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    command, root = [sys.executable, "-c", program, *argv], Path(__file__).parents[2]
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=_HANGS_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
