"""Files of samples: Criteo's text against plain Python, every way a line or a file is wrong, the hash."""

import gzip
import io
import lzma
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm_overlap.config import TablesConfig
from dlrm_overlap.data.hashed import hashed_rows
from dlrm_overlap.data.prepare import prepare_files
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.schema import Categorical, Label, Schema, criteo_schema
from dlrm_overlap.data.table_files import read_files, table_files
from dlrm_overlap.launching import progress_bar
from tests.conftest import refuses
from tests.unit.data.criteo_lines import hash_all, hash_plainly, parse_plainly, prepare_criteo, random_lines, with_field


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
    data = Prepared(tmp_path / "days", TablesConfig())
    batch = data.read(0, 300)
    assert (data.num_samples, data.rows, data.pooling) == (300, [2**31 - 1] * 26, [1.0] * 26)
    labels, dense, categories, missing = parse_plainly(lines)
    np.testing.assert_allclose(batch.dense.numpy(), dense, rtol=3e-7)
    np.testing.assert_array_equal(batch.labels.numpy(), labels)
    ids = np.where(missing, 0, hash_all(categories, 2**31 - 1))
    np.testing.assert_array_equal(batch.sparse.values().view(26, -1).numpy().T, ids)


@pytest.mark.parametrize(
    ("column", "field", "rule"),
    [
        ("label", b"2", "'2' is not a label, 0 or 1"),
        ("label", b"", "'' is not a label, 0 or 1"),
        ("label", b"-", "'-' is not a label, 0 or 1"),
        ("I1", b"1x", "'1x' is not a finite number"),
        ("I4", b"inf", "'inf' is not a finite number"),
        ("C1", b"0000000g", "'0000000g' is not a hexadecimal number"),
        ("C1", b"-0000001", "'-0000001' is not a hexadecimal number"),
        ("C26", b"12 4", "'12 4' is not a hexadecimal number"),
    ],
)
def test_a_malformed_field_is_named(tmp_path: Path, column: str, field: bytes, rule: str) -> None:
    lines = random_lines(9)
    lines[4] = with_field(lines[4], (criteo_schema(9).columns or []).index(column) + 1, field)
    file = tmp_path / "train.txt"
    file.write_bytes(b"\n".join(lines))
    with refuses(rf"train.txt: row 5, column {column}: {rule}.*; correct"):
        prepare_criteo(file, tmp_path / "days", 9)


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
    with refuses(rf"day_0: .*Row #4: Expected 40 columns, got {found}"):
        prepare_criteo(tmp_path / "day_0", tmp_path / "days", 9)


def read_all(file: Path, schema: Schema, names: list[str], block_bytes: int = 1 << 21) -> pa.Table:
    with progress_bar.ProgressBar("reading", None) as bar:
        blocks = list(read_files([file], schema, block_bytes, bar, lambda _, row, block: block, "correct it", names))
    return pa.Table.from_batches(blocks) if blocks else pa.table({})


@pytest.mark.parametrize(("suffix", "block_bytes"), [("", 1 << 21), (".gz", 1001)])
def test_text_without_a_header_may_lack_labels_that_are_not_read(suffix: str, block_bytes: int, tmp_path: Path) -> None:
    schema, lines = criteo_schema(9), random_lines(40)
    names = [*schema.dense, *schema.categorical]
    found = []
    for name, text in (("train", lines), ("test", [line.partition(b"\t")[2] for line in lines])):
        file = tmp_path / f"{name}{suffix}"
        content = b"\n\n" + b"\n".join(text)  # blank lines are no rows
        file.write_bytes(gzip.compress(content) if suffix else content)
        found.append(read_all(file, schema, names, block_bytes))
    assert found[0].column_names == names
    assert found[0].num_rows == 40
    assert found[0].equals(found[1])
    with refuses("test.*Expected 40 columns, got 39"):
        read_all(file, schema, [*names, "label"], block_bytes)
    with refuses("test.*: column C27: missing among the file's 39 columns .did you mean C7?"):
        read_all(file, schema, [*names, "C27"], block_bytes)


