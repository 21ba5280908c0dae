"""All-to-alls to be measured: their payload, and the implementation by a collective."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import max_over_ranks

_PERIOD = 61  # after which contents repeat


class Payload:
    """Input and expected result of an all-to-all on one rank, each [W, `part`] float32."""

    def __init__(self, part: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.part, self.group, self.device = part, group, device
        self.rank, self.world_size = group.rank(), group.size()
        numbers = torch.arange(part, dtype=torch.int32, device=device)
        ranks = torch.arange(self.world_size, dtype=torch.int32, device=device)[:, None]

        def content(sender: torch.Tensor | int, row: torch.Tensor | int) -> torch.Tensor:
            return ((numbers + 3 * sender + 5 * row) % _PERIOD).float()

        self.input, self.expected = content(self.rank, ranks), content(ranks, self.rank)

    @property
    def link_bytes(self) -> int:
        return (self.world_size - 1) * self.part * 4


class Communication(NamedTuple):
    """One implementation of a payload's all-to-all; all ranks make the same calls."""

    payload: Payload
    result: torch.Tensor
    """[W, part]"""
    begin: Callable[[], Callable[[], object]]
    """issues the communication on the current stream; returns a function that makes that stream wait for it"""

    def run(self) -> None:
        self.begin()()


def by_collective(payload: Payload) -> Communication:
    result = torch.empty_like(payload.input)

    def begin() -> Callable[[], object]:
        work: Any = dist.all_to_all_single(result, payload.input, group=payload.group, async_op=True)
        return work.wait

    return Communication(payload, result, begin)


def wrong(calls: Mapping[str, tuple[Communication, Callable[[], object]]]) -> list[str]:
    """Run each call or replay, and return the names whose result is wrong on some rank; a collective."""
    bad = []
    for (payload, result, _), run in calls.values():
        result.fill_(torch.nan)
        dist.barrier(payload.group)  # all results are overwritten before a rank writes
        run()
        bad.append(float(not torch.equal(result, payload.expected)))
    device = next(iter(calls.values()))[0].payload.device
    return [name for name, is_bad in zip(calls, max_over_ranks(bad, device), strict=True) if is_bad]
