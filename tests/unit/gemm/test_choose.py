"""Which way is taken: as measured, else as predicted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.choose import Choice, choose, key, predicted_us, read_tuned, tuned_file
from dlrm_overlap.dense.gemm.tuner import _keep, entry
from dlrm_overlap.dense.gemm.ways import Problem
from dlrm_overlap.launching.files import hold_folder

CPU = torch.device("cpu")
ABLE = [Choice("serial"), *(Choice("copies", parts) for parts in (0, 1, 2, 4, 8)), Choice("chunks", 2)]
ABLE += [Choice("pushes", parts) for parts in (1, 2, 4)]


def problem(operator: str, rows: int, columns: int, inner: int) -> Problem:
    return Problem(operator, rows, columns, inner, torch.bfloat16, True, "relu")


def test_what_was_measured_is_taken(tmp_path: Path) -> None:
    known, path = problem("all_gather", 4096, 1024, 512), tmp_path / "folder" / "tuned.json"
    assert read_tuned(path) == {}
    _keep(path, key(known), {"serial/1": 90.0, "copies/2": 70.0})
    _keep(path, "another", {"serial/1": 90.0})
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing else is left there"
    entries = read_tuned(path)
    assert choose(known, 4, ABLE, entries) == Choice("copies", 2)
    assert choose(known._replace(bias=False, activation="none"), 4, ABLE, entries) == Choice("copies", 2)
    assert choose(known, 4, ABLE[:1], entries) == Choice("serial"), "a way that cannot run the problem"
    kept = known._replace(keep=True)
    assert choose(kept, 4, ABLE, entries) == choose(kept, 4, ABLE, {}), "whose rows are kept is another problem"


def test_two_that_tune_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    with hold_folder(tmp_path, "the other one"), pytest.raises(InputError, match="is in use by process"):
        _keep(path, "mine", {"serial/1": 90.0})
    _keep(path, "mine", {"serial/1": 90.0})
    assert read_tuned(path) == {"mine": entry({"serial/1": 90.0})}


def test_who_is_killed_while_writing_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    _keep(path, "mine", {"serial/1": 90.0})
    before = path.read_bytes()

    def killed(_: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        _keep(path, "another", {"serial/1": 80.0})
    assert path.read_bytes() == before


def test_what_was_measured_with_other_versions_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200 (SXM)")
    gpu = torch.device("cuda")
    files = [tuned_file(gpu, 2), tuned_file(gpu, 4), tuned_file(CPU, 2)]
    assert files[0].name.startswith("gemm-NVIDIA-H200-SXM-2-ranks-dlrm_overlap-")
    assert f"torch-{torch.__version__}" in files[0].name
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu999")
    files.append(tuned_file(gpu, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    files.append(tuned_file(gpu, 2))
    assert len(set(files)) == len(files)


def test_a_home_that_is_not_there_or_not_ones_own_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    def refused(_: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", "/root/.cache")

    monkeypatch.setattr(Path, "home", none)
    assert tuned_file(CPU, 2).is_absolute()
    (tmp_path / "file").touch()
    assert read_tuned(tmp_path / "file" / "tuned.json") == {}
    monkeypatch.setattr("dlrm_overlap.dense.gemm.choose.read_file", refused)
    assert read_tuned(tmp_path / "tuned.json") == {}
    assert "Permission denied: '/root/.cache'; ways of products are predicted" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', '{"a": {"way": "copies"}}', '{"a": {"way": "copies", "parts": "2"}}']
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(InputError, match="remove it, and tune again"):
        read_tuned(path)


def _writable_by_all(folder: Path, elsewhere: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _of_another_user(folder: Path, elsewhere: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)


def _a_link(folder: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("plant", [_writable_by_all, _of_another_user, _a_link])
def test_a_folder_that_another_user_may_have_planted_is_not_used(
    plant: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without a home has the folder of choices in the temporary folder, which all users share."""
    if plant is _of_another_user and os.geteuid():
        pytest.skip("needs the right to give a folder away: root")
    monkeypatch.setattr("dlrm_overlap.dense.gemm.choose.Path.home", lambda: tmp_path)
    path, elsewhere = tuned_file(CPU, 2), tmp_path / "elsewhere"
    path.parent.parent.mkdir()
    plant(path.parent, elsewhere)
    for use in (lambda: read_tuned(path), lambda: _keep(path, "mine", {"serial/1": 90.0})):
        with pytest.raises(InputError, match="must be a folder, no link, that is this user's"):
            use()
    assert not list(path.parent.iterdir()), "no lock is written there either"


