"""The encoding of a table is kept beside its samples, and encodes later tables alike."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm_overlap.cli import main
from dlrm_overlap.config import DataConfig, InputError, TablesConfig
from dlrm_overlap.data.encoder import Encoder
from dlrm_overlap.data.encoding import Encoded, read_encoding
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.data.prepared import Prepared, encoded_of
from dlrm_overlap.data.schema import read_schema
from tests.conftest import PYTHON_PATH, refuses

SCHEMA = """
labels: {click: {}}
dense: {price: {transform: log1p}}
categorical:
  city: {min_count: 2}
  genres: {list: true, min_count: 1}
  user: {type: int, rows: 50}
"""
CITIES = ["Köln", "Köln", "Aachen", "Aachen", "Bonn", None]
GENRES = [["a"], ["a", "b"], [], ["c"], ["b"], None]


def write_table(path: Path, cities: list[str | None], genres: list[Any]) -> Path:
    n = len(cities)
    columns = {"click": [i % 2 for i in range(n)], "price": [1.5 * i for i in range(n)], "city": cities}
    parquet.write_table(
        pa.table({**columns, "genres": pa.array(genres, pa.list_(pa.string())), "user": range(n)}), path
    )
    return path


def prepare(folder: Path, name: str, *options: str) -> Path:
    assert main(["prepare", "table", str(folder / f"{name}.parquet"), str(folder / name), *options]) == 0
    return folder / name


def test_log1p_takes_0_for_negative_numbers_which_other_columns_keep(tmp_path: Path) -> None:
    """Criteo's counts begin at -1. A missing number is 0 in both."""
    schema = (
        "labels: {click: {}}\ndense: {logged: {transform: log1p}, plain: {}}\ncategorical: {u: {type: int, rows: 9}}"
    )
    (tmp_path / "schema.yaml").write_text(schema)
    numbers = [-3.0, -0.5, None, 0.0, 1.5, float("nan")]
    block = pa.RecordBatch.from_pydict({"logged": numbers, "plain": numbers, "u": range(6)})
    dense, _ = Encoder(read_schema(tmp_path / "schema.yaml"), {}).features(1, block)
    assert dense[:, 0].tolist() == pytest.approx([0, 0, 0, 0, np.log(2.5), 0])
    assert dense[:, 1].tolist() == [-3.0, -0.5, 0.0, 0.0, 1.5, 0.0]


@pytest.fixture
def days(tmp_path: Path) -> Path:
    write_table(tmp_path / "days.parquet", CITIES, GENRES)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return prepare(tmp_path, "days", "--schema", str(tmp_path / "schema.yaml"))


def ids_of(folder: Path) -> dict[str, list[list[int]]]:
    data = Prepared(folder, TablesConfig())
    sparse = data.read(0, data.num_samples).sparse
    return {key: [bag.long().tolist() for bag in sparse[key].to_dense()] for key in sparse.keys()}  # noqa: SIM118 - no dict


def test_a_later_table_gets_the_rows_of_the_first(tmp_path: Path, days: Path, capsys: Any) -> None:
    write_table(
        tmp_path / "later.parquet", ["Aachen", "Paris", "Bonn", None, "Köln"], [["c", "x"], ["y"], None, [], ["b"]]
    )
    capsys.readouterr()
    found = ids_of(prepare(tmp_path, "later", "--like", str(days)))
    said = capsys.readouterr().out
    assert "city: 2 of 4 values (50.0%) not in the vocabulary\n" in said
    assert "genres: 2 of 4 values (50.0%) not in the vocabulary\n" in said
    first = ids_of(days)
    rows = dict(zip(CITIES, [row for (row,) in first["t_00"]], strict=True))
    # Bonn is rare in the first table, so it has the row that Paris, which is unknown, gets, too.
    assert found["t_00"] == [[rows["Aachen"]], [rows["Bonn"]], [rows["Bonn"]], [rows[None]], [rows["Köln"]]]
    (a,), (_, b), _, (c,), *_ = first["t_01"]
    assert sorted([a, b, c]) == [2, 3, 4]
    assert found["t_01"] == [[c, 1], [1], [], [], [b]]
    assert encoded_of(tmp_path / "later") == Encoded(tmp_path / "later" / "encoding", encoded_of(days).digest)  # type: ignore[union-attr]
    assert Prepared(tmp_path / "later", TablesConfig()).rows == Prepared(days, TablesConfig()).rows


