"""Two nodes in network namespaces, each with an address of its own: started as launch/README.md says, and cut off."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.launching.launcher import free_port
from tests.agreement import assert_same
from tests.conftest import ROOT, read_metrics, wait_until
from tests.distributed.namespaces import ADDRESSES, INTERFACE, TwoNodes, enter, sent_bytes
from tests.distributed.tiny_stage import Stage
from tests.distributed.workers import quickstart, run_ranks, train

_COMPARED = 10  # steps
_SMALL = ["--train.global_batch_size", "256", "--data.eval_samples", "500", "--embedding.backend", "pgas"]


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as made:
        yield made
    assert made.processes() == []


def _start_agents(nodes: TwoNodes, folder: Path, *options: str) -> list[subprocess.Popen[bytes]]:
    """Start torchrun's agent with two CPU ranks on each node, by the script and the variables of launch/README.md."""
    script, config = str(ROOT / "launch/torchrun.sh"), str(ROOT / "configs/quickstart.yaml")
    options = ("--train.device", "cpu", "--log.dir", str(folder), "--log.name", "two_nodes", *_SMALL, *options)
    options += ("--log.tensorboard", "false", "--checkpoint.last", "false")
    environ = {"NNODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "NPROC": "2"}
    environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # these nodes' own names lead to no address
    return [
        nodes.start(node, folder / f"node{node}", environ | {"NODE_RANK": str(node)}, script, config, *options)
        for node in range(2)
    ]


def _train_on_one_node(folder: Path) -> None:
    train(quickstart(folder, "one_node", *_SMALL, "--train.steps", str(_COMPARED)))


@pytest.mark.slow
def test_they_train_over_a_slow_wire_as_one_node_does_and_name_each_other_once_it_is_cut(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    told = nodes.slow_down()
    forever = ["--train.steps", "1000000", "--log.every", "1", "--embedding.wait_timeout_s", "10"]
    agents = _start_agents(nodes, tmp_path, *forever)
    deadline = time.monotonic() + 120
    while f"step {_COMPARED} of " not in (said := (tmp_path / "node0").read_text()):
        assert time.monotonic() < deadline, f"{told}\n{said}"
        assert all(agent.poll() is None for agent in agents), said
        time.sleep(0.1)
    nodes.cut()
    begin = time.monotonic()
    assert all(agent.wait(timeout=60) for agent in agents), "an agent ended well"
    assert time.monotonic() - begin < 40
    assert nodes.processes() == []
    assert "2 nodes (ranks 0 to 1, ranks 2 to 3; 2 machines): stores within a node" in said
    cases = (
        ("[23]", r"in step \d+ for 1\d s:\n(?:  rank [01]: .*\n)?  rank [23]: silent"),
        ("[01]", r".*\n  rank 0, .* does not answer"),
    )
    for node, (peers, stood) in enumerate(cases):
        said = (tmp_path / f"node{node}").read_text()
        waited = rf"waited 10 s for .* of rank {peers}: expected epoch \d+, seen \d+"
        assert re.search(f"made no progress {stood}|{waited}", said), said
    run_ranks(_train_on_one_node, 4, tmp_path)
    losses, expected = (read_metrics(tmp_path / name, "train/loss") for name in ("two_nodes", "one_node"))
    assert list(expected) == list(range(1, _COMPARED + 1))
    assert {step: losses[step] for step in expected} == expected


_OWNERS = [([64, 64], []), ([64], [64]), ([128], []), ([64, 64], [])]  # 128 columns a rank
_SAMPLES, _REPEATED = 16, 10  # of a rank; steps that are counted


def _count_what_crosses(folder: Path, handles: list[str]) -> None:
    """Take some forwards by an all-to-all and by messages between nodes, and check how many bytes each sends."""
    rank = dist.get_rank()
    enter(handles[rank // 2])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    group = dist.new_group(backend="gloo")  # the group of all ranks has its sockets outside the namespaces
    assert isinstance(group, dist.ProcessGroup)
    sizes, stage = [_SAMPLES] * 4, Stage(_OWNERS, rank)
    counted: dict[str, int] = {}
    for backend, nodes in (("nccl", 1), ("pgas", 2), ("fused", 2)):
        exchange = stage.exchange(group, backend)
        assert len(exchange.reach.nodes) == nodes
        for number in range(1 + _REPEATED):
            if number == 1:
                before = _traffic_at_rest()
            inputs, expected = stage.inputs(number, sizes)
            with torch.no_grad():
                assert_same(exchange.start(inputs, sizes).wait(), expected, f"{backend}, step {number}")
        counted[backend] = _traffic_at_rest() - before  # pyright: ignore[reportPossiblyUnboundVariable]
        exchange.close()
    # What two ranks pool for two others, in float32, a quarter of the columns each.
    payload = _REPEATED * 2 * 2 * _SAMPLES * 128 * 4
    for backend, sent in counted.items():
        assert payload < sent < 1.1 * payload, f"rank {rank}, {backend}: {counted}"


def _traffic_at_rest() -> int:
    """Return the bytes sent by this rank's node, once all ranks are here and have sent their acknowledgements."""
    dist.barrier()
    time.sleep(0.1)
    found = sent_bytes()
    dist.barrier()
    return found


@pytest.mark.slow
def test_pooled_embeddings_cross_once(nodes: TwoNodes, tmp_path: Path) -> None:
    run_ranks(_count_what_crosses, 4, tmp_path, nodes.handles())


_MEET = """
import sys, torch
from dlrm_overlap.config import InputError
from dlrm_overlap.launching import launcher, process_group
try:
    process_group.init_process_group(launcher.detect(), torch.device("cpu"))
except InputError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_an_interface_that_the_other_node_does_not_reach_is_told_in_one_line(nodes: TwoNodes, tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
    environ |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        nodes.start(node, tmp_path / f"node{node}", environ | {"RANK": str(node)}, sys.executable, "-c", _MEET)
        for node in range(2)
    ]
    # One of the two connects, the other waits for it.
    wait_until(lambda: any(rank.poll() for rank in ranks), 60, "no rank has failed", 0.1)
    codes = [rank.poll() for rank in ranks]
    assert 1 in codes
    said = (tmp_path / f"node{codes.index(1)}").read_text()
    assert re.search(r"2 ranks do not meet at .*; start all ranks.* GLOO_SOCKET_IFNAME on each machine", said), said
    assert "Traceback" not in said
