"""Plans of TorchRec's default planner for MLPerf's tables: all is exchanged and captured, and trains as under TorchRec.

The plans are made for the tables at their full size and for GPUs, which no test has, and then scaled to a few rows.
"""

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near
from tests.conftest import configuration
from tests.distributed.models import SUM, Model, Tables, make_plan, table_configs, train
from tests.distributed.workers import logged_messages, run_ranks

pytestmark = pytest.mark.slow

MLPERF = configuration("--config", "configs/mlperf_dcnv2.yaml").data.tables
TABLES, FULL_DIM, DIM, BATCH = MLPERF.number(), 128, 16, 8192
STEPS, SAMPLES = 3, 3
GPU_BYTES = 141 * 10**9
PARAMS = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-3}


class Case(NamedTuple):
    """A plan: of how many ranks and hosts, whether the planner knows the ids a bag, and the cuts that it takes."""

    ranks: int
    hosts: int
    knows_ids: bool
    cuts: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.ranks}_{self.hosts}_{self.knows_ids}"


CASES = [
    Case(4, 1, False, {"table_wise": 26}),
    Case(4, 1, True, {"table_wise": 25, "row_wise": 1}),
    Case(8, 1, False, {"table_column_wise": 25, "table_wise": 1}),
    Case(8, 1, True, {"table_wise": 24, "row_wise": 2}),
    Case(8, 2, True, {"table_wise": 23, "table_row_wise": 3}),
]


def _tables(scaled: bool) -> Tables:
    assert isinstance(MLPERF.rows, list)
    rows = [max(3, -(-rows // 100_000)) for rows in MLPERF.rows] if scaled else MLPERF.rows
    dim = DIM if scaled else FULL_DIM
    return {f"t{number}": (count, dim, [f"f{number}"], SUM) for number, count in enumerate(rows)}


def _ids_a_bag() -> list[int]:
    assert isinstance(MLPERF.multi_hot, list)
    return [int(ids) for ids in MLPERF.multi_hot]


def _full_plan(case: Case) -> dict[str, ParameterSharding]:
    """Return table -> its sharding by the default planner, with the constraint that the sharder's page asks for."""
    tables = _tables(scaled=False)
    model = nn.ModuleDict({"embedding": EmbeddingBagCollection(table_configs(tables), device=torch.device("meta"))})
    constraints = {
        name: ParameterConstraints(compute_kernels=["fused"], pooling_factors=[float(ids)] if case.knows_ids else [1.0])
        for name, ids in zip(tables, _ids_a_bag(), strict=True)
    }
    topology = Topology(case.ranks, "cuda", hbm_cap=GPU_BYTES, local_world_size=case.ranks // case.hosts)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, constraints=constraints)
    sharder: Any = OverlapEmbeddingBagCollectionSharder(dict(PARAMS))
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD).plan["embedding"]
    assert isinstance(plan, EmbeddingModuleShardingPlan)
    return dict(plan)


def _scaled(sharding: ParameterSharding, rows: int, case: Case) -> ParameterSharding:
    """Return the same cut of a table of fewer rows and columns, on the same ranks, which are CPUs."""
    assert sharding.ranks is not None
    assert isinstance(sharding.sharding_spec, EnumerableShardingSpec)
    columns = sharding.sharding_spec.shards[0].shard_sizes[1] * DIM // FULL_DIM
    table, local_size = torch.empty(rows, DIM, device="meta"), case.ranks // case.hosts
    cuts = calculate_shard_sizes_and_offsets(table, case.ranks, local_size, sharding.sharding_type, columns)
    shards = [
        ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")
        for sizes, offsets, rank in zip(*cuts, sharding.ranks, strict=True)
    ]
    return ParameterSharding(
        sharding.sharding_type, sharding.compute_kernel, sharding.ranks, EnumerableShardingSpec(shards)
    )


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tables, batches = _tables(scaled=True), []
    for _ in range(STEPS):
        lengths = torch.stack([torch.randint(0, n + 1, (SAMPLES,), generator=generator) for n in _ids_a_bag()])
        values = [
            torch.randint(0, rows, (int(bags.sum()),), generator=generator)
            for (rows, *_), bags in zip(tables.values(), lengths, strict=True)
        ]
        names = [names[0] for _, _, names, _ in tables.values()]
        sparse = KeyedJaggedTensor(names, torch.cat(values), lengths=lengths.flatten())
        batches.append(Batch(torch.rand(SAMPLES, 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _train(case: Case, full: dict[str, ParameterSharding], others: Tables, sharder: Any, kind: str) -> dict[str, Any]:
    tables = _tables(scaled=True)
    model = Model(tables, others)
    scaled = {name: _scaled(full[name], tables[name][0], case) for name in tables}
    plan = make_plan(model, {name: [0] for name in tables}, {"other": [1]}, sharder)
    plan.plan["embedding"] = EmbeddingModuleShardingPlan(scaled)
    return train(model, plan, sharder, _batches(), kind)


def _train_all(folder: Path) -> None:
    messages = logged_messages()
    logging.getLogger("dlrm_overlap").setLevel(logging.INFO)
    others: Tables = {"other": (40, 8, ["f5"], SUM)}
    for case in (each for each in CASES if each.ranks == dist.get_world_size()):
        os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks // case.hosts)
        full = _full_plan(case)
        cuts = Counter(sharding.sharding_type for sharding in full.values())
        assert cuts == case.cuts, cuts
        stock = _train(case, full, others, EmbeddingBagCollectionSharder(dict(PARAMS)), "none")
        messages.clear()
        ours = _train(case, full, others, OverlapEmbeddingBagCollectionSharder(dict(PARAMS)), "graph")
        saved = {"stock": stock, "ours": ours | {"log": list(messages)}}
        torch.save(saved, folder / f"{case.name}_{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("default_plans")
    for ranks in dict.fromkeys(case.ranks for case in CASES):
        (folder / str(ranks)).mkdir()
        run_ranks(_train_all, ranks, folder / str(ranks))
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_default_plans_train_as_under_torchrec(folder: Path, case: Case) -> None:
    for rank in range(case.ranks):
        saved = torch.load(folder / str(case.ranks) / f"{case.name}_{rank}.pt")
        ours, stock = saved["ours"], saved["stock"]
        for step, pair in enumerate(zip(ours["outputs"], stock["outputs"], strict=True)):
            assert_all_near(*pair, WEIGHT_TOLERANCE["fp32"], f"rank {rank}, step {step}, output")
        assert_all_near(ours["weights"], stock["weights"], WEIGHT_TOLERANCE["fp32"], f"rank {rank}, weight")
        lines = [f"backend pgas: {tables} of {tables} tables exchanged, update by push" for tables in (TABLES, 1)]
        found = [
            line
            for line in ours["log"]
            if not line.startswith(("tables:", "train pipeline: a batch", "train pipeline: step"))
        ]
        assert found == (lines if rank == 0 else []), "all tables are exchanged, and the steps are captured"
