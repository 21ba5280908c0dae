from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data import loader as loader_module
from dlrm_overlap.data.batch import Lease
from dlrm_overlap.data.day import Day
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepare import prepare_samples
from dlrm_overlap.data.records import Packed, RecordLayout, Unpacker
from dlrm_overlap.kernels import reference
from tests.agreement import assert_same_samples
from tests.kernels.emulation import CPU, interpreted
from tests.unit.data.test_ring import pinning  # noqa: F401  a fixture

ROWS = [1, 256, 257, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**31 - 1]
SIZES = [1, 3, 2, 1, 5, 1, 2, 1]
WIDTHS = [1, 1, 2, 2, 3, 3, 4, 4]


def random_day(samples: int, labels: int = 1) -> Day:
    rng = np.random.default_rng(0)
    ids = [rng.integers(rows, size=(samples, size), dtype=np.int32) for rows, size in zip(ROWS, SIZES, strict=True)]
    for table, rows in zip(ids, ROWS, strict=True):
        table[0, 0], table[-1, -1] = rows - 1, 0
    dense = rng.normal(size=(samples, 5)).astype(np.float32)
    dense[0] = [-0.0, 1e-7, -65504, np.pi, 3]
    return Day("day", rng.integers(2, size=(samples, labels)), dense, ids)


def test_ids_take_the_bytes_that_their_table_needs() -> None:
    layout = RecordLayout({"click": 1.0, "like": 1.0}, 5, ROWS, SIZES)
    assert [field.width for field in layout.fields()] == [4, 1, *WIDTHS]
    assert layout.record_bytes == 4 * 5 + 2 + sum(w * n for w, n in zip(WIDTHS, SIZES, strict=True))


@interpreted
@pytest.mark.parametrize(("labels", "samples"), [(1, 33), (2, 7), (1, 1)])
@pytest.mark.parametrize("max_rows", [None, 100])
def test_records_are_unpacked_to_the_batch_that_was_packed(labels: int, samples: int, max_rows: int | None) -> None:
    day, layout = random_day(samples, labels), RecordLayout({f"label_{i}": 1.0 for i in range(labels)}, 5, ROWS, SIZES)
    packed = layout.pack(day)
    assert packed.shape == (samples, layout.record_bytes)
    expected = Days([day], ROWS, max_rows).read(0, samples)
    moduli = [max_rows if max_rows and rows > max_rows else 0 for rows in ROWS]
    records = torch.from_numpy(packed)
    made = Unpacker(folding := replace(layout, moduli=moduli), CPU)(records)
    assert_same_samples(made, expected)
    words = torch.cat([made.dense.view(torch.int32).flatten(), made.labels.view(torch.int32).flatten()])
    twin = reference.unpack(records, folding.fields())
    assert torch.equal(twin, torch.cat([words, made.sparse.values()]))
    for field, whole in zip(layout.fields()[2:], day.ids, strict=True):
        assert np.array_equal(Packed(packed, field)[1:3], np.asarray(whole)[1:3])


@interpreted
@pytest.mark.parametrize("max_rows", [None, 100])
def test_all_ids_have_64_bits_if_a_table_has_ids_of_any_value(max_rows: int | None) -> None:
    samples, wide = 21, [0, 4, 7]
    day = random_day(samples, 2)
    rows: list[int | None] = [None if t in wide else each for t, each in enumerate(ROWS)]
    rng = np.random.default_rng(1)
    ids = [
        rng.integers(-(2**63), 2**63, size=table.shape) if t in wide else table
        for t, table in enumerate(map(np.asarray, day.ids))
    ]
    ids[0][:4, 0] = [-1, -(2**63), 2**63 - 1, 2**32]
    day = replace(day, ids=ids)
    layout = RecordLayout({"click": 1.0, "like": 1.0}, 5, rows, SIZES)
    assert [field.width for field in layout.fields()[2:]] == [8, 1, 2, 2, 8, 3, 4, 8]
    records = torch.from_numpy(layout.pack(day))
    moduli = [max_rows if each and max_rows and each > max_rows else 0 for each in rows]
    made = Unpacker(folding := replace(layout, moduli=moduli), CPU)(records)
    assert made.sparse.values().dtype == torch.int64
    assert_same_samples(made, Days([day], rows, max_rows).read(0, samples))
    twin = reference.unpack(records, folding.fields()[2:], torch.int64)
    assert torch.equal(twin, made.sparse.values())
    for field, whole in zip(layout.fields()[2:], ids, strict=True):
        found = Packed(records.numpy(), field)[1:3]
        assert found.dtype == whole.dtype
        assert np.array_equal(found, whole[1:3])


@interpreted
@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("shuffle", [0, 20])
@pytest.mark.parametrize("ids", ["rows", ["rows", "any", "rows"]], ids=["rows", "any"])
def test_a_loader_unpacks_the_records_that_its_workers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: int, ids: Any
) -> None:
    tables = TablesConfig(rows=[3, 300, 70_000], multi_hot=[1, 3, 2], ids=ids)
    prepare_samples(DataConfig(tables=tables, eval_samples=4, workers=0), tmp_path / "packed", 50)
    tables = TablesConfig(max_rows=250)
    config = DataConfig(kind="prepared", path=str(tmp_path / "packed"), shuffle=shuffle, tables=tables)
    train, _ = open_datasets(config)
    monkeypatch.setattr(loader_module, "_gpu", lambda: CPU)
    monkeypatch.setattr(Lease, "copying", lambda lease: None)  # an event of a GPU
    with Loader(train, 7, 1, 2, range(2, 9), 2, 1, True) as loader:  # rank 1 of 2, from step 2 to beyond the end
        for step, batch in enumerate(loader, 2):
            assert_same_samples(batch, train.read((step * 2 + 1) * 7, 7))
    assert step == 8
