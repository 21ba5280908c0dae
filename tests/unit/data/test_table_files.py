"""Criteo's text, read by its schema: against plain Python, every way a line or a file is wrong, the hash."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.encoder import hashed_rows
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.schema import criteo_schema
from dlrm_overlap.data.table_files import table_files
from tests.unit.data.criteo_lines import (
    assert_one_line,
    hash_all,
    hash_plainly,
    parse_plainly,
    prepare_criteo,
    random_lines,
    with_field,
)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize(("suffix", "block_bytes"), [("", 1 << 21), (".gz", 1001)])
def test_parser_agrees_with_plain_python(
    newline: bytes, end: bool, suffix: str, block_bytes: int, tmp_path: Path
) -> None:
    lines = random_lines(300)
    lines[7] = with_field(with_field(lines[7], 1 + 13 + 26, b""), 14, b"-7")  # a line that ends in a blank
    text = newline.join(lines) + newline * end
    file = tmp_path / f"day_0{suffix}"
    file.write_bytes(gzip.compress(text) if suffix else text)
    prepare_criteo(file, tmp_path / "days", 2**31 - 1, block_bytes=block_bytes)
    batch = Prepared(tmp_path / "days", TablesConfig()).read(0, 300)
    labels, dense, categories, missing = parse_plainly(lines)
    np.testing.assert_allclose(batch.dense.numpy(), dense, rtol=3e-7)
    np.testing.assert_array_equal(batch.labels.numpy(), labels)
    ids = np.where(missing, 0, hash_all(categories, 2**31 - 1))
    np.testing.assert_array_equal(batch.sparse.values().view(26, -1).numpy().T, ids)


@pytest.mark.parametrize(
    ("column", "field", "rule"),
    [
        ("label", b"2", "row 5, column label: 2.0 is not a label, 0 or 1"),
        ("label", b"", "row 5, column label: None is not a label, 0 or 1"),
        ("label", b"-", "Row #5: .* invalid value '-'"),
        ("I1", b"1x", "Row #5: .* invalid value '1x'"),
        ("I4", b"inf", "row 5, column I4: inf is not a finite number"),
        ("I13", b"nan", "row 5, column I13: nan is not a finite number"),
        ("C1", b"0000000g", "column C1: .* '0x0000000g'"),
        ("C1", b"-0000001", "column C1: .* '0x-0000001'"),
        ("C26", b"12 4", "column C26: .* '0x12 4'"),
    ],
)
def test_a_malformed_field_is_named(tmp_path: Path, column: str, field: bytes, rule: str) -> None:
    lines = random_lines(9)
    lines[4] = with_field(lines[4], (criteo_schema(9).columns or []).index(column) + 1, field)
    file = tmp_path / "train.txt"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=rf"train.txt: .*{rule}.*; correct") as error:
        prepare_criteo(file, tmp_path / "days", 9)
    assert_one_line(error)


@pytest.mark.parametrize(("change", "found"), [("short", 39), ("long", 41), ("shifted", 41)])
def test_a_wrong_number_of_fields_is_named(change: str, found: int, tmp_path: Path) -> None:
    lines = random_lines(6)
    if change == "short":
        lines[3] = lines[3].rpartition(b"\t")[0]
    else:
        lines[3] += b"\t1"
    if change == "shifted":  # the number of fields of all lines together stays right
        lines[4] = lines[4].rpartition(b"\t")[0]
    (tmp_path / "day_0").write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=rf"day_0: .*Row #4: Expected 40 columns, got {found}") as error:
        prepare_criteo(tmp_path / "day_0", tmp_path / "days", 9)
    assert_one_line(error)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    text = b"\n".join(random_lines(50))
    contents = {
        "empty.tsv": (b"", "Empty"),
        "cut.tsv.gz": (gzip.compress(text)[:-20], "Truncated"),
        "plain.tsv.gz": (text, "inflate failed"),
        "binary.tsv": (bytes(100_000), "Expected 40 columns, got 1"),
        "text.parquet": (text, "not a parquet file"),
        "text.arrow": (text, "Not an Arrow file"),
    }
    for name, (content, rule) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}.*{rule}") as error:
            prepare_criteo(tmp_path / name, tmp_path / "days", 9)
        assert_one_line(error)


def test_folders_give_their_files_in_natural_order(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_0", "b.tsv", "_SUCCESS", ".b.tsv.crc"):
        (tmp_path / name).touch()
    (tmp_path / "none").mkdir()
    assert [file.name for file in table_files(tmp_path)] == ["b.tsv", "day_0", "day_2.gz", "day_10"]
    for name in ("none", "missing"):
        with pytest.raises(InputError, match=f"{name}: no such file"):
            table_files(tmp_path / name)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000, 2**31 - 1])
def test_hash_agrees_with_plain_python(rows: int) -> None:
    keys = np.random.default_rng(0).integers(2**32, size=200)
    found = hashed_rows(keys, rows)
    assert found.dtype == np.int32
    assert found.tolist() == [hash_plainly(int(key), rows) for key in keys]
    # What lies above 32 bits counts too, of negative keys as of any.
    assert len(set(hashed_rows(keys + (np.arange(200) << 32), rows).tolist())) >= min(max(1, rows - 1), 100)
    assert rows < 2 or all(1 <= row < rows for row in hashed_rows(-keys, rows).tolist())
