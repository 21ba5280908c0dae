"""Tables of any id: 64-bit ids from files, in records, and of synthetic samples."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dlrm_overlap.checkpoint.manifest import Manifest
from dlrm_overlap.cli import main
from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.day import Ragged
from dlrm_overlap.data.encoding import Encoding, write_encoding
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepare import prepare_files, prepare_samples
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.schema import MISSING_ID, Categorical, Label, Schema
from dlrm_overlap.data.synthetic import Synthetic, id_of
from dlrm_overlap.kernels.ids.id_map import EMPTY, SEGMENT, mix, unmix
from dlrm_overlap.predict import scorer
from dlrm_overlap.predict.id_rows import IdRows
from dlrm_overlap.predict.scorer import bags_of
from tests.agreement import assert_same_samples
from tests.conftest import refuses

USERS = [7, -1, None, -(2**63), 2**63 - 1, 0]
SITES = ["a.org", "", "b.org", None, "\u00e9", "a.org"]
SEEN = [[5, -5], [], [2**62], None, [1, None, 1], [-(2**40)]]
SCHEMA = Schema(
    labels={"click": Label()},
    categorical={
        "user": Categorical("int", any=True),
        "site": Categorical(any=True),
        "seen": Categorical("int", any=True, list=True),
        "hashed": Categorical("int", rows=100),
    },
)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def write_table(folder: Path, schema: Schema = SCHEMA) -> Path:
    """Prepare six samples in a folder in `folder`."""
    table = {
        "click": [0, 1, 0, 1, 1, 0],
        "user": pa.array(USERS, pa.int64()),
        "site": SITES,
        "seen": pa.array(SEEN, pa.list_(pa.int64())),
        "hashed": [1, 2, 3, 4, 5, 6],
    }
    parquet.write_table(pa.table(table), folder / "table.parquet")
    prepare_files(folder / "table.parquet", folder / "days", schema)
    return folder / "days"


def bags(batch: Batch) -> list[list[list[int]]]:
    """Return each table's bags."""
    return [[bag.tolist() for bag in table.to_dense()] for table in batch.sparse.to_dict().values()]


def test_ids_are_the_keys_of_the_values(tmp_path: Path) -> None:
    data = Prepared(write_table(tmp_path), TablesConfig())
    assert data.rows == data.made_for == [None, None, None, 100]
    batch = data.read(0, 6)
    assert batch.sparse.values().dtype == torch.int64
    users, sites, seen, _ = bags(batch)
    assert users == [[MISSING_ID if each is None else each] for each in USERS]
    assert sites == [[hash_of(each) if each else MISSING_ID] for each in SITES]
    assert seen == [[5, -5], [], [2**62], [], [1, 1], [-(2**40)]]
    assert_same_samples(Batch.join([data.read(0, 2), data.read(2, 4)]), batch)


def test_ids_are_folded_only_where_a_table_has_rows(tmp_path: Path) -> None:
    folder = write_table(tmp_path)
    whole, folded = (Prepared(folder, TablesConfig(max_rows=rows)) for rows in (None, 10))
    assert folded.rows == [None, None, None, 10]
    *ids, hashed = bags(whole.read(0, 6))
    assert bags(folded.read(0, 6)) == [*ids, [[row % 10] for (row,) in hashed]]
    assert Prepared(folder, TablesConfig(rows=[1, 2, 3, 100])).rows[3] == 100
    with refuses(r"rows: \[1, 2, 3, 99\], but the ids of .* were made for \[None, None, None, 100\] rows"):
        Prepared(folder, TablesConfig(rows=[1, 2, 3, 99]))


def test_a_loader_brings_64_bits_from_its_workers(tmp_path: Path) -> None:
    data = Prepared(write_table(tmp_path), TablesConfig())
    with Loader(data, 2, 0, 1, range(3), 1, 1, False) as loader:
        for step, batch in enumerate(loader):
            assert_same_samples(batch, data.read(2 * step, 2))
    assert step == 2


def test_other_kinds_of_ids_are_refused(tmp_path: Path) -> None:
    for name in ("any", "rows"):
        (tmp_path / name).mkdir()
    column = SCHEMA.categorical["user"]
    rows = replace(SCHEMA, categorical={**SCHEMA.categorical, "user": replace(column, any=False, rows=9)})
    folders = write_table(tmp_path / "any"), write_table(tmp_path / "rows", rows)
    with refuses(r"data\.eval_path: .* has the encoding .*, not "):
        open_datasets(DataConfig(kind="prepared", path=str(folders[0]), eval_path=str(folders[1])))


