"""The plan that a run gets, and what is said of it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from dlrm_overlap.config import Config
from dlrm_overlap.embedding import plan
from dlrm_overlap.embedding.balance import Balance, TableLoad
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.plan import build_topology, cached_tables, make_plan
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.train.model import build_model
from tests.conftest import refuses

_ROWS, _POOLING = [100, 50, 20, 10], [1.0, 2.0, 3.0, 4.0]


def _config(*options: str) -> Config:
    argv = ["--config", "configs/quickstart.yaml", "--embedding.backend", "torchrec", *options]
    return parse_config(Config, "train", "", argv)[0]


def _plan(config: Config, group: dist.ProcessGroup, rows: list[int] | None = None) -> ShardingPlan:
    module = build_model(config.model, config.embedding, rows or _ROWS, 13, seed=0)
    topology = build_topology(torch.device("cpu"), 1, 1)
    sharders = build_sharders(config.embedding, "fp32", 0)
    return make_plan(module, sharders, topology, config.embedding, _POOLING, 8, group)


@pytest.mark.parametrize("kind", ["torchrec", "table_wise", "column_wise"])
def test_torchrecs_planner_plans_all_tables(world_of_one: dist.ProcessGroup, kind: str) -> None:
    made = _plan(_config("--embedding.plan", kind), world_of_one)
    assert sorted(made.plan["embedding"]) == ["t_00", "t_01", "t_02", "t_03"]  # type: ignore[arg-type]


def test_tables_that_do_not_fit(world_of_one: dist.ProcessGroup) -> None:
    with refuses(r"embedding.plan: no plan of kind auto fits \(\d+ bytes of tables on 1 ranks"):
        _plan(_config(), world_of_one, [10**12, 50, 20, 10])


@pytest.mark.parametrize(
    ("memory", "room", "expected"),
    [
        ("gpu", 0, ""),
        ("cached", 1 << 40, "0 1 2 3"),
        ("auto", 1 << 40, ""),
        ("auto", 9241, "0"),  # of 12,240 bytes; of table 0 it takes 50 rows of 68 bytes, and 4 bytes for each of 100
        ("auto", 9239, "0 1"),
        ("[auto,cached,gpu,gpu]", 1 << 40, "1"),
        ("[gpu,auto,gpu,auto]", 0, "1 3"),
    ],
)
def test_the_largest_tables_are_cached(memory: str, room: int, expected: str) -> None:
    config = _config("--embedding.memory", memory, *(["--embedding.cache_fraction", "0.5"] if memory != "gpu" else []))
    loads = {str(t): TableLoad(1.0, 16, 64, 68 * rows, rows) for t, rows in enumerate(_ROWS)}
    assert cached_tables(loads, config.embedding, room) == {*expected.split()}


def test_cached_tables_of_a_plan(world_of_one: dist.ProcessGroup) -> None:
    with refuses(r"embedding\.memory: 2 values for 4 tables"):
        _plan(_config("--embedding.memory", "[gpu,auto]"), world_of_one)
    kernels = {"t_00": "fused", "t_01": "fused_uvm_caching", "t_02": "fused", "t_03": "fused"}
    for kind in ("auto", "table_wise"):
        made = _plan(_config("--embedding.memory", "[gpu,cached,gpu,gpu]", "--embedding.plan", kind), world_of_one)
        tables = made.plan["embedding"].items()  # type: ignore[attr-defined]
        assert {name: each.compute_kernel for name, each in tables} == kernels


def test_torchrecs_own_plan_has_shards_of_any_type(world_of_one: dist.ProcessGroup) -> None:
    """Of MLPerf's tables on four GPUs: the one of 100 ids a bag is cut by rows."""
    options = ["--config", "configs/mlperf_dcnv2.yaml", "--embedding.plan", "torchrec"]
    options += ["--embedding.backend", "torchrec"]
    config = parse_config(Config, "train", "", options)[0]
    rows, pooling = config.data.tables.rows, config.data.tables.multi_hot
    assert isinstance(rows, list)
    assert isinstance(pooling, list)
    module = build_model(config.model, config.embedding, rows, 13, seed=0)
    topology, mean = Topology(4, "cuda", hbm_cap=141 * 10**9, local_world_size=4), [float(ids) for ids in pooling]
    sharders: list[Any] = build_sharders(config.embedding)[:1]
    tables = make_plan(module, sharders, topology, config.embedding, mean, 8192, world_of_one).plan["embedding"]
    kinds = {name: sharding.sharding_type for name, sharding in tables.items()}  # type: ignore[attr-defined]
    assert [name for name, kind in kinds.items() if kind == "row_wise"] == ["t_20"]
    assert Counter(kinds.values()) == {"table_wise": 25, "row_wise": 1}


