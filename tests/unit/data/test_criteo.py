"""Criteo's text, prepared, and its two forms of arrays: reading by position, and every way their files are wrong."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.batch import Dataset
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.loader import open_files
from tests.conftest import refuses
from tests.unit.data.criteo_lines import ROWS

HOT = [1 + t % 4 for t in range(26)]


def opened(folder: Path, hot: Sequence[int] | None = None, **keys: Any) -> Criteo:
    return Criteo(folder, TablesConfig(rows=ROWS, **keys), hot is not None)


def test_fingerprints_tell_other_samples_wherever_they_lie(tmp_path: Path) -> None:
    found = {}
    for name, samples in (("here", 25), ("elsewhere", 25), ("one less", 24), ("another", 25)):
        (tmp_path / name).mkdir()
        arrays = write_day(tmp_path / name, 0, samples)
        if name == "another":
            arrays["labels"][-1] ^= 1
            np.save(tmp_path / name / "day_0_labels.npy", arrays["labels"])
        data = opened(tmp_path / name)
        found[name] = data.fingerprint()
        assert data.part(3, 4).fingerprint() == found[name]
    assert found["here"] == found["elsewhere"]
    assert len(set(found.values())) == 3


def assert_reads(data: Dataset, labels: np.ndarray, dense: np.ndarray, tables: Sequence[np.ndarray]) -> None:
    """Compare reads, past the end and over and over too, with a plain loop over samples and tables."""
    n = len(labels)
    for first, count in [(0, n), (0, 1), (n - 1, 1), (7, 5), (n - 3, 7), (3 * n + 2, 4), (5, 2 * n + 3)]:
        batch = data.read(first, count)
        positions = [(first + i) % n for i in range(count)]
        values = [int(v) for table in tables for i in positions for v in table[i]]
        lengths = [len(table[i]) for table in tables for i in positions]
        assert batch.sparse.values().dtype == batch.sparse.lengths().dtype == torch.int32
        assert batch.dense.dtype == batch.labels.dtype == torch.float32
        assert batch.sparse.values().tolist() == values, (first, count)
        assert batch.sparse.lengths().tolist() == lengths
        np.testing.assert_allclose(batch.dense.numpy(), dense[positions], rtol=3e-7)
        np.testing.assert_array_equal(batch.labels.numpy(), labels[positions])


def save_tables(file: Path, tables: Mapping[str, np.ndarray], compressed: bool = False) -> None:
    (np.savez_compressed if compressed else np.savez)(file, **tables)  # pyright: ignore[reportArgumentType]


def write_day(folder: Path, day: int, n: int, hot: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Write a day, multi-hot if `hot` is given, and return its arrays."""
    rng = np.random.default_rng(day)
    arrays = {
        "dense": rng.normal(size=(n, 13)).astype(np.float32),
        "labels": rng.integers(2, size=(n, 1), dtype=np.int32),
    }
    if hot is None:
        arrays["sparse"] = rng.integers(ROWS, size=(n, 26), dtype=np.int32)
    else:
        tables = {f"{t}": rng.integers(ROWS[t], size=(n, hot[t]), dtype=np.int32) for t in range(26)}
        save_tables(folder / f"day_{day}_sparse_multi_hot.npz", tables)
    for part, array in arrays.items():
        np.save(folder / f"day_{day}_{part}.npy", array)
    return arrays if hot is None else {**arrays, **tables}


def test_npy_days_are_read_by_position_in_numeric_order(tmp_path: Path) -> None:
    days = [write_day(tmp_path, day, n) for day, n in ((9, 9), (10, 4), (11, 12))]
    np.save(tmp_path / "day_10_labels.npy", days[1]["labels"][:, 0])  # both shapes of labels are in use
    np.save(tmp_path / "day_10_sparse_contig.npy", days[1]["sparse"])  # not one of ours
    data = opened(tmp_path)
    assert (data.num_samples, data.rows, data.pooling) == (25, ROWS, [1.0] * 26)
    labels, dense, sparse = (np.concatenate([day[part] for day in days]) for part in ("labels", "dense", "sparse"))
    assert_reads(data, labels[:, 0], dense, [sparse[:, t : t + 1] for t in range(26)])


@pytest.mark.parametrize("hot", [None, HOT])
def test_a_missing_day_is_named(tmp_path: Path, hot: Sequence[int] | None) -> None:
    for day in (0, 1, 3):
        write_day(tmp_path, day, 5, hot)
    with refuses("holds day_1 and day_3, but no day_2; add it"):
        opened(tmp_path, hot)


def test_multihot_days_are_read_table_after_table(tmp_path: Path) -> None:
    days = [write_day(tmp_path, day, n, HOT) for day, n in ((0, 9), (1, 14))]
    # The members of a npz may be in Fortran order.
    tables = {f"{t}": np.asfortranarray(days[1][f"{t}"]) for t in range(26)}
    save_tables(tmp_path / "day_1_sparse_multi_hot.npz", tables)
    data = opened(tmp_path, HOT)
    assert (data.num_samples, data.rows, data.pooling) == (23, ROWS, [float(hot) for hot in HOT])
    labels, dense = (np.concatenate([day[part] for day in days]) for part in ("labels", "dense"))
    merged = [np.concatenate([day[f"{t}"] for day in days]) for t in range(26)]
    assert_reads(data, labels[:, 0], dense, merged)


@pytest.mark.parametrize("hot", [None, HOT])
def test_ids_of_capped_tables_are_folded(tmp_path: Path, hot: Sequence[int] | None) -> None:
    day = write_day(tmp_path, 0, 200, hot)
    data = opened(tmp_path, hot, max_rows=40)
    assert data.rows == [min(rows, 40) for rows in ROWS]
    tables = [day["sparse"][:, t : t + 1] if hot is None else day[f"{t}"] for t in range(26)]
    assert max(table.max() for table in tables) > 40
    assert_reads(data, day["labels"][:, 0], day["dense"], [table % 40 for table in tables])


