"""`data.bad_rows: skip`: what stands in for a bad row, that all others keep their places, and that it is counted."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.criteo import CriteoArrays, CriteoMultihot
from dlrm_overlap.data.loader import make_loader
from tests.conftest import read_metrics
from tests.distributed.workers import make_trainer, quickstart
from tests.unit.data.criteo_lines import criteo_text, prepare_criteo, random_lines

N, ROWS = 60, 50


def _same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in (
            (one.labels, other.labels),
            (one.dense, other.dense),
            (one.sparse.values(), other.sparse.values()),
            (one.sparse.lengths(), other.sparse.lengths()),
        )
    )


def _days(folder: Path, stands_in: dict[int, int]) -> tuple[CriteoArrays, CriteoArrays]:
    """Write two days of N samples, of which the keys of `stands_in` are bad.

    Returns:
        The data set that skips them, and one in which the sample at each value is in the key's place.
    """
    rng = np.random.default_rng(0)
    arrays = {
        "dense": rng.random((2 * N, 13), dtype=np.float32),
        "sparse": rng.integers(0, ROWS, (2 * N, 26), dtype=np.int32),
        "labels": rng.integers(0, 2, (2 * N, 1), dtype=np.int32),
    }
    clean = {part: array.copy() for part, array in arrays.items()}
    faults = [("labels", 0, 2), ("dense", 5, np.nan), ("dense", 12, np.inf), ("sparse", 25, ROWS), ("sparse", 0, -1)]
    for i, (bad, instead) in enumerate(stands_in.items()):
        part, column, value = faults[i % len(faults)]
        arrays[part][bad, column] = value
        for array in clean.values():
            array[bad] = array[instead]
    for name, written in (("bad", arrays), ("clean", clean)):
        (folder / name).mkdir()
        for part, array in written.items():
            for day in (0, 1):
                np.save(folder / name / f"day_{day}_{part}.npy", array[day * N : (day + 1) * N])
    tables = TablesConfig(rows=ROWS)
    return CriteoArrays(folder / "bad", tables, "skip"), CriteoArrays(folder / "clean", tables)


def test_the_next_good_sample_stands_in_and_no_other_moves(tmp_path: Path) -> None:
    stands_in = {0: 1, 7: 11, 8: 11, 9: 11, 10: 11, N - 1: N, N + 3: N + 4, 2 * N - 2: 2 * N - 3, 2 * N - 1: 2 * N - 3}
    data, clean = _days(tmp_path, stands_in)
    for ranks in (1, 2, 5):  # however many share the stream, and wherever one begins to read
        size = 2 * N // ranks
        for rank in range(ranks):
            batch = data.read(rank * size, size)
            assert _same(batch, clean.read(rank * size, size)), (ranks, rank)
            assert batch.stand_ins == sum(rank * size <= bad < (rank + 1) * size for bad in stands_in)
    assert _same(data.read(2 * N - 3, 2 * N), clean.read(2 * N - 3, 2 * N)), "past the end"
    with pytest.raises(InputError, match=r"bad/day_0: label of sample 0 is 2\.0, not 0 or 1"):
        CriteoArrays(tmp_path / "bad", TablesConfig(rows=ROWS)).read(0, 1)


def test_a_bad_sample_of_multi_hot_arrays_is_replaced_too(tmp_path: Path) -> None:
    tables = {str(t): np.full((4, 1 + t % 2), t, np.int32) for t in range(26)}
    tables["3"][2] = ROWS
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **tables)  # pyright: ignore[reportArgumentType]
    np.save(tmp_path / "day_0_dense.npy", np.zeros((4, 13), np.float32))
    np.save(tmp_path / "day_0_labels.npy", np.array([[0], [1], [0], [1]], np.int32))
    batch = CriteoMultihot(tmp_path, TablesConfig(rows=ROWS), "skip").read(0, 4)
    assert (batch.stand_ins, batch.labels.tolist()) == (1, [0, 1, 1, 1])


def test_a_file_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    data, _ = _days(tmp_path, {})
    np.save(tmp_path / "bad" / "day_0_sparse.npy", np.full((N, 26), ROWS, np.int32))
    np.save(tmp_path / "bad" / "day_1_labels.npy", np.full((N, 1), 7, np.int32))
    data = CriteoArrays(tmp_path / "bad", TablesConfig(rows=ROWS), "skip")
    told = (
        "day_0: table 0, id of sample 4, column 0 is 50, not below 50.*skip does not help, since no sample within 1000"
    )
    with pytest.raises(InputError, match=re.compile(told)):
        data.read(4, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_counts_them(tmp_path: Path, workers: int) -> None:
    data, clean = _days(tmp_path, {0: 1, 7: 8, 70: 71})
    loader = make_loader(data, 10, 0, 1, 0, 8, workers, 2, False)
    with loader:
        batches = list(loader)
    assert loader.stand_ins == 3
    assert all(_same(batch, clean.read(10 * i, 10)) for i, batch in enumerate(batches))


BROKEN = [
    b"",
    b"0\t1",
    b"2" + b"\t" * 39,
    b"x" + b"\t" * 39,
    b"1" + b"\t" * 40,
    b"1\tx" + b"\t" * 38,
    b"1" + b"\t" * 39 + b"123456789",
    b"\0\xff\r",
]


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_broken_lines_are_left_out(tmp_path: Path, block_bytes: int, end: bytes) -> None:
    good = random_lines(2 * len(BROKEN))
    mixed = [line for i, each in enumerate(BROKEN) for line in (good[2 * i], each, good[2 * i + 1])] + BROKEN[1:]
    (tmp_path / "good.tsv").write_bytes(b"\n".join(good))
    (tmp_path / "mixed.tsv").write_bytes(b"\n".join(mixed) + end)
    (tmp_path / "none.tsv").write_bytes(b"\n".join(BROKEN))
    tables = TablesConfig(rows=ROWS)
    data = criteo_text(tmp_path / "mixed.tsv", tables, "skip", block_bytes)
    assert (data.num_samples, data.skipped) == (len(good), len(mixed) - len(good))
    assert _same(data.read(0, len(good)), criteo_text(tmp_path / "good.tsv", tables).read(0, len(good)))
    with pytest.raises(InputError, match=r"mixed\.tsv, line 2"):
        criteo_text(tmp_path / "mixed.tsv", tables, block_bytes=block_bytes)
    with pytest.raises(InputError, match=r"none\.tsv: 8 of 8 rows are no samples; correct"):
        criteo_text(tmp_path / "none.tsv", tables, "skip", block_bytes)
    modes: list[dict[str, Any]] = [{"rows": 13}, {"min_count": 2}]
    for mode in modes:
        made = [tmp_path / f"{name}_{'_'.join(mode)}" for name in ("good", "mixed")]
        prepare_criteo(tmp_path / "good.tsv", made[0], **mode)
        meta = prepare_criteo(tmp_path / "mixed.tsv", made[1], **mode, skip_bad_rows=True, block_bytes=block_bytes)
        assert (meta.days[0].samples, meta.days[0].skipped) == (len(good), len(mixed) - len(good))
        for file in made[0].glob("*.npy"):
            assert file.read_bytes() == (made[1] / file.name).read_bytes()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_logs_how_many_there_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _days(tmp_path, {3: 4, 12: 13, 55: 56})
    options = ["--data.kind", "criteo_npy", "--data.path", str(tmp_path / "bad"), "--data.tables.rows", str(ROWS)]
    options += ["--data.tables.count", "26", "--data.tables.multi_hot", "1", "--train.batch_size", "10"]
    options += ["--train.steps", "9", "--train.eval_every", "0", "--data.bad_rows", "skip", "--data.workers", "1"]
    config = quickstart(tmp_path, "run", *options)
    summary = make_trainer(config).fit()
    assert summary["bad_rows"] == json.loads((tmp_path / "run" / "summary.json").read_text())["bad_rows"] == 3
    counted = read_metrics(tmp_path / "run", "data/bad_rows")
    assert list(counted) == list(range(1, 10))
    assert (counted[9], sorted(counted.values())) == (3, list(counted.values()))
    assert sum(" so far, left out or replaced" in line for line in caplog.messages) == 1


def test_prepare_tells_how_many_there_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "days.tsv").write_bytes(b"\n".join([*random_lines(3), BROKEN[1]]))
    command = ["prepare", "criteo", str(tmp_path / "days.tsv"), str(tmp_path / "out"), "--rows", "13"]
    assert main([*command, "--bad_rows", "skip"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 3 samples, 1 row left out, 13 to 13 rows a table\n"
