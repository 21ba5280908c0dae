"""The command: `python -m tests.kernels.vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles kernels for an H200, and checks their instructions: words of 16 bytes a lane, or the widest that rows allow,
and tensor cores.
"""

import re
from itertools import product

import torch

from dlrm_overlap.kernels import peer_copy, swap_rows
from dlrm_overlap.kernels.backward import update_rows
from dlrm_overlap.kernels.backward.optimizers import OPTIMIZERS
from dlrm_overlap.kernels.compiled import TYPES
from dlrm_overlap.kernels.dense import all_reduce, update
from dlrm_overlap.kernels.dense.arguments import BLOCK, STATES
from dlrm_overlap.kernels.gemm import product as products
from dlrm_overlap.kernels.gemm.product import TILING
from dlrm_overlap.kernels.optimizer_params import STATES as ROW_STATES
from tests.kernels.compiling import compile_for_h200

_INSTRUCTIONS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}
_COPY = {"counted": "*i32"} | dict.fromkeys(("source", "stride", "words", "offset"), "i64")
_COPY |= dict.fromkeys(("targets", "peers_ready", "clock"), "*i64")
_SHARES: dict[str, str] = dict.fromkeys(("shares", "peers_ready", "clock"), "*i64")
_SHARES |= {"counted": "*i32", "scale": "fp32", "epoch": "i64"}
_ROW_UPDATE: dict[str, str] = dict.fromkeys(("weights", "gradient", "scales"), "*fp32")
_ROW_UPDATE |= dict.fromkeys(("first_states", "second_states", "third_states", "chunk_sums", "numbers"), "*fp32")
_ROW_UPDATE |= dict.fromkeys(("run_keys", "bounds", "clock"), "*i64")
_ROW_UPDATE |= dict.fromkeys(("run_starts", "gradient_at", "shared", "chunk_run", "chunk_first"), "*i32")
_ROW_UPDATE |= dict.fromkeys(("weight_at", "first_at", "second_at", "third_at", "step", "seed"), "i64")
_ROW_UPDATE |= {"factor": "fp32"}
_UPDATE: dict[str, str] = dict.fromkeys(("weights", "gradients", "state", "square", "factors"), "*fp32")
_UPDATE |= {"shadow": "*bf16", "rows": "*i32"}
_PRODUCT = {"out": "*bf16", "bias": "*bf16", "done": "*i32", "owners": "*i32", "timeout": "i64"}
_PRODUCT |= dict.fromkeys(("targets", "peers_ready", "ready", "clock", "status"), "*i64")
_SWAPS = {"cached": "*i32", "address": "i64"} | dict.fromkeys(("slots", "leaving", "entering", "count"), "*i64")
_ROWS = re.compile(r"(?:tt\.load|tt\.store|ttg\.async_copy_global_to_local).* tensor<\d+x\d+x!tt\.ptr<i32>, (#\w+)>")
_ORDERS = {"gather": "own_first", "scatter": "balanced"}


def check_peer_copy() -> None:
    """Rows are stored in whole words."""
    for word, instruction in _INSTRUCTIONS.items():
        made = peer_copy._compiled(4, word)
        text, constants = compile_for_h200(made, _COPY)["ptx"], made.constants
        turns = constants["BLOCK"] // constants["VECTOR"] // (peer_copy._NUM_WARPS * 32)
        assert text.count(f"st.global.{instruction}") == turns + (word == 4), f"word {word}\n{text}"  # one sets a count
        assert text.count("st.global") == turns + 1, f"word {word}\n{text}"


def check_update_rows() -> None:
    """Rows, gradients and states with an element for each of the row's are stored by 16 bytes a lane."""
    for optimizer in OPTIMIZERS:
        made = update_rows._compiled(128, torch.float32, False, optimizer, False, 128)
        text, rows = compile_for_h200(made, _ROW_UPDATE)["ptx"], 1 + ROW_STATES[optimizer].count("elements")
        # Several runs, two rows at a time of a single run and of a run's last chunk, and a chunk's sum.
        assert text.count("st.global.v4.b32") >= 4 * rows, f"{optimizer}\n{text}"


