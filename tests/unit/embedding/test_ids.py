"""How many ids there may be and where they lie, worked by hand; and what is said of bounds that are none."""

import pytest
import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_layout import BatchBound, IdLayout, joined
from dlrm_overlap.embedding.layout import Layout
from tests.unit.embedding.shards import make_shard

# Rank 0 owns the table of f and a half of that of g, rank 1 the other half; rank 2 owns nothing.
SHARDS = [make_shard("g", 0, 4), make_shard("f", 0, 4, feature=1, table=1), make_shard("g", 1, 4, first_column=4)]
LAYOUT = Layout(SHARDS, ["f", "g"], world_size=3)
RANGES, KNOWN = {"f": (1, 1), "g": (0, 2)}, {"f": (1, 1), "g": (2, 2)}


def _ids(bag_sizes: dict[str, tuple[int, int]], layout: Layout = LAYOUT) -> IdLayout:
    return IdLayout(layout, ["f", "g"], BatchBound(3, bag_sizes))


def test_the_worked_example() -> None:
    pair = Layout([make_shard("g", 0, 4), make_shard("f", 1, 4)], ["f", "g"], world_size=2)
    ids = _ids(RANGES, pair)
    assert (ids.capacity, ids.values, ids.offsets_at) == ([3, 6], 9, 12)
    assert ids.windows.regions(2)["ids0"] == Region((12 + 2 * 3 + 1,), torch.int32)
    assert [ids.arriving(ids.features(rank), 2) for rank in range(2)] == [2 * 6, 2 * 3]


def test_windows_have_two_sides_and_a_flag_a_rank() -> None:
    window, flags = Region((19,), torch.int32), Region((3, 1), torch.int64)
    assert _ids(RANGES).windows.regions(3) == {"ids0": window, "ids1": window, "ids_ready": flags}
    assert _ids(KNOWN).windows.regions(3)["ids0"] == Region((13,), torch.int32), "the number of ids alone"


def test_owners_ask_for_features_in_the_order_of_their_shards() -> None:
    ids = _ids(RANGES)
    assert [ids.features(rank) for rank in range(3)] == [[1, 0], [1], []]
    assert [ids.arriving(ids.features(rank), 3) for rank in range(3)] == [3 * (6 + 3), 3 * 6, 0]


def test_lengths_are_known_where_every_bag_of_a_feature_has_as_many_ids() -> None:
    assert BatchBound(3, KNOWN).known_lengths
    assert not BatchBound(3, RANGES).known_lengths
    assert BatchBound(3, RANGES).mean_bag_sizes == {"f": 1.0, "g": 1.0}


def test_known_arrivals() -> None:
    ids = _ids(KNOWN)
    sources, counts, arrivals, starts = ids.known_arrivals(ids.features(0), 3, samples=3)
    assert sources == [3, 3, 3, 0, 0, 0], "g's ids begin behind f's 3"
    assert counts == [6, 6, 6, 3, 3, 3]
    assert arrivals == [0, 6, 12, 18, 21, 24]
    assert starts == [0, 18, 27]
    assert ids.known_arrivals(ids.features(0), 3, samples=2)[0] == [2, 2, 2, 0, 0, 0], "a smaller batch lies closer"
    assert ids.known_arrivals(ids.features(2), 3, samples=3) == ([], [], [], [0])


def test_known_ids_are_counted_of_the_features_that_a_batch_has() -> None:
    """The bound may name features of other ids, which are published apart."""
    bound = BatchBound(3, KNOWN | {"of another module": (7, 7)})
    assert IdLayout(LAYOUT, ["f", "g"], bound).known_total(2) == 2 * (1 + 2)


def test_all_ids_of_an_owner_become_one_input() -> None:
    inputs = [make_shard("a", 0, 4), make_shard("b", 0, 4, input=1, lookup=1), make_shard("c", 1, 4, input=1)]
    made = joined(Layout(inputs, ["c", "b", "a"], world_size=2))
    assert [[(s.name, s.input, s.feature, s.lookup) for s in owned] for owned in made.by_owner] == [
        [("a", 0, 0, 0), ("b", 0, 1, 1)],
        [("c", 0, 0, 0)],
    ]
    assert made.names == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("samples", "sizes", "told"),
    [
        (0, (1, 1), "BatchBound: 0 samples, but a batch has at least 1; give those of a rank's batch"),
        (3, (2, 1), r"BatchBound: 2 \.\. 1 ids a bag of f is no range; give \(least, most\)"),
        (3, (-1, 1), r"BatchBound: -1 \.\. 1 ids a bag of f is no range"),
        (3, 4, r"BatchBound: 4 ids a bag of f are no pair; give \(least, most\)"),
    ],
)
def test_what_is_no_bound(samples: int, sizes: tuple[int, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        BatchBound(samples, {"f": sizes})


def test_a_feature_without_a_bound() -> None:
    with pytest.raises(InputError, match="no bound for the ids of feature h; name it in bag_sizes"):
        BatchBound(3, KNOWN).capacity(["f", "h"])
