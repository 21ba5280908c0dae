"""Any TorchRec model under the drop-in sharder trains as under TorchRec's: outputs by name, weights, states.

To the last bit where gradients go by the collective; up to the order of sums where they are pushed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import UserEnabledConfigDefinition, WeightDecayMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
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
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.weights import initialise_tables
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.models import (
    CPU,
    MEAN,
    SUM,
    Model,
    Tables,
    draw_ids,
    local_tensors,
    make_plan,
    table_configs,
    train,
    world,
)
from tests.distributed.workers import logged_messages, ran_on_ranks, run_ranks

STEPS = 3
# Two tables share a feature, and one of them has another of its own.
TABLES: Tables = {
    "narrow": (30, 4, ["f0"], SUM),
    "mean": (20, 8, ["shared"], MEAN),
    "two_features": (50, 64, ["shared", "f2"], SUM),
    "small": (10, 8, ["f3"], SUM),
    "wide_mean": (40, 64, ["f4"], MEAN),
}
OTHER_TABLES = {"other": (25, 8, ["f5"], SUM)}  # of a second module
# In another order than the tables'.
ROWS = {"f4": 40, "f2": 50, "unused": 3, "f0": 30, "f5": 25, "f3": 10, "shared": 20}

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
    batch_sizes: tuple[int, int] = (5, 5)
    ids: torch.dtype = torch.int32
    fused_params: dict[str, Any] = field(default_factory=dict)
    pipeline: str = "none"
    weighted: bool = False
    rows: DataType = DataType.FP32
    other: tuple[int, ...] = (0,)
    """ranks of the shards of the other module's table"""
    codecs: CommType | None = None
    """precision of quantised communication, both ways"""


ADAGRAD, ROWWISE_ADAGRAD = EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD
DECAY = {"optimizer": ROWWISE_ADAGRAD, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
CLIPPED = {"gradient_clipping": True, "max_gradient": 2e-4}  # less than many gradients of these models
CASES = {plan: Case(plan) for plan in (*PLANS, "planner")} | {
    "int64": Case(ids=torch.int64),
    "uneven_batches": Case("columns_and_data_parallel", batch_sizes=(2, 9)),
    "an_empty_batch": Case(batch_sizes=(4, 0)),
    "empty_batches": Case(batch_sizes=(0, 0)),
    "adagrad": Case(fused_params={"optimizer": ADAGRAD, "eps": 1e-3}),  # so large that no gradient is divided by itself
    "rowwise_adagrad": Case(fused_params={"optimizer": ROWWISE_ADAGRAD}),
    "graph_weight_decay": Case(pipeline="graph", fused_params=DECAY),
    "clipped": Case("columns_and_data_parallel", fused_params=CLIPPED),
    "graph_clipped": Case(pipeline="graph", fused_params=CLIPPED),
    "max_norm": Case(fused_params={"optimizer": ROWWISE_ADAGRAD, "max_norm": 0.3}),
    "train_pipeline": Case("columns_and_data_parallel", pipeline="sparse_dist"),
    "graph": Case(pipeline="graph"),
    "graph_without_tables": Case("rank_0_without_tables", pipeline="graph"),
    "graph_int64": Case("columns_of_one_rank", ids=torch.int64, pipeline="graph"),
    "graph_adagrad": Case(pipeline="graph", fused_params={"optimizer": ADAGRAD, "eps": 1e-3}),
    "graph_data_parallel": Case("columns_and_data_parallel", pipeline="graph"),
    "graph_two_data_parallel": Case("data_parallel", pipeline="graph"),
    "fp16_rows": Case(rows=DataType.FP16),
    # TorchRec sends float32 from a rank without tables, and FBGEMM has no output in bfloat16 on a CPU.
    "fp16_output": Case("columns_and_data_parallel", other=(0, 1), fused_params={"output_dtype": SparseType.FP16}),
    "graph_fp16_output": Case(pipeline="graph", other=(0, 1), fused_params={"output_dtype": SparseType.FP16}),
    "fp16_codecs": Case("columns_and_data_parallel", codecs=CommType.FP16),
    "graph_bf16_codecs": Case(pipeline="graph", codecs=CommType.BF16),
    "weighted": Case("columns_and_data_parallel", weighted=True),
    "weighted_fp16_rows": Case(weighted=True, rows=DataType.FP16, fused_params={"optimizer": ROWWISE_ADAGRAD}),
    "graph_weighted": Case("columns_and_data_parallel", weighted=True, pipeline="graph"),
}
PUSHING = ("pgas", "fused")


def _make_plan(case: Case, model: Model, sharder: ModuleSharder) -> ShardingPlan:
    if case.plan != "planner":
        return make_plan(model, PLANS[case.plan], {"other": case.other}, sharder)
    allowed = ParameterConstraints(
        sharding_types=["table_wise", "column_wise"], compute_kernels=["fused"], min_partition=32
    )
    constraints = dict.fromkeys([*TABLES, *OTHER_TABLES], allowed)
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.collective_plan(model, [sharder], world())


def _batches(case: Case) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = case.batch_sizes[dist.get_rank()]
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(ROWS), samples), generator=generator)
        # Products with powers of two are exact: FBGEMM may round a product and a sum at once.
        weights = torch.tensor([-2.0, -0.5, 0.0, 0.25, 1.0]) if case.weighted else None
        sparse = draw_ids(generator, ROWS, list(lengths), case.ids, weights)
        yield Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0))


