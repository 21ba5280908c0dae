"""Cells of all kinds: the same table gives the same bytes in every format, and every cell that is refused is named."""

import csv
import gzip
import hashlib
import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from dlrm_overlap.config import TablesConfig
from dlrm_overlap.data.day import Ragged
from dlrm_overlap.data.encoder import Encoder
from dlrm_overlap.data.prepare import prepare_files
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.schema import Categorical, Dense, Label, Schema
from dlrm_overlap.predict.scorer import _batch_of
from tests.conftest import refuses

NAN = math.nan


class Cells(NamedTuple):
    """A column of a table: its part in the schema, how Arrow stores it, and its cells."""

    role: str
    stored: pa.DataType
    cells: list[Any]
    list: bool | str = False


CODED = pa.dictionary(pa.int32(), pa.string())
TABLE = {
    "clicked": Cells("label", pa.bool_(), [True, False, True, False, True, True]),
    "bought": Cells("label", pa.float64(), [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]),
    "price": Cells("dense", pa.float64(), [1.5, NAN, None, 1e30, -0.25, 7.0]),
    "share": Cells("dense", pa.float32(), [0.5, NAN, None, -0.1, -2.0, 1024.0]),
    "age": Cells("dense", pa.int64(), [2**53 + 1, None, -5, 0, 7, 2**63 - 1]),
    "bytes": Cells("dense", pa.uint64(), [2**64 - 1, None, 0, 7, 1, 2**63]),
    "mobile": Cells("dense", pa.bool_(), [True, None, False, True, False, False]),
    "rank": Cells("dense", pa.string(), ["1e3", "", None, "-7.50", "True", " 4 "]),
    "site": Cells("string", pa.string(), ["m\u00fcnchen.de", "", None, "NULL", "\u6771\u4eac", " x "]),
    "city": Cells("string", CODED, ["K\u00f6ln", "", None, "NULL", "7", "K\u00f6ln"]),
    "raw": Cells("string", pa.large_binary(), ["\u00fc", "", None, "b", "NULL", "c"]),
    "level": Cells("string", pa.float64(), [5.0, NAN, None, 0.1, 1e20, -5.0]),
    "ratio": Cells("string", pa.float32(), [0.5, NAN, None, 5.0, 7.0, 2.0]),
    "member": Cells("string", pa.bool_(), [True, None, False, True, False, False]),
    "count": Cells("string", pa.int16(), [7, None, -5, 0, 7, 8]),
    "nothing": Cells("string", pa.null(), [None] * 6),
    "user": Cells("int", pa.int64(), [7, None, -5, 2**63 - 1, -(2**63), 0]),
    "session": Cells("int", pa.uint64(), [2**63, 2**64 - 1, None, 0, 7, 2**63 + 1]),
    "item": Cells("int", pa.float64(), [5.0, NAN, None, 7.0, 2.0**60, 1.5 * 2.0**63]),
    "shop": Cells("int", pa.string(), ["5.0", "007", "", None, "+3", "1e3"]),
    "adult": Cells("int", pa.bool_(), [True, None, False, True, False, False]),
    "fee": Cells("int", pa.decimal32(7, 2), [Decimal("7.00"), None, Decimal("-5.00"), None, Decimal(0), Decimal(9)]),
    "code": Cells("hex", pa.string(), ["0x1F", "1f", "", None, "FFFFFFFFFFFFFFFF", "0000001f"]),
    "tags": Cells("string", pa.list_(CODED), [["a", "\u00f6"], [], None, [""], ["b", None, "NULL"], ["\u00df"]], "|"),
    "words": Cells("string", CODED, ["a|\u00f6|", "", None, "|", "b||NULL", "NULL"], "|"),
    "seen": Cells("int", pa.list_(pa.int64()), [[1, 7], [], None, [None], [3, 2**62 + 1], [-5]], "|"),
    "bought_before": Cells("int", pa.large_list(pa.float64()), [[5.0, NAN], [], None, [7.0], [1.0, 2.0], []], "|"),
    "friend": Cells("int", pa.uint8(), [1, None, 7, 3, 4, 5], "|"),
    "none": Cells("string", pa.null(), [None] * 6, "|"),
}


