"""Any TorchRec model under the drop-in sharder: outputs, by name, and weights are stock TorchRec's to the last bit."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.forward import BACKENDS
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, exchanges
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.pipeline import build_pipeline
from tests.agreement import assert_same
from tests.distributed.workers import run_ranks

CPU = torch.device("cpu")
STEPS = 3
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
# Table -> rows, dim, features, pooling. Two tables share a feature, and one of them has another of its own.
TABLES: dict[str, tuple[int, int, list[str], PoolingType]] = {
    "narrow": (30, 4, ["f0"], SUM),
    "mean": (20, 8, ["shared"], MEAN),
    "two_features": (50, 64, ["shared", "f2"], SUM),
    "small": (10, 8, ["f3"], SUM),
    "wide_mean": (40, 64, ["f4"], MEAN),
}
OTHER_TABLES = {"other": (25, 8, ["f5"], SUM)}  # of a second module
ROWS = {
    "f4": 40,
    "f2": 50,
    "unused": 3,
    "f0": 30,
    "f5": 25,
    "f3": 10,
    "shared": 20,
}  # in another order than the tables'

# Table -> ranks of its shards: one is table-wise, several are column-wise, none is data-parallel.
TABLE_WISE = {"narrow": [0], "mean": [1], "two_features": [0], "small": [1], "wide_mean": [1]}
PLANS = {
    "table_wise": TABLE_WISE,
    "rank_0_without_tables": {table: [1] for table in TABLE_WISE},
    "columns": TABLE_WISE | {"wide_mean": [0, 1], "two_features": [1, 1, 0, 0]},
    "columns_of_one_rank": TABLE_WISE | {"wide_mean": [1, 1], "mean": [0, 0]},
    "data_parallel": TABLE_WISE | {"small": [], "wide_mean": []},
    "columns_and_data_parallel": TABLE_WISE | {"wide_mean": [1, 0, 1, 0], "narrow": []},
}


@dataclass(frozen=True)
class Case:
    """A model, its plan and its batches."""

    plan: str = "columns"
    """of PLANS, or the planner's"""
    backend: str = "pgas"
    batch_sizes: tuple[int, int] = (5, 5)
    ids: torch.dtype = torch.int32
    fused_params: dict[str, Any] = field(default_factory=dict)
    pipeline: str = "none"
    weighted: bool = False
    rows: DataType = DataType.FP32


ADAGRAD, ROWWISE_ADAGRAD = EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD
DECAY = {"optimizer": ROWWISE_ADAGRAD, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
CASES = {plan: Case(plan) for plan in (*PLANS, "planner")} | {
    "int64": Case(ids=torch.int64),
    "uneven_batches": Case("columns_and_data_parallel", batch_sizes=(2, 9)),
    "an_empty_batch": Case(batch_sizes=(4, 0)),
    "empty_batches": Case(batch_sizes=(0, 0)),
    "adagrad": Case(fused_params={"optimizer": ADAGRAD}),
    "rowwise_adagrad": Case(fused_params={"optimizer": ROWWISE_ADAGRAD}),
    "weight_decay": Case(fused_params=DECAY),
    "train_pipeline": Case("columns_and_data_parallel", pipeline="sparse_dist"),
    "fp16_rows": Case(rows=DataType.FP16),
    "weighted": Case(weighted=True),
}
ALL_CASES = {
    f"{name}_{backend}": replace(case, backend=backend) for name, case in CASES.items() for backend in BACKENDS
}


def _tables(tables: dict[str, tuple[int, int, list[str], PoolingType]], rows: DataType) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=count, embedding_dim=dim, feature_names=features, pooling=pooling, data_type=rows
        )
        for name, (count, dim, features, pooling) in tables.items()
    ]


