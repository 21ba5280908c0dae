"""The command: `python -m tests.kernels.all_reduce_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernels of the dense gradients' all-reduce for an H200, and checks that they move 16 bytes a lane.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_overlap.kernels.dense import all_reduce


def _check(function: Any, constants: dict[str, Any], loads: int, stores: int) -> None:
    kernel = triton.runtime.JITFunction(function.fn)
    tensors = {"tensor": "*fp32", "counted": "*i32"}
    tensors |= dict.fromkeys(("sources", "targets", "landings", "peers_ready", "clock"), "*i64")
    types = tensors | {"scale": "fp32", "epoch": "i64", "begin": "i64"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in tensors},
    )
    options = {"num_warps": all_reduce.NUM_WARPS}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert text.count("ld.global.v4.b32") == loads, text
    assert text.count("st.global.v4.b32") == stores, text
    assert text.count("st.global") == stores + 1, f"besides, the count alone is set back\n{text}"


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for world_size in (2, 3, 4, 8):
            turns = all_reduce.lane_elements(world_size, dtype) * dtype.itemsize // 16
            constants = dict(all_reduce._averaging(world_size, dtype).constants)
            _check(all_reduce._average_share, constants, loads=world_size * turns, stores=world_size * turns)
        _check(all_reduce._send_shares, dict(all_reduce._sending(2, dtype).constants), loads=4, stores=dtype.itemsize)


if __name__ == "__main__":
    main()
