"""Communications between all ranks: their bytes, and their implementations by collectives and in peers' memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import greatest
from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.record import Record, settle
from dlrm_overlap.dense.gemm.serial import all_gather
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags
from dlrm_overlap.kernels.peer_copy import RowFlags, Rows, store_rows
from dlrm_overlap.kernels.schedule import staggered_peers

WAYS = ("dma", "stores")
_PERIOD = 61  # of the contents
_TIMEOUT_S = 60.0  # of a wait for a peer
_PRIORITY = -2  # a kernel of stores does not wait for other work that is ready


class Payload:
    """The bytes of a communication of one kind and size on one rank, in float32.

    There are W rows of `part` elements: of an `all_to_all` its input and its output, each with the rank's own row; of
    an `all_gather` its output. The contents are made by formula, so every rank knows its result.
    """

    def __init__(self, kind: str, part: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.kind, self.part, self.group, self.device = kind, part, group, device
        self.rank, self.world_size = group.rank(), group.size()
        self.shape = self.world_size, part
        """of the result"""
        numbers = torch.arange(part, dtype=torch.int32, device=device)
        ranks = range(self.world_size)

        def content(sender: int, row: int) -> torch.Tensor:
            return ((numbers + 3 * sender + 5 * row) % _PERIOD).float()

        if kind == "all_gather":
            self.input = content(self.rank, 0)
            self.expected = torch.stack([content(sender, 0) for sender in ranks])
        else:
            self.input = torch.stack([content(self.rank, row) for row in ranks])
            self.expected = torch.stack([content(sender, self.rank) for sender in ranks])

    @property
    def link_bytes(self) -> int:
        """Bytes that leave a rank for its peers, by an implementation that sends each only once."""
        return (self.world_size - 1) * self.part * 4

    def input_of(self, result: torch.Tensor) -> torch.Tensor:
        """Return the input. An all-gather finds it in the result, where the own part then stays."""
        return self.input if self.kind == "all_to_all" else result[self.rank]


@dataclass
class Communication:
    """One implementation of a payload's communication. All ranks make the same calls."""

    payload: Payload
    result: torch.Tensor
    """[W, n]"""
    begin: Callable[[], Callable[[], object]]
    """issues the communication from the current stream on; returns a function that makes that stream wait for it"""

    def run(self) -> None:
        """Issue the communication and wait for it on the current stream."""
        self.begin()()

    def is_right(self, run: Callable[[], object]) -> bool:
        """Return whether `run`, which is this or a replay of it, leaves the right result on this rank. A collective."""
        payload = self.payload
        self.result.fill_(torch.nan)
        payload.input_of(self.result).view(-1).copy_(payload.input.view(-1))
        dist.barrier(payload.group)  # no rank writes into a result that is yet to be destroyed
        run()
        return torch.equal(self.result, payload.expected)


def by_collective(payload: Payload) -> Communication:
    """Return the collective of the payload's group: NCCL's kernel on its own stream, or gloo's threads on a CPU."""
    result = payload.input.new_empty(payload.shape)
    source = payload.input_of(result)

    def begin() -> Callable[[], object]:
        if payload.kind == "all_to_all":
            work = dist.all_to_all_single(result, source, group=payload.group, async_op=True)
        else:
            work = all_gather(result.view(-1), source, group=payload.group, async_op=True)
        assert work is not None, "it is asynchronous"
        return work.wait

    return Communication(payload, result, begin)


class PeerMemory:
    """Memory of GPUs that peers write, for the results of all payloads one after the other.

    Each rank writes its rows where they belong at the peers. Between two flags of each pair of ranks a call goes so:

        current stream | raise FREE e at all, await theirs | whatever else ................... | await ARRIVED e of all
        side streams                                       | row to r + 1, flag | row to r + 2, flag | .. |

    `dma`: copy engines write the rows and, after each, its flag; so no multiprocessor works, but for the two ends.
    `stores`: one kernel of a few programs stores the rows, and the program that ends last raises the flags.

    The epoch e lies in one word of the device's memory. A call begins by advancing it, and all else reads it, so eager
    calls, captured ones and replays may follow each other, the same on every rank. FREE e of rank r is a release, on
    the stream that has read r's result of before, and its peers store rows of e only after they have acquired it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, elements: int) -> None:
        """Make room for results of `elements` float32; a collective.

        Raises:
            InputError: if the ranks do not reach each other's memory.
        """
        ranks, self._rank = group.size(), group.rank()
        regions = {name: Region((ranks, 1), torch.int64) for name in ("free", "arrived")}
        self._arena = arena = open_arena(regions | {"memory": Region((elements,), torch.float32)}, group, device)
        self._group, self._record = group, Record(device)
        self._word = torch.zeros(2, dtype=torch.int64, device=device)[:1]  # the epoch
        # A rank's own row has no flag: its stream is joined.
        others = [int(rank != self._rank) for rank in range(ranks)]
        self._free, self._arrived = self._flags("free", [1] * ranks), self._flags("arrived", others)
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_flags = RowFlags(self._arrived.addresses, counted, self._word)
        self._engine, self._beside = CopyEngine(device), CopyEngine(device, _PRIORITY)
        self._targets = arena.addresses("memory")

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
        """Return the communication of a payload by a way of `WAYS`."""
        elements, kind = payload.world_size * payload.part, payload.kind
        views = [self._arena.view("memory", rank)[:elements].view(payload.shape) for rank in range(payload.world_size)]
        result, rank = views[self._rank], self._rank
        source, row_bytes = payload.input_of(result), 4 * payload.part
        stride = row_bytes if kind == "all_to_all" else 0
        rows = Rows(source, stride, row_bytes, self._targets, rank * row_bytes, own=kind == "all_to_all")
        flags = [self._arena.view("arrived", peer)[rank] for peer in range(payload.world_size)]

        def sent_to(peer: int) -> torch.Tensor:
            return source[peer] if kind == "all_to_all" else source

        def begin() -> Callable[[], object]:
            self._word.add_(1)
            raise_flags(self._free, rank, 0, 0)
            wait_flags(self._free, rank, 0)
            self._beside.follow()
            if way == "stores":
                with torch.cuda.stream(self._beside.stream):
                    store_rows(rows, self._row_flags, rank)
                return wait
            self._engine.follow()
            for peer in staggered_peers(rank, payload.world_size):
                self._engine.copy(views[peer][rank], sent_to(peer))
                self._engine.write_flag(flags[peer], self._word)
            if rows.own:
                self._beside.copy(result[rank], sent_to(rank))
            return wait

        def wait() -> None:
            self._beside.join()
            if way == "dma":
                self._engine.join()
            wait_flags(self._arrived, rank, 0)

        return Communication(payload, result, begin)

    def close(self) -> None:
        """Give the memory back once all that was issued is done. All ranks call this, once.

        Raises:
            ExchangeTimeoutError: if a wait had expired.
        """
        settle(self._group, self._arena.device, lambda: self._record.raise_expired(_TIMEOUT_S, "collective's flag"))
        self._arena.close()


def wrong(calls: Mapping[str, tuple[Communication, Callable[[], object]]]) -> list[str]:
    """Run each call, an implementation's or a replay of it; return those whose result is wrong on some rank.

    A collective.
    """
    payload = next(iter(calls.values()))[0].payload
    bad = [float(not communication.is_right(run)) for communication, run in calls.values()]
    return [name for name, is_bad in zip(calls, greatest(bad, payload.device, payload.group), strict=True) if is_bad]
