"""Which ranks make a node, and who passes on what."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.reach import Location, Reach, find_reach, nodes_of
from tests.conftest import refuses


def _locations(machines: str, reached: Sequence[str] = ()) -> list[Location]:
    """Return a GPU a rank, which reaches those of its machine, or those whose numbers are given."""
    numbers = [str(rank) for rank in range(len(machines))]
    ranks = zip(numbers, machines, reached or ["".join(numbers)] * len(machines), strict=True)
    return [Location(machine, number, frozenset([number, *others])) for number, machine, others in ranks]


@pytest.mark.parametrize(
    ("places", "nodes", "why"),
    [
        (_locations("aaaa"), [(0, 4)], ""),
        (_locations("aabb"), [(0, 2), (2, 4)], "2 machines"),
        (_locations("aaab"), [(0, 3), (3, 4)], "2 machines"),
        (_locations("abab"), [(0, 1), (1, 2), (2, 3), (3, 4)], "do not follow one another"),
        (_locations("aaaa", ["1", "0", "3", "2"]), [(0, 2), (2, 4)], "without access"),
        (_locations("aaa", ["12", "0", "01"]), [(0, 2), (2, 3)], "without access"),  # 2 reaches 1, but not 1 also 2
    ],
)
def test_nodes_are_runs_of_ranks_that_all_reach_each_other(
    places: list[Location], nodes: list[tuple[int, int]], why: str
) -> None:
    found, told = nodes_of(places)
    assert found == tuple(range(*node) for node in nodes)
    assert why in told


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
    reach = Reach(0, tuple(range(*ends) for ends in pairwise(starts)))
    ranks = range(starts[-1])
    taken: dict[int, list[int]] = {rank: [] for rank in ranks}
    for source in ranks:
        for node in reach.nodes:
            if source not in node:
                taken[reach.relay(source, node)].append(source)
    assert {rank: list(reach.sources_of(rank)) for rank in ranks} == taken
    assert reach.max_sources == max(map(len, taken.values()))


def test_nodes_are_emulated_if_they_divide_the_ranks(world_of_one: dist.ProcessGroup) -> None:
    assert find_reach(world_of_one, torch.device("cpu")).is_one_node
    assert find_reach(world_of_one, torch.device("cpu"), 1).nodes == (range(1),)
    with refuses(r"embedding\.nodes: 2 emulated nodes do not divide 1 ranks; take a divisor"):
        find_reach(world_of_one, torch.device("cpu"), 2)
