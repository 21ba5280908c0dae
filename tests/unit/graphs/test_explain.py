"""Each table of a model is explained alike before and after it is sharded, and planned as constraints ask."""

from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding import rw_sharding
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dlrm_overlap import (
    GraphTrainPipeline,
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    constraints,
    explain,
)
from tests.conftest import refuses
from tests.distributed.models import CPU, SUM, Tables, table_configs

TABLES: Tables = {f"t{i}": (80, 256, [f"f{i}"], SUM) for i in range(6)}
FUSED = table_wise(0, compute_kernel="fused")


class Model(nn.Module):
    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(table_configs(tables), device=torch.device("meta"))
        self.dense = nn.Linear(1, 1)


def _plan(model: Model, world_size: int, *ways: ParameterShardingGenerator, fused: bool = True) -> ShardingPlan:
    by_table: Any = {config.name: way for config, way in zip(model.tables.embedding_bag_configs(), ways, strict=True)}
    sharder: Any = EmbeddingBagCollectionSharder({})
    made = construct_module_sharding_plan(model.tables, by_table, sharder, world_size // 2 or 1, world_size, "cpu")
    for sharding in made.values():
        if fused and sharding.sharding_type != "data_parallel":
            sharding.compute_kernel = "fused"
    return ShardingPlan({"tables": made})


def test_tables_beyond_the_devices_memory() -> None:
    """The exchange caches a table whose kernel is FBGEMM's cache; one that is not cached stays with TorchRec."""
    two = dict(list(TABLES.items())[:2])
    model = Model(two)
    plan = _plan(model, 2, FUSED, FUSED)
    kernels = {}
    for kernel in ("fused_uvm_caching", "fused_uvm"):
        next(iter(plan.plan["tables"].values())).compute_kernel = kernel  # type: ignore[attr-defined]
        found = explain(model, plan)
        kernels[kernel] = [(table.memory, table.exchanged) for table in found.tables]
    assert kernels["fused_uvm_caching"] == [("cached", True), ("device", True)]
    assert kernels["fused_uvm"] == [("host", False), ("device", False)]


def test_a_collection_whose_rows_torchrec_stashes_stays_with_it() -> None:
    model: Any = Model({"t0": TABLES["t0"], "t1": TABLES["t1"]})
    plan = _plan(model, 2, FUSED, row_wise())
    assert all(table.captured for table in explain(model, plan).tables)
    model.tables.embedding_bag_configs()[0].stash_weights = True
    params: Any = plan.plan["tables"]
    infos = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(model.tables, params, "embedding_bags.", {})
    if not any(getattr(each.embedding_config, "stash_weights", False) for tables in infos.values() for each in tables):
        pytest.skip("this TorchRec ignores it in collections whose tables are all on one kind of device")
    found = explain(model, plan).tables
    assert {table.why_not for table in found} == {"rows that TorchRec stashes in host memory during a step"}
    assert not any(table.exchanged or table.captured for table in found)


class Later(Enum):
    """A compute kernel of a later TorchRec."""

    UNHEARD = "unheard"


@pytest.mark.parametrize("kernel", [*EmbeddingComputeKernel, Later.UNHEARD], ids=lambda kernel: kernel.value)
def test_tables_of_other_compute_kernels_stay_with_torchrec(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model({"t0": TABLES["t0"], "t1": TABLES["t1"]})
    plan = _plan(model, 2, FUSED, row_wise())
    monkeypatch.setattr(rw_sharding, "EmbeddingComputeKernel", lambda _: kernel)
    known = "dense" if kernel is Later.UNHEARD else kernel.value  # TorchRec refuses the names of others
    plan.plan["tables"]["t1"].compute_kernel = known  # type: ignore[index]
    first, second = explain(model, plan).tables
    assert first.exchanged
    if kernel.value in ("fused", "fused_uvm_caching"):
        assert second.why_not is None
        return
    assert (second.exchanged, second.why_not) == (False, f"compute kernel {kernel.value}")
    kept = f"table t1 stays with TorchRec, with compute kernel {kernel.value}"
    assert first.why_not == (None if kernel.value == "fused_uvm" else kept)


def test_a_plan_of_every_sharding_type_without_a_process_group() -> None:
    model = Model(TABLES)
    ways = table_wise(3), column_wise([1, 0]), row_wise(), table_row_wise(1), grid_shard([0, 1]), data_parallel()
    found = explain(model, _plan(model, 4, *ways))
    assert all(each.captured and each.why_not is None for each in found.tables)
    assert [each.exchanged for each in found.tables] == [True] * 5 + [False]
    lines = [line.split() for line in str(found).splitlines()]
    assert lines[0][:6] == ["module", "table", "sharding", "ranks", "shard", "memory"]
    assert lines[2] == ["tables", "t1", "column_wise", "1", "0", "80", "x", "128", "device", "yes", "yes"]
    assert lines[3][3:9] == ["0-3", "20", "x", "256", "device", "yes"]
    assert lines[6][3:] == ["0-3", "whole", "device", "no", "yes"]


@pytest.mark.parametrize(
    ("fused_params", "fused", "why_not"),
    [
        ({}, True, None),
        ({}, False, "compute kernel dense"),
        ({"optimizer": EmbOptimType.LARS_SGD}, True, "optimizer lars_sgd"),
        ({"weight_decay": 0.1}, True, None),
    ],
    ids=["all", "dense", "adam", "decay"],
)
def test_reasons_of_a_plan(fused_params: dict[str, Any], fused: bool, why_not: str | None) -> None:
    model = Model({"t0": TABLES["t0"]})
    (found,) = explain(model, _plan(model, 4, row_wise(), fused=fused), fused_params=fused_params).tables
    assert (found.exchanged, found.why_not, found.captured) == (why_not is None, why_not, why_not is None)


def _sharded(sharder: Any, model: Model, group: dist.ProcessGroup) -> nn.Module:
    plan = _plan(model, 1, FUSED, row_wise(), fused=False)
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=[sharder])


def test_a_model_of_either_sharder_has_the_reasons_of_its_plan(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    two: Tables = {"t0": TABLES["t0"], "t1": TABLES["t1"]}
    model = Model(two)
    planned = explain(model, _plan(model, 1, FUSED, row_wise(), fused=False))
    stock = explain(_sharded(EmbeddingBagCollectionSharder({}), Model(two), world_of_one))
    sharded: Any = _sharded(OverlapEmbeddingBagCollectionSharder(), Model(two), world_of_one)
    ours = explain(sharded)
    with caplog.at_level("INFO", "dlrm_overlap"):
        GraphTrainPipeline(sharded, sharded.fused_optimizer, CPU)
    heading = "tables (on cpu no step is captured):"
    assert f"{heading}\n{ours}".rpartition("\n")[0] in caplog.text, "the pipeline's log has it once"
    assert planned == stock == ours
    found = [(each.exchanged, each.captured, each.why_not) for each in ours.tables]
    kept = "table t1 stays with TorchRec, with compute kernel dense"
    assert found == [(True, False, kept), (False, False, "compute kernel dense")]


def test_tables_of_feature_processors_have_the_reasons_of_their_plan(world_of_one: dist.ProcessGroup) -> None:
    tables = EmbeddingBagCollection(table_configs({"t0": TABLES["t0"]}), is_weighted=True, device=torch.device("meta"))
    processed = FeatureProcessedEmbeddingBagCollection(tables, PositionWeightedModuleCollection({"f0": 3}))
    model = nn.ModuleDict({"tables": processed, "dense": nn.Linear(1, 1)})
    sharder: Any = FeatureProcessedEmbeddingBagCollectionSharder(OverlapEmbeddingBagCollectionSharder())
    plan = ShardingPlan({"tables": construct_module_sharding_plan(processed, {"t0": FUSED}, sharder, 1, 1, "cpu")})
    planned, env = explain(model, plan), ShardingEnv.from_process_group(world_of_one)
    assert planned == explain(DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=[sharder]))
    (table,) = planned.tables
    assert (table.exchanged, table.captured) == (True, False)


@pytest.mark.parametrize(
    ("fused_params", "twice", "why_not"),
    [
        ({"gradient_clipping": True}, False, None),
        ({}, True, "an unpooled table lists a feature twice"),
        ({"optimizer": EmbOptimType.LARS_SGD}, False, "optimizer lars_sgd"),
    ],
    ids=["clipped", "twice", "optimizer"],
)
def test_unpooled_tables_of_a_plan(fused_params: dict[str, Any], twice: bool, why_not: str | None) -> None:
    configs = [
        EmbeddingConfig(name=f"t{i}", num_embeddings=100, embedding_dim=8, feature_names=[f"f{i}"] * (1 + twice))
        for i in range(2)
    ]
    model = nn.ModuleDict({"tables": EmbeddingCollection(configs, device=torch.device("meta"))})
    model["over"] = nn.Linear(2, 2)
    ways = {"t0": column_wise([0, 1], compute_kernel="fused"), "t1": row_wise(compute_kernel="fused_uvm_caching")}
    sharder: Any = OverlapEmbeddingCollectionSharder()
    plan = ShardingPlan({"tables": construct_module_sharding_plan(model["tables"], ways, sharder, 2, 2, "cpu")})
    found = explain(model, plan, fused_params=fused_params).tables
    assert [each.exchanged for each in found] == [why_not is None] * 2
    assert [each.memory for each in found] == ["device", "cached"]
    if why_not is None:
        assert all(each.captured and each.why_not is None for each in found)
    else:
        assert [(each.captured, each.why_not) for each in found] == [(False, why_not)] * 2


class Words(EmbeddingCollection):
    """A collection of a user's own class."""


def test_the_table_is_named_that_keeps_a_plan_from_being_captured() -> None:
    """By the reason of every table: the rest of the model would be captured."""
    model: Any = Model({"t0": TABLES["t0"], "t1": TABLES["t1"]})
    model.sequence = Words(
        tables=[EmbeddingConfig(name="words", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
        device=torch.device("meta"),
    )
    plan = _plan(model, 2, FUSED, data_parallel())
    sequence: Any = EmbeddingCollectionSharder()
    with_sequence = construct_module_sharding_plan(model.sequence, {"words": table_wise(0)}, sequence, 1, 2, "cpu")
    both = explain(model, ShardingPlan({"tables": plan.plan["tables"], "sequence": with_sequence}))
    told = "Words sequence, with tables words, stays with TorchRec, which waits for the host"
    assert [each.why_not for each in both.tables] == [told, told, "Words stays with TorchRec"]
    model.tables.embedding_bag_configs()[1].data_type = DataType.FP16
    (first, second) = explain(model, plan).tables
    assert first.why_not == second.why_not == "data-parallel table t1 stays with TorchRec: rows of type FP16"
    assert (first.exchanged, first.captured) == (True, False)


def test_all_that_the_planner_makes_under_the_constraints_is_exchanged() -> None:
    """On 16 ranks it cuts the columns of a table that no two of them could hold, and the rows of one of few ids."""
    tables: Tables = {f"t{i}": (rows, 128, [f"f{i}"], SUM) for i, rows in enumerate([40_000_000, 1000, 10])}
    model, sharder = Model(tables), OverlapEmbeddingBagCollectionSharder()
    topology = Topology(16, "cuda", hbm_cap=8 << 30, local_world_size=8)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, constraints=constraints(model, {"f0": 20}))
    found = explain(model, planner.plan(model, [sharder])).tables  # type: ignore[list-item]
    assert all(each.exchanged and each.captured for each in found)
    assert found[0].sharding not in ("table_wise", "data_parallel")
    assert constraints(model, {"f0": 20})["t0"].pooling_factors == [20]
    with refuses("bag_sizes: no table has clicks, t0; give features of the model's tables"):
        constraints(model, {"f0": 20, "t0": 20, "clicks": 3})


def test_unpooled_tables_are_planned_under_the_constraints_too() -> None:
    configs = [
        EmbeddingConfig(name=f"w{i}", num_embeddings=rows, embedding_dim=128, feature_names=[f"f{i}"])
        for i, rows in enumerate([30_000_000, 1000])
    ]
    model: Any = Model({"t0": TABLES["t0"]})
    model.sequences = EmbeddingCollection(configs, device=torch.device("meta"))
    asked = constraints(model, {"f1": 50})
    assert asked.keys() == {"t0", "w0", "w1"}
    assert asked["w1"].pooling_factors == [50]
    sharders: Any = [OverlapEmbeddingBagCollectionSharder(), OverlapEmbeddingCollectionSharder()]
    topology = Topology(8, "cuda", hbm_cap=8 << 30, local_world_size=8)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, constraints=asked)
    found = {table.table: table for table in explain(model, planner.plan(model, sharders)).tables}
    assert found.keys() == asked.keys()
    assert all(table.exchanged and table.captured for table in found.values())
    assert found["w0"].sharding in ("row_wise", "column_wise"), "no rank could hold it"


def test_the_dense_optimizer_is_explained() -> None:
    model = Model({"t0": TABLES["t0"]})
    model.over = nn.Linear(2, 2)
    plan = _plan(model, 2, row_wise())
    assert "dense optimizer" not in str(explain(model, plan))
    captured = explain(model, plan, optimizer=torch.optim.AdamW(model.over.parameters()))
    assert str(captured).endswith("\ndense optimizer: captured")
    after = explain(model, plan, optimizer=torch.optim.Adamax(model.over.parameters()))
    assert str(after).endswith(
        "\ndense optimizer: steps after the graphs: Adamax is none of torch.optim's SGD, Adagrad, Adam and AdamW"
    )


def test_a_model_that_is_not_sharded_needs_a_plan() -> None:
    with refuses("no module of the model is sharded"):
        explain(Model({"t0": TABLES["t0"]}))
