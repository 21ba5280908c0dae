"""All-to-alls through memory that peers write. Imports Triton, so it cannot be imported on CPUs."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.communications import Communication, Payload
from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.device_errors import DeviceErrorRecord, settle
from dlrm_overlap.kernels.flags import Flags, signal_flags, wait_flags
from dlrm_overlap.kernels.peer_copy import RowFlags, Rows, store_rows
from dlrm_overlap.kernels.schedule import staggered_peers

_TIMEOUT_S = 60.0  # for a wait for a peer
_PRIORITY = -2  # high, so that the storing kernel starts before other work


class PeerMemory:
    """GPU memory that peers write, for the result of one payload at a time.

        current stream | signal FREE e to all, wait for theirs | other work ............... | wait for ARRIVED e of all
        side streams                                           | row to r + 1, flag | row to r + 2, flag | ..

    Rows go to their final position at the peers. `dma`: copy engines write rows and flags. `stores`: one kernel with
    few programs stores rows, and its last program signals.

    Order: a call first advances the epoch e, a word of device memory, so eager calls and replays may mix, in the same
    order on every rank. FREE e is a release after the previous result was read; peers acquire it before they store.
    """

    ways = "dma", "stores"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, elements: int) -> None:
        """Allocate room for results of `elements` float32; a collective.

        An InputError if the ranks cannot access each other's memory.
        """
        ranks, self._rank = group.size(), group.rank()
        regions = {name: Region((ranks, 1), torch.int64) for name in ("free", "arrived")}
        self._arena = open_arena(regions | {"memory": Region((elements,), torch.float32)}, group, device)
        self._group, self._record = group, DeviceErrorRecord(device)
        self._word = torch.zeros(2, dtype=torch.int64, device=device)[:1]  # the epoch
        # A rank's own row needs no flag: its stream is joined.
        others = [int(rank != self._rank) for rank in range(ranks)]
        self._free, self._arrived = self._flags("free", [1] * ranks), self._flags("arrived", others)
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_flags = RowFlags(self._arrived.addresses, counted, self._word)
        self._engine, self._side = CopyEngine(device), CopyEngine(device, _PRIORITY)

    def _flags(self, name: str, counts: list[int]) -> Flags:
        return Flags(
            addresses=self._arena.addresses(name),
            clock=self._word,
            local=self._arena.local(name),
            counts=torch.tensor(counts, dtype=torch.int32, device=self._arena.device),
            timeout=int(_TIMEOUT_S * 1e9),
            status=self._record.status,
        )

    def call(self, payload: Payload, way: str) -> Communication:
        source, row_bytes, rank = payload.input, 4 * payload.part, self._rank
        peers = range(payload.world_size)
        views = [self._arena.view("memory", peer)[: source.numel()].view(source.shape) for peer in peers]
        flags = [self._arena.view("arrived", peer)[rank] for peer in peers]
        targets = self._arena.addresses("memory")
        rows = Rows(source, row_bytes, row_bytes, targets, rank * row_bytes, own=True)

        def begin() -> Callable[[], object]:
            self._word.add_(1)
            signal_flags(self._free, rank, 0, 0)
            wait_flags(self._free, rank, 0)
            self._side.follow()
            if way == "stores":
                with torch.cuda.stream(self._side.stream):
                    store_rows(rows, self._row_flags, rank)
                return wait
            self._engine.follow()
            for peer in staggered_peers(rank, payload.world_size):
                self._engine.copy(views[peer][rank], source[peer])
                self._engine.write_flag(flags[peer], self._word)
            self._side.copy(views[rank][rank], source[rank])
            return wait

        def wait() -> None:
            self._side.join()
            if way == "dma":
                self._engine.join()
            wait_flags(self._arrived, rank, 0)

        return Communication(payload, views[rank], begin)

    def close(self) -> None:
        """Free the memory once all issued work is done; a collective that raises the ExchangeTimeoutError of a wait."""
        settle(self._group, self._arena.device, lambda: self._record.raise_expired(_TIMEOUT_S, "collective's flag"))
        self._arena.close()
