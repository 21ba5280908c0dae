"""Models with pooled tables, plans and ways to train them, drawn by hypothesis: the drop-in against TorchRec."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding import gradient_layout
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import POOLED_TOLERANCE, WEIGHT_TOLERANCE, assert_all_near
from tests.distributed.captured import captures
from tests.distributed.models import MEAN, SUM, Model, Table, Tables, draw_ids, make_plan, sharding_of, train, world
from tests.distributed.workers import logged_messages

_messages = cache(logged_messages)
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
"""those of both libraries on a CPU"""
KINDS = ("table_wise", "column_wise", "table_column_wise", "data_parallel", *BY_ROWS)


class Way(NamedTuple):
    backend: str
    pipeline: str
    """none, sparse_dist, graph or, by a stand-in for CUDA graphs, captured"""
    nodes: int | str
    put: str
    schedule: str
    slice_bags: int
    part_bytes: int
    """of the gradient windows"""


@dataclass(frozen=True)
class Drawn:
    ranks: int
    local: int
    """ranks of a node"""
    seed: int
    """of ids and their weights"""
    tables: Mapping[str, Table]
    others: Mapping[str, Table]
    """of a second module"""
    planner: bool
    """whether TorchRec's planner places the shards"""
    bag_sizes: Mapping[str, tuple[int, int]]
    """feature -> least and most ids of a bag, in the order of the batches"""
    samples: Sequence[int]
    """of each rank"""
    steps: int
    ids: torch.dtype
    optimizer: str
    types: str
    """fp32, fp16_rows or bf16_wire: FBGEMM has no rows in bfloat16 on a CPU"""
    ways: Sequence[Way]
    weighted: bool = False
    """whether ids have weights"""
    empty: int | None = None
    """the step in which no rank has a sample"""

    @property
    def wire(self) -> str:
        return "bf16" if self.types == "bf16_wire" else "fp32"

    @property
    def every_table(self) -> dict[str, Table]:
        return {**self.tables, **self.others}

    def __str__(self) -> str:
        facts = {name: value for name, value in vars(self).items() if name not in ("tables", "others", "ways")}
        lines = [f"{name}: {each}" for name, each in (*self.every_table.items(), *enumerate(self.ways, 1))]
        return "\n".join([str(facts), *lines])


