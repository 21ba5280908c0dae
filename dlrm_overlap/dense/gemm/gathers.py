"""All-gathers with the product inside: this rank's rows are multiplied at once, the peers' as they come.

Each function runs one way: it takes the windows of its owner, this rank's rows [M / W, K], the layer, a number of
parts, and whether to keep the gathered rows, and returns the layer's output for all rows [M, N] and, if so, these rows
[M, K]. Copy engines send the rows from where they are to the peers' windows, with a flag after each part, since a
product that fills the GPU waits for every multiprocessor that something else holds. Rows that are kept are copied out
of the window, which the next call overwrites.
"""

import torch

from dlrm_overlap.dense.gemm.layer import ProductLayer, cut, linear_into
from dlrm_overlap.dense.gemm.windows import ProductWindows
from dlrm_overlap.kernels.flags import signal_flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import begin_call
from dlrm_overlap.kernels.gemm.product import Signals, laid_out, product


class _Rows:
    """The rows of one call. When this is made, the current stream waits until all windows may be written to."""

    def __init__(self, windows: ProductWindows, x_shard: torch.Tensor, columns: int, keep: bool) -> None:
        """Begin the call, of N `columns`; peers wait for its end from then on, so all its memory is taken before."""
        (rows, inner), ranks, rank = x_shard.shape, windows.world_size, windows.rank
        size = ranks * rows * inner
        window = windows.begin(size * x_shard.dtype.itemsize)
        self.own = slice(rank * rows, (rank + 1) * rows)
        """this rank's rows among those of all ranks"""
        self.out = x_shard.new_empty(ranks * rows, columns)
        """[M, N], for the product"""
        self.kept = x_shard.new_empty(ranks * rows, inner) if keep else None
        """[M, K]"""
        self._windows, self._x_shard = windows, x_shard
        self._at = [window.view("memory", each).view(x_shard.dtype)[:size].view(-1, inner) for each in range(ranks)]
        self.received = self._at[rank]
        """[M, K] in this rank's window, of which peers fill their parts"""
        begin_call(windows.done, rank)
        windows.engine.follow()

    def send(self, peer: int, begin: int, end: int, slot: int) -> None:
        """Let the engine send the own rows [begin, end) to a peer, and raise READY `slot` there after them."""
        windows = self._windows
        windows.engine.copy(self._at[peer][self.own][begin:end], self._x_shard[begin:end])
        windows.engine.write_flag(windows.ready_at[peer][slot : slot + 1], windows.word)

    def keep(self, some: torch.Tensor, at: slice) -> None:
        """Copy rows that are there to where they are kept, if so, beside the current stream."""
        if self.kept is not None:
            self._windows.beside.follow()
            self._windows.beside.copy(self.kept[at], some)

    def finish(self) -> None:
        """Raise DONE at all peers, once the current stream has read all rows, and wait for this rank's sending."""
        signal_flags(self._windows.done, self._windows.rank, 0, 0)
        self._windows.engine.join()


def copied(
    windows: ProductWindows, x_shard: torch.Tensor, layer: ProductLayer, parts: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Products of cuBLAS, before each of which a kernel waits for the flag of its rows.

        current stream | wait for DONE | own rows | wait for r-1 | its rows | wait for r-2 | its rows | .. | DONE
        copy engine    |               | send to r+1, flag | send to r+2, flag | send to r+3, flag, ..
        beside         |               | own rows, if kept |     | rows of r-1, if kept | ..

    Where links bound a call, all products are hidden but the last, so the rows of the last peer are cut; where the
    product bounds it, all copies are, and there is one part, for cuBLAS's sake.

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA.
    """
    count = x_shard.shape[0]
    rows, pieces = _Rows(windows, x_shard, len(layer.weight), keep), cut(count, parts)

    def turns(peers: list[int]) -> list[tuple[int, int, tuple[int, int]]]:
        *early, last = peers
        return [(peer, 0, (0, count)) for peer in early] + [(last, *each) for each in enumerate(pieces)]

    for (peer, slot, piece), event in zip(turns(windows.turns), windows.events, strict=False):
        rows.send(peer, *piece, slot)
        event.record(windows.engine.stream)
    linear_into(rows.out[rows.own], x_shard, layer)
    rows.keep(x_shard, rows.own)
    *_, last = arrivals = windows.turns[::-1]
    for (peer, slot, (begin, end)), event in zip(turns(arrivals), windows.events, strict=False):
        # After this rank's own sending at that turn: a graph that runs its branches one by one must not wait first.
        torch.cuda.current_stream(windows.device).wait_event(event)
        wait_flags(windows.arrived[slot] if peer == last else windows.of_peer[peer], windows.rank, 0)
        some = slice(peer * count + begin, peer * count + end)
        rows.keep(rows.received[some], some)
        linear_into(rows.out[some], rows.received[some], layer)
    if keep:
        windows.beside.join()
    rows.finish()
    return rows.out, rows.kept


def tiled(
    windows: ProductWindows, x_shard: torch.Tensor, layer: ProductLayer, parts: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One kernel multiplies all rows; its tiles wait for the flag of their rows, while other tiles are multiplied.

        current stream | wait for DONE, own rows to the window | own rows, rows of r-1, rows of r-2, .. | DONE
        copy engine    |               | send to r+1, flags | send to r+2, flags | ..

    So a part costs a flag, not a product. The kernel waits for the peers' copies while its own GPU's are to run: in a
    CUDA graph their branch has to run beside the kernel, which CUDA does not promise. Where it does not, the kernel's
    bounded wait expires.

    Source: Flux (Chang et al., arXiv 2406.06858).
    """
    count, weight = x_shard.shape[0], laid_out(layer.weight)
    slot_rows = windows.tiling.slot_rows(count, parts)
    rows = _Rows(windows, x_shard, len(weight), keep)
    for peer in windows.turns:
        for slot, begin in enumerate(range(0, count, slot_rows)):
            rows.send(peer, begin, min(begin + slot_rows, count), slot)
    rows.received[rows.own].copy_(x_shard)
    signals, x = Signals(windows.ready[0], slot_rows), rows.received
    product(x, weight, rows.out, windows.rank, windows.own_first, signals, layer.bias, layer.activation, windows.tiling)
    if rows.kept is not None:
        rows.kept.copy_(x)
    rows.finish()
    return rows.out, rows.kept
