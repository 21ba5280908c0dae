"""The command: `python -m tests.kernels.update_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel that updates the dense parameters for an H200, under each optimizer and with bf16 shadows; checks
that it moves 16 bytes a lane, and no lesser words.
"""

from itertools import product

import torch

from dlrm_overlap.kernels.dense import update
from dlrm_overlap.kernels.dense.arguments import BLOCK, STATES
from tests.kernels.compiling import compile_for_h200

_LANES = 128
_TYPES = dict.fromkeys(("weights", "gradients", "state", "square", "factors"), "*fp32") | {
    "shadow": "*bf16",
    "rows": "*i32",
}


def main() -> None:
    for (kind, states), by_line in product(STATES.items(), (False, True)):
        _, change = update._compiled(kind, False, by_line, torch.bfloat16)
        text = compile_for_h200(change, _TYPES)["ptx"]
        turns = BLOCK // (_LANES * 4)
        assert text.count("ld.global.v4.b32") == turns * (2 + len(states)), f"{kind}\n{text}"
        shadows = BLOCK // (_LANES * 8)
        assert text.count("st.global.v4.b32") == turns * (1 + len(states)) + shadows, f"{kind}\n{text}"
        assert text.count("st.global") == text.count("st.global.v4.b32"), f"{kind}\n{text}"


if __name__ == "__main__":
    main()
