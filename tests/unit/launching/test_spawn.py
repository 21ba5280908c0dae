"""The launcher of `--nproc`: exit codes, output, signals, and that no process is left."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dlrm_overlap
from dlrm_overlap.launching import launcher
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.lifetime import ENDED_AT_ONCE, SAVED, UNSAVED
from dlrm_overlap.launching.spawn import import_path, spawn
from tests.conftest import is_alive, refuses, wait_until
from tests.unit.launching.launchers import HERE, bare, openmpi, srun, torchrun

ROOT = Path(dlrm_overlap.__file__).parents[1]


# Runs instead of `python -m dlrm_overlap`, without torch, so that it starts at once.
# Takes `train` and RANK:COMMAND arguments.
WORKER = """\
import json, os, signal, subprocess, sys, time
rank, asks = os.environ["RANK"], (signal.SIGTERM, signal.SIGUSR1)
if not any(":saves" in argument for argument in sys.argv):  # as commands do that do not save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asks)
assert sys.argv[1:4] == ["-m", "dlrm_overlap", "train"]
for argument in sys.argv[4:]:
    who, command, *rest = argument.split(":")
    if who not in (rank, "all"):
        continue
    if command == "say":
        os.write(1, f"out {rank}\\n".encode()), os.write(2, f"err {rank}\\n".encode())  # each line whole
    if command == "environ":
        print(json.dumps(dict(os.environ)), flush=True)
    if command == "refuse":
        os.write(2, b"dlrm-overlap: no\\n")
        os._exit(2)
    if command == "exit":
        sys.exit(int(rest[0]))
    if command == "kill":
        os.kill(os.getpid(), int(rest[0]) if rest else signal.SIGKILL)
    if command == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if command == "lifeline":
        from dlrm_overlap.launching import launcher, lifetime
        launcher.end_with_launcher()
    if command == "saves":
        for number in asks:
            wait_s, code = float(*rest[:1]), int(*rest[1:] or [75])
            signal.signal(number, lambda *_, wait_s=wait_s, code=code: [time.sleep(wait_s), sys.exit(code)])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asks)
    if command == "load":
        time.sleep(0.5)
    if command == "wait_for":
        while not os.path.exists(rest[0]):
            time.sleep(0.01)
    if command == "pids":  # its own, and those of a process that it starts, as a loader would
        parent, child = os.getpid(), os.fork()
        if child == 0:
            if "lifeline" in " ".join(sys.argv):  # as a loader is, and stopped
                lifetime.end_with_parent(parent)
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
            os._exit(0)
        with open(f"{rest[0]}.{rank}.part", "w") as file:
            file.write(f"{os.getpid()} {child}")
        os.rename(file.name, f"{rest[0]}.{rank}")
    if command == "hang":
        time.sleep(60)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker"
    path.write_text(f"#!{sys.executable}\n{WORKER}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return path


def wait_for_pids(prefix: Path, ranks: int) -> list[int]:
    paths = [Path(f"{prefix}.{rank}") for rank in range(ranks)]
    wait_until(lambda: all(path.exists() for path in paths), 20, "the workers did not start")
    return [int(pid) for path in paths for pid in path.read_text().split()]


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), 5, f"one of {pids} lives on")  # a killed one takes a moment


STARTING = ["all:load", "all:saves"]  # the signal comes before the ranks can save


