"""The rows of a delta in their file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm_overlap.checkpoint import apply_deltas, delta_files, row_changes
from dlrm_overlap.checkpoint.apply_deltas import apply
from dlrm_overlap.checkpoint.delta_files import (
    EVICT,
    UPDATE,
    ChangedRows,
    DeltaManifest,
    delta_name,
    deltas_in,
    in_bytes,
    read_changes,
    read_delta,
    schema_of,
    write_changes,
)
from dlrm_overlap.checkpoint.deltas import Deltas
from dlrm_overlap.checkpoint.row_changes import RowChanges, TableShard
from dlrm_overlap.embedding.row_marks import RowMarks
from dlrm_overlap.kernels.ids.id_map import EMPTY, mix
from dlrm_overlap.kernels.reference import mark_rows

CPU = torch.device("cpu")
_SAME = {
    "global_step": "int64", "rank": "int32", "world_size": "int32", "feature_name": "string", "table_fqn": "string",
    "key_id": "int64", "row": "int64",
}  # fmt: skip
_LAST = {"source": "string", "column": "int32"}
SCHEMAS = {
    "float32": {**_SAME, "embedding": "list<element: float>", **_LAST},
    "int8": {**_SAME, "embedding": "list<element: uint8>", "scale": "float", "bias": "float", **_LAST},
}
UPDATED = ChangedRows(
    "tables.a.weight", "a", UPDATE, 4, torch.tensor([-5, 2**62, 7]), torch.tensor([1, 0, 9]), torch.randn(3, 8).half()
)
GONE = ChangedRows("tables.b.weight", "b", EVICT, 0, torch.tensor([3, -(2**63)]), torch.tensor([8, 4]), None)


@pytest.mark.parametrize("dtype", SCHEMAS)
def test_rows_are_read_as_they_were_written(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_files, "_GROUP_BYTES", 4 * 8 * 2)  # two rows of UPDATED
    name = "tables_rank1.parquet"
    pieces = write_changes(tmp_path / name, [UPDATED, GONE], 30, 1, 2, dtype)
    table = pq.read_table(tmp_path / name)
    assert {field.name: str(field.type) for field in table.schema} == SCHEMAS[dtype]
    assert table.schema.equals(schema_of(dtype))
    assert table["global_step"].to_pylist() == [30] * 5
    assert (table["rank"].to_pylist(), table["world_size"].to_pylist()) == ([1] * 5, [2] * 5)
    assert table["embedding"].null_count == 2

    first, second, gone = read_changes(tmp_path, DeltaManifest(30, {}, files={name: pieces}))
    for number, found in enumerate((first, second)):
        part = slice(2 * number, 2 * number + 2)
        assert found[:4] == UPDATED[:4]
        assert torch.equal(found.keys, UPDATED.keys[part])
        assert torch.equal(found.rows, UPDATED.rows[part])
        assert UPDATED.values is not None
        assert found.values is not None
        expected = UPDATED.values[part].float()
        step = (expected.amax(1) - expected.amin(1))[:, None] / 255
        assert ((found.values - expected).abs() <= (0.501 * step if dtype == "int8" else 0)).all()
    assert gone[:4] == GONE[:4]
    assert torch.equal(gone.keys, GONE.keys)
    assert gone.values is None


def test_changed_rows_of_a_shard_have_their_numbers_in_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_changes, "_CHUNK_BYTES", 4 * 4 * 2)  # two rows are gathered at a time
    weights, rows, marks = torch.randn(70, 4), torch.tensor([0, 3, 33, 34, 69]), RowMarks({(0, 1): 70}, CPU)
    mark_rows(marks.words_of((0, 1)), rows)
    tables: Any = SimpleNamespace(marks=marks)
    shard = TableShard("tables.a.weight", "a", tables, (0, 1), weights, first_row=1000, first_column=8, ids=None)
    (found,) = RowChanges(Mock())._of(shard, torch.tensor(True))
    assert found[:4] == ("tables.a.weight", "a", UPDATE, 8)
    assert torch.equal(found.keys, 1000 + rows)
    assert torch.equal(found.rows, 1000 + rows)
    assert found.values is not None
    assert torch.equal(found.values, weights[rows])


def test_a_tombstone_after_the_new_id_of_its_row_leaves_this_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes come in no particular order: row 1 lost id 5 to id 6, and row 2 lost id 7."""
    table, ids = "tables.any.weight", "collision._managed_collision_modules.any._hash_zch_identities"
    weights = {table: torch.zeros(4, 2), ids: torch.tensor([EMPTY, 5, 7, EMPTY])[:, None]}
    weights[ids] = torch.where(weights[ids] == EMPTY, EMPTY, mix(weights[ids]))
    updated = ChangedRows(table, "any", UPDATE, 0, torch.tensor([6]), torch.tensor([1]), torch.ones(1, 2))
    gone = ChangedRows(table, "any", EVICT, 0, torch.tensor([5, 7]), torch.tensor([1, 2]), None)
    monkeypatch.setattr(apply_deltas, "read_changes", lambda *_: [updated, gone])
    monkeypatch.setattr(apply_deltas, "read_dense", lambda *_: {})
    apply(tmp_path, Mock(), weights)
    assert weights[ids].flatten().tolist() == [EMPTY, int(mix(torch.tensor(6))), EMPTY, EMPTY]


