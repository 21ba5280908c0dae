"""Which rows are updated together; gradients as kernels read them: taken as they are, or copied before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.embedding.backends.rows import InputRows, in_readable_rows
from dlrm_overlap.embedding.tables import StoredRows
from tests.agreement import assert_same
from tests.unit.embedding.shards import make_shard

_ROWS = torch.arange(48.0).view(4, 12)


@pytest.mark.parametrize(
    ("gradient", "taken"),
    [
        (_ROWS, True),
        (_ROWS[:, 4:], True),
        (_ROWS[:, 1:], False),
        (_ROWS.view(12, 4).t(), False),
        (_ROWS[0].expand(4, 12), False),
        (torch.ones(()).expand(4, 12), False),
        (_ROWS[:0], True),
    ],
    ids=["whole", "columns", "unaligned", "transposed", "of a sum over samples", "of a sum", "empty"],
)
def test_gradients_are_copied_where_they_cannot_be_read(gradient: torch.Tensor, taken: bool) -> None:
    read = in_readable_rows(gradient)
    assert (read is gradient) == taken
    assert_same(read, gradient, "gradient")
    assert read.shape[0] == 0 or (read.stride(1) == 1 and read.stride(0) >= read.shape[1])


@pytest.mark.parametrize(
    ("parts", "boundaries", "first_keys"),
    [((0, 0, 0), [0, 10, 15], [0, 0, 10, 15]), ((0, 1, 1), [0, 10, 20, 25], [0, 10, 20, 25])],
    ids=["one part", "two parts"],
)
def test_tables_in_one_cache_are_updated_together(
    parts: tuple[int, ...], boundaries: list[int], first_keys: list[int]
) -> None:
    """Two tables name slots of one cache of 10, a third one has 5 rows of its own."""
    cache, own = torch.zeros(10, 4), torch.zeros(5, 4)
    shards = [make_shard(name, 0, 4, feature=number, table=number) for number, name in enumerate("abc")]
    rows = dict(zip(shards, (cache, cache, own), strict=True))
    tables: Any = SimpleNamespace(
        weight=rows.get,
        reserved_rows=lambda _: None,
        marks=None,
        states=lambda shard: [rows[shard][:, 0]],
        stored=lambda shard: StoredRows(rows[shard].flatten(), (rows[shard][:, 0],), "rowwise_adagrad", False),
    )
    found = InputRows(shards, tables, dict.fromkeys(shards, 0), dict(zip(shards, parts, strict=True)))
    assert found.input_features.boundaries.tolist() == boundaries
    assert found.input_features.entries[:, 3].tolist() == first_keys
    assert len(found.ranges) == len(boundaries) - 1
