"""The command: `python -m tests.kernels.gemm_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the products with communication inside for an H200, and checks the instructions that they are made of.
"""

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

from dlrm_overlap.kernels.gemm import product
from dlrm_overlap.kernels.gemm.product import Tiling
from tests.kernels.compiling import compile_for_h200

_ORDERS = {"gather": "own_first", "scatter": "balanced"}


def _compile(mode: str, by_k: bool, tiling: Tiling) -> str:
    """Return the PTX of a product that is gathered, with a bias and relu, or scattered."""
    gather = mode == "gather"
    activation = "relu" if gather else "none"
    kind = product._Kind(gather, not gather, by_k, gather, activation, torch.bfloat16, _ORDERS[mode])
    blocks = {"x": [tiling.block_m, tiling.block_k]}
    blocks["weight"] = [tiling.block_n, tiling.block_k] if by_k else [tiling.block_k, tiling.block_n]
    types: dict[str, str] = {"out": "*bf16", "bias": "*bf16", "done": "*i32", "owners": "*i32", "timeout": "i64"}
    types |= dict.fromkeys(("targets", "peers_ready", "ready", "clock", "status"), "*i64")
    for name, block in blocks.items():
        layout = f",{NVMMASharedLayout.get_default_for(block, bfloat16)!r}" if tiling.specialised else ""
        types[name] = f"tensordesc<bf16{block}{layout}>"
    source = GluonASTSource if tiling.specialised else ASTSource
    return compile_for_h200(product._compiled(kind, tiling), types, source)["ptx"]


def main() -> None:
    for tiling in (Tiling(), Tiling(specialised=False)):
        for mode, by_k in (("gather", False), ("scatter", True)):
            text = _compile(mode, by_k, tiling)
            what = f"{mode}, {tiling}"
            assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in text, what
            assert "cp.async.bulk.tensor.2d" in text, what
            rows = tiling.block_m // (1 if tiling.specialised else 2)  # of a group of warps; two groups are two copies
            vectors = rows * tiling.block_n // 8 // 128
            assert text.count("st.global.v4.b32") == vectors, f"{what}: {text.count('st.global.v4.b32')}"
            if mode == "gather":
                assert "acquire" in text, f"{what}: the compiler has dropped the acquire"
                assert text.index("acquire") < text.index("fence.proxy.async.global"), what
            else:
                assert "global.sys.release.exch.b64" in text, what


if __name__ == "__main__":
    main()
