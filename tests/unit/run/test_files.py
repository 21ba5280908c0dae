import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dlrm_overlap.launching import files
from dlrm_overlap.launching.files import (
    LOCK_NAME,
    discard_partial,
    hold_folder,
    make_folder,
    open_file,
    replacing,
    temporary_of,
)
from dlrm_overlap.observe.run_folder import hold_run_folder
from tests.conftest import NO_FILES, ROOT, refuses

# Holds the lock of argv[1], forks a child that lives on, and waits to be killed; prints the child's process id.
OWNER = """
import os, sys, time
from pathlib import Path
from dlrm_overlap.launching.files import hold_folder
with hold_folder(Path(sys.argv[1]), "log.dir"):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_a_dead_owner_blocks_nobody_though_its_children_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        with refuses(rf"log\.dir: .* is in use by process {owner.pid} on \S+, since 2"):
            hold_folder(tmp_path, "log.dir").__enter__()
        with monkeypatch.context() as patch:  # it ends, and removes the file, before its name is read
            patch.setattr(Path, "read_text", lambda *_, **__: (tmp_path / "gone").read_bytes())
            with refuses(r"is in use by another process; wait"):
                hold_folder(tmp_path, "log.dir").__enter__()
        owner.kill()
        owner.wait(timeout=10)
        assert (tmp_path / LOCK_NAME).exists()
        with hold_folder(tmp_path, "log.dir") as is_held:
            assert is_held
            assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with hold_folder(tmp_path, "log.dir") as is_held:
        assert not is_held
    assert "the file system has no locks" in caplog.text


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with replacing(file) as stream:
        stream.write(b"one")
        assert not file.exists()
    with pytest.raises(TypeError), replacing(file) as stream:
        stream.write("two")  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"one"}


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path, world_of_one: object) -> None:
    killed = os.fork()
    if not killed:
        with replacing(tmp_path / "summary.json"):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    mine = [tmp_path / ".notes.tmp", tmp_path / ".notes.0123456789abcdeg.tmp"]
    for file in mine:
        file.touch()
    temporary_of(tmp_path / "folder").mkdir()
    with hold_run_folder(tmp_path):
        assert not left.exists()
    assert all(file.exists() for file in mine)


def test_only_what_a_write_needs_must_be_removable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a delta's folder that a reader has open on NFS does not keep a run from starting."""
    (tmp_path / ".partial_delta_1").mkdir()
    monkeypatch.setattr(files, "discard", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    discard_partial(tmp_path)
    discard_partial(tmp_path, tmp_path / ".partial_delta_2")
    with pytest.raises(OSError, match="not empty"):
        discard_partial(tmp_path, tmp_path / ".partial_delta_1")


def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    for folder in ("runs", "runs/a"):
        with refuses(rf"log\.dir: {tmp_path}/{folder} .*\({tmp_path}/runs is a link to what is not there\); give"):
            make_folder(tmp_path / folder)
    (tmp_path / "file").touch()
    with refuses(r"cannot be created \(File exists\)"):
        make_folder(tmp_path / "file")


@pytest.mark.parametrize("kind", NO_FILES)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "it")
    with pytest.raises(OSError, match=f"it is {kind}, not a file"):
        open_file(tmp_path / "it")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_file(tmp_path / "link") as file:
        assert file.read() == b"content"