def write_id(folder: Path, hot: Sequence[int] | None, t: int, sample: int, value: int) -> None:
    if hot is None:
        sparse = np.load(folder / "day_0_sparse.npy")
        sparse[sample, t] = value
        np.save(folder / "day_0_sparse.npy", sparse)
    else:
        tables = tables_of(folder)
        tables[f"{t}"][sample, -1] = value
        save_tables(folder / HOT_IDS, tables)


@pytest.mark.parametrize("hot", [None, HOT])
def test_an_id_out_of_range_is_named(tmp_path: Path, hot: Sequence[int] | None) -> None:
    write_day(tmp_path, 0, 30, hot)
    t = 25
    for value in (ROWS[t], -1):
        write_id(tmp_path, hot, t, 17, value)
        data = opened(tmp_path, hot)
        data.read(0, 17)
        rule = rf"day_0, sample 17: id of table {t} is {value}, not from 0 to {ROWS[t] - 1}, .*set data.tables.rows"
        with refuses(rule):
            data.read(10, 10)


@pytest.mark.parametrize(
    ("part", "value"), [("dense", math.nan), ("dense", math.inf), ("dense", -math.inf), ("labels", 2), ("labels", -1)]
)
def test_a_wrong_label_or_dense_feature_is_named(tmp_path: Path, part: str, value: float) -> None:
    write_day(tmp_path, 0, 8)
    arrays = write_day(tmp_path, 1, 30)
    arrays[part][17, -1] = value
    np.save(tmp_path / f"day_1_{part}.npy", arrays[part])
    data = opened(tmp_path)
    data.read(0, 25)
    what = "label 0 is" if part == "labels" else "dense feature 12 is"
    with refuses(f"day_1, sample 17: {what} {value}.*not.*; correct the file"):
        data.read(20, 10)


def save(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / f"day_0_{name}.npy", np.zeros(shape, dtype))


def cut(name: str, kept: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, kept % (folder / name).stat().st_size)


HOT_IDS = "day_0_sparse_multi_hot.npz"


def change_table(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tables = tables_of(folder)
        save_tables(folder / HOT_IDS, {**tables, "4": change(tables["4"])})

    return damage


def tables_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / HOT_IDS) as archive:
        return {name: archive[name] for name in archive.files}


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "day_0_dense.npy").unlink(), "day_0_dense.npy: .*No such file"),
    (cut("day_0_dense.npy", -1), "day_0_dense.npy: not the array"),
    (cut("day_0_labels.npy", 0), "day_0_labels.npy: not the array"),
    (save("labels", (30, 1), np.int64), "day_0_labels.npy: .*int64 .* must be int32"),
    (save("dense", (30, 12)), "day_0_dense.npy: .*12.* must be float32 .*13"),
    (save("dense", (30 * 13,)), "day_0_dense.npy: .*390.* must be float32 .*13"),
    (save("labels", (29, 1), np.int32), r"day_0: arrays of \[29, 30\] samples"),
]
HOT_DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / HOT_IDS).unlink(), f"{HOT_IDS}: .*No such file"),
    (lambda folder: save_tables(folder / HOT_IDS, tables_of(folder), compressed=True), "compressed.*numpy.savez"),
    (lambda folder: save_tables(folder / HOT_IDS, dict([*tables_of(folder).items()][:25])), "no item named '25.npy'"),
    (change_table(lambda ids: ids[:, 0]), r"int32 \[30\]"),
    (change_table(lambda ids: ids[:, :0]), r"int32 \[30, 0\]"),
    (change_table(lambda ids: ids.astype(np.int64)), "int64"),
    (change_table(lambda ids: ids[:29]), r"arrays of \[29, 30\] samples"),
    (cut(HOT_IDS, -10), "not a zip file"),
]


@pytest.mark.parametrize(
    ("hot", "damage", "rule"),
    [*((hot, *each) for hot in (None, HOT) for each in DAMAGES), *((HOT, *each) for each in HOT_DAMAGES)],
)
def test_wrong_files_are_named(tmp_path: Path, hot: Sequence[int] | None, damage: Callable, rule: str) -> None:
    write_day(tmp_path, 0, 30, hot)
    write_day(tmp_path, 1, 30, hot)
    damage(tmp_path)
    with refuses(rule):
        opened(tmp_path, hot)


@pytest.mark.parametrize("kind", ["criteo_npy", "criteo_multihot"])
@pytest.mark.parametrize(
    ("tables", "path", "rule"),
    [
        (TablesConfig(rows=ROWS), "nowhere", "nowhere"),
        (TablesConfig(rows=ROWS), "hollow", "hollow: holds no"),
        (TablesConfig(), "full", "data.tables.rows: null"),
    ],
)
def test_open_files_refuses(tmp_path: Path, kind: str, tables: TablesConfig, path: str, rule: str) -> None:
    for folder in ("full", "hollow"):
        (tmp_path / folder).mkdir()
    write_day(tmp_path / "full", 0, 12, HOT if kind == "criteo_multihot" else None)
    config = DataConfig(kind=kind, path="unused", tables=tables)  # pyright: ignore[reportArgumentType]
    with refuses(rule):
        open_files(config, str(tmp_path / path))


def test_a_data_set_without_samples_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 0)
    with refuses("day_0: no samples"):
        opened(tmp_path)
    write_day(tmp_path, 1, 3)
    assert opened(tmp_path).read(0, 4).labels.numel() == 4
