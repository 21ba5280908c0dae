"""Products by QuACK without an epilogue; needs the extra `cutlass`."""

# pyright: reportMissingImports=false

from typing import Any

import torch
from quack.epilogue.frontend import gemm_epilogue

_NO_EARLY_LAUNCH = (("use_pdl", False),)


@gemm_epilogue(outputs=(), ops={})
def _product(acc: Any) -> dict[str, Any]:
    return {"D": acc}


@gemm_epilogue(outputs=(), ops={})
def _sum(acc: Any, c: Any) -> dict[str, Any]:
    return {"D": acc + c}


def write_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, wide: bool, adds: bool) -> None:
    """Write out = left [M, K] @ right [K, N], or add it to `out`; `wide` is for tiles of 192 columns, else 128."""
    tiles = {"tile_M": 128, "tile_N": 192 if wide else 128, "cluster_M": 1, "cluster_N": 2, "pingpong": True}
    options: dict[str, Any] = {"epi_args": {}, **tiles, "post_init_attrs": _NO_EARLY_LAUNCH}
    if adds:
        _sum.gemm(left, right.t(), out, out, **options)
    else:
        _product.gemm(left, right.t(), out, **options)
