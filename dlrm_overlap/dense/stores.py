"""The mean over the ranks of ranges of the flat gradient, by loads and stores of peers' memory.

A rank averages its share of every piece and stores the mean at all ranks (`kernels.dense.all_reduce`). The gradient
itself, or its copy in the type that travels, is in memory that peers read and write:

    step e, rank r           ready e | wait for all's ready | average piece 0 | average piece 1 | ..
    rank r, current stream                                  wait for all's piece 0 | update it | wait for piece 1 | ..

Why nothing is read too late or overwritten too early. In step e, rank r's gradient is touched by others between two of
its own doings: it raises its ready flag when its backward has written the gradient, and it awaits the flag of each
piece from every rank before it uses the piece. Owner w reads and overwrites its share of r's piece after r's ready
flag, which it has awaited, and raises the piece's flag when both are done. So when r has awaited the flags of all
pieces, nobody reads or writes its gradient any more before it raises its ready flag again, and step e + 1 may overwrite
it: in the next backward, which follows those waits on r's stream. Two windows that take turns are not needed.

Why captured steps do not block each other. Flags are raised and awaited in `comm.order`, but for the waits of the
current stream, which run beside the pieces that follow. Such a wait is for flags that every rank raises without waiting
for anything later in the order: what it holds up, where a graph has it in front of a later piece, no other rank needs
in order to raise what it waits for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.kernels.dense.all_reduce import average_share
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, signal_flags, wait_flags

_AWAITED = "dense gradients' flag"
"""names the flag in the error of an expired wait"""


@dataclass(frozen=True)
class Piece:
    """Some lines of the flat gradient, of `LINE` elements each, that are reduced by one launch."""

    begin: int
    end: int
    share: int
    """lines that each rank owns, the last ones fewer, or none"""
    slot: int
    """of the flag that a rank raises once the mean of its share is at all ranks"""

    def lines(self, rank: int) -> int:
        """Return how many lines `rank` owns."""
        return max(0, min(self.share, self.end - self.begin - rank * self.share))

    def first(self, rank: int) -> int:
        """Return the first line that `rank` owns."""
        return min(self.end, self.begin + rank * self.share)


class Range(NamedTuple):
    """A range of the flat gradient whose reduction begins when all of it is there on every rank."""

    ready: int
    """slot of the flag by which a rank says that its gradients are there, and may be overwritten by their mean"""
    pieces: list[Piece]
    """one at least, in order; their slots follow `ready`"""


def cut(ranges: Sequence[tuple[int, int]], piece_elements: int, world_size: int) -> list[Range]:
    """Cut each range of elements, whose borders are multiples of `LINE`, into pieces of about `piece_elements`.

    Slots are numbered in the order in which their flags are raised, so who awaits a slot may as well await all before
    it.

    Example: the range 0 .. 640 elements on two ranks, 256 elements a piece: lines 0 .. 4 and 5 .. 9, of which rank 0
    owns lines 0 .. 2 and 5 .. 7, rank 1 lines 3 .. 4 and 8 .. 9. Slot 0 says that the range is there, slots 1 and 2
    that the pieces are averaged.
    """
    cut_ranges, slot = [], 0
    for begin, end in ranges:
        assert begin % LINE == end % LINE == 0, f"a range {begin} .. {end}, not of whole lines of {LINE}"
        count = max(1, round((end - begin) / piece_elements))
        lines = -(-(end - begin) // LINE // count)
        pieces = []
        for first in range(begin // LINE, max(end // LINE, begin // LINE + 1), max(1, lines)):
            last = min(first + lines, end // LINE)
            pieces.append(Piece(first, last, -(-(last - first) // world_size), slot + 1 + len(pieces)))
        cut_ranges.append(Range(slot, pieces))
        slot += 1 + len(pieces)
    return cut_ranges


class StoreReduction:
    """As `CollectiveReduction`, by kernels; a wait that lasts too long is recorded and stops the GPU.

    See the module, and `kernels.flags`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        ranges: Sequence[tuple[int, int]],
        options: StoreOptions,
    ) -> None:
        """Reduce the gradient of `flat`; makes the memory that peers see, a collective.

        Args:
            flat: the same parameters on all ranks.
            group: of ranks that reach each other's memory.
            dtype: in which gradients travel, float32 or bfloat16; they are added up in float32.
            ranges: of the gradient, whose borders are multiples of `LINE`; every step reduces all, in their order.
            options: alike on all ranks.

        Raises:
            InputError: if there is no room for the memory, or the ranks do not reach each other's.
        """
        self._flat, self._dtype, self._ranges, self._options = flat, dtype, ranges, options
        self._rank, world_size, device = group.rank(), group.size(), flat.device
        self._cut = cut(ranges, options.piece_elements, world_size)
        slots = self._cut[-1].pieces[-1].slot + 1
        elements = flat.gradients.tensor.numel() if dtype == torch.float32 else flat.shared_end
        regions = {"gradients": Region((elements,), dtype), "flags": Region((world_size, slots), torch.int64)}
        try:
            self._arena = open_arena(regions, group, device)
        except InputError as error:
            raise InputError(
                f"train.dense_reduce: stores, but {error}, or take train.dense_reduce collective"
            ) from None
        if dtype == torch.float32:  # the gradient itself travels
            flat.keep_gradients_in(self._arena.local("gradients"))
        self._epochs = Counters(device, 1)
        self.counters: Sequence[Counters] = (self._epochs,)
        """those that a captured step advances"""
        self._record, timeout = DeviceErrorRecord(device), int(options.wait_timeout_s * 1e9)
        local, addresses, clock = self._arena.local("flags"), self._arena.addresses("flags"), self._epochs.each[0].word
        self._counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._flags: list[Flags] = []
        for slot in range(slots):
            counts = torch.full((world_size,), slot + 1, dtype=torch.int32, device=device)
            self._flags.append(Flags(addresses, clock, local, counts, timeout, self._record.status))
        self._arrived = [torch.cuda.Event() for _ in range(slots)]
        gradients = self._arena.addresses("gradients")
        self._shares = {
            piece: gradients + piece.first(self._rank) * LINE * dtype.itemsize
            for _, pieces in self._cut
            for piece in pieces
        }
        """[W] int64 of each piece: where this rank's share is at each rank"""

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        """Reduce a range, up to the flags of its pieces; `arrivals` awaits those."""
        if number == 0:
            self._epochs.each[0].value += 1
        ready, pieces = self._cut[number]
        begin, end = self._ranges[number]
        if self._dtype != torch.float32:  # the gradient itself is not in memory that peers read
            self._arena.local("gradients")[begin:end].copy_(self._flat.gradients.tensor[begin:end])
        signal_flags(self._flags[0], self._rank, ready, self._epochs.each[0].argument)
        self._wait(ready)
        for piece in pieces:
            self._average(piece)

    @torch.no_grad()
    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for one piece after the other, and yield where each ends."""
        for _, pieces in self._cut:
            for piece in pieces:
                torch.cuda.current_stream(self._flat.device).wait_event(self._arrived[piece.slot])
                self._wait(piece.slot)
                begin, end = piece.begin * LINE, piece.end * LINE
                if self._dtype != torch.float32:
                    self._flat.gradients.tensor[begin:end].copy_(self._arena.local("gradients")[begin:end])
                yield end
        if stream is not None:  # which is done by then, but a capture asks for it
            torch.cuda.current_stream(self._flat.device).wait_stream(stream)

    def _average(self, piece: Piece) -> None:
        """Store the mean of this rank's share of a piece to all ranks, then raise the piece's flag."""
        average_share(
            self._shares[piece],
            self._dtype,
            piece.lines(self._rank),
            self._flags[0],
            self._counted,
            self._rank,
            piece.slot,
            self._epochs.each[0].argument,
            self._options.programs,
        )
        self._arrived[piece.slot].record(torch.cuda.current_stream(self._flat.device))

    def _wait(self, slot: int) -> None:
        """Make the current stream wait for all flags up to `slot` of every rank."""
        wait_flags(self._flags[slot], self._rank, self._epochs.each[0].argument)

    def check(self) -> None:
        """Raise the error of a wait that has expired.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._options.wait_timeout_s, _AWAITED)

    def close(self) -> None:
        """Move the gradient back to memory of its own, and give back the memory that peers see.

        Raises the recorded error where a kernel has stopped the GPU.
        """
        try:
            if self._flat.device.type == "cuda":
                torch.cuda.synchronize(self._flat.device)
        except RuntimeError:
            self.check()
            raise
        if self._dtype == torch.float32:
            self._flat.keep_gradients_in(torch.empty_like(self._flat.gradients.tensor))
        self._arena.close()
