"""Clock and power from what nvidia-smi prints, of which a GPU may not know all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.bench.harness.clocks import sampled
from tests.conftest import wait_until


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1980, 650.5, Active", "1900, 640.5, Not Active"], (1940, 645.5, 0.5)),
        (["1980, [N/A], Not Active"] * 2, (1980, None, 0)),
        (["[N/A], [Unknown Error], [N/A]"] * 2, (None, None, None)),
        (["[N/A], [N/A], [N/A]", "[N/A], 640.5, Active"], (None, 640.5, 1)),
        ([], (None, None, None)),
    ],
)
def test_what_nvidia_smi_does_not_know_is_none(
    lines: list[str], expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"touch {tmp_path}/told\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    columns: dict[str, Any] = {}
    with sampled(torch.device("cuda"), columns):
        wait_until((tmp_path / "told").exists, 20, "nvidia-smi has not run")
    assert tuple(columns.values()) == expected


def test_without_nvidia_smi_there_is_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    columns: dict[str, Any] = {}
    with sampled(torch.device("cuda"), columns):
        pass
    assert set(columns.values()) == {None}
