"""Communications between all ranks: their bytes, and their implementations by collectives, stores and copy engines."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.bench.harness.timing import capture
from dlrm_overlap.comm.calls import Way
from dlrm_overlap.comm.collectives import PeerCollectives
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
        self.result.fill_(torch.nan)
        input_of(self.payload, self.result).view(-1).copy_(self.payload.input.view(-1))
        dist.barrier(self.payload.group)  # no rank writes into a result that is yet to be destroyed
        run()
        return self.payload.is_right(self.result)


def input_of(payload: Payload, result: torch.Tensor) -> torch.Tensor:
    """Return the input. An all-gather and an all-reduce find it in the result, where the rank's own part then stays."""
    if payload.kind == "all_to_all":
        return payload.input
    return result.view(payload.shape)[payload.rank] if payload.kind == "all_gather" else result


def by_collective(payload: Payload, group: dist.ProcessGroup) -> Communication:
    """Return the collective of `group`: NCCL's kernel on the current stream, or on a CPU gloo's threads."""
    result = payload.input.new_empty(payload.shape)
    source, on_cpu = input_of(payload, result), payload.device.type == "cpu"
    options = {"group": group, "async_op": on_cpu}

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
                if payload.kind == "all_reduce":
                    result.div_(payload.world_size)

        return finish

    return Communication(payload, result, begin)


def by_stores(payload: Payload, captured: bool) -> Communication:
    """Return the all-reduce by loads and stores of the peers' memory, as captured steps reduce dense gradients.

    If calls are `captured`, the device counts the epochs in every call, so the kernels' arguments stay the same.
    """
    flat = FlatParameters({"weight": nn.Parameter(torch.empty(payload.input.numel(), device=payload.device))})
    gradient = flat.gradients.tensor  # in whose memory peers store; zeros at its end
    reduction = open_reduction(flat, payload.group, torch.float32, StoreOptions(wait_timeout_s=_TIMEOUT_S))
    reduction.cut([(0, gradient.numel())])

    def begin() -> Callable[[], object]:
        stream = torch.cuda.current_stream(payload.device) if payload.device.type == "cuda" else None
        for counters in reduction.counters if captured else ():
            counters.advance()
        reduction.reduce(0)
        return lambda: [*reduction.arrivals(stream)]

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

    def call(self, payload: Payload, way: Way) -> Communication:
        """Return the call of `PeerCollectives` that does it, by copy engines or, but of an all-reduce, by stores."""
        elements = payload.world_size * payload.part
        result, shares = (each[:elements].view(payload.shape) for each in (self._results, self._shares))
        source = input_of(payload, result)

        def begin() -> Callable[[], object]:
            if payload.kind == "all_reduce":
                return self._collectives.all_reduce(result, payload.input.view(payload.shape), shares).wait
            issue = self._collectives.all_to_all if payload.kind == "all_to_all" else self._collectives.all_gather
            return issue(result, source, way=way).wait

        return Communication(payload, result, begin)


def open_peer_memory(group: dist.ProcessGroup, device: torch.device, elements: int) -> PeerMemory | None:
    """Return the memory that peers write, or None where they cannot, which is logged; a collective."""
    try:
        return PeerMemory(group, device, elements)
    except InputError as error:
        log.warning("bench concurrent: without stores and copy engines: %s", error)
        return None


def make_groups(group: dist.ProcessGroup, device: torch.device, limits: Sequence[int]) -> dict[str, dist.ProcessGroup]:
    """Return `collective` -> `group` and, on GPUs, `collective_K` -> a group of at most K of NCCL's thread blocks.

    A collective.
    """
    found = {"collective": group}
    for limit in limits if device.type == "cuda" else ():
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = limit
        options.config.cga_cluster_size = 0  # few multiprocessors need not have room for a cluster
        found[f"collective_{limit}"] = cast(dist.ProcessGroup, dist.new_group(backend="nccl", pg_options=options))
    return found


def make_communications(
    payload: Payload, groups: dict[str, dist.ProcessGroup], memory: PeerMemory | None, captured: bool = False
) -> dict[str, Communication]:
    """Return name -> implementation of a payload's communication, all that the machine has; a collective.

    Args:
        payload: of all of them.
        groups: from `make_groups`.
        memory: that peers write; None leaves the implementations that need no access to peers.
        captured: whether calls are to be captured in CUDA graphs, too.
    """
    made = {name: by_collective(payload, group) for name, group in groups.items()}
    if memory is not None and payload.kind == "all_reduce":
        made |= {"stores": by_stores(payload, captured), "dma_averaged": memory.call(payload, "dma")}
    elif memory is not None:
        made |= {"stores": memory.call(payload, "stores"), "dma": memory.call(payload, "dma")}
    return made


def wrong(communications: dict[str, Communication], captured: bool) -> list[str]:
    """Run each implementation, if `captured` as a CUDA graph too, and return those with a wrong result here.

    A collective.
    """
    found = []
    for name, each in communications.items():
        right = each.is_right(each.run)
        if right and captured:
            right = each.is_right(capture(each.run, each.payload.device))
        if not right:
            found.append(name)
    return found
