"""An all-gather whose rows are read: each rank puts its own into its window, and its copy engine reads the peers'."""

import torch

from dlrm_overlap.dense.gemm.window import Window
from dlrm_overlap.kernels.gemm.publish import publish_rows

_SMALL_BYTES = 4 << 20  # a shard up to so large is published at once


class Gathering:
    """One call's rows: this rank's are announced to all ranks when it is made, the peers' are read part by part."""

    def __init__(self, window: Window, x_shard: torch.Tensor, columns: int, first: int, keep: bool) -> None:
        """Copy this rank's rows to its window; let the engine follow when the first of all ranks' are there.

        Args:
            window: of at least the shard's bytes.
            x_shard: [M / W, K] of this rank, contiguous, at a multiple of 16 bytes.
            columns: N, of the product.
            first: rows of each rank that the links need not wait for the others to be published. The caller reads
                these of the first peer by themselves; all of them, if it cuts none.
            keep: whether this rank's rows are to be in `x`, too.
        """
        (rows, inner), ranks = x_shard.shape, window.world_size
        self.window, self.x_shard, self.rows = window, x_shard, rows
        self.own = slice(window.rank * rows, (window.rank + 1) * rows)
        """this rank's rows among those of all ranks"""
        self.x = x_shard.new_empty(ranks * rows, inner)
        """[M, K]: the rows of all ranks, as they come"""
        self.out = x_shard.new_empty(ranks * rows, columns)
        """[M, N], for the product"""
        self._shards = [window.at(rank, x_shard.dtype)[: rows * inner].view(rows, inner) for rank in range(ranks)]
        self._first = min(first, rows) if x_shard.numel() * x_shard.dtype.itemsize > _SMALL_BYTES else rows
        self._publish(self.x[self.own] if keep else None)
        self._only_first = self._first < rows

    def _publish(self, kept: torch.Tensor | None) -> None:
        rows, first, window = self.rows, self._first, self.window
        shard = self._shards[window.rank]
        for slot, (begin, end) in enumerate([(0, first), (first, rows)] if first < rows else [(0, rows)]):
            some = slice(begin, end)
            also = None if kept is None else kept[some]
            publish_rows(self.x_shard[some], shard[some], also, window.flags, window.rank, slot)
            if slot == 0:
                window.engine.follow()
        window.published.record(torch.cuda.current_stream(self.x.device))

    def read(self, peer: int, begin: int, end: int) -> None:
        """Let the engine read the rows [begin, end) of a peer's when they are there; in order, the first ones first."""
        if self._only_first and end > self._first:
            self.window.engine.stream.wait_event(self.window.published)
            self._only_first = False
        first = peer * self.rows
        self.window.engine.copy(self.x[first + begin : first + end], self._shards[peer][begin:end])
