"""All-gathers with the product inside: this rank's rows are multiplied at once, the peers' as they come.

Each class runs one way, is made with the windows of its owner, and is called with this rank's rows [M / W, K], the
layer, a number of parts, and whether to return the gathered rows, too. Copy engines carry the rows, since a product
that fills the GPU waits for every multiprocessor that something else holds.

Rows that are **read** (`CopiedGather`, `TiledGather`) arrive in ordinary memory, which autograd keeps as long as it
likes, and an event shows that they are there; but a rank has to copy its rows into its window first. Rows that are
**sent** (`PushedGather`) need no such copy, and links carry them faster: 377 GB/s instead of 359 with 64 MB a peer, 333
instead of 319 with 16 (4 x H200). In return they arrive in a window, which the next call overwrites, and a kernel has
to wait for their flag.

Where links bound a call, all products are hidden but the last one, so the last parts are small; where the product
bounds it, all copies are, and parts are large, for cuBLAS's sake: see `plan`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dlrm_overlap.dense.gemm.plan import WHOLE, gathered_parts, halve, head, senders
from dlrm_overlap.dense.gemm.problem import Layer, linear_into
from dlrm_overlap.dense.gemm.windows import SLOTS, Window, Windows
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import begin_call, publish_rows
from dlrm_overlap.kernels.gemm.product import TILING, Signals, gathered_product, laid_out

_SMALL_BYTES = 4 << 20  # a shard up to so large is published at once


class _Rows:
    """The rows of one call: this rank's are published when this is made, the peers' are read part by part."""

    def __init__(self, windows: Windows, x_shard: torch.Tensor, columns: int, first: int, keep: bool) -> None:
        """Begin the call, copy this rank's rows to its window, and let the engine follow when the first are published.

        Args:
            windows: of the owner.
            x_shard: [M / W, K] of this rank, contiguous, at a multiple of 16 bytes.
            columns: N, of the product.
            first: rows of each rank that are published before the others, so that the links need not wait for all.
                The caller reads these of the first peer by themselves.
            keep: whether this rank's rows are to be in `x`, too.
        """
        (rows, inner), ranks, size_bytes = x_shard.shape, windows.world_size, x_shard.numel() * x_shard.dtype.itemsize
        self.window, self._turns, self._count = windows.begin(size_bytes), windows.turns, rows
        self.own = slice(windows.rank * rows, (windows.rank + 1) * rows)
        """this rank's rows among those of all ranks"""
        self.x = x_shard.new_empty(ranks * rows, inner)
        """[M, K]: the rows of all ranks, as they come"""
        self.out = x_shard.new_empty(ranks * rows, columns)
        """[M, N], for the product"""
        self._shards = [self.window.at(rank, x_shard.dtype)[: rows * inner].view(rows, inner) for rank in range(ranks)]
        self._first = min(first, rows) if size_bytes > _SMALL_BYTES else rows
        self._only_first = self._first < rows
        self._publish(x_shard, self.x[self.own] if keep else None)

    def _publish(self, x_shard: torch.Tensor, kept: torch.Tensor | None) -> None:
        window, rows, first = self.window, self._count, self._first
        shard = self._shards[window.rank]
        for slot, (begin, end) in enumerate([(0, first), (first, rows)] if self._only_first else [(0, rows)]):
            some = slice(begin, end)
            also = None if kept is None else kept[some]
            publish_rows(x_shard[some], shard[some], also, window.flags, window.rank, slot)
            if slot == 0:
                window.engine.follow()
        window.published.record(torch.cuda.current_stream(self.x.device))

    def read(self, peer: int, begin: int, end: int) -> None:
        """Let the engine read the rows [begin, end) of a peer's when they are there; in order, the first ones first."""
        if self._only_first and end > self._first:
            self.window.engine.stream.wait_event(self.window.published)
            self._only_first = False
        first = peer * self._count
        self.window.engine.copy(self.x[first + begin : first + end], self._shards[peer][begin:end])

    def finish(self) -> None:
        """Let the engine raise DONE at all peers when it has read all rows, and the current stream wait for it."""
        for peer in self._turns:
            self.window.engine.write_flag(self.window.done_at[peer], self.window.word)
        self.window.engine.join()