def _train(case: Case, sharder: ModuleSharder) -> dict[str, Any]:
    tables = TABLES
    if case.weighted:  # FBGEMM on a CPU does not divide the gradient of weighted means
        tables = {name: (*table[:3], SUM) for name, table in TABLES.items()}
    model = Model(tables, OTHER_TABLES, case.weighted, case.rows)
    return train(model, _make_plan(case, model, sharder), sharder, list(_batches(case)), case.pipeline)


def _train_all(folder: Path) -> None:
    messages = logged_messages()
    for name, case in CASES.items():
        params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, **case.fused_params}
        codecs = _codecs(case.codecs, case.codecs) if case.codecs else None
        saved: dict[str, Any] = {"torchrec": _train(case, EmbeddingBagCollectionSharder(dict(params), codecs))}
        for backend in EXCHANGED:
            messages.clear()
            sharder = OverlapEmbeddingBagCollectionSharder(dict(params), codecs, backend=backend, slice_bags=4)
            saved[backend] = _train(case, sharder) | {"log": list(messages)}
        torch.save(saved, folder / f"{name}_{dist.get_rank()}.pt")


folder = ran_on_ranks(2, _train_all)


@pytest.mark.parametrize("backend", EXCHANGED)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_under_torchrec_and_logs_once_what_falls_back(folder: Path, name: str, backend: str) -> None:
    case, pushed, lines = CASES[name], backend in PUSHING, list[str]()
    if case.pipeline == "graph" and not pushed:
        reason = f"backend {backend} waits for the host"
        lines = [f"train pipeline: TorchRec's, since the step cannot be captured: {reason}"]
    # FBGEMM's update is given float32 by us and float16 by TorchRec, and adds up either in its own order.
    same_order = not pushed and "output_dtype" not in case.fused_params
    tolerance = 0.0 if same_order else WEIGHT_TOLERANCE["fp16_rows" if case.rows == DataType.FP16 else "fp32"]
    for rank in range(2):
        saved = torch.load(folder / f"{name}_{rank}.pt")
        ours, torchrec = saved[backend], saved["torchrec"]
        for step, (outputs, expected) in enumerate(zip(ours["outputs"], torchrec["outputs"], strict=True)):
            assert_all_near(outputs, expected, tolerance if step else 0.0, f"rank {rank}, step {step}, output")
        assert_all_near(ours["weights"], torchrec["weights"], tolerance, f"rank {rank}, weight")
        assert_all_near(ours["states"], torchrec["states"], tolerance, f"rank {rank}, state")
        assert ours["keys"] == torchrec["keys"], "the order of columns, for models that read them by position"
        assert ours["exchanged"] == [(backend, *(("CpuPush", 1) if pushed else ("CollectiveBackward", 0)))] * 2
        assert ours["log"] == (lines if rank == 0 else [])


