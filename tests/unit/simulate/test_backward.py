"""The simulated backward: parts, and times that can be found by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dlrm_overlap.config import InputError, ModelConfig
from dlrm_overlap.embedding.balance import TableLoad
from dlrm_overlap.simulate.backward import add_backward, gradient_parts, rows_s, sort_s
from dlrm_overlap.simulate.config import (
    ExchangeConfig,
    GpuConfig,
    LookupConfig,
    NetworkConfig,
    SimulateConfig,
    UpdateConfig,
    WorkConfig,
)
from dlrm_overlap.simulate.shares import PlannedTable, Shard, shares_of
from dlrm_overlap.simulate.stage import Simulation
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import build_workload

RATES = UpdateConfig(gb_per_s=2000.0, us=50.0, sort_ns=0.1)
GPU = GpuConfig(kernel_us=0.0, peer_us=0.0, update=RATES, baseline_update=RATES)
CONFIG = SimulateConfig(
    what="backward",
    gpu=GPU,
    network=NetworkConfig(gpus_per_host=4),
    model=ModelConfig(dim=64, bottom_mlp=[64]),
    work=WorkConfig(tables=96, multi_hot="0..32", global_batch=16384),
)


def test_rows_are_updated_while_the_next_part_travels() -> None:
    found = simulate(CONFIG)
    assert gradient_parts(CONFIG, found.work) == pytest.approx([0.2, 0.4, 0.4])  # a window of 100 MB
    push_ms = 3 * found.work.pair_bytes / GPU.link_gb_per_s / 1e6
    rows_ms = 1e3 * rows_s(CONFIG, found.work)
    assert rows_ms > push_ms
    assert found.ms == pytest.approx(0.2 * push_ms + rows_ms, rel=1e-6)  # the first part has nothing beside it
    fast = replace(RATES, gb_per_s=1e6, us=0.0)
    assert simulate(replace(CONFIG, gpu=replace(GPU, update=fast))).ms == pytest.approx(push_ms, rel=0.02)


def test_updates_and_products_take_turns() -> None:
    config = replace(CONFIG, network=NetworkConfig(gpus_per_host=1))
    sim = Simulation.of(config)
    _, cluster, work = sim
    engine = cluster.engine
    product = engine.add("product", {cluster.products(0): 1e-3}, 1e-3, rank=0, lane="products")
    _, updated = add_backward(sim, [[]], [[]])
    timeline = engine.run()
    both_s = 1e-3 + rows_s(config, work)
    assert timeline.seconds == pytest.approx(both_s), "as long as one after the other"
    assert timeline.end_s[product] == pytest.approx(2e-3), "beside each other, in equal parts"
    assert timeline.end_s[updated[0]] == pytest.approx(both_s)


def test_the_collective_packs_sends_sorts_and_updates_in_turn() -> None:
    config = replace(CONFIG, exchange=ExchangeConfig(backend="torchrec"))
    found = simulate(config)
    work = found.work
    parts_ms = [
        2 * work.pooled_bytes / GPU.copy_gb_per_s / 1e6,
        GPU.collective_us / 1e3 + 3 * work.pair_bytes / GPU.collective_gb_per_s / 1e6,
        1e3 * sort_s(config, work)[1][0],
        1e3 * rows_s(config, work),
    ]
    assert found.ms == pytest.approx(sum(parts_ms), rel=1e-6)
    assert [seconds[1] for seconds in sort_s(config, work)] == pytest.approx([work.ids * 0.1e-9] * 2)
    launched = replace(config, gpu=replace(GPU, baseline_update=replace(RATES, sort_us=200.0)))
    assert simulate(launched).ms == pytest.approx(found.ms + 0.2, rel=1e-6)


def test_the_dense_part_counts_its_kernels_and_its_pairs() -> None:
    """A bottom MLP of one layer, a top MLP of two, five tables: 15 pairs of dim 64, 4096 samples, 3 products each."""
    model = ModelConfig(dim=64, bottom_mlp=[64], top_mlp=[32, 1])
    config = replace(CONFIG, model=model, work=replace(CONFIG.work, tables=5))
    work = build_workload(model, config.work, 4)
    found = dense_seconds(config, work)
    assert (found.bottom_forward_kernels, found.bottom_backward_kernels) == (2, 5)
    assert (found.head_forward_kernels, found.head_backward_kernels) == (2 * 3 + 9, 5 * 3)
    usual = dense_seconds(replace(config, gpu=replace(GPU, pair_tflop_per_s=None)), work)
    pairs_flop = 3 * 2 * 4096 * 15 * 64
    more_s = found.head_forward + found.head_backward - usual.head_forward - usual.head_backward
    rate = GPU.tflop_per_s * GPU.dense_efficiency
    assert more_s == pytest.approx(pairs_flop / 1e12 * (1 / 6.46 - 1 / rate))


def test_a_captured_step_waits_for_the_sort_of_the_fullest_rank() -> None:
    """Behind the lookup, the sort and the head's forward share the multiprocessors, here from the same moment on.

    Of four tables one has five ids a bag and the others have one. Each rank with a part of it sorts all of its ids, and
    one sorts two tables' more: 7 of the 8 ids of a sample, where the mean is 2.
    """
    gpu = replace(GPU, pgas=LookupConfig(1e6), update=replace(RATES, sort_ns=0.0, gb_per_s=1e6))
    work = replace(CONFIG.work, tables=4, multi_hot=[5, 1, 1, 1])
    config = replace(CONFIG, what="step", gpu=gpu, work=work, model=ModelConfig("dcn", 64, [64], [1024, 1]))
    without = simulate(config)
    most = float(without.work.shares.ids.max())
    assert most == pytest.approx(7 / 2)
    sorting = replace(config, gpu=replace(gpu, update=replace(gpu.update, sort_ns=0.01, sort_us=20.0)))
    sort_ms = most * without.work.ids * 0.01e-6
    assert sort_ms < 1e3 * dense_seconds(config, without.work).head_forward
    assert simulate(sorting).ms == pytest.approx(without.ms + sort_ms, rel=0.01)


def test_every_rank_has_the_work_that_the_plan_gives_it() -> None:
    """MLPerf's tables: on 8 ranks alike work, on 64 most of it on few ranks, which hold all; 28 hold none."""
    told = yaml.safe_load(Path("configs/simulate/mlperf_hosts.yaml").read_text())
    model, work = ModelConfig(**told["model"]), WorkConfig(**told["work"])
    few, many = (build_workload(model, work, ranks).shares for ranks in (8, 64))
    assert [few.memory.max(), few.links.max(), few.ids.max()] == pytest.approx([1.12, 1.08, 3.93], abs=0.005)
    assert [many.memory.max(), many.links.max(), many.ids.max()] == pytest.approx([3.74, 2.46, 29.91], abs=0.005)
    assert (few.idle_ranks, many.idle_ranks) == (0, 28)
    for shares in (few, many):
        assert [shares.memory.mean(), shares.links.mean()] == pytest.approx([1.0, 1.0])
    with pytest.raises(InputError, match="no room"):
        build_workload(model, replace(work, max_rows=None, rows=40_000_000), 2)


