"""Products of a cross network whose epilogues do the elementwise work, by CUTLASS's Python DSL.

Each tile of a product is finished in registers, while other tiles are multiplied. QuACK compiles the kernels for Hopper
at their first call, and keeps them on disk. This module needs the extra `cutlass`. Notation is that of `cross`; its
kernels and cuBLAS's products compute the same, but round g_l once for each layer, and dx_0 once for each term.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
from cutlass import BFloat16, Float32
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecLoad, RowVecReduce, TileLoad

ROWS = 128
"""rows of a tile"""

_ALIGNED = 8  # divides N and R: TMA reads rows of whole 16 bytes
_NARROWEST = 384  # least N: the columns of two tiles, which a cluster computes together
# Two groups of warps take turns: one multiplies a tile, while the other one finishes and stores its own.
_OPTIONS: dict[str, Any] = {"tile_M": ROWS, "tile_N": 192, "cluster_M": 1, "cluster_N": 2, "pingpong": True}
_OPTIONS["post_init_attrs"] = (("use_pdl", False),)  # waiting programs would occupy multiprocessors


def _operands(*tiles: str) -> dict[str, Any]:
    return {"bias": RowVecLoad("bias"), **{name: TileLoad(name) for name in tiles}}


@gemm_epilogue(outputs=("w",), ops=_operands("x0"))
def _layer(acc: Any, c: Any, x0: Any, bias: Any) -> dict[str, Any]:
    w = acc.to(BFloat16).to(Float32)  # the backward reads the rounded product
    return {"D": x0 * (w + bias) + c, "w": acc}


@gemm_epilogue(outputs=("w",), ops=_operands("x0"))
def _first_layer(acc: Any, x0: Any, bias: Any) -> dict[str, Any]:
    w = acc.to(BFloat16).to(Float32)
    return {"D": x0 * (w + bias) + x0, "w": acc}


# In the backward `c` is g_{l+1}, and D is g_l.
@gemm_epilogue(outputs=("du", "dx"), ops=_operands("x0", "w"), reduces={"sums": RowVecReduce("sums")})
def _begin_gradient(acc: Any, c: Any, x0: Any, w: Any, bias: Any) -> dict[str, Any]:
    g = acc + c
    du = g * x0
    return {"D": g, "du": du, "sums": du, "dx": c * (w + bias)}


@gemm_epilogue(outputs=("du", "dx"), ops=_operands("x0", "w", "before"), reduces={"sums": RowVecReduce("sums")})
def _continue_gradient(acc: Any, c: Any, x0: Any, w: Any, before: Any, bias: Any) -> dict[str, Any]:
    g = acc + c
    du = g * x0
    return {"D": g, "du": du, "sums": du, "dx": c * (w + bias) + before}


@gemm_epilogue(ops=_operands("w", "before"))
def _end_gradient(acc: Any, c: Any, w: Any, before: Any, bias: Any) -> dict[str, Any]:
    return {"D": acc + c + c * (w + bias) + before}


def fits(x0: torch.Tensor, rank: int) -> bool:
    """Return whether the kernels can compute layers of an input [b, N], and are meant for them."""
    is_aligned = x0.shape[1] % _ALIGNED == rank % _ALIGNED == x0.data_ptr() % 16 == 0
    return x0.dtype == torch.bfloat16 and is_aligned and x0.shape[1] >= _NARROWEST


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

    The sum uses the rounded w, in float32, and is rounded once.

    Args:
        narrow: [b, R] bfloat16, as all others but `bias`; contiguous, with addresses of 16 bytes.
        weight: [N, R]
        x0, x: [b, N], which `fits`; the same tensor for the first layer.
        bias: [N] float32
        w, out: [b, N]
    """
    operands = {"x0": x0.detach(), "bias": bias[None], "w": w}
    if x is x0:
        _first_layer.gemm(narrow, weight, out, epi_args=operands, **_OPTIONS)
    else:
        _layer.gemm(narrow, weight, out, x.detach(), epi_args=operands, **_OPTIONS)


def gradient_of_layer(
    dv: torch.Tensor,
    v: torch.Tensor,
    later: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    x0: torch.Tensor,
    g: torch.Tensor,
    du: torch.Tensor,
    sums: torch.Tensor,
    dx: torch.Tensor,
    begins: bool,
) -> None:
    """Write g_l = g_{l+1} + dv @ v, du_{l-1} = g_l * x0 and its sums, and add g_{l+1} * (w_l + b_l) to dx; l > 0.

    Args:
        dv: [b, R]: du_l W_l, bfloat16, as all others but biases and sums; contiguous, with addresses of 16 bytes.
        v: [R, N]
        later: [b, N]: g_{l+1}
        layer: w_l [b, N] and b_l [N] float32
        x0, g, du: [b, N]
        sums: [ceil(b / ROWS), N] float32: sums of du over ROWS rows each, before it is rounded
        dx: [b, N]: written instead if the backward `begins` with this layer.
    """
    operands: dict[str, Any] = {"x0": x0.detach(), "w": layer[0], "bias": layer[1][None], "du": du, "dx": dx, "sums": sums}
    if begins:
        _begin_gradient.gemm(dv, v, g, later, epi_args=operands, b_kn=True, **_OPTIONS)
    else:
        _continue_gradient.gemm(dv, v, g, later, epi_args=operands | {"before": dx}, b_kn=True, **_OPTIONS)


def gradient_of_input(
    dv: torch.Tensor, v: torch.Tensor, later: torch.Tensor, layer: Sequence[torch.Tensor], dx: torch.Tensor
) -> None:
    """Add dv @ v + g_1 + g_1 * (w_0 + b_0) to dx, for layer 0; arguments as those of `gradient_of_layer`."""
    operands = {"w": layer[0], "bias": layer[1][None], "before": dx}
    _end_gradient.gemm(dv, v, dx, later, epi_args=operands, b_kn=True, **_OPTIONS)