class Model(nn.Module):
    """Two embedding modules, and a loss whose gradient differs in every element."""

    def __init__(self, weighted: bool = False, rows: DataType = DataType.FP32) -> None:
        super().__init__()
        tables, meta = _tables(TABLES, rows), torch.device("meta")
        self.embedding = EmbeddingBagCollection(tables, is_weighted=weighted, device=meta)
        self.other = EmbeddingBagCollection(_tables(OTHER_TABLES, rows), is_weighted=weighted, device=meta)
        self.names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self.dense = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.dense.weight)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pooled, other = self.embedding(batch.sparse), self.other(batch.sparse)
        scale = self.dense(batch.dense)
        by_name = other.to_dict()  # waits for the later one first
        outputs = {"f5": by_name["f5"]}
        by_name = pooled.to_dict()
        outputs.update({name: by_name[name] for name in self.names})
        losses = [(output.square() * scale).sum() for output in outputs.values()]
        return torch.stack(losses).sum() * 0.01, {name: output.detach().clone() for name, output in outputs.items()}


def _sharding(ranks: list[int]) -> ParameterShardingGenerator:
    if not ranks:
        return data_parallel()
    return (
        table_wise(ranks[0], compute_kernel="fused") if len(ranks) == 1 else column_wise(ranks, compute_kernel="fused")
    )


def _make_plan(name: str, model: Model, sharder: ModuleSharder) -> ShardingPlan:
    if name == "planner":
        allowed = ParameterConstraints(
            sharding_types=["table_wise", "column_wise"], compute_kernels=["fused"], min_partition=32
        )
        constraints = dict.fromkeys([*TABLES, *OTHER_TABLES], allowed)
        topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        return planner.collective_plan(model, [sharder], _world())
    ranks = {"embedding": PLANS[name], "other": {"other": [0]}}
    return ShardingPlan(
        {
            module: construct_module_sharding_plan(
                model.get_submodule(module),
                {table: _sharding(shards) for table, shards in tables.items()},
                sharder,
                local_size=2,
                world_size=2,
                device_type="cpu",
            )
            for module, tables in ranks.items()
        }
    )


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _batches(case: Case) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = case.batch_sizes[dist.get_rank()]
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(ROWS), samples), generator=generator)
        values = [
            torch.randint(0, rows, (int(bags.sum()),), generator=generator)
            for rows, bags in zip(ROWS.values(), lengths, strict=True)
        ]
        ids = torch.cat(values).to(case.ids)
        weights = torch.rand(ids.numel(), generator=generator) if case.weighted else None
        sparse = KeyedJaggedTensor(list(ROWS), ids, weights=weights, lengths=lengths.flatten().to(case.ids))
        yield Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0))


def _train(case: Case, sharder: ModuleSharder) -> dict[str, Any]:
    """Return what STEPS steps give on this rank: outputs, weights, and which backends exchanged."""
    model = Model(case.weighted, case.rows)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(_world()),
        device=CPU,
        plan=_make_plan(case.plan, model, sharder),
        sharders=[sharder],
    )
    initialise_tables(sharded, seed=0)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    for parameter in dense.values():  # the data-parallel tables among them
        nn.init.uniform_(parameter.data, 0.5, 1.0, generator=torch.Generator().manual_seed(0))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", dense_optimizer)])
    pipeline, batches = build_pipeline(case.pipeline, sharded, optimizer, CPU), _batches(case)
    outputs = [pipeline.progress(batches) for _ in range(STEPS)]
    weights = {
        f"{name}, shard {i}": tensor.clone()
        for name, weight in sharded.state_dict().items()
        for i, tensor in enumerate(
            [shard.tensor for shard in weight.local_shards()] if isinstance(weight, ShardedTensor) else [weight]
        )
    }
    used = [exchange.options.backend for exchange in exchanges(sharded)]
    for exchange in exchanges(sharded):
        exchange.close()
    return {"outputs": outputs, "weights": weights, "exchanged": used}


