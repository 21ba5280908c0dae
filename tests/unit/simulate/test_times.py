"""Simulated phases and steps: times, bytes and shares that can be found by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlrm_overlap.config import DataConfig, EmbeddingConfig, ModelConfig, TablesConfig, TrainConfig
from dlrm_overlap.embedding.balance import TableLoad
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.simulate.config import GpuConfig, LookupConfig, NetworkConfig, SimulateConfig, UpdateConfig
from dlrm_overlap.simulate.shares import SimulatedShard, shares_of
from dlrm_overlap.simulate.stage import all_reduce_s, backward, link_seconds, pooling_s, put_bytes, rows_s, sort_s
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import build_workload, misses
from tests.conftest import refuses

RATES = UpdateConfig(gb_per_s=2000.0, us=50.0, sort_ns=0.1)
GPU = GpuConfig(kernel_us=0.0, peer_us=0.0, update=RATES, baseline_update=RATES)
CONFIG = SimulateConfig(
    what="backward",
    gpu=GPU,
    network=NetworkConfig(gpus_per_node=4),
    model=ModelConfig(dim=64, bottom_mlp=[64]),
    data=DataConfig(tables=TablesConfig(96, 1_000_000, multi_hot="0..32", zipf_alpha=0.0)),
    embedding=EmbeddingConfig("pgas", aggregate_bytes=0, optimizer="sgd"),
    train=TrainConfig(global_batch_size=16384),
)


def _with(config: SimulateConfig, what: Any = None, backend: str = "pgas", **embedding: Any) -> SimulateConfig:
    made = replace(config.embedding, backend=backend, **embedding)
    return replace(config, what=what or config.what, embedding=made)


def _mlperf(*options: str) -> SimulateConfig:
    files = ["--config", "mlperf_dcnv2", "--config", "simulate/mlperf_nodes"]
    return parse_config(SimulateConfig, "simulate", "", [*files, *options])[0]


def test_links_are_busy_with_what_goes_over_them() -> None:
    """Two nodes of two ranks, links of 2 and NICs of 1 byte/s, equal loads; then the example of `link_seconds`."""
    network = NetworkConfig(nodes=2, gpus_per_node=2, nic_gbit_per_s=8e-9)
    config = replace(CONFIG, network=network, gpu=replace(GPU, link_gb_per_s=2e-9, collective_gb_per_s=1e-9))
    equal = link_seconds(config, np.full(4, 6.0), np.full(4, 5.0))
    assert equal.tolist() == pytest.approx(np.array([[3.0] * 4, [3.0] * 4, [10.0] * 4, [10.0] * 4]))
    one = link_seconds(_with(config, backend="torchrec"), np.array([1.0, 0, 0, 0]), np.array([0.0, 0, 3, 0]))
    assert one.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 6, 0], [3, 3, 0, 0]]


def test_a_sum_takes_its_rings_and_its_latencies() -> None:
    nbytes, gpu = 64e6, replace(GPU, peer_us=5.0)
    ring = all_reduce_s(replace(CONFIG, gpu=gpu, network=NetworkConfig(gpus_per_node=8)), nbytes)
    assert ring == pytest.approx(2 * 7 / 8 * nbytes / 354.1e9 + 2 * 7 * 5e-6)
    rails = all_reduce_s(replace(CONFIG, gpu=gpu, network=NetworkConfig(nodes=4, gpus_per_node=8)), nbytes)
    assert rails - ring == pytest.approx(2 * 3 / 4 * nbytes / 8 / 50e9 + 2 * 2 * 7e-6)


@pytest.mark.parametrize("backend", ["torchrec", "pgas", "fused"])
@pytest.mark.parametrize("nic_gbit_per_s", [1, 400])
def test_a_stage_takes_its_fullest_resource_or_its_parts_in_turn(backend: str, nic_gbit_per_s: float) -> None:
    network = NetworkConfig(nodes=4, gpus_per_node=2, nic_gbit_per_s=nic_gbit_per_s, message_ns=0.0)
    config = _with(replace(CONFIG, network=network), "stage", backend)
    found = simulate(config)
    pair, gpu, work = found.work.pair_bytes, config.gpu, found.work
    assert 7 * pair == pytest.approx(work.link_bytes)
    links_s = max(6 * pair / nic_gbit_per_s * 8 / 1e9, pair / gpu.link_gb_per_s / 1e9)
    if backend == "torchrec":
        copies_s = 2 * (8 * pair + work.pooled_bytes) / gpu.copy_gb_per_s / 1e9
        expected = pooling_s(gpu.baseline, work)[0] + copies_s + links_s + (gpu.baseline.us + gpu.collective_us) / 1e6
    else:
        lookup = gpu.fused if backend == "fused" else gpu.pgas
        expected = max(pooling_s(lookup, work)[0], links_s) + lookup.us / 1e6
    assert found.ms == pytest.approx(1e3 * (expected + 2e-6))  # and a message's latency


def test_small_puts_are_bound_by_their_number_and_gathering_helps() -> None:
    config = _with(replace(CONFIG, network=NetworkConfig(nodes=4, gpus_per_node=2, message_ns=1e6)), "stage")
    found = simulate(config)
    puts = 6 * found.work.pair_bytes / (64 * 4)  # of an embedding each
    assert found.ms == pytest.approx(puts, rel=0.01)
    assert simulate(_with(config, aggregate_bytes=256 * 64)).ms == pytest.approx(puts / 64, rel=0.01)
    slices = _with(config, backend="fused", slice_bags=16)  # of 4 KB
    for aggregate_bytes, nbytes in ((0, 4096), (65536, 65536), (5000, 8192)):
        gathered = _with(slices, backend="fused", aggregate_bytes=aggregate_bytes)
        assert put_bytes(gathered, found.work) == pytest.approx(nbytes), "by the rule of the exchange"


def test_rows_are_updated_while_the_next_part_travels() -> None:
    found = simulate(CONFIG)
    push_ms = 3 * found.work.pair_bytes / GPU.link_gb_per_s / 1e6
    rows_ms = 1e3 * float(rows_s(RATES, found.work)[0])
    assert rows_ms > push_ms
    assert found.ms == pytest.approx(0.2 * push_ms + rows_ms, rel=1e-6)  # a window of 100 MB has 3 parts
    fast = replace(RATES, gb_per_s=1e6, us=0.0)
    assert simulate(replace(CONFIG, gpu=replace(GPU, update=fast))).ms == pytest.approx(push_ms, rel=0.02)


def test_updates_and_products_take_turns() -> None:
    config = replace(CONFIG, network=NetworkConfig(gpus_per_node=1))
    work, none = build_workload(config), np.zeros(1)
    alone_s = rows_s(RATES, work)
    for products_s in (alone_s / 2, 2 * alone_s):
        found = backward(config, work, none, none, products_s)
        ends = sorted([found.updated_s[0], found.products_s[0]])
        assert ends[1] == pytest.approx(alone_s[0] + products_s[0]), "as long as one after the other"
        assert ends[0] == pytest.approx(2 * min(alone_s[0], products_s[0])), "at the same time, in equal parts"
        assert found.updates_s == pytest.approx(found.updated_s)


def test_the_collective_packs_sends_sorts_and_updates_in_turn() -> None:
    launched = replace(RATES, sort_us=200.0)
    found = simulate(_with(replace(CONFIG, gpu=replace(GPU, baseline_update=launched)), backend="torchrec"))
    work = found.work
    parts_ms = [
        2 * work.pooled_bytes / GPU.copy_gb_per_s / 1e6,
        GPU.collective_us / 1e3 + 3 * work.pair_bytes / GPU.collective_gb_per_s / 1e6,
        work.ids * 0.1e-6 + 0.2,
        1e3 * rows_s(RATES, work)[0],
    ]
    assert found.ms == pytest.approx(sum(parts_ms), rel=1e-6)
    assert sort_s(RATES, work)[0] == pytest.approx(work.ids * 0.1e-9)


def test_the_dense_part_counts_its_kernels_and_its_pairs() -> None:
    """Bottom MLP of one layer, top MLP of two, five tables: 15 pairs of dim 64, 4096 samples, 3 products each."""
    tables = replace(CONFIG.data.tables, count=5)
    model = ModelConfig(dim=64, bottom_mlp=[64], top_mlp=[32, 1])
    config = replace(CONFIG, model=model, data=DataConfig(tables=tables))
    work = build_workload(config)
    usual, chained, slow = (
        dense_seconds(replace(config, gpu=replace(GPU, **rates)), work)
        for rates in ({}, {"kernel_us": 1e6}, {"pair_tflop_per_s": 1.0})
    )
    kernels = [more - less for more, less in zip(chained, usual, strict=True)]
    assert kernels == pytest.approx([2, 2 * 3 + 9, 2 * 3 + 9, 5 * 3, 0, 5, 0])
    more_s = slow.head_forward + slow.head_backward - usual.head_forward - usual.head_backward
    assert more_s == pytest.approx(3 * 2 * 4096 * 15 * 64 / 1e12 * (1 - 1 / 6.46))


def test_a_captured_step_waits_for_the_sort_of_the_fullest_rank() -> None:
    """After the lookup, the sort and the head's forward share the multiprocessors.

    One of four tables has five ids a bag, the others one. Each rank with a part of it sorts all of its ids, and one
    rank sorts two more tables' ids: 7 of the 8 ids of a sample, while the mean is 2.
    """
    gpu = replace(GPU, pgas=LookupConfig(1e6), update=replace(RATES, sort_ns=0.0, gb_per_s=1e6))
    tables = TablesConfig(4, 1_000_000, multi_hot=[5, 1, 1, 1], zipf_alpha=0.0)
    model = ModelConfig("dcn", 64, [64], [1024, 1])
    config = replace(_with(CONFIG, "step"), gpu=gpu, data=DataConfig(tables=tables), model=model)
    without = simulate(config)
    most = float(without.work.shares.ids.max())
    assert most == pytest.approx(7 / 2)
    sorting = replace(config, gpu=replace(gpu, update=replace(gpu.update, sort_ns=0.01, sort_us=20.0)))
    sort_ms = most * without.work.ids * 0.01e-6
    assert sort_ms < 1e3 * dense_seconds(config, without.work).head_forward
    assert simulate(sorting).ms == pytest.approx(without.ms + sort_ms, rel=0.01)


def test_every_rank_has_the_work_that_the_plan_gives_it() -> None:
    """MLPerf's tables: 8 ranks have equal work; of 64 ranks of one node few have most of it, and 28 have none."""
    one_node = ("--network.nodes", "1", "--network.gpus_per_node")
    few, many = (build_workload(_mlperf(*one_node, ranks)).shares for ranks in ("8", "64"))
    assert [few.memory.max(), few.links.max(), few.ids.max()] == pytest.approx([1.08, 1.08, 3.89], abs=0.005)
    assert [many.memory.max(), many.links.max(), many.ids.max()] == pytest.approx([3.74, 2.46, 29.91], abs=0.005)
    assert [(each.links == 0).sum() for each in (few, many)] == [0, 28]
    for shares in (few, many):
        assert [shares.memory.mean(), shares.links.mean()] == pytest.approx([1.0, 1.0])
    with refuses("no room"):
        build_workload(_mlperf(*one_node, "1", "--data.tables.max_rows", "null"))


