"""`bench all` runs what is left, in order, and says what it could not run."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap import cli
from dlrm_overlap.bench import request, run_all
from dlrm_overlap.bench.run_all import MEASUREMENTS
from dlrm_overlap.train import ranks


@pytest.mark.parametrize("rehearsed", [False, True])
def test_every_command_is_one_that_bench_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsed: bool
) -> None:
    started: list[int] = []
    monkeypatch.setattr(ranks, "spawn", lambda argv, nproc: started.append(nproc) or 0)
    for each in MEASUREMENTS:
        assert cli.main(each.command(2, tmp_path / "rows.csv", rehearsed)) == 0, each.name
    assert started == [1 if each.alone else 2 for each in MEASUREMENTS]


@pytest.fixture
def bench_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `bench all` of three measurements, whose commands end by a code, or are cut off.

    It returns its exit code, the names that it has started, and how many commands are left.
    """
    for module in (run_all, request):
        monkeypatch.setattr(module, "commit", lambda: "1234")
    monkeypatch.setattr(run_all, "visible_gpus", lambda kind: 2)

    def run(code: int | None, *options: str) -> tuple[int, list[str], int]:
        def start(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if code is None:
                raise subprocess.TimeoutExpired(words, 0)
            if code in (0, 1):
                Path(words[words.index("--output") + 1]).write_text("kind,contender,commit\nother,a,1234\n")
            return subprocess.CompletedProcess(words, code)

        monkeypatch.setattr(subprocess, "run", start)
        names = [each.name for each in MEASUREMENTS[1:4]]
        ended = cli.main(["bench", "all", "--output", str(tmp_path / "all"), "--only", *names, *options])
        lines = capsys.readouterr().out.splitlines()
        started = [line.partition(":")[0] for line in lines if ": dlrm-overlap bench" in line]
        return ended, [name for name in started if name != "left"], started.count("left")

    return run


def test_a_call_goes_on_where_the_last_one_stopped(bench_all: Any, tmp_path: Path) -> None:
    first, second, third = (each.name for each in MEASUREMENTS[1:4])
    assert bench_all(0, "--minutes", "1") == (0, [], 3), "nothing would end in a minute"
    (tmp_path / "all" / f"{second}.csv").write_text("kind,contender,commit\nother,a,1234\n")
    assert bench_all(7) == (1, [first, third], 2)
    assert bench_all(None) == (1, [first, third], 2), "cut off"
    assert bench_all(1) == (0, [first, third], 0), "rows that disagree are rows"
    assert bench_all(0) == (0, [], 0)


def test_rows_of_two_commits_do_not_meet(bench_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_all(0)[0] == 0
    monkeypatch.setattr(run_all, "commit", lambda: "5678")
    assert bench_all(0) == (cli.USER_ERROR, [], 0)
    monkeypatch.setattr(request, "commit", lambda: "1234-dirty")
    monkeypatch.setattr(run_all, "commit", lambda: "1234")
    assert bench_all(0) == (cli.USER_ERROR, [], 0), "files that differ from the commit"
    assert bench_all(0, "--uncommitted", "true")[0] == 0
