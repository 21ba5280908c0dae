import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dlrm_overlap
from dlrm_overlap.config import InputError
from dlrm_overlap.launching import launcher
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.spawn import spawn

ROOT = Path(dlrm_overlap.__file__).parents[1]


def bare(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **more}


def torchrun(rank: int, size: int, agents: int = 1, **more: str) -> dict[str, str]:
    local = size // agents
    place = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local), "GROUP_WORLD_SIZE": str(agents)}
    return bare(rank, size, **place, TORCHELASTIC_RUN_ID="none", **more)


def srun(rank: int, size: int, **more: str) -> dict[str, str]:
    """Variables as Slurm 22.05 sets them, one node unless `more` says otherwise."""
    names = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "2", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}
    places = {"SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return {**names, **places, "SLURM_STEP_NODELIST": "gpu01", **more}


def openmpi(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), **more}


def hydra(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


SECOND_NODE = {
    "SLURM_STEP_NODELIST": "gpu[03-04,9],login1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}
HERE = "127.0.0.1"
SLURM_PORT = 20000 + 5 * 16 + 2


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, World(0, 0, 1, 1, HERE, 0, "single")),
        ({"MASTER_ADDR": "old", "MASTER_PORT": "1", "LOCAL_RANK": "3"}, World(0, 0, 1, 1, HERE, 0, "single")),
        ({"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World(0, 0, 1, 1, HERE, 0, "single")),
        (bare(1, 2), World(1, 1, 2, 2, HERE, 29500, "environment")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 0, 1, 1, HERE, 0, "environment")),
        (
            bare(3, 4, MASTER_ADDR="h0", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
            World(3, 1, 4, 2, "h0", 29500, "environment"),
        ),
        (bare(1, 2, DLRM_OVERLAP_NPROC="2"), World(1, 1, 2, 2, HERE, 29500, "nproc")),
        (bare(0, 2, DLRM_OVERLAP_NPROC="2", **srun(0, 1)), World(0, 0, 2, 2, HERE, 29500, "nproc")),
        (torchrun(1, 2), World(1, 1, 2, 2, HERE, 29500, "torchrun")),
        (torchrun(5, 8, 2, MASTER_ADDR="h0"), World(5, 1, 8, 4, "h0", 29500, "torchrun")),
        ({**srun(1, 2), **torchrun(5, 8, 2)}, World(5, 1, 8, 4, HERE, 29500, "torchrun")),
        ({**openmpi(1, 2), **torchrun(5, 8, 2)}, World(5, 1, 8, 4, HERE, 29500, "torchrun")),
        (srun(1, 2), World(1, 1, 2, 2, HERE, SLURM_PORT, "slurm")),
        (srun(9, 10, **SECOND_NODE), World(9, 1, 10, 2, "gpu03", SLURM_PORT, "slurm")),
        (srun(1, 2, MASTER_ADDR="ib0", MASTER_PORT="77"), World(1, 1, 2, 2, "ib0", 77, "slurm")),
        (srun(1, 2, RANK="1", WORLD_SIZE="2"), World(1, 1, 2, 2, HERE, SLURM_PORT, "slurm")),
        (srun(1, 2, **hydra(1, 2)), World(1, 1, 2, 2, HERE, SLURM_PORT, "slurm")),
        (srun(0, 1, **bare(1, 2)), World(1, 1, 2, 2, HERE, 29500, "environment")),
    ],
)
def test_detect(environ: dict[str, str], expected: World) -> None:
    assert launcher.detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is '', not a number"),
        ({"WORLD_SIZE": "2"}, "RANK is '', not a number"),
        (bare(2, 2), "RANK 2 must lie in 0 .. WORLD_SIZE - 1, and WORLD_SIZE is 2"),
        (bare(-1, 2), "RANK -1 must lie"),
        (bare(0, 2, RANK="zero"), "RANK is 'zero'"),
        (bare(0, 2, MASTER_PORT="70000"), "cannot meet at 127.0.0.1:70000"),
        (bare(0, 2, MASTER_ADDR="h0"), "LOCAL_RANK is ''"),
        (bare(0, 2, MASTER_ADDR="h0", LOCAL_RANK="0"), "LOCAL_WORLD_SIZE is ''"),
        (bare(0, 2, LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), "LOCAL_RANK 2 must lie"),
        (bare(0, 2, LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE 4 exceeds WORLD_SIZE 2"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "GROUP_WORLD_SIZE is ''"),
        ({**srun(1, 2), **torchrun(0, 4)}, "torchrun of 1 agents inside srun of 2 tasks"),
        ({**openmpi(1, 2), **torchrun(0, 4)}, "torchrun of 1 agents inside mpirun of 2 tasks"),
        (srun(1, 2, WORLD_SIZE="4"), "WORLD_SIZE is 4, but srun says 2"),
        (srun(1, 2, RANK="0", WORLD_SIZE="2"), "RANK is 0, but srun says 1"),
        (srun(1, 2, SLURM_STEP_NUM_TASKS=""), "SLURM_STEP_NUM_TASKS is ''"),
        (openmpi(1, 2, WORLD_SIZE="4", MASTER_ADDR="h0", MASTER_PORT="1"), "WORLD_SIZE is 4, but mpirun says 2"),
        (hydra(1, 2, RANK="0", WORLD_SIZE="1"), "RANK is 0, but mpirun says 1"),
    ],
)
def test_contradictions_stop_the_run_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        launcher.detect(environ)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class FakeWorld:
    """COMM_WORLD of a rank on a host that holds `local` ranks; rank 0's broadcast is what it says itself."""

    def __init__(self, rank: int, size: int, local: int) -> None:
        self.rank, self.size, self.local = rank, size, local

    def Split_type(self, kind: int) -> SimpleNamespace:  # noqa: N802 - MPI's name
        return SimpleNamespace(rank=self.rank % self.local, size=self.local)

    def bcast(self, value: tuple[str, int]) -> tuple[str, int]:
        return value if self.rank == 0 else ("node0", 4321)


def install_mpi4py(monkeypatch: pytest.MonkeyPatch, world: FakeWorld) -> SimpleNamespace:
    mpi = SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=1, get_vendor=lambda: ("Open MPI", (5, 0, 0)))
    package = ModuleType("mpi4py")
    vars(package).update(rc=SimpleNamespace(finalize=None), MPI=mpi)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi


