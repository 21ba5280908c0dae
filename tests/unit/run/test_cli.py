import errno
import importlib.metadata
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import dlrm_overlap
from dlrm_overlap import cli
from dlrm_overlap.cli import main, run
from dlrm_overlap.config import InputError, PeerError
from dlrm_overlap.launching.lifetime import HOLD_BACK_S, SAVED
from dlrm_overlap.train.ranks import run_on_ranks
from tests.conftest import configuration, refuses


class Ended(BaseException):
    """Stands for the end of the process."""


def test_an_error_is_reported_and_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlrm_overlap.cli.main", Mock(side_effect=RuntimeError("CUDA error: an illegal access")))
    monkeypatch.setattr("os._exit", Mock(side_effect=Ended))
    with pytest.raises(Ended):
        run()
    os._exit.assert_called_once_with(1)  # type: ignore[attr-defined]
    assert "RuntimeError: CUDA error: an illegal access" in capsys.readouterr().err


def _python(script: str, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.parametrize(
    ("rank", "code", "stderr"),
    [("0", 2, "dlrm-overlap: --config: nowhere.yaml: No such file"), ("1", -signal.SIGTERM, "")],
)
def test_a_rank_that_holds_its_report_back_can_be_ended(rank: str, code: int, stderr: str) -> None:
    """By SIGTERM, as torchrun ends the others once rank 0 has reported; a training would save at it."""
    script = """
import os, signal, sys, time
from dlrm_overlap import cli
from dlrm_overlap.launching.lifetime import EndRequest
sleep = time.sleep
time.sleep = lambda seconds: (os.kill(os.getpid(), signal.SIGTERM), sleep(seconds))
EndRequest().listen()
sys.exit(cli.main(["train", "--config", "nowhere.yaml"]))
"""
    result = _python(script, env=os.environ | {"RANK": rank})
    assert (result.returncode, result.stderr[: len(stderr) or None]) == (code, stderr)


# Gets a signal while the command line is imported; then trains, instead of `run_on_ranks`, until it is asked to end.
LOADING = """
import os, signal, sys, time
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

class Signals(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dlrm_overlap.launching.parsing":
            try:
                os.kill(os.getpid(), int(sys.argv.pop(1)))
            except KeyboardInterrupt:
                pass  # as torch and matplotlib do

def train(*_, **__):
    from dlrm_overlap.launching.lifetime import EndRequest
    end, deadline = EndRequest(), time.monotonic() + 20
    end.listen()
    while not end.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    return 75 if end.asked else 0

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
sys.meta_path.insert(0, Signals())
names = ("Ranks", "check_data", "check_needs_no_checkpoint", "check_output", "check_start", "check_writable")
sys.modules["dlrm_overlap.train.ranks"] = SimpleNamespace(**dict.fromkeys(names), run_on_ranks=train)
from dlrm_overlap.__main__ import run
run()
"""


@pytest.mark.parametrize(
    ("number", "command", "code", "stderr"),
    [
        (signal.SIGTERM, "train", SAVED, ""),
        (signal.SIGUSR1, "train", SAVED, ""),
        (signal.SIGTERM, "compare", -signal.SIGTERM, ""),
        (signal.SIGUSR1, "--version", 0, ""),
        (signal.SIGINT, "train", 128 + signal.SIGINT, "dlrm-overlap: interrupted\n"),
    ],
)
def test_a_training_keeps_a_signal_that_arrives_while_it_is_loaded(
    number: int, command: str, code: int, stderr: str
) -> None:
    result = _python(LOADING, str(int(number)), command)
    assert (result.returncode, result.stderr) == (code, stderr)


def test_options_override_the_file(tmp_path: Path) -> None:
    text = "train: {steps: 5, lr: 0.5}\ndata: {tables: {rows: [5, 6], multi_hot: [1, 0..3]}}\n"
    (tmp_path / "config.yaml").write_text(text)
    config = configuration("--config", str(tmp_path / "config.yaml"), "--train.steps", "7", "--data.tables.max_rows=3")
    assert (config.train.steps, config.train.lr) == (7, 0.5)
    assert (config.data.tables.multi_hot, config.data.tables.max_rows) == ([1, "0..3"], 3)


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ([], 16),
        (["--train.batch_size", "8"], 8),
        (["--train.batch_size", "8", "--train.global_batch_size", "64"], 32),
        (["--train.global_batch_size", "null"], 512),
    ],
)
def test_the_batch_size_of_an_option_counts(tmp_path: Path, options: list[str], samples: int) -> None:
    (tmp_path / "config.yaml").write_text("{train: {global_batch_size: 32, steps: 1}, data: {tables: {rows: [5]}}}\n")
    config = configuration("--config", str(tmp_path / "config.yaml"), *options)
    assert config.train.samples_per_rank(2) == samples


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_configurations_are_valid(path: Path) -> None:
    config = configuration("--config", str(path))
    assert config.model.bottom_mlp[-1] == config.model.dim