def test_histories_have_shards_of_their_own(world_of_one: dist.ProcessGroup) -> None:
    options = ["--model.sequence.history", "2", "--model.sequence.candidate", "3", "--embedding.memory", "cached"]
    made = _plan(_config(*options), world_of_one)
    types = {
        path: {name: (each.sharding_type, each.compute_kernel) for name, each in tables.items()}  # type: ignore[attr-defined]
        for path, tables in made.plan.items()
    }
    whole = ("table_wise", "fused_uvm_caching")
    assert types == {"embedding": dict.fromkeys(("t_00", "t_01", "t_03"), whole), "history": {"t_02": whole}}


def test_state_is_room_too(world_of_one: dist.ProcessGroup) -> None:
    config = _config("--embedding.optimizer", "adagrad")
    topology = build_topology(torch.device("cpu"), 1, 1)
    room = topology.devices[0].storage.ddr * 0.8
    dim = config.model.dim
    rows = [int(room / (6 * dim)), 50, 20, 10]  # fits as rows, not with Adagrad's state
    with refuses("no plan of kind auto"):
        _plan(config, world_of_one, rows)
    sgd = replace(config, embedding=replace(config.embedding, optimizer="sgd"))
    _plan(sgd, world_of_one, rows)


def test_auto_cuts_what_balance_cuts(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = Balance([[1, 0], [0], [1], [0]], memory=1.0, links=1.0, by_rows=frozenset({3}))
    given: list[list[TableLoad]] = []
    may_cut: list[bool] = []

    def balance(tables: list[TableLoad], _: int, __: int, cut: bool, machine_size: int | None) -> Balance:
        assert machine_size is None
        given.append(tables)
        may_cut.append(cut)
        return placed

    monkeypatch.setattr(plan, "balance", balance)
    tables = _plan(_config(), world_of_one).plan["embedding"]
    found = {
        name: (
            sharding.sharding_type,
            [(s.placement.rank(), s.shard_offsets[1], s.shard_sizes[1]) for s in sharding.sharding_spec.shards],
        )
        for name, sharding in tables.items()  # type: ignore[attr-defined]
    }
    assert found == {
        "t_00": ("column_wise", [(1, 0, 8), (0, 8, 8)]),
        "t_01": ("table_wise", [(0, 0, 16)]),
        "t_02": ("table_wise", [(1, 0, 16)]),
        "t_03": ("row_wise", [(0, 0, 16)]),
    }
    row_bytes = 4 * 16
    _plan(_config("--embedding.optimizer", "adagrad"), world_of_one)
    assert may_cut == [False, True], "row-wise state would depend on the cuts"
    assert given[:1] == [
        [TableLoad(p, 16, row_bytes, n * (row_bytes + 4), n) for n, p in zip(_ROWS, _POOLING, strict=True)]
    ]


@pytest.mark.parametrize(("backend", "refused"), [("pgas", False), ("torchrec", True)])
def test_tables_of_any_id_are_cached_by_our_exchange(
    world_of_one: dist.ProcessGroup, backend: str, refused: bool
) -> None:
    config = _config("--embedding.memory", "[gpu,cached,cached,gpu]", "--embedding.backend", backend)
    module = build_model(config.model, config.embedding, [128, 128, 20, 10], 13, seed=0, any_id=[0, 1])
    topology, sharders = build_topology(torch.device("cpu"), 1, 1), build_sharders(config.embedding)
    arguments = module, sharders, topology, config.embedding, _POOLING, 8, world_of_one
    if refused:
        with refuses("embedding.memory: t_01 is to be cached, but with backend torchrec .* take backend pgas or fused"):
            make_plan(*arguments)
        return
    tables: Any = {name: each for of in make_plan(*arguments).plan.values() for name, each in of.items()}  # type: ignore[attr-defined]
    expected = {"t_00": "fused", "t_01": "fused_uvm_caching", "t_02": "fused_uvm_caching", "t_03": "fused"}
    assert {name: each.compute_kernel for name, each in tables.items()} == expected


def test_histories_of_any_id_are_not_cached(world_of_one: dist.ProcessGroup) -> None:
    options = ["--embedding.memory", "cached", "--embedding.backend", "pgas"]
    config = _config(*options, "--model.sequence.history", "0", "--model.sequence.candidate", "1")
    module = build_model(config.model, config.embedding, [128, 128, 20, 10], 13, seed=0, any_id=[0, 1])
    topology, sharders = build_topology(torch.device("cpu"), 1, 1), build_sharders(config.embedding)
    with refuses("embedding.memory: t_00 is to be cached, but a history of any id has its rows in GPU memory"):
        make_plan(module, sharders, topology, config.embedding, _POOLING, 8, world_of_one)


def test_the_map_of_a_cached_table_stays_on_the_gpu() -> None:
    config = _config("--embedding.memory", "auto", "--embedding.cache_fraction", "0.5").embedding
    load = TableLoad(1.0, 16, 64, (68 + 13) * 1280, 1280, True, 13 * 1280)
    held = 68 * 640 + 4 * 1280 + 13 * 1280 + 68 * 10  # slots, their index, the map, reserved rows
    assert plan._held_bytes(load, config) == pytest.approx(held)
