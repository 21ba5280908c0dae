"""Products and collectives cut into parts, so that NCCL carries one part while cuBLAS multiplies another.

This is what can be written with the operators of torch alone. NCCL's kernels hold multiprocessors that the products
want, so it pays less than its picture promises; see `copies`.
"""

import torch

from dlrm_overlap.dense.gemm.linear import Layer, activate, linear_into
from dlrm_overlap.dense.gemm.plan import cut
from dlrm_overlap.dense.gemm.ways import Finish, Problem, Products, all_gather, reduce_scatter


class Chunks(Products):
    """See the module. NCCL runs on a stream of its own, which follows the current one where a part begins."""

    name = "chunks"
    parts = (2, 4, 1)

    def fault(self, problem: Problem) -> str:
        """Return why chunks cannot run a problem, or an empty text."""
        if self.device.type != "cuda" or self.world_size == 1:
            return "chunks run between GPUs; take serial"
        return "" if problem.rows else "there are no rows to cut; take serial"

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather part after part; multiply this rank's rows, then each part of all peers' rows when it is there."""
        (rows, inner), ranks = x_shard.shape, self.world_size
        out = x_shard.new_empty(ranks * rows, layer.columns)
        x = x_shard.new_empty(ranks, rows, inner) if keep else None
        under_way = []
        for begin, end in cut(rows, parts):
            gathered = x_shard.new_empty(ranks * (end - begin), inner)
            work = all_gather(gathered, x_shard[begin:end], group=self.group, async_op=True)
            under_way.append((begin, end, gathered.view(ranks, end - begin, inner), work))
        own = self.rank * rows
        linear_into(out[own : own + rows], x_shard, layer)
        for begin, end, gathered, work in under_way:
            work.wait()
            for peer in range(ranks):
                if peer != self.rank:
                    there = slice(peer * rows + begin, peer * rows + end)
                    linear_into(out[there], gathered[peer], layer)
            if x is not None:
                x[:, begin:end].copy_(gathered)
        return out, None if x is None else x.view(-1, inner)

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply part after part, each of all ranks' rows, and begin to reduce it."""
        rows, columns, ranks = x.shape[0] // self.world_size, layer.columns, self.world_size
        out, under_way = x.new_empty(rows, columns), []
        for begin, end in cut(rows, parts):
            partial = x.new_empty(ranks, end - begin, columns)
            for owner in range(ranks):
                linear_into(partial[owner], x[owner * rows + begin : owner * rows + end], Layer(layer.weight))
            under_way.append(reduce_scatter(out[begin:end], partial.flatten(0, 1), group=self.group, async_op=True))

        def finish() -> torch.Tensor:
            for work in under_way:
                work.wait()
            return activate(out, layer)

        return finish
