"""Which ranks reach each other by loads and stores: those of a node, which are consecutive."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.config import InputError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Location(NamedTuple):
    machine: str
    device: str
    """the GPU's UUID; empty on a CPU"""
    reached: frozenset[str]
    """UUIDs of the GPUs that this GPU can load from and store to, including its own"""


@dataclass(frozen=True)
class Reach:
    """The nodes of a group's ranks, as one rank sees them.

    Example: ranks 0 .. 3 and 4 .. 7 are two nodes. On rank 1, `here` is 0 .. 3, and `relay(1, range(4, 8))` is 5.
    """

    rank: int
    nodes: tuple[range, ...]
    """ranks of each node, in order"""
    why: str = ""
    """why there is more than one node; empty if there is one"""
    group: dist.ProcessGroup | None = None
    """group of this node's ranks, for symmetric memory; None on CPUs, or if the node has one rank or all ranks"""

    @staticmethod
    def of_one_node(group: dist.ProcessGroup) -> "Reach":
        return Reach(group.rank(), (range(group.size()),))

    @cached_property
    def is_one_node(self) -> bool:
        return len(self.nodes) == 1

    @cached_property
    def here(self) -> range:
        return self.node_of(self.rank)

    @cached_property
    def _node_of(self) -> Sequence[range]:
        return [node for node in self.nodes for _ in node]

    def node_of(self, rank: int) -> range:
        return self._node_of[rank]

    @cached_property
    def others(self) -> Sequence[range]:
        """The other nodes, from the next one on, so that ranks begin with different ones."""
        at = self.nodes.index(self.here)
        return self.nodes[at + 1 :] + self.nodes[:at]

    def relay(self, source: int, node: range) -> int:
        """Return the rank of `node` that receives, for all its ranks, the messages from `source`, a rank elsewhere.

        It has the same position in its node as `source`, modulo the node's size, so that all network cards are used.
        """
        return node[(source - self.node_of(source).start) % len(node)]

    def sources_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of other nodes whose messages `rank` receives."""
        here = self.node_of(rank)
        return [source for node in self.nodes if node != here for source in node[rank - here.start :: len(here)]]

    @cached_property
    def sources(self) -> Sequence[int]:
        return self.sources_of(self.rank)

    @cached_property
    def max_sources(self) -> int:
        """Largest number of source ranks of any rank (in each node, the first rank has the most)."""
        return max(len(self.sources_of(node.start)) for node in self.nodes)

    def summary(self) -> str:
        names = [_named(node) for node in self.nodes]
        shown = names if len(names) <= 4 else [*names[:3], "..", names[-1]]
        return f"{len(names)} nodes ({', '.join(shown)}; {self.why})"


def find_reach(group: dist.ProcessGroup, device: torch.device, nodes: int | str = "auto") -> Reach:
    """Find out which ranks can load from and store to each other's memory; a collective.

    If `nodes` is auto, these are consecutive ranks on one machine whose GPUs have peer access. A number, which must
    divide the number of ranks, emulates that number of nodes. Raises `InputError` if it does not.
    """
    rank, world_size = group.rank(), group.size()
    if isinstance(nodes, int):
        if world_size % nodes:
            raise InputError(
                f"embedding.nodes: {nodes} emulated nodes do not divide {world_size} ranks; take a divisor, or auto"
            )
        each = world_size // nodes
        found = tuple(range(first, first + each) for first in range(0, world_size, each))
        why = f"emulated, embedding.nodes is {nodes}"
    else:
        found, why = nodes_of(gathered(location_of(device), group))
    return Reach(rank, found, why if len(found) > 1 else "", _group_of(group, rank, found, device))


def location_of(device: torch.device) -> Location:
    # Neither is enough: containers on one machine differ in the host name, and machines may share it.
    machine = f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
    if device.type != "cuda":
        return Location(machine, "", frozenset([""]))
    index = device.index if device.index is not None else torch.cuda.current_device()
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = {name for i, name in enumerate(names) if i == index or torch.cuda.can_device_access_peer(index, i)}
    return Location(machine, names[index], frozenset(reached))


def nodes_of(locations: Sequence[Location]) -> tuple[tuple[range, ...], str]:
    """Return the ranks of each node, and why there are several nodes.

    Example: ranks 0 and 2 on machine a and rank 1 on machine b are three nodes.
    """
    first, found = 0, []
    for rank in range(1, len(locations) + 1):
        if rank == len(locations) or not all(_reach(locations[rank], each) for each in locations[first:rank]):
            found.append(range(first, rank))
            first = rank
    machines = len({location.machine for location in locations})
    if len(found) > machines > 1:
        why = "ranks of a machine do not follow one another, or its GPUs have no access to each other"
    else:
        why = f"{machines} machines" if machines > 1 else "GPUs without access to each other"
    return tuple(found), why


def _reach(one: Location, other: Location) -> bool:
    return one.machine == other.machine and one.device in other.reached and other.device in one.reached


def _named(node: range) -> str:
    return f"rank {node[0]}" if len(node) == 1 else f"ranks {node[0]} to {node[-1]}"


def _group_of(
    group: dist.ProcessGroup, rank: int, nodes: Sequence[range], device: torch.device
) -> dist.ProcessGroup | None:
    here = next(node for node in nodes if rank in node)
    if device.type != "cuda" or len(here) in (1, group.size()):
        return None
    ranks = [dist.get_global_rank(group, each) for each in here]
    # Only the group's store is used, so it needs no NCCL communicator.
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
