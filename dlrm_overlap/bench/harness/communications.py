"""The implementations of a communication between all ranks, a class each: collectives, stores, copy engines."""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.bench.harness.payload import Payload
from dlrm_overlap.comm.calls import Way
from dlrm_overlap.comm.collectives import PeerCollectives, Work
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gemm.serial import all_gather
from dlrm_overlap.dense.gradients import open_reduction
from dlrm_overlap.dense.stores import StoreOptions

_ROOM_BYTES = 4096  # for alignment
_TIMEOUT_S = 60.0  # of a wait for a peer


class Communication(ABC):
    """One implementation of a payload's communication. All ranks make the same calls."""

    forks = False
    """whether `begin` leaves the work to streams of its own: what follows on the current stream runs beside it"""

    def __init__(self, name: str, payload: Payload, output: torch.Tensor) -> None:
        """Take where the result goes, [W, n] or flat."""
        self.name, self.payload, self._output = name, payload, output

    @abstractmethod
    def begin(self) -> None:
        """Issue the communication on the current stream and those that the implementation has."""

    def finish(self) -> None:  # noqa: B027  what runs on the current stream ends there
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
        """What is sent. An all-gather and an all-reduce find it in the result, where the rank's own part then stays."""
        result, kind = self.result(), self.payload.kind
        if kind == "all_to_all":
            return self.payload.input
        return result.view(self.payload.shape)[self.payload.rank] if kind == "all_gather" else result

    def reset(self) -> None:
        """Destroy the result and bring the input, before the result is checked."""
        self.result().fill_(torch.nan)
        self.source.view(-1).copy_(self.payload.input.view(-1))

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free what outlives Python references. Every rank must be through."""


class Collective(Communication):
    """The collective of a process group: NCCL's kernel on the current stream, or on a CPU gloo's threads."""

    def __init__(self, name: str, payload: Payload, output: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Take where the result goes, [W, n], and the group, which has the ranks of the payload's."""
        super().__init__(name, payload, output)
        self._group = group
        self._asynchronous = payload.device.type == "cpu"
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Issue the collective; where an all-reduce is repeated, it averages what has been averaged before."""
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
        """Take what is averaged, and whether calls are to be captured, too; then the device counts the epochs."""
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
        if self._captured:  # host and device then count alike in every call, so what kernels are given stays the same
            for counters in self._reduction.counters:
                counters.advance()
        self._reduction.reduce(0)

    def finish(self) -> None:
        """Await the flags of all pieces."""
        for _ in self._reduction.arrivals(self._stream):
            pass

    def result(self) -> torch.Tensor:
        """Return the gradient, in whose memory peers store, without the zeros behind it."""
        return self._output[: self.payload.input.numel()]

    def close(self) -> None:
        """Give back what peers see."""
        self._reduction.close()


class PeerMemory:
    """Memory that peers write, for all payloads one after the other: results, and shares of an all-reduce."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, elements: int) -> None:
        """Make room for results of `elements` float32; a collective.

        Raises:
            InputError: if the ranks do not reach each other's memory.
        """
        self.collectives = PeerCollectives(group, device, 2 * (4 * elements + _ROOM_BYTES), _TIMEOUT_S)
        self._results = self.collectives.empty((elements,), torch.float32)
        self._shares = self.collectives.empty((elements,), torch.float32)

    def result(self, payload: Payload) -> torch.Tensor:
        """Return [W, n] for the result."""
        return self._results[: payload.world_size * payload.part].view(payload.shape)

    def shares(self, payload: Payload) -> torch.Tensor:
        """Return [W, n] for the shares that the ranks send to this one."""
        return self._shares[: payload.world_size * payload.part].view(payload.shape)

    def gathered(self, payload: Payload) -> torch.Tensor:
        """Return [W, W n] for the buffers of all ranks."""
        each = payload.world_size * payload.part
        return self._shares[: payload.world_size * each].view(payload.world_size, each)

    def holds_gathered(self, payload: Payload) -> bool:
        """Return whether there is room for the buffers of all ranks."""
        return payload.world_size**2 * payload.part <= self._shares.numel()

    def close(self) -> None:
        """Give it back."""
        self.collectives.close()


class PeerCommunication(Communication):
    """Begins a call of `PeerCollectives`, into the peers' memory."""

    _work: Work

    def __init__(self, name: str, payload: Payload, memory: PeerMemory) -> None:
        super().__init__(name, payload, memory.result(payload))
        self._collectives = memory.collectives

    def finish(self) -> None:
        """Await what the peers send."""
        self._work.wait()


class PeerRows(PeerCommunication):
    """All-to-all or all-gather, by copy engines or by a kernel of few programs."""

    forks = True

    def __init__(self, payload: Payload, way: Way, memory: PeerMemory) -> None:
        """Take the way, for which the implementation is named."""
        super().__init__(way, payload, memory)
        self._way: Way = way

    def begin(self) -> None:
        """Issue hand-shake and copies."""
        collectives = self._collectives
        issue = collectives.all_to_all if self.payload.kind == "all_to_all" else collectives.all_gather
        self._work = issue(self._output, self.source, way=self._way)


class CopiedReduction(PeerCommunication):
    """The all-reduce by copy engines: shares to their owners, a kernel that averages them, the means to all ranks."""

    def __init__(self, payload: Payload, memory: PeerMemory, name: str = "dma") -> None:
        super().__init__(name, payload, memory)
        self._shares = memory.shares(payload)

    def begin(self) -> None:
        """Issue everything up to the second copies."""
        self._collectives.all_to_all(self._shares, self.payload.input.view(self.payload.shape), way="dma").wait()
        mean = torch.mean(self._shares, 0, out=self._output[self.payload.rank])
        self._work = self._collectives.all_gather(self._output, mean, way="dma")


class AveragedReduction(CopiedReduction):
    """The same with one kernel between the copies, which awaits the shares itself, and no second hand-shake."""

    forks = True

    def __init__(self, payload: Payload, memory: PeerMemory) -> None:
        super().__init__(payload, memory, "dma_averaged")

    def begin(self) -> None:
        """Issue everything but the last wait."""
        self._work = self._collectives.all_reduce(
            self._output, self.payload.input.view(self.payload.shape), self._shares
        )


class GatheredReduction(PeerCommunication):
    """The all-reduce by copy engines, of few bytes: every rank's buffer to all ranks, and there a kernel that averages.

    Each rank sends W / 2 times what `CopiedReduction` does, but once: nothing but the average comes behind the copies,
    and that needs no peer.
    """

    def __init__(self, payload: Payload, memory: PeerMemory) -> None:
        super().__init__("dma_gathered", payload, memory)
        self._gathered, self._output = memory.gathered(payload), torch.empty_like(payload.input)

    def begin(self) -> None:
        """Issue the copies."""
        self._work = self._collectives.all_gather(self._gathered, self.payload.input.view(-1), way="dma")

    def finish(self) -> None:
        """Await the peers' buffers, and average them."""
        super().finish()
        torch.mean(self._gathered, 0, out=self._output.view(-1))