def check_swap_rows() -> None:
    """Rows that are swapped are read ahead, in whole words, and the threads that read a slot store to it."""
    for words, alignment in ((128, 16), (12, 16), (10, 8), (1, 4)):
        stages = compile_for_h200(swap_rows._compiled(words, alignment), _SWAPS)
        text, layouts = stages["ptx"], _ROWS.findall(stages["ttgir"])
        assert len(layouts) >= 4, f"{words} words\n{stages['ttgir']}"
        assert len(set(layouts)) == 1, f"{words} words: {layouts}"
        assert "cp.async.wait_group" in text, f"{words} words\n{text}"
        if alignment == 16:
            assert "cp.async.cg.shared.global" in text, f"{words} words\n{text}"
            assert text.count("st.global.v4.b32") == text.count("st.global"), text


def check_all_reduce() -> None:
    for dtype, world_size in product((torch.float32, torch.bfloat16), (2, 3, 4, 8)):
        vectors = world_size * all_reduce.lane_elements(world_size, dtype) * dtype.itemsize // 16
        text = compile_for_h200(all_reduce._compiled(world_size, dtype), _SHARES)["ptx"]
        assert text.count("ld.global.v4.b32") == vectors, text
        assert text.count("st.global.v4.b32") == vectors, text
        assert text.count("st.global") == vectors + 1, f"apart from these only the count is reset\n{text}"


def check_update() -> None:
    """The update of the dense parameters, with bf16 shadows."""
    lanes = 128
    for kind, states in STATES.items():
        change = update._compiled_update(kind, False, torch.bfloat16)
        text, turns = compile_for_h200(change, _UPDATE)["ptx"], BLOCK // (lanes * 4)
        assert text.count("ld.global.v4.b32") == turns * (2 + len(states)), f"{kind}\n{text}"
        shadows = BLOCK // (lanes * 8)
        assert text.count("st.global.v4.b32") == turns * (1 + len(states)) + shadows, f"{kind}\n{text}"
        assert text.count("st.global") == text.count("st.global.v4.b32"), f"{kind}\n{text}"


def compile_product(mode: str, by_k: bool) -> str:
    """Return the PTX of a gathered product, with bias and relu, or of a scattered one."""
    gather = mode == "gather"
    kind = {"gather": gather, "scatter": not gather, "by_k": by_k, "bias": gather}
    kind |= {"activation": "relu" if gather else "none", "dtype": TYPES[torch.bfloat16], "order": _ORDERS[mode]}
    tiling, blocks = TILING, {"x": [TILING.block_m, TILING.block_k]}
    blocks["weight"] = [tiling.block_n, tiling.block_k] if by_k else [tiling.block_k, tiling.block_n]
    types = _PRODUCT | {name: f"tensordesc<bf16{block}>" for name, block in blocks.items()}
    return compile_for_h200(products._compiled(tiling, **kind), types)["ptx"]


def check_products() -> None:
    """Products use the tensor cores, keep the order of flags and rows, and store 16 bytes a lane."""
    for mode, by_k in (("gather", False), ("scatter", True)):
        text, what = compile_product(mode, by_k), mode
        assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in text, what
        assert "cp.async.bulk.tensor.2d" in text, what
        vectors = TILING.block_m * TILING.block_n // 8 // 256
        assert text.count("st.global.v4.b32") == vectors, f"{what}: {text.count('st.global.v4.b32')}"
        if mode == "gather":
            assert "acquire" in text, f"{what}: the compiler has dropped the acquire"
            assert text.index("acquire") < text.index("fence.proxy.async.global"), what
        else:
            assert "global.sys.release.exch.b64" in text, what


if __name__ == "__main__":
    checks = (check_peer_copy, check_update_rows, check_swap_rows, check_all_reduce, check_update, check_products)
    for check in checks:
        check()