@pytest.mark.parametrize("variables", [openmpi, hydra])
def test_mpi_ranks_come_from_comm_world(
    monkeypatch: pytest.MonkeyPatch, variables: Callable[..., dict[str, str]]
) -> None:
    install_mpi4py(monkeypatch, FakeWorld(3, 4, local=2))
    # Open MPI's daemons are tasks of a Slurm step of their own, which says nothing about the ranks
    environ = variables(3, 4, **srun(0, 1))
    assert launcher.detect(environ) == World(3, 1, 4, 2, "node0", 4321, "mpi")
    assert sys.modules["mpi4py"].rc.finalize is False


def test_mpi_rank_0_offers_the_loopback_on_one_host_and_a_given_address_always(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mpi4py(monkeypatch, FakeWorld(0, 2, local=2))
    found = launcher.detect(openmpi(0, 2))
    assert found.master_addr == HERE
    assert 1024 <= found.master_port < 65536
    assert launcher.detect(openmpi(0, 2, MASTER_ADDR="ib0", MASTER_PORT="77")).describe().endswith("ib0:77")


def test_mpi_of_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mpi4py(monkeypatch, FakeWorld(0, 1, local=1))
    with pytest.raises(InputError, match="mpirun started 2 ranks, but mpi4py sees 1"):
        launcher.detect(hydra(1, 2))


def test_mpi_without_mpi4py_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InputError, match="pip install mpi4py"):
        launcher.detect(openmpi(0, 2))


def test_describe() -> None:
    there = "launch: torchrun, rank 0 of 2, local rank 0 of 2, rendezvous 127.0.0.1:29500"
    assert launcher.detect(torchrun(0, 2)).describe() == there
    assert launcher.detect({}).describe() == "launch: single, rank 0 of 1, local rank 0 of 1"


