"""Products with their reduce-scatter inside: partial products go to the ranks that own their rows, who add them up.

Each class runs one way, is made with the windows of its owner, and is called with this rank's x [M, K], the layer, and
a number of parts; the function that it returns, called once, returns the sums [M / W, N]. A rank multiplies the rows
that peers own first, and its own last. Owners add up in float32, in the order of the ranks, with bias and activation in
the same pass, part by part as they arrive. So results repeat their bits.
"""

import functools
from dataclasses import replace

import torch

from dlrm_overlap.dense.gemm.problem import Finish, Layer, double, halve, linear_into
from dlrm_overlap.dense.gemm.windows import SLOTS, Windows
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import Parts, begin_call, sum_parts
from dlrm_overlap.kernels.gemm.product import TILING, Destinations, Signals, laid_out, scattered_product


class _Partials:
    """The partial products of one call, in windows: rank w's lie in every owner's window from line w * lines on.

    When this is made, the current stream waits until all windows may be written to. Peers wait for the end of the call
    from then on, so who makes it has taken all other memory of the call before.
    """

    def __init__(self, windows: Windows, x: torch.Tensor, layer: Layer) -> None:
        ranks, self.windows = windows.world_size, windows
        self.rows, self.columns, self._dtype = x.shape[0] // ranks, layer.columns, x.dtype
        self._lines = -(-self.rows * self.columns // LINE)
        elements = ranks * self._lines * LINE
        self.window = window = windows.begin(elements * x.dtype.itemsize)
        self._out = x.new_empty(self._lines * LINE)  # sums are stored 16 bytes at a time
        received = window.view("memory", windows.rank).view(x.dtype)[:elements]
        self._parts = Parts(received, self._lines, self._out, self.columns, layer.bias, layer.activation == "relu")
        begin_call(windows.done, windows.rank)

    @property
    def offset_bytes(self) -> int:
        """Where this rank's partial products begin in every window."""
        return self.windows.rank * self._lines * LINE * self._dtype.itemsize

    def target(self, owner: int) -> torch.Tensor:
        """Return where this rank's partial products lie at `owner`, [M / W, N]."""
        first = self.windows.rank * self._lines * LINE
        memory = self.window.view("memory", owner).view(self._dtype)
        return memory[first : first + self.rows * self.columns].view(self.rows, self.columns)

    def add_up(self, arrived: Flags, begin: int, end: int) -> None:
        """Wait for some flags, and add up the rows [begin, end) of all ranks; the last row is in the last call."""
        windows, is_last = self.windows, end == self.rows
        wait_flags(arrived, windows.rank, 0)
        sum_parts(self._parts, windows.done, windows.counted, windows.rank, (begin, end), is_last)

    def sums(self) -> torch.Tensor:
        """Return the sums [M / W, N], once all rows have been added up."""
        return self._out.resize_(self.rows, self.columns)  # no view, which autograd would let nobody change in place


def _finish_sent(
    partials: _Partials, pieces: list[tuple[int, int]], sent: list[torch.cuda.Event], partial: torch.Tensor
) -> torch.Tensor:
    """Add up the pieces as they arrive; the engine reads `partial` until it has been joined."""
    windows = partials.windows
    windows.under_way = False
    for event, arrived, rows in zip(sent, windows.arrived, pieces, strict=False):
        # After this rank's own sending of it: a graph that runs its branches one by one must not wait first.
        torch.cuda.current_stream(partial.device).wait_event(event)
        partials.add_up(arrived, *rows)
    windows.engine.join()
    del partial
    return partials.sums()


class CopiedScatter:
    """Each part of the peers' rows is a product of cuBLAS; a copy engine sends it to its owner, with a flag after it.

        current stream | wait for DONE | rows of r+1 | rows of r+2 | own rows | wait, add up a part | .. | DONE
        copy engine    |                             | send to r+1, flag | send to r+2, flag

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA when they are
    complete; here each chunk is a product of its own, so the stream shows when it is.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __call__(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply the peers' rows and send them, then multiply this rank's."""
        windows, current = self._windows, torch.cuda.current_stream(self._windows.device)
        partial = x.new_empty(x.shape[0], layer.columns)
        partials = _Partials(windows, x, layer)
        rows, product, engine = partials.rows, Layer(layer.weight), windows.engine
        first, *_, last = *windows.turns, windows.turns[-1]
        pieces = halve(rows, parts)
        cuts = {first: double(rows, parts), last: pieces}
        turns = [(peer, *piece) for peer in windows.turns for piece in cuts.get(peer, [(0, rows)])]
        sent = windows.events[-len(pieces) :]
        for (peer, begin, end), event in zip(turns, windows.events, strict=False):
            some = slice(peer * rows + begin, peer * rows + end)
            linear_into(partial[some], x[some], product)
            event.record(current)
            engine.stream.wait_event(event)
            engine.copy(partials.target(peer)[begin:end], partial[some])
            # A peer waits for all of an early sender's rows with the first part of its last sender's.
            slot = pieces.index((begin, end)) if peer == last else 0
            if peer == last or end == rows:
                engine.write_flag(windows.ready_at[peer][slot : slot + 1], windows.word)
            if peer == last:
                sent[slot].record(engine.stream)
        own = slice(windows.rank * rows, (windows.rank + 1) * rows)
        linear_into(partials.target(windows.rank), x[own], product)
        windows.under_way = True
        return functools.partial(_finish_sent, partials, pieces, sent, partial)


class TiledScatter:
    """One kernel multiplies all rows, and stores each tile in the window of the rank that owns its rows.

    So links are busy as long as the product runs, and no partial product is read again here:

        current stream | wait for DONE | tiles of all ranks in turn, flags after each part | wait, add up a part | ..

    Source: Flux (Chang et al., arXiv 2406.06858).
    """

    tiling = TILING

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._order, self._done = _tile_order_and_counts(windows)

    def __call__(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply all rows and store them at their owners."""
        weight = laid_out(layer.weight)
        partials = _Partials(self._windows, x, layer)
        windows, rows = self._windows, partials.rows
        slot_rows = self.tiling.slot_rows(rows, parts)
        signals = Signals(windows.ready[0], slot_rows)
        destinations = Destinations(partials.window.addresses("memory") + partials.offset_bytes, self._done)
        scattered_product(x, weight, windows.rank, self._order, signals, destinations, self.tiling)
        windows.under_way = True

        def finish() -> torch.Tensor:
            windows.under_way = False
            for arrived, begin in zip(windows.ready, range(0, rows, slot_rows), strict=False):
                partials.add_up(arrived, begin, min(begin + slot_rows, rows))
            return partials.sums()

        return finish


class TriggeredScatter:
    """One kernel multiplies all rows; copy engines send each part as soon as the kernel has counted all its tiles.

    The kernel goes through the rows of one peer after the other and stores them in this GPU's memory, so that no store
    waits for a link. The program that completes a part writes a word, for which the copy engine waits:

        current stream | wait for DONE | tiles of r+1, of r+2, of r+3, own ones        | wait, add up a part | .. | DONE
        copy engine    |                     | send r+1, flag | send r+2, flag | send r+3, flag

    So a part costs a word, not a product. Copies and kernel have to run side by side, also in a CUDA graph, as in
    `gathers.TiledGather`; here the copies wait, and they have no bound of their own.

    Source: T3 (Pati et al., ASPLOS 2024): the tracker counts the tiles of a region, and triggers its DMA; regions are
    staggered by rank.
    """

    tiling = TILING

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._order, self._done = _tile_order_and_counts(windows)
        self._words = torch.zeros(windows.world_size, SLOTS, dtype=torch.int64, device=windows.device)
        # The kernel writes element (rank, part) at the address of an owner: here that is element (owner, part).
        self._owners = torch.arange(windows.world_size, dtype=torch.int64, device=windows.device)
        self._addresses = (self._owners - windows.rank) * SLOTS * self._words.itemsize + self._words.data_ptr()

    def __call__(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply all rows, and send each part of the peers' when it is complete."""
        windows, partial, weight = self._windows, x.new_empty(x.shape[0], layer.columns), laid_out(layer.weight)
        partials = _Partials(windows, x, layer)
        rows, engine = partials.rows, windows.engine
        slot_rows = self.tiling.slot_rows(rows, parts)
        pieces = [(begin, min(begin + slot_rows, rows)) for begin in range(0, rows, slot_rows)]
        self._words.zero_()
        engine.follow()
        flags = replace(windows.ready[0], addresses=self._addresses, local=self._words)
        stored_at = self._owners * (rows * layer.columns * partial.itemsize) + partial.data_ptr()
        destinations = Destinations(stored_at, self._done, "remote_first")
        signals = Signals(flags, slot_rows)
        scattered_product(x, weight, windows.rank, self._order, signals, destinations, self.tiling)
        sent = windows.events[-len(pieces) :]
        for peer in windows.turns:
            target, first = partials.target(peer), peer * rows
            for part, (begin, end) in enumerate(pieces):
                engine.wait_counter(self._words[peer, part : part + 1], 1)
                engine.copy(target[begin:end], partial[first + begin : first + end])
                if peer == windows.turns[-1]:
                    engine.write_flag(windows.ready_at[peer][part : part + 1], windows.word)
                    sent[part].record(engine.stream)
                elif end == rows:  # its owner waits for it with the first part of the last sender's
                    engine.write_flag(windows.ready_at[peer][:1], windows.word)
        own = slice(windows.rank * rows, (windows.rank + 1) * rows)
        partials.target(windows.rank).copy_(partial[own])
        windows.under_way = True
        return functools.partial(_finish_sent, partials, pieces, sent, partial)


def _tile_order_and_counts(windows: Windows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of the owners in a kernel that scatters, and its counts of the tiles of each part."""
    order = torch.tensor([*windows.turns, windows.rank], dtype=torch.int32, device=windows.device)
    return order, torch.zeros(windows.world_size * SLOTS, dtype=torch.int32, device=windows.device)
