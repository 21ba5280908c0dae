"""Communications between all ranks: their bytes, and their implementations by collectives, stores and copy engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.bench.harness.timing import greatest
from dlrm_overlap.comm.calls import Beside, Way
from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gemm.serial import all_gather
from dlrm_overlap.dense.gradients import open_reduction
from dlrm_overlap.dense.reduction import StoreOptions

KINDS = ("all_to_all", "all_gather", "all_reduce")
_PERIOD = 61  # of the contents: sums over few ranks are exact
_ROOM_BYTES = 4096  # for alignment
_TIMEOUT_S = 60.0  # of a wait for a peer


class Payload:
    """The bytes of a communication of one kind and size on one rank, in float32.

    There are W rows of `part` elements: of an `all_to_all` its input and its output, each with the rank's own row; of
    an `all_gather` its output; of an `all_reduce` the buffer that is averaged. The contents are made by formula, so
    every rank knows its result.
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
            if kind == "all_to_all":
                self.expected = torch.stack([content(sender, self.rank) for sender in ranks])
            else:
                sums = [torch.stack([content(sender, row) for sender in ranks]).mean(0) for row in ranks]
                self.expected = torch.stack(sums)

    @property
    def link_bytes(self) -> int:
        """Bytes that leave a rank for its peers, by an implementation that sends each only once."""
        sent = (self.world_size - 1) * self.part * 4
        return 2 * sent if self.kind == "all_reduce" else sent

    def input_of(self, result: torch.Tensor) -> torch.Tensor:
        """Return the input. An all-gather and an all-reduce find it in the result, where the own part then stays."""
        if self.kind == "all_to_all":
            return self.input
        return result.view(self.shape)[self.rank] if self.kind == "all_gather" else result


@dataclass
class Communication:
    """One implementation of a payload's communication. All ranks make the same calls."""

    payload: Payload
    result: torch.Tensor
    """[W, n] or flat"""
    begin: Callable[[], Callable[[], object]]
    """issues the communication from the current stream on; returns a function that makes that stream wait for it"""
    close: Callable[[], None] = field(default=lambda: None)
    """frees the memory that outlives Python references; every rank must be through"""

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
        return torch.allclose(self.result.view(payload.shape), payload.expected, rtol=1e-6, atol=0.0)


def by_collective(payload: Payload, group: dist.ProcessGroup, beside: bool = False) -> Communication:
    """Return the collective of `group`: NCCL's kernel, on a stream of its own if `beside`, or on a CPU gloo's threads.

    Without `beside` the kernel is on the current stream.
    """
    result = payload.input.new_empty(payload.shape)
    source, on_cpu = payload.input_of(result), payload.device.type == "cpu"
    options = {"group": group, "async_op": on_cpu or beside}

    def begin() -> Callable[[], object]:
        if payload.kind == "all_to_all":
            work = dist.all_to_all_single(result, source, **options)
        elif payload.kind == "all_gather":
            work = all_gather(result.view(-1), source, **options)
        else:  # gloo has no mean; one that is repeated averages the averages
            work = dist.all_reduce(result, dist.ReduceOp.SUM if on_cpu else dist.ReduceOp.AVG, **options)

        def finish() -> None:
            if work is not None:
                work.wait()
                if on_cpu and payload.kind == "all_reduce":
                    result.div_(payload.world_size)

        return finish

    return Communication(payload, result, begin)


def by_stores(payload: Payload) -> Communication:
    """Return the all-reduce by loads and stores of the peers' memory, as captured steps reduce dense gradients."""
    flat = FlatParameters({"weight": nn.Parameter(torch.empty(payload.input.numel(), device=payload.device))})
    gradient = flat.gradients.tensor  # in whose memory peers store; zeros at its end
    reduction = open_reduction(flat, payload.group, torch.float32, StoreOptions(wait_timeout_s=_TIMEOUT_S))
    reduction.cut([(0, gradient.numel())])

    def begin() -> Callable[[], object]:
        for counters in reduction.counters:
            counters.advance()  # on the device, so that the kernels' arguments stay the same in a CUDA graph
        reduction.reduce(0)
        return lambda: [*reduction.arrivals(torch.cuda.current_stream(payload.device))]

    return Communication(payload, gradient[: payload.input.numel()], begin, reduction.close)


class PeerMemory:
    """Memory that peers write, for all payloads one after the other: results, and shares of an all-reduce."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, elements: int) -> None:
        """Make room for results of `elements` float32; a collective.

        Raises:
            InputError: if the ranks do not reach each other's memory.
        """
        self._collectives = PeerCollectives(group, device, 2 * (4 * elements + _ROOM_BYTES), _TIMEOUT_S)
        self._results = self._collectives.empty((elements,), torch.float32)
        self._shares = self._collectives.empty((elements,), torch.float32)
        self.close = self._collectives.close

    def call(self, payload: Payload, way: Way, beside: Beside = "nothing") -> Communication:
        """Return the call of `PeerCollectives` that does it, by copy engines or, but of an all-reduce, by stores."""
        elements = payload.world_size * payload.part
        result, shares = (each[:elements].view(payload.shape) for each in (self._results, self._shares))
        source = payload.input_of(result)

        def begin() -> Callable[[], object]:
            if payload.kind == "all_reduce":
                return self._collectives.all_reduce(result, payload.input.view(payload.shape), shares).wait
            issue = self._collectives.all_to_all if payload.kind == "all_to_all" else self._collectives.all_gather
            return issue(result, source, way, beside).wait

        return Communication(payload, result, begin)


def limited_group(ctas: int) -> dist.ProcessGroup:
    """Return all ranks as a group of at most so many of NCCL's thread blocks; a collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    options.config.cga_cluster_size = 0  # few multiprocessors need not have room for a cluster
    return cast(dist.ProcessGroup, dist.new_group(backend="nccl", pg_options=options))


def wrong(calls: Mapping[str, tuple[Communication, Callable[[], object]]]) -> list[str]:
    """Run each call, an implementation's or a replay of it; return those whose result is wrong on some rank.

    A collective.
    """
    payload = next(iter(calls.values()))[0].payload
    bad = [float(not communication.is_right(run)) for communication, run in calls.values()]
    return [name for name, is_bad in zip(calls, greatest(bad, payload.device, payload.group), strict=True) if is_bad]
