"""All-gathers with the product inside: this rank's rows are multiplied at once, the peers' rows when they arrive.

Functions take this rank's rows [M / W, K], and return the layer's output for all rows [M, N] and, if `keep`, a copy of
all rows [M, K]. Copy engines send rows, with a flag after each part: a kernel would occupy multiprocessors.
"""

import torch

from dlrm_overlap.dense.gemm.layer import ProductLayer, cut, linear_into
from dlrm_overlap.dense.gemm.windows import ProductWindows
from dlrm_overlap.kernels.flags import signal_flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import begin_call
from dlrm_overlap.kernels.gemm.product import TileSignals, for_tma, product


class _Rows:
    """The rows of one call; its constructor makes the current stream wait until all windows may be overwritten."""

    def __init__(self, windows: ProductWindows, x_shard: torch.Tensor, columns: int, keep: bool) -> None:
        """Begin the call. From then on peers wait for its end, so all its memory is allocated before."""
        (rows, inner), ranks, rank = x_shard.shape, windows.world_size, windows.rank
        size = ranks * rows * inner
        window = windows.begin(size * x_shard.dtype.itemsize)
        self.own = slice(rank * rows, (rank + 1) * rows)
        self.out = x_shard.new_empty(ranks * rows, columns)
        """[M, N]"""
        self.kept = x_shard.new_empty(ranks * rows, inner) if keep else None
        """[M, K]"""
        self._windows, self._x_shard = windows, x_shard
        self._at = [window.view("memory", each).view(x_shard.dtype)[:size].view(-1, inner) for each in range(ranks)]
        self.received = self._at[rank]
        """[M, K] in this rank's window"""
        begin_call(windows.done, rank)
        windows.engine.follow()

    def send(self, peer: int, begin: int, end: int, slot: int) -> None:
        """Send this rank's rows [begin, end) to a peer, then set READY `slot` there."""
        windows = self._windows
        windows.engine.copy(self._at[peer][self.own][begin:end], self._x_shard[begin:end])
        windows.engine.write_flag(windows.ready_at[peer][slot : slot + 1], windows.word)

    def keep(self, some: torch.Tensor, at: slice) -> None:
        """If rows are kept, copy `some`, which have arrived, to `kept[at]`, concurrently with the current stream."""
        if self.kept is not None:
            self._windows.local_copies.follow()
            self._windows.local_copies.copy(self.kept[at], some)

    def finish(self) -> None:
        """Set DONE at all peers once the current stream has read all rows; the stream then waits for the engine."""
        signal_flags(self._windows.done, self._windows.rank, 0, 0)
        self._windows.engine.join()


def copied(
    windows: ProductWindows, x_shard: torch.Tensor, layer: ProductLayer, parts: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Products of cuBLAS; before each, a kernel waits for the flag of its rows.

        current stream | wait for DONE | own rows | wait for r-1 | its rows | wait for r-2 | its rows | .. | DONE
        copy engine    |               | send to r+1, flag | send to r+2, flag | send to r+3, flag, ..
        local copies   |               | own rows, if kept |     | rows of r-1, if kept | ..

    If links take longer, all products but the last are hidden, so the last peer's rows are cut.

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA.
    """
    count = x_shard.shape[0]
    rows, pieces = _Rows(windows, x_shard, len(layer.weight), keep), cut(count, parts)

    def order(peers: list[int]) -> list[tuple[int, int, tuple[int, int]]]:
        *early, last = peers
        return [(peer, 0, (0, count)) for peer in early] + [(last, *each) for each in enumerate(pieces)]

    # Send to all peers; the last one gets its rows in pieces.
    for (peer, slot, piece), event in zip(order(windows.send_order), windows.events, strict=False):
        rows.send(peer, *piece, slot)
        event.record(windows.engine.stream)
    # Multiply this rank's rows, then the peers' as they arrive.
    linear_into(rows.out[rows.own], x_shard, layer)
    rows.keep(x_shard, rows.own)
    *_, last = arrivals = windows.send_order[::-1]
    for (peer, slot, (begin, end)), event in zip(order(arrivals), windows.events, strict=False):
        # Wait after this rank's own sending: if a graph runs its branches one by one, waiting first would deadlock.
        torch.cuda.current_stream(windows.device).wait_event(event)
        wait_flags(windows.arrived[slot] if peer == last else windows.ready_from[peer], windows.rank, 0)
        some = slice(peer * count + begin, peer * count + end)
        rows.keep(rows.received[some], some)
        linear_into(rows.out[some], rows.received[some], layer)
    if keep:
        windows.local_copies.join()
    rows.finish()
    return rows.out, rows.kept


def tiled(
    windows: ProductWindows, x_shard: torch.Tensor, layer: ProductLayer, parts: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One kernel multiplies all rows; a tile waits for the flag of its rows while other tiles are multiplied.

    A part costs a flag, not a product. This GPU's copies must run concurrently with the kernel, which CUDA does not
    guarantee in a graph; if they do not, the kernel's wait for peers expires.

    Source: Flux (Chang et al., arXiv 2406.06858).
    """
    count, weight = x_shard.shape[0], for_tma(layer.weight)
    slot_rows = windows.tiling.slot_rows(count, parts)
    rows = _Rows(windows, x_shard, len(weight), keep)
    # Send to all peers, part by part.
    for peer in windows.send_order:
        for slot, begin in enumerate(range(0, count, slot_rows)):
            rows.send(peer, begin, min(begin + slot_rows, count), slot)
    # Multiply all rows in the window, this rank's first.
    rows.received[rows.own].copy_(x_shard)
    signals, x = TileSignals(windows.ready[0], slot_rows), rows.received
    product(x, weight, rows.out, windows.rank, windows.own_first, signals, layer.bias, layer.activation, windows.tiling)
    if rows.kept is not None:
        rows.kept.copy_(x)
    rows.finish()
    return rows.out, rows.kept
