"""Which rank pools what, and where it lies: worked on a layout with every irregularity at once."""

from dataclasses import replace

import pytest

from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout
from dlrm_overlap.embedding.layout import Layout
from tests.unit.embedding.shards import make_shard

# The model's order. Rank 0 holds `wide` in two shards of its four, a table of two features, in two lookups; rank 1
# holds nothing; rank 2 the rest, in another order than the model's and from two inputs.
NAMES = ["a", "wide", "b", "c"]


SHARDS = [
    make_shard("b", 0, 8),
    make_shard("c", 0, 8, feature=1),
    make_shard("wide", 0, 4, input=1, lookup=1, first_column=4),
    make_shard("wide", 0, 4, input=1, feature=1, lookup=1, table=1, first_column=12),
    make_shard("wide", 2, 4, input=1, first_column=8),
    make_shard("wide", 2, 4, input=1, feature=1, table=1),
    make_shard("a", 2, 12, input=0, lookup=1),
]


@pytest.fixture
def layout() -> Layout:
    return Layout(SHARDS, NAMES, world_size=3)


def test_the_output_lies_in_the_models_order(layout: Layout) -> None:
    assert layout.names == NAMES
    assert layout.dims == [12, 16, 8, 8]
    assert layout.total_dim == 44
    assert [layout.column(shard) for shard in SHARDS] == [28, 36, 16, 24, 20, 12, 0]


def test_partial_sums_of_a_table_that_is_cut_by_rows() -> None:
    """The first owner's arrive where the sum is read, those of the others after all columns of the output."""
    cut = [make_shard("cut", owner, 4, rows=(owner * 3, owner * 3 + 3), row_shard=owner) for owner in range(3)]
    layout = Layout([make_shard("whole", 0, 8), *cut, make_shard("last", 1, 8)], ["whole", "cut", "last"], 3)
    assert (layout.total_dim, layout.arrival_dim, layout.dims) == (20, 28, [8, 4, 8])
    assert layout.partial_sums == [(tuple(cut),)]
    assert [layout.column(shard) for shard in cut] == [8, 20, 24]
    assert [layout.column(shard) for shard in cut] == [8, 20, 24]
    assert [layout.output_column(shard) for shard in cut] == [8, 8, 8]
    assert layout.owner_columns(1).tolist() == [8, 9, 10, 11, *range(12, 20)]
    assert sorted(layout.sent_columns.tolist()) == list(range(28))


def test_owners_of_rows_have_slots_of_their_own_between_nodes() -> None:
    """A table of 5 rows over three ranks, the last of which has none, and a table that is whole on rank 1."""
    rows = [(0, 3), (3, 5), (5, 5)]
    shards = [make_shard("cut", owner, 4, rows=rows[owner], row_shard=owner) for owner in range(3)]
    shards = [replace(shard, slots=True) for shard in (*shards, make_shard("whole", 1, 4))]
    layout = Layout(shards, ["cut", "whole"], 3)
    assert [*layout.row_ranges(cut=False)] == ["cut", "whole"]
    ranges = layout.row_ranges(cut=True)
    assert [(name, *each) for name, each in ranges.items()] == [
        ("cut, rows from 0", "cut", 0, 0), ("cut, rows from 3", "cut", 1, 3), ("whole", "whole", None, 0),
    ]  # fmt: skip
    features = layout.with_features(
        {"a": ranges["cut, rows from 0"], "b": ranges["cut, rows from 3"], "c": ranges["whole"]}
    )
    assert [[(shard.name, shard.rows) for shard in of] for of in features.by_owner] == [
        [("a", (0, 3))], [("b", (3, 5)), ("c", (0, 0))], [],
    ]  # fmt: skip
    assert features.dims == [4, 4, 4]
    ids = IdLayout(features, list("abc"), BatchCapacity(2, dict.fromkeys("abc", (0, 1))))
    assert ids.shares == [(0, 0, 1 << 32, 0), (1, 3, 1 << 32, 0)], "each has all ids of its feature, less its first row"


def test_shares_of_a_feature_whose_tables_are_cut_at_other_rows() -> None:
    """Shares that are alike are published once; there is room for all ids of either cut."""
    cuts = [("a", owner, (owner * 3, owner * 3 + 3)) for owner in range(4)] + [("b", 0, (0, 3)), ("b", 1, (3, 6))]
    shards = [make_shard(name, owner, 4, rows=rows, row_shard=owner) for name, owner, rows in cuts]
    named = [replace(shard, feature_name="f") for shard in shards]
    ids = IdLayout(Layout(named, ["a", "b"], 4), ["other", "f"], BatchCapacity(2, {"other": (1, 1), "f": (0, 5)}))
    every = 1 << 32
    assert [share[:3] for share in ids.shares] == [(1, 0, 3), (1, 3, 6), (1, 3, every), (1, 6, 9), (1, 9, every)]
    assert (ids.shares_at, ids.shared_values, ids.offsets_at) == (12, 20, 32)
    assert [ids.features(rank) for rank in range(4)] == [[3, 3], [4, 5], [6], [7]]
    assert ids.published_capacity == [2, 10, 12, 10, 10, 10, 10, 10]
    assert not ids.known_lengths
