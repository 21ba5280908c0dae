"""How many ids there may be and where they lie, worked by hand; and what is said of bounds that are none."""

import pytest
import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout
from dlrm_overlap.embedding.layout import Layout
from tests.conftest import refuses
from tests.unit.embedding.shards import make_shard

# Rank 0 owns the table of f and a half of that of g, rank 1 the other half; rank 2 owns nothing.
SHARDS = [make_shard("g", 0, 4), make_shard("f", 0, 4, feature=1, table=1), make_shard("g", 1, 4, first_column=4)]
LAYOUT = Layout(SHARDS, ["f", "g"], world_size=3)
RANGES, KNOWN = {"f": (1, 1), "g": (0, 2)}, {"f": (1, 1), "g": (2, 2)}


def _ids(bag_sizes: dict[str, tuple[int, int]], layout: Layout = LAYOUT) -> IdLayout:
    return IdLayout(layout, ["f", "g"], BatchCapacity(3, bag_sizes))


def test_the_worked_example() -> None:
    pair = Layout([make_shard("g", 0, 4), make_shard("f", 1, 4)], ["f", "g"], world_size=2)
    ids = _ids(RANGES, pair)
    assert (ids.capacity, ids.values, ids.offsets_at) == ([3, 6], 9, 12)
    assert ids.windows.regions(2)["ids0"] == Region((12 + 2 * 3 + 1,), torch.int32)
    assert [ids.arriving(ids.features(rank), 2) for rank in range(2)] == [2 * 6, 2 * 3]


def test_known_ids_are_counted_of_the_features_that_a_batch_has() -> None:
    """The bound may name features of other ids, which are published apart."""
    bound = BatchCapacity(3, KNOWN | {"of another module": (7, 7)})
    assert IdLayout(LAYOUT, ["f", "g"], bound).known_total(2) == 2 * (1 + 2)


@pytest.mark.parametrize(
    ("samples", "sizes", "told"),
    [
        (0, (1, 1), "BatchCapacity: 0 samples, but a batch has at least 1; give the samples of a rank's batch"),
        (3, (2, 1), r"BatchCapacity: \(2, 1\) ids a bag of f is not a range; give \(least, most\)"),
        (3, (-1, 1), r"BatchCapacity: \(-1, 1\) ids a bag of f is not a range"),
        (3, 4, r"BatchCapacity: 4 ids a bag of f is not a range; give \(least, most\)"),
    ],
)
def test_what_is_no_bound(samples: int, sizes: tuple[int, int], told: str) -> None:
    with refuses(told):
        BatchCapacity(samples, {"f": sizes})


def test_a_feature_without_a_bound() -> None:
    with refuses("feature h has no bag size; add it to bag_sizes"):
        BatchCapacity(3, KNOWN).capacity(["f", "h"])
