"""Communications between all ranks: their bytes, and their implementations by collectives, stores and copy engines."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.bench.harness.timing import capture
from dlrm_overlap.comm.calls import Way
from dlrm_overlap.comm.collectives import PeerCollectives, Work
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gemm.serial import all_gather
from dlrm_overlap.dense.gradients import open_reduction
from dlrm_overlap.dense.reduction import StoreOptions

log = logging.getLogger("dlrm_overlap")

KINDS = ("all_to_all", "all_gather", "all_reduce")
_STEP = 1024  # a rank's part of a buffer is a multiple of so many elements
_PERIOD = 61  # of the contents: sums over few ranks are exact
_ROOM_BYTES = 4096  # for alignment
_TIMEOUT_S = 60.0  # of a wait for a peer


class Payload:
    """The bytes of a communication of one kind and size on one rank, in float32.

    `megabytes` are those of the whole buffer, [W, n]: of an `all_to_all` its input and its output, each with the rank's
    own row; of an `all_gather` its output; of an `all_reduce` the buffer that is averaged. The contents are made by
    formula, so every rank knows its result.
    """

    def __init__(self, kind: str, megabytes: float, group: dist.ProcessGroup, device: torch.device) -> None:
        self.kind, self.megabytes, self.group, self.device = kind, megabytes, group, device
        self.rank, self.world_size = group.rank(), group.size()
        self.part = max(_STEP, round(megabytes * 1e6 / 4 / self.world_size) // _STEP * _STEP)
        """n, elements of a row"""
        self.shape = self.world_size, self.part
        """of the result"""
        rows = 1 if kind == "all_gather" else self.world_size
        self.input = torch.stack([self._content(self.rank, row) for row in range(rows)])
        self.input = self.input[0] if kind == "all_gather" else self.input

    @property
    def link_bytes(self) -> int:
        """Bytes that leave a rank for its peers, by an implementation that sends each only once."""
        sent = (self.world_size - 1) * self.part * 4
        return 2 * sent if self.kind == "all_reduce" else sent

    def _content(self, sender: int, row: int) -> torch.Tensor:
        """Return row `row` [n] of the input of `sender`."""
        numbers = torch.arange(self.part, dtype=torch.int32, device=self.device)
        return ((numbers + 3 * sender + 5 * row) % _PERIOD).float()

    def is_right(self, result: torch.Tensor) -> bool:
        """Return whether `result` [W, n] is this rank's result of the communication."""
        for number, row in enumerate(result.view(self.shape)):
            if self.kind == "all_to_all":
                expected = self._content(number, self.rank)
            elif self.kind == "all_gather":
                expected = self._content(number, 0)
            else:
                parts = [self._content(sender, number) for sender in range(self.world_size)]
                expected = cast(torch.Tensor, sum(parts)) / self.world_size
            if not torch.allclose(row, expected, rtol=1e-6, atol=0.0):
                return False
        return True