@pytest.mark.parametrize("keys", [{}, {"any": True, "rows": 5}, {"any": True, "min_count": 5}, {"any": False}])
def test_a_column_has_one_kind_of_ids(keys: dict[str, Any]) -> None:
    rule = rf"categorical\.user: rows .*, any {keys.get('any', False)}; give one of them: rows, .*, or any: true"
    with refuses(rule):
        Schema(labels=SCHEMA.labels, categorical={"user": Categorical("int", **keys)})


def test_encodings_without_such_a_column_keep_their_digest() -> None:
    """Else folders and checkpoints of earlier versions would be refused. The digest is one that they gave."""
    schema = Schema(labels={"a": Label()}, categorical={"b": Categorical("int", rows=9)})
    assert Encoding(schema, {}).digest == "5f52a1a17027b8b1"
    assert Encoding(replace(schema, categorical={"b": Categorical("int", any=True)}), {}).digest != "5f52a1a17027b8b1"


def test_prepare_prints_how_many_tables_are_of_any_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "prepare",
        "samples",
        str(tmp_path / "out"),
        "--data.tables.rows",
        "9",
        "--data.tables.ids",
        "[any,rows]",
    ]
    command += ["--train.steps", "1", "--samples", "5", "--data.eval_samples", "3", "--embedding.id_tables.rows", "9"]
    assert main(command) == 0
    text = "8 samples, 3 of them held out, 9 to 9 rows per table, 1 table of any id"
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: {text}\n"


TABLES = TablesConfig(rows=[50, 3, 40_000_000], multi_hot=["0..6", 2, 1])
SOME = replace(TABLES, ids=["any", "rows", "any"])
DRIFTING = replace(SOME, drift=1000)


def synthetic(tables: TablesConfig, **keys: Any) -> Synthetic:
    return Synthetic(DataConfig(tables=tables, **keys), "train")


def test_synthetic_rows_get_ids_and_labels_stay() -> None:
    rows, ids = synthetic(TABLES).read(2000, 1500), synthetic(SOME).read(2000, 1500)
    assert synthetic(SOME).rows == [None, 3, None]
    assert torch.equal(rows.labels, ids.labels)
    assert torch.equal(rows.dense, ids.dense)
    assert (rows.sparse.values().dtype, ids.sparse.values().dtype) == (torch.int32, torch.int64)
    for t, (table, other) in enumerate(zip(bags(rows), bags(ids), strict=True)):
        assert [len(bag) for bag in table] == [len(bag) for bag in other]
        pairs = {(row, id_) for bag, ids_ in zip(table, other, strict=True) for row, id_ in zip(bag, ids_, strict=True)}
        assert len({row for row, _ in pairs}) == len({id_ for _, id_ in pairs}) == len(pairs)
        assert t != 1 or all(row == id_ for row, id_ in pairs)


def test_ids_of_all_tables_rows_and_generations_differ() -> None:
    rows, generations = np.meshgrid(np.arange(300, dtype=np.int32), np.arange(20))
    ids = np.concatenate([id_of(t, rows.reshape(-1), generations.reshape(-1)) for t in range(10)])
    assert len(np.unique(ids)) == ids.size
    assert ids.min() >= 0
    assert ids.mean() == pytest.approx(2**62, rel=0.02)
    of_torch = mix(torch.arange(9) + (3 << 40)) & 2**63 - 1
    assert id_of(3, np.arange(9), np.zeros(1, np.int64)).tolist() == of_torch.tolist()


@pytest.mark.parametrize(("tables", "chunk"), [(SOME, 7), (DRIFTING, 300)])
def test_samples_do_not_depend_on_where_reading_begins(tables: TablesConfig, chunk: int) -> None:
    whole = synthetic(tables).read(900, 2100)
    parts = [synthetic(tables).read(first, min(chunk, 3000 - first)) for first in range(900, 3000, chunk)]
    assert_same_samples(Batch.join(parts), whole)


def ids_in_use(data: Synthetic, first: int, table: int, count: int = 4000) -> set[int]:
    return {id_ for bag in bags(data.read(first, count))[table] for id_ in bag}


