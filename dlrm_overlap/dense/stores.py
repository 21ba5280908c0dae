"""The mean of ranges of the flat gradient over the ranks, by loads and stores of peers' memory.

Each rank averages its share of every piece, and stores the mean at all ranks (`kernels.dense.all_reduce`). The
gradient itself, or a copy in the dtype that is sent, is in shared memory:

    step e, rank r           ready e | wait for all ready flags | average piece 0 | average piece 1 | ..
    rank r, current stream                          wait for all flags of piece 0 | update it | wait for piece 1 | ..

**One buffer is enough.** An owner accesses its share of rank r's piece after r's ready flag, and signals the piece's
flag afterwards. So when r has waited for all flags of all pieces, no peer accesses its gradient before its next ready
flag, and r's next backward follows these waits on its stream.

**Captured steps do not deadlock.** Signals and waits are in `comm.order`, except the current stream's waits. A graph
may execute such a wait before a later piece, but every rank signals its flags without waiting for anything later in the
order.
"""

from collections.abc import Iterator, Mapping, Sequence
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

_FLAG_NAME = "dense gradients' flag"


@dataclass(frozen=True)
class GradientPiece:
    """Lines of the flat gradient, `LINE` elements each, that one launch reduces."""

    begin: int
    end: int
    share: int
    """lines per rank; the last ranks may have fewer"""
    slot: int
    """index of the flag that signals that the mean is at all ranks"""

    def lines(self, rank: int) -> int:
        return max(0, min(self.share, self.end - self.begin - rank * self.share))

    def first(self, rank: int) -> int:
        return min(self.end, self.begin + rank * self.share)


class Range(NamedTuple):
    """A range of the flat gradient that is reduced when every rank has all of it."""

    ready: int
    """index of the flag that signals that a rank's gradients may be read and replaced by the mean"""
    pieces: list[GradientPiece]
    """at least one; their slots follow `ready`"""