@pytest.mark.parametrize(("fields", "expected"), [(40, 40), (39, 39), (38, 40), (41, 40)])
def test_the_first_row_tells_whether_text_lacks_labels(fields: int, expected: int, tmp_path: Path) -> None:
    schema, file, bad = criteo_schema(9), tmp_path / "rows.tsv", 79 - fields
    file.write_bytes(b"\n".join([b"\t".join([b"1"] * fields)] * 3 + [b"\t".join([b"1"] * bad)]))
    row, got = (4, bad) if fields == expected else (1, fields)
    with refuses(f"Row #{row}: Expected {expected} columns, got {got}"):
        read_all(file, schema, list(schema.categorical))
    file.write_bytes(b"\n\n")
    assert read_all(file, schema, list(schema.categorical)).num_rows == 0


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("block_bytes", [4, 6, 64, 1 << 21])
def test_a_last_line_needs_no_end(suffix: str, block_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / f"in{suffix}"
    schema = Schema(labels={"y": Label()}, categorical={"s": Categorical("string", 9)})

    def found(content: bytes, schema: Schema, names: list[str]) -> pa.Table:
        members = [gzip.compress(content[:3]), gzip.compress(content[3:])]  # as parallel programs write them
        file.write_bytes(b"".join(members) if file.suffix == ".gz" else content)
        return read_all(file, schema, names, block_bytes)

    for end in (b"", b"\n", b"\r\n"):
        assert found(b"y,s" + end, schema, ["y", "s"]).num_rows == 0
        with refuses(f"in{suffix}: column t: missing among the file's 2 columns"):
            found(b"y,s" + end, schema, ["t"])
        assert found(b"y,s\n1,a\n0,b" + end, schema, ["y", "s"])["s"].to_pylist() == [b"a", b"b"]
        assert found(b"a,b" + end, replace(schema, columns=["s", "y", "t"]), ["t"])["t"].to_pylist() == [b"b"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("last", "good"),
    [
        (b'"b\n"', True),
        (b'"b\n0,c"', True),
        (b'"b\n"\r\n\n', True),
        (b'"b\n0,c', False),
        (b'"b\n0,c\n', False),
        (b'"b\r\n0,c\r\n', False),
        (b'"b' + b"\n0,c" * 20, False),
    ],
)
def test_rows_after_a_quote_without_an_end_are_not_lost(last: bytes, good: bool, suffix: str, tmp_path: Path) -> None:
    content, schema = b"y,s\n1,a\n0," + last, Schema(labels={"y": Label()}, categorical={"s": Categorical("string", 9)})
    file = tmp_path / f"in.csv{suffix}"
    file.write_bytes(gzip.compress(content) if suffix else content)
    if good:
        assert read_all(file, schema, ["y"]).num_rows == 2  # s is the last column, which is read for its quotes
        return
    for names in (["y"], ["s", "y"]):
        with refuses(rf"in.csv{suffix}: row 3, column s: a quote .* has no end, .*; correct it"):
            read_all(file, schema, names)
    with refuses("(column s:|a row is longer than 12 bytes, or) a quote .* has no end"):
        read_all(file, schema, ["y"], block_bytes=12)


@pytest.mark.parametrize("block_bytes", [32, 100, 1 << 21])
def test_quoted_fields_may_contain_line_breaks(block_bytes: int, tmp_path: Path) -> None:
    rng, values = np.random.default_rng(0), ["a", "b\n1,c", "d\n", "\n0,z\n1,q", 'say ""x""\n']
    chosen = rng.choice(values, 200).tolist()
    (tmp_path / "in.csv").write_bytes("".join(["s,y\n", *(f'"{value}",1\n' for value in chosen)]).encode())
    schema = Schema(labels={"y": Label()}, categorical={"s": Categorical("string", 9)})
    found = read_all(tmp_path / "in.csv", schema, ["s", "y"], block_bytes)
    assert found["s"].to_pylist() == [value.replace('""', '"').encode() for value in chosen]
    assert found["y"].to_pylist() == [b"1"] * 200


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("sheet.xml", content)
    return file.getvalue()


def in_parquet() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"a": [1, 2]}), file)
    return file.getvalue()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    text = b"\n".join(random_lines(50))
    contents = {
        "empty.tsv": (b"", "no samples"),
        "cut.tsv.gz": (gzip.compress(text)[:-20], "Truncated"),
        "plain.tsv.gz": (text, "inflate failed"),
        "binary.tsv": (bytes(100_000), "Expected 40 columns, got 1"),
        "text.parquet": (text, "not a parquet file"),
        "sheet.xlsx": (zipped(text), "a zip file, such as a spreadsheet, which is neither text nor Parquet; correct"),
        "packed.tsv.xz": (lzma.compress(text), "packed by xz, and only files packed by gzip, bz2"),
        "packed.tsv": (gzip.compress(text), r"packed by gzip, though its name does not end in \.gz"),
        "wide.tsv": (text.decode("ascii").encode("utf-16"), "text in UTF-16, not in UTF-8"),
        "parquet.tsv": (in_parquet(), r"a Parquet file, whose name does not end in \.parquet"),
        "text.arrow": (text, "Not an Arrow file"),
    }
    for name, (content, rule) in contents.items():
        (tmp_path / name).write_bytes(content)
        with refuses(rf"{name}.*{rule}"):
            prepare_criteo(tmp_path / name, tmp_path / "days", 9)