def schema_of(table: dict[str, Cells], missing: list[str], learn: bool) -> Schema:
    """Return the schema of `table`, with vocabularies or with hashed values."""
    ways: dict[str, Any] = {"min_count": 1} if learn else {"rows": 1000}
    categorical: Any = {
        name: Categorical(column.role, list=column.list, **ways)  # pyright: ignore[reportArgumentType]
        for name, column in table.items()
        if column.role not in ("label", "dense")
    }
    return Schema(
        labels={name: Label() for name, column in table.items() if column.role == "label"},
        dense={name: Dense() for name, column in table.items() if column.role == "dense"},
        categorical=categorical,
        missing=missing,
    )


def text_of(cell: Any, column: Cells, none: str) -> str:
    """Return a cell as programs write it into a CSV file."""
    if isinstance(cell, list):
        return str(column.list).join(text_of(each, column, "") for each in cell)
    if cell is None or (cell != cell and column.role == "string"):
        return none
    return str(cell)  # of NaN: nan


def write(file: Path, table: dict[str, Cells], none: str = "") -> None:
    """Write `table` in the format that the name of `file` has in lower case; `none` is a missing cell of text."""
    kind = file.suffix.lower()
    if kind in (".csv", ".gz"):
        with (gzip.open if kind == ".gz" else open)(file, "wt", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(table)
            rows = zip(*(column.cells for column in table.values()), strict=True)
            writer.writerows([[text_of(*pair, none) for pair in zip(row, table.values(), strict=True)] for row in rows])
        return
    stored = pa.table({name: pa.array(column.cells, column.stored) for name, column in table.items()})
    if kind == ".parquet":
        parquet.write_table(stored, file, row_group_size=4)
    else:
        feather.write_feather(stored, str(file))


def prepared_bytes(file: Path, schema: Schema) -> dict[str, bytes]:
    target = file.with_name(f"{file.name}_days")
    prepare_files(file, target, schema)
    return {each.name: each.read_bytes() for each in target.rglob("*") if each.is_file()}


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("missing", [[""], ["", "NULL", "-5", "7", "-0.1"], ["NULL"]])
def test_a_table_gives_the_same_bytes_in_every_format(tmp_path: Path, missing: list[str], learn: bool) -> None:
    table = dict(TABLE)
    if "" not in missing:  # then it is no number
        for name in ("rank", "shop", "code"):
            table[name] = table[name]._replace(cells=[cell or None for cell in table[name].cells])
    found = {}
    for name in ("a.csv", "b.CSV.GZ", "c.parquet", "d.PARQUET", "e.arrow", "f.Feather"):
        write(tmp_path / name, table, none=missing[0])
        found[name] = prepared_bytes(tmp_path / name, schema_of(table, missing, learn))
    for name, files in found.items():
        assert files.keys() == found["a.csv"].keys()
        assert [each for each in files if files[each] != found["a.csv"][each]] == [], name


def hashed(*values: str) -> list[int]:
    return sorted(
        int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little", signed=True)
        for value in values
    )


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_cells_mean_what_the_page_says(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TABLE)
    prepare_files(tmp_path / name, tmp_path / "days", schema_of(TABLE, [""], learn=True))
    with np.load(tmp_path / "days" / "encoding" / "vocabulary.npz") as archive:
        keys = {column.removesuffix(".keys"): archive[column].tolist() for column in archive.files}
    assert keys["site"] == hashed("m\u00fcnchen.de", "NULL", "\u6771\u4eac", " x ")
    assert keys["city"] == hashed("K\u00f6ln", "NULL", "7")
    assert keys["level"] == hashed("5.0", "0.1", "1e+20", "-5.0")
    assert keys["member"] == hashed("True", "False")
    assert keys["nothing"] == keys["none"] == []
    assert keys["session"] == [-(2**63), -(2**63) + 1, -1, 0, 7]  # modulo 2^64
    assert keys["item"] == [-(2**62), 5, 7, 2**60]
    assert keys["user"] == [-(2**63), -5, 0, 7, 2**63 - 1]
    assert keys["shop"] == [3, 5, 7, 1000]
    assert keys["code"] == [-1, 31]
    assert keys["tags"] == hashed("a", "\u00f6", "b", "NULL", "\u00df")
    assert keys["words"] == hashed("a", "\u00f6", "b", "NULL")
    assert keys["bought_before"] == [1, 2, 5, 7]
    data = Prepared(tmp_path / "days", TablesConfig())
    batch = data.read(0, 6)
    assert batch.labels.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]
    dense = dict(zip((name for name in TABLE if TABLE[name].role == "dense"), batch.dense.T.tolist(), strict=True))
    assert dense["price"] == [1.5, 0, 0, float(np.float32(1e30)), -0.25, 7]
    assert dense["mobile"] == [1, 0, 0, 1, 0, 0]
    assert dense["rank"] == [1000, 0, 0, -7.5, 1, 4]
    tables = [column for column in TABLE if TABLE[column].role not in ("label", "dense")]
    sizes = dict(zip(tables, batch.sparse.lengths().view(len(tables), 6).tolist(), strict=True))
    assert sizes["site"] == [1] * 6
    assert sizes["tags"] == sizes["words"] == [2, 0, 0, 0, 2, 1]
    assert sizes["bought_before"] == [1, 0, 0, 1, 2, 0]
    assert sizes["friend"] == [1, 0, 1, 1, 1, 1]
    rows = {column: data.read(0, 6).sparse[f"t_{t:02}"].values().tolist() for t, column in enumerate(tables)}
    assert [row == 0 for row in rows["site"]] == [False, True, True, False, False, False]
    assert [row == 0 for row in rows["item"]] == [False, True, True, False, False, False]


