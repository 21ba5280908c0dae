"""A rank's device, the rendezvous and what stops it, and the end of a run."""

import contextlib
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import every_rank
from dlrm_overlap.launching import launcher, process_group
from dlrm_overlap.launching.launcher import World
from tests.conftest import listening_on, refuses
from tests.unit.launching.launchers import HERE, FakeWorld, bare, install_mpi4py


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
    for rank, local_ranks in ((2, 1), *[(0, 3)] * bool(gpus)):  # rank 0, whose message is the one shown, finds it too
        with refuses(f"local rank 2 has no GPU of its own, {gpus} visible"):
            process_group.find_device(kind, rank, source, local_ranks)


@pytest.mark.parametrize("node", [HERE, "localhost", "127.0.0.2", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_ranks_of_one_machine_meet_on_loopback_alone(node: str) -> None:
    port = launcher.free_port()
    ranks = [launcher.detect(bare(rank, 2, MASTER_ADDR=node, MASTER_PORT=str(port))) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda world: process_group._open_store(world, timeout_s=10), ranks))
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    (address,) = [address for address, at in listening_on() if at == port]
    assert launcher.is_loopback(address), "other machines can connect"


def test_ranks_that_torchrun_has_restarted_do_not_find_what_the_failed_ones_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent's store outlives them, with their addresses."""
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    agent = store(HERE, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, again = (World(rank, rank, 2, 2, HERE, agent.port, "torchrun") for rank in range(2))
    seen = []
    for attempt, world in (("0", first), ("0", again), ("1", again)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        ours = process_group._open_store(world, timeout_s=10)
        seen.append(ours.check(["address"]))
        ours.set("address", "here")
    assert seen == [False, True, False]


def test_a_port_that_is_taken_is_reported_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = World(0, 0, 2, 2, HERE, other.getsockname()[1], "environment")
        with refuses(r"^environment launch: 2 ranks do not meet at 127.0.0.1:\d+ .* already in use.* a free port "):
            process_group.init_process_group(taken, torch.device("cpu"), timeout_s=1)


_GROUP = cast(dist.ProcessGroup, None)


def test_unlike_ranks_are_refused_with_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[dict[str, object]] = [{"train.lr": 0.1, "train.steps": None, "data.path": "a" * 90} for _ in range(4)]
    monkeypatch.setattr(every_rank, "gathered", lambda value, group: facts)
    process_group.check_identical(facts[0], _GROUP)
    facts[2] |= {"train.lr": 0.5, "data.path": "b" * 90, "code": "new"}
    long = [f"'{letter * 59}.." for letter in "ba"]
    told = f"code is 'new', not None, data.path is {long[0]}, not {long[1]}, train.lr is 0.5, not 0.1; start all ranks"
    with refuses("^" + re.escape(f"rank 2 differs from rank 0: {told}")):
        process_group.check_identical(facts[0], _GROUP)


def test_an_interface_that_is_not_there_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    world = World(0, 0, 1, 1, HERE, 0, "single")
    with refuses("ranks do not meet .*nosuch0.*; start all ranks.* GLOO_SOCKET_IFNAME on each machine"):
        process_group.init_process_group(world, torch.device("cpu"), timeout_s=10)


def test_a_lack_of_threads_is_not_taken_for_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")  # by gloo, whose threads do not start

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(RuntimeError, match="Resource temporarily"):
        process_group.init_process_group(World(0, 0, 1, 1, HERE, 0, "single"), torch.device("cpu"), timeout_s=10)


@pytest.mark.parametrize("node", ["no.such.node.invalid", "999.1.1.1", "fe80::1%nosuch0"])
def test_a_machine_without_an_address_is_reported_in_one_line(node: str) -> None:
    nowhere = World(0, 0, 2, 1, node, 29500, "slurm")
    with refuses(rf"slurm launch: {node}, the machine of rank 0, has no address .*; set MASTER"):
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