def cut(ranges: Sequence[tuple[int, int]], piece_elements: int, world_size: int) -> list[Range]:
    """Cut ranges of elements, multiples of `LINE`, into pieces of about `piece_elements`.

    Slots are numbered in the order of their signals, so a wait for a slot may include all before it.

    Example: the range 0 .. 640 on two ranks, 256 elements per piece, becomes lines 0 .. 4 (rank 0 owns 0 .. 2) and 5 ..
    9 (rank 0 owns 5 .. 7). Slot 0 is the ready flag, slots 1 and 2 are the pieces' flags.
    """
    cut_ranges, slot = [], 0
    for begin, end in ranges:
        assert begin % LINE == end % LINE == 0, f"range {begin} .. {end} must consist of lines of {LINE} elements"
        count = max(1, round((end - begin) / piece_elements))
        lines = -(-(end - begin) // LINE // count)
        pieces = []
        for first in range(begin // LINE, max(end // LINE, begin // LINE + 1), max(1, lines)):
            last = min(first + lines, end // LINE)
            pieces.append(GradientPiece(first, last, -(-(last - first) // world_size), slot + 1 + len(pieces)))
        cut_ranges.append(Range(slot, pieces))
        slot += 1 + len(pieces)
    return cut_ranges


class StoreReduction:
    """Averages ranges of the flat gradient over the ranks, by kernels that load from and store to peers' memory.

    It has the methods of `CollectiveReduction`. A wait that expires is recorded, and stops the GPU.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        ranges: Sequence[tuple[int, int]],
        options: StoreOptions,
        more_regions: Mapping[str, Region] | None = None,
    ) -> None:
        """A collective, which allocates shared memory.

        Args:
            group: ranks that reach each other's memory.
            dtype: float32 or bfloat16, in which gradients are sent; sums are float32.
            ranges: [begin, end) in elements, multiples of `LINE`; every step reduces all ranges, in order.
            options: the same on all ranks.
            more_regions: additional shared memory, for subclasses.

        Raises:
            InputError: if shared memory cannot be allocated or reached.
        """
        self._flat, self._dtype, self._ranges, self._options = flat, dtype, ranges, options
        self._rank, world_size, device = group.rank(), group.size(), flat.device
        self._cut = cut(ranges, options.piece_elements, world_size)
        slots = self._cut[-1].pieces[-1].slot + 1
        # Shared memory: the gradient or a copy, and a flag for each rank and slot.
        elements = flat.gradients.tensor.numel() if dtype == torch.float32 else flat.shared_end
        regions = {"gradients": Region((elements,), dtype), "flags": Region((world_size, slots), torch.int64)}
        regions |= more_regions or {}
        try:
            self._arena = open_arena(regions, group, device)
        except InputError as error:
            raise InputError(
                f"train.dense_reduce: stores, but {error}, or take train.dense_reduce collective"
            ) from None
        if dtype == torch.float32:  # peers access the gradient itself
            flat.keep_gradients_in(self._arena.local("gradients"))
        self._epochs = Counters(device, 1)
        self.counters: Sequence[Counters] = (self._epochs,)
        self._record, timeout = DeviceErrorRecord(device), int(options.wait_timeout_s * 1e9)
        # Arguments of the kernels: flags, and where this rank's shares are at each rank.
        local, addresses, clock = self._arena.local("flags"), self._arena.addresses("flags"), self._epochs.each[0].word
        self._programs_done = torch.zeros(1, dtype=torch.int32, device=device)
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
        """piece -> [W] int64: addresses of this rank's share at each rank"""

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        if number == 0:
            self._epochs.each[0].value += 1
        ready, pieces = self._cut[number]
        begin, end = self._ranges[number]
        if self._dtype != torch.float32:  # peers access a copy
            self._arena.local("gradients")[begin:end].copy_(self._flat.gradients.tensor[begin:end])
        signal_flags(self._flags[0], self._rank, ready, self._epochs.each[0].argument)
        self._wait(ready)
        for piece in pieces:
            self._average(piece)

    @torch.no_grad()
    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for one piece at a time, and yield the piece's end in elements."""
        for _, pieces in self._cut:
            for piece in pieces:
                torch.cuda.current_stream(self._flat.device).wait_event(self._arrived[piece.slot])
                self._wait(piece.slot)
                begin, end = piece.begin * LINE, piece.end * LINE
                if self._dtype != torch.float32:
                    self._flat.gradients.tensor[begin:end].copy_(self._arena.local("gradients")[begin:end])
                yield end
        if stream is not None:  # it has finished, but a capture requires the streams to join
            torch.cuda.current_stream(self._flat.device).wait_stream(stream)

    def _average(self, piece: GradientPiece) -> None:
        average_share(
            self._shares[piece],
            self._dtype,
            piece.lines(self._rank),
            self._flags[0],
            self._programs_done,
            self._rank,
            piece.slot,
            self._epochs.each[0].argument,
            self._options.programs,
        )
        self._arrived[piece.slot].record(torch.cuda.current_stream(self._flat.device))

    def _wait(self, slot: int) -> None:
        wait_flags(self._flags[slot], self._rank, self._epochs.each[0].argument)

    def check(self) -> None:
        """Raise `ExchangeTimeoutError` if a wait has expired."""
        self._record.raise_expired(self._options.wait_timeout_s, _FLAG_NAME)

    def close(self) -> None:
        """Move the gradient back to its own memory, and free the shared memory.

        Waits for the GPU. Raises `ExchangeTimeoutError` if an expired wait has stopped it.
        """
        try:
            if self._flat.device.type == "cuda":
                torch.cuda.synchronize(self._flat.device)
        except RuntimeError:
            self.check()
            raise
        self._leave_shared_memory()
        self._arena.close()

    def _leave_shared_memory(self) -> None:
        if self._dtype == torch.float32:
            self._flat.keep_gradients_in(torch.empty_like(self._flat.gradients.tensor))
