"""How many ids there may be and where they lie, worked by hand; and what is said of bounds that are none."""

from dataclasses import replace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.steps import with_float_weights
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


ANY = {"f": (0, 2), "g": (1, 1), "h": (0, 5)}


def _layout_with_any_ids(ranks: int, buckets: int) -> Layout:
    """Return a layout in which f and h share ids of any kind, g is whole on the last rank, and i is cut by rows."""
    shards = [
        make_shard(name, rank, 4, rows=(rank * 12, rank * 12 + 12), row_shard=rank, feature=index, buckets=of)
        for rank in range(ranks)
        for index, (name, of) in enumerate((("f", buckets), ("h", 3 * ranks * (buckets > 0)), ("i", 0)))
    ]
    named = [replace(shard, feature_name="h") if shard.name == "i" else shard for shard in shards]
    return Layout([*named, make_shard("g", ranks - 1, 4, feature=3)], ["f", "g", "h", "i"], ranks)


@pytest.mark.parametrize("weighted", [False, True])
def test_windows_have_high_words_only_with_a_table_of_any_id(weighted: bool) -> None:
    capacity = BatchCapacity(3, ANY)
    without, with_any = (
        IdLayout(_layout_with_any_ids(2, buckets), ["f", "g", "h"], capacity, weighted) for buckets in (0, 4)
    )
    values = 6 + 3 + 15
    shared = 6 + 15 + 15  # h and i, tables of one feature, are cut in different ways
    assert (without.wide, with_any.wide) == (False, True)
    plane = values + 6 + 15 + 3  # h and i are cut in one way; a multiple of 4
    assert without.windows == ("ids", Region((plane * (1 + weighted) + 8 * 3 + 1,), torch.int32), 1)
    assert without.offsets_at == plane * (1 + weighted)
    plane = values + shared
    assert (with_any.weights_at, with_any.high_at) == (plane, plane * (1 + weighted))
    assert with_any.offsets_at == plane * (2 + weighted)
    assert with_any.windows == ("ids", Region((with_any.offsets_at + 10 * 3 + 1,), torch.int32), 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_of_buckets_and_of_rows(ranks: int) -> None:
    """f has 4 buckets, h 3 on each rank; a rank alone has a share of all buckets, or of all rows."""
    ids = IdLayout(_layout_with_any_ids(ranks, 4), ["f", "g", "h"], BatchCapacity(3, ANY))
    every, h = 1 << 32, 3 * ranks
    if ranks == 1:
        assert ids.shares == [(0, 0, 4, 4), (2, 0, h, h), (2, 0, every, 0)]
        assert ids.features(0) == [4, 5, 6, 1]
    else:
        assert ids.shares == [(0, 0, 2, 4), (0, 2, 4, 4), (2, 0, 3, h), (2, 0, 12, 0), (2, 3, 6, h), (2, 12, every, 0)]
        assert [ids.features(rank) for rank in range(2)] == [[4, 6, 7], [5, 8, 9, 1]]
    assert not ids.known_lengths
    assert IdLayout(ids.layout, ["f", "g", "h"], BatchCapacity(3, dict.fromkeys("fgh", (1, 1)))).known_lengths is False


def test_a_rank_has_whole_buckets() -> None:
    for buckets, told in ((3, "f: rows 0 to 12, but buckets have 8 rows"), (5, "f: 24 rows, but 5 buckets")):
        with pytest.raises(AssertionError, match=told):
            _ = IdLayout(_layout_with_any_ids(2, buckets), ["f", "g", "h"], BatchCapacity(3, ANY)).shares
    with pytest.raises(AssertionError, match="f: a table of any id is cut by rows, also on 1 rank"):
        make_shard("f", 0, 4, buckets=4)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, None])
def test_weights_of_ids_are_float32_and_integers_are_none(dtype: torch.dtype | None) -> None:
    """As for FBGEMM; positions of ids, for example, come as integers."""
    given = None if dtype is None else torch.tensor([2, 0, 3]).to(dtype)
    ids = KeyedJaggedTensor(["f"], torch.tensor([5, 6, 7]), given, lengths=torch.tensor([1, 2]))
    found = with_float_weights(ids)
    assert (found.values().tolist(), found.offsets().tolist()) == ([5, 6, 7], [0, 1, 3])
    weights = found.weights_or_none()
    if dtype is not None and dtype.is_floating_point:
        assert weights is not None
        assert (weights.dtype, weights.tolist()) == (torch.float32, [2, 0, 3])
    else:
        assert weights is None
