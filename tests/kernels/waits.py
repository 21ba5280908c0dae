"""The command: `python -m tests.kernels.waits`, without TRITON_INTERPRET; needs no GPU.

Compiles for an H200 the kernels whose waits expire, in programs of several warps, and checks that no warp decides by
its own clock: a time reaches a condition only through a reduction, whose result is the same for all threads, or
through a store by one thread. On AMD such a kernel reads that vendor's clock, and stops by its trap.
"""

import re
from typing import Any

import torch

from dlrm_overlap.kernels import flags, messages
from dlrm_overlap.kernels.bags import FeatureTable, Windows
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel
from dlrm_overlap.kernels.forward.put_slices import SlicedPut, Slices
from dlrm_overlap.kernels.gemm import product
from dlrm_overlap.kernels.gemm.product import Tiling
from dlrm_overlap.kernels.network import Network
from dlrm_overlap.kernels.tuning import PoolingOptions, tuning_for
from tests.kernels.compiling import compile_for, compile_for_h200
from tests.kernels.specialisations import Specialisation

_PASSED_ON = re.compile(r"arith\.|tt\.splat|tt\.expand_dims|tt\.broadcast")
_ENDS = re.compile(r'"tt\.reduce"|tt\.store')
_NAME = re.compile(r"%[\w]+")


def _types(names: dict[str, str]) -> dict[str, str]:
    return {name: kind for kind, each in names.items() for name in each.split()}


_TYPES = _types(
    {"*i64": "clock clock_word status ready peers_ready features windows", "*i32": "counts", "i64": "timeout epoch"}
)
_OF_SLICES = _types({"*i32": "values offsets id_weights first_sample ticket done", "*bf16": "staging"})
_OF_MESSAGE = _types({"*i32": "first_sample", "i64": "signals", "i32": "rows source"})
_NONE = torch.empty(0)
_OF_PRODUCT = _types({"*bf16": "out bias", "*i64": "targets", "*i32": "done owners"})


def times_in_conditions(text: str) -> list[str]:
    """Return the lines of a kernel's Triton IR that use the time of one warp other than to compute, store or reduce."""
    found: list[str] = []
    times: dict[str, int] = {}  # name -> indentation of the line that defines it; ends with its block
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip())
        times = {name: depth for name, depth in times.items() if depth <= indentation}
        made, _, right = line.strip().partition(" = ")
        if "%globaltimer" in right:
            times[made] = indentation
            continue
        used = [name for name in _NAME.findall(right or made) if name in times]
        if used and _PASSED_ON.match(right):
            times[made] = indentation
        elif used and not _ENDS.match(right or made):
            found.append(line.strip())
    return found


def _kernels() -> dict[str, tuple[CompiledKernel, dict[str, str]]]:
    """Return the kernels, of several warps a program, and the types of their arguments."""
    options = PoolingOptions(0, "balanced", tuning_for(1024, 2), check_ids=False)
    features, windows = FeatureTable(_NONE, 1024, torch.bfloat16, 16, 16), Windows(torch.empty(4), 2048, torch.bfloat16)
    unread: Any = None
    put = SlicedPut(unread, features, windows, unread, unread, options, Slices(8, 0, in_place=True))
    kind = {"gather": True, "scatter": False, "by_k": True, "bias": False}
    kind |= {"activation": "none", "dtype": TYPES[torch.bfloat16], "order": "own_first"}
    tiling = Tiling()
    blocks = {"x": [tiling.block_m, tiling.block_k], "weight": [tiling.block_n, tiling.block_k]}
    tiles = {name: f"tensordesc<bf16{block}>" for name, block in blocks.items()}
    return {
        "wait_for_flags": (flags._wait_kernel(1024), {}),
        "put_slices": (put._kernel(), _OF_SLICES),
        "wait_message": (messages._wait_kernel(Network("stores", _NONE, 0)), _OF_MESSAGE),
        "gathered_product": (product._compiled(tiling, **kind), _OF_PRODUCT | tiles),
    }


def main() -> None:
    for name, (made, types) in _kernels().items():
        assert made._options["num_warps"] > 1, f"{name}: a warp alone decides for itself"
        text = compile_for_h200(made, _TYPES | types)["ttir"]
        assert "%globaltimer" in text, f"{name} reads no time"
        assert not (found := times_in_conditions(text)), f"{name}: each warp decides by its own time:\n{found}"
    made, types = _kernels()["wait_for_flags"]
    text = compile_for(Specialisation.with_types(made, _TYPES | types), "gfx942")[0].asm["amdgcn"]
    for instruction in ("s_memrealtime", "s_trap 2"):
        assert instruction in text, f"wait_for_flags on AMD: no {instruction}\n{text}"


if __name__ == "__main__":
    main()
