"""Communications between all ranks, which are measured: their bytes, and their implementations by collectives."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import greatest
from dlrm_overlap.dense.gemm.serial import all_gather

_PERIOD = 61  # of the contents


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


class Communication(NamedTuple):
    """One implementation of a payload's communication. All ranks make the same calls."""

    payload: Payload
    result: torch.Tensor
    """[W, n]"""
    begin: Callable[[], Callable[[], object]]
    """issues the communication from the current stream on; returns a function that makes that stream wait for it"""

    def run(self) -> None:
        """Issue the communication and wait for it on the current stream."""
        self.begin()()


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


def wrong(calls: Mapping[str, tuple[Communication, Callable[[], object]]]) -> list[str]:
    """Run each call, an implementation's or a replay of it; return those whose result is wrong on some rank.

    A collective.
    """
    bad = []
    for (payload, result, _), run in calls.values():
        result.fill_(torch.nan)
        payload.input_of(result).view(-1).copy_(payload.input.view(-1))
        dist.barrier(payload.group)  # no rank writes into a result that is yet to be destroyed
        run()
        bad.append(float(not torch.equal(result, payload.expected)))
    payload = next(iter(calls.values()))[0].payload
    return [name for name, is_bad in zip(calls, greatest(bad, payload.device, payload.group), strict=True) if is_bad]
