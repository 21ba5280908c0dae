"""Tables in the layouts of public data sets, as CSV, Parquet and Arrow: the same samples, and those of plain Python."""

import csv
import gzip
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

from dlrm_overlap.config import TablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import Loader
from dlrm_overlap.data.prepare import prepare_files
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.schema import Categorical, Label, Schema, read_schema, table_keys
from tests.agreement import assert_same_samples
from tests.conftest import refuses
from tests.unit.data.criteo_lines import hash_plainly

N = 120


MOVIES = """
labels: {liked: {}}
dense: {age: {}}
categorical:
  movie: {type: int, rows: 50}
  genres: {list: "|", rows: 20}
  seen: {list: "|", type: int, rows: 30}
"""

CCP = """
delimiter: "\\t"
missing: ["", "NULL"]
labels: {click: {}, purchase: {weight: 2}}
dense:
  since: {transform: log1p}
  %s
categorical:
  tags: {list: ";", rows: 40}
  user: {type: int, rows: 99}
  %s
"""


def movies(rng: np.random.Generator) -> dict[str, Any]:
    genres = ["Action", "Children's", "Film-Noir", "Sci-Fi", "Drama, \u00e9"]
    return {
        "liked": rng.integers(0, 2, N).tolist(),
        "age": [None if i % 7 == 0 else int(age) for i, age in enumerate(rng.integers(10, 80, N))],
        "movie": rng.integers(0, 4000, N).tolist(),
        "genres": [rng.choice(genres, rng.integers(0, 5)).tolist() for _ in range(N)],
        "seen": [rng.integers(0, 4000, rng.integers(0, 6)).tolist() for _ in range(N)],
    }


CCP_DENSE, CCP_TEXTS = [f"d{i}" for i in range(10)], [f"s{i}" for i in range(27)]


def ccp(rng: np.random.Generator) -> dict[str, Any]:
    columns: dict[str, Any] = {name: rng.integers(0, 2, N).tolist() for name in ("click", "purchase")}
    columns |= {name: rng.normal(size=N).tolist() for name in CCP_DENSE}
    columns |= {"since": rng.integers(-1, 9000, N).tolist(), "user": rng.integers(-5, 2**40, N).tolist()}
    for name in CCP_TEXTS:
        columns[name] = [f"{value}" if value else None for value in rng.integers(0, 12, N)]
    return columns | {"tags": [[f"t{tag}" for tag in rng.integers(0, 99, rng.integers(0, 9))] for _ in range(N)]}


LAYOUTS: dict[str, tuple[Callable[[np.random.Generator], dict[str, Any]], str]] = {
    "movies": (movies, MOVIES),
    "ccp": (
        ccp,
        CCP % tuple("\n  ".join(f"{n}: {k}" for n in ns) for ns, k in ((CCP_DENSE, "{}"), (CCP_TEXTS, "{rows: 9}"))),
    ),
}


def write_csv(file: Path, columns: dict[str, Any], schema: Schema) -> None:
    def field(value: Any, name: str) -> str:
        if value is None:
            return schema.missing[-1]
        separator = schema.categorical[name].list if name in schema.categorical else False
        return str(separator).join(map(str, value)) if separator else str(value)

    with (gzip.open if file.suffix == ".gz" else open)(file, "wt", newline="") as stream:
        writer = csv.writer(stream, delimiter=schema.delimiter)
        writer.writerow(columns)
        writer.writerows(
            zip(*([field(each, name) for each in column] for name, column in columns.items()), strict=True)
        )


