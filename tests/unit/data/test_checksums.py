"""Files of prepared samples that have changed since they were written are refused, and named, before they are used."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.checksums import BLOCK_BYTES, CheckedArray, ChecksumWriter
from dlrm_overlap.data.day import Day, Ragged
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepared import Prepared, write_samples
from dlrm_overlap.data.records import RecordLayout
from tests.conftest import refuses, run_cli

SAMPLES = 3500
ROWS = [1 << 20, 7, 300]


def write_folder(folder: Path, samples: int = SAMPLES, sizes: list[int | None] | None = None) -> Path:
    """Prepare samples with one table of lists, in two blocks of different size."""
    rng = np.random.default_rng(0)

    def days() -> Iterator[Day]:
        for n in (samples // 3, samples - samples // 3):
            ids: list[Any] = [rng.integers(0, ROWS[0], (n, 40)), rng.integers(0, ROWS[1], (n, 1))]
            ends = rng.integers(0, 60, n).cumsum()
            ids.append(Ragged(rng.integers(0, ROWS[2], ends[-1]), ends) if sizes is None else ids[1])
            yield Day("day", rng.integers(0, 2, (n, 1)), rng.random((n, 13), np.float32), ids)

    folder.mkdir()
    write_samples(folder, RecordLayout({"click": 1.0}, 13, ROWS, sizes or [40, 1, None], held_out=100), days())
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("prepared") / "days")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "days")
    return tmp_path / "days"


def read_all(folder: Path) -> None:
    for data in open_datasets(DataConfig(kind="prepared", path=str(folder))):
        assert data.num_samples is not None
        for first in range(0, data.num_samples, 100):
            data.read(first, min(100, data.num_samples - first))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def sign(folder: Path, meta: dict[str, Any]) -> None:
    """Write a forged meta.json, with the digest that belongs to it."""
    digest = xxhash.xxh3_64(json.dumps(meta, sort_keys=True).encode() + (folder / "checksums").read_bytes())
    (folder / "meta.json").write_text(json.dumps({**meta, "digest": digest.hexdigest()}))


def read_meta(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digest"]
    return meta


def change_file(folder: Path, name: str, content: bytes) -> None:
    """Write other bytes of the same size to a file, with the checksums and the digest that belong to them."""
    (folder / name).write_bytes(content)
    blocks = []
    for file in ("records", "ends_2", "list_2"):
        written = (folder / file).read_bytes()
        parts = [written[first : first + BLOCK_BYTES] for first in range(0, len(written), BLOCK_BYTES)]
        blocks += [xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts]
    (folder / "checksums").write_bytes(b"".join(blocks))
    sign(folder, read_meta(folder))


def test_any_flipped_bit_is_noticed(folder: Path) -> None:
    read_all(folder)
    rng = np.random.default_rng(1)
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["checksums", "ends_2", "list_2", "meta.json", "records"]
    assert (folder / "records").stat().st_size > 2 * BLOCK_BYTES
    for name in names:
        bits = 8 * (folder / name).stat().st_size
        for bit in {0, bits - 1, *rng.integers(0, bits, 10).tolist()}:
            flip(folder / name, bit)
            with refuses("days") as error:
                read_all(folder)
            assert "prepare" in str(error.value)
            if name in ("records", "list_2"):
                assert str(error.value).startswith(f"{folder / name}: the bytes ")
            flip(folder / name, bit)
    read_all(folder)


def test_checksums_are_those_of_the_blocks(folder: Path) -> None:
    before = (folder / "checksums").read_bytes()
    change_file(folder, "records", (folder / "records").read_bytes())
    assert (folder / "checksums").read_bytes() == before
    read_all(folder)


@pytest.mark.parametrize("row_bytes", [1, 104, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5])
def test_a_block_is_compared_when_its_rows_are_first_taken_and_never_again(row_bytes: int) -> None:
    rows = 5 * BLOCK_BYTES // row_bytes + 3
    array = np.random.default_rng(0).integers(0, 256, (rows, row_bytes), np.uint8)
    file = io.BytesIO()
    writer = ChecksumWriter(file)
    for part in np.array_split(array, 4):
        writer.write(part)
    checksums = writer.finish()
    assert file.getvalue() == array.tobytes()
    assert len(checksums) == -(-array.size // BLOCK_BYTES)
    for block in range(len(checksums)):
        position = min(block * BLOCK_BYTES + 77, array.size - 1)
        bad, holds = position // row_bytes, np.arange(rows) * row_bytes // BLOCK_BYTES
        last = ((np.arange(rows) + 1) * row_bytes - 1) // BLOCK_BYTES
        others = np.flatnonzero((block < holds) | (block > last))[::50]
        for take in (slice(bad, bad + 1), np.array([bad]), np.array([*others[:5], bad, bad])):
            checked = CheckedArray(Path("file"), array, checksums)
            array.reshape(-1)[position] ^= 1
            for other in others.tolist():
                assert np.array_equal(checked[other : other + 1], array[other : other + 1])
            checked[others]
            assert len(checked[bad:bad]) == len(checked[np.empty(0, np.int64)]) == 0
            for _ in range(2):
                with refuses(rf"file: the bytes {block * BLOCK_BYTES} to \d+ have changed"):
                    checked[take]
            array.reshape(-1)[position] ^= 1
            assert np.array_equal(checked[take], array[take])
            array.reshape(-1)[position] ^= 1
            checked[take]
            array.reshape(-1)[position] ^= 1


@pytest.mark.parametrize("sizes", [None, [40, 1, 1]])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [0, 500])
def test_the_loader_raises_where_the_changed_samples_come(
    tmp_path: Path, workers: int, sizes: list[int | None] | None, shuffle: int
) -> None:
    folder = write_folder(tmp_path / "days", 9000, sizes)
    flip(folder / "records", 8 * (folder / "records").stat().st_size - 1)  # in the held-out samples
    config = DataConfig(kind="prepared", path=str(folder), shuffle=shuffle)
    train, held_out = open_datasets(config)
    with Loader(train, 100, 0, 1, range(40), workers, 2, False) as loader:
        assert len(list(loader)) == 40
    with (
        Loader(held_out, 50, 0, 1, range(2), workers, 2, False) as loader,
        refuses(r"records: the bytes .* have changed since `dlrm-overlap prep"),
    ):
        list(loader)
    if sizes:
        assert held_out.packed is not None
        with refuses("records: the bytes"):
            held_out.records(0, 100)


def test_a_run_ends_in_one_line_by_a_changed_id(folder: Path, tmp_path: Path) -> None:
    flip(folder / "list_2", 8 * 4 * 20_000)
    options = ["--data.kind", "prepared", "--data.path", str(folder), "--train.batch_size", "100"]
    result = run_cli("train", "--train.device", "cpu", "--log.dir", str(tmp_path / "runs"), *options)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert f"{folder / 'list_2'}: the bytes 0 to" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_evaluation_and_two_ranks_end_in_one_line_by_a_changed_label(folder: Path, tmp_path: Path) -> None:
    options = ["--data.kind", "prepared", "--data.path", str(folder), "--train.batch_size", "50"]
    options += ["--train.device", "cpu", "--log.dir", str(tmp_path / "runs"), "--nproc", "2", "--train.steps"]
    result = run_cli("train", *options, "3", "--log.name", "whole")
    assert result.returncode == 0, result.stderr
    flip(folder / "records", 8 * (folder / "records").stat().st_size - 1)  # which is held out
    for command in (
        ["eval", "--checkpoint", str(tmp_path / "runs" / "whole"), "--nproc", "2"],
        ["train", *options, "4", "--log.name", "damaged"],
    ):
        result = run_cli(*command)
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        told = [line for line in result.stderr.splitlines() if "records: the bytes" in line]
        assert len(told) == 1, result.stderr


def test_ends_out_of_order_are_named(folder: Path) -> None:
    ends = np.frombuffer((folder / "ends_2").read_bytes(), "<i8").copy()
    overflow = np.full(len(ends), 2**63 - 1)
    overflow[5:] = -(2**63)  # the difference overflows
    last = len(ends) - 1
    size, bag = (
        r"list_2: not the \d+ bytes that meta\.json names",
        "ends_2: the bag of sample {} ends before it begins; copy",
    )
    for forged, rule in (
        *((replaced(ends, i, end), bag.format(i)) for i, end in ((17, -1), (0, -5), (1234, ends[1234 - 1] - 1))),
        (replaced(ends, 8, 2**62), bag.format(9)),
        (overflow, bag.format(5)),
        *((replaced(ends, last, end), size) for end in (2**62, 2**63 - 1, int(ends[-1]) + 1, int(ends[-2]))),
    ):
        change_file(folder, "ends_2", forged.tobytes())
        with refuses(rule):
            Prepared(folder, TablesConfig())


def replaced(array: np.ndarray, position: int, value: int) -> np.ndarray:
    changed = array.copy()
    changed[position] = value
    return changed


WRONG: list[Any] = [None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "3", "", [], [[]], {}]
WRONG += [{"a": {}}, {"a": None}, {"a": -1.0}, {"a": 1e38}, [0], [3, 3], [None] * 3, [-1] * 3, [2.0] * 3]
WRONG += [["x"] * 3, [2**31] * 3, [10**30] * 3, [[1]] * 3, [1] * 4]


@pytest.mark.parametrize("key", ["labels", "dense", "rows", "sizes", "samples", "held_out", "moduli", "digest", "new"])
def test_forged_values_of_meta_are_named(folder: Path, key: str) -> None:
    meta = read_meta(folder)
    for wrong in WRONG:
        if (key, wrong) in (("held_out", None), ("moduli", [])) or wrong == meta.get(key):
            continue
        sign(folder, meta | {key: wrong})
        if key == "digest":
            (folder / "meta.json").write_text(json.dumps(meta | {key: wrong}))
        with refuses(str(folder)) as error:
            read_all(folder)
        assert len(str(error.value)) < 1000
    del meta[key if key in meta else "rows"]
    sign(folder, meta)
    if key not in ("held_out", "moduli"):
        with refuses(str(folder)):
            read_all(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"null", b"3", b'"x"', b"{", b"{}", b"9" * 5000, b'{"format": 2, "rows": 3}']
)
def test_a_meta_that_is_none_or_of_an_older_version_is_named(folder: Path, content: bytes) -> None:
    (folder / "meta.json").write_bytes(content)
    with refuses(r"days: has no meta\.json of this version's `dlrm-overlap prepare`.*; set data\.path"):
        Prepared(folder, TablesConfig())


def test_a_folder_without_checksums_is_refused_with_the_cure(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps(read_meta(folder)))
    with refuses(r"earlier version wrote the folder without checksums; .* `dlrm-overlap prep"):
        Prepared(folder, TablesConfig())


def cut(file: Path) -> None:
    file.write_bytes((file.parent.parent / "moved").read_bytes()[:-2])


@pytest.mark.parametrize("make", [None, cut, os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_files_that_are_cut_or_gone_or_no_files_are_named_at_once(folder: Path, make: Callable | None) -> None:
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        moved = file.rename(folder.parent / "moved")
        if make:
            make(file)
        rule = "file of numbers of 8 bytes" if file.name == "checksums" else f"{size} bytes that meta.json names"
        with refuses(rf"{file.name}: not the {rule}.*; copy|has no {file.name} of this version"):
            Prepared(folder, TablesConfig())
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
        moved.rename(file)
    read_all(folder)
