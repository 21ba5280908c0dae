"""Tables that are cut by rows, on four CPU ranks of two emulated hosts: the drop-in against stock TorchRec."""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_row_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near
from tests.distributed.models import CPU, MEAN, SUM, Model, Shards, Tables, make_plan, table_configs, train
from tests.distributed.workers import logged_messages, run_ranks

RANKS, HOST = 4, 2
STEPS = 3
WAYS = ["nccl", "pgas", "fused", "pgas_graph", "fused_graph", "pgas_hosts", "pgas_graph_hosts"]
"""the backend; the pipeline where it is not TorchRec's simplest; whether messages go between two emulated hosts"""
PLANS = 6


@dataclass(frozen=True)
class Drawn:
    """A model, its plan and its batches, drawn at random."""

    tables: Tables
    shards: Shards
    rows: dict[str, int]
    """of the table of each feature"""
    samples: int
    optimizer: EmbOptimType

    @property
    def named_shards(self) -> str:
        return ", ".join(f"{name} {rows} x {dim}" for name, (rows, dim, _, _) in self.tables.items())


def _fused(cut: ParameterShardingGenerator) -> ParameterShardingGenerator:
    """Return the cut with the fused lookup, which not every one of TorchRec's generators can be asked for."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        sharding = cut(*args, **kwargs)
        sharding.compute_kernel = "fused"
        return sharding

    return generate


def _drawn(seed: int) -> Drawn:
    """Draw five tables: of each way to cut rows one or two, and one that is not cut by rows; two share a feature."""
    draw = random.Random(seed)
    tables: dict[str, Any] = {}
    cuts = [
        _fused(row_wise()),
        _fused(table_row_wise(draw.randrange(RANKS // HOST))),
        _fused(grid_shard([0, 1] if draw.random() < 0.5 else [1, 0])),
        draw.choice([[draw.randrange(RANKS)], draw.sample(range(RANKS), 2), []]),
        _fused(row_wise()),
    ]
    # Fewer rows than ranks, and no multiple of them. The last table is in one lookup with the first, which so has rows
    # on every rank: FBGEMM takes a lookup without any for one on a GPU.
    counts = [draw.choice([1, 3, 10]), 33, draw.choice([2, 7, 40]), draw.choice([1, 7, 40]), 13]
    # TorchRec's generator cuts the columns of a grid into blocks of 128.
    dims = [draw.choice([8, 64]), draw.choice([4, 64]), 256, 64, 0]
    dims[4] = dims[0]
    # Stock TorchRec sums the means of a grid's shares, and divides sums where a feature is pooled both ways.
    means = seed % 3 == 0, False, False, seed % 2 == 0, seed % 3 == 0
    features = [["f0"] if means[0] else ["shared", "f0"], ["shared"], ["f2"], ["f3"], ["f4"]]
    for number, columns in enumerate(
        zip(counts, dims, features, (MEAN if mean else SUM for mean in means), strict=True)
    ):
        count, dim, names, pooling = columns
        tables[f"t{number}"] = (count, dim, names, pooling)
    rows = {name: min(t[0] for t in tables.values() if name in t[2]) for names in features for name in names}
    shards = {f"t{number}": cut for number, cut in enumerate(cuts)}
    samples = draw.randrange(1, 7)  # of every rank: gloo's gather of gradients, which stock takes, knows no others
    optimizer = draw.choice([EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD])
    return Drawn(tables, shards, rows, samples, optimizer)


def _batches(drawn: Drawn, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed * RANKS + dist.get_rank())
    samples, batches = drawn.samples, []
    for _ in range(STEPS):
        lengths = torch.randint(0, 5, (len(drawn.rows), samples), generator=generator)
        values = [
            torch.randint(0, rows, (int(bags.sum()),), generator=generator)
            for rows, bags in zip(drawn.rows.values(), lengths, strict=True)
        ]
        sparse = KeyedJaggedTensor(list(drawn.rows), torch.cat(values), lengths=lengths.flatten())
        batches.append(Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _train(drawn: Drawn, seed: int, sharder: Any, pipeline: str = "none") -> dict[str, Any]:
    others: Tables = {"other": (40, 8, [next(iter(drawn.rows))], SUM)}
    model = Model(drawn.tables, others)
    plan = make_plan(model, drawn.shards, {"other": [1]}, sharder, local_size=HOST)
    # Stock TorchRec trains without a pipeline, whatever it is compared with.
    return train(model, plan, sharder, _batches(drawn, seed), pipeline)


def _train_all(folder: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(HOST)
    messages = logged_messages()
    for seed in range(PLANS):
        drawn = _drawn(seed)
        params = {"optimizer": drawn.optimizer, "learning_rate": 0.5, "eps": 1e-3}
        saved = {"stock": _train(drawn, seed, EmbeddingBagCollectionSharder(dict(params)))}
        for way in WAYS:
            backend, hosts = way.partition("_")[0], RANKS // HOST if way.endswith("hosts") else "auto"
            pipeline = "graph" if "graph" in way else "none"
            ours = OverlapEmbeddingBagCollectionSharder(dict(params), backend=backend, slice_bags=4, hosts=hosts)
            messages.clear()
            saved[way] = _train(drawn, seed, ours, pipeline) | {"log": list(messages)}
        torch.save(saved, folder / f"{seed}_{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("row_shards")
    run_ranks(_train_all, RANKS, folder)
    return folder


@pytest.mark.parametrize("bad", [-1, 5, 1 << 31, 1 << 40])
def test_an_id_outside_a_table_that_is_cut_by_rows(world_of_one: dist.ProcessGroup, bad: int) -> None:
    """Where ids are sent by the exchange, the owner of the last rows reports it, by the bounds check's mode."""
    module = EmbeddingBagCollection(table_configs({"t": (5, 4, ["f"], SUM)}), device=torch.device("meta"))
    sharder: Any = OverlapEmbeddingBagCollectionSharder({"bounds_check_mode": BoundsCheckMode.FATAL})
    plan = construct_module_sharding_plan(module, {"t": _fused(row_wise())}, sharder, 1, 1, "cpu")
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(world_of_one), CPU)
    sharded.take_ids(["f"], BatchBound(2, {"f": (0, 2)}))
    sharded(KeyedJaggedTensor(["f"], torch.tensor([4, 0, 1]), lengths=torch.tensor([2, 1]))).wait()
    told = min(bad, 2**31 - 1)
    with pytest.raises(ValueError, match=rf"id 1 of feature f in the batch of rank 0: f: id {told} is outside"):
        sharded(KeyedJaggedTensor(["f"], torch.tensor([4, bad, 1]), lengths=torch.tensor([2, 1]))).wait()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(PLANS))
def test_outputs_weights_and_states(folder: Path, seed: int, way: str) -> None:
    """Outputs and rows are stock TorchRec's, up to the order of sums, and every table is exchanged."""
    tolerance, tables = WEIGHT_TOLERANCE["fp32"], _drawn(seed).named_shards
    for rank in range(RANKS):
        saved = torch.load(folder / f"{seed}_{rank}.pt")
        ours, stock = saved[way], saved["stock"]
        for step, (outputs, expected) in enumerate(zip(ours["outputs"], stock["outputs"], strict=True)):
            assert_all_near(outputs, expected, tolerance, f"{tables}: rank {rank}, step {step}, output")
        assert_all_near(ours["weights"], stock["weights"], tolerance, f"{tables}: rank {rank}, weight")
        assert_all_near(ours["states"], stock["states"], tolerance, f"{tables}: rank {rank}, state")
        assert ours["keys"] == stock["keys"]
        assert [used for used, _, _ in ours["exchanged"]] == [way.partition("_")[0]] * 2
        others = [line for line in ours["log"] if "between hosts one message" not in line]
        assert not others, "everything is exchanged, and captured where a graph is asked for"