def _help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_tells_what_every_key_means(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    text = _help(capsys, "train", "--help")
    page = Path("docs/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| `.*?` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 60
    for key, meaning in rows:
        assert f"--{key} " in text
        assert meaning.replace("\\|", "|") in text, key
    assert "--checkpoint PATH" in _help(capsys, "eval", "--help")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("compare", "that counts as agreement (default 0.0001)"),
        ("compare", "(default torchrec pgas fused)"),
        ("bench stage", "CSV file to append the rows to (default runs/bench/stage.csv)"),
        ("bench all", "gemm (default all)"),
        ("predict", "number of processes (default 1)"),
    ],
)
def test_help_tells_the_default_of_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    assert text in _help(capsys, *command.split(), "--help")


def test_the_version_is_the_declared_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dlrm-overlap {declared}\n"
    not_installed = Mock(side_effect=importlib.metadata.PackageNotFoundError("dlrm-overlap"))
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert dlrm_overlap.__version__ == declared


@pytest.mark.parametrize(
    ("gpus", "device", "nproc", "stderr"),
    [
        (0, "auto", 2, "2 processes on the CPU"),
        (1, "auto", 1, "1 process, one per GPU"),
        (3, "auto", 3, "3 processes, one per GPU"),
        (3, "cpu", 2, "2 processes on the CPU"),
    ],
)
def test_nproc_auto_is_a_process_per_gpu_or_two_on_the_cpu(
    gpus: int, device: str, nproc: int, stderr: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    spawn = Mock(return_value=0)
    monkeypatch.setattr("dlrm_overlap.train.ranks.spawn", spawn)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    options = ["--config", "configs/quickstart.yaml", "--train.device", device, "--log.dir", str(tmp_path)]
    assert main(["train", "--nproc", "auto", *options]) == 0
    spawn.assert_called_once_with(["train", *options], nproc)
    assert capsys.readouterr().err == f"--nproc auto: {stderr}\n"


@pytest.mark.parametrize(
    ("rank", "error", "held_back"),
    [
        (None, RuntimeError("of this process alone"), 0),
        (0, InputError("found by all"), 0),
        (1, InputError("found by all"), 1),
        (0, RuntimeError("a peer's end, perhaps"), 1),
        (1, RuntimeError("a peer's end, perhaps"), 2),
        (0, PeerError("rank 1 has failed"), 3),
    ],
)
def test_only_one_rank_reports_an_error(
    rank: int | None, error: Exception, held_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [0.0]
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("dlrm_overlap.launching.launcher.announced_rank", lambda: rank)

    fail = Mock(side_effect=error)
    with pytest.raises(type(error), match=str(error)):
        run_on_ranks(["train"], "", ["--config", "configs/quickstart.yaml"], lambda ranks: 0, check=fail)
    assert sum(waits) == held_back * HOLD_BACK_S


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda: torch.empty(1 << 55), r"memory: none left on this machine \(.*can't allocate memory: .*more machines"),
        (lambda: np.empty(1 << 55), r"memory: none left on this machine \(Unable to allocate .*; take a smaller train"),
        (
            Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\n" + 900 * "x")),
            r"memory: none left on the GPU \(CUDA out of memory\. Tried to .*max_rows.*embedding\.memory auto$",
        ),
        (
            Mock(side_effect=RuntimeError("can't start new thread")),
            r"limit of threads and processes: no more can be started \(can't start .*`ulimit -u`.* fewer ranks",
        ),
        (
            Mock(side_effect=BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))),
            r"no more can be started \(\[Errno 11\] Resource temporarily unavailable\)",
        ),
    ],
)
def test_that_memory_or_threads_ran_out_is_told_in_one_line(fail: Callable[[], Any], message: str) -> None:
    with refuses(message):
        run_on_ranks(
            ["train"], "", ["--config", "configs/quickstart.yaml"], lambda ranks: 0, check=lambda config, values: fail()
        )


def test_that_no_temporary_file_can_be_written_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/self", "/proc/1"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setitem(cli.COMMANDS, "doctor", lambda argv: len(tempfile.gettempdir()))
    assert main(["doctor"]) == 2
    found = "No usable temporary directory found in ['/proc/self', '/proc/1']"
    cure = "free disk space, or set TMPDIR to a folder that is yours"
    assert capsys.readouterr().err == f"dlrm-overlap: TMPDIR: {found}; {cure}\n"


def test_a_working_folder_that_is_gone_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["checkpoint", "show", "runs/a"]) == 2
    rule, cure = "the working folder has been removed or replaced", "change to one that exists (cd)"
    assert capsys.readouterr().err == f"dlrm-overlap: {rule}; {cure}\n"


def test_a_run_that_resumed_at_its_last_step_tells_no_speed() -> None:
    assert cli._speed_of({"samples_per_s": 52106.4, "step_ms_p50": 9.834}) == "52106 samples/s, 9.83 ms a step (median)"
    assert cli._speed_of({"samples_per_s": math.nan, "step_ms_p50": math.nan}) == "no step was timed"
