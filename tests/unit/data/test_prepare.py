"""Preparing Criteo's text: the records against the text itself, restarts, and what a reader may ever see."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data import encoder
from dlrm_overlap.data import prepare as module
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.table_files import Block, read_blocks
from tests.unit.data.criteo_lines import prepare_criteo

BLOCK = 2000


def text(n: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(n):
        counts = [str(count) if count > -2 else "" for count in rng.integers(-3, 50, 13)]
        values = [f"{value:08x}" if value else "" for value in rng.zipf(1.3, 26) % 2**32 // 2]
        lines.append("\t".join([str(rng.integers(2)), *counts, *values]))
    return "\n".join(lines).encode()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "day_0").write_bytes(text(40, 0))
    (folder / "day_1.gz").write_bytes(gzip.compress(text(25, 1)))
    (folder / "day_10").write_bytes(text(30, 2))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "arrays"


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of modification of every file: a rewritten file changes at least one."""
    return {file.name: ((stat := file.stat()).st_ino, stat.st_mtime_ns) for file in folder.iterdir()}


def redone(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name in after if after[name] != before.get(name)} - {"meta.json"}


def parts(*days: int) -> set[str]:
    return {f"day_{day}_records.npy" for day in days}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.npy")}


@pytest.mark.parametrize("block_bytes", [BLOCK, 1 << 20])
def test_each_file_becomes_a_day(source: Path, target: Path, block_bytes: int) -> None:
    meta = prepare_criteo(source, target, rows=13, block_bytes=block_bytes)
    assert [(day.name, day.samples) for day in meta.days] == [("day_0", 40), ("day_1.gz", 25), ("day_10", 30)]
    assert {file.name for file in target.iterdir()} == parts(0, 1, 2) | {"meta.json"}
    arrays = Prepared(target, TablesConfig())
    assert arrays.rows == meta.rows == [13] * 26
    assert arrays.num_samples == 95
    records = np.load(target / "day_1_records.npy")
    assert (records.dtype, records.shape) == (np.uint8, (25, 4 * 13 + 1 + 26))
    assert (target / "day_1_records.npy").stat().st_size == 4096 + records.size