class CopiedGather:
    """The copy engine reads the rows of one peer after the other; each part's product waits for its copy, by an event.

        current stream | rows to the window, READY, wait for all | own rows | rows of r^1 | rows of r^2 and r^3
        copy engine    |                                         | read r^1 | read r^2 | read r^3 | DONE

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA.
    """

    parts = (WHOLE, 1, 2, 4, SLOTS)

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __call__(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for all rows [M, N], and the rows [M, K] if `keep`."""
        windows, count = self._windows, x_shard.shape[0]
        rows = _Rows(windows, x_shard, layer.columns, head(count, parts), keep)
        x, out, window = rows.x, rows.out, rows.window
        linear_into(out[rows.own], x_shard, layer)
        for part, event in zip(
            gathered_parts(windows.rank, windows.world_size, count, parts), window.events, strict=False
        ):
            for peer in sorted(part.ranks, key=windows.turns.index):
                rows.read(peer, part.begin, part.end)
            event.record(window.engine.stream)
            torch.cuda.current_stream(windows.device).wait_event(event)
            linear_into(out[part.rows(count)], x[part.rows(count)], layer)
        rows.finish()
        return out, x if keep else None


class PushedGather:
    """A rank sends its rows from where they are, with a flag after them; a kernel waits for it before the product.

        current stream | wait for DONE | own rows | wait for r^1 | its rows | wait for r^2 | its rows | .. | DONE
        copy engine    |               | send to r^1, flag | send to r^2, flag | send to r^3, flag, ..
        beside         |               | own rows, if kept |     | rows of r^1, if kept | ..

    Rows that autograd is to keep are copied out of the window beside the products, which takes memory's time, and
    multiprocessors.
    """

    parts = (1, 2, 4, SLOTS)

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __call__(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for all rows [M, N], and the rows [M, K] if `keep`."""
        (rows, inner), rank, ranks = x_shard.shape, self._windows.rank, self._windows.world_size
        window, size = self._windows.begin(ranks * x_shard.numel() * x_shard.dtype.itemsize), ranks * x_shard.numel()
        gathered = [window.at(each, x_shard.dtype)[:size].view(-1, inner) for each in range(ranks)]
        own, received = rank * rows, gathered[rank]
        out = x_shard.new_empty(ranks * rows, layer.columns)
        kept = x_shard.new_empty(ranks * rows, inner) if keep else None
        begin_call(window.flags, rank)
        window.engine.follow()
        pieces = halve(rows, parts)
        sent = window.events[: ranks - 2 + len(pieces)]
        self._send(window, [each[own : own + rows] for each in gathered], x_shard, pieces, sent)
        linear_into(out[own : own + rows], x_shard, layer)
        _keep(window, kept, x_shard, own)
        for (begin, end, flags), event in zip(self._arrivals(window, rows, pieces), sent, strict=True):
            # After this rank's own sending at that turn: a graph that runs its branches one by one must not wait first.
            torch.cuda.current_stream(self._windows.device).wait_event(event)
            wait_flags(flags, rank, 0)
            _keep(window, kept, received[begin:end], begin)
            linear_into(out[begin:end], received[begin:end], layer)
        if keep:
            window.beside.join()
        raise_flags(window.flags.done, rank, 0, 0)  # this rank has read; its peers wait for the rows that it has sent
        window.engine.join()
        return out, kept

    def _send(
        self,
        window: Window,
        targets: list[torch.Tensor],
        x_shard: torch.Tensor,
        pieces: list[tuple[int, int]],
        sent: list[torch.cuda.Event],
    ) -> None:
        """Send all rows to each peer, to the last one in pieces, a flag and an event after each."""
        *early, last = self._windows.turns
        steps = [(peer, 0, (0, x_shard.shape[0])) for peer in early]
        steps += [(last, slot, piece) for slot, piece in enumerate(pieces)]
        for (peer, slot, (begin, end)), event in zip(steps, sent, strict=True):
            window.engine.copy(targets[peer][begin:end], x_shard[begin:end])
            window.engine.write_flag(window.ready_at[peer][slot : slot + 1], window.word)
            event.record(window.engine.stream)

    def _arrivals(self, window: Window, rows: int, pieces: list[tuple[int, int]]) -> Iterator[tuple[int, int, Flags]]:
        """Yield the rows [begin, end) among all ranks' that arrive at each turn, and their flags."""
        *early, last = senders(window.rank, window.world_size)
        for peer, flags in zip(early, window.of_sender, strict=False):
            yield peer * rows, (peer + 1) * rows, flags
        for (begin, end), flags in zip(pieces, window.arrived, strict=False):
            yield last * rows + begin, last * rows + end, flags


def _keep(window: Window, kept: torch.Tensor | None, rows: torch.Tensor, begin: int) -> None:
    """Copy rows that are there to `kept`, from row `begin` on, beside the current stream."""
    if kept is not None:
        window.beside.follow()
        window.beside.copy(kept[begin : begin + rows.shape[0]], rows)


class TiledGather:
    """One kernel multiplies all rows; its tiles wait for the flag of their rows, while other tiles are multiplied.

    After each part of a peer's rows the copy engine reads a flag that this rank has raised at that peer:

        current stream | rows to the window, READY, wait for all | own rows, rows of r^1, rows of r^2, .. | DONE
        copy engine    |                                         | read r^1, flag | read r^2, flag | ..

    So a part costs a flag, not a product, and there may be many. The kernel waits for copies of the same GPU, with no
    edge between them where a CUDA graph holds both: an edge would end the overlap. So the branch of the copies has to
    run beside the kernel, which CUDA does not promise. Where it does not, the kernel's bounded wait expires.

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
        rows = _Rows(self._windows, x_shard, layer.columns, first=slot_rows, keep=True)
        window = rows.window
        for peer in self._windows.turns:
            for slot, begin in enumerate(range(0, count, slot_rows)):
                rows.read(peer, begin, min(begin + slot_rows, count))
                # Read at the peer, where this rank has raised it: a copy within this GPU would be a kernel.
                window.engine.write_flag(window.read[peer, slot : slot + 1], window.ready_at[peer][:1])
        signals = Signals(replace(window.flags.ready[0], local=window.read), slot_rows)
        gathered_product(
            rows.x, weight, layer.bias, layer.activation, rows.out, window.rank, self._order, signals, self.tiling
        )
        rows.finish()
        return rows.out, rows.x if keep else None
