"""All-gathers with the product inside: this rank's rows are multiplied at once, the peers' as they come.

Each class runs one way, is made with the windows of its owner, and is called with this rank's rows [M / W, K], the
layer, a number of parts, and whether to return the gathered rows, too. Copy engines send the rows from where they are
to the peers' windows, with a flag after each part, since a product that fills the GPU waits for every multiprocessor
that something else holds. Rows that autograd is to keep are copied out of the window, which the next call overwrites.
"""

import torch

from dlrm_overlap.dense.gemm.plan import WHOLE, halve, senders
from dlrm_overlap.dense.gemm.problem import Layer, linear_into
from dlrm_overlap.dense.gemm.windows import SLOTS, Windows
from dlrm_overlap.kernels.flags import raise_flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import begin_call
from dlrm_overlap.kernels.gemm.product import TILING, Signals, gathered_product, laid_out


class _Rows:
    """The rows of one call. When this is made, the current stream waits until all windows may be written to."""

    def __init__(self, windows: Windows, x_shard: torch.Tensor, columns: int, keep: bool) -> None:
        """Begin the call; peers wait for its end from then on, so all its memory is taken before.

        Args:
            windows: of the owner.
            x_shard: [M / W, K] of this rank, contiguous, at a multiple of 16 bytes.
            columns: N, of the product.
            keep: whether the rows of all ranks are to outlast the call.
        """
        (rows, inner), ranks = x_shard.shape, windows.world_size
        size = ranks * rows * inner
        self.window = window = windows.begin(size * x_shard.dtype.itemsize)
        self.own = slice(window.rank * rows, (window.rank + 1) * rows)
        """this rank's rows among those of all ranks"""
        self.out = x_shard.new_empty(ranks * rows, columns)
        """[M, N], for the product"""
        self.kept = x_shard.new_empty(ranks * rows, inner) if keep else None
        """[M, K], to be filled by the caller"""
        self._x_shard = x_shard
        self._at = [window.at(rank, x_shard.dtype)[:size].view(-1, inner) for rank in range(ranks)]
        self.received = self._at[window.rank]
        """[M, K] in this rank's window, of which peers fill their parts"""
        begin_call(window.done, window.rank)
        window.engine.follow()

    def send(self, peer: int, begin: int, end: int, slot: int) -> None:
        """Let the engine send the own rows [begin, end) to a peer, and raise READY `slot` there after them."""
        engine, window = self.window.engine, self.window
        engine.copy(self._at[peer][self.own][begin:end], self._x_shard[begin:end])
        engine.write_flag(window.ready_at[peer][slot : slot + 1], window.word)

    def finish(self) -> None:
        """Raise DONE at all peers, once the current stream has read all rows, and wait for this rank's sending."""
        raise_flags(self.window.done, self.window.rank, 0, 0)
        self.window.engine.join()


class CopiedGather:
    """Products of cuBLAS, before each of which a kernel waits for the flag of its rows.

        current stream | wait for DONE | own rows | wait for r^1 | its rows | wait for r^2 | its rows | .. | DONE
        copy engine    |               | send to r^1, flag | send to r^2, flag | send to r^3, flag, ..
        beside         |               | own rows, if kept |     | rows of r^1, if kept | ..

    Where links bound a call, all products are hidden but the last, so the rows of the last peer are halved; where the
    product bounds it, all copies are, and there is one part, for cuBLAS's sake.

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA.
    """

    parts = (WHOLE, 1, 2, 4, SLOTS)

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __call__(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for all rows [M, N], and the rows [M, K] if `keep`."""
        count, (*early, last) = x_shard.shape[0], self._windows.turns
        rows = _Rows(self._windows, x_shard, layer.columns, keep)
        window, beside = rows.window, rows.window.beside
        pieces = halve(count, parts)
        steps = [(peer, 0, (0, count)) for peer in early] + [(last, *each) for each in enumerate(pieces)]
        for (peer, slot, piece), event in zip(steps, window.events, strict=False):
            rows.send(peer, *piece, slot)
            event.record(window.engine.stream)
        linear_into(rows.out[rows.own], x_shard, layer)
        if rows.kept is not None:
            beside.follow()
            beside.copy(rows.kept[rows.own], x_shard)
        *early, last = senders(window.rank, window.world_size)
        turns = [(peer, (0, count)) for peer in early] + [(last, piece) for piece in pieces]
        arrivals = [*window.of_sender[:-1], *window.arrived]
        for (peer, piece), flags, event in zip(turns, arrivals, window.events, strict=False):
            # After this rank's own sending at that turn: a graph that runs its branches one by one must not wait first.
            torch.cuda.current_stream(self._windows.device).wait_event(event)
            wait_flags(flags, window.rank, 0)
            some = slice(peer * count + piece[0], peer * count + piece[1])
            if rows.kept is not None:
                beside.follow()
                beside.copy(rows.kept[some], rows.received[some])
            linear_into(rows.out[some], rows.received[some], layer)
        if keep:
            beside.join()
        rows.finish()
        return rows.out, rows.kept


class TiledGather:
    """One kernel multiplies all rows; its tiles wait for the flag of their rows, while other tiles are multiplied.

        current stream | wait for DONE, own rows to the window | own rows, rows of r^1, rows of r^2, .. | DONE
        copy engine    |               | send to r^1, flags | send to r^2, flags | ..

    So a part costs a flag, not a product, and there may be many. The kernel waits for the peers' copies while its own
    GPU's are to run: in a CUDA graph their branch has to run beside the kernel, which CUDA does not promise. Where it
    does not, the kernel's bounded wait expires.

    Source: Flux (Chang et al., arXiv 2406.06858).
    """

    parts = (1, 2, 4, SLOTS)
    tiling = TILING

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._order = torch.tensor([windows.rank, *windows.turns], dtype=torch.int32, device=windows.device)

    def __call__(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for all rows [M, N], and the rows [M, K] if `keep`."""
        count, weight = x_shard.shape[0], laid_out(layer.weight)
        slot_rows = self.tiling.slot_rows(count, parts)
        rows = _Rows(self._windows, x_shard, layer.columns, keep)
        for peer in self._windows.turns:
            for slot, begin in enumerate(range(0, count, slot_rows)):
                rows.send(peer, begin, min(begin + slot_rows, count), slot)
        rows.received[rows.own].copy_(x_shard)
        signals = Signals(rows.window.ready[0], slot_rows)
        gathered_product(
            rows.received, weight, layer.bias, layer.activation, rows.out, rows.window.rank, self._order, signals,
            self.tiling,
        )  # fmt: skip
        if rows.kept is not None:
            rows.kept.copy_(rows.received)
        rows.finish()
        return rows.out, rows.kept