@pytest.mark.parametrize(("keep", "kept"), [(None, [1, 2, 10, 11]), (1, [11]), (3, [2, 10, 11]), (9, [1, 2, 10, 11])])
def test_the_last_deltas_are_kept(keep: int | None, kept: list[int], tmp_path: Path) -> None:
    deltas: Any = Mock(folder=tmp_path)
    deltas._config.checkpoint.delta_keep = keep
    for step in (1, 2, 10, 11):
        temporary = tmp_path / f".partial_delta_{step}"
        temporary.mkdir()
        manifest = DeltaManifest(step, {}, base={"step": 0, "digest": "0" * 32, "same": []})
        Deltas._commit(deltas, temporary, tmp_path / delta_name(step), manifest)
    assert list(deltas_in(tmp_path)) == kept
    assert deltas._delta == (11, read_delta(tmp_path / "delta_11").digest)


@pytest.mark.parametrize(
    ("delta", "checkpoint", "digest", "same"),
    [
        ((6, "d6"), None, "d6", []),
        ((6, "d6"), "c6", "c6", ["d6"]),
        ((3, "d3"), "c6", "c6", []),
        (None, "c6", "c6", []),
    ],
)
def test_a_delta_follows_what_has_the_weights_of_the_step_before(
    delta: tuple[int, str] | None, checkpoint: str | None, digest: str, same: list[str]
) -> None:
    deltas: Any = SimpleNamespace(_delta=delta)
    saved: Any = checkpoint and SimpleNamespace(digest=checkpoint)
    assert Deltas._base(deltas, 6, saved) == {"step": 6, "digest": digest, "same": same}


def test_no_rows_are_a_file_with_the_schema(tmp_path: Path) -> None:
    pieces = write_changes(tmp_path / "tables_rank0.parquet", [], 1, 0, 1, "float32")
    assert pq.read_table(tmp_path / "tables_rank0.parquet").num_rows == 0
    assert list(read_changes(tmp_path, DeltaManifest(1, {}, files={"tables_rank0.parquet": pieces}))) == []


def test_bytes_reach_from_a_rows_least_to_its_greatest() -> None:
    rows = torch.tensor([[-1.0, 0.0, 254.0], [3.0, 3.0, 3.0], [0.0, 6e-4, 0.51]])
    steps, scale, bias = in_bytes(rows)
    assert steps.tolist() == [[0, 1, 255], [0, 0, 0], [0, 0, 255]]
    assert scale.tolist() == pytest.approx([1.0, 0.0, 0.002])
    assert bias.tolist() == [-1.0, 3.0, 0.0]
    assert pa.array(steps.flatten().numpy()).type == pa.uint8()
