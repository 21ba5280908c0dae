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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.dense.gemm.problem import Activation, Layer
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
    order: AbstractContextManager[object] | None = None,
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
        order: entered around all communication, forward and back, to order it among the other communication of a
            captured step, as a `comm.order.CommunicationOrder` does.

    Returns:
        [M, N], of the type of `x_shard`; the sums are float32, but where cuBLAS splits K it adds the splits up in that
        type, unless `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is off.

    Raises:
        InputError: on every rank, if the way cannot run them.

    Example:
        W = 2, rank 0 has x_shard [[1, 2]], rank 1 [[3, 4]]. weight [[1, 1]] on rank 0 gives [[3], [7]] there, and
        [[1, -1]] on rank 1 gives [[-1], [-1]] there.
    """
    run = _Run(products, way, order or nullcontext(), torch.is_grad_enabled())
    return _AllGatherMatmul.apply(*_cast(x_shard, weight, bias), activation, run)


@uncompiled
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
    *,
    products: ParallelProducts,
    way: str = "auto",
    order: AbstractContextManager[object] | None = None,
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
        products, way, order: as for `all_gather_matmul`.

    Returns:
        [M / W, N], of the type of `x`.

    Raises:
        InputError: as `all_gather_matmul`.

    Example:
        W = 2, x [[1], [2]] and weight [[10]] on both ranks, bias [1]: 10 + 10 + 1 = [[21]] on rank 0, [[41]] on rank 1.
    """
    run = _Run(products, way, order or nullcontext(), torch.is_grad_enabled())
    return _MatmulReduceScatter.apply(*_cast(x, weight, bias), activation, run)


class _Run(NamedTuple):
    """How an operator runs, forward and back."""

    products: ParallelProducts
    way: str
    order: AbstractContextManager[object]
    differentiable: bool
    """whether the caller's autograd records; within a `Function` it never does"""


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
        run: _Run,
    ) -> torch.Tensor:
        layer, keep = Layer(weight, bias, activation), run.differentiable and ctx.needs_input_grad[1]
        with run.order:
            out, x = run.products.all_gather_matmul(x_shard, layer, run.way, keep)
        ctx.save_for_backward(x, weight, out if activation == "relu" else None)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, out = ctx.saved_tensors
        dz = _through(gradient.contiguous(), out)
        finish, dx, dw, db = None, None, None, None
        run: _Run = ctx.run
        with run.order:
            if ctx.needs_input_grad[0]:
                finish = run.products.begin_reduce_scatter(dz, Layer(weight.t()), run.way)
            if ctx.needs_input_grad[1]:  # beside the rows that travel
                dw = dz.t() @ x
            if ctx.needs_input_grad[2]:
                db = dz.sum(0)
            if finish is not None:
                dx = finish()
        return dx, dw, db, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        run: _Run,
    ) -> torch.Tensor:
        with run.order:
            out = run.products.begin_reduce_scatter(x, Layer(weight, bias, activation), run.way)()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, out if activation == "relu" else None)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, out = ctx.saved_tensors
        dz = _through(gradient.contiguous(), out)
        dx, dw, db = None, None, None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            keep, run = ctx.needs_input_grad[1], ctx.run
            with run.order:
                dx, gathered = run.products.all_gather_matmul(dz, Layer(weight.t()), run.way, keep)
            if gathered is not None:
                dw = gathered.t() @ x
        if ctx.needs_input_grad[2]:
            db = dz.sum(0)
        return dx, dw, db, None, None