def test_folders_give_their_files_in_natural_order(tmp_path: Path) -> None:
    for name in ("part_10", "part_2.gz", "part_0", "b.tsv", "_SUCCESS", ".b.tsv.crc"):
        (tmp_path / name).touch()
    (tmp_path / "none").mkdir()
    assert [file.name for file in table_files(tmp_path)] == ["b.tsv", "part_0", "part_2.gz", "part_10"]
    for name in ("none", "missing"):
        with refuses(f"{name}: no such file"):
            table_files(tmp_path / name)
    (tmp_path / "part_3").symlink_to("elsewhere")
    with refuses("part_3: a link to a file that is not there"):
        table_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["day_0", "day_1.gz", "day_3", "day_7"], "holds day_1 and day_3, but no day_2; add it"),
        (["day_5.csv", "day_7.csv"], "no day_6"),
        (["day_0", "day_0.gz", "day_1"], r"holds day_0 and day_0\.gz, the same samples twice; remove one"),
        (["b.csv", "b.csv.GZ"], r"holds b\.csv and b\.csv\.GZ, the same"),
        (["day_9", "day_10.gz", "day_11.tsv", "day_11_more.tsv", "_day_13"], None),
        (["day_20261126.csv", "day_20261130.csv"], None),  # dates
    ],
)
def test_days_that_are_missing_or_there_twice_are_refused(tmp_path: Path, names: list[str], rule: str | None) -> None:
    for name in names:
        (tmp_path / name).touch()
    if rule is None:
        assert len(table_files(tmp_path)) == sum(name[0] != "_" for name in names)
        return
    with refuses(rule):
        table_files(tmp_path)


@pytest.mark.parametrize("empty", [b"", gzip.compress(b"")], ids=["bare", "packed"])
def test_files_without_rows_are_read(tmp_path: Path, empty: bytes) -> None:
    """Spark writes such parts."""
    source, text = tmp_path / "text", b"\n".join(random_lines(20))
    source.mkdir()
    for part, content in enumerate([empty, gzip.compress(text), empty]):
        (source / f"part-{part:05}.csv.gz").write_bytes(content)
    assert prepare_criteo(source, tmp_path / "days", min_count=1).samples == 20
    (source / "part-00001.csv.gz").write_bytes(empty)
    with refuses("text: no samples; name a file"):
        prepare_criteo(source, tmp_path / "none", min_count=1)
    assert not (tmp_path / "none").exists()


