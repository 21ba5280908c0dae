"""The product and the elementwise work of a cross layer's forward as one kernel, by CUTLASS's Python DSL.

Each tile of the product is finished in registers, while other tiles are multiplied. QuACK compiles the kernels for
Hopper at their first call, and keeps them on disk. This module needs the extra `cutlass`. Notation is that of `cross`.
"""

# pyright: reportMissingImports=false

from typing import Any

import torch
from cutlass import BFloat16, Float32
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecLoad, TileLoad

ALIGNED = 8
"""divides N and R: TMA reads rows of whole 16 bytes"""

NARROWEST = 384
"""least N: the columns of two tiles, which a cluster computes together"""

_OPERANDS = {"x0": TileLoad("x0"), "bias": RowVecLoad("bias")}
# Two groups of warps take turns: one multiplies a tile, while the other one finishes and stores its own.
_TILES = {"tile_M": 128, "tile_N": 192, "cluster_M": 1, "cluster_N": 2, "pingpong": True}
_NO_EARLY_LAUNCH = (("use_pdl", False),)  # waiting programs would occupy multiprocessors


@gemm_epilogue(outputs=("w",), ops=_OPERANDS)
def _layer(acc: Any, c: Any, x0: Any, bias: Any) -> dict[str, Any]:
    w = acc.to(BFloat16).to(Float32)  # the backward reads the rounded product
    return {"D": x0 * (w + bias) + c, "w": acc}


@gemm_epilogue(outputs=("w",), ops=_OPERANDS)
def _first_layer(acc: Any, x0: Any, bias: Any) -> dict[str, Any]:
    w = acc.to(BFloat16).to(Float32)
    return {"D": x0 * (w + bias) + x0, "w": acc}


def add_layer(
    narrow: torch.Tensor,
    weight: torch.Tensor,
    x0: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write w = narrow @ weight^T and out = x0 * (w + bias) + x, on the current stream.

    The sum uses the rounded w, in float32, and is rounded once. N is at least `NARROWEST`, N and R are multiples
    of `ALIGNED`, and addresses of 16 bytes.

    Args:
        narrow: [b, R] bfloat16, as all others but `bias`; contiguous.
        weight: [N, R]
        x0, x: [b, N]; the same tensor for the first layer.
        bias: [N] float32
        w, out: [b, N]
    """
    operands = {"x0": x0.detach(), "bias": bias[None], "w": w}
    options: dict[str, Any] = {"epi_args": operands, **_TILES, "post_init_attrs": _NO_EARLY_LAUNCH}
    if x is x0:
        _first_layer.gemm(narrow, weight, out, **options)
    else:
        _layer.gemm(narrow, weight, out, x.detach(), **options)
