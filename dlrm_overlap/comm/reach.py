"""Which ranks reach each other by loads and stores: the ranks of a node, which are consecutive.

Ranks of a node are on one machine, whose GPUs have peer access, or in one NVLink domain, which may span machines.
"""

import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import gathered, on_every_rank
from dlrm_overlap.comm.fabric import Domain, ExportedBlock, fabric_of, map_fault
from dlrm_overlap.config import InputError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_HANDLE = "there is no handle"
_CONNECT_CURE = "the IMEX services of the machines must be connected (nvidia-imex-ctl -N)"


class Location(NamedTuple):
    machine: str
    device: str
    """the GPU's UUID; empty on a CPU"""
    reached: frozenset[str]
    """UUIDs of the GPUs that this GPU can load from and store to, including its own"""
    domain: Domain | None = None
    """the NVLink domain in which the GPU can share memory; None if there is none"""
    fault: str = ""
    """why there is no domain, or why this GPU reaches only some GPUs of it; empty if nothing is wrong"""


@dataclass(frozen=True)
class Reach:
    """The nodes of a group's ranks, as one rank sees them.

    Example: ranks 0 .. 3 and 4 .. 7 are two nodes. On rank 1, `here` is 0 .. 3, and `relay(1, range(4, 8))` is 5.
    """

    rank: int
    nodes: tuple[range, ...]
    """ranks of each node, in order"""
    why: str = ""
    """what connects the ranks of a node, and what separates nodes"""
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
        """The other nodes, from the next one on, so that nodes begin with different ones."""
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
        nodes = "1 node" if len(names) == 1 else f"{len(names)} nodes"
        return f"{nodes} ({', '.join(shown)}; {self.why})"


def find_reach(group: dist.ProcessGroup, device: torch.device, nodes: int | str = "auto") -> Reach:
    """Find out which ranks can load from and store to each other's memory; a collective.

    If `nodes` is auto, these are consecutive ranks of one NVLink domain, or on one machine whose GPUs have peer access.
    A number, which must divide the number of ranks, emulates that number of nodes. Raises `InputError` if it does not,
    or if ranks of such a node do not reach each other.
    """
    rank, world_size = group.rank(), group.size()
    if isinstance(nodes, int) and world_size % nodes:
        raise InputError(
            f"embedding.nodes: {nodes} emulated nodes do not divide {world_size} ranks; take a divisor, or auto"
        )
    found, why = find_nodes(group, device)
    if isinstance(nodes, int):
        each, real = world_size // nodes, Reach(rank, found, why)
        found = tuple(range(first, first + each) for first in range(0, world_size, each))
        if any(node[-1] not in real.node_of(node[0]) for node in found):
            raise InputError(
                f"embedding.nodes: {nodes} joins ranks that do not reach each other, {real.summary()}; take auto"
            )
        why = f"emulated, embedding.nodes is {nodes}"
    return Reach(rank, found, why, _group_of(group, rank, found, device))


def find_nodes(group: dist.ProcessGroup, device: torch.device) -> tuple[tuple[range, ...], str]:
    """Return the ranks of each node and what connects or separates them, see `nodes_of`; a collective."""
    locations = gathered(on_every_rank(lambda: location_of(device), group), group)
    domains = [location.domain for location in locations if location.domain is not None]
    if len(set(domains)) < len(domains):
        locations = gathered(_tried(locations, group, device), group)
    return nodes_of(locations)


def location_of(device: torch.device) -> Location:
    # Neither is enough: containers on one machine differ in the host name, and machines may share it.
    machine = f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
    if device.type != "cuda":
        return Location(machine, "", frozenset([""]))
    index = device.index if device.index is not None else torch.cuda.current_device()
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = {name for i, name in enumerate(names) if i == index or torch.cuda.can_device_access_peer(index, i)}
    return Location(machine, names[index], frozenset(reached), *fabric_of(device))


def _tried(locations: Sequence[Location], group: dist.ProcessGroup, device: torch.device) -> Location:
    """Return this rank's location with the GPUs of its domain whose memory it can map; a collective.

    That two machines are in one domain does not imply that their IMEX services are connected.
    """
    own, handle = locations[group.rank()], b""
    with ExitStack() as until_mapped:
        if own.domain is not None:
            handle = until_mapped.enter_context(closing(ExportedBlock(device))).handle
        handles = gathered(handle, group)

        def try_all() -> dict[int, str]:
            peers = [rank for rank, each in enumerate(locations) if own.domain and each.domain == own.domain]
            return {rank: map_fault(handles[rank], device) if handles[rank] else _NO_HANDLE for rank in peers}

        faults = on_every_rank(try_all, group)  # and a barrier: all have mapped this rank's block
    if own.domain is None:
        return own
    reached = frozenset(locations[rank].device for rank, fault in faults.items() if not fault)
    if failed := [rank for rank, fault in faults.items() if fault]:
        own = own._replace(fault=f"it cannot map memory of {_runs(failed)}, {faults[failed[0]]}; {_CONNECT_CURE}")
    return own._replace(reached=reached | {own.device})


def nodes_of(locations: Sequence[Location]) -> tuple[tuple[range, ...], str]:
    """Return the ranks of each node, and what connects or separates them.

    Example: ranks 0 and 2 on machine a and rank 1 on machine b are three nodes, unless their GPUs are in one domain.
    """
    first, found = 0, []
    for rank in range(1, len(locations) + 1):
        if rank == len(locations) or not all(_reach(locations[rank], each) for each in locations[first:rank]):
            found.append(range(first, rank))
            first = rank
    return tuple(found), _explained(locations, len(found))


def _reach(one: Location, other: Location) -> bool:
    # A GPU in a domain and one outside it are not joined, even on one machine: their memory has different handles.
    together = one.domain == other.domain if one.domain or other.domain else one.machine == other.machine
    return together and one.device in other.reached and other.device in one.reached


def _explained(locations: Sequence[Location], nodes: int) -> str:
    inside = [location for location in locations if location.domain is not None]
    outside = {location.machine for location in locations if location.domain is None}
    domains, machines = {location.domain for location in inside}, {location.machine for location in inside}
    told = _count(len(outside), "machine")
    if domains:
        told = f"{_count(len(domains), 'NVLink domain')} over {_count(len(machines), 'machine')}"
        told += f", and GPUs of {_count(len(outside), 'machine')} outside" * bool(outside)
    if nodes > (places := len(domains) + len(outside)):
        apart = "GPUs have no access to each other"
        told += f": {apart}" if places == 1 else f": ranks do not follow one another, or {apart}"
    # Why GPUs are outside a domain does not matter to a single node.
    faults: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        if location.fault and nodes > 1:
            faults.setdefault(location.fault, []).append(rank)
    return "; ".join([told, *(f"{_runs(ranks)}: {fault}" for fault, ranks in faults.items())])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number > 1)


def _runs(ranks: Iterable[int]) -> str:
    """Return ascending ranks as text. Example: 0, 1, 2, 5 become "ranks 0 to 2, rank 5"."""
    runs: list[range] = []
    for rank in ranks:
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return ", ".join(map(_named, runs))


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
