"""The command `checkpoint`: it shows and verifies. `test_evaluation.py` exports."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_overlap.checkpoint import storage
from dlrm_overlap.checkpoint.extents import Extent
from dlrm_overlap.cli import main
from tests.conftest import file_limit
from tests.unit.storage.test_storage import write_new, write_table

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_shows_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path, [0, 4])
    assert main(["checkpoint", "show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"step: 3", "rows: [5]", f"file .metadata: {(path / '.metadata').stat().st_size} bytes"} < set(lines)


def test_says_whether_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path, [0, 4])
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: whole\n"
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-900])
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"dlrm-overlap: {file} ")
    for text in ("{}", "[]", "null", "{", json.dumps({"format": 3, "colour": 1})):
        (path / "checkpoint.json").write_text(text)
        assert main(["checkpoint", "verify", str(path)]) == 1
        assert "checkpoint.json is damaged" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2


def test_one_that_is_interrupted_finds_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(tensor: torch.Tensor) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "is_finite", interrupt)
    assert main(["checkpoint", "verify", str(write_table(tmp_path, [0]))]) == 130
    assert capsys.readouterr().err == "dlrm-overlap: interrupted\n"


@pytest.mark.parametrize("rows", [1, 1 << 14])  # torch.save raises an error of its own for the larger one
def test_an_export_that_finds_no_room_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int
) -> None:
    path = write_new(tmp_path, [Extent(("model", "t"), (rows,), (0,), torch.zeros(rows))])
    before = sorted(tmp_path.iterdir())
    with file_limit(1000):
        assert main(["checkpoint", "export", str(path), str(tmp_path / "x.pt")]) == 2
    assert capsys.readouterr().err.endswith("x.pt cannot be written (File too large); name another file\n")
    assert sorted(tmp_path.iterdir()) == before


def test_an_export_that_is_asked_to_end_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.save gets the exception of the signal from the file, and raises an error of its own."""
    path, save = write_table(tmp_path, [0]), torch.save
    before = sorted(tmp_path.iterdir())

    class Ending:
        is_asked = False

        def write(self, data: bytes) -> int:
            if not self.is_asked:
                self.is_asked = True
                os.kill(os.getpid(), signal.SIGTERM)
            return len(data)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(torch, "save", lambda content, _: save(content, Ending()))  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(path), str(tmp_path / "x.pt")])
    assert ended.value.code == 143
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("checkpoint show {path}", "{path}/checkpoint.json cannot be read (Permission denied)"),
        ("checkpoint verify {path}", "{path}/checkpoint.json cannot be read (Permission denied)"),
        ("predict x.csv --checkpoint {path} --output y.csv", "{path}/checkpoint.json cannot be read (Permission"),
        ("delta apply {other} {path} --output x", "{path}/manifest.json cannot be read (Permission denied)"),
        ("prepare table x.csv y --like {path}", "{path}/meta.json: Permission denied; correct its permissions"),
        ("checkpoint export {other} {path}/x.pt", "{path}/x.pt: Permission denied; correct its permissions"),
    ],
)
def test_what_the_user_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    path, other, stat = write_table(tmp_path, [0]), write_table(tmp_path / "other", [0]), os.stat

    def refuse(file: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(file).startswith(f"{path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return stat(file, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert main(command.format(path=path, other=other).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dlrm-overlap: {reason.format(path=path)}")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("export {path}", "OUT is for export"),
        ("show {path} x.pt", "OUT is for export"),
        ("export {path} {path}/nowhere/x.pt", "cannot be written"),
        ("export {path} {path}/checkpoint.json", "checkpoint.json exists"),
        ("show {path}/..", "has no checkpoint.json; give a folder"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, reason: str) -> None:
    path = write_table(tmp_path, [0])
    assert main(["checkpoint", *options.format(path=path).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
