"""Products of a tensor-parallel layer with their communication inside, as differentiable operators.

A layer whose weight is cut by rows of the output takes activations that are sharded by sample, and gathers them first;
the next one, cut by columns of the input, gives them back sharded by sample:

    y = all_gather_matmul(x_shard, rows_of_W1, bias1, "relu")          # [M / W, K] -> [M, N1 / W]
    z_shard = matmul_reduce_scatter(y, columns_of_W2, bias2, "relu")   # [M, N1 / W] -> [M / W, N2]

The backward of one is the other. Gradients of a weight, and of `all_gather_matmul`'s bias, are this rank's own shard's
over all M rows, so no reduction between ranks follows: they are the sum over the losses of all ranks. The bias of
`matmul_reduce_scatter`, which every rank has whole, gets the sum over this rank's M / W rows alone, as any parameter
that data parallelism reduces.

**Rows that the forward keeps.** A weight's gradient needs the gathered rows. `all_gather_matmul` keeps those of the
forward, [M, K], if the weight needs a gradient: to gather again would put M x K elements on links that the backward's
reduce-scatter fills at that time. `matmul_reduce_scatter` keeps its input, which is not gathered. Under `no_grad` and
in `inference_mode` nothing is kept.

**Limits.** Gradients cannot be differentiated again. `torch.compile` leaves both operators as they are and compiles the
code around them; with `fullgraph=True` it refuses.

Source: Flux (Chang et al.), and tensor parallelism by columns and rows (Shoeybi et al., Megatron-LM, arXiv 1909.08053).
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
    """Return activation(x @ weight^T + bias), x being all ranks' rows, those of rank r from r * M / W on.

    All ranks of the group call this alike and in the same order. The first call of its kind makes memory, for which the
    host waits, so it may not be within a capture; later ones may.

    Args:
        x_shard: [M / W, K] of this rank; float16 or bfloat16; by the serial way float32, too. Under autocast
            all three are cast as `torch.nn.functional.linear` casts.
        weight: [N, K], this rank's own.
        bias: [N], this rank's own, or None.
        activation: none | relu.
        products: run it between the W ranks of their group, in their memory.
        way: auto | serial | copies | tiles | triggered, see `products`.

    Returns:
        [M, N], of the type of `x_shard`; the sums are float32, but where cuBLAS splits K it adds the splits up in that
        type, unless `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is off.

    Raises:
        InputError: on every rank, if there is no room for windows, or, unless the way is auto, if the ranks do not
            reach each other's memory.

    Example:
        W = 2, rank 0 has x_shard [[1, 2]], rank 1 [[3, 4]]. weight [[1, 1]] on rank 0 gives [[3], [7]] there, and
        [[1, -1]] on rank 1 gives [[-1], [-1]] there.
    """
    keep = torch.is_grad_enabled() and weight.requires_grad  # within a `Function` autograd never records
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

    The partial products are rounded to their type, as they travel, and added up in float32 in the order of the ranks;
    then come bias and activation, once. (By the serial way on GPUs it is NCCL that adds up.) Calls are as for
    `all_gather_matmul`.

    Args:
        x: [M, K] of this rank, W divides M.
        weight: [N, K], this rank's own.
        bias: [N], the same on all ranks, or None.
        activation: none | relu.
        products, way: as for `all_gather_matmul`.

    Returns:
        [M / W, N], of the type of `x`.

    Raises:
        InputError: as `all_gather_matmul`.

    Example:
        W = 2, x [[1], [2]] and weight [[10]] on both ranks, bias [1]: 10 + 10 + 1 = [[21]] on rank 0, [[41]] on rank 1.
    """
    return _MatmulReduceScatter.apply(*_cast(x, weight, bias), activation, products, way)


def _cast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors in autocast's type where that is on; autograd casts the gradients back."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each if each is None else each.to(dtype) for each in (x, weight, bias))


Gradients = tuple[torch.Tensor | None, ...]


def _through(gradient: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient before the activation, whose output is `out` where it is a relu, else None."""
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
        dz = _through(gradient.contiguous(), out)
        finish, dx, dw, db = None, None, None, None
        with ctx.products.order:
            if ctx.needs_input_grad[0]:
                finish = ctx.products.begin_reduce_scatter(dz, ProductLayer(weight.t()), ctx.way)
            if x is not None:  # beside the rows that travel
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
        dz = _through(gradient.contiguous(), out)
        dx, dw = None, None
        if ctx.needs_input_grad[0] or x is not None:
            with ctx.products.order:
                dx, gathered = ctx.products.all_gather_matmul(dz, ProductLayer(weight.t()), ctx.way, x is not None)
            dw = None if gathered is None else gathered.t() @ x
        return dx, dw, dz.sum(0) if ctx.needs_input_grad[2] else None, None, None, None, None
