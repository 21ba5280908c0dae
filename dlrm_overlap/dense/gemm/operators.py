"""Products of a tensor-parallel layer with their communication inside, as operators that are differentiable once.

A layer whose weight is sharded by rows gathers activations that are sharded by sample; the next one, whose weight is
sharded by columns, returns activations that are sharded by sample:

    y = all_gather_matmul(x_shard, rows_of_W1, bias1, "relu")          # [M / W, K] -> [M, N1 / W]
    z_shard = matmul_reduce_scatter(y, columns_of_W2, bias2, "relu")   # [M, N1 / W] -> [M / W, N2]

The backward of one is the other. The gradients of weights, and of `all_gather_matmul`'s bias, are sums over all M rows.
The bias of `matmul_reduce_scatter` is replicated: its gradient, over this rank's M / W rows, must be reduced as any
data-parallel parameter's. `torch.compile` leaves the operators uncompiled, so `fullgraph=True` refuses them.

Source: Flux (Chang et al.), and Megatron-LM (Shoeybi et al., arXiv 1909.08053).
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.dense.gemm.layer import Activation, ProductLayer
from dlrm_overlap.dense.gemm.products import ParallelProducts


@uncompiled
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
    *,
    products: ParallelProducts,
    way: str = "auto",
) -> torch.Tensor:
    """Return activation(x @ weight^T + bias), where x are all ranks' rows, rank r's from row r * M / W on.

    A collective: all ranks call it in the same order. The first call of a size allocates memory, for which the host
    waits, so it may not be captured. If the weight needs a gradient, the gathered rows [M, K] are kept.

    Args:
        x_shard: [M / W, K] of this rank, float16 or bfloat16; serially also float32. Autocast casts all tensors.
        weight: [N, K], this rank's shard.
        bias: [N], this rank's shard, or None.
        way: how the ranks communicate, one of the ways of `products`.

    Returns:
        [M, N], of the dtype of `x_shard`. If cuBLAS splits K it adds up the splits in that dtype, not float32, unless
        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is off.

    Raises:
        InputError: on every rank, if there is no memory for windows or, unless `way` is auto, if the ranks cannot
            access each other's memory, or the GPU cannot run `way`.
    """
    keep = torch.is_grad_enabled() and weight.requires_grad  # in a `Function` gradients are always off
    return _AllGatherMatmul.apply(*_cast(x_shard, weight, bias), activation, products, way, keep)


@uncompiled
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
    *,
    products: ParallelProducts,
    way: str = "auto",
) -> torch.Tensor:
    """Return rank r's rows, [r * M / W, (r + 1) * M / W), of activation(sum over the ranks of x @ weight^T + bias).

    Partial products are rounded to their dtype and added up in float32 in the order of the ranks (serially on GPUs, by
    NCCL). A collective with the errors of `all_gather_matmul`.

    Args:
        x: [M, K] of this rank, M a multiple of W.
        weight: [N, K], this rank's shard.
        bias: [N], the same on all ranks, or None.
    """
    return _MatmulReduceScatter.apply(*_cast(x, weight, bias), activation, products, way)


def _cast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each if each is None else each.to(dtype) for each in (x, weight, bias))


Gradients = tuple[torch.Tensor | None, ...]


def _before_activation(gradient: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return gradient if out is None else torch.ops.aten.threshold_backward(gradient, out, 0)


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        products: ParallelProducts,
        way: str,
        keep: bool,
    ) -> torch.Tensor:
        with products.order:
            out, x = products.all_gather_matmul(x_shard, ProductLayer(weight, bias, activation), way, keep)
        ctx.save_for_backward(x, weight, out if activation == "relu" else None)
        ctx.products, ctx.way = products, way
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, out = ctx.saved_tensors
        dz = _before_activation(gradient.contiguous(), out)
        finish, dx, dw, db = None, None, None, None
        with ctx.products.order:
            if ctx.needs_input_grad[0]:
                finish = ctx.products.begin_reduce_scatter(dz, ProductLayer(weight.t()), ctx.way)
            # Computed while the partial products are sent.
            if x is not None:
                dw = dz.t() @ x
            if ctx.needs_input_grad[2]:
                db = dz.sum(0)
            if finish is not None:
                dx = finish()
        return dx, dw, db, None, None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        products: ParallelProducts,
        way: str,
    ) -> torch.Tensor:
        with products.order:
            out = products.begin_reduce_scatter(x, ProductLayer(weight, bias, activation), way)()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, out if activation == "relu" else None)
        ctx.products, ctx.way = products, way
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, out = ctx.saved_tensors
        dz = _before_activation(gradient.contiguous(), out)
        dx, dw = None, None
        if ctx.needs_input_grad[0] or x is not None:
            with ctx.products.order:
                dx, gathered = ctx.products.all_gather_matmul(dz, ProductLayer(weight.t()), ctx.way, x is not None)
            dw = None if gathered is None else gathered.t() @ x
        return dx, dw, dz.sum(0) if ctx.needs_input_grad[2] else None, None, None, None, None
