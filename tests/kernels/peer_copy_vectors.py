"""The command: `python -m tests.kernels.peer_copy_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel that stores rows, that which averages them, and the meeting of the ranks, for an H200; checks that
the first moves whole words of 16, 8, 4, 2 and 1 bytes a lane, and no lesser ones, and the second words of 16.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_overlap.kernels import average_rows, flags, peer_copy

INSTRUCTIONS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}
_TENSORS = {"counted": "*i32", "counts": "*i32"} | dict.fromkeys(
    ("targets", "peers_ready", "clock", "ready", "status"), "*i64"
)
_LONG = dict.fromkeys(("source", "stride", "words", "offset", "timeout", "rows", "own", "mean"), "i64") | {
    "scale": "fp32"
}


def _compile(function: Any, constants: dict[str, Any], warps: int) -> str:
    kernel = triton.runtime.JITFunction(function.fn)
    types = _TENSORS | _LONG | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in _TENSORS},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


def main() -> None:
    for word, instruction in INSTRUCTIONS.items():
        constants = dict(peer_copy._storing(4, word).constants)
        text = _compile(peer_copy._store_rows, constants, peer_copy._NUM_WARPS)
        turns = constants["BLOCK"] // constants["VECTOR"] // (peer_copy._NUM_WARPS * 32)
        assert text.count(f"st.global.{instruction}") == turns + (word == 4), f"word {word}\n{text}"  # one sets a count
        assert text.count("st.global") == turns + 1, f"word {word}\n{text}"
    for dtype in (torch.float32, torch.bfloat16):
        constants = dict(average_rows._averaging(4, dtype, 16 // dtype.itemsize).constants) | {"INTERPRETED": False}
        text = _compile(average_rows._average_rows, constants, average_rows._NUM_WARPS)
        assert "ld.global.v4.b32" in text, f"{dtype}\n{text}"
        assert "st.global.v4.b32" in text or "st.global.v2.b32" in text, f"{dtype}\n{text}"
    assert "atom" in _compile(flags._meet, dict(flags._meeting(4).constants) | {"INTERPRETED": False}, 1)


if __name__ == "__main__":
    main()