def test_half_of_the_ids_are_new_after_as_many_samples_as_drift_says() -> None:
    drift = 1_000_000
    data = synthetic(TablesConfig(rows=[200, 200], ids=["any", "rows"], zipf_alpha=0.0, drift=drift, multi_hot=2))
    before = ids_in_use(data, 0, 0)
    shares = [len(ids_in_use(data, k * drift // 2, 0) - before) / 200 for k in range(6)]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1], abs=0.02)
    assert not ids_in_use(data, 2 * drift, 0) & ids_in_use(data, 4 * drift, 0)
    assert ids_in_use(data, 0, 1) == ids_in_use(data, 4 * drift, 1)


def test_popular_ids_are_replaced_at_even_distances() -> None:
    data = synthetic(TablesConfig(rows=[10_000], ids="any", drift=500_000, zipf_alpha=1.2))
    counts: list[set[int]] = []
    for first in range(0, 1_000_001, 250_000):
        ids, number = data.read(first, 4000).sparse.values().unique(return_counts=True)
        counts.append(set(ids[number.argsort(descending=True)[:20]].tolist()))
    kept = [len(counts[0] & each) for each in counts]
    assert 11 < kept[1] < 19
    assert 5 < kept[2] < 15
    assert kept[4] == 0


def test_labels_follow_the_ids() -> None:
    """The click rate of an id is the same for all of its samples, and that of its successor is another."""
    tables = TablesConfig(rows=[40], ids="any", drift=100_000, zipf_alpha=0.0)
    data = synthetic(tables, dense_features=1)

    def rates(first: int) -> dict[int, float]:
        batch = data.read(first, 20_000)
        ids, labels = batch.sparse.values(), batch.labels
        return {int(id_): float(labels[ids == id_].mean()) for id_ in ids.unique()}

    early, later, last = rates(0), rates(75_000), rates(400_000)
    same = [id_ for id_ in early if id_ in later]
    assert 20 < len(same) < 30
    assert np.corrcoef([early[id_] for id_ in same], [later[id_] for id_ in same])[0, 1] > 0.97
    rows = np.arange(40, dtype=np.int32)
    pairs = [
        [rate.get(int(id_)) for rate, id_ in zip((early, last), of_row, strict=True)]
        for of_row in zip(id_of(0, rows, np.zeros(1, np.int64)), id_of(0, rows, np.full(1, 2)), strict=True)
    ]
    known = np.array([pair for pair in pairs if None not in pair], dtype=float)
    assert len(known) > 35
    assert abs(np.corrcoef(known.T)[0, 1]) < 0.5
    assert 0.25 < float(data.read(0, 20_000).labels.mean()) < 0.5


def hashed_row_of(id_: int, rows: int) -> int:
    mixed = id_ * 0x9E3779B97F4A7C15 % 2**64
    return 1 + (mixed ^ mixed >> 32) % (rows - 1)


def test_hashed_ids_are_those_of_any_id_reduced_to_rows_and_labels_follow_the_ids() -> None:
    """The teacher knows ids, not rows: ids that share a row keep their own click rates."""
    hashed = replace(DRIFTING, ids=["hashed", "rows", "hashed"], hashed_rows=[7, 5, 1000])
    reduced, ids = synthetic(hashed).read(2000, 1500), synthetic(DRIFTING).read(2000, 1500)
    assert synthetic(hashed).rows == [7, 3, 1000]
    assert reduced.sparse.values().dtype == torch.int32
    assert torch.equal(reduced.labels, ids.labels)
    assert torch.equal(reduced.dense, ids.dense)
    for of_hash, of_any, rows in zip(bags(reduced), bags(ids), (7, None, 1000), strict=True):
        assert of_hash == ([[hashed_row_of(id_, rows) for id_ in bag] for bag in of_any] if rows else of_any)
    mixed = replace(DRIFTING, ids=["hashed", "rows", "any"], hashed_rows=7)
    assert synthetic(mixed).rows == [7, 3, None]
    first, _, last = bags(synthetic(mixed).read(2000, 1500))
    assert (first, last) == (bags(reduced)[0], bags(ids)[2])


def test_ids_that_share_a_row_keep_their_own_click_rates() -> None:
    hashed = TablesConfig(rows=[40], ids="hashed", hashed_rows=2, zipf_alpha=0.0, drift=100_000)
    of_hash, of_any = (
        synthetic(tables, dense_features=1).read(0, 20_000)
        for tables in (hashed, replace(hashed, ids="any", hashed_rows=None))
    )
    assert set(of_hash.sparse.values().tolist()) == {1}
    ids = of_any.sparse.values()
    rates = [float(of_hash.labels[ids == id_].mean()) for id_ in ids.unique()]
    assert max(rates) - min(rates) > 0.4


@pytest.mark.parametrize("tables", [DRIFTING, SOME], ids=["drifting", "any"])
def test_packed_samples_are_those_of_the_stream(tmp_path: Path, tables: TablesConfig) -> None:
    config = DataConfig(tables=tables, eval_samples=9, workers=0)
    prepare_samples(config, tmp_path / "packed", 50)
    packed, _ = open_datasets(DataConfig(kind="prepared", path=str(tmp_path / "packed")))
    assert packed.rows == [None, 3, None]
    assert_same_samples(packed.read(0, 50), synthetic(tables).read(0, 50))


def test_predictions_by_ids_of_another_map_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec's own training stores ids that are not hashed."""
    stored = "dlrm.embedding._managed_collision_collection._managed_collision_modules.t_00._hash_zch_identities"
    monkeypatch.setattr(scorer, "locate_checkpoint", lambda path, option: path)
    monkeypatch.setattr(scorer, "read_manifest", lambda path: Manifest(2, {}, {}))
    monkeypatch.setattr(scorer, "state_of_checkpoint", lambda manifest: {})
    monkeypatch.setattr(scorer, "encoded_of", lambda path: write_encoding(tmp_path / "encoding", SCHEMA, {}))
    monkeypatch.setattr(scorer, "read_weights", lambda path, manifest: {stored: torch.zeros(128, 1, dtype=torch.int64)})
    with refuses(r"checkpoint: .* by backend torchrec, .* the column user in another way; train with .* pgas or fused"):
        scorer.Scorer(tmp_path)


def test_keys_of_any_value_reach_the_model_unchanged() -> None:
    keys = np.array([[-1], [2**62], [MISSING_ID]])
    assert [each.tolist() for each in bags_of(keys, None)] == [keys[:, 0].tolist(), [1, 1, 1]]
    assert bags_of(np.array([[12]], np.int32), 10)[0].tolist() == [2]
    ragged = Ragged(keys[:, 0], np.array([0, 3]))
    assert [each.tolist() for each in bags_of(ragged, None)] == [keys[:, 0].tolist(), [0, 3]]


def test_an_id_whose_hash_marks_empty_rows_has_none() -> None:
    """The bucket has an empty row before its initial row."""
    id = unmix(torch.tensor([EMPTY])).numpy()
    other = np.array([5], np.int64)
    stored = np.full((SEGMENT, 1), EMPTY)
    stored[3] = mix(other)
    rows, known = IdRows(stored).rows_of(np.concatenate([id, other]))
    assert (rows.tolist(), known.tolist()) == ([SEGMENT - 1, 3], [False, True])


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: TablesConfig(count=2, rows=3, drift=9), r"drift: 9, but no table takes any id; set data\.tables"),
    (lambda: TablesConfig(rows=[3, 4], ids=["any"]), "ids, hashed_rows and half_life must agree on the number of tabl"),
    (lambda: TablesConfig(rows=3, ids="hashed"), "hashed_rows: None, data.tables.ids hashed; give hashed_rows with"),
    (lambda: TablesConfig(rows=3, ids="any", hashed_rows=9), "hashed_rows: 9, data.tables.ids any; give hashed_rows"),
    (
        lambda: DataConfig("prepared", "days", tables=TablesConfig(ids="hashed", hashed_rows=9)).require_source(),
        r"ids: hashed, but data\.kind prepared reads files, which say .*, or rows to hash, into the schema",
    ),
    (
        lambda: DataConfig("prepared", "days", tables=TablesConfig(ids="any")).require_source(),
        r"ids: any, but data\.kind prepared reads files, which say .*; leave it out",
    ),
]


@pytest.mark.parametrize(("make", "rule"), WRONG)
def test_keys_that_contradict_each_other_are_refused(make: Callable[[], Any], rule: str) -> None:
    with refuses(rule):
        make()