FUSED, BY_ROWS = table_wise(0, compute_kernel="fused"), row_wise(compute_kernel="fused")


def _fused_with(**changes: Any) -> ParameterShardingGenerator:
    return lambda *given: replace(FUSED(*given), **changes)


def _shard(
    sharder: Any,
    group: dist.ProcessGroup,
    ways: Mapping[str, ParameterShardingGenerator],
    tables: Tables,
    weighted: bool = False,
) -> Any:
    module = EmbeddingBagCollection(table_configs(tables), is_weighted=weighted, device=torch.device("meta"))
    plan = construct_module_sharding_plan(module, dict(ways), sharder, 1, 1, "cpu")
    sharded = sharder.shard(module, dict(plan), ShardingEnv.from_process_group(group), CPU)
    initialise_tables(sharded, seed=0)
    return sharded


def _shard_alone(sharder: Any, group: dist.ProcessGroup, way: ParameterShardingGenerator = FUSED) -> Any:
    return _shard(sharder, group, {"other": way}, OTHER_TABLES)


def _ids(features: Sequence[str], ids: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(features), torch.tensor(ids), lengths=torch.tensor(lengths))


def _by_name(pooled: Any) -> dict[str, torch.Tensor]:
    return dict(sorted(pooled.to_dict().items()))


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dlrm_overlap"]


