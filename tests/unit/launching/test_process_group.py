"""A rank's device, the rendezvous and what stops it, and the end of a run."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.launching import process_group
from dlrm_overlap.launching.launcher import World, free_port
from tests.unit.launching.launchers import HERE, FakeWorld, install_mpi4py


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
    assert process_group.find_device(kind, local_rank, source) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "gpus", "source"), [("cuda", 0, "single"), ("auto", 1, "nproc"), ("cuda", 2, "slurm")]
)
def test_find_device_refuses_to_share_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str, gpus: int, source: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InputError, match=f"local rank 2 has no GPU of its own, {gpus} visible"):
        process_group.find_device(kind, 2, source)
    if gpus:  # rank 0, whose message is the one shown, finds it too
        with pytest.raises(InputError, match=f"local rank 2 has no GPU of its own, {gpus} visible"):
            process_group.find_device(kind, 0, source, local_ranks=3)


@pytest.mark.parametrize("host", [HERE, "localhost"])
def test_ranks_of_one_host_meet_on_loopback_alone(host: str) -> None:
    port = free_port()
    ranks = [World(rank, rank, 2, 2, host, port, "environment") for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda world: process_group._open_store(world, timeout_s=10), ranks))
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, at = line.split()[1].split(":")
            if int(at, 16) == port and line.split()[3] == "0A":
                listening.append(address)
    assert len(listening) == 1
    assert listening[0] in ("0100007F", f"{0:024X}01000000"), "listens elsewhere too"


def test_a_host_whose_own_name_is_on_loopback_is_reached_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]  # Debian's /etc/hosts
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    several = World(0, 0, 4, 2, "host0", 29500, "environment")
    process_group._choose_interface(several)
    assert not process_group._is_loopback(several)
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys()
    assert process_group._is_loopback(World(0, 0, 2, 2, "host0", 29500, "environment"))


def test_a_port_that_is_taken_is_reported_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = World(0, 0, 2, 2, HERE, other.getsockname()[1], "environment")
        with pytest.raises(InputError) as error:
            process_group.init_process_group(taken, torch.device("cpu"), timeout_s=1)
    assert re.fullmatch(
        r"environment launch: port \d+ of 127.0.0.1 is in use by another program; set MASTER_PORT to a free one .*",
        str(error.value),
    )


def _meet(worlds: list[World], facts: list[dict[str, object]]) -> list[str]:
    """Let ranks, each a thread, meet and compare their facts; return the error of each, empty where it has none."""

    def come(world: World, own: dict[str, object]) -> tuple[str, object]:
        store = process_group._open_store(world, timeout_s=10)
        try:
            process_group._compare(store, world, dict(own))
        except InputError as error:
            return str(error), store
        return "", store  # rank 0's serves the others until all have ended

    with ThreadPoolExecutor(len(worlds)) as pool:
        ended = list(pool.map(come, worlds, facts))
    return [error for error, _ in ended]


def _worlds(ranks: range, world_size: int, port: int, source: str = "environment") -> list[World]:
    return [World(rank, rank, world_size, world_size, HERE, port, source) for rank in ranks]


def test_ranks_that_are_alike_meet() -> None:
    assert _meet(_worlds(range(4), 4, free_port()), [{"train.lr": 0.1, "train.steps": None}] * 4) == [""] * 4


def test_unlike_ranks_are_refused_on_all_with_the_keys() -> None:
    facts: list[dict[str, object]] = [{"train.lr": 0.1, "train.seed": 1, "data.path": "a" * 90} for _ in range(4)]
    facts[2] |= {"train.lr": 0.5, "data.path": "b" * 90}
    facts[3] |= {"train.seed": 2}
    (error,) = set(_meet(_worlds(range(4), 4, free_port()), facts))
    long = [f'"{letter * 59}..' for letter in "ba"]
    assert error.startswith(f"rank 2 (on {socket.gethostname()}) differs from rank 0: ")
    assert f"data.path is {long[0]}, not {long[1]}, train.lr is 0.5, not 0.1 (2 ranks do); start all ranks" in error


def test_unlike_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["one", "another"])
    monkeypatch.setattr(process_group, "code_digest", lambda: next(digests))
    for error in _meet(_worlds(range(2), 2, free_port()), [{}, {}]):
        assert "differs from rank 0: code is" in error


def test_a_rank_of_another_run_at_this_ones_port_is_refused() -> None:
    port = free_port()
    errors = _meet([*_worlds(range(2), 2, port), *_worlds(range(2, 3), 4, port)], [{}] * 3)
    assert errors[:2] == ["", ""], "a rank beyond the run's ends it"
    assert "WORLD_SIZE is 4, not 2" in errors[2]
    port = free_port()
    errors = _meet([*_worlds(range(2), 2, port), *_worlds(range(1, 2), 2, port)], [{}] * 3)
    assert errors[0] == ""
    assert sorted(errors[1:])[0] == ""
    assert f"another process is rank 1 at {HERE}:{port} already" in sorted(errors[1:])[1]


def test_an_interface_that_is_not_there_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    world = World(0, 0, 1, 1, HERE, 0, "single")
    told = r"gloo cannot connect .*nosuch0.*; GLOO_SOCKET_IFNAME is nosuch0: set it on each host .*, of .*lo"
    with pytest.raises(InputError, match=told):
        process_group.init_process_group(world, torch.device("cpu"), timeout_s=10)


def test_a_host_without_an_address_is_reported_in_one_line() -> None:
    nowhere = World(0, 0, 2, 1, "no.such.host.invalid", 29500, "slurm")
    with pytest.raises(InputError, match=r"no rendezvous of 2 ranks at no\.such\.host\.invalid:29500 .*; start all"):
        process_group.init_process_group(nowhere, torch.device("cpu"), timeout_s=0.01)


@pytest.mark.slow
def test_a_collective_just_before_the_end_does_not_abort_the_process() -> None:
    """Without a rest in `shutdown` four of five such processes abort."""
    script = """
import ctypes, sys, torch
import torch.distributed as dist
from dlrm_overlap.launching import process_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = dist.group.WORLD  # as a model keeps it
sys.setswitchinterval(60)  # who has the interpreter's lock keeps it
tensor = torch.zeros(8)
dist.all_reduce(tensor, async_op=True)
ctypes.PyDLL(None).usleep(300_000)  # with the lock, which gloo's thread needs to let go of the tensor
process_group.shutdown()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_shutdown_leaves_mpi_alone_on_the_way_out_of_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    mpi = install_mpi4py(monkeypatch, FakeWorld(0, 1, local=1))
    mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: "finalize" in calls
    mpi.Finalize = lambda: calls.append("finalize")
    vars(mpi.COMM_WORLD)["Abort"] = calls.append
    with contextlib.suppress(RuntimeError):
        try:
            raise RuntimeError
        finally:
            process_group.shutdown()
    assert calls == []
    process_group.abandon(3)
    assert calls == [3], "the other ranks are not ended"
    process_group.shutdown()
    process_group.abandon(4)
    assert calls == [3, "finalize"]