@st.composite
def drawn_plans(draw_from: st.DrawFn, ranks: int, local: int) -> Drawn:
    # The numbers are hypothesis's, which shrinks them to the first choice, the least number, and False.
    draw = draw_from(st.randoms(use_true_random=False))
    numbers = iter(range(100))
    tables, others = (drawn_tables(draw, numbers, ranks, local, most) for most in (5, 2))
    every = [*tables.values(), *others.values()]
    features = list(dict.fromkeys(name for table in every for name in table.features))
    features = draw.sample([*features, "unused"], len(features) + 1)
    sizes = draw.choice([[(1, 1), (3, 3)], [(0, 0), (1, 1), (0, 1), (0, 4), (2, 5)]])
    exchanged = all(any(t.kind != "data_parallel" for t in module.values()) for module in (tables, others))
    by_graph = exchanged and happens(draw, 0.5)
    # The planner might separate a table from its companion, see `drawn_tables`.
    planner = happens(draw, 0.25) and not any(name.endswith("_companion") for name in (*tables, *others))
    # TorchRec needs as many samples on every rank to gather the gradients of partial sums, and so do captured steps.
    even = by_graph or any(table.kind in BY_ROWS for table in every) or not happens(draw, 0.5)
    samples = [draw.randrange(1, 7)] * ranks if even else [draw.randrange(7) for _ in range(ranks)]
    # Captured steps take no data-parallel rows in float16, and round their pooled embeddings to the wire's type.
    only_fp32 = by_graph and any(table.kind == "data_parallel" for table in every)
    types = "fp32" if only_fp32 else draw.choice(["fp32", "fp32", "fp32", "fp16_rows", "bf16_wire"])
    # The stand-in for CUDA graphs takes thirty times as long.
    pipelines = ["graph"] * 7 + ["captured"] if by_graph else ["none", "sparse_dist"]
    ways = [_way(draw, pipelines, ranks // local) for _ in range(2)]
    # The planner knows no caches on a CPU, and only what stores to peers has some.
    if not planner and all(way.backend != "nccl" for way in ways):
        tables, others = (
            {name: t._replace(cached=t.kind != "data_parallel" and happens(draw, 0.4)) for name, t in each.items()}
            for each in (tables, others)
        )
    captured = any(way.pipeline == "captured" for way in ways)
    # TorchRec finds no divisor of means where there are no samples.
    by_divisor = any(table.kind in BY_ROWS and table.mean for table in every)
    return Drawn(
        ranks,
        local,
        draw.randrange(1 << 16),
        tables,
        others,
        planner=planner,
        bag_sizes={name: draw.choice(sizes) for name in features},
        samples=samples,
        steps=7 if captured else 3,
        ids=draw.choice([torch.int32, torch.int64]),
        # Others would square what bfloat16 rounds.
        optimizer="sgd" if types == "bf16_wire" else draw.choice(list(OPTIMIZERS)),
        types=types,
        ways=ways,
        # Weights of both signs would have little left of partial sums that bfloat16 rounds.
        weighted=types != "bf16_wire" and happens(draw, 0.5),
        empty=1 if not (captured or by_divisor) and happens(draw, 0.25) else None,
    )


def happens(draw: random.Random, share: float) -> bool:
    """Return True in a `share` of the draws, and False in the simplest one."""
    return draw.random() > 1 - share


def drawn_tables(
    draw: random.Random,
    numbers: Any,
    ranks: int,
    local: int,
    most: int,
    kinds: Sequence[str] = KINDS,
    dims: Sequence[int] = (4, 8, 12, 20, 24, 64, 192),
) -> dict[str, Table]:
    """Draw up to `most` tables, some of which share features; `numbers` are those of their names."""
    tables: dict[str, Table] = {}
    features: list[str] = []
    for _ in range(draw.randint(1, most)):
        number, kind, dim = next(numbers), draw.choice(kinds), draw.choice(dims)
        shared = draw.sample(features, 1) if features and happens(draw, 0.4) else []
        own = [f"f{number}{letter}" for letter in "ab"[: draw.randint(1 - len(shared), 2)]]
        features += own
        names = draw.sample(shared + own, len(shared + own))
        if happens(draw, 0.15):
            names *= 2
        # Fewer rows than ranks, and no multiple of them.
        rows, mean = draw.choice([1, 2, 3, 5, 7, 10, 33, 40]), happens(draw, 0.4)
        table = Table(rows, dim, names, mean, kind, *_place(draw, kind, dim, ranks, local))
        if kind == "grid_shard" and _has_empty_shards(table):  # of which TorchRec keeps no state of row-wise Adagrad
            table = table._replace(rows=33)
        tables[f"t{number}"] = table
        if _has_empty_shards(table):
            # FBGEMM takes a lookup without any rows for one on a GPU, so another table has rows on each of these ranks.
            tables[f"t{number}_companion"] = table._replace(rows=33, features=[f"f{number}c"])
    return tables


def _place(draw: random.Random, kind: str, dim: int, ranks: int, local: int) -> tuple[list[int], int]:
    """Return the ranks of a table's shards, and how many of them have the same rows."""
    nodes = [list(range(first, first + local)) for first in range(0, ranks, local)]
    most = len(nodes) if kind == "grid_shard" else 4
    cuts = draw.choice([cuts for cuts in range(1, most + 1) if dim % (4 * cuts) == 0])
    if kind in ("column_wise", "table_column_wise"):
        return draw.choices(range(ranks) if kind == "column_wise" else draw.choice(nodes), k=cuts), cuts
    if kind == "grid_shard":
        return [rank for node in draw.sample(nodes, cuts) for rank in node], cuts
    placed = {
        "data_parallel": [],
        "table_wise": [draw.randrange(ranks)],
        "table_row_wise": draw.choice(nodes),
        "row_wise": list(range(ranks)),
    }
    return placed[kind], 1


def _has_empty_shards(table: Table) -> bool:
    owners = len(table.ranks) // table.cuts
    return table.kind in BY_ROWS and (owners - 1) * -(-table.rows // owners) >= table.rows


def _with_another_plan(drawn: Drawn) -> Drawn:
    """Return the same model and batches under another plan; data-parallel tables stay so."""
    draw = random.Random(str(drawn))

    def replan(table: Table) -> Table:
        while table.kind != "data_parallel":
            kind = draw.choice([kind for kind in KINDS if kind != "data_parallel"])
            placed, cuts = _place(draw, kind, table.dim, drawn.ranks, drawn.local)
            other = table._replace(kind=kind, ranks=placed, cuts=cuts)
            if not _has_empty_shards(other):
                return other
        return table

    tables, others = ({name: replan(t) for name, t in each.items()} for each in (drawn.tables, drawn.others))
    return replace(drawn, tables=tables, others=others)


def _way(draw: random.Random, pipelines: Sequence[str], nodes: int) -> Way:
    pipeline = draw.choice(pipelines)
    stores = pipeline in ("graph", "captured")
    return Way(
        draw.choice(["pgas", "fused"] if stores else ["nccl", "pgas", "fused"]),
        pipeline,
        draw.choice(["auto", nodes]) if nodes > 1 else "auto",
        draw.choice(["direct", "staged"]),
        draw.choice(["linear", "remote_first", "balanced"]),
        draw.choice([4, 32]),
        draw.choice([256, gradient_layout._PART_BYTES]),
    )


def _make_plan(drawn: Drawn, model: Model) -> ShardingPlan:
    sharder: Any = EmbeddingBagCollectionSharder()
    if not drawn.planner:
        tables, others = ({name: sharding_of(t) for name, t in each.items()} for each in (drawn.tables, drawn.others))
        return make_plan(model, tables, others, sharder, local_size=drawn.local)
    constraints = {
        name: ParameterConstraints(
            sharding_types=[t.kind],
            compute_kernels=["dense" if t.kind == "data_parallel" else "fused"],
            min_partition=t.dim // t.cuts,
        )
        for name, t in drawn.every_table.items()
    }
    topology = Topology(world_size=drawn.ranks, local_world_size=drawn.local, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharder.sharding_types = lambda _: KINDS  # all of them on a CPU, too
    return planner.collective_plan(model, [sharder], world())


def _configs(tables: Mapping[str, Table], weighted: bool) -> Tables:
    # FBGEMM on a CPU does not divide the gradient of weighted means.
    return {name: (t.rows, t.dim, t.features, MEAN if t.mean and not weighted else SUM) for name, t in tables.items()}


def _batches(drawn: Drawn) -> list[Batch]:
    generator = torch.Generator().manual_seed(drawn.seed * drawn.ranks + dist.get_rank())
    tables = drawn.every_table.values()
    rows = {name: min([t.rows for t in tables if name in t.features], default=3) for name in drawn.bag_sizes}
    batches = []
    for step in range(drawn.steps):
        samples = 0 if step == drawn.empty else drawn.samples[dist.get_rank()]
        lengths = [
            torch.randint(least, most + 1, (samples,), generator=generator) for least, most in drawn.bag_sizes.values()
        ]
        # Products with rounded rows have the same sum in every order, and no bag's weights add up to 0, which would
        # leave nothing but rounding.
        weights = torch.tensor([0.0, 0.25, 0.5, -2.25]) if drawn.weighted else None
        sparse = draw_ids(generator, rows, lengths, drawn.ids, weights)
        batches.append(Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _round_rows(model: Any, _: Any) -> None:
    """Round all weights to multiples of 1 / 256, so that their sums have the same bits in every order."""
    for tensor in model.state_dict().values():
        for each in [s.tensor for s in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]:
            each.detach().mul_(256).round_().div_(256)


def _sharder(drawn: Drawn, way: Way | None) -> Any:
    optimizer = OPTIMIZERS[drawn.optimizer]
    # With an epsilon this large, no gradient is divided by itself.
    params = {"optimizer": optimizer, "learning_rate": 0.5 if drawn.optimizer == "sgd" else 0.05, "eps": 1e-3}
    if way is not None:
        options = {name: getattr(way, name) for name in ("backend", "nodes", "put", "schedule", "slice_bags")}
        return OverlapEmbeddingBagCollectionSharder(params, wire_dtype=drawn.wire, **options)
    wire, codecs = CommType(drawn.wire), None
    if drawn.wire != "fp32":
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    return EmbeddingBagCollectionSharder(params, codecs)


def _train(drawn: Drawn, way: Way | None, steps: slice = slice(None), **hooks: Any) -> dict[str, Any]:
    """Train by the drop-in, or by TorchRec if there is no way; `hooks` are `before` and `after` of `models.train`."""
    rows = DataType.FP16 if drawn.types == "fp16_rows" else DataType.FP32
    tables, others = (_configs(each, drawn.weighted) for each in (drawn.tables, drawn.others))
    model = Model(tables, others, drawn.weighted, rows)
    plan, sharder, batches = _make_plan(drawn, model), _sharder(drawn, way), _batches(drawn)[steps]
    hooks = {"before": _round_rows, **hooks}
    if way is None:
        return train(model, plan, sharder, batches, **hooks)
    captured = way.pipeline == "captured"
    with (
        patch.object(gradient_layout, "_PART_BYTES", way.part_bytes),
        captures() if captured else nullcontext() as taken,
    ):
        # A capacity learnt from so few samples grows at many steps, and no step would be captured.
        hooks["capacity"] = BatchCapacity(max(drawn.samples), drawn.bag_sizes) if captured else None
        result = train(model, plan, sharder, batches, "graph" if captured else way.pipeline, **hooks)
    assert taken in (None, {"captured": 2, "replayed": len(batches) - 5}), taken
    return result


def _assert_outputs_agree(drawn: Drawn, outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    for step, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        exact = step == 0 and drawn.wire == "fp32"
        assert_all_near(found, wanted, 0.0 if exact else POOLED_TOLERANCE[drawn.types], f"step {step}, output")


def compare_with_torchrec(drawn: Drawn, _: Path) -> Iterator[Callable[[], None]]:
    """Train by TorchRec and in the drawn ways; yield a check of each way.

    It checks outputs, weights and states, that every table was exchanged, and that every step was captured.
    """
    torchrec, messages = _train(drawn, None), _messages()
    modules = [any(t.kind != "data_parallel" for t in each.values()) for each in (drawn.tables, drawn.others)]
    for way in drawn.ways:
        messages.clear()
        ours = _train(drawn, way)

        def check(way: Way = way, ours: dict[str, Any] = ours) -> None:
            _assert_outputs_agree(drawn, ours["outputs"], torchrec["outputs"])
            assert_all_near(ours["weights"], torchrec["weights"], WEIGHT_TOLERANCE[drawn.types], "weights")
            # States are squares of gradients, off by twice as much if rows in float16 are rounded to another number.
            twice = 2 if drawn.types == "fp16_rows" else 1
            assert_all_near(ours["states"], torchrec["states"], twice * WEIGHT_TOLERANCE[drawn.types], "states")
            assert ours["keys"] == torchrec["keys"], f"columns {ours['keys']} in place of {torchrec['keys']}"
            assert [used for used, _, _ in ours["exchanged"]] == [way.backend] * sum(modules), ours["exchanged"]
            others = [line for line in messages if "between nodes one message" not in line]
            assert not others, "\n".join(others)

        yield check


def resume(drawn: Drawn, folder: Path) -> Iterator[Callable[[], None]]:
    """Train half of the steps, save, and go on: under another plan by a checkpoint's files, or by state dicts.

    TorchRec may train one of the two. Yields a check that outputs are those of a run of TorchRec without a break.
    """
    # TorchRec's means depend on the plan, see docs/torchrec.md. On the cuts of columns depend row-wise Adagrad and the
    # order of the columns of a feature that is named twice.
    tables, others = (
        {name: t._replace(mean=False, features=list(dict.fromkeys(t.features))) for name, t in each.items()}
        for each in (drawn.tables, drawn.others)
    )
    optimizer = "adagrad" if drawn.optimizer == "rowwise_adagrad" else drawn.optimizer
    ways = [way._replace(pipeline="graph") if way.pipeline == "captured" else way for way in drawn.ways]
    # Another plan has other partial sums, which bfloat16 would round to others.
    types = "fp32" if drawn.types == "bf16_wire" else drawn.types
    drawn = replace(drawn, tables=tables, others=others, optimizer=optimizer, ways=ways, types=types)
    # The other plan may cut by rows, see `drawn_plans`.
    drawn = replace(drawn, steps=4, planner=False, samples=[max(1, *drawn.samples)] * drawn.ranks)
    first, second = [(ways[0], ways[1]), (None, ways[1]), (ways[0], None)][drawn.seed % 3]
    by_files = drawn.seed % 2 == 0
    checkpointer = Checkpointer(folder, keep=1, shape={})
    saved: list[Any] = []

    def save(model: Any, optimizer: Any) -> None:
        if by_files:
            saved.append(checkpointer.write(2, extents_to_store(model, optimizer)))
        else:
            saved.extend(copy.deepcopy([dict(model.state_dict()), dict(optimizer.state_dict())]))

    def load(model: Any, optimizer: Any) -> None:
        if by_files:
            checkpointer.load(saved[0], model, optimizer)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    whole = _train(drawn, None)
    begun = _train(drawn, first, slice(2), after=save)
    ended = _train(_with_another_plan(drawn) if by_files else drawn, second, slice(2, 4), before=load)
    yield lambda: _assert_outputs_agree(drawn, begun["outputs"] + ended["outputs"], whole["outputs"])