def _train_both(folder: Path) -> None:
    """Train every case with stock TorchRec and with the drop-in, and save what both gave."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dlrm_overlap").addHandler(handler)
    for name, case in ALL_CASES.items():
        params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, **case.fused_params}
        stock = _train(case, EmbeddingBagCollectionSharder(dict(params)))
        messages.clear()
        ours = _train(case, OverlapEmbeddingBagCollectionSharder(dict(params), backend=case.backend, slice_bags=4))
        torch.save({"stock": stock, "ours": ours, "log": list(messages)}, folder / f"{name}_{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharder")
    run_ranks(_train_both, 2, folder)
    return folder


@pytest.mark.parametrize("name", ALL_CASES)
def test_outputs_and_weights(folder: Path, name: str) -> None:
    for rank in range(2):
        saved = torch.load(folder / f"{name}_{rank}.pt")
        stock, ours = saved["stock"], saved["ours"]
        for step, (outputs, expected) in enumerate(zip(ours["outputs"], stock["outputs"], strict=True)):
            assert list(outputs) == list(expected)
            for key in expected:
                assert_same(outputs[key], expected[key], f"rank {rank}, step {step}, output {key}")
        assert list(ours["weights"]) == list(stock["weights"])
        for key, weight in stock["weights"].items():
            assert_same(ours["weights"][key], weight, f"rank {rank}, {key}")


@pytest.mark.parametrize("name", ALL_CASES)
def test_what_falls_back_is_logged_once(folder: Path, name: str) -> None:
    case = ALL_CASES[name]
    reasons = []
    if case.weighted:
        reasons = ["table_wise tables stay with TorchRec: bags have weights"] * 2
        reasons += ["column_wise tables stay with TorchRec: bags have weights"]
    elif not all(PLANS.get(case.plan, TABLE_WISE).values()):
        reasons = ["data_parallel tables stay with TorchRec: only table-wise and column-wise shards are exchanged"]
    for rank in range(2):
        saved = torch.load(folder / f"{name}_{rank}.pt")
        lines = [f"backend {case.backend}: {reason}" for reason in reasons] if rank == 0 else []
        assert sorted(saved["log"]) == sorted(lines)
        assert saved["ours"]["exchanged"] == ([] if case.weighted else [case.backend] * 2)


def _bf16_codecs() -> dict[str, QuantizedCommCodecs] | None:
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16))


FUSED = table_wise(0, compute_kernel="fused")


@pytest.mark.parametrize(
    ("way", "params", "codecs", "reason"),
    [
        (row_wise(compute_kernel="fused"), {}, None, "only table-wise and column-wise shards are exchanged"),
        (table_wise(0, compute_kernel="dense"), {}, None, "compute kernel dense"),
        (FUSED, {"optimizer": EmbOptimType.EXACT_ADAGRAD, "gradient_clipping": True}, None, "gradient clipping"),
        (FUSED, {"output_dtype": SparseType.FP16}, None, "output of type fp16"),
        (FUSED, {}, _bf16_codecs, "quantised communication: use wire_dtype instead"),
    ],
    ids=["row_wise", "dense", "gradient_clipping", "output_dtype", "codecs"],
)
def test_reasons_to_fall_back(
    world_of_one: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    way: ParameterShardingGenerator,
    params: dict[str, Any],
    codecs: Callable[[], dict[str, QuantizedCommCodecs] | None] | None,
    reason: str,
) -> None:
    sharder: Any = OverlapEmbeddingBagCollectionSharder(params, codecs and codecs())
    module = EmbeddingBagCollection(_tables(OTHER_TABLES, DataType.FP32), device=torch.device("meta"))
    plan = construct_module_sharding_plan(module, {"other": way}, sharder, 1, 1, "cpu")
    sharded = sharder.shard(module, dict(plan), ShardingEnv.from_process_group(world_of_one), CPU)
    assert sharded.exchange is None
    lines = [record.getMessage() for record in caplog.records if record.name == "dlrm_overlap"]
    assert len(lines) == 1
    assert lines[0].endswith(f" tables stay with TorchRec: {reason}")


@pytest.mark.parametrize(
    ("option", "value"), [("backend", "x"), ("schedule", "x"), ("wire_dtype", "x"), ("slice_bags", 3)]
)
def test_wrong_arguments_are_told_in_one_line(option: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{option}.*{value}") as raised:
        OverlapEmbeddingBagCollectionSharder(**{option: value})
    assert "\n" not in str(raised.value)