def test_the_same_table_and_schema_have_one_digest(tmp_path: Path, days: Path) -> None:
    again = write_table(tmp_path / "again.parquet", CITIES[::-1], GENRES[::-1])
    same = prepare(tmp_path, "again", "--schema", str(tmp_path / "schema.yaml"))
    assert encoded_of(same).digest == encoded_of(days).digest  # type: ignore[union-attr]
    digests = {encoded_of(days).digest}  # type: ignore[union-attr]
    changes = (("min_count: 2", "min_count: 1"), ("rows: 50", "rows: 51"), ("type: int, ", ""), ("log1p", "none"))
    for number, (old, new) in enumerate(changes):
        (tmp_path / "other.yaml").write_text(SCHEMA.replace(old, new))
        again.rename(again := tmp_path / f"other_{number}.parquet")
        other = encoded_of(prepare(tmp_path, f"other_{number}", "--schema", str(tmp_path / "other.yaml")))
        digests.add(other.digest)  # type: ignore[union-attr]
    assert len(digests) == 1 + len(changes)
    (tmp_path / "free.yaml").write_text(SCHEMA.replace("click: {}", "click: {weight: 2.0}"))
    again.rename(tmp_path / "free.parquet")
    weighted = encoded_of(prepare(tmp_path, "free", "--schema", str(tmp_path / "free.yaml")))
    assert weighted.digest == encoded_of(days).digest  # type: ignore[union-attr]


def test_the_schema_that_is_kept_is_the_one_that_was_given(tmp_path: Path, days: Path) -> None:
    assert read_encoding(days / "encoding").schema == read_schema(tmp_path / "schema.yaml")


def test_samples_of_another_encoding_are_refused(tmp_path: Path, days: Path) -> None:
    """Their tables have as many rows, so that no other check finds them."""
    write_table(tmp_path / "other.parquet", ["Ulm", "Ulm", "Mainz", "Mainz", "Trier", None], GENRES)
    other = prepare(tmp_path, "other", "--schema", str(tmp_path / "schema.yaml"))
    assert Prepared(other, TablesConfig()).rows == Prepared(days, TablesConfig()).rows
    config = DataConfig(kind="prepared", path=str(days), eval_path=str(other))
    digests = [encoded_of(folder).digest for folder in (other, days)]  # type: ignore[union-attr]
    with refuses(
        f"data.eval_path: {other} has the encoding {digests[0]}, not {digests[1]} as the samples of {days}, so one "
        f"value has different ids; encode the table of {other} by that encoding: dlrm-overlap prepare table TABLE OUT "
        f"--like {days}"
    ):
        open_datasets(config)


def test_samples_are_packed_anew_with_their_encoding(tmp_path: Path, days: Path) -> None:
    source = ["--data.kind", "prepared", "--data.path", str(days)]
    assert main(["prepare", "samples", str(tmp_path / "packed"), *source]) == 0
    packed = encoded_of(tmp_path / "packed")
    assert packed is not None
    assert packed.read().digest == encoded_of(days).digest  # type: ignore[union-attr]


def test_a_changed_file_is_found(tmp_path: Path, days: Path) -> None:
    write_table(tmp_path / "later.parquet", CITIES, GENRES)
    file = days / "encoding" / "vocabulary.npz"
    with np.load(file) as archive:
        arrays = dict(archive)
    arrays["city.keys"] = arrays["city.keys"] + 1
    np.savez(file, **arrays)
    encoded = encoded_of(days)
    assert encoded is not None
    with pytest.raises(InputError, match=rf"encoding: has the digest [0-9a-f]{{16}}, not {encoded.digest} as when"):
        encoded.read()
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(InputError, match=re.escape(f"{file}: no vocabularies can be read")):
        encoded.read()


_NAMES = """
import sys
from pathlib import Path
from dlrm_overlap.data.encoding import read_encoding, write_encoding
from dlrm_overlap.data.schema import read_schema
schema = read_schema(Path(sys.argv[1]))
write_encoding(Path(sys.argv[2]), schema, {})
assert read_encoding(Path(sys.argv[2])).schema == schema
print(ascii(list(schema.labels)))
"""


