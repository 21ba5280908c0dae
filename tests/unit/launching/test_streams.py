"""Standard streams that are closed, on a full disk, or without a reader: no command fails because of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHON_PATH, ROOT, read_metrics

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
BROKEN = [*CLOSED, ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "| true"]


def _shell(redirected: str, *argv: str, timeout_s: float = 15, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with `argv`, its streams redirected as the shell's words `redirected` say."""
    command = f'set -o pipefail; "$0" "$@" {redirected}'
    environ = os.environ | {"PYTHONPATH": PYTHON_PATH} | variables
    shell = ["bash", "-c", command, sys.executable, *argv]
    return subprocess.run(shell, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize("closed", CLOSED)
def test_no_file_takes_the_place_of_a_stream_that_is_closed(closed: str) -> None:
    program = """
import os, subprocess, sys
from dlrm_overlap.launching.streams import open_streams
open_streams()
assert os.open("/", os.O_RDONLY) > 2
print("told", flush=True), print("told", file=sys.stderr)
subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"], check=True)
"""
    done = _shell(closed, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "told\n")


HELP = [pytest.param("train --help", each, marks=[pytest.mark.slow] * (each in CLOSED)) for each in BROKEN]


@pytest.mark.parametrize(("command", "broken"), [*(("--version", each) for each in BROKEN), *HELP])
def test_a_command_ends_well_though_nobody_gets_its_output(command: str, broken: str) -> None:
    done = _shell(broken, "-m", "dlrm_overlap", *command.split())
    assert done.returncode == 0
    told = "dlrm-overlap: part of this command's output is lost (No space left on device)\n"
    assert done.stderr == (told if broken == ">/dev/full" else "")


@pytest.mark.parametrize("broken", ["2>&-", "2>/dev/full"])
def test_a_mistake_keeps_its_exit_code_though_nobody_reads_of_it(broken: str) -> None:
    assert _shell(broken, "-m", "dlrm_overlap", "trian").returncode == 2


def test_a_pipe_that_is_full_and_does_not_block_is_waited_for() -> None:
    program = """
import os, sys
from dlrm_overlap.launching.streams import open_streams
os.set_blocking(1, False)
open_streams()
print("x" * 1_000_000)
"""
    done = _shell("| { sleep 0.3; wc -c; }", "-c", program)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1000001", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_written_at_once(unbuffered: str) -> None:
    program = """
import os, sys
from dlrm_overlap.launching.streams import open_streams
open_streams()
print("first", file=sys.stderr)
os.write(2, b"second\\n")
"""
    assert _shell("", "-c", program, PYTHONUNBUFFERED=unbuffered).stderr == "first\nsecond\n"


def test_a_name_that_the_encoding_lacks_is_shown_in_escapes() -> None:
    program = """
from dlrm_overlap.launching.streams import open_streams
open_streams()
print("runs/\\u2603")
"""
    done = _shell("", "-c", program, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs/\\u2603\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "broken"), [(1, ">/dev/full 2>&1"), (2, "<&- >&- 2>&-")])
def test_a_training_ends_well_though_nobody_gets_its_output(tmp_path: Path, nproc: int, broken: str) -> None:
    argv = ["-m", "dlrm_overlap", "train", "--config", "quickstart", "--train.device", "cpu", "--train.steps", "20"]
    argv += ["--log.every", "1", "--data.eval_samples", "1024", "--log.dir", str(tmp_path), "--log.name", "run"]
    done = _shell(broken, *argv, *["--nproc", str(nproc)] * (nproc > 1), timeout_s=120)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert list(read_metrics(run, "train/loss")) == list(range(1, 21))  # every line is JSON
    assert (run / "summary.json").exists()
    assert (run / "checkpoints" / "step_20").is_dir()
