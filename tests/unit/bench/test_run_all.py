"""`bench all` runs what is left, in order, and says what it could not run."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
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


class _Started:
    """A command that ends at once with a code, or not before it is asked to."""

    code: int | None = 0

    def __init__(self, words: list[str], **_: Any) -> None:
        self.words = words
        if self.code in (0, 1):
            Path(words[words.index("--output") + 1]).write_text("kind,contender,commit\nother,a,1234\n")

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            type(self).code = 143  # it heeds `terminate`
            raise subprocess.TimeoutExpired(self.words, timeout or 0)
        return self.code

    def terminate(self) -> None:
        pass


@pytest.fixture
def bench_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `bench all` of three measurements and returns the names that it has started."""
    fake = SimpleNamespace(Popen=_Started, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run_all, "subprocess", fake)
    for module in (run_all, request):
        monkeypatch.setattr(module, "commit", lambda: "1234")
    monkeypatch.setattr(run_all, "visible_gpus", lambda kind: 2)
    monkeypatch.setattr("dlrm_overlap.bench.report.plots.write_plots", lambda *folders: [])

    def run(code: int | None, *options: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(_Started, "code", code)
        names = [each.name for each in MEASUREMENTS[1:4]]
        argv = ["bench", "all", "--output", str(tmp_path / "all"), "--only", *names, *options]
        code = cli.main(argv)
        lines = capsys.readouterr().out.splitlines()
        return code, [line.partition(":")[0] for line in lines if ": dlrm-overlap bench" in line]

    return run


def test_a_call_goes_on_where_the_last_one_stopped(bench_all: Any, tmp_path: Path) -> None:
    first, second, third = (each.name for each in MEASUREMENTS[1:4])
    assert bench_all(0, "--minutes", "1") == (0, []), "nothing would end in a minute"
    assert (tmp_path / "all" / "pending.md").read_text().count("| `dlrm-overlap bench stage") == 3
    (tmp_path / "all" / f"{second}.done").touch()
    assert bench_all(7) == (1, [first, third]), "of those that failed each is tried once a call"
    (tmp_path / "all" / f"{third}.tried").unlink()
    assert bench_all(1) == (0, [third, first]), "one that failed comes last, and rows that disagree are rows"
    assert bench_all(0) == (0, [])
    assert not (tmp_path / "all" / "pending.md").read_text().count("dlrm-overlap")


def test_a_measurement_that_is_cut_off_is_tried_again(bench_all: Any, tmp_path: Path) -> None:
    first = MEASUREMENTS[1].name
    code, names = bench_all(None)
    assert (code, names[0]) == (1, first)
    assert "cut off after" in (tmp_path / "all" / f"{first}.tried").read_text()


def test_rows_of_two_commits_do_not_meet(bench_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_all(0)[0] == 0
    monkeypatch.setattr(run_all, "commit", lambda: "5678")
    assert bench_all(0) == (cli.USER_ERROR, [])
    monkeypatch.setattr(request, "commit", lambda: "1234-dirty")
    monkeypatch.setattr(run_all, "commit", lambda: "1234")
    assert bench_all(0) == (cli.USER_ERROR, []), "files that differ from the commit"
    assert bench_all(0, "--uncommitted", "true") == (0, [])
