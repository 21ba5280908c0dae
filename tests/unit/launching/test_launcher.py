"""Who started this process: every launcher's variables, what contradicts them, and MPI."""

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from dlrm_overlap.launching import launcher
from dlrm_overlap.launching.launcher import World
from tests.conftest import refuses
from tests.unit.launching.launchers import HERE, FakeWorld, bare, hydra, install_mpi4py, openmpi, srun, torchrun

SECOND_NODE = {
    "SLURM_STEP_NODELIST": "gpu[03-04,9],login1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}
SLURM_PORT = 20000 + 5 * 16 + 2


def second(**changes: str) -> dict[str, str]:
    return srun(9, 10, **SECOND_NODE | changes)


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
        (bare(1, 2, MASTER_ADDR="[::1]"), World(1, 1, 2, 2, "::1", 29500, "environment")),
        (bare(1, 2, MASTER_ADDR="::1"), World(1, 1, 2, 2, "::1", 29500, "environment")),
        (bare(1, 2, MASTER_ADDR="127.0.1.1"), World(1, 1, 2, 2, "127.0.1.1", 29500, "environment")),
        (torchrun(1, 2, MASTER_ADDR="[fe80::1%eth0]"), World(1, 1, 2, 2, "fe80::1%eth0", 29500, "torchrun")),
        (bare(0, 1, MASTER_ADDR="[::1"), World(0, 0, 1, 1, HERE, 0, "environment")),
        (bare(1, 2, DLRM_OVERLAP_NPROC="2"), World(1, 1, 2, 2, HERE, 29500, "nproc")),
        (bare(0, 2, DLRM_OVERLAP_NPROC="2", **srun(0, 1)), World(0, 0, 2, 2, HERE, 29500, "nproc")),
        (torchrun(1, 2), World(1, 1, 2, 2, HERE, 29500, "torchrun")),
        (torchrun(5, 8, 2, MASTER_ADDR="h0"), World(5, 1, 8, 4, "h0", 29500, "torchrun")),
        ({**srun(1, 2), **torchrun(5, 8, 2)}, World(5, 1, 8, 4, HERE, 29500, "torchrun")),
        ({**openmpi(1, 2), **torchrun(5, 8, 2)}, World(5, 1, 8, 4, HERE, 29500, "torchrun")),
        (srun(1, 2), World(1, 1, 2, 2, HERE, SLURM_PORT, "slurm")),
        (second(), World(9, 1, 10, 2, "gpu03", SLURM_PORT, "slurm")),
        (srun(1, 2, MASTER_ADDR="ib0", MASTER_PORT="77"), World(1, 1, 2, 2, "ib0", 77, "slurm")),
        (srun(1, 2, MASTER_ADDR="[fd00::2]"), World(1, 1, 2, 2, "fd00::2", SLURM_PORT, "slurm")),
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
        (bare(2, 2), "RANK 2 must be in 0 .. WORLD_SIZE - 1, and WORLD_SIZE is 2"),
        (bare(-1, 2), "RANK is '-1', not a number from 0 on"),
        (bare(0, 2, RANK="zero"), "RANK is 'zero'"),
        (bare(0, 2, RANK="\u0661"), "RANK is '\u0661', not a number"),
        (bare(0, 2, RANK="1" * 5000), "RANK is '" + "1" * 100),
        (bare(0, 2, MASTER_PORT="70000"), "cannot meet at '127.0.0.1', port 70000"),
        (torchrun(0, 2, MASTER_ADDR=""), "cannot meet at '', port 29500"),
        (
            torchrun(0, 2, MASTER_ADDR="h0:29500"),
            "set MASTER_ADDR to the name or IP address of rank 0's machine, without",
        ),
        (torchrun(0, 2, MASTER_ADDR="[::1]:29500"), "cannot meet at '[::1]:29500', port 29500"),
        (torchrun(0, 2, MASTER_ADDR="[h0]"), "cannot meet at '[h0]', "),
        (torchrun(0, 2, MASTER_ADDR="[::1"), "cannot meet at '[::1', "),
        (torchrun(0, 2, MASTER_ADDR="fe80::1%"), "cannot meet at 'fe80::1%', "),
        (torchrun(0, 2, MASTER_ADDR="::1::1"), "cannot meet at '::1::1', "),
        (torchrun(0, 2, MASTER_ADDR="tcp://h0"), "cannot meet at 'tcp://h0', "),
        (torchrun(0, 2, MASTER_ADDR="h0 h1"), "cannot meet at 'h0 h1', "),
        (torchrun(0, 2, MASTER_ADDR="h" * 254), "cannot meet at 'hhh"),
        (bare(0, 2, MASTER_ADDR="h0"), "LOCAL_RANK is ''"),
        (bare(0, 2, MASTER_ADDR="h0", LOCAL_RANK="0"), "LOCAL_WORLD_SIZE is ''"),
        (bare(0, 2, LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), "LOCAL_RANK 2 must be"),
        (srun(1, 2, WORLD_SIZE="4"), "WORLD_SIZE is '4', but srun says 2"),
        (srun(1, 2, RANK="0", WORLD_SIZE="2"), "RANK is '0', but srun says 1"),
        (srun(1, 2, SLURM_STEP_NUM_TASKS=""), "SLURM_STEP_NUM_TASKS is ''"),
        (openmpi(1, 2, WORLD_SIZE="4", MASTER_ADDR="h0", MASTER_PORT="1"), "WORLD_SIZE is '4', but mpirun says 2"),
        (hydra(1, 2, RANK="0", WORLD_SIZE="1"), "RANK is '0', but mpirun says 1"),
        (second(SLURM_STEP_TASKS_PER_NODE="many"), "SLURM_STEP_TASKS_PER_NODE is 'many', not numbers of tasks"),
        (second(SLURM_STEP_TASKS_PER_NODE=""), "SLURM_STEP_TASKS_PER_NODE is '', not numbers of tasks"),
        (second(SLURM_STEP_TASKS_PER_NODE="4(x1000000000000)"), "not numbers of tasks such as '4(x2),2'"),
        (second(SLURM_STEP_TASKS_PER_NODE="4(x2),2(x999999999)", SLURM_NODEID="1000000001"), "has 1000000001 nodes"),
        (second(SLURM_NODEID="3"), "SLURM_NODEID is 3, but SLURM_STEP_TASKS_PER_NODE, 4(x2),2, has 3 nodes"),
        (second(SLURM_NODEID="-1"), "SLURM_NODEID is '-1', not a number"),
        (second(SLURM_NODEID="first"), "SLURM_NODEID is 'first', not a number"),
        (second(SLURM_STEP_NODELIST="gpu["), "cannot meet at 'gpu[', port"),
        (second(SLURM_STEP_NODELIST=""), "cannot meet at '', port"),
        (second(SLURM_STEP_NUM_TASKS="9" * 18), f"WORLD_SIZE {'9' * 18} is above 1048576"),
        (second(SLURM_JOB_ID="x"), "SLURM_JOB_ID is 'x', not a number"),
    ],
)
def test_malformed_and_contradicting_variables_stop_the_run_in_one_line(environ: dict[str, str], message: str) -> None:
    with refuses(re.escape(message)):
        launcher.detect(environ)


