"""Products with their reduce-scatter inside: partial products go to the ranks that own their rows, which add them up.

Functions take this rank's x [M, K], and return a function that, called once, returns the sums [M / W, N]. A rank
multiplies the rows of its peers first. Owners add up in float32, in the order of the ranks, with bias and activation,
part by part as they arrive: the same bits in every call.
"""

import functools
from dataclasses import replace

import torch

from dlrm_overlap.dense.gemm.layer import Finish, ProductLayer, cut, linear_into
from dlrm_overlap.dense.gemm.windows import ProductWindows
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, wait_flags
from dlrm_overlap.kernels.gemm.calls import Parts, begin_call, sum_parts
from dlrm_overlap.kernels.gemm.product import Destinations, TileSignals, for_tma, product


class _Partials:
    """The partial products of one call: those from rank w begin at element w * _lines * `LINE` of the owner's window.

    The constructor makes the current stream wait until all windows may be overwritten. From then on peers wait for the
    end of the call, so all its memory must be allocated before.
    """

    def __init__(self, windows: ProductWindows, x: torch.Tensor, layer: ProductLayer) -> None:
        ranks, self.windows = windows.world_size, windows
        self.rows, self.columns, self._dtype = x.shape[0] // ranks, len(layer.weight), x.dtype
        self._lines = -(-self.rows * self.columns // LINE)
        elements = ranks * self._lines * LINE
        self.window = window = windows.begin(elements * x.dtype.itemsize)
        self._out = x.new_empty(self._lines * LINE)  # sums are stored 16 bytes at a time
        received = window.view("memory", windows.rank).view(x.dtype)[:elements]
        self._parts = Parts(received, self._lines, self._out, self.columns, layer.bias, layer.activation == "relu")
        begin_call(windows.done, windows.rank)

    @property
    def offset_bytes(self) -> int:
        return self.windows.rank * self._lines * LINE * self._dtype.itemsize

    def target(self, owner: int) -> torch.Tensor:
        """Return [M / W, N]: this rank's partial products at `owner`."""
        first = self.windows.rank * self._lines * LINE
        memory = self.window.view("memory", owner).view(self._dtype)
        return memory[first : first + self.rows * self.columns].view(self.rows, self.columns)

    def add_up(self, arrived: Flags, begin: int, end: int) -> None:
        """Make the current stream wait for flags, then add up rows [begin, end) over the ranks; the last rows last."""
        windows, is_last = self.windows, end == self.rows
        wait_flags(arrived, windows.rank, 0)
        sum_parts(self._parts, windows.done, windows.counted, windows.rank, (begin, end), is_last)

    def sums(self) -> torch.Tensor:
        return self._out.resize_(self.rows, self.columns)  # not a view: autograd refuses in-place changes of those


def _finish_sent(
    partials: _Partials, pieces: list[tuple[int, int]], sent: list[torch.cuda.Event], partial: torch.Tensor
) -> torch.Tensor:
    """Add up the pieces as they arrive; the copy engine reads `partial` until it has been joined."""
    windows = partials.windows
    windows.in_progress = False
    for event, arrived, rows in zip(sent, windows.arrived, pieces, strict=False):
        # Wait after this rank's own sending: if a graph runs its branches one by one, waiting first would deadlock.
        torch.cuda.current_stream(partial.device).wait_event(event)
        partials.add_up(arrived, *rows)
    windows.engine.join()
    del partial
    return partials.sums()


def copied(windows: ProductWindows, x: torch.Tensor, layer: ProductLayer, parts: int) -> Finish:
    """Each part of the peers' rows is a product of cuBLAS; a copy engine sends it to its owner, then sets a flag.

        current stream | wait for DONE | rows of r+1 | rows of r+2 | own rows | wait, add up a part | .. | DONE
        copy engine    |                             | send to r+1, flag | send to r+2, flag

    Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA when complete.
    """
    current, partial = torch.cuda.current_stream(windows.device), x.new_empty(x.shape[0], len(layer.weight))
    partials = _Partials(windows, x, layer)
    rows, without_bias, engine = partials.rows, ProductLayer(layer.weight), windows.engine
    # Cut the rows of the first and of the last peer.
    first, *_, last = *windows.send_order, windows.send_order[-1]
    pieces = cut(rows, parts)
    cuts = {first: cut(rows, parts, small_first=True), last: pieces}
    order = [(peer, *piece) for peer in windows.send_order for piece in cuts.get(peer, [(0, rows)])]
    sent = windows.events[-len(pieces) :]
    # Multiply piece after piece, and send each when it is complete.
    for (peer, begin, end), event in zip(order, windows.events, strict=False):
        some = slice(peer * rows + begin, peer * rows + end)
        linear_into(partial[some], x[some], without_bias)
        event.record(current)
        engine.stream.wait_event(event)
        engine.copy(partials.target(peer)[begin:end], partial[some])
        # An owner waits for all rows of its earlier senders together with the first part of its last sender.
        slot = pieces.index((begin, end)) if peer == last else 0
        if peer == last or end == rows:
            engine.write_flag(windows.ready_at[peer][slot : slot + 1], windows.word)
        if peer == last:
            sent[slot].record(engine.stream)
    # This rank's own rows go straight to its window.
    own = slice(windows.rank * rows, (windows.rank + 1) * rows)
    linear_into(partials.target(windows.rank), x[own], without_bias)
    windows.in_progress = True
    return functools.partial(_finish_sent, partials, pieces, sent, partial)


def tiled(windows: ProductWindows, x: torch.Tensor, layer: ProductLayer, parts: int) -> Finish:
    """One kernel multiplies all rows, and stores each tile in the window of its owner, which keeps the links busy.

    Source: Flux (Chang et al., arXiv 2406.06858).
    """
    weight, partials = for_tma(layer.weight), _Partials(windows, x, layer)
    rows, slot_rows = partials.rows, windows.tiling.slot_rows(partials.rows, parts)
    targets = partials.window.addresses("memory") + partials.offset_bytes
    signals, destinations = TileSignals(windows.ready[0], slot_rows), Destinations(targets, windows.tiles)
    product(x, weight, destinations, windows.rank, windows.own_last, signals, tiling=windows.tiling)
    windows.in_progress = True

    def finish() -> torch.Tensor:
        windows.in_progress = False
        for arrived, begin in zip(windows.ready, range(0, rows, slot_rows), strict=False):
            partials.add_up(arrived, begin, min(begin + slot_rows, rows))
        return partials.sums()

    return finish


def triggered(windows: ProductWindows, x: torch.Tensor, layer: ProductLayer, parts: int) -> Finish:
    """One kernel multiplies all rows; copy engines send each part as soon as the kernel has counted all its tiles.

    The kernel computes one peer's rows after the other and stores them in this GPU's memory, so no store waits for a
    link. The program that completes a part sets a word, for which the copy engine waits, without a timeout:

        current stream | wait for DONE | tiles of r+1, of r+2, of r+3, own ones        | wait, add up a part | .. | DONE
        copy engine    |                     | send r+1, flag | send r+2, flag | send r+3, flag

    As in `gathers.tiled`, copies must run concurrently with the kernel.

    Source: T3 (Pati et al., ASPLOS 2024): the tracker counts the tiles of a region, and triggers its DMA.
    """
    partial, weight = x.new_empty(x.shape[0], len(layer.weight)), for_tma(layer.weight)
    partials, words = _Partials(windows, x, layer), windows.words
    rows, engine = partials.rows, windows.engine
    slot_rows = windows.tiling.slot_rows(rows, parts)
    pieces = [(begin, min(begin + slot_rows, rows)) for begin in range(0, rows, slot_rows)]
    # The kernel sets words in this GPU's memory instead of flags at the owners.
    words.zero_()
    engine.follow()
    stored_at = windows.ranks * (rows * len(weight) * partial.itemsize) + partial.data_ptr()
    signals = TileSignals(replace(windows.ready[0], addresses=windows.word_addresses, local=words), slot_rows)
    destinations = Destinations(stored_at, windows.tiles, "remote_first")
    product(x, weight, destinations, windows.rank, windows.own_last, signals, tiling=windows.tiling)
    sent = windows.events[-len(pieces) :]
    # Queue the copies: each waits for its word.
    for peer in windows.send_order:
        target, first = partials.target(peer), peer * rows
        for part, (begin, end) in enumerate(pieces):
            engine.wait_counter(words[peer, part : part + 1], 1)
            engine.copy(target[begin:end], partial[first + begin : first + end])
            if peer == windows.send_order[-1]:
                engine.write_flag(windows.ready_at[peer][part : part + 1], windows.word)
                sent[part].record(engine.stream)
            elif end == rows:  # the owner waits for it together with the first part of its last sender
                engine.write_flag(windows.ready_at[peer][:1], windows.word)
    own = slice(windows.rank * rows, (windows.rank + 1) * rows)
    partials.target(windows.rank).copy_(partial[own])
    windows.in_progress = True
    return functools.partial(_finish_sent, partials, pieces, sent, partial)