@pytest.mark.parametrize("where", ["post_lookup", "post_odist", "optim_state"])
def test_steps_that_are_tracked_stay_with_torchrec(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    sharded = _shard_alone(OverlapEmbeddingBagCollectionSharder(), world_of_one)
    seen: list[Any] = []
    registered = sharded._lookups[0] if where == "optim_state" else sharded
    getattr(registered, f"register_{where}_tracker_fn")(lambda *found: seen.append(found))
    for _ in range(2):
        sharded(_ids(["f5"], [1, 2], [2])).values()
    assert len(seen) == 2
    assert _lines(caplog) == ["backend pgas: steps stay with TorchRec: a tracker is registered"]
    assert sharded.why_ids_are_not_taken() == "a tracker is registered"


@pytest.mark.parametrize("backend", ["pgas", "nccl"])
def test_weights_of_ids_are_trained(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    gradients = []
    for sharder in (OverlapEmbeddingBagCollectionSharder(backend=backend), EmbeddingBagCollectionSharder()):
        weights = torch.tensor([0.5, -2.0], requires_grad=True)
        ids = KeyedJaggedTensor(["f5"], torch.tensor([1, 2]), weights, lengths=torch.tensor([2]))
        _shard_alone(sharder, world_of_one)(ids).values().square().sum().backward()
        gradients.append(weights.grad)
    assert gradients[0] is not None
    assert gradients[0].any()
    assert_near(gradients[0], gradients[1], WEIGHT_TOLERANCE["fp32"], "gradient of the weights")
    assert not _lines(caplog)


def _train_processed(folder: Path, by_rows: bool) -> None:
    """Train tables and the weights of positions under TorchRec and under the drop-in, and compare."""
    tables: Tables = {"a": (20, 8, ["f0"], SUM), "b": (30, 4, ["f1"], SUM)}
    given, messages = [], logged_messages()
    for kind in (EmbeddingBagCollectionSharder, OverlapEmbeddingBagCollectionSharder):
        collection = EmbeddingBagCollection(table_configs(tables), is_weighted=True, device=torch.device("meta"))
        positions: Any = {name: PositionWeightedModule(3, CPU) for name in ("f0", "f1")}
        sharder: Any = FeatureProcessedEmbeddingBagCollectionSharder(
            kind({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
        )
        module = FeatureProcessedEmbeddingBagCollection(collection, positions)
        way = BY_ROWS if by_rows else table_wise(1, compute_kernel="fused")
        plan = construct_module_sharding_plan(module, dict.fromkeys(tables, way), sharder, 2, 2, "cpu")
        sharded = sharder.shard(module, dict(plan), ShardingEnv.from_process_group(world()), CPU)
        initialise_tables(sharded, seed=0)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            ids = torch.randint(0, 20, (8,), generator=generator)
            pooled = sharded(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([2, 1, 3, 2]))).values()
            pooled.square().sum().backward()
            given.append({"pooled": pooled.detach(), **dict(local_tensors(sharded.state_dict()))})
            gradients = {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None}
            given[-1] |= {f"gradient of {name}": gradient.clone() for name, gradient in gradients.items()}
    assert not [message for message in messages if "TorchRec" in message], messages
    assert dist.get_rank() == 0 or any(name.startswith("gradient of _feature_proc") for name in given[0]), [*given[0]]
    for step in range(2):
        assert_all_near(given[2 + step], given[step], WEIGHT_TOLERANCE["fp32"], f"step {step}:")


@pytest.mark.parametrize("by_rows", [False, True], ids=["a rank has none", "partial sums"])
def test_weights_of_feature_processors_are_trained(tmp_path: Path, by_rows: bool) -> None:
    run_ranks(_train_processed, 2, tmp_path, by_rows)


def test_the_output_in_the_models_order(world_of_one: dist.ProcessGroup) -> None:
    tables: Tables = {"a": (5, 4, ["x", "y"], SUM), "b": (5, 8, ["y"], SUM), "c": (5, 4, ["z"], SUM)}
    tables = dict(tables) | {"d": (5, 4, ["x"], SUM)}
    ways = {"d": FUSED, "c": column_wise([0], compute_kernel="fused"), "b": data_parallel(), "a": FUSED}
    ordered, ours = (OverlapEmbeddingBagCollectionSharder(output_order=order) for order in ("model", "plan"))
    ids = _ids("xyz", [1, 2, 3], [1, 1, 1])
    by_model, by_plan, by_torchrec = (
        _shard(sharder, world_of_one, ways, tables)(ids).keys()
        for sharder in (ordered, ours, EmbeddingBagCollectionSharder())
    )
    assert by_model == ["x@a", "y@a", "z", "x@d", "y@b"], "what TorchRec keeps comes last"
    assert by_model != by_plan == by_torchrec


@pytest.mark.parametrize("bad", [-1, 5, 1 << 31, 1 << 40])
def test_an_id_outside_a_table_that_is_cut_by_rows(world_of_one: dist.ProcessGroup, bad: int) -> None:
    """If the exchange sends the ids, the owner of the last rows reports it as the mode of the bounds check says."""
    sharder = OverlapEmbeddingBagCollectionSharder({"bounds_check_mode": BoundsCheckMode.FATAL})
    sharded = _shard(sharder, world_of_one, {"t": BY_ROWS}, {"t": (5, 4, ["f"], SUM)})
    sharded.take_ids(["f"], BatchCapacity(2, {"f": (0, 2)}))
    sharded(_ids("f", [4, 0, 1], [2, 1])).wait()
    told = min(bad, 2**31 - 1)
    with pytest.raises(ValueError, match=rf"id 1 of feature f in the batch of rank 0: f: id {told} is outside"):
        sharded(_ids("f", [4, bad, 1], [2, 1])).wait()


def test_a_module_that_was_sharded_again_takes_no_ids(world_of_one: dist.ProcessGroup) -> None:
    """It has another exchange, which no pipeline has told the capacity yet."""
    sharded = _shard(OverlapEmbeddingBagCollectionSharder(), world_of_one, {"t": FUSED}, {"t": (5, 4, ["f"], SUM)})
    ids = _ids("f", [4, 0, 1], [2, 1])
    before = sharded(ids).values()
    sharded.take_ids(["f"], BatchCapacity(2, {"f": (0, 2)}))
    sharded.update_shards({}, ShardingEnv.from_process_group(world_of_one), CPU)
    assert_same(sharded(ids).values(), before, "output")


@pytest.mark.parametrize(("output_order", "takes_ids"), [("plan", False), ("model", False), ("model", True)])
def test_means_of_row_wise_tables_are_divided(
    world_of_one: dist.ProcessGroup, output_order: str, takes_ids: bool
) -> None:
    """If a table is row-wise, its shards hold parts of means, so TorchRec divides all means after the exchange."""
    tables: Tables = {"a": (5, 4, ["x"], MEAN), "b": (5, 8, ["y"], MEAN), "c": (5, 4, ["z"], SUM)}
    ways = {"a": BY_ROWS, "b": FUSED, "c": FUSED}
    weights = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25])
    ids = KeyedJaggedTensor([*"xyz"], torch.tensor([1, 2, 2, 3, 4]), weights, lengths=torch.tensor([2, 2, 1]))
    sharder = OverlapEmbeddingBagCollectionSharder(output_order=output_order)
    ours = _shard(sharder, world_of_one, ways, tables, weighted=True)
    if takes_ids:
        ours.take_ids([*"xyz"], BatchCapacity(1, dict.fromkeys("xyz", (0, 2))), weighted=True)
    torchrec = _shard(EmbeddingBagCollectionSharder(), world_of_one, ways, tables, weighted=True)
    found = _by_name(ours(ids))
    assert_all_near(found, _by_name(torchrec(ids)), 0.0, "output")
    assert all(pooled.any() for pooled in found.values())


@pytest.mark.parametrize("output", [SparseType.BF16, DataType.FP16])
@pytest.mark.parametrize("copy_output", [True, False])
def test_outputs_in_half_precision_are_those_in_float32_rounded(
    world_of_one: dist.ProcessGroup, output: SparseType | DataType, copy_output: bool
) -> None:
    dtype = torch.bfloat16 if output == SparseType.BF16 else torch.float16
    rounded: list[torch.Tensor] = []
    for params in ({}, {"output_dtype": output}):
        sharder = OverlapEmbeddingBagCollectionSharder({"learning_rate": 1.0, **params}, copy_output=copy_output)
        sharded = _shard_alone(sharder, world_of_one)
        pooled = sharded(_ids(["f5"], [1, 2, 7], [2, 0, 1])).values()
        assert pooled.dtype == (dtype if params else torch.float32)
        rounded.append(pooled.detach().to(dtype))
        pooled.float().square().sum().backward()
        rounded += [tensor for _, tensor in local_tensors(sharded.state_dict())]
        assert sharded.leading_columns == 0
        del pooled
        sharded.exchange.close()
    assert_same(rounded[2], rounded[0], "pooled embeddings")
    assert_near(rounded[3], rounded[1], 4 * torch.finfo(dtype).eps, "rows")


@pytest.mark.parametrize("backend", EXCHANGED)
@pytest.mark.parametrize("decay", [0.0, 0.1])  # with a decay, FBGEMM's own operator updates the rows
def test_autocast_to_another_half_type_than_the_wire_changes_nothing(
    world_of_one: dist.ProcessGroup, backend: str, decay: float
) -> None:
    """Autocast refuses to concatenate tensors of another half type than its own."""
    found: list[list[torch.Tensor]] = []
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0, "weight_decay_mode": WeightDecayMode.L2}
    for enabled in (False, True):
        sharder = OverlapEmbeddingBagCollectionSharder(params, backend=backend, wire_dtype="fp16")
        sharded = _shard_alone(sharder, world_of_one)
        for lookup in sharded._lookups:
            lookup._emb_modules[0].emb_module.update_hyper_parameters({"weight_decay": decay})
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pooled = sharded(_ids(["f5"], [1, 2, 7], [2, 0, 1])).values()
            pooled.square().sum().backward()
        found.append([pooled.detach(), *dict(local_tensors(sharded.state_dict())).values()])
        sharded.exchange.close()
    for name, actual, expected in zip(("pooled embeddings", "rows"), found[1], found[0], strict=True):
        assert_same(actual, expected, name)


