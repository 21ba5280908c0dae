"""Tables are placed so that ranks have alike work, cut no more than that takes, where there is room."""

import pytest

from dlrm_overlap.config import Config
from dlrm_overlap.embedding.balance import Balance, TableLoad, balance
from dlrm_overlap.launching.parsing import parse_config

_ROOM = 1 << 40


def _mlperf() -> list[TableLoad]:
    argv = ["--config", "configs/mlperf_dcnv2.yaml"]
    config, _ = parse_config(Config, "train", "", argv)
    rows, pooling, dim = config.data.tables.rows, config.data.tables.multi_hot, config.model.dim
    assert isinstance(rows, list)
    assert isinstance(pooling, list)
    row_bytes = 4 * dim
    return [
        TableLoad(float(ids), dim, row_bytes, min(n, 4_000_000) * (row_bytes + 4), min(n, 4_000_000))
        for n, ids in zip(rows, pooling, strict=True)
    ]


def _placed(tables: list[TableLoad], world_size: int, room: int = _ROOM, cut_columns: bool = True) -> Balance:
    placed = balance(tables, world_size, room, cut_columns)
    assert placed is not None
    return placed


def _work(tables: list[TableLoad], placed: Balance, world_size: int) -> tuple[list[float], list[float], list[float]]:
    """Return the row elements that each rank reads, its columns and its bytes, by adding up its shards."""
    memory, links, held = ([0.0] * world_size for _ in range(3))
    for number, (table, ranks) in enumerate(zip(tables, placed.ranks, strict=True)):
        assert len(set(ranks)) == len(ranks), "one shard of a table a rank"
        by_rows = number in placed.by_rows
        assert ranks == list(range(world_size)) if by_rows else table.dim % (4 * len(ranks)) == 0
        filled = 1 - (1 - 1 / world_size) ** table.pooling  # of the bags, have ids of a rank's rows
        for rank in ranks:
            memory[rank] += table.pooling * table.dim / len(ranks)
            links[rank] += table.dim * filled if by_rows else table.dim / len(ranks)
            held[rank] += table.bytes / len(ranks)
    return memory, links, held


@pytest.mark.parametrize(("world_size", "cut"), [(1, []), (2, []), (4, [20]), (8, [20, 21])])
def test_mlperfs_tables_are_within_10_percent(world_size: int, cut: list[int]) -> None:
    tables = _mlperf()
    placed = _placed(tables, world_size)
    memory, links, _ = _work(tables, placed, world_size)
    for work, said in ((memory, placed.memory), (links, placed.links)):
        assert max(work) * world_size / sum(work) == pytest.approx(said)
        assert said <= 1.1
    assert [t for t, ranks in enumerate(placed.ranks) if len(ranks) > 1] == cut, "the tables of most ids, and no others"
    assert placed == balance(tables, world_size, _ROOM), "all ranks compute the same"


def test_all_rows_of_a_table_that_is_not_pooled_travel() -> None:
    """Pooled, all tables stay whole. Else the first sends 8 rows a bag, and from an owner of rows those that it has."""
    tables = [TableLoad(8.0, 64, 256, 1 << 20, 4096), *[TableLoad(8.0, 64, 256, 1 << 20)] * 3]
    assert _placed(tables, 2, cut_columns=False).by_rows == frozenset()
    placed = _placed([tables[0]._replace(pooled=False), *tables[1:]], 2, cut_columns=False)
    assert (placed.by_rows, placed.links) == (frozenset({0}), pytest.approx((4 + 2) / 5.5))


def test_rows_are_not_cut_shorter_than_memory_gives() -> None:
    (ranks,) = _placed([TableLoad(10.0, 64, 256, 1 << 20)], 8).ranks
    assert len(ranks) == 4, "rows of 64 bytes"
    (ranks,) = _placed([TableLoad(10.0, 12, 48, 1 << 20)], 8).ranks
    assert len(ranks) == 1


def test_room_comes_before_balance() -> None:
    large, small = TableLoad(1.0, 16, 64, 8 << 30), TableLoad(50.0, 16, 64, 1 << 20)
    tables = [large, large, small, small]
    placed = _placed(tables, 2, room=9 << 30)
    _, _, held = _work(tables, placed, 2)
    assert max(held) <= 9 << 30
    assert balance(tables, 2, 7 << 30) is None
    assert balance([large] * 3, 2, 9 << 30) is None, "two of them share no rank"


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_rows_are_cut_where_columns_do_not_balance(world_size: int) -> None:
    """Row-wise Adagrad's state forbids cuts of columns; the rows of the table of most ids are cut then."""
    tables = _mlperf()
    whole = _placed([table._replace(rows=0) for table in tables], world_size, cut_columns=False)
    assert all(len(ranks) == 1 for ranks in whole.ranks)
    placed = _placed(tables, world_size, cut_columns=False)
    assert placed.by_rows == {20}
    assert all(len(ranks) == 1 for table, ranks in enumerate(placed.ranks) if table not in placed.by_rows)
    assert placed.worst < 0.7 * whole.worst
    memory, links, _ = _work(tables, placed, world_size)
    assert max(memory) * world_size / sum(memory) == pytest.approx(placed.memory)
    assert max(links) * world_size / (26 * 128) == pytest.approx(placed.links), "over the mean of whole tables"


def test_of_several_nodes_rows_are_cut_within_one() -> None:
    tables = _mlperf()
    placed = balance(tables, 64, _ROOM, machine_size=8)
    assert placed is not None
    nodes = [list(range(first, first + 8)) for first in range(0, 64, 8)]
    assert all(placed.ranks[t] in nodes for t in placed.by_rows)
    assert placed.by_rows == {t for t, table in enumerate(tables) if table.rows >= 8 * 8}, "columns of the others"
    ids = sum(table.pooling for table in tables)
    assert placed.memory == pytest.approx((tables[20].pooling / 8) / (ids / 64)), (
        "no rank has more than an eighth of it"
    )
    assert placed.links < 1.5, "the network counts more"
    unpooled = balance([TableLoad(100.0, 64, 256, 1 << 20, 1 << 20, False)], 4, _ROOM, machine_size=2)
    assert unpooled is not None
    assert (unpooled.ranks, unpooled.by_rows) == ([[0, 1, 2, 3]], frozenset()), "by columns, whose owners may be any"
    large = balance([TableLoad(1.0, 64, 256, 6 << 30, 1 << 20)], 4, 2 << 30, machine_size=2)
    assert large is not None
    assert (large.ranks, large.by_rows) == ([[0, 1, 2, 3]], {0}), "a machine has no room"


def test_a_table_is_cut_to_fit() -> None:
    (ranks,) = _placed([TableLoad(1.0, 64, 256, 8 << 30)], 4, room=3 << 30).ranks
    assert len(ranks) == 4
    small = [TableLoad(20.0, 16, 64, 1 << 20, 1000)] * 4
    placed = _placed([TableLoad(1.0, 16, 64, 8 << 30, 1 << 27), *small], 4, room=3 << 30)
    assert placed.by_rows == {0}, "the largest, whose rows have no columns to spare, not those of most ids"
    few = TableLoad(1.0, 16, 64, 8 << 30, 15)
    assert balance([few], 4, 3 << 30) is None, "so few rows that a rank might get none"