@pytest.mark.parametrize(
    ("kind", "gpus", "local_rank", "source", "expected"),
    [
        ("cpu", 4, 1, "nproc", "cpu"),
        ("auto", 0, 1, "nproc", "cpu"),
        ("auto", 4, 3, "nproc", "cuda:3"),
        ("cuda", 2, 0, "torchrun", "cuda:0"),
        ("cuda", 1, 3, "slurm", "cuda:0"),
    ],
)
def test_find_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, gpus: int, local_rank: int, source: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert launcher.find_device(kind, local_rank, source) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "gpus", "source"), [("cuda", 0, "single"), ("auto", 1, "nproc"), ("cuda", 2, "slurm")]
)
def test_find_device_refuses_to_share_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str, gpus: int, source: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InputError, match=f"local rank 2 has no GPU of its own, {gpus} visible"):
        launcher.find_device(kind, 2, source)
    if gpus:  # rank 0, whose message is the one shown, finds it too
        with pytest.raises(InputError, match=f"local rank 2 has no GPU of its own, {gpus} visible"):
            launcher.find_device(kind, 0, source, local_ranks=3)


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = World(0, 0, 2, 2, HERE, other.getsockname()[1], "environment")
        with pytest.raises(InputError) as error:
            launcher.init_process_group(taken, torch.device("cpu"), timeout_s=1)
    assert re.fullmatch(
        r"environment launch: port \d+ of 127.0.0.1 is in use by another program; set MASTER_PORT to a free one .*",
        str(error.value),
    )


def test_a_rendezvous_that_nobody_comes_to_is_told_in_one_line() -> None:
    alone = World(0, 0, 2, 2, HERE, launcher.free_port(), "environment")
    with pytest.raises(InputError, match=r"no rendezvous of 2 ranks at .* within 1 s .*start all ranks") as error:
        launcher.init_process_group(alone, torch.device("cpu"), timeout_s=1)
    assert "\n" not in str(error.value)


def test_a_host_without_an_address_is_told_in_one_line() -> None:
    nowhere = World(0, 0, 2, 1, "no.such.host.invalid", 29500, "slurm")
    with pytest.raises(InputError, match=r"slurm launch: no\.such\.host\.invalid, the host of rank 0, has no address"):
        launcher.init_process_group(nowhere, torch.device("cpu"), timeout_s=0.01)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        (bare(1, 2), 1),
        (openmpi(3, 4), 3),
        (hydra(0, 4), 0),
        (srun(2, 4), 2),
        ({"SLURM_PROCID": "0"}, None),
        ({"RANK": "zero"}, None),
    ],
)
def test_announced_rank(environ: dict[str, str], rank: int | None) -> None:
    assert launcher.announced_rank(environ) == rank


def test_shutdown_leaves_mpi_alone_on_the_way_out_of_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    mpi = install_mpi4py(monkeypatch, FakeWorld(0, 1, local=1))
    mpi.Is_finalized, mpi.Finalize = lambda: False, lambda: calls.append("finalize")
    with contextlib.suppress(RuntimeError):
        try:
            raise RuntimeError
        finally:
            launcher.shutdown()
    assert calls == []
    launcher.shutdown()
    assert calls == ["finalize"]