class Communication(ABC):
    """One implementation of a payload's communication. All ranks make the same calls."""

    forks = False
    """whether `begin` leaves the work to streams of its own: later work of the current stream runs beside it"""

    def __init__(self, name: str, payload: Payload, output: torch.Tensor) -> None:
        """Take the memory of the result, [W, n] or flat."""
        self.name, self.payload, self._output = name, payload, output

    @abstractmethod
    def begin(self) -> None:
        """Issue the communication on the current stream and those that the implementation has."""

    def finish(self) -> None:  # noqa: B027  work on the current stream ends there
        """Make the current stream wait for the result; the stream has waited for that of `begin`."""

    def run(self) -> None:
        """Issue the communication on the current stream, with nothing beside it."""
        self.begin()
        self.finish()

    def result(self) -> torch.Tensor:
        """Return the result, [W, n] or flat."""
        return self._output

    @property
    def source(self) -> torch.Tensor:
        """The input. An all-gather and an all-reduce find it in the result, where the rank's own part then stays."""
        result, kind = self.result(), self.payload.kind
        if kind == "all_to_all":
            return self.payload.input
        return result.view(self.payload.shape)[self.payload.rank] if kind == "all_gather" else result

    def reset(self) -> None:
        """Destroy the result and bring the input, before the result is checked."""
        self.result().fill_(torch.nan)
        self.source.view(-1).copy_(self.payload.input.view(-1))

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free the memory that outlives Python references. Every rank must be through."""


class Collective(Communication):
    """The collective of a process group: NCCL's kernel on the current stream, or on a CPU gloo's threads."""

    def __init__(self, name: str, payload: Payload, output: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Take the memory of the result, [W, n], and the group, which has the ranks of the payload's."""
        super().__init__(name, payload, output)
        self._group = group
        self._asynchronous = payload.device.type == "cpu"
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Issue the collective; an all-reduce that is repeated averages the averages."""
        kind, source = self.payload.kind, self.source
        options = {"group": self._group, "async_op": self._asynchronous}
        if kind == "all_to_all":
            self._work = dist.all_to_all_single(self._output, source, **options)
        elif kind == "all_gather":
            self._work = all_gather(self._output.view(-1), source, **options)
        elif self._asynchronous:  # gloo has no mean
            self._work = dist.all_reduce(self._output, **options)
        else:
            dist.all_reduce(self._output, dist.ReduceOp.AVG, **options)

    def finish(self) -> None:
        """Wait for gloo."""
        if self._work is not None:
            self._work.wait()
            if self.payload.kind == "all_reduce":
                self._output.div_(self.payload.world_size)
        self._work = None


class StoredReduction(Communication):
    """The all-reduce by loads and stores of the peers' memory, as captured steps reduce dense gradients."""

    def __init__(self, payload: Payload, captured: bool = False) -> None:
        """Make the gradient that is averaged; if calls are to be captured too, the device counts the epochs."""
        self._flat = FlatParameters({"weight": nn.Parameter(torch.empty(payload.input.numel(), device=payload.device))})
        super().__init__("stores", payload, self._flat.gradients.tensor)
        self._captured = captured
        options = StoreOptions(wait_timeout_s=_TIMEOUT_S)
        self._reduction = open_reduction(self._flat, payload.group, torch.float32, options)
        self._reduction.cut([(0, self._flat.gradients.tensor.numel())])
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Issue the kernels that average this rank's share."""
        if self.payload.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.payload.device)
        if self._captured:  # CPU and device then count alike in every call, so the kernels' arguments stay the same
            for counters in self._reduction.counters:
                counters.advance()
        self._reduction.reduce(0)

    def finish(self) -> None:
        """Wait for the flags of all pieces."""
        for _ in self._reduction.arrivals(self._stream):
            pass

    def result(self) -> torch.Tensor:
        """Return the gradient, in whose memory peers store, without the zeros at its end."""
        return self._output[: self.payload.input.numel()]

    def close(self) -> None:
        """Give back the windows."""
        self._reduction.close()


class PeerMemory:
    """Memory that peers write, for all payloads one after the other: results, and shares of an all-reduce."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, elements: int) -> None:
        """Make room for results of `elements` float32; a collective.

        Raises:
            InputError: if the ranks do not reach each other's memory.
        """
        self.collectives = PeerCollectives(group, device, 2 * (4 * elements + _ROOM_BYTES), _TIMEOUT_S)
        self.results = self.collectives.empty((elements,), torch.float32)
        self.shares = self.collectives.empty((elements,), torch.float32)

    def close(self) -> None:
        """Give it back."""
        self.collectives.close()


class PeerCommunication(Communication):
    """Begins a call of `PeerCollectives`, into the peers' memory."""

    _work: Work

    def __init__(self, name: str, payload: Payload, memory: PeerMemory) -> None:
        elements = payload.world_size * payload.part
        super().__init__(name, payload, memory.results[:elements].view(payload.shape))
        self._collectives = memory.collectives
        self._shares = memory.shares[:elements].view(payload.shape)

    def finish(self) -> None:
        """Wait for the peers' bytes."""
        self._work.wait()


class PeerRows(PeerCommunication):
    """All-to-all or all-gather, by copy engines or by a kernel of few programs: the way that is its name."""

    forks = True

    def begin(self) -> None:
        """Issue hand-shake and copies."""
        collectives = self._collectives
        issue = collectives.all_to_all if self.payload.kind == "all_to_all" else collectives.all_gather
        self._work = issue(self._output, self.source, way=cast(Way, self.name))


class CopiedReduction(PeerCommunication):
    """The all-reduce by copy engines: shares to their owners, a kernel that averages them, the means to all ranks."""

    def begin(self) -> None:
        """Issue everything up to the second copies."""
        self._collectives.all_to_all(self._shares, self.payload.input.view(self.payload.shape), way="dma").wait()
        mean = torch.mean(self._shares, 0, out=self._output[self.payload.rank])
        self._work = self._collectives.all_gather(self._output, mean, way="dma")


class AveragedReduction(PeerCommunication):
    """The same with one kernel between the copies, which waits for the shares itself, and no second hand-shake."""

    forks = True

    def begin(self) -> None:
        """Issue everything but the last wait."""
        shares = self.payload.input.view(self.payload.shape)
        self._work = self._collectives.all_reduce(self._output, shares, self._shares)