@pytest.mark.parametrize("min_count", [1, 3, 10**6])
@pytest.mark.parametrize("least_pending", [0, 1 << 18])
def test_rows_by_frequency_agree_with_plain_python(
    source: Path, target: Path, min_count: int, least_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_LEAST_PENDING", least_pending)
    meta = prepare_criteo(source, target, min_count=min_count, block_bytes=BLOCK)
    lines = [(source / "day_0").read_bytes(), gzip.decompress((source / "day_1.gz").read_bytes())]
    lines = [
        line.split(b"\t")[14:] for part in [*lines, (source / "day_10").read_bytes()] for line in part.split(b"\n")
    ]
    data = Prepared(target, TablesConfig())
    ids = data.read(0, 95).sparse.values().reshape(26, 95).tolist()
    for t in range(26):
        column = [line[t] for line in lines]
        counts = Counter(int(value, 16) for value in column if value)
        known = sorted(value for value, count in counts.items() if count >= min_count)
        rows = {value: 2 + i for i, value in enumerate(known)}
        assert ids[t] == [rows.get(int(value, 16), 1) if value else 0 for value in column], t
        assert data.rows[t] == 2 + len(known)
    assert meta.rows == data.rows
    with np.load(target / "vocabulary.npz") as vocabulary:
        assert vocabulary["C26.keys"].tolist() == known
        assert vocabulary["C26.counts"].tolist() == [counts[value] for value in known]


@pytest.mark.parametrize("mode", [{"rows": 13}, {"min_count": 2}])
def test_a_second_run_touches_nothing(source: Path, target: Path, mode: dict[str, Any]) -> None:
    first = prepare_criteo(source, target, **mode)
    before = snapshot(target)
    assert prepare_criteo(source, target, **mode) == first
    assert snapshot(target) == before


@pytest.mark.parametrize("mode", [{"rows": 13}, {"min_count": 2}])
def test_a_crash_costs_only_the_day_it_hits(
    source: Path, target: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_criteo(source, tmp_path / "uninterrupted", **mode)
    passes = Counter()

    def crashing(file: Path, *args) -> Iterator[Block]:
        passes[file.name] += 1
        for block, samples in enumerate(read_blocks(file, *args)):
            if file.name == "day_1.gz" and passes[file.name] == len(mode.keys() & {"min_count"}) + 1 and block == 2:
                raise KeyboardInterrupt
            yield samples

    monkeypatch.setattr(module, "read_blocks", crashing)
    with pytest.raises(KeyboardInterrupt):
        prepare_criteo(source, target, **mode, block_bytes=BLOCK)
    before = snapshot(target)
    assert set(before) - {"vocabulary.npz"} == parts(0) | {"meta.json"}
    with pytest.raises(InputError, match=r"prepare. did not finish day_1.gz; run it again"):
        Prepared(target, TablesConfig())
    # What a kill leaves, which runs no `finally`.
    (target / ".day_1_records.npy.tmp").write_bytes(b"half")

    passes.clear()
    monkeypatch.setattr(
        module, "read_blocks", lambda file, *args: (passes.update([file.name]), read_blocks(file, *args))[1]
    )
    prepare_criteo(source, target, **mode)
    assert passes == {"day_1.gz": 1, "day_10": 1}
    assert redone(before, snapshot(target)) == parts(1, 2)
    assert contents(target) == contents(tmp_path / "uninterrupted")


@pytest.mark.parametrize("damage", ["cut", "gone", "shorter"])
def test_a_damaged_day_is_refused(source: Path, target: Path, damage: str) -> None:
    prepare_criteo(source, target, rows=13)
    file = target / "day_1_records.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        np.save(file, np.load(file)[:-1])
    with pytest.raises(InputError, match=r"day_1_records\.npy"):
        Prepared(target, TablesConfig())


def test_two_at_once_do_not_write_into_one_folder(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_criteo(source, tmp_path / "alone", rows=13)
    refused = []

    def beside(file: Path, *args) -> Iterator[Block]:
        monkeypatch.undo()
        for blocks in read_blocks(file, *args):
            with pytest.raises(InputError, match=rf"in use by process {os.getpid()} on \S+, since .*; wait") as error:
                prepare_criteo(source, target, rows=13)
            refused.append(str(error.value))
            yield blocks

    monkeypatch.setattr(module, "read_blocks", beside)
    prepare_criteo(source, target, rows=13)
    assert refused
    assert contents(target) == contents(tmp_path / "alone")
    assert not list(target.glob(".*.tmp"))


def test_a_malformed_line_leaves_no_part_of_its_day(source: Path, target: Path) -> None:
    (source / "day_10").write_bytes(text(30, 2) + b"\n0\t1")
    with pytest.raises(InputError, match=r"day_10: .*Row #31: Expected 40 columns, got 2"):
        prepare_criteo(source, target, rows=13, block_bytes=BLOCK)
    assert {file.name for file in target.iterdir()} == parts(0, 1) | {"meta.json"}


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("other rows", "prepared of other files, or in another way; choose another"),
        ("other mode", "prepared of other files, or in another way; choose another"),
        ("fewer days", "prepared of other files, or in another way; choose another"),
        ("another time", "prepared of other files, or in another way; choose another"),
        ("no meta", "not what .* writes .*; choose another"),
        ("a file", "cannot be written"),
    ],
)
def test_a_target_that_holds_something_else_is_refused(source: Path, target: Path, case: str, rule: str) -> None:
    prepare_criteo(source, target, rows=13)
    mode: dict[str, Any] = {"rows": 13}
    if case == "other rows":
        mode = {"rows": 14}
    elif case == "other mode":
        mode = {"min_count": 2}
    elif case == "fewer days":
        (source / "day_0").unlink()
    elif case == "another time":
        os.utime(source / "day_1.gz", ns=(0, 0))
    elif case == "no meta":
        (target / "meta.json").write_text(json.dumps({"rows": 3}))
    else:
        target = source / "day_0"
    before = snapshot(target) if target.is_dir() else target.read_bytes()
    with pytest.raises(InputError, match=rule) as error:
        prepare_criteo(source, target, **mode)
    assert "\n" not in str(error.value)
    assert before == (snapshot(target) if target.is_dir() else target.read_bytes())


def test_a_folder_without_meta_or_of_too_few_rows_is_refused(source: Path, target: Path) -> None:
    prepare_criteo(source, target, rows=13)
    assert Prepared(target, TablesConfig(rows=20, max_rows=10)).rows == [10] * 26
    with pytest.raises(InputError, match=r"rows: \[12, 12, .*has tables of \[13, 13, .*; leave it out"):
        Prepared(target, TablesConfig(rows=12))
    (target / "meta.json").unlink()
    with pytest.raises(InputError, match=r"has no meta\.json of `dlrm-overlap prepare`; set data\.path"):
        Prepared(target, TablesConfig())