def test_the_work_of_tables_that_are_cut_by_rows() -> None:
    """Two nodes of two ranks: a table of two ids a bag is cut by rows over the first, one of one id is on rank 3."""
    tables = [TableLoad(ids, 64, 256, 0) for ids in (2, 1)]
    plan = [[SimulatedShard(0, 64, 0.5), SimulatedShard(1, 64, 0.5)], [SimulatedShard(3, 64, 1.0)]]
    network = NetworkConfig(nodes=2, gpus_per_node=2)
    ours, dense = (shares_of(tables, plan, network, dense=each) for each in (False, True))
    for found in (ours, dense):
        assert (found.memory * 3 / 4).tolist() == pytest.approx([1, 1, 0, 1]), "of 3 rows a sample"
        assert (found.ids * 3 / 4).tolist() == pytest.approx([1, 1, 0, 1])
        assert (found.links * 128 / 4).tolist() == pytest.approx([64, 64, 0, 64]), "of 128 columns"
    near = [48 + 64, 48 + 64, 0, 64]
    assert (ours.near * 32).tolist() == pytest.approx(near), "a fourth of the bags have no id, but all are gathered"
    assert (ours.away * 32).tolist() == pytest.approx([32, 32, 0, 64]), "each rank sends half of the sums"
    assert (ours.sums * 32).tolist() == pytest.approx([32, 32, 0, 0])
    assert (dense.near * 32).tolist() == pytest.approx([128, 128, 0, 64]), "the sums of both nodes' samples"
    assert (dense.away * 32).tolist() == pytest.approx([32, 32, 0, 64]), "each rank forwards half of them"
    few_rows = shares_of(tables[:1], [[SimulatedShard(0, 64, 1.0), SimulatedShard(1, 64, 0.0)]], network, dense=False)
    assert few_rows.near.tolist() == [4, 4, 0, 0], "rank 1, which has no rows, sends what it gathers"


