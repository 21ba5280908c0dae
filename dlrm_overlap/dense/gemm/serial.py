"""The collective of the process group before or after the product: the only way on CPUs, and in float32.

NCCL adds up the partial products in their dtype, in the same order in every call. On CPUs they are added up in float32
in the order of the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm_overlap.dense.gemm.layer import Finish, ProductLayer
from dlrm_overlap.kernels.gemm.reference import sum_parts

# torch 2.13 renamed these.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(
    group: dist.ProcessGroup, x_shard: torch.Tensor, layer: ProductLayer, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output for all rows [M, N] and, if `keep`, the gathered rows [M, K]."""
    x = x_shard.new_empty(group.size() * x_shard.shape[0], x_shard.shape[1])
    all_gather(x, x_shard, group=group)
    out = functional.linear(x, layer.weight, layer.bias)
    return functional.relu_(out) if layer.activation == "relu" else out, x if keep else None


def scatter(group: dist.ProcessGroup, x: torch.Tensor, layer: ProductLayer) -> Finish:
    """Multiply, and begin to reduce; gloo has no fixed order of sums, so CPUs exchange partial products."""
    partial, ranks, is_relu = functional.linear(x, layer.weight), group.size(), layer.activation == "relu"
    if x.device.type == "cpu":
        received = torch.empty_like(partial)
        work: Any = dist.all_to_all_single(received, partial, group=group, async_op=True)
    else:
        received = partial.new_empty(partial.shape[0] // ranks, partial.shape[1])
        work = reduce_scatter(received, partial, group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        if x.device.type == "cpu":
            return sum_parts(received.unflatten(0, (ranks, len(received) // ranks)), layer.bias, is_relu)
        out = received if layer.bias is None else received.add_(layer.bias)
        return functional.relu_(out) if is_relu else out

    return finish