def test_names_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text("labels: {gekauft_für: {}}\ncategorical: {id: {rows: 9}}", encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", _NAMES, str(tmp_path / "schema.yaml"), str(tmp_path / "encoding")]
    done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True, check=False)
    assert done.stdout == "['gekauft_f\\xfcr']\n", done.stderr


def test_the_files_are_on_disk_before_meta_json_names_their_digest(
    tmp_path: Path, days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[Path](), os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_table(tmp_path / "new.parquet", CITIES, GENRES)
    write_table(tmp_path / "later.parquet", CITIES, GENRES)
    for name, *options in (("new", "--schema", str(tmp_path / "schema.yaml")), ("later", "--like", str(days))):
        made = prepare(tmp_path, name, *options)
        names = [path.relative_to(made).as_posix() for path in synced if made in path.parents]
        assert names[:3] == ["encoding/schema.yaml", "encoding/vocabulary.npz", "encoding"]


def test_a_changed_schema_is_found(tmp_path: Path, days: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = days / "encoding" / "schema.yaml"
    changed = file.read_text().replace("time_unit: s", "time_unit: ms")
    file.write_text(changed)
    assert main(["prepare", "table", str(tmp_path / "days.parquet"), str(tmp_path / "x"), "--like", str(days)]) == 2
    assert f"{file}: has changed since it was written; copy the folder again" in capsys.readouterr().err
    file.write_text(changed.partition("\n")[2])  # earlier versions wrote no checksum
    assert read_encoding(days / "encoding").schema.time_unit == "ms"


@pytest.mark.parametrize("options", [["--schema", "schema.yaml"], ["--rows", "9"], ["--min_count", "2"]])
def test_an_encoding_takes_no_other_options(tmp_path: Path, days: Path, options: list[str], capsys: Any) -> None:
    like = ["prepare", "table", str(tmp_path / "days.parquet"), str(tmp_path / "x"), "--like", str(days)]
    assert main([*like, *options]) == 2
    assert "has the schema, with its rows and min_count; leave out the other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (
            ["table", "{tmp}/x.csv", "{tmp}/x"],
            "--schema: missing, but a table needs one; give it, or --like, for",
        ),
        (["criteo", "{tmp}/x.csv", "{tmp}/x", "--schema", "{tmp}/s"], "but the columns of Criteo's text are known"),
        (
            ["table", "{tmp}/x.csv", "{tmp}/x", "--like", "{tmp}"],
            "is neither .*; give a folder named step_<N>, one that `prepare` wrote, or a run's folder",
        ),
        (["table", "{days}", "{tmp}/x", "--like", "{days}"], "days: a folder that `prepare` wrote, not a table; name"),
    ],
)
def test_mistakes_of_prepare_are_refused_in_one_line(
    tmp_path: Path, days: Path, argv: list[str], rule: str, capsys: Any
) -> None:
    (tmp_path / "x.csv").write_text("click,city\n1,Rom\n")
    capsys.readouterr()
    assert main(["prepare", *(each.format(tmp=tmp_path, days=days) for each in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rule, line), line


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let Python change threads after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_that_share_an_encoder_lose_no_counts(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text("labels: {click: {}}\ncategorical: {user: {type: int, any: true}}")
    encoder, calls, threads = Encoder(read_schema(tmp_path / "schema.yaml")), 2000, 4
    ids, has_row = np.arange(3), np.array([True, False, False])

    def count(_: int) -> None:
        for _ in range(calls):
            encoder.count_ids("user", ids, has_row)

    values, unknown = Counter[str](), Counter[str]()
    with _switching_often(), ThreadPoolExecutor(threads) as pool:
        counting = [pool.submit(count, each) for each in range(threads)]
        while not all(each.done() for each in counting):
            taken = encoder.take_counts()
            values.update(taken[0])
            unknown.update(taken[1])
        for each in counting:
            each.result()
    taken = encoder.take_counts()
    assert values + taken[0] == {"user": 3 * calls * threads}
    assert unknown + taken[1] == {"user": 2 * calls * threads}