def test_a_node_of_several_machines_adds_partial_sums_together() -> None:
    """Two nodes, each of two machines of two ranks: a table of 64 columns is cut by rows over ranks 0 and 1."""
    tables, plan = [TableLoad(2, 64, 256, 0)], [[SimulatedShard(0, 64, 0.5), SimulatedShard(1, 64, 0.5)]]
    network = NetworkConfig(nodes=2, gpus_per_node=4, gpus_per_machine=2)
    ours, dense = (shares_of(tables, plan, network, dense=each) for each in (False, True))
    to_rank = ours.near[0] * 64 / 8, ours.away[0] * 64 / 8, dense.near[0] * 64 / 8, dense.away[0] * 64 / 8
    # Ours: bags with ids go to the 3 ranks of the node, and the 4 other ranks' partial sums are gathered by 4 ranks.
    assert to_rank[:2] == pytest.approx((48 + 64, 32))
    # The collective: half of 8 ranks' partial sums to the other rank of the machine, then half of the node's other
    # machine's 2 ranks' sums: 256 and 64 columns, for 3 ranks.
    assert to_rank[2:] == pytest.approx(((256 + 64) / 3, 32))
    one_machine = shares_of(tables, plan, replace(network, gpus_per_machine=None), dense=True)
    assert one_machine.near[0] * 64 / 8 == pytest.approx(64 * 2), "a fourth to each of 3 ranks, of 8 ranks' sums"


