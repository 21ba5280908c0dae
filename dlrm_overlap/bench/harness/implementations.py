"""Which implementations of a communication a machine has, and whether their results are right."""

import logging
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.captured import capture
from dlrm_overlap.bench.harness.communications import (
    AveragedReduction,
    Collective,
    Communication,
    CopiedReduction,
    GatheredReduction,
    PeerMemory,
    PeerRows,
    StoredReduction,
)
from dlrm_overlap.bench.harness.payload import Payload
from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")


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
            payload: what they move.
            groups: of the collectives.
            memory: that peers write; without, there are those alone that need no access to peers.
            captured: whether calls are to be captured in CUDA graphs, too.
        """
        self.payload, self._captured = payload, captured
        output = payload.input.new_empty(payload.shape)
        made: list[Communication] = [Collective("collective", payload, output, groups.whole)]
        made += [Collective(f"collective_{limit}", payload, output, group) for limit, group in groups.limited.items()]
        if memory is None:
            pass
        elif payload.kind == "all_reduce":
            made += [StoredReduction(payload, captured), CopiedReduction(payload, memory)]
            made.append(AveragedReduction(payload, memory))
            if memory.holds_gathered(payload):
                made.append(GatheredReduction(payload, memory))
        else:
            made += [PeerRows(payload, "stores", memory), PeerRows(payload, "dma", memory)]
        self.by_name = {each.name: each for each in made}

    def leave_out(self, names: Container[str]) -> None:
        """Close the implementations of these names, and forget them; a collective."""
        for name in [each for each in self.by_name if each in names]:
            self.by_name.pop(name).close()

    def wrong(self) -> list[str]:
        """Run each implementation and return the names of those whose result is wrong on this rank; a collective."""
        found = []
        for name, communication in self.by_name.items():
            if not (self._is_right(communication, communication.run) and self._is_right_captured(communication)):
                found.append(name)
        return found

    def _is_right(self, communication: Communication, run: Callable[[], object]) -> bool:
        communication.reset()
        dist.barrier(self.payload.group)  # no rank writes into a result that is yet to be destroyed
        run()
        return self.payload.is_right(communication.result())

    def _is_right_captured(self, communication: Communication) -> bool:
        return not self._captured or self._is_right(communication, capture(communication.run, self.payload.device))

    def close(self) -> None:
        """Free them. Every rank must be through."""
        for communication in self.by_name.values():
            communication.close()
