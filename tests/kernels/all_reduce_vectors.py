"""The command: `python -m tests.kernels.all_reduce_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel of the dense gradients' all-reduce for an H200, and checks that it moves 16 bytes a lane.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_overlap.kernels.dense import all_reduce


def _check(constants: dict[str, Any], vectors: int) -> None:
    kernel = triton.runtime.JITFunction(all_reduce._average_share.fn)
    tensors = {"counted": "*i32"} | dict.fromkeys(("shares", "peers_ready", "clock"), "*i64")
    types = tensors | {"scale": "fp32", "epoch": "i64"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in tensors},
    )
    options = {"num_warps": all_reduce.NUM_WARPS}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert text.count("ld.global.v4.b32") == vectors, text
    assert text.count("st.global.v4.b32") == vectors, text
    assert text.count("st.global") == vectors + 1, f"besides, the count alone is set back\n{text}"


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for world_size in (2, 3, 4, 8):
            turns = all_reduce.lane_elements(world_size, dtype) * dtype.itemsize // 16
            _check(dict(all_reduce._averaging(world_size, dtype).constants), world_size * turns)


if __name__ == "__main__":
    main()