def test_one_node_is_planned_as_one_machine() -> None:
    """MLPerf's tables on 72 ranks: cuts by columns may be on all ranks, not only where rows are few."""
    shape = ("--network.nodes", "1", "--network.gpus_per_node", "72", "--network.gpus_per_machine")
    rack = build_workload(_mlperf(*shape, "4")).shares
    assert rack.memory.max() == pytest.approx(4.21, abs=0.005)
    assert rack.links.max() * 26 * 128 / 72 == pytest.approx(128), "columns of a gradient window, docs/architecture"
    assert rack.ids.max() * 214 / 72 == pytest.approx(100), "ids of a sample that an owner pulls"
    apart = build_workload(_mlperf("--network.nodes", "18", "--network.gpus_per_node", "4")).shares.memory
    assert apart.max() == pytest.approx(9.08, abs=0.005)
    with refuses(r"network\.gpus_per_machine: 5 does not divide network\.gpus_per_node, 72; take a divisor, or null"):
        _mlperf(*shape, "5")


def test_torchrecs_planner_cuts_tables_by_rows_within_a_node() -> None:
    """MLPerf's tables on two nodes: partial sums are added up within the node, and the sums are sent afterwards."""
    config = replace(_mlperf("--network.nodes", "2", "--embedding.plan", "torchrec"), what="stage")
    shares = build_workload(config).shares
    assert shares.memory.mean() == pytest.approx(1.0)
    assert shares.links.mean() > 1.2, "some tables are cut by rows"
    assert shares.away.sum() < shares.links.sum()
    assert shares.sums.any()


@pytest.mark.parametrize(("rows", "alpha", "cached"), [(1000, 0.0, 100), (1000, 0.0, 1000), (5000, 1.05, 500)])
def test_a_cache_misses_as_often_as_one_that_keeps_the_last_used_rows(rows: int, alpha: float, cached: int) -> None:
    weights = np.arange(1.0, rows + 1) ** -alpha
    ids = np.random.default_rng(0).choice(rows, 30_000, p=weights / weights.sum())
    kept: dict[int, None] = {}
    missed = 0
    for each in ids.tolist():
        missed += each not in kept
        kept.pop(each, None)
        kept[each] = None
        if len(kept) > cached:
            del kept[next(iter(kept))]
    assert misses(rows, alpha, float(len(ids)), float(cached)) == pytest.approx(missed, rel=0.02)
