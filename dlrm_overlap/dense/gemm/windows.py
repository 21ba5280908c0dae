"""Memory that all ranks of a group read and write in the course of a product, its flags and its copy engine.

A call is an epoch e = 1, 2, .., whose number lies in device memory, so that captured calls and eager ones may follow
each other as they like. Flags are READY e (rows are there) and DONE e (this rank has read all that it reads of the
ranks' memory in call e), both at every rank; they only grow, and each has one writer.

**Why nothing is overwritten too early.** Before a rank stores to anybody's window in call e, its own included, it has
waited for DONE e - 1 of every peer. So every rank has by then read all that it reads in call e - 1, and all stores of
that call have arrived, since their readers had waited for them. Nobody can read or store anything of call e + 1
meanwhile: for that, it has to see DONE e of this rank. **Why nobody waits for it.** A rank raises DONE e - 1 after the
last copy or the last sum of a call, and its peers wait for it at the beginning of the next one, by when it is there
unless the peer is late. A second window would let ranks drift further apart, but the CPU would have to know which of
the two it is, since copies get their addresses from it, and a replayed graph would take the same one twice in a row.
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
"""flags READY of a rank at each rank, one a part"""
MISSING = "product's part"
_GRANULE_BYTES = 1 << 21  # of GPU memory that is mapped between ranks


class ProductWindows:
    """The windows of one owner's products, their flags and copy engines. Its calls, of whatever way, follow each other.

    Ranks send to one peer after the other, rank + 1, rank + 2, .., so that at every turn no two send to one rank.
    """

    tiling = TILING
    """of products of our own"""

    @torch.inference_mode(False)  # memory that an evaluation makes serves training, too
    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Make the flags and the engines; a collective.

        Args:
            group: of the W ranks.
            device: of this rank.
            timeout_s: bound of a wait for a peer.

        Raises:
            InputError: on every rank, if there is no room, or the ranks do not reach each other's memory.
        """
        self.group, self.device, self._timeout_s = group, device, timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.turns = staggered_peers(self.rank, self.world_size)
        """the peers, in the order in which this rank sends to them; they turn to it in the opposite order"""
        self.under_way = False
        """whether a reduce-scatter has begun and not been finished"""
        self.each: list[Arena] = []
        """of one region, memory [size] uint8"""
        regions = {
            name: Region((self.world_size, slots), torch.int64) for name, slots in (("ready", SLOTS), ("done", 1))
        }
        self._flags, self._record = open_arena(regions, group, device), DeviceErrorRecord(device)
        self.word = torch.zeros(2, dtype=torch.int64, device=device)[:1]
        """[1] int64: the epoch"""
        every = dict.fromkeys(range(self.world_size), 1)
        self.done = self._waited("done", every)
        """[W, 1]: peers are through with the call before; its clock is the epoch"""
        self.ready = [self._waited("ready", dict.fromkeys(every, slot + 1)) for slot in range(SLOTS)]
        """[W, SLOTS]; a wait for number s is for the first s + 1 slots of every peer"""
        self.of_peer = {peer: self._waited("ready", {peer: 1}) for peer in self.turns}
        """of each peer: a wait is for its slot 0"""
        last = self.turns[:1]
        self.arrived = [self._waited("ready", every | dict.fromkeys(last, slot + 1)) for slot in range(SLOTS)]
        """number k: slot 0 of every peer, slots 0 .. k of the one that is the last to turn to this rank"""
        self.ready_at = [self._flags.view("ready", rank)[self.rank] for rank in range(self.world_size)]
        """of each rank, [SLOTS] int64: the flags that this rank raises there"""
        self.counted = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32: programs of the running kernel that are through; 0 before and after"""
        self.tiles = torch.zeros(self.world_size * SLOTS, dtype=torch.int32, device=device)
        """[W * SLOTS] int32: tiles of each part that a kernel has scattered; 0 before and after"""
        self.own_first = torch.tensor([self.rank, *self.turns[::-1]], dtype=torch.int32, device=device)
        """[W] int32: the ranks in the order in which their rows arrive"""
        self.own_last = torch.tensor([*self.turns, self.rank], dtype=torch.int32, device=device)
        """[W] int32: the ranks in the order in which this one sends to them"""
        self.words = torch.zeros(self.world_size, SLOTS, dtype=torch.int64, device=device)
        """[W, SLOTS] int64: which parts of an owner's rows a kernel has counted as complete"""
        self.ranks = torch.arange(self.world_size, dtype=torch.int64, device=device)
        # A kernel writes element (rank, part) at the address of an owner: here that is element (owner, part).
        self.word_addresses = (self.ranks - self.rank) * SLOTS * self.words.itemsize + self.words.data_ptr()
        self.engine = CopyEngine(device)
        self.beside = CopyEngine(device)
        """for copies within this GPU, which run beside the products"""
        self.events = [torch.cuda.Event() for _ in range(self.world_size * SLOTS)]
        """a call's own, of parts that follow each other"""

    def _waited(self, name: str, slots: Mapping[int, int]) -> Flags:
        """Return the flags `name`, ready or done; a wait for them is for the first slots[w] of each peer w."""
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
        """Begin a call on the current stream, after the one before; return its window, the same one on all ranks.

        That is the first one that is large enough. Where there is none, one is made, which is a collective: so the
        first call of its size may not be captured.

        Raises:
            InputError: on every rank, if there is no room.
        """
        assert not self.under_way, "a product and its reduce-scatter is under way; finish it before another one begins"
        if not any(window.size_bytes >= size_bytes for window in self.each):
            size = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
            self.each.append(open_arena({"memory": Region((size,), torch.uint8)}, self.group, self.device))
        return next(window for window in self.each if window.size_bytes >= size_bytes)

    def check(self) -> None:
        """Raise the error that a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._timeout_s, MISSING)

    def close(self) -> None:
        """Give the memory back, once all that was issued is done. All ranks that have some call this."""
        settle(self.group, self.device, self.check)
        for each in (self._flags, *self.each):
            each.close()
