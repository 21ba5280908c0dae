"""The command: `python -m tests.kernels.row_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel that updates rows for an H200, under each optimizer; checks that rows, gradients and the states that
have an element for each of the row's are stored by 16 bytes a lane.
"""

import torch

from dlrm_overlap.kernels.backward import update_rows
from dlrm_overlap.kernels.backward.optimizers import OPTIMIZERS
from dlrm_overlap.kernels.optimizer_params import STATES
from tests.kernels.compiling import compile_for_h200

_POINTERS = ("weights", "first_states", "second_states", "third_states", "gradient", "scales", "chunk_sums", "numbers")
_TYPES = (
    dict.fromkeys(_POINTERS, "*fp32")
    | dict.fromkeys(("run_keys", "bounds", "clock"), "*i64")
    | dict.fromkeys(("run_starts", "gradient_at", "shared", "chunk_run", "chunk_first"), "*i32")
    | dict.fromkeys(("weight_at", "first_at", "second_at", "third_at", "step", "seed"), "i64")
    | {"factor": "fp32"}
)


def main() -> None:
    for optimizer in OPTIMIZERS:
        text = compile_for_h200(update_rows._compiled(128, torch.float32, False, optimizer, False, 128), _TYPES)["ptx"]
        rows = 1 + STATES[optimizer].count("elements")
        # Runs side by side, a run alone, the last chunk of one; in the first two rows at a time; and a chunk's sum.
        assert text.count("st.global.v4.b32") >= 4 * rows, f"{optimizer}\n{text}"


if __name__ == "__main__":
    main()
