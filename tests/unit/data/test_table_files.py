"""Criteo's text, read by its schema: against plain Python, every way a line or a file is wrong, the hash."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from dlrm_overlap.config import InputError
from dlrm_overlap.data.columns import Raw, hashed_rows
from dlrm_overlap.data.encoder import Encoder, Learnt
from dlrm_overlap.data.schema import criteo_schema
from dlrm_overlap.data.table_files import read_rows, table_files
from tests.unit.data.criteo_lines import assert_one_line, hash_plainly, parse_plainly, random_lines, with_field

SCHEMA = criteo_schema([100] * 26)


def columns(blocks: list[Raw]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As the oracle returns them: labels, dense, categories, missing."""
    labels = np.concatenate([block.labels[:, 0] for block in blocks])
    dense = np.concatenate([Encoder(SCHEMA, Learnt()).encode(block, "").dense for block in blocks])
    keys = [[np.append(each.keys, 0)[each.codes] for each in block.keys] for block in blocks]
    missing = [[each.codes == len(each.keys) for each in block.keys] for block in blocks]
    return labels, dense, np.concatenate(keys, axis=1).T, np.concatenate(missing, axis=1).T


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("ended", [True, False])
def test_parser_agrees_with_plain_python(newline: bytes, ended: bool, tmp_path: Path) -> None:
    lines = random_lines(300)
    lines[7] = with_field(with_field(lines[7], 1 + 13 + 26, b""), 14, b"-7")  # a line that ends in a blank
    (tmp_path / "day_0").write_bytes(newline.join(lines) + (newline if ended else b""))
    found, expected = columns(list(read_rows(tmp_path / "day_0", SCHEMA))), parse_plainly(lines)
    assert found[1].dtype == np.float32
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=3e-7)
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_array_equal(found[3], expected[3])


@pytest.mark.parametrize("block_bytes", [1, 7, 200, 1001, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_blocks_may_end_anywhere(tmp_path: Path, block_bytes: int, suffix: str) -> None:
    lines = random_lines(20)
    text = b"\n".join(lines)
    file = tmp_path / f"train.txt{suffix}"
    file.write_bytes(gzip.compress(text) if suffix else text)
    blocks = list(read_rows(file, SCHEMA, False, block_bytes))
    expected = parse_plainly(lines)
    for found, wanted in zip(columns(blocks)[::2], expected[::2], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("column", "field", "rule"),
    [
        ("label", b"2", "2.0 is not a label, 0 or 1"),
        ("label", b"", "None is not a label, 0 or 1"),
        ("label", b"-", "invalid value '-'"),
        ("I1", b"1x", "invalid value '1x'"),
        ("I4", b"--1", "invalid value '--1'"),
        ("I4", b"inf", "inf is not a finite number"),
        ("I13", b"nan", "nan is not a finite number"),
        ("C1", b"0000000g", "'0000000g' is not a number of up to 8 hexa"),
        ("C1", b"-0000001", "hexadecimal"),
        ("C6", b"123456789", "hexadecimal"),
        ("C26", b"12 4", "hexadecimal"),
        ("C26", "\u00e9".encode(), "hexadecimal"),
        ("C26", b"\0", "hexadecimal"),
        ("C26", b"1\r2", "a line break within it|Expected 40 columns"),
    ],
)
@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_a_malformed_field_is_named(tmp_path: Path, column: str, field: bytes, rule: str, block_bytes: int) -> None:
    lines = random_lines(9)
    number = (SCHEMA.columns or []).index(column) + 1
    lines[4] = with_field(lines[4], number, field)
    lines[6] = with_field(lines[6], 1, b"9")  # a later mistake, which must not be the one reported
    file = tmp_path / "train.txt"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=rf"train.txt, line 5.*({rule}).*; correct") as error:
        list(read_rows(file, SCHEMA, False, block_bytes))
    assert f"column {column}: " in str(error.value) or "\r" in field.decode("latin-1")
    assert_one_line(error)


@pytest.mark.parametrize(("change", "found"), [("short", 39), ("long", 41), ("shifted", 41), ("blank", None)])
def test_a_wrong_number_of_fields_is_named(change: str, found: int | None, tmp_path: Path) -> None:
    lines = random_lines(6)
    if change == "short":
        lines[3] = lines[3].rpartition(b"\t")[0]
    elif change == "blank":
        lines[3] = b""
    else:
        lines[3] += b"\t1"
    if change == "shifted":  # the number of fields of all lines together stays right
        lines[4] = lines[4].rpartition(b"\t")[0]
    (tmp_path / "day_0").write_bytes(b"\n".join(lines))
    told = rf": .*Expected 40 columns, got {found}" if found else ", column label: None is not a label"
    with pytest.raises(InputError, match=rf"day_0, line 4{told}") as error:
        list(read_rows(tmp_path / "day_0", SCHEMA))
    assert_one_line(error)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    text = b"\n".join(random_lines(50))
    contents = {
        "empty.tsv": (b"", "empty"),
        "empty.tsv.gz": (gzip.compress(b""), "empty"),
        "cut.tsv.gz": (gzip.compress(text)[:-20], "cannot be read"),
        "plain.tsv.gz": (text, "cannot be read"),
        "binary.tsv": (bytes(100_000), "line 1: no end within"),
    }
    for name, (content, rule) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}.*{rule}") as error:
            list(read_rows(tmp_path / name, SCHEMA))
        assert_one_line(error)


def test_folders_give_their_files_in_natural_order(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_0", "b.tsv", "train.txt", "test.txt", "day_0.json", "notes"):
        (tmp_path / name).touch()
    names = [file.name for file in table_files(tmp_path, SCHEMA)]
    assert names == ["b.tsv", "day_0", "day_2.gz", "day_10", "train.txt"]
    (tmp_path / "day_2").touch()
    with pytest.raises(InputError, match=r"day_2 and day_2\.gz"):
        table_files(tmp_path, SCHEMA)
    (tmp_path / "none").mkdir()
    for name in ("none", "missing"):
        with pytest.raises(InputError, match=name):
            table_files(tmp_path / name, SCHEMA)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000, 2**31 - 1])
def test_hash_agrees_with_plain_python(rows: int) -> None:
    keys = np.random.default_rng(0).integers(2**32, size=200)
    found = hashed_rows(keys, rows)
    assert found.dtype == np.int32
    assert found.tolist() == [hash_plainly(int(key), rows) for key in keys]
    # What lies above 32 bits counts too, of negative keys as of any.
    assert len(set(hashed_rows(keys + (np.arange(200) << 32), rows).tolist())) >= min(max(1, rows - 1), 100)
    assert rows < 2 or all(1 <= row < rows for row in hashed_rows(-keys, rows).tolist())
