"""Which ranks make a node, and who passes on what."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import cast

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import reach
from dlrm_overlap.comm.fabric import Domain
from dlrm_overlap.comm.reach import Location, Reach, find_reach, nodes_of
from tests.conftest import refuses
from tests.unit.comm.threads import Rank, Threads


def _locations(machines: str, reached: Sequence[str] = ()) -> list[Location]:
    """Return a GPU a rank, which reaches those of its machine, or those whose numbers are given."""
    numbers = [str(rank) for rank in range(len(machines))]
    ranks = zip(numbers, machines, reached or ["".join(numbers)] * len(machines), strict=True)
    return [Location(machine, number, frozenset([number, *others])) for number, machine, others in ranks]


@pytest.mark.parametrize(
    ("places", "nodes", "why"),
    [
        (_locations("aaaa"), [(0, 4)], "1 machine"),
        (_locations("aabb"), [(0, 2), (2, 4)], "2 machines"),
        (_locations("aaab"), [(0, 3), (3, 4)], "2 machines"),
        (_locations("abab"), [(0, 1), (1, 2), (2, 3), (3, 4)], "do not follow one another"),
        (_locations("aaaa", ["1", "0", "3", "2"]), [(0, 2), (2, 4)], "no access"),
        (_locations("aaa", ["12", "0", "01"]), [(0, 2), (2, 3)], "no access"),  # 2 reaches 1, but not 1 also 2
    ],
)
def test_nodes_are_runs_of_ranks_that_all_reach_each_other(
    places: list[Location], nodes: list[tuple[int, int]], why: str
) -> None:
    found, told = nodes_of(places)
    assert found == tuple(range(*node) for node in nodes)
    assert why in told


def _rack(machines: int, cluster: str = "a", clique: int = 0, first: int = 0) -> list[Location]:
    """Return the locations of 4 ranks on each of some machines, all in one NVLink domain."""
    gpus = [f"{cluster}{clique}-{first + gpu}" for gpu in range(4 * machines)]
    reached, domain = frozenset(gpus), Domain(cluster, clique)
    return [Location(f"{cluster}{(first + i) // 4}", gpu, reached, domain) for i, gpu in enumerate(gpus)]


def _outside(location: Location, fault: str) -> Location:
    """Return the location of a GPU that is not in the domain, but has peer access on its machine."""
    return location._replace(domain=None, fault=fault)


RACK, BOX = _rack(18), _locations("zzzzzzzz")
DOWN = [_outside(each, "down") if rank == 5 else each for rank, each in enumerate(RACK)]
NO_IMEX = [_outside(each, "no handle") if 8 <= rank < 12 else each for rank, each in enumerate(RACK)]
NO_FABRIC = [each._replace(domain=None) for each in RACK]
ONE_GPU_VISIBLE = [each._replace(reached=frozenset([each.device]), domain=None) for each in RACK[:4]]


@pytest.mark.parametrize(
    ("places", "ends", "why"),
    [
        (RACK, [72], "1 NVLink domain over 18 machines"),
        (RACK[:4], [4], "1 NVLink domain over 1 machine"),
        ([*RACK, *_rack(18, "b")], [72, 144], "2 NVLink domains over 36 machines"),
        (_rack(9) + _rack(9, clique=1, first=36), [36, 72], "2 NVLink domains over 18 machines"),
        # A GPU that is down has no node in common with the others of its machine.
        (DOWN, [5, 6, 72], "1 NVLink domain over 18 machines, and GPUs of 1 machine outside: ranks do not follow "
         "one another, or GPUs have no access to each other; rank 5: down"),
        # IMEX is down on a machine, whose ranks still reach each other.
        (NO_IMEX, [8, 12, 72], "1 NVLink domain over 17 machines, and GPUs of 1 machine outside: ranks do not "
         "follow one another, or GPUs have no access to each other; ranks 8 to 11: no handle"),
        (NO_IMEX[8:], [4, 64], "1 NVLink domain over 15 machines, and GPUs of 1 machine outside; ranks 0 to 3: no "
         "handle"),
        (NO_FABRIC, list(range(4, 73, 4)), "18 machines"),
        ([*RACK[:8], *BOX], [8, 16], "1 NVLink domain over 2 machines, and GPUs of 1 machine outside"),
        ([RACK[0], RACK[4], RACK[1]], [3], "1 NVLink domain over 2 machines"),  # their order does not matter
        (ONE_GPU_VISIBLE, [1, 2, 3, 4], "1 machine: GPUs have no access to each other"),
    ],
)  # fmt: skip
def test_a_node_is_an_nvlink_domain_or_a_machine(places: list[Location], ends: list[int], why: str) -> None:
    assert nodes_of(places) == (tuple(range(*each) for each in pairwise([0, *ends])), why)


def _find_on_threads(
    places: Sequence[Location], monkeypatch: pytest.MonkeyPatch, unmapped: Callable[[int, int], bool]
) -> tuple[tuple[range, ...], str]:
    """Return the nodes that ranks find, each a thread, if `unmapped(rank, peer)` says which memory cannot be mapped."""
    threads, now, blocks = Threads(len(places)), threading.local(), set[int]()

    class Block:
        def __init__(self, _: torch.device) -> None:
            self.handle = b"" if unmapped(now.rank, now.rank) else bytes([now.rank + 1])
            blocks.add(now.rank)

        def close(self) -> None:
            blocks.remove(now.rank)

    def map_fault(handle: bytes, _: torch.device) -> str:
        peer = handle[0] - 1
        assert peer in blocks, "a block that a peer maps is not freed"
        return "cuMemMap returned X" if unmapped(now.rank, peer) else ""

    def find(rank: int) -> tuple[tuple[range, ...], str]:
        now.rank, group = rank, cast("dist.ProcessGroup", Rank(rank, len(places)))
        return reach.find_nodes(group, torch.device("cuda", 0))

    monkeypatch.setattr(dist, "all_gather_object", threads.gather)
    monkeypatch.setattr(reach, "location_of", lambda _: places[now.rank])
    monkeypatch.setattr(reach, "ExportedBlock", Block)
    monkeypatch.setattr(reach, "map_fault", map_fault)
    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(find, range(len(places))))
    assert not blocks
    assert all(each == found[0] for each in found), "the same on every rank"
    return found[0]


def test_ranks_of_a_domain_try_to_map_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank sees one GPU of its own, and the last one has no domain.
    places = [each._replace(reached=frozenset([each.device])) for each in _rack(2)] + BOX[:1]
    domain, box = range(8), range(8, 9)
    found, _ = _find_on_threads(places, monkeypatch, lambda rank, peer: False)
    assert found == (domain, box)
    # The machines' services are not connected, in one direction.
    found, why = _find_on_threads(places, monkeypatch, lambda rank, peer: rank < 4 <= peer)
    assert found == (range(4), range(4, 8), box)
    assert "ranks 0 to 3: it cannot map memory of ranks 4 to 7, cuMemMap returned X; the IMEX services of" in why
    found, why = _find_on_threads(places, monkeypatch, lambda rank, peer: peer == 3)
    assert found == (range(3), range(3, 4), range(4, 8), box)
    assert "rank 3, there is no handle" in why


def test_emulated_nodes_are_parts_of_real_ones(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "find_nodes", lambda *_: ((range(4), range(4, 8)), "2 machines"))
    group = cast("dist.ProcessGroup", Rank(5, 8))
    assert find_reach(group, torch.device("cpu"), 2).here == range(4, 8)
    assert find_reach(group, torch.device("cpu"), 4).here == range(4, 6)
    assert find_reach(group, torch.device("cpu"), 4).why == "emulated, embedding.nodes is 4"
    with refuses(
        r"embedding\.nodes: 1 joins ranks that do not reach each other, 2 nodes \(.*; 2 machines\); take auto"
    ):
        find_reach(group, torch.device("cpu"), 1)


def test_each_message_is_taken_by_the_rank_at_the_senders_place() -> None:
    nodes = (range(3), range(3, 5), range(5, 6))
    assert [Reach(0, nodes).relay(source, nodes[1]) for source in (0, 1, 2, 5)] == [3, 4, 3, 3]
    assert [list(Reach(rank, nodes).sources) for rank in range(6)] == [[3, 5], [4], [], [0, 2, 5], [1], [0, 1, 2, 3, 4]]
    assert list(Reach(4, nodes).others) == [nodes[2], nodes[0]], "the next node first"
    assert Reach(4, nodes, "2 machines").summary() == "3 nodes (ranks 0 to 2, ranks 3 to 4, rank 5; 2 machines)"
    many = tuple(range(first, first + 2) for first in range(0, 256, 2))
    told = Reach(0, many, "128 machines").summary()
    assert told == "128 nodes (ranks 0 to 1, ranks 2 to 3, ranks 4 to 5, .., ranks 254 to 255; 128 machines)"


@pytest.mark.parametrize("lengths", [(2, 2), (2, 2, 2), (3, 1), (1, 3, 2), (1, 1, 1, 1), (5,)])
def test_a_rank_takes_what_is_relayed_to_it(lengths: Sequence[int]) -> None:
    starts = [0, *accumulate(lengths)]
    found = Reach(0, tuple(range(*ends) for ends in pairwise(starts)))
    ranks = range(starts[-1])
    taken: dict[int, list[int]] = {rank: [] for rank in ranks}
    for source in ranks:
        for node in found.nodes:
            if source not in node:
                taken[found.relay(source, node)].append(source)
    assert {rank: list(found.sources_of(rank)) for rank in ranks} == taken
    assert found.max_sources == max(map(len, taken.values()))


def test_nodes_are_emulated_if_they_divide_the_ranks(world_of_one: dist.ProcessGroup) -> None:
    assert find_reach(world_of_one, torch.device("cpu")).is_one_node
    assert find_reach(world_of_one, torch.device("cpu"), 1).nodes == (range(1),)
    with refuses(r"embedding\.nodes: 2 emulated nodes do not divide 1 ranks; take a divisor"):
        find_reach(world_of_one, torch.device("cpu"), 2)
