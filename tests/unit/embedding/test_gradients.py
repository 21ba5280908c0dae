"""Where gradients lie at their owners, and in which parts they travel: worked on a layout with every irregularity."""

import pytest
import torch

from dlrm_overlap.embedding import gradient_layout
from dlrm_overlap.embedding.gradient_layout import GradientLayout
from dlrm_overlap.embedding.layout import Layout
from tests.conftest import refuses
from tests.unit.embedding.shards import make_shard

# Rank 0 holds two lookups, in each a table of two features and one of one; rank 1 nothing; rank 2 two tables, of which
# the first makes up nearly all columns.
SHARDS = [
    make_shard("a", 0, 8),
    make_shard("b", 0, 8, feature=1),
    make_shard("c", 0, 12, feature=2, table=1),
    make_shard("d", 0, 4, input=1, lookup=1),
    make_shard("e", 0, 4, input=1, feature=1, lookup=1),
    make_shard("f", 0, 16, input=1, feature=2, lookup=1, table=1, first_column=16),
    make_shard("f", 2, 16),
    make_shard("g", 2, 64, feature=1, table=1),
]
LAYOUT = Layout(SHARDS, ["g", "f", "e", "d", "c", "b", "a"], world_size=3)


def _in_parts(patch: pytest.MonkeyPatch, parts: int, layout: Layout = LAYOUT) -> GradientLayout:
    window_bytes = max(layout.owner_dims) * 5 * layout.world_size * 4
    patch.setattr(gradient_layout, "_MAX_PARTS", parts)
    patch.setattr(gradient_layout, "_PART_BYTES", window_bytes // parts)
    made = GradientLayout(layout, 5, torch.float32)
    assert made.parts == parts
    return made


@pytest.mark.parametrize("parts", range(1, 9))
def test_every_shard_travels_once_in_order_and_no_table_is_split(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    made = _in_parts(monkeypatch, parts)
    assert len(made.shards) == parts
    for owner, shards in enumerate(LAYOUT.by_owner):
        assert [shard for by_owner in made.shards for shard in by_owner[owner]] == shards
        tables = [{(shard.lookup, shard.table) for shard in by_owner[owner]} for by_owner in made.shards]
        assert sum(map(len, tables)) == len(set().union(*tables)), f"rank {owner} has a table in two parts"
    assert [made.part_of[shard] for shard in SHARDS] == [
        part for shard in SHARDS for part in range(parts) if shard in made.shards[part][shard.owner]
    ]


def test_parts_go_by_columns_the_first_half_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    even = Layout([make_shard(f"{i}", 0, 4, feature=i, table=i) for i in range(10)], list("0123456789"), world_size=1)
    assert [len(shards) for (shards,) in _in_parts(monkeypatch, 3, even).shards] == [2, 4, 4]
    by_part = _in_parts(monkeypatch, 4).shards
    assert by_part[0] == [SHARDS[:2], [], SHARDS[6:7]]
    assert [part[0] for part in by_part[1:]] == [SHARDS[2:3], SHARDS[3:6], []]
    assert [part[2] for part in by_part[1:]] == [SHARDS[7:], [], []], "fewer tables than parts"


def test_a_window_has_no_more_elements_than_its_updates_can_count() -> None:
    """Rank 2 of 3 has 80 columns."""
    most = gradient_layout._MAX_ELEMENTS // (80 * 3)
    assert GradientLayout(LAYOUT, most, torch.bfloat16).parts == 6
    with refuses(
        r"gradients: 80 columns of a rank for \d+ samples of all ranks are more than 8589934592 elements; take"
    ):
        GradientLayout(LAYOUT, most + 1, torch.bfloat16)


def test_only_large_windows_are_cut() -> None:
    assert GradientLayout(LAYOUT, 5, torch.float32).parts == 1
    columns, enough = max(LAYOUT.owner_dims) * 3, 2 * gradient_layout._PART_BYTES
    samples = -(-enough // (4 * columns))
    assert GradientLayout(LAYOUT, samples, torch.float32).parts == 2
    assert GradientLayout(LAYOUT, samples, torch.bfloat16).parts == 1, "half the bytes"
    assert GradientLayout(LAYOUT, 100 * samples, torch.float32).parts == gradient_layout._MAX_PARTS


def _weighted(patch: pytest.MonkeyPatch, parts: int, bag_ids: dict[str, float]) -> GradientLayout:
    """Return the layout of five tables of one size on rank 0, and one on rank 1, cut in parts."""
    shards = [make_shard(name, 0, 4, feature=i, table=i) for i, name in enumerate("abcde")]
    layout = Layout([*shards, make_shard("f", 1, 4)], list("abcdef"), world_size=2)
    patch.setattr(gradient_layout, "_MAX_PARTS", parts)
    patch.setattr(gradient_layout, "_PART_BYTES", 1)
    return GradientLayout(layout, 5, torch.float32, bag_ids)


def _names(made: GradientLayout, rank: int = 0) -> list[str]:
    return ["".join(shard.name for shard in part[rank]) for part in made.shards]


def test_heavy_tables_travel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of rank 0's 10 ids a sample, d has 4 and b has 3: each more than a quarter.
    ids = {"a": 1.0, "b": 3.0, "c": 1.0, "d": 4.0, "e": 1.0, "f": 100.0}
    made = _weighted(monkeypatch, 3, ids)
    assert _names(made) == ["b", "ad", "ce"], "b, d, then a, c, e: half a part, then twos, each in order of the shards"
    assert _names(made, rank=1) == ["f", "", ""]
    assert _names(_weighted(monkeypatch, 5, ids)) == ["b", "d", "a", "c", "e"]