def write(folder: Path, layout: str, kind: str, parts: int = 2) -> tuple[Path, Schema, dict[str, Any]]:
    """Write a layout's samples as some files of a kind; return their folder, the schema and the columns."""
    make, text = LAYOUTS[layout]
    (folder / "schema.yaml").write_text(text)
    schema, columns = read_schema(folder / "schema.yaml"), make(np.random.default_rng(0))
    (folder / kind).mkdir()
    for part in range(parts):
        some = {name: column[part * N // parts : (part + 1) * N // parts] for name, column in columns.items()}
        file = folder / kind / f"part_{part}.{kind}"
        table = pa.table(some)
        if kind == "parquet":
            parquet.write_table(table, file, row_group_size=17)
        elif kind == "arrow":
            feather.write_feather(table, str(file), chunksize=17)
        else:
            write_csv(file, some, schema)
    return folder / kind, schema, columns


def key_plainly(value: Any, kind: str) -> int:
    if kind != "string":
        return value % 2**64
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "little")


def expected(schema: Schema, columns: dict[str, Any], i: int) -> tuple[list[float], list[float], list[list[int]]]:
    """Return labels, dense features and bags of a sample."""
    labels = [float(columns[name][i]) for name in schema.labels]
    dense = []
    for name, column in schema.dense.items():
        value = columns[name][i]
        dense.append(float(np.log1p(max(value, 0)) if column.transform == "log1p" else value or 0))
    bags = []
    for name, column in schema.categorical.items():
        value, rows = columns[name][i], column.rows or 0
        values = value if column.list else [value]
        bags.append([0 if each is None else hash_plainly(key_plainly(each, column.type), rows) for each in values])
    return labels, dense or [1.0], bags


def bags_of(batch: Batch) -> list[list[list[int]]]:
    """Return the bags of each table, sample by sample."""
    tables = [batch.sparse[key].to_dense() for key in table_keys(len(batch.sparse.keys()))]
    return [[bag.long().tolist() for bag in bags] for bags in tables]


def prepared(source: Path, schema: Schema, **options: Any) -> Prepared:
    """Prepare the samples of `source` in the folder `days` next to it."""
    days = source.parent / "days"
    prepare_files(source, days, schema, **options)
    return Prepared(days, TablesConfig())


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "arrow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_gives_the_samples_of_plain_python(tmp_path: Path, layout: str, kind: str) -> None:
    source, schema, columns = write(tmp_path, layout, kind)
    data = prepared(source, schema, block_bytes=1000)
    assert data.num_samples == N
    batch = data.read(0, N)
    labels, bags = batch.labels.view(N, -1), bags_of(batch)
    for i in range(N):
        truth = expected(schema, columns, i)
        assert labels[i].tolist() == truth[0]
        assert batch.dense[i].tolist() == pytest.approx(truth[1], rel=3e-7)
        assert [table[i] for table in bags] == truth[2], i
    assert data.labels == {name: label.weight for name, label in schema.labels.items()}


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_a_file_without_rows_has_no_samples(tmp_path: Path, kind: str) -> None:
    source, schema, _ = write(tmp_path, "movies", kind, parts=1)
    file, empty = source / f"part_0.{kind}", source / f"part_1.{kind}"
    if kind == "csv":
        empty.write_text(file.read_text().partition("\n")[0] + "\n")
    elif kind == "parquet":
        parquet.write_table(parquet.read_table(file).slice(0, 0), empty)
    else:
        feather.write_feather(feather.read_table(file).slice(0, 0), str(empty))
    assert prepared(source, schema).num_samples == N
    file.unlink()
    with refuses(f"{source}: no samples; name a file, or a folder, that has some"):
        prepare_files(source, tmp_path / "none", schema)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_may_begin_at_any_sample_on_any_number_of_ranks(tmp_path: Path, workers: int) -> None:
    source, schema, _ = write(tmp_path, "ccp", "arrow")
    data = prepared(source, schema)
    whole = data.read(0, 2 * N)
    pieces = [data.read(first, 7) for first in range(0, 2 * N - 6, 7)]
    joined = Batch.join(pieces)
    assert torch.equal(joined.dense, whole.dense[: len(joined.dense)])
    ranks = []
    for rank in range(3):  # from step 2 on
        with Loader(data, 8, rank, 3, range(2, 9), workers, 2, False) as loader:
            ranks.append(list(loader))
    in_order = Batch.join([ranks[rank][step] for step in range(7) for rank in range(3)])
    assert_same_samples(in_order, data.read(2 * 24, 7 * 24))
    assert in_order.labels.shape == (7 * 24, 2)


def test_what_is_learnt_of_the_samples(tmp_path: Path) -> None:
    source, _, columns = write(tmp_path, "movies", "csv")
    text = LAYOUTS["movies"][1].replace("rows: 50", "min_count: 2").replace("rows: 20", "min_count: 9")
    (tmp_path / "schema.yaml").write_text(text)
    batch = prepared(source, read_schema(tmp_path / "schema.yaml")).read(0, N)
    bags = {"movie": [[movie] for movie in columns["movie"]], "genres": columns["genres"]}
    for table, name, count in ((0, "movie", 2), (1, "genres", 9)):
        seen = Counter(value for bag in bags[name] for value in bag)
        frequent = {value for value, number in seen.items() if number >= count}
        with np.load(tmp_path / "days" / "encoding" / "vocabulary.npz") as vocabulary:
            assert sorted(vocabulary[f"{name}.counts"].tolist()) == sorted(seen[value] for value in frequent)
        rows = {}  # value -> its row, which is the same in all samples
        for bag, found in zip(bags[name], bags_of(batch)[table], strict=True):
            rows |= dict(zip(bag, found, strict=True))
            assert found == [rows[value] for value in bag]
        assert sorted(rows[value] for value in frequent) == list(range(2, 2 + len(frequent)))
        assert {row for value, row in rows.items() if value not in frequent} <= {1}


A, AB = "labels: {a: {}}", "labels: {a: {}}\ncategorical: {b: {rows: 2%s}}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (A, "categorical: none, but"),
        (f"{A}\ncategorical: {{b: {{}}}}", r"categorical\.b: rows None, min_count None, any False; give one"),
        (AB % ", min_count: 3", "give one of them"),
        (f"{A}\ncategorical: {{no: {{rows: 2}}}}", "categorical: YAML reads a name in it as false; write it in quotes"),
        (f"{A}\ndense: {{null: {{}}}}", "dense: YAML reads a name in it as null; write it in quotes"),
        (AB % ", row: 2", r"categorical\.b\.row is not a key; did you mean categorical\.b\.rows"),
        (f"{A}\ncategorical: {{b: {{rows: 0}}}}", r"b\.rows: 0 is not a whole number from 1 to 2\^31 - 1 or null$"),
        (f"{A}\ncategorical: {{a: {{rows: 2}}}}", "a: a column with two uses"),
        (AB % "" + "\ncolumns: [a, b, b]", "columns: b is twice; name every column"),
        (AB % "" + "\ncolumns: [a, c]", "columns: b is missing; name every"),
        (AB % ", list: ''", "b.list: '' is not true or false or the text between"),
        (AB % "" + "\ndelimiter: ab", "delimiter: ab is not one ASCII character"),
        ("labels: a", "labels: 'a' must be sections by name, each with its keys, or NAME: {} without keys"),
        (AB % "" + "\nmissing: [0]", r"missing: \[0\] is not a list of one or more texts, numbers among them in"),
        (AB % "" + "\ncolumns: [0]", r"columns: \[0\] is not a list of one or more texts, .* '-1'\] or null"),
        ("- 1", "must be a section of keys"),
        ("a: [", "no schema can be read"),
        ("labels: {a: !!int ''}", "no schema can be read"),
    ],
)
def test_a_wrong_schema_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "schema.yaml").write_text(text)
    with refuses(rf"schema\.yaml.*{rule}"):
        read_schema(tmp_path / "schema.yaml")


