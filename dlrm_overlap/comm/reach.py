"""Which ranks a rank reaches by loads and stores, and which only by messages over a network; all ranks agree on it.

Ranks are put into nodes. A node is some consecutive ranks that all reach each other's memory: those of one machine,
where its GPUs have access to each other. Within a node kernels store into a peer's memory. Between nodes one rank of a
node takes what a rank of another node sends to all of it, and passes it on (`Reach.relay`).
"""

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


class Place(NamedTuple):
    """Where a rank computes."""

    machine: str
    device: str
    """the GPU's unique name; empty on a CPU"""
    reached: frozenset[str]
    """the GPUs, by these names, whose memory this one loads and stores, itself included"""


@dataclass(frozen=True)
class Reach:
    """The nodes of a group's ranks, as one of them sees it.

    Example: ranks 0 .. 3 on one machine and 4 .. 7 on another make the nodes 0 .. 3 and 4 .. 7. On rank 1, `here` is
    0 .. 3, and rank 5 takes what rank 1 sends to its node: `relay(1, range(4, 8))` is 5.
    """

    rank: int
    nodes: tuple[range, ...]
    """the ranks of each node, in order"""
    why: str = ""
    """why there are several nodes"""
    group: dist.ProcessGroup | None = None
    """the ranks of this rank's node, where they are GPUs and not all ranks: symmetric memory is made by a group"""

    @staticmethod
    def of_one_node(group: dist.ProcessGroup) -> "Reach":
        """Return that all ranks of a group reach each other by stores."""
        return Reach(group.rank(), (range(group.size()),))

    @cached_property
    def whole(self) -> bool:
        """Whether every rank is reached by stores."""
        return len(self.nodes) == 1

    @cached_property
    def here(self) -> range:
        """The ranks of this rank's node."""
        return self.node_of(self.rank)

    @cached_property
    def _node_of(self) -> Sequence[range]:
        return [node for node in self.nodes for _ in node]

    def node_of(self, rank: int) -> range:
        """Return the ranks of the node of `rank`."""
        return self._node_of[rank]

    @cached_property
    def others(self) -> Sequence[range]:
        """The other nodes, from the next one on, so that no node is sent to by all others at once."""
        at = self.nodes.index(self.here)
        return self.nodes[at + 1 :] + self.nodes[:at]

    def relay(self, source: int, node: range) -> int:
        """Return the rank of `node` that takes the messages of `source`, of another node, for any of its ranks.

        It has the place in its node that `source` has in its own, as far as there are as many. So each pair of nodes
        has as many messages at once as it has ranks, one for each network card of nodes that have a card a GPU.
        """
        return node[(source - self.node_of(source).start) % len(node)]

    def taken_by(self, rank: int) -> Sequence[int]:
        """Return the ranks of other nodes whose messages `rank` takes, in order: those that `relay` sends to it."""
        here = self.node_of(rank)
        return [source for node in self.nodes if node != here for source in node[rank - here.start :: len(here)]]

    @cached_property
    def sources(self) -> Sequence[int]:
        """The ranks of other nodes whose messages this rank takes, in order."""
        return self.taken_by(self.rank)

    @cached_property
    def most_taken(self) -> int:
        """How many ranks' messages one rank takes at most; none takes more than the first of its node."""
        return max(len(self.taken_by(node.start)) for node in self.nodes)

    def summary(self) -> str:
        """Return the nodes and why they are several, in a line; of more than four the first three and the last."""
        names = [_named(node) for node in self.nodes]
        shown = names if len(names) <= 4 else [*names[:3], "..", names[-1]]
        return f"{len(names)} nodes ({', '.join(shown)}; {self.why})"


def find_reach(group: dist.ProcessGroup, device: torch.device, nodes: int | str = "auto") -> Reach:
    """Find out which ranks of `group` reach each other by stores; a collective.

    Args:
        device: of this rank.
        nodes: auto looks at machines and at access between GPUs. A number emulates as many nodes: it cuts the ranks
            into so many equal runs, whatever they reach; 1 says that all reach each other.

    Raises:
        InputError: if so many nodes are asked for that ranks cannot be dealt out.
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
        found, why = nodes_of(gathered(place_of(device), group))
    return Reach(rank, found, why if len(found) > 1 else "", _group_of(group, rank, found, device))


def place_of(device: torch.device) -> Place:
    """Return where a rank on `device` computes."""
    # Containers of one machine have names of their own, and machines may share a name.
    machine = f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
    if device.type != "cuda":
        return Place(machine, "", frozenset([""]))
    index = device.index if device.index is not None else torch.cuda.current_device()
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = {name for i, name in enumerate(names) if i == index or torch.cuda.can_device_access_peer(index, i)}
    return Place(machine, names[index], frozenset(reached))


def nodes_of(places: Sequence[Place]) -> tuple[tuple[range, ...], str]:
    """Return the nodes of ranks by their places, and why there are several: runs of ranks that reach each other.

    Example: ranks 0 and 2 on machine a, 1 on machine b: three nodes of one rank, since no neighbours are on one.
    """
    first, found = 0, []
    for rank in range(1, len(places) + 1):
        if rank == len(places) or not all(_reach(places[rank], each) for each in places[first:rank]):
            found.append(range(first, rank))
            first = rank
    machines = len({place.machine for place in places})
    if len(found) > machines > 1:
        why = "ranks of a machine do not follow one another, or its GPUs have no access to each other"
    else:
        why = f"{machines} machines" if machines > 1 else "GPUs without access to each other"
    return tuple(found), why


def _reach(one: Place, other: Place) -> bool:
    return one.machine == other.machine and one.device in other.reached and other.device in one.reached


def _named(node: range) -> str:
    return f"rank {node[0]}" if len(node) == 1 else f"ranks {node[0]} to {node[-1]}"


def _group_of(
    group: dist.ProcessGroup, rank: int, nodes: Sequence[range], device: torch.device
) -> dist.ProcessGroup | None:
    """Make the group of this rank's node, where symmetric memory needs one."""
    here = next(node for node in nodes if rank in node)
    if device.type != "cuda" or len(here) in (1, group.size()):
        return None
    ranks = [dist.get_global_rank(group, each) for each in here]
    # Its store is all that is used, so no communicator of NCCL is made for it. The other nodes' ranks do not take part.
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