def write_named(file: Path, names: list[str]) -> None:
    """Write ten rows of columns with `names`, some of which may be equal."""
    if file.suffix == ".csv":
        file.write_text("\n".join([",".join(names), *[",".join("1" * len(names))] * 10]))
        return
    table = pa.table([pa.array([1] * 10)] * len(names), names=names)
    if file.suffix == ".parquet":
        parquet.write_table(table, file)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", ["in.csv", "in.parquet", "in.arrow"])
def test_columns_that_are_missing_or_there_twice_are_named(tmp_path: Path, name: str) -> None:
    schema = Schema(labels={"a": Label()}, categorical={"b": Categorical("int", 9), "c": Categorical("int", 9)})
    no_label = r"; it is a label, without which a table is for `dlrm-overlap predict` only"
    for names, rule in (
        (["a", "b", "c", "b"], "column b: twice"),
        (["a", "c"], r"column b: missing among the file's 2 columns \(a, c\)"),
        (["a", "B", "c"], r"column b: missing among the file's 3 columns \(did you mean B\?\)"),
        (["a", " b", "c"], r"column b: missing among the file's 3 columns \(did you mean ' b'\?\)"),
        (
            [f"x_{i}" for i in range(200)],
            rf"column a: missing among the file's 200 columns \(none has a similar name\){no_label}",
        ),
    ):
        write_named(tmp_path / name, names)
        with refuses(f"{name}: {rule}; correct the file, or the schema"):
            prepare_files(tmp_path / name, tmp_path / "days", schema)
    write_named(tmp_path / name, ["a", "d", "b", "d", "c"])  # one that is not read
    layout, _ = prepare_files(tmp_path / name, tmp_path / "days", schema)
    assert layout.samples == 10


@pytest.mark.parametrize(("delimiter", "other"), [(",", "\t"), ("\t", ";")])
def test_a_header_with_another_delimiter_is_named(tmp_path: Path, delimiter: str, other: str) -> None:
    schema = Schema(labels={"a": Label()}, categorical={"b": Categorical("int", 9)}, delimiter=delimiter)
    (tmp_path / "in.csv").write_text(f"a{other}b\n1{other}2\n")
    shown = re.escape(f"(whose name has {other!r}, while the schema's delimiter is {delimiter!r})")
    with refuses(f"in.csv: column a: missing among the file's 1 column {shown}"):
        prepare_files(tmp_path / "in.csv", tmp_path / "days", schema)


@pytest.mark.parametrize(("name", "about"), [("in.csv", "about "), ("in.parquet", ""), ("in.arrow", "")])
def test_the_number_of_rows_is_known_by_metadata(
    tmp_path: Path, name: str, about: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "_LINE_EVERY_S", 0.0)
    write_named(tmp_path / name, ["a", "b"])
    schema = Schema(labels={"a": Label()}, categorical={"b": Categorical("int", 9)})
    prepare_files(tmp_path / name, tmp_path / "days", schema)
    assert f"writing samples: 100%, 10.0 of {about}10.0 rows, " in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000, 2**31 - 1])
def test_hash_agrees_with_plain_python(rows: int) -> None:
    keys = np.random.default_rng(0).integers(2**32, size=200)
    found = hashed_rows(keys, rows)
    assert found.dtype == np.int32
    assert found.tolist() == [hash_plainly(int(key), rows) for key in keys]
    # Bits above 32 count too, and negative keys are valid.
    assert len(set(hashed_rows(keys + (np.arange(200) << 32), rows).tolist())) >= min(max(1, rows - 1), 100)
    assert rows < 2 or all(1 <= row < rows for row in hashed_rows(-keys, rows).tolist())
