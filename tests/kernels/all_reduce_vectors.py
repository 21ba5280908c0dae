"""The command: `python -m tests.kernels.all_reduce_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel of the dense gradients' all-reduce for an H200, and checks that it moves 16 bytes a lane.
"""

import torch

from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.dense import all_reduce
from tests.kernels.compiling import compile_for_h200

_TYPES: dict[str, str] = dict.fromkeys(("shares", "peers_ready", "clock"), "*i64") | {
    "counted": "*i32",
    "scale": "fp32",
    "epoch": "i64",
}


def _check(made: CompiledKernel, vectors: int) -> None:
    text = compile_for_h200(made, _TYPES)["ptx"]
    assert text.count("ld.global.v4.b32") == vectors, text
    assert text.count("st.global.v4.b32") == vectors, text
    assert text.count("st.global") == vectors + 1, f"besides, the count alone is set back\n{text}"


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for world_size in (2, 3, 4, 8):
            turns = all_reduce.lane_elements(world_size, dtype) * dtype.itemsize // 16
            _check(all_reduce._averaging(world_size, dtype), world_size * turns)


if __name__ == "__main__":
    main()