@pytest.mark.usefixtures("worker")
class TestSpawn:
    def test_all_write_to_the_launchers_streams(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert spawn(["train", "all:say"], 2) == 0
        out, err = capfd.readouterr()
        assert (sorted(out.splitlines()), sorted(err.splitlines())) == (["out 0", "out 1"], ["err 0", "err 1"])

    def test_workers_detect_an_nproc_launch(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
        assert spawn(["train", "0:environ"], 2) == 0
        environ = json.loads(capfd.readouterr().out)
        found = launcher.detect(environ)
        assert found == World(0, 0, 2, 2, HERE, found.master_port, "nproc")
        assert environ["OMP_NUM_THREADS"] == "3"

    @pytest.mark.parametrize(("failure", "code"), [("exit:2", 2), ("exit:1", 1), ("kill", 128 + signal.SIGKILL)])
    def test_first_failure_ends_the_others(self, tmp_path: Path, failure: str, code: int) -> None:
        pids = tmp_path / "pids"
        # rank 1 fails once rank 0 has a child: neither may stay
        assert spawn(["train", f"0:pids:{pids}", "0:hang", f"1:wait_for:{pids}.0", f"1:{failure}"], 2) == code
        assert_gone(wait_for_pids(pids, 1))

    @pytest.mark.parametrize(
        ("killer", "told"),
        [(signal.SIGKILL, "SIGKILL, .* out-of-memory killer"), (signal.SIGBUS, "SIGBUS, .* is full")],
    )
    def test_a_killed_rank_is_named(self, capfd: pytest.CaptureFixture[str], killer: signal.Signals, told: str) -> None:
        assert spawn(["train", f"1:kill:{int(killer)}", "0:hang"], 2) == 128 + killer
        assert re.fullmatch(rf"dlrm-overlap: rank 1 \(pid \d+\) was killed by {told}.*\n", capfd.readouterr().err)

    def test_a_mistake_that_one_rank_finds_is_one_line(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert spawn(["train", "1:refuse", "0:hang"], 2) == 2
        assert capfd.readouterr().err == "dlrm-overlap: no\n"

    @pytest.mark.parametrize(
        ("environ", "where"),
        [
            (torchrun(0, 1), "torchrun"),
            (openmpi(0, 2), r".* \(OMPI_COMM_WORLD_SIZE is 2\)"),
            (srun(0, 2), r".* \(SLURM_STEP_NUM_TASKS is 2\)"),
            (bare(0, 2), r".* \(WORLD_SIZE is 2\)"),
        ],
    )
    def test_refuses_another_launcher(
        self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], where: str
    ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with refuses(f"--nproc inside {where}: "):
            spawn(["train"], 2)

    @pytest.mark.parametrize(
        ("number", "options", "later", "code"),
        [
            *((number, [], [], 128 + number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
            *((number, ["all:saves"], [], SAVED) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),
            *((number, ["all:saves:0:4"], [], UNSAVED) for number in (signal.SIGTERM, signal.SIGUSR1)),
            *((number, [], STARTING, SAVED) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)),
            (signal.SIGKILL, ["all:lifeline"], [], -signal.SIGKILL),
        ],
        ids=lambda value: getattr(value, "name", None) or str(value),
    )
    def test_signals_end_all_without_orphans_also_while_ranks_start(
        self, worker: Path, tmp_path: Path, number: signal.Signals, options: list[str], later: list[str], code: int
    ) -> None:
        pids = tmp_path / "pids"
        parent = launcher_of(worker, number, *options, f"all:pids:{pids}", *later, "all:hang")
        started = wait_for_pids(pids, 2)
        assert all(map(is_alive, started))
        parent.send_signal(number)
        assert parent.wait(20) == code
        assert_gone(started)

    @pytest.mark.parametrize(
        ("second", "code"), [(signal.SIGHUP, SAVED), (signal.SIGTERM, 128 + signal.SIGHUP)], ids=["SIGHUP", "SIGTERM"]
    )
    def test_a_terminal_that_sends_sighup_twice_lets_the_ranks_save(
        self, worker: Path, tmp_path: Path, second: signal.Signals, code: int
    ) -> None:
        pids = tmp_path / "pids"
        parent = launcher_of(worker, signal.SIGHUP, "all:saves:1", f"all:pids:{pids}", "all:hang")
        started = wait_for_pids(pids, 2)
        parent.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # else the second one may be merged with the first
        parent.send_signal(second)
        assert parent.wait(20) == code
        assert_gone(started)

    def test_a_rank_that_does_not_end_with_the_others_is_killed(self, worker: Path, tmp_path: Path) -> None:
        pids, soon = tmp_path / "pids", "import dlrm_overlap.launching.spawn as spawning; spawning._LEFT_S = 0.3; "
        options = ["0:saves", "1:stubborn", f"all:pids:{pids}", "all:hang"]
        parent = launcher_of(worker, signal.SIGTERM, *options, before=soon, stderr=subprocess.PIPE)
        started = wait_for_pids(pids, 2)
        parent.send_signal(signal.SIGTERM)
        assert "rank 1 (pid " in parent.communicate(timeout=20)[1].decode()
        assert parent.returncode == SAVED
        assert_gone(started)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    def test_a_launcher_that_is_asked_before_it_starts_a_rank_starts_none(
        self, worker: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
    ) -> None:
        blocked = "from dlrm_overlap.launching.lifetime import block_signals; block_signals(); "
        asked = f"{blocked}signal.raise_signal({number}); "
        assert launcher_of(worker, number, "all:say", before=asked).wait(20) == SAVED
        told = f"dlrm-overlap: {number.name}: no rank has started; run the same command again\n"
        assert capfd.readouterr() == ("", told)

    def test_ranks_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, started = subprocess.Popen, []

        def refuse(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
            if started:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            started.append(start(*args, **options))
            return started[0]

        monkeypatch.setattr("subprocess.Popen", refuse)
        with refuses(r"^--nproc: rank 1 of 3 cannot be started \(Resource temporarily"):
            spawn(["train", "0:hang"], 3)
        assert_gone([started[0].pid])

    def test_ctrl_c_asks_the_ranks_and_a_second_one_ends_them(self, worker: Path, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        options = ["all:stubborn", f"all:pids:{pids}", "all:hang"]
        parent = launcher_of(worker, signal.SIGINT, *options, stderr=subprocess.PIPE)
        wait_for_pids(pids, 2)
        parent.send_signal(signal.SIGINT)
        assert parent.stderr
        asked = "SIGINT: asking the ranks to end; a second one ends them at once"
        assert parent.stderr.readline().decode() == f"dlrm-overlap: {asked}\n"
        parent.send_signal(signal.SIGINT)
        assert parent.communicate(timeout=20)[1].decode() == f"dlrm-overlap: {ENDED_AT_ONCE}\n"
        assert parent.returncode == 128 + signal.SIGINT


def launcher_of(
    worker: Path, number: signal.Signals, *options: str, before: str = "", stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Return a process that runs `before` and then `spawn`, and does not ignore signal `number`."""
    handle = "" if number == signal.SIGKILL else f"signal.signal({int(number)}, signal.SIG_DFL); "
    program = (  # a background job of a script ignores some signals, and all it starts does
        f"import signal, sys; {handle}{before}"
        f"from dlrm_overlap.launching.spawn import spawn; sys.executable = {str(worker)!r}; "
        f"sys.exit(spawn(['train', *{options!r}], 2))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Python's own path: the fixture has replaced sys.executable
    return subprocess.Popen([worker.read_text().splitlines()[0][2:], "-c", program], env=environ, stderr=stderr)


def test_no_module_of_the_working_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert spawn(["--version"], 1) == 0


def test_a_checkout_that_is_not_installed_is_named_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert import_path() == {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{ROOT}:/theirs"}
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])
    assert import_path() == {"PYTHONSAFEPATH": "1"}
