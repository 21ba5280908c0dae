"""Memory that all ranks of a group read and write in the course of a product, its flags and its copy engine.

A call is an epoch e = 1, 2, .., whose number lies in device memory, so that captured calls and eager ones may follow
each other as they like. Flags are READY e (rows are there) and DONE e (this rank has read all that it reads of the
ranks' memory in call e), both at every rank; they only grow, and each has one writer.

**Why nothing is overwritten too early.** Before a rank stores to anybody's window in call e, its own included, it has
awaited DONE e - 1 of every peer. So every rank has by then read all that it reads in call e - 1, and what was stored
there in that call has arrived, since its readers had awaited it. Nobody can read or store anything of call e + 1
meanwhile: for that, it has to see DONE e of this rank. **Why nobody waits for it.** DONE e - 1 is raised behind the
last copy or the last sum of a call, and awaited at the beginning of the next one, by when it is there unless the peer
is late. A second window would let ranks drift further apart, but which of the two it is would have to be the host's
knowledge, since copies have their addresses from it, and a replayed graph would take the same one twice in a row.
"""

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.record import Record
from dlrm_overlap.dense.gemm.plan import senders
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.publish import CallFlags

SLOTS = 8
"""flags READY of a rank at each rank"""
AWAITED = "product's part"


class Window:
    """One region of the ranks' memory, for one call at a time; making it is a collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity_bytes: int, timeout_s: float) -> None:
        """Allocate it.

        Raises:
            InputError: on every rank, if there is no room, or the ranks do not reach each other's memory.
        """
        self.rank, self.world_size, self.capacity_bytes = group.rank(), group.size(), capacity_bytes
        regions = {
            "ready": Region((self.world_size, SLOTS), torch.int64),
            "done": Region((self.world_size, 1), torch.int64),
            "memory": Region((capacity_bytes,), torch.uint8),
        }
        self._arena = open_arena(regions, group, device)
        self._timeout_s, self._record = timeout_s, Record(device)
        self.word = torch.zeros(2, dtype=torch.int64, device=device)[:1]
        """[1] int64: the epoch"""
        every = dict.fromkeys(range(self.world_size), 1)
        done = self.awaiting("done", every)
        ready = tuple(self.awaiting("ready", dict.fromkeys(every, slot + 1)) for slot in range(SLOTS))
        last = senders(self.rank, self.world_size)[-1:]
        self.arrived = [self.awaiting("ready", every | dict.fromkeys(last, slot + 1)) for slot in range(SLOTS)]
        """number k awaits part k of a reduce-scatter: slot 0 of every peer, slots 0 .. k of the one that sends last"""
        self.flags = CallFlags(done, ready, torch.zeros(1, dtype=torch.int32, device=device))
        self.ready_at = [self._arena.view("ready", rank)[self.rank] for rank in range(self.world_size)]
        """of each rank, [SLOTS] int64: the flags READY that this rank raises there"""
        self.done_at = [self._arena.view("done", rank)[self.rank] for rank in range(self.world_size)]
        """of each rank, [1] int64: the flag DONE that this rank raises there"""
        self.addresses = self._arena.addresses("memory")
        """[W] int64: of each rank's memory"""
        self.engine = CopyEngine(device)
        self.events = [torch.cuda.Event() for _ in range(self.world_size * SLOTS)]
        """a call's own, of parts that follow each other"""
        self.published = torch.cuda.Event()
        """a call's own, behind the flags that say that all rows of all ranks are in their windows"""
        self.beside = CopyEngine(device)
        """for copies within this GPU, which run beside the products"""

    def awaiting(self, name: str, slots: dict[int, int]) -> Flags:
        """Return the flags `name`, ready or done, of which the first `slots` of each peer are awaited."""
        counts = [slots.get(rank, 0) * int(rank != self.rank) for rank in range(self.world_size)]
        return Flags(
            addresses=self._arena.addresses(name),
            clock=self.word,
            local=self._arena.local(name),
            counts=torch.tensor(counts, dtype=torch.int32, device=self.word.device),
            timeout=int(self._timeout_s * 1e9),
            status=self._record.status,
        )

    def at(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of `rank`, flat."""
        whole = self.capacity_bytes // dtype.itemsize * dtype.itemsize
        return self._arena.view("memory", rank)[:whole].view(dtype)

    def check(self) -> None:
        """Raise what a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._timeout_s, AWAITED)

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()
