"""Criteo's text: the parser against plain Python, every way a line or a file is wrong, and the hash of a category."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from dlrm_overlap.config import InputError
from dlrm_overlap.data.criteo_text import criteo_files, hash_ids, parse_rows, read_rows
from tests.unit.data.criteo_lines import assert_one_line, hash_plainly, parse_plainly, random_lines, with_field


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("ended", [True, False])
def test_parser_agrees_with_plain_python(newline: bytes, ended: bool) -> None:
    lines = random_lines(300)
    lines[7] = with_field(with_field(lines[7], 1 + 13 + 26, b""), 14, b"-7")  # a line that ends in a blank
    rows = parse_rows(newline.join(lines) + (newline if ended else b""), "f")
    labels, dense, categories, missing = parse_plainly(lines)
    assert [a.dtype for a in (rows.labels, rows.dense, rows.categories)] == [np.float32, np.float32, np.uint32]
    np.testing.assert_array_equal(rows.labels, labels)
    np.testing.assert_allclose(rows.dense, dense, rtol=3e-7)
    np.testing.assert_array_equal(rows.categories, categories)
    np.testing.assert_array_equal(rows.missing, missing)


@pytest.mark.parametrize(
    "text", [b"0", b"9", b"10", b"12345678", b"99999999", b"100000000", b"9" * 18, b"-" + b"9" * 18]
)
def test_counts_of_every_length(text: bytes) -> None:
    line = with_field(random_lines(1)[0], 5, text)
    assert parse_rows(line, "f").dense[0, 3] == pytest.approx(math.log1p(max(0, int(text))), rel=3e-7)


@pytest.mark.parametrize("block_bytes", [1, 7, 200, 1001, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_blocks_may_end_anywhere(tmp_path: Path, block_bytes: int, suffix: str) -> None:
    lines = random_lines(20)
    text = b"\n".join(lines)
    file = tmp_path / f"train.txt{suffix}"
    file.write_bytes(gzip.compress(text) if suffix else text)
    sizes = []
    blocks = list(read_rows(file, block_bytes, sizes.append))
    expected = parse_plainly(lines)
    np.testing.assert_array_equal(np.concatenate([b.labels for b in blocks]), expected[0])
    np.testing.assert_array_equal(np.concatenate([b.categories for b in blocks]), expected[2])
    assert sum(sizes) == file.stat().st_size


@pytest.mark.parametrize(
    ("column", "field", "rule"),
    [
        (1, b"2", "a label, 0 or 1"),
        (1, b"", "a label, 0 or 1"),
        (1, b"01", "a label, 0 or 1"),
        (1, b"-", "a label, 0 or 1"),
        (2, b"1x", "an integer"),
        (2, b"-", "an integer"),
        (5, b"--1", "an integer"),
        (5, b"1-1", "an integer"),
        (5, b"1.5", "an integer"),
        (5, b"+1", "an integer"),
        (5, b"a", "an integer"),
        (14, b" 1", "an integer"),
        (14, b"12345678x", "an integer"),
        (14, b"1" * 19, "an integer"),
        (15, b"0000000g", "hexadecimal"),
        (15, b"-0000001", "hexadecimal"),
        (20, b"123456789", "hexadecimal"),
        (40, b"12 4", "hexadecimal"),
        (40, "\u00e9".encode(), "hexadecimal"),
        (40, b"\0", "hexadecimal"),
        (40, b"1\r2", "hexadecimal"),
    ],
)
@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_a_malformed_field_is_named(tmp_path: Path, column: int, field: bytes, rule: str, block_bytes: int) -> None:
    lines = random_lines(9)
    lines[4] = with_field(lines[4], column, field)
    lines[6] = with_field(lines[6], 1, b"9")  # a later mistake, which must not be the one reported
    file = tmp_path / "train.txt"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=rf"train.txt, line 5, column {column}: .*not .*{rule}.*; correct") as error:
        list(read_rows(file, block_bytes))
    assert_one_line(error)


@pytest.mark.parametrize(("change", "found"), [("short", 39), ("long", 41), ("shifted", 41), ("blank", 1)])
def test_a_wrong_number_of_fields_is_named(change: str, found: int) -> None:
    lines = random_lines(6)
    if change == "short":
        lines[3] = lines[3].rpartition(b"\t")[0]
    elif change == "blank":
        lines[3] = b""
    else:
        lines[3] += b"\t1"
    if change == "shifted":  # the number of fields of all lines together stays right
        lines[4] = lines[4].rpartition(b"\t")[0]
    with pytest.raises(InputError, match=rf"^some, line 1003: {found} fields .* has 40") as error:
        parse_rows(b"\n".join(lines), "some", first_line=1000)
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
            list(read_rows(tmp_path / name))
        assert_one_line(error)


def test_folders_give_their_files_in_natural_order(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_0", "b.tsv", "train.txt", "test.txt", "day_0.json", "notes"):
        (tmp_path / name).touch()
    names = [file.name for file in criteo_files(tmp_path)]
    assert names == ["b.tsv", "day_0", "day_2.gz", "day_10", "train.txt"]
    (tmp_path / "day_2").touch()
    with pytest.raises(InputError, match=r"day_2 and day_2\.gz"):
        criteo_files(tmp_path)
    (tmp_path / "none").mkdir()
    for name in ("none", "missing"):
        with pytest.raises(InputError, match=name):
            criteo_files(tmp_path / name)


def test_hash_agrees_with_plain_python() -> None:
    rng = np.random.default_rng(0)
    rows = [1, 2, 3, 7, 1000, 2**31 - 1, *([100] * 20)]
    categories = rng.integers(2**32, size=(50, 26), dtype=np.uint32)
    missing = rng.random((50, 26)) < 0.3
    ids = hash_ids(categories, missing, rows)
    assert ids.dtype == np.int32
    for i, t in np.ndindex(50, 26):
        assert ids[i, t] == (0 if missing[i, t] else hash_plainly(int(categories[i, t]), rows[t])), (i, t)
