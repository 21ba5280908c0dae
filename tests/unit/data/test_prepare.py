"""Preparing Criteo's text: the records against the text itself, and folders that are whole or refused."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dlrm_overlap.config import TablesConfig
from dlrm_overlap.data import encoder
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.launching import progress_bar
from tests.conftest import refuses
from tests.unit.data.criteo_lines import prepare_criteo, random_lines

BLOCK = 2000


def text(n: int, seed: int) -> bytes:
    return b"\n".join(random_lines(n, seed))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "day_0").write_bytes(text(40, 0))
    (folder / "day_1.gz").write_bytes(gzip.compress(text(25, 1)))
    (folder / "day_2").write_bytes(text(30, 2))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "arrays"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("min_count", [1, 3, 10**6])
@pytest.mark.parametrize("least_pending", [0, 1 << 18])
def test_rows_by_frequency_agree_with_plain_python(
    source: Path, target: Path, min_count: int, least_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_LEAST_PENDING", least_pending)
    meta = prepare_criteo(source, target, min_count=min_count, block_bytes=BLOCK)
    lines = [(source / "day_0").read_bytes(), gzip.decompress((source / "day_1.gz").read_bytes())]
    lines = [line.split(b"\t")[14:] for part in [*lines, (source / "day_2").read_bytes()] for line in part.split(b"\n")]
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
    with np.load(target / "encoding" / "vocabulary.npz") as vocabulary:
        assert vocabulary["C26.keys"].tolist() == known
        assert vocabulary["C26.counts"].tolist() == [counts[value] for value in known]


def test_a_malformed_line_leaves_no_folder(source: Path, target: Path) -> None:
    (source / "day_2").write_bytes(text(30, 2) + b"\n0\t1")
    with refuses(r"day_2: .*Row #31: Expected 40 columns, got 2"):
        prepare_criteo(source, target, rows=13, block_bytes=BLOCK)
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, r"day_2: cannot be read \(No such file or directory\); correct the file"),
        (text(29, 2), "text: 95 rows when values were counted, then 94, so it has changed .*; prepare it again"),
        (text(31, 2), "text: 95 rows when values were counted, then 96"),
    ],
)
def test_files_that_change_between_the_readings_are_named(
    source: Path, target: Path, content: bytes | None, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = encoder.Encoder.finish

    def change(self: encoder.Encoder) -> dict[str, np.ndarray]:
        (source / "day_2").unlink() if content is None else (source / "day_2").write_bytes(content)
        return finish(self)

    monkeypatch.setattr(encoder.Encoder, "finish", change)
    with refuses(rule):
        prepare_criteo(source, target, min_count=1)
    assert not target.exists()


def test_a_folder_that_is_there_stays_as_it_is(source: Path, target: Path) -> None:
    prepare_criteo(source, target, rows=13)
    before = contents(target)
    with refuses(r"arrays: cannot be written \(File exists\); delete it, or name another"):
        prepare_criteo(source, target, rows=13)
    assert contents(target) == before


def test_a_folder_of_other_rows_is_refused(source: Path, target: Path) -> None:
    prepare_criteo(source, target, rows=13)
    assert (target / "records").stat().st_size == 95 * (4 * 13 + 1 + 26)
    assert Prepared(target, TablesConfig(rows=20, max_rows=10)).rows == [10] * 26
    with refuses("records: a file, not a folder that `dlrm-overlap prepare` wrote; prepare it, and give the folder"):
        Prepared(target / "records", TablesConfig())
    for rows, most in ((12, None), (14, None), (12, 13), (14, 20)):
        with refuses(rf"rows: \[{rows}, .*were made for \[13, 13, .*; set it to null"):
            Prepared(target, TablesConfig(rows=rows, max_rows=most))


def test_a_log_says_how_far_it_is(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_criteo(source, target, min_count=2)
    assert capsys.readouterr().err == "", "it takes no ten seconds"
    monkeypatch.setattr(progress_bar, "_LINE_EVERY_S", 0.0)
    prepare_criteo(source, target.with_name("again"), min_count=2, block_bytes=BLOCK)
    lines = capsys.readouterr().err.splitlines()
    counting, writing = ([line for line in lines if line.startswith(begin)] for begin in ("counting ", "writing "))
    assert len(counting) > 4
    assert len(writing) == len(counting) == len(lines) / 2
    # The number of rows of text is an estimate by its bytes until all was read.
    assert " 100%, 95.0 of about 95.0 rows, " in counting[-1]
    assert all(" of 95.0 rows, " in line for line in writing)
