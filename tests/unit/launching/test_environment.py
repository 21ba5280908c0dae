import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlrm_overlap.launching import environment


def test_environment_tells_versions_and_only_what_there_is(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(torchrec="1.8.0", triton=None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    names = ["NVIDIA A", "NVIDIA A", "NVIDIA B"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(environment, "commit", lambda: "0a1b2c3d4e5f-dirty")
    found = environment.environment()
    assert found["commit"] == "0a1b2c3d4e5f-dirty"
    assert found["torch"] == torch.__version__
    assert found["torchrec"] == "1.8.0"
    assert found["gpu"] == "2 x NVIDIA A, 1 x NVIDIA B"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert environment.environment()["gpu"] == "1 x NVIDIA A", "of one rank"
    for unused in ("many", "-1", "9" * 5000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", unused)
        assert environment.environment()["gpu"] == "2 x NVIDIA A, 1 x NVIDIA B"
    assert not {"triton", "cuda", "nccl"} & set(found)
    assert all(isinstance(value, str) and value for value in found.values())


def test_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "dlrm_overlap" / "launching" / "environment.py"))
    found = inspect.unwrap(environment.commit)  # tests/conftest.py lets a process ask once
    assert found() is None

    def git(*arguments: str) -> str:
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *user, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert found() == commit
    (tmp_path / "file").write_text("2")
    assert found() == f"{commit}-dirty"