NO_KEY = r"is not a whole number from -2\^63 to 2\^64 - 1, or missing"
NO_HEX = "is not a hexadecimal number of up to 64 bits, or missing"
NO_NUMBER = "is not a finite number of 32 bits, or missing"


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
@pytest.mark.parametrize(
    ("column", "rule"),
    [
        (Cells("label", pa.float64(), [0.0, 0.5]), "'?0.5'? is not a label, 0 or 1"),
        (Cells("label", pa.int8(), [0, None]), "(None|'') is not a label"),
        (Cells("label", pa.string(), ["True", "yes"]), "'yes' is not a label, 0 or 1"),
        (Cells("dense", pa.float64(), [1.0, math.inf]), f"'?inf'? {NO_NUMBER}"),
        (Cells("dense", pa.float64(), [1.0, -1e39]), f"'?-1e[+]39'? {NO_NUMBER}"),
        (Cells("dense", pa.string(), ["1", "1x"]), f"'1x' {NO_NUMBER}"),
        (Cells("dense", pa.string(), ["1", "1_0"]), f"'1_0' {NO_NUMBER}"),
        (
            Cells("dense", pa.string(), ["1", "NA"]),
            rf"'NA' {NO_NUMBER} \(the schema's key `missing` lists such texts\);",
        ),
        (Cells("dense", pa.string(), ["1", "\u00fc"]), f"'\u00fc' {NO_NUMBER}"),
        (Cells("dense", pa.date32(), [None, date(2024, 1, 2)]), f"'2024-01-02' {NO_NUMBER}"),
        (Cells("int", pa.float64(), [5.0, 5.5]), f"'?5.5'? {NO_KEY}"),
        (Cells("int", pa.float64(), [5.0, 2.0**64]), f"'?1.8446744073709552e[+]19'? {NO_KEY}"),
        (Cells("int", pa.string(), ["5", f"{2**64}"]), f"'18446744073709551616' {NO_KEY}"),
        (Cells("int", pa.string(), ["5", f"{-(2**63) - 1}"]), f"'-9223372036854775809' {NO_KEY}"),
        (Cells("int", pa.string(), ["5", "a b"]), f"'a b' {NO_KEY}"),
        (Cells("int", pa.date32(), [None, date(2024, 1, 2)]), f"'2024-01-02' {NO_KEY}"),
        (Cells("int", pa.list_(pa.string()), [["1", None, "2"], ["", "3", "4.5"]], "|"), f"'4.5' {NO_KEY}"),
        (Cells("hex", pa.string(), ["5", "-1"]), f"'-1' {NO_HEX}"),
        (Cells("hex", pa.string(), ["5", "1" * 17]), f"'11111111111111111' {NO_HEX}"),
    ],
)
def test_a_cell_that_is_refused_is_named(tmp_path: Path, name: str, column: Cells, rule: str) -> None:
    good, bad = column.cells
    table = {"a": Cells("label", pa.int8(), [0] * 30), "t": Cells("string", pa.string(), ["x"] * 30)}
    table["it"] = column._replace(cells=[good] * 20 + [bad] * 10)
    write(tmp_path / name, table)
    row = 21 + name.endswith("csv")
    with refuses(rf"{name}: row {row}, column it: {rule}"):
        prepare_files(tmp_path / name, tmp_path / "days", schema_of(table, [""], learn=False), block_bytes=64)
    assert not (tmp_path / "days").exists()