def test_the_work_of_tables_that_are_cut_by_rows() -> None:
    """Two hosts of two ranks; a table of two ids a bag is cut by rows over the first, one of one id is on rank 3."""
    tables = [PlannedTable(TableLoad(ids, 64, 256, 0), 100, range(ids, ids + 1)) for ids in (2, 1)]
    plan = [[Shard(0, 64, 0.5), Shard(1, 64, 0.5)], [Shard(3, 64, 1.0)]]
    ours, dense = (shares_of(tables, plan, 4, 2, dense=each) for each in (False, True))
    for found in (ours, dense):
        assert (found.memory * 3 / 4).tolist() == pytest.approx([1, 1, 0, 1]), "of 3 rows a sample"
        assert (found.ids * 3 / 4).tolist() == pytest.approx([1, 1, 0, 1])
        assert (found.links * 128 / 4).tolist() == pytest.approx([64, 64, 0, 64]), "of 128 columns"
    near = [48 + 64, 48 + 64, 0, 64]
    assert (ours.near * 32).tolist() == pytest.approx(near), "a fourth of the bags have no id, but all are gathered"
    assert (ours.away * 32).tolist() == pytest.approx([32, 32, 0, 64]), "each rank sends half of the sums"
    assert (ours.sums * 32).tolist() == pytest.approx([32, 32, 0, 0])
    assert (ours.gathered * 128).tolist() == pytest.approx([5 * 64, 5 * 64, 0, 0]), "two are read, and one is copied"
    added = [48 + 48 + 64, 48 + 48 + 64, 0, 0]
    assert (ours.added * 128).tolist() == pytest.approx(added), "two partial sums are read, one sum is written"
    assert (dense.near * 32).tolist() == pytest.approx([128, 128, 0, 64]), "the sums of both hosts' samples"
    assert (dense.away * 32).tolist() == pytest.approx([32, 32, 0, 64]), "of which each rank sends half on"
    assert not dense.added.any()


def test_rows_that_are_not_pooled_leave_their_owners_once() -> None:
    """Two hosts of two ranks; of four ids a sample three are distinct, and their table is cut by rows over all."""
    table = PlannedTable(TableLoad(4, 64, 256, 0, 100, pooled=False), 100, range(4, 5), distinct=3 / 4)
    plan = [[Shard(0, 64, 0.4), *[Shard(rank, 64, 0.2) for rank in (1, 2, 3)]]]
    for dense in (False, True):
        found = shares_of([table], plan, 4, 2, dense)
        for name in ("memory", "links", "ids", "near", "away"):
            assert getattr(found, name).tolist() == pytest.approx([1.6, 0.8, 0.8, 0.8]), name
        assert not any(getattr(found, name).any() for name in ("sums", "gathered", "added"))


@pytest.mark.parametrize("backend", ["torchrec", "fused"])
def test_partial_sums_travel_and_are_added_up(backend: str) -> None:
    """MLPerf's tables by TorchRec's planner on two hosts: table-row-wise shards, whose bytes the links carry."""
    network = replace(CONFIG.network, hosts=2, gpus_per_host=8)
    told = yaml.safe_load(Path("configs/simulate/mlperf_hosts.yaml").read_text())
    work = WorkConfig(**told["work"] | {"plan": "torchrec"})
    exchange = replace(CONFIG.exchange, backend=backend)
    model = ModelConfig(**told["model"])
    simulated = simulate(replace(CONFIG, what="stage", model=model, network=network, work=work, exchange=exchange))
    shares, W = simulated.work.shares, 16
    assert shares.memory.mean() == pytest.approx(1.0)
    assert shares.links.mean() > 1.2, "some tables are cut by rows"
    nics_out = simulated.timeline.carried[3 * W :][2 * W : 3 * W]
    assert nics_out == pytest.approx(8 * simulated.work.pair_bytes * shares.away)
    added = [activity for activity in simulated.timeline.activities if activity.name == "partial sums"]
    assert len(added) == (W if backend == "fused" else 0)
    assert shares.away.sum() < shares.links.sum(), "summed within the host first"
