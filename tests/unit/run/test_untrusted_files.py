"""Nothing in a configuration or a data file is executed: files that would leave a mark if it were."""

import fcntl
import io
import os
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dlrm_overlap.config import Config, InputError, TablesConfig
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.launching.files import LOCK_NAME, hold_folder
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.observe.result_files import MetricsFile
from tests.conftest import refuses


class _Evil:
    """An object whose pickle makes the folder `mark` when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def _write_day(folder: Path, **arrays: np.ndarray) -> None:
    whole: dict[str, Any] = {"dense": np.zeros((20, 13), np.float32), "labels": np.zeros((20, 1), np.int32)}
    for name, array in (whole | {"sparse": np.zeros((20, 26), np.int32)} | arrays).items():
        np.save(folder / f"day_0_{name}.npy", array, allow_pickle=True)


CALL = "!!python/object/apply:os.mkdir ['{mark}']"
TAGS = [CALL, f"data: {{{{tables: {{{{rows: [{CALL}]}}}}}}}}", "log: {{dir: !!python/name:os.mkdir }}"]


@pytest.mark.parametrize("tag", [*TAGS, "log: {{dir: !!python/object/new:os.mkdir ['{mark}']}}"])
def test_a_configuration_executes_nothing(tmp_path: Path, mark: Path, tag: str) -> None:
    text = tag.format(mark=mark)
    (tmp_path / "evil.yaml").write_text(text + "\n")
    with refuses():
        parse_config(Config, "train", "", ["--config", str(tmp_path / "evil.yaml")])
    assert not mark.exists()
    if "apply" in text:  # the file would, if it were loaded otherwise
        yaml.unsafe_load(text)
        assert mark.exists()


@pytest.mark.parametrize("part", ["dense", "sparse", "labels"])
def test_arrays_execute_nothing(tmp_path: Path, mark: Path, part: str) -> None:
    _write_day(tmp_path, **{part: np.array([[_Evil(mark)]] * 20)})
    with refuses(rf"day_0_{part}\.npy"):
        Criteo(tmp_path, TablesConfig(rows=50), multi_hot=False)
    assert not mark.exists()
    np.load(tmp_path / f"day_0_{part}.npy", allow_pickle=True)
    assert mark.exists(), "the file would, if it were loaded otherwise"


def test_members_of_an_archive_execute_nothing(tmp_path: Path, mark: Path) -> None:
    _write_day(tmp_path)
    members: dict[str, Any] = {f"{t}": np.zeros((20, 1), np.int32) for t in range(26)}
    members["3"] = np.array([[_Evil(mark)]] * 20)
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **members)
    with refuses(r"day_0_sparse_multi_hot\.npz"):
        Criteo(tmp_path, TablesConfig(rows=50), multi_hot=True)
    evil = f"{{'descr': __import__('os').mkdir('{mark}'), 'fortran_order': False, 'shape': (20, 1)}}"
    for header in (evil, evil[:-20]):  # an expression instead of a literal, whole and truncated
        with zipfile.ZipFile(tmp_path / "day_0_sparse_multi_hot.npz", "w") as archive:
            for t in range(26):
                size = (len(header) + 1).to_bytes(2, "little")
                archive.writestr(f"{t}.npy", b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n" + bytes(80))
        with refuses(r"day_0_sparse_multi_hot\.npz"):
            Criteo(tmp_path, TablesConfig(rows=50), multi_hot=True)
        (tmp_path / "day_0_dense.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n" + bytes(80))
        with refuses(r"day_0_dense\.npy: not the array"):
            Criteo(tmp_path, TablesConfig(rows=50), multi_hot=False)
    assert not mark.exists()


def _npy(header: str, version: int = 1, size: int | None = None) -> bytes:
    """The beginning of an npy file, whose header claims to have `size` bytes."""
    size = len(header) if size is None else size
    return b"\x93NUMPY" + bytes([version, 0]) + size.to_bytes(2 if version == 1 else 4, "little") + header.encode()


def _forged_headers(columns: int) -> Iterator[bytes]:
    def header(shape: str = f"(20, {columns})", descr: str = "'<i4'", order: str = "False") -> str:
        return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"

    shapes = ["()", "(20,)", "(-1, {0})", "(-20, -{0})", "(20, -{0})", "(20, 0)", "(0, {0})", "(20, {0}, 1)", "None"]
    shapes += ["20", "(20.0, {0})", "('20', {0})", "[20, {0}]", "(1e400, {0})", f"({'1,' * 70})", "((20,), {0})"]
    shapes += [f"({huge}, {{0}})" for huge in (21, 2**31, 10**12, 10**18, 2**62, 2**63 - 1, 10**30, "9" * 5000)]
    for shape in shapes:
        for order in ("False", "True"):
            yield _npy(header(shape.format(columns), order=order))
        yield _npy(header(shape.format(columns)), 2)
    descrs = ["'O'", "'>i4'", "'<i8'", "'|V100000000000'", "'<U500000000'", "'M8[s]'", "None", "(('<i4'),)", "3"]
    descrs += [f"[('a', {field})]" for field in ("'<i4'", "'O'", "'<i4', (10**9, 10**9)", "'<i4', (99999, 99999)")]
    yield from (_npy(header(descr=descr)) for descr in descrs)
    yield from (_npy(header(order=order)) for order in ("None", "3", "'x'"))
    yield from (_npy(text) for text in ("", "{}", "\0", "(" * 9000, "[" * 9000, "1+" * 9000 + "1", "{'descr': '<i4'}"))
    yield from (_npy(header(), version) for version in (0, 3, 255))
    yield from (_npy(header(), size=size) for size in (0, 1, 2**16 - 1))
    yield from (_npy(header(), 2, size) for size in (0, 1, 2**31, 2**32 - 1))
    yield from (_npy(header())[:size] for size in (0, 3, 6, 8, 10, 40))
    yield b"PK\x05\x06" + bytes(18)  # an archive without members


def _assert_refused(folder: Path, file: str, multi_hot: bool) -> None:
    rule = rf"day_0_{file}: not the array that is needed \(|day_0.*: .* samples"
    with refuses(rule) as error:
        Criteo(folder, TablesConfig(rows=50), multi_hot)
    assert len(str(error.value)) < 700


@pytest.mark.filterwarnings("error")
def test_forged_headers_of_arrays_are_refused_without_memory_of_their_size(tmp_path: Path) -> None:
    _write_day(tmp_path)
    whole = io.BytesIO()
    np.save(whole, np.zeros((20, 1), np.int32))
    tracemalloc.start()
    try:
        for header in _forged_headers(26):
            (tmp_path / "day_0_sparse.npy").write_bytes(header + bytes(20 * 26 * 4))
            _assert_refused(tmp_path, r"sparse\.npy", multi_hot=False)
        for header in list(_forged_headers(1))[::3]:
            with zipfile.ZipFile(tmp_path / "day_0_sparse_multi_hot.npz", "w") as archive:
                for t in range(26):
                    archive.writestr(f"{t}.npy", header + bytes(80) if t == 25 else whole.getvalue())
            _assert_refused(tmp_path, r"sparse_multi_hot\.npz", multi_hot=True)
        assert tracemalloc.get_traced_memory()[1] < 5e7
    finally:
        tracemalloc.stop()


def test_damaged_archives_are_refused_or_read(tmp_path: Path) -> None:
    """Refused in one line; or read, where ids have changed into other valid ones."""
    _write_day(tmp_path)
    file = tmp_path / "day_0_sparse_multi_hot.npz"
    np.savez(file, **{f"{t}": np.zeros((20, 1), np.int32) for t in range(26)})  # pyright: ignore[reportArgumentType]
    whole, rng, refusals = file.read_bytes(), np.random.default_rng(0), []
    for _ in range(300):
        damaged = bytearray(whole)
        for position in len(whole) - rng.integers(1, 2000, 3):
            damaged[position] = rng.integers(256)
        file.write_bytes(damaged)
        try:
            Criteo(tmp_path, TablesConfig(rows=50), multi_hot=True).read(0, 20)
        except InputError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not any("\n" in refusal for refusal in refusals)


def test_a_pipe_instead_of_an_array_is_refused_at_once(tmp_path: Path) -> None:
    _write_day(tmp_path)
    (tmp_path / "day_0_labels.npy").unlink()
    os.mkfifo(tmp_path / "day_0_labels.npy")
    _assert_refused(tmp_path, r"labels\.npy", multi_hot=False)


def test_deeply_nested_files_are_refused_by_name(tmp_path: Path) -> None:
    deep = "[" * 100_000
    for file in ("evil.yaml", "metrics.jsonl", "meta.json", LOCK_NAME):
        (tmp_path / file).write_text(f"{deep}\n")
    with refuses(r"evil\.yaml is not YAML"):
        parse_config(Config, "train", "", ["--config", str(tmp_path / "evil.yaml")])
    with refuses(r"has no meta\.json of this version's `dlrm-overlap prepare`"):
        Prepared(tmp_path, TablesConfig())
    MetricsFile(tmp_path / "metrics.jsonl", 1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with (tmp_path / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refuses(r"is in use by \[{200}; wait"):
            hold_folder(tmp_path, "log.dir").__enter__()