@pytest.mark.parametrize(
    ("kind", "label", "feature", "rule"),
    [
        ("parquet", "movie", "seen: {rows: 2}", "row 1, column movie: [0-9.]+ is not a label"),
        (
            "parquet",
            "rates",
            "movie: {rows: 2}",
            r"parquet: column rates: missing among .* 5 columns \(liked, age, movie, genres, seen\); it is a label, "
            r"without which a table is for `dlrm-overlap predict` only; cor",
        ),
        ("parquet", "liked", "genres: {rows: 2}", r"column genres: list.*, but .* single values, without the key list"),
        ("parquet", "liked", "movie: {rows: 2, list: true}", r"column movie: int64, but .* values \(list: True\)"),
        ("parquet", "genres", "movie: {rows: 2}", "row 1, column genres: list.*, but the schema asks for single"),
        ("csv", "liked", "genres: {rows: 9, list: true}", r"row 2, column genres: text, but .* values \(list: True\)"),
    ],
)
def test_files_that_a_schema_does_not_fit_are_refused(
    tmp_path: Path, kind: str, label: str, feature: str, rule: str
) -> None:
    source, _, _ = write(tmp_path, "movies", kind)
    (tmp_path / "schema.yaml").write_text(f"labels: {{{label}: {{}}}}\ncategorical: {{{feature}}}")
    with refuses(rule):
        prepare_files(source, tmp_path / "days", read_schema(tmp_path / "schema.yaml"))


@pytest.mark.parametrize("cell", [[[1]], {"a": 1}])
def test_only_lists_of_single_values_are_lists(tmp_path: Path, cell: Any) -> None:
    parquet.write_table(pa.table({"y": [1], "a": [cell]}), tmp_path / "table.parquet")
    schema = Schema({"y": Label()}, {}, {"a": Categorical(rows=2, list=True)})
    with refuses(r"column a: (list|struct)<.*>, but the schema asks for lists of single values \(list: True\)"):
        prepare_files(tmp_path / "table.parquet", tmp_path / "days", schema)
