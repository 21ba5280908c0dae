"""Memory that all ranks of a group read and write during a product, its flags and its copy engines.

A call is an epoch e = 1, 2, .., kept in device memory, so captured and eager calls can alternate. Flags are READY e
(rows have arrived) and DONE e (this rank has read all that it reads in call e), both at every rank; they only grow, and
each has one writer.

Before a rank stores to any window in call e, it has waited for DONE e - 1 of every peer. By then every rank has read
all that it reads in call e - 1, and all stores of that call have arrived, since their readers waited for them.
Meanwhile nobody can access a window in call e + 1, which needs DONE e of this rank. So nothing is overwritten too
early.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Arena, Region, open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.device_errors import DeviceErrorRecord, settle
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.product import TILING
from dlrm_overlap.kernels.schedule import staggered_peers

SLOTS = 4
"""READY flags of a rank at each rank, one per part"""
MISSING = "product's part"
_GRANULE_BYTES = 1 << 21  # GPU memory is mapped between ranks in multiples of it


class ProductWindows:
    """The windows, flags and copy engines of one `ParallelProducts`.

    Ranks send to rank + 1, rank + 2, .. in turn, so that no two send to the same rank at a time.
    """

    tiling = TILING

    @torch.inference_mode(False)  # training uses memory that an evaluation allocates
    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """A collective.

        Raises:
            InputError: on every rank, if there is no memory, or the ranks cannot access each other's memory.
        """
        self.group, self.device, self._timeout_s = group, device, timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.send_order = staggered_peers(self.rank, self.world_size)
        """the peers in the order of sending; they send to this rank in the reverse order"""
        self.in_progress = False
        """whether a reduce-scatter is not finished"""
        self.arenas: list[Arena] = []
        """each has one region, memory [size] uint8"""
        # The epoch, and the flags by what is waited for.
        regions = {
            name: Region((self.world_size, slots), torch.int64) for name, slots in (("ready", SLOTS), ("done", 1))
        }
        self._flags, self._record = open_arena(regions, group, device), DeviceErrorRecord(device)
        self.word = torch.zeros(2, dtype=torch.int64, device=device)[:1]
        """[1] int64: the epoch"""
        every = dict.fromkeys(range(self.world_size), 1)
        self.done = self._flags_for("done", every)
        """[W, 1]: peers have finished the previous call"""
        self.ready = [self._flags_for("ready", dict.fromkeys(every, slot + 1)) for slot in range(SLOTS)]
        """[W, SLOTS]; item s waits for the first s + 1 slots of every peer"""
        self.ready_from = {peer: self._flags_for("ready", {peer: 1}) for peer in self.send_order}
        """peer -> READY; waits for its slot 0"""
        last = self.send_order[:1]
        self.arrived = [self._flags_for("ready", every | dict.fromkeys(last, slot + 1)) for slot in range(SLOTS)]
        """item k waits for slot 0 of every peer, and for slots 0 .. k of the last peer that sends to this rank"""
        self.ready_at = [self._flags.view("ready", rank)[self.rank] for rank in range(self.world_size)]
        """[SLOTS] int64 per rank: the flags that this rank sets there"""
        # What kernels count and read.
        self.counted = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32: programs of a kernel that have finished; 0 before and after"""
        self.tiles = torch.zeros(self.world_size * SLOTS, dtype=torch.int32, device=device)
        """[W * SLOTS] int32: scattered tiles of each part; 0 before and after"""
        self.own_first = torch.tensor([self.rank, *self.send_order[::-1]], dtype=torch.int32, device=device)
        """[W] int32: the ranks as their rows arrive"""
        self.own_last = torch.tensor([*self.send_order, self.rank], dtype=torch.int32, device=device)
        """[W] int32: the ranks in the order of sending"""
        self.words = torch.zeros(self.world_size, SLOTS, dtype=torch.int64, device=device)
        """[W, SLOTS] int64: which parts of an owner's rows a kernel has completed"""
        self.ranks = torch.arange(self.world_size, dtype=torch.int64, device=device)
        # A kernel writes element (rank, part) at an owner's address, which is chosen so that it is (owner, part) here.
        self.word_addresses = (self.ranks - self.rank) * SLOTS * self.words.itemsize + self.words.data_ptr()
        # Copies, and the events that order them with the current stream.
        self.engine = CopyEngine(device)
        self.local_copies = CopyEngine(device)
        """copies within this GPU"""
        self.events = [torch.cuda.Event() for _ in range(self.world_size * SLOTS)]

    def _flags_for(self, name: str, slots: Mapping[int, int]) -> Flags:
        counts = [slots.get(rank, 0) * int(rank != self.rank) for rank in range(self.world_size)]
        return Flags(
            addresses=self._flags.addresses(name),
            clock=self.word,
            local=self._flags.local(name),
            counts=torch.tensor(counts, dtype=torch.int32, device=self.device),
            timeout=int(self._timeout_s * 1e9),
            status=self._record.status,
        )

    @torch.inference_mode(False)
    def begin(self, size_bytes: int) -> Arena:
        """Begin a call on the current stream, after the previous one; return the first window that is large enough.

        All ranks get the same window. If none is large enough, one is allocated: a collective that may not be captured,
        with the errors of the constructor.
        """
        assert not self.in_progress, "a reduce-scatter is in progress; finish it before the next product"
        if not any(window.size_bytes >= size_bytes for window in self.arenas):
            size = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
            self.arenas.append(open_arena({"memory": Region((size,), torch.uint8)}, self.group, self.device))
        return next(window for window in self.arenas if window.size_bytes >= size_bytes)

    def check(self) -> None:
        self._record.raise_expired(self._timeout_s, MISSING)

    def close(self) -> None:
        settle(self.group, self.device, self.check)
        for arena in (self._flags, *self.arenas):
            arena.close()