WRONG = [
    "",
    "x",
    "-1",
    " 1",
    "1e3",
    "9" * 18,
    "9" * 5000,
    "\u0661",
    "1\n2",
    "gpu[1-999999999]",
    "4(x999999999)",
    "4(x,",
]
LAUNCHES = {
    "bare": bare(1, 2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
    "nproc": bare(1, 2, DLRM_OVERLAP_NPROC="2"),
    "torchrun": torchrun(1, 2, MASTER_ADDR="h0"),
    "mpirun": openmpi(1, 2, MASTER_ADDR="h0", MASTER_PORT="77"),
    "hydra": hydra(1, 2, **srun(1, 2)),
    "srun": srun(1, 2, MASTER_ADDR="h0", MASTER_PORT="77"),
    "srun of several nodes": second(),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_malformed_variable_of_a_launcher_is_refused_in_one_line_or_not_used(
    monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    install_mpi4py(monkeypatch, FakeWorld(1, 2, local=2))
    whole = launcher.detect(LAUNCHES[launch])
    refused: set[tuple[str, str]] = set()
    for name in LAUNCHES[launch]:
        for value in WRONG:
            environ = LAUNCHES[launch] | {name: value}
            try:
                found = launcher.detect(environ)
            except InputError as error:
                refused.add((name, str(error)))
            else:
                assert (found.rank, found.world_size) == (whole.rank, whole.world_size)
            launcher.announced_rank(environ)
    assert len({name for name, _ in refused}) >= 3
    assert not [message for _, message in refused if "\n" in message]


def test_a_launcher_that_is_not_a_number_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in WRONG:
        if value.isascii() and not value.strip("9"):
            continue  # the number of a process that has ended
        monkeypatch.setenv(launcher.LAUNCHER_PID, value)
        assert main(["train", "--config", "quickstart"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("dlrm-overlap: nproc launch: DLRM_OVERLAP_LAUNCHER_PID is ")


def test_empty_variables_of_launchers_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set().union(*LAUNCHES.values()):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OMPI_MCA_btl", "")  # a setting
    assert main(["bench", "--help"]) == 0
    assert launcher.detect() == World(0, 0, 1, 1, HERE, 0, "single")
    assert "LOCAL_RANK" not in os.environ, "torchmetrics reads it as a number"
    assert "OMPI_MCA_btl" in os.environ


@pytest.mark.parametrize("variables", [openmpi, hydra])
def test_mpi_ranks_come_from_comm_world(
    monkeypatch: pytest.MonkeyPatch, variables: Callable[..., dict[str, str]]
) -> None:
    install_mpi4py(monkeypatch, FakeWorld(3, 4, local=2))
    # Open MPI's daemons are tasks of a Slurm step of their own, which says nothing about the ranks
    environ = variables(3, 4, **srun(0, 1))
    assert launcher.detect(environ) == World(3, 1, 4, 2, "node0", 4321, "mpi")
    assert sys.modules["mpi4py"].rc.finalize is False


def test_mpi_rank_0_offers_the_loopback_on_one_node_and_a_given_address_always(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mpi4py(monkeypatch, FakeWorld(0, 2, local=2))
    found = launcher.detect(openmpi(0, 2))
    assert found.master_addr == HERE
    assert 1024 <= found.master_port < 65536
    assert launcher.detect(openmpi(0, 2, MASTER_ADDR="ib0", MASTER_PORT="77")).describe().endswith("ib0:77")


def test_mpi_of_another_library_or_without_mpi4py_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mpi4py(monkeypatch, FakeWorld(0, 1, local=1))
    with refuses("mpirun started 2 ranks, but mpi4py sees 1"):
        launcher.detect(hydra(1, 2))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with refuses("pip install mpi4py"):
        launcher.detect(openmpi(0, 2))


def test_describe() -> None:
    there = "launch: torchrun, rank 0 of 2, local rank 0 of 2, rendezvous 127.0.0.1:29500"
    assert launcher.detect(torchrun(0, 2)).describe() == there
    assert launcher.detect(bare(0, 2, MASTER_ADDR="::1")).describe().endswith(", rendezvous [::1]:29500")
    assert launcher.detect({}).describe() == "launch: single, rank 0 of 1, local rank 0 of 1"


def test_announced_rank() -> None:
    announced = [bare(1, 2), openmpi(3, 4), hydra(0, 4), srun(2, 4)]
    assert [launcher.announced_rank(environ) for environ in announced] == [1, 3, 0, 2]
    for environ in ({}, {"SLURM_PROCID": "0"}, {"RANK": "zero"}, {"RANK": "\u0661"}, {"RANK": "\u00b2"}):
        assert launcher.announced_rank(environ) is None


def test_a_free_port_is_not_one_that_a_connection_may_take_before_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert launcher.free_port() < first_ephemeral
    with socket.socket() as other:
        other.bind(("", 0))
        monkeypatch.setattr(launcher, "_PORTS", range(other.getsockname()[1], other.getsockname()[1] + 1))
        with pytest.raises(InputError, match="are taken"):
            launcher.free_port()