class GatheredReduction(PeerCommunication):
    """The all-reduce by copy engines, of few bytes: every rank's buffer to all ranks, and there a kernel that averages.

    Each rank sends W / 2 times the bytes of `CopiedReduction`, but once: only the average comes after the copies, and
    that needs no peer.
    """

    def __init__(self, name: str, payload: Payload, memory: PeerMemory) -> None:
        super().__init__(name, payload, memory)
        each = payload.world_size * payload.part
        self._gathered = memory.shares[: payload.world_size * each].view(payload.world_size, each)
        self._output = torch.empty_like(payload.input)

    @staticmethod
    def fits(payload: Payload, memory: PeerMemory) -> bool:
        """Return whether the memory has room for the buffers of all ranks."""
        return payload.world_size**2 * payload.part <= memory.shares.numel()

    def begin(self) -> None:
        """Issue the copies."""
        self._work = self._collectives.all_gather(self._gathered, self.payload.input.view(-1), way="dma")

    def finish(self) -> None:
        """Wait for the peers' buffers, and average them."""
        super().finish()
        torch.mean(self._gathered, 0, out=self._output.view(-1))


def open_peer_memory(group: dist.ProcessGroup, device: torch.device, elements: int) -> PeerMemory | None:
    """Return the memory that peers write, or None where they cannot, which is logged; a collective."""
    try:
        return PeerMemory(group, device, elements)
    except InputError as error:
        log.warning("bench concurrent: without stores and copy engines: %s", error)
        return None


class Groups(NamedTuple):
    """The process groups of the collectives: the ranks' own, and on GPUs others of few NCCL thread blocks."""

    whole: dist.ProcessGroup
    limited: dict[int, dist.ProcessGroup]
    """most thread blocks (CTAs) of a collective -> group"""


def make_groups(group: dist.ProcessGroup, device: torch.device, limits: Sequence[int]) -> Groups:
    """Make a group for each of `limits`, on GPUs; a collective."""
    limited: dict[int, dist.ProcessGroup] = {}
    if device.type == "cuda":
        for limit in limits:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = limit
            options.config.cga_cluster_size = 0  # few multiprocessors need not have room for a cluster
            made = dist.new_group(backend="nccl", pg_options=options)
            assert isinstance(made, dist.ProcessGroup)
            limited[limit] = made
    return Groups(group, limited)


class Implementations:
    """All implementations of one payload's communication that the machine has."""

    def __init__(self, payload: Payload, groups: Groups, memory: PeerMemory | None, captured: bool = False) -> None:
        """Make them; a collective.

        Args:
            payload: of all of them.
            groups: of the collectives.
            memory: that peers write; None leaves the implementations that need no access to peers.
            captured: whether calls are to be captured in CUDA graphs, too.
        """
        self.payload, self._captured = payload, captured
        output = payload.input.new_empty(payload.shape)
        made: list[Communication] = [Collective("collective", payload, output, groups.whole)]
        made += [Collective(f"collective_{limit}", payload, output, group) for limit, group in groups.limited.items()]
        if memory is not None and payload.kind == "all_reduce":
            made += [StoredReduction(payload, captured), CopiedReduction("dma", payload, memory)]
            made.append(AveragedReduction("dma_averaged", payload, memory))
            if GatheredReduction.fits(payload, memory):
                made.append(GatheredReduction("dma_gathered", payload, memory))
        elif memory is not None:
            made += [PeerRows(way, payload, memory) for way in ("stores", "dma")]
        self.by_name = {each.name: each for each in made}

    def leave_out(self, names: Container[str]) -> None:
        """Close the implementations of these names, and forget them; a collective."""
        for name in [each for each in self.by_name if each in names]:
            self.by_name.pop(name).close()

    def wrong(self) -> list[str]:
        """Run each implementation, also captured where that is asked for, and return those with a wrong result here.

        A collective.
        """
        found = []
        for name, communication in self.by_name.items():
            right = self._is_right(communication, communication.run)
            if right and self._captured:
                right = self._is_right(communication, capture(communication.run, self.payload.device))
            if not right:
                found.append(name)
        return found

    def _is_right(self, communication: Communication, run: Callable[[], object]) -> bool:
        communication.reset()
        dist.barrier(self.payload.group)  # no rank writes into a result that is yet to be destroyed
        run()
        return self.payload.is_right(communication.result())

    def close(self) -> None:
        """Free them. Every rank must be through."""
        for communication in self.by_name.values():
            communication.close()
