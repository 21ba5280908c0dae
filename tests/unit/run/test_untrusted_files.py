"""Nothing in a configuration or a data file is executed: files that would leave a mark if it were."""

import fcntl
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dlrm_overlap.config import Config, InputError, TablesConfig
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.launching.files import LOCK_NAME, check_free
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.observe.result_files import MetricsFile


class _Evil:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def _tags(mark: Path) -> list[str]:
    call = f"!!python/object/apply:os.mkdir ['{mark}']"
    return [
        f"{call}",
        f"data: {{tables: {{rows: [{call}]}}}}",
        f"log: {{dir: !!python/name:os.mkdir }}\n# {mark}",
        f"log: {{dir: !!python/object/new:os.mkdir ['{mark}']}}",
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_configuration_executes_nothing(tmp_path: Path, mark: Path, case: int) -> None:
    text = _tags(mark)[case]
    (tmp_path / "evil.yaml").write_text(text + "\n")
    with pytest.raises(InputError) as error:
        parse_config(Config, "train", "", ["--config", str(tmp_path / "evil.yaml")])
    assert "\n" not in str(error.value)
    assert not mark.exists()
    if "apply" in text:  # the file would, if it were loaded otherwise
        yaml.unsafe_load(text)
        assert mark.exists()


@pytest.mark.parametrize("part", ["dense", "sparse", "labels"])
def test_arrays_execute_nothing(tmp_path: Path, mark: Path, part: str) -> None:
    for name, array in (("dense", np.zeros((20, 13), np.float32)), ("labels", np.zeros((20, 1), np.int32))):
        np.save(tmp_path / f"day_0_{name}.npy", array)
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((20, 26), np.int32))
    np.save(tmp_path / f"day_0_{part}.npy", np.array([[_Evil(mark)]] * 20), allow_pickle=True)
    with pytest.raises(InputError, match=rf"day_0_{part}\.npy"):
        Criteo(tmp_path, TablesConfig(rows=50), multi_hot=False)
    assert not mark.exists()
    np.load(tmp_path / f"day_0_{part}.npy", allow_pickle=True)
    assert mark.exists(), "the file would, if it were loaded otherwise"


def test_members_of_an_archive_execute_nothing(tmp_path: Path, mark: Path) -> None:
    np.save(tmp_path / "day_0_dense.npy", np.zeros((20, 13), np.float32))
    np.save(tmp_path / "day_0_labels.npy", np.zeros((20, 1), np.int32))
    members: dict[str, Any] = {f"{t}": np.zeros((20, 1), np.int32) for t in range(26)}
    members["3"] = np.array([[_Evil(mark)]] * 20)
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **members)
    with pytest.raises(InputError, match=r"day_0_sparse_multi_hot\.npz"):
        Criteo(tmp_path, TablesConfig(rows=50), multi_hot=True)
    evil = f"{{'descr': __import__('os').mkdir('{mark}'), 'fortran_order': False, 'shape': (20, 1)}}"
    for header in (evil, evil[:-20]):  # an expression in place of a literal, whole and cut
        with zipfile.ZipFile(tmp_path / "day_0_sparse_multi_hot.npz", "w") as archive:
            for t in range(26):
                size = (len(header) + 1).to_bytes(2, "little")
                archive.writestr(f"{t}.npy", b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n" + bytes(80))
        with pytest.raises(InputError, match=r"day_0_sparse_multi_hot\.npz"):
            Criteo(tmp_path, TablesConfig(rows=50), multi_hot=True)
        (tmp_path / "day_0_dense.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n" + bytes(80))
        np.save(tmp_path / "day_0_sparse.npy", np.zeros((20, 26), np.int32))
        with pytest.raises(InputError, match=r"day_0_dense\.npy: not the array"):
            Criteo(tmp_path, TablesConfig(rows=50), multi_hot=False)
    assert not mark.exists()


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """By the file's name, as any other that is not what it should be."""
    deep = "[" * 100_000
    for file in ("evil.yaml", "metrics.jsonl", "meta.json", LOCK_NAME):
        (tmp_path / file).write_text(f"{deep}\n")
    with pytest.raises(InputError, match=r"evil\.yaml is not YAML"):
        parse_config(Config, "train", "", ["--config", str(tmp_path / "evil.yaml")])
    with pytest.raises(InputError, match=r"has no meta\.json of this version's `dlrm-overlap prepare`"):
        Prepared(tmp_path, TablesConfig())
    MetricsFile(tmp_path / "metrics.jsonl", 1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with (tmp_path / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"is in use by \[{200}; wait"):
            check_free(tmp_path, "log.dir")