def test_the_folder_of_choices_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_overlap.dense.gemm.choose.Path.home", lambda: tmp_path)
    path = tuned_file(CPU, 2)
    _keep(path, "mine", {"serial/1": 90.0})
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert set(read_tuned(path)) == {"mine"}


def test_serial_stays_unless_another_way_gains() -> None:
    assert entry({"copies/4": 99.5, "serial/1": 100.0})["way"] == "serial"
    assert entry({"copies/4": 98.0, "serial/1": 100.0})["way"] == "copies"


@pytest.mark.parametrize("operator", ["all_gather", "reduce_scatter"])
def test_without_a_measurement(operator: str) -> None:
    small = choose(problem(operator, 64, 64, 64), 4, ABLE, {})
    assert small.way == "serial", "communication takes less than cutting"
    narrow = problem(operator, 32768, 1024, 4096) if operator == "all_gather" else problem(operator, 32768, 4096, 1024)
    assert choose(narrow, 4, ABLE, {}).parts > 1, "links bound: the last product is to be short"
    if operator == "all_gather":
        two = choose(problem(operator, 32768, 512, 3456), 2, ABLE, {})
        assert two == Choice("pushes", 4), "on two ranks much is published before most of it can be read"
    wide = problem(operator, 8192, 12288, 12288)
    kept = wide._replace(keep=operator == "all_gather")
    assert choose(kept, 4, ABLE, {}) == Choice("copies", 0), "the product bounds: as few as there can be"
    if operator == "all_gather":
        assert choose(wide, 4, ABLE, {}) == Choice("pushes", 1), "3143 us, copies 3195; nothing is copied out"
    for rows in (64, 256, 512):
        few = problem(operator, rows, 4096, 1024)
        assert choose(few, 2, ABLE, {}) == Choice("serial"), "on two H200s all others lose"


@pytest.mark.parametrize(
    ("operator", "shape", "way", "measured_us", "ranks"),
    [
        ("all_gather", (32768, 1024, 4096), Choice("serial"), 1016, 4),
        ("all_gather", (32768, 1024, 4096), Choice("copies", 1), 700, 4),
        ("all_gather kept", (32768, 1024, 4096), Choice("pushes", 2), 623, 4),
        ("all_gather kept", (8192, 1024, 4096), Choice("pushes", 2), 196, 4),
        ("all_gather", (4096, 12288, 12288), Choice("copies", 0), 1610, 4),
        ("all_gather", (1024, 12288, 12288), Choice("copies", 0), 442, 4),
        ("all_gather", (32768, 1024, 4096), Choice("copies", 4), 644, 4),
        ("all_gather", (32768, 512, 3456), Choice("copies", 4), 446, 2),  # read on when all rows are in the windows
        ("all_gather kept", (32768, 512, 3456), Choice("pushes", 4), 360, 2),
        ("all_gather", (32768, 512, 3456), Choice("pushes", 4), 352, 2),
        ("all_gather", (32768, 512, 1024), Choice("pushes", 4), 141, 2),
        ("all_gather", (8192, 2048, 4096), Choice("pushes", 1), 203, 2),
        ("all_gather", (32768, 2048, 4096), Choice("pushes", 1), 729, 2),
        ("reduce_scatter", (32768, 4096, 1024), Choice("copies", 1), 739, 4),
        ("reduce_scatter", (4096, 12288, 12288), Choice("copies", 0), 1646, 4),
        ("reduce_scatter", (32768, 1024, 256), Choice("serial"), 232, 4),
    ],
)
def test_predictions_are_near_what_h200s_took(
    operator: str, shape: tuple[int, int, int], way: Choice, measured_us: float, ranks: int
) -> None:
    operator, _, kept = operator.partition(" ")
    asked = problem(operator, *shape)._replace(keep=bool(kept))
    assert predicted_us(asked, ranks, way) == pytest.approx(measured_us, rel=0.1)