TWO_TABLES: Tables = {"a": (5, 4, ["x"], SUM), "b": (5, 8, ["y"], SUM)}


def test_outputs_of_several_types_stay_with_torchrec(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two tables, or of one and the wire."""
    for wire_dtype, types in (("fp32", (DataType.FP16, DataType.FP32)), ("bf16", (DataType.FP16, DataType.FP16))):
        ways = {name: _fused_with(output_dtype=output) for name, output in zip(TWO_TABLES, types, strict=True)}
        sharder = OverlapEmbeddingBagCollectionSharder(wire_dtype=wire_dtype)
        assert _shard(sharder, world_of_one, ways, TWO_TABLES).exchange is None
    told = ["outputs of types fp16 and fp32", "output of type fp16: leave wire_dtype out"]
    assert [message.rpartition("TorchRec: ")[2] for message in caplog.messages] == told


def test_the_strictest_bounds_check_of_a_module_holds(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """If none of them stops the run, row 0 is taken under each, as by TorchRec."""
    modes = {"a": BoundsCheckMode.IGNORE, "b": BoundsCheckMode.V2_WARNING}
    ways = {name: _fused_with(bounds_check_mode=mode) for name, mode in modes.items()}
    ours, torchrec = (
        _by_name(_shard(sharder, world_of_one, ways, TWO_TABLES)(_ids("xy", [1, 7, 3], [2, 1])))
        for sharder in (OverlapEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder())
    )
    assert_all_near(ours, torchrec, 0.0, "output")
    assert [line.partition(";")[0] for line in _lines(caplog)] == ["x: id 7 is outside its table of 5 rows"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", ["plan", "model"])
def test_a_table_that_names_a_feature_twice(world_of_one: dist.ProcessGroup, order: str, captured: bool) -> None:
    """Its columns have one name; both are pooled, and their gradients are added up."""
    tables: Tables = {
        "a": (5, 4, ["x", "y", "x"], MEAN),
        "b": (5, 8, ["z", "z"], SUM),
        "c": (5, 8, ["x", "z", "x"], MEAN),
        "d": (5, 4, ["y", "y"], SUM),
    }
    ways = {"a": FUSED, "b": BY_ROWS, "d": data_parallel(), "c": column_wise([0, 0], compute_kernel="fused")}
    ours = OverlapEmbeddingBagCollectionSharder(output_order=order)
    found: list[list[torch.Tensor]] = []
    for sharder in (ours, EmbeddingBagCollectionSharder()):
        sharded = _shard(sharder, world_of_one, ways, tables)
        if captured and sharder is ours:
            sharded.take_ids([*"xyz"], BatchCapacity(1, dict.fromkeys("xyz", (0, 2))))
        pooled = sharded(_ids("xyz", [1, 2, 2, 3, 4], [2, 2, 1])).wait()
        columns = zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), dim=1), strict=True)
        by_name = [column for _, column in sorted(columns, key=lambda each: each[0])]
        torch.stack([number * column.sum() for number, column in enumerate(by_name)]).sum().backward()
        found.append([column.detach() for column in by_name])
        found[-1] += [each for _, each in local_tensors(sharded.state_dict())]
        if sharder is ours and order == "model":
            assert pooled.keys() == ["x@a", "y@a", "x@a", "z@b", "z@b", "x@c", "z@c", "y@d", "y@d"]
    for number, (tensor, expected) in enumerate(zip(*found, strict=True)):
        assert_near(tensor, expected, WEIGHT_TOLERANCE["fp32"], f"tensor {number}")


def test_that_the_drop_in_is_active_is_one_line(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dlrm_overlap"):
        for way, params in ((FUSED, {}), (BY_ROWS, {}), (FUSED, {"extra_optimizer_config": WRITEBACK})):
            _shard_alone(OverlapEmbeddingBagCollectionSharder(params), world_of_one, way)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    pushed, others = "1 of 1 tables exchanged, update by push", "0 of 1 tables exchanged, update by FBGEMM"
    assert lines == [f"backend pgas: {told}" for told in (pushed, pushed, others)]


def test_lookups_called_apart_stay_with_torchrec(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """As a managed-collision module calls them."""
    sharded = _shard_alone(OverlapEmbeddingBagCollectionSharder(), world_of_one)
    ids = _ids(["f5"], [1, 2], [2])
    for _ in range(2):
        context = sharded.create_context()
        arrived = sharded.input_dist(context, ids).wait().wait()
        apart = sharded.output_dist(context, sharded.compute(context, arrived)).wait()
        assert_same(apart.values(), sharded(ids).values(), "pooled embeddings")
    assert _lines(caplog) == ["backend pgas: steps stay with TorchRec: another module calls compute and output_dist"]


def _codecs(forward: CommType, backward: CommType, scale: float | None = None) -> dict[str, QuantizedCommCodecs] | None:
    return get_qcomm_codecs_registry(QCommsConfig(forward, backward, backward_loss_scale=scale))


WRITEBACK = UserEnabledConfigDefinition(use_writeback_bwd_prehook=True)
FP16, BF16, INT8 = CommType.FP16, CommType.BF16, CommType.INT8
FP16_OUTPUT = {"output_dtype": SparseType.FP16}


@pytest.mark.parametrize(
    ("way", "params", "codecs", "reason"),
    [
        (table_wise(0, compute_kernel="dense"), {}, None, "compute kernel dense"),
        (FUSED, {"extra_optimizer_config": WRITEBACK}, None, "a writeback hook"),
        (FUSED, {}, _codecs(FP16, BF16), "quantised communication: bf16 and fp16"),
        (FUSED, {}, _codecs(FP16, CommType.FP32), "quantised communication: fp16 and fp32"),
        (FUSED, {}, _codecs(INT8, INT8), "quantised communication: int8"),
        (FUSED, {}, _codecs(FP16, FP16, 8.0), "quantised communication: fp16 and fp16 with a loss scale"),
        (FUSED, FP16_OUTPUT, _codecs(FP16, FP16), "quantised communication of output of type fp16"),
    ],
    ids=["dense", "writeback", "two_codecs", "one_codec", "int8_codecs", "loss_scale", "codecs_and_output"],
)
def test_reasons_to_fall_back(
    world_of_one: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    way: ParameterShardingGenerator,
    params: dict[str, Any],
    codecs: dict[str, QuantizedCommCodecs] | None,
    reason: str,
) -> None:
    assert _shard_alone(OverlapEmbeddingBagCollectionSharder(params, codecs), world_of_one, way).exchange is None
    (line,) = _lines(caplog)
    assert line.endswith(f" tables stay with TorchRec: {reason}")


def test_a_wire_type_with_codecs_of_another_is_refused() -> None:
    told = "wire_dtype: 'bf16', but qcomm_codecs_registry has fp16; give one of the two"
    with refuses(told):
        OverlapEmbeddingBagCollectionSharder(None, _codecs(FP16, FP16), wire_dtype="bf16")
    with refuses("wire_dtype: 'fp32', but qcomm_codecs_registry has fp16; give one of the two"):
        OverlapEmbeddingBagCollectionSharder(None, _codecs(FP16, FP16), wire_dtype="fp32")
    options = OverlapEmbeddingBagCollectionSharder(None, _codecs(FP16, FP16), output_dtype="fp16").options
    assert options.output_dtype == options.wire_dtype