@pytest.mark.parametrize("other", ["b", 2.0, math.nan, 2**64 - 1, None])
@pytest.mark.parametrize("value", [16, -1, True, "16"])
@pytest.mark.parametrize("kind", ["string", "int", "hex"])
def test_a_value_that_is_scored_means_the_same_beside_others(kind: Any, value: int | str, other: Any) -> None:
    schema = Schema({"y": Label()}, {}, {"a": Categorical(kind, any=True), "l": Categorical(kind, any=True, list=True)})

    def ids_of(*values: Any) -> list[int]:
        block = _batch_of({"a": values, "l": [[each] for each in values]}, schema)
        first, second = Encoder(schema).features(1, block)[1]
        assert isinstance(second, Ragged)
        return [*first[:1].ravel().tolist(), *second.values[:1].tolist()]  # type: ignore[union-attr]

    alone = ids_of(value)
    if (kind, other) == ("int", "b") or (kind, other, isinstance(value, (str, bool))) == ("hex", 2.0, True):
        with refuses("is not a"):
            ids_of(value, other)
    else:
        assert ids_of(value, other) == alone


_TEXTS = Schema({"y": Label()}, {}, {"a": Categorical(any=True), "l": Categorical(any=True, list=True)})


def _text_ids(*values: Any) -> tuple[list[int], list[int]]:
    block = _batch_of({"a": values, "l": [[each] for each in values]}, _TEXTS)
    first, second = Encoder(_TEXTS).features(1, block)[1]
    assert isinstance(first, np.ndarray)
    assert isinstance(second, Ragged)
    return first.ravel().tolist(), second.values[:].tolist()


@pytest.mark.parametrize(
    ("value", "other"),
    [(np.True_, 7), (7, Decimal("7.50")), (np.float32(0.1), 7.0), (Decimal("7"), "b"), (Decimal("7.50"), 7.5)],
)
def test_numbers_of_several_types_have_the_texts_that_each_has_alone(value: Any, other: Any) -> None:
    for alone, both in zip(zip(_text_ids(value), _text_ids(other), strict=True), _text_ids(value, other), strict=True):
        assert [*alone[0], *alone[1]] == both


@pytest.mark.parametrize("number", [7, np.True_, Decimal("7.5")])
@pytest.mark.parametrize("time", [date(2026, 11, 1), datetime(2026, 11, 1)])
def test_a_number_beside_a_time_is_refused_not_made_a_time(time: Any, number: Any) -> None:
    assert _text_ids(time, None, math.nan) == _text_ids(time, None, None)
    with refuses("column a: no column of values"):
        _text_ids(time, number)


@pytest.mark.parametrize("kind", ["int", "hex"])
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_refused_beside_others(kind: Any, value: int) -> None:
    schema = Schema({"y": Label()}, {}, {"a": Categorical(kind, any=True)})
    with refuses("row 1, column a: .* is not a"):
        Encoder(schema).features(1, _batch_of({"a": [value, "1"]}, schema))
