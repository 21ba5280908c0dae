"""Packed samples are the samples of the data set, in the order that a run asks for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_overlap.cli import main
from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data import prepare
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.day import Day
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.records import Packed
from tests.agreement import assert_same_samples

FIXED = TablesConfig(rows=[3, 300, 70_000, 20_000_000], multi_hot=[1, 3, 2, 1])
RANGES = TablesConfig(rows=[3, 300, 70_000, 20_000_000], multi_hot=["0..4", 3, "0..1", 1])
SAMPLES = 100


def config_of(tables: TablesConfig, **keys: Any) -> DataConfig:
    return DataConfig(tables=tables, dense_features=3, eval_samples=37, workers=0, **keys)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_BATCH", 16)


def packed(folder: Path, tables: TablesConfig = FIXED) -> DataConfig:
    """Pack samples into a folder in `folder`, and return the configuration that reads them."""
    prepare.prepare_samples(config_of(tables), folder / "packed", SAMPLES)
    return DataConfig(kind="prepared", path=str(folder / "packed"))


@pytest.mark.parametrize("tables", [FIXED, RANGES], ids=["fixed", "ranges"])
def test_packed_samples_are_those_of_the_data_set(tmp_path: Path, tables: TablesConfig) -> None:
    found, expected = open_datasets(packed(tmp_path, tables)), open_datasets(config_of(tables))
    assert [each.num_samples for each in found] == [SAMPLES, 37]
    for one, other in zip(found, expected, strict=True):
        assert (one.rows, one.dense_features) == (other.rows, other.dense_features)
        assert all(a <= b and c >= d for (a, c), (b, d) in zip(other.bag_sizes, one.bag_sizes, strict=True))
        for first, count in ((0, 37), (15, 2), (3, 30)):
            assert_same_samples(one.read(first, count), other.read(first, count))
    assert_same_samples(found[0].read(90, 20), Batch.join([found[0].read(90, 10), found[0].read(0, 10)]))


def test_a_fraction_replaces_the_samples_that_were_held_out(tmp_path: Path) -> None:
    train, held_out = open_datasets(replace(packed(tmp_path), eval_fraction=0.25))
    assert (train.num_samples, held_out.num_samples) == (SAMPLES + 3, 34)


def test_a_record_has_no_byte_that_its_table_does_not_need(tmp_path: Path) -> None:
    data = Prepared(packed(tmp_path).path or "", TablesConfig())
    assert data.packed.record_bytes == 3 * 4 + 1 + (1 + 3 * 2 + 2 * 3 + 4)


def test_an_id_takes_the_bytes_of_its_tables_last_row(tmp_path: Path) -> None:
    """On both sides of the powers of 256."""
    tables = TablesConfig(rows=[256, 257, 1 << 16, (1 << 16) + 1, 1 << 24, (1 << 24) + 1])
    widths = [1, 2, 2, 3, 3, 4]
    layout = Prepared(packed(tmp_path, tables).path or "", TablesConfig()).packed
    assert [field.width for field in layout.fields()[2:]] == widths
    last = np.array(layout.rows) - 1
    day = Day("last rows", np.zeros((1, 1)), np.zeros((1, 3)), [each.reshape(1, 1) for each in last])
    unpacked = [Packed(layout.pack(day), field)[:1].item() for field in layout.fields()[2:]]
    assert unpacked == last.tolist()


def test_endless_samples_need_a_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["prepare", "samples", str(tmp_path / "out"), "--data.tables.rows", "9", "--data.tables.count", "2"]
    command += ["--train.steps", "1"]
    assert main(command) == 2
    assert "--samples: none, but those of data.kind synthetic have no end; say how many" in capsys.readouterr().err
    assert main([*command, "--samples", "5", "--data.eval_samples", "3"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 8 samples, 3 of them held out, 9 to 9 rows per table\n"


@pytest.mark.parametrize("tables", [FIXED, RANGES], ids=["fixed", "ranges"])
def test_samples_are_shuffled_in_windows(tmp_path: Path, tables: TablesConfig) -> None:
    config = packed(tmp_path, tables)
    plain, evaluated = open_datasets(config)
    data, same = open_datasets(DataConfig(kind="prepared", path=config.path, shuffle=24, seed=3))
    assert_same_samples(same.read(0, 37), evaluated.read(0, 37))
    passes = [[find(plain, data.read(i, 1)) for i in range(n * SAMPLES, (n + 1) * SAMPLES)] for n in range(2)]
    for order in passes:
        for first in range(0, SAMPLES, 24):
            window = list(range(first, min(first + 24, SAMPLES)))
            assert sorted(order[first : first + 24]) == window
            assert len(window) == 4 or order[first : first + 24] != window
    assert passes[0] != passes[1]
    # However many ranks share the stream, and wherever one begins to read.
    whole = data.read(0, 2 * SAMPLES)
    assert_same_samples(Batch.join([data.read(i, 40) for i in range(0, 2 * SAMPLES, 40)]), whole)
    if data.packed is not None:
        assert torch.equal(data.records(90, 40), torch.cat([data.records(i, 1) for i in range(90, 130)]))


def test_windows_are_shuffled_from_the_first_sample_of_training_on(tmp_path: Path) -> None:
    config = packed(tmp_path)
    plain, _ = open_datasets(config)
    data, _ = open_datasets(replace(config, shuffle=24, train_from=30))
    found = [find(plain, data.read(i, 1)) for i in range(SAMPLES - 30)]
    for first in (0, 24, 48):
        assert sorted(found[first : first + 24]) == list(range(30 + first, min(54 + first, SAMPLES)))


def find(data: Any, batch: Batch) -> int:
    """Return the position of the only sample of `batch`, which its dense features distinguish from all others."""
    whole = data.read(0, SAMPLES)
    (found,) = (whole.dense == batch.dense).all(dim=1).nonzero()
    assert_same_samples(data.read(int(found), 1), batch)
    return int(found)