# What `spawn` starts, in place of `python -m dlrm_overlap`: no torch, so that it starts at once.
# Takes `train` and RANK:COMMAND arguments.
WORKER = """\
import json, os, signal, subprocess, sys, time
rank = os.environ["RANK"]
assert sys.argv[1:4] == ["-m", "dlrm_overlap", "train"]
for argument in sys.argv[4:]:
    who, command, *rest = argument.split(":")
    if who not in (rank, "all"):
        continue
    if command == "say":
        print("out", rank), os.write(2, f"err {rank}\\n".encode())  # a line at a time: print would write it in pieces
    if command == "environ":
        print(json.dumps(dict(os.environ)), flush=True)
    if command == "exit":
        sys.exit(int(rest[0]))
    if command == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if command == "wait_for":
        while not os.path.exists(rest[0]):
            time.sleep(0.01)
    if command == "pids":  # its own, and that of a process it started, as a loader would be
        child = subprocess.Popen(["sleep", "60"])
        with open(f"{rest[0]}.{rank}.part", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
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
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return path


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_pids(prefix: Path, ranks: int) -> list[int]:
    paths = [Path(f"{prefix}.{rank}") for rank in range(ranks)]
    deadline = time.monotonic() + 20
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.01)
    return [int(pid) for path in paths for pid in path.read_text().split()]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5  # a killed process takes a moment to go
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.usefixtures("worker")
class TestSpawn:
    def test_all_well(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert spawn(["train", "all:say"], 2) == 0
        out, err = capfd.readouterr()
        assert out == "out 0\n"
        assert sorted(err.splitlines()) == ["err 0", "err 1"]

    def test_workers_detect_an_nproc_launch(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
        assert spawn(["train", "0:environ"], 2) == 0
        environ = json.loads(capfd.readouterr().out)
        found = launcher.detect(environ)
        assert found == World(0, 0, 2, 2, HERE, found.master_port, "nproc")
        assert environ["OMP_NUM_THREADS"] == "3"

    def test_threads_set_by_the_user_stay(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        spawn(["train", "0:environ"], 2)
        assert json.loads(capfd.readouterr().out)["OMP_NUM_THREADS"] == "7"

    @pytest.mark.parametrize(("failure", "code"), [("exit:2", 2), ("exit:1", 1), ("kill", 128 + signal.SIGKILL)])
    def test_first_failure_ends_the_others(self, tmp_path: Path, failure: str, code: int) -> None:
        pids = tmp_path / "pids"
        # rank 1 fails once rank 0 has a child: neither may stay
        assert spawn(["train", f"0:pids:{pids}", "0:hang", f"1:wait_for:{pids}.0", f"1:{failure}"], 2) == code
        assert_gone(wait_for_pids(pids, 1))

    def test_a_rank_that_ignores_sigterm_is_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dlrm_overlap.launching.spawn._GRACE_S", 0.2)
        pids = tmp_path / "pids"
        assert spawn(["train", "0:stubborn", f"0:pids:{pids}", "0:hang", f"1:wait_for:{pids}.0", "1:exit:3"], 2) == 3
        assert_gone(wait_for_pids(pids, 1))

    def test_signal_handlers_are_put_back(self) -> None:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        assert spawn(["train"], 1) == 0
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    @pytest.mark.parametrize(
        ("environ", "where"),
        [
            ({"DLRM_OVERLAP_NPROC": "2"}, "dlrm-overlap --nproc"),
            (torchrun(0, 1), "torchrun"),
            (openmpi(0, 2), "mpirun"),
            (srun(0, 2), "srun"),
            (bare(0, 2), "WORLD_SIZE 2"),
        ],
    )
    def test_refuses_another_launcher(
        self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], where: str
    ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"--nproc inside {where}: "):
            spawn(["train"], 2)

    def test_runs_in_a_step_of_one_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in srun(0, 1).items():
            monkeypatch.setenv(name, value)
        assert spawn(["train"], 2) == 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_end_all_without_orphans(self, worker: Path, tmp_path: Path, number: signal.Signals) -> None:
        pids = tmp_path / "pids"
        program = (  # a background job of a script ignores some signals, and all it starts does
            f"import signal, sys; signal.signal({int(number)}, signal.SIG_DFL); "
            f"from dlrm_overlap.launching.spawn import spawn; sys.executable = {str(worker)!r}; "
            f"sys.exit(spawn(['train', 'all:pids:{pids}', 'all:hang'], 2))"
        )
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        # Python's own path: the fixture has replaced sys.executable
        parent = subprocess.Popen([worker.read_text().splitlines()[0][2:], "-c", program], env=environ)
        started = wait_for_pids(pids, 2)
        assert all(map(is_alive, started))
        parent.send_signal(number)
        assert parent.wait(20) == 128 + number
        assert_gone(started)
