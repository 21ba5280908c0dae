import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrm_overlap import cli
from dlrm_overlap.bench import all
from dlrm_overlap.bench.all import MEASUREMENTS
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train import ranks
from tests.conftest import PYTHON_PATH, is_alive, wait_until


def test_every_command_is_one_that_bench_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(ranks, "spawn", lambda argv, nproc: started.append(nproc) or 0)
    for name in MEASUREMENTS:
        assert cli.main(all.words_of(name, 2, tmp_path / "rows.csv")) == 0, name
    assert started == [1 if name in ("quickstart", "weak_1", "strong_1") else 2 for name in MEASUREMENTS]


@pytest.fixture
def bench_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `bench all` of three measurements, whose commands end by a code or (None) time out.

    It returns the exit code, the names that were started, and the number of commands that are left.
    """
    monkeypatch.setattr(all, "visible_gpus", lambda kind: 2)

    def run(code: int | None, *more: str) -> tuple[int, list[str], int]:
        def start(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if code is None:
                raise subprocess.TimeoutExpired(words, 0)
            if code in (0, 1, DISAGREEMENT):
                Path(words[words.index("--output") + 1]).touch()
            return subprocess.CompletedProcess(words, code)

        monkeypatch.setattr(subprocess, "run", start)
        names = [*MEASUREMENTS][1:4]
        ended = cli.main(["bench", "all", "--output", str(tmp_path / "all"), "--only", *names, *more])
        lines = capsys.readouterr().out.splitlines()
        started = [line.partition(":")[0] for line in lines if ": dlrm-overlap bench" in line]
        return ended, [name for name in started if name != "left"], started.count("left")

    return run


def test_a_call_goes_on_where_the_last_one_stopped(bench_all: Any, tmp_path: Path) -> None:
    first, second, third = [*MEASUREMENTS][1:4]
    assert bench_all(0, "--minutes", "1e-9") == (0, [], 3), "no time is left"
    (tmp_path / "all" / f"{second}.csv").touch()
    assert bench_all(7) == (1, [first, third], 2)
    assert bench_all(None) == (1, [first, third], 2), "cut off"
    assert bench_all(1) == (1, [first, third], 2), "ended by a traceback after its first rows"
    assert bench_all(DISAGREEMENT) == (0, [first, third], 0), "rows that disagree are rows"
    assert bench_all(0) == (0, [], 0)


def test_a_measurement_that_needs_more_ranks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all, "visible_gpus", lambda kind: 1)
    argv = ["--output", str(tmp_path), "--only", "gemm", "weak_2", "--minutes", "1e-9"]
    assert cli.main(["bench", "all", *argv]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: left out, since it needs 2 ranks, and there are 1" for name in ("weak_2", "gemm")
    ]


def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all, "visible_gpus", lambda kind: 1)
    (tmp_path / "file").touch()
    assert cli.main(["bench", "all", "--output", str(tmp_path / "file" / "rows")]) == 2
    assert capsys.readouterr().err.startswith("dlrm-overlap: --output: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_measurement_outlives_it(number: int, tmp_path: Path) -> None:
    program = f"""
from dlrm_overlap import cli
from dlrm_overlap.bench import all
all.visible_gpus = lambda kind: 2
cli.main(["bench", "all", "--only", "stage_small_batch", "--output", {str(tmp_path)!r}])
"""
    environ = os.environ | {"PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE) as process:
        wait_until(psutil.Process(process.pid).children, 60, "no measurement was started")
        (measurement,) = psutil.Process(process.pid).children()
        process.send_signal(number)
    try:
        wait_until(lambda: not is_alive(measurement.pid), 10, "the measurement runs on")
    finally:
        if is_alive(measurement.pid):
            measurement.kill()
