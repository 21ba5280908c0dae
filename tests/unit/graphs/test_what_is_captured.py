"""Which models' steps are captured, by which pipeline a run takes them, and what is said where that cannot be."""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
import torch.distributed.nn.functional as dist_functional
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dlrm_overlap.bench.harness.timing import max_over_ranks
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.torchrec_private.attributes import leave_ddp, return_to_ddp
from dlrm_overlap.train import assembly
from dlrm_overlap.train.assembly import takes_graph
from dlrm_overlap.train.explain import capture_blockers
from dlrm_overlap.train.graphs.dense_step import (
    DenseStep,
    dense_optimizers,
    dense_parameters,
    fused_optimizers,
    why_after_the_graph,
)
from dlrm_overlap.train.graphs.input_prefetcher import PlannedStep, StepKind
from dlrm_overlap.train.graphs.model_collectives import ModelCollectives
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.models import CPU, SUM, Tables, table_configs

ONE: Tables = {"one": (5, 4, ["f"], SUM)}
TWO: Tables = {"two": (5, 4, ["g"], SUM)}
FUSED = table_wise(0, compute_kernel="fused")


def _shard(
    sharder: Any,
    group: dist.ProcessGroup,
    *ways: ParameterShardingGenerator,
    rows: DataType = DataType.FP32,
    second: Tables = TWO,
) -> nn.Module:
    """Return a module of a table for each of `ways`."""
    tables = {**ONE, **(second if len(ways) == 2 else {})}
    module = EmbeddingBagCollection(table_configs(tables, rows), device=torch.device("meta"))
    by_table = dict(zip(tables, ways, strict=True))
    plan = construct_module_sharding_plan(module, by_table, sharder, 1, 1, "cpu")
    return sharder.shard(module, dict(plan), ShardingEnv.from_process_group(group), CPU)


@pytest.mark.parametrize("backend", ["pgas", "fused"])
def test_stores_to_peers_are_captured(world_of_one: dist.ProcessGroup, backend: str) -> None:
    sharder = OverlapEmbeddingBagCollectionSharder(backend=backend)
    model = nn.ModuleList([_shard(sharder, world_of_one, FUSED), nn.Linear(2, 2), _shard(sharder, world_of_one, FUSED)])
    assert capture_blockers(model) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "nccl"}, "backend nccl waits for the host"),
        ({"fused_params": {"weight_decay": 0.1, "gradient_clipping": True}}, "no dense parameter takes a gradient"),
    ],
    ids=["nccl", "weight_decay_is_captured"],
)
def test_collectives_are_not_captured(world_of_one: dist.ProcessGroup, options: dict[str, Any], reason: str) -> None:
    assert capture_blockers(_shard(OverlapEmbeddingBagCollectionSharder(**options), world_of_one, FUSED)) == reason


def test_tables_of_torchrecs_are_not_captured(world_of_one: dist.ProcessGroup) -> None:
    ours = OverlapEmbeddingBagCollectionSharder()
    stock = _shard(EmbeddingBagCollectionSharder({}), world_of_one, FUSED)
    none = "no module was sharded by OverlapEmbeddingBagCollectionSharder or OverlapEmbeddingCollectionSharder"
    assert capture_blockers(nn.Linear(2, 2)) == none
    assert capture_blockers(stock) == none
    beside = nn.ModuleList([_shard(ours, world_of_one, FUSED), stock])
    assert capture_blockers(beside) == (
        "EmbeddingBagCollection 1, with tables one, stays with TorchRec, which waits for the host"
    )
    some = _shard(ours, world_of_one, FUSED, row_wise())
    assert capture_blockers(some) == "table two stays with TorchRec, with compute kernel dense"
    nothing = _shard(ours, world_of_one, data_parallel())
    cure = "no table is exchanged, since all are data-parallel; give the planner constraints(model)"
    assert capture_blockers(nothing) == cure


@pytest.mark.parametrize(
    ("rows", "reason"),
    [(DataType.FP32, None), (DataType.FP16, "data-parallel table two stays with TorchRec: rows of type FP16")],
)
def test_data_parallel_tables_are_captured(world_of_one: dist.ProcessGroup, rows: DataType, reason: str | None) -> None:
    module = _shard(OverlapEmbeddingBagCollectionSharder(), world_of_one, FUSED, data_parallel(), rows=rows)
    assert capture_blockers(module) == reason


@pytest.mark.parametrize("mode", [None, BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL, BoundsCheckMode.NONE])
def test_ids_of_data_parallel_tables_are_checked_as_the_sharder_says(
    world_of_one: dist.ProcessGroup, mode: BoundsCheckMode | None
) -> None:
    params = {} if mode is None else {"bounds_check_mode": mode}
    module: Any = _shard(OverlapEmbeddingBagCollectionSharder(params), world_of_one, data_parallel())
    tables = ReplicatedTables.of(module._embedding_shardings, module._lookups)
    plain = BoundsCheckMode.FATAL if mode == BoundsCheckMode.V2_FATAL else mode
    assert tables.bounds_checks == [BoundsCheckMode.WARNING if plain is None else plain]


def test_what_cannot_be_one_flat_tensor_is_not_captured(world_of_one: dist.ProcessGroup) -> None:
    """Frozen parameters need not be."""
    sharded, dense = _shard(OverlapEmbeddingBagCollectionSharder(), world_of_one, FUSED), nn.Linear(2, 2)
    model = nn.ModuleDict({"sharded": sharded, "dense": dense, "frozen": nn.Linear(2, 2).bfloat16()})
    model["frozen"].requires_grad_(False)
    assert capture_blockers(model) is None
    assert list(dense_parameters(model)) == ["dense.weight", "dense.bias"]
    dense.to(torch.bfloat16)
    assert capture_blockers(model) == "dense parameter dense.weight is torch.bfloat16 and must be torch.float32"
    dense.requires_grad_(False)
    assert capture_blockers(model) == "no dense parameter takes a gradient"


def _sgd(parameters: dict[str, nn.Parameter]) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(parameters, lambda each: torch.optim.SGD(each, lr=0.1))


def test_fused_optimizers_are_found_within_wrappers(world_of_one: dist.ProcessGroup) -> None:
    """So that the rows' learning rate is followed where a wrapper of all, or of the fused ones, sets it."""
    module: Any = _shard(OverlapEmbeddingBagCollectionSharder(), world_of_one, FUSED)
    fused, dense = module.fused_optimizer, _sgd(dict(nn.Linear(2, 2).named_parameters()))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4)]
    leaves = fused_optimizers(fused)
    assert leaves
    of_all = WarmupOptimizer(CombinedOptimizer([fused, ("dense", dense)]), stages)
    assert (dense_optimizers(of_all), fused_optimizers(of_all)) == ([of_all], leaves)
    of_fused = WarmupOptimizer(fused, stages)
    both = CombinedOptimizer([("t", of_fused), ("d", dense)])
    torch.optim.lr_scheduler.ExponentialLR(both, 0.9)  # wraps `step`
    assert (dense_optimizers(both), fused_optimizers(both)) == ([of_fused, dense], leaves)


class _Skipping(CombinedOptimizer):
    def step(self, closure: Any = None) -> None:
        """Skip the step."""


class _Named(CombinedOptimizer):
    name = "both"


def _with_hook(optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def _with_step(optimizer: Any) -> None:
    step = optimizer.step
    optimizer.step = wraps(step)(lambda *arguments: step(*arguments))


def test_a_combined_optimizer_with_a_step_of_its_own_is_called(world_of_one: dist.ProcessGroup) -> None:
    parameters = dict(nn.Linear(2, 2).named_parameters())
    plain, named, own, hooked, replaced = (
        kind([("dense", _sgd(parameters))]) for kind in (CombinedOptimizer, _Named, _Skipping, *[CombinedOptimizer] * 2)
    )
    _with_hook(hooked)
    _with_step(replaced)
    for optimizer in (plain, named):
        assert dense_optimizers(optimizer) == [optimizer.optimizers[0][1]]
    for optimizer, reason in (
        (own, "_Skipping is none of torch.optim's SGD, Adagrad, Adam and AdamW"),
        (hooked, "CombinedOptimizer has hooks of its steps"),
        (replaced, "CombinedOptimizer has a step of its own"),
    ):
        assert dense_optimizers(optimizer) == [optimizer]
        assert why_after_the_graph(optimizer, parameters) == reason


@pytest.mark.parametrize("change", [_with_hook, _with_step])
def test_a_captured_optimizer_gets_no_hook_or_step_later(
    world_of_one: dist.ProcessGroup, change: Callable[[Any], None]
) -> None:
    parameters = dict(nn.Linear(2, 2).named_parameters())
    about = None, world_of_one, CommunicationOrder(), torch.float32, None
    for number in range(3):
        inner = _sgd(parameters)
        both = CombinedOptimizer([("dense", inner)])
        optimizer: Any = (both, inner, inner._optimizer)[number]
        step = DenseStep(nn.ParameterDict(parameters), both, *about)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step.clear()
        change(optimizer)
        with refuses(f"dense optimizer: {type(optimizer).__name__} has .* since .* before the first progress"):
            step.clear()
        DenseStep(nn.ParameterDict(parameters), both, *about).clear()  # calls it after the graph


def test_optimizers_that_a_graph_cannot_hold_have_a_reason(world_of_one: dist.ProcessGroup) -> None:
    model = nn.Linear(2, 2)
    parameters = dict(model.named_parameters())

    class Wrapper(OptimizerWrapper):
        pass

    hooked = _sgd(parameters)
    hooked._optimizer.register_step_post_hook(lambda *_: None)
    replaced = _sgd(parameters)
    _with_step(replaced._optimizer)
    over_ranks = GradientClippingOptimizer(
        _sgd(parameters),
        GradientClipping.NORM,
        enable_global_grad_clip=True,
        param_to_pgs=cast(Any, {model.weight: [world_of_one]}),
    )
    rmsprop = KeyedOptimizerWrapper(parameters, torch.optim.RMSprop)
    more = _sgd(parameters | {"other": nn.Parameter(torch.ones(2))})
    warm_up = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4)]
    for optimizer, reason in (
        (WarmupOptimizer(CombinedOptimizer([("dense", _sgd(parameters))]), warm_up), None),
        (GradientClippingOptimizer(_sgd(parameters), GradientClipping.NORM), None),
        (torch.optim.AdamW(model.parameters()), None),
        (Wrapper(_sgd(parameters)), "Wrapper is none of torch.optim's SGD, Adagrad, Adam and AdamW"),
        (CombinedOptimizer([("dense", rmsprop)]), "RMSprop is none of torch.optim's SGD, Adagrad, Adam and AdamW"),
        (hooked, "SGD has hooks of its steps"),
        (replaced, "SGD has a step of its own"),
        (over_ranks, "GradientClippingOptimizer adds norms up over ranks"),
        (more, "SGD has parameters that the model does not train"),
    ):
        assert why_after_the_graph(optimizer, parameters) == reason


def test_gradients_are_there_for_optimizers_that_step_behind_a_replay(world_of_one: dist.ProcessGroup) -> None:
    """A replay writes the flat gradient and no attribute, so `zero_grad` since the last step would leave None."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2, bias=False), "unused": nn.Linear(2, 2, bias=False)})
    parameters = dict(model.named_parameters())
    asgd = KeyedOptimizerWrapper(parameters, lambda each: torch.optim.ASGD(each, lr=0.1, lambd=0.0))
    step = DenseStep(model, asgd, None, world_of_one, CommunicationOrder(), torch.float32, None)
    step.begin()
    model["used"](torch.ones(1, 2)).sum().backward()
    step.update()
    asgd.zero_grad()
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    step._flat.gradients.views["used.weight"].fill_(3.0)
    step.update_after()
    assert parameters["used.weight"].grad is step._flat.gradients.views["used.weight"]
    assert_near(parameters["used.weight"].data, before["used.weight"] - 0.1 * 3.0, 1e-6, "used")
    assert parameters["unused.weight"].grad is None
    step.close()


def test_the_pipeline_takes_a_model_out_of_ddp(world_of_one: dist.ProcessGroup) -> None:
    """DDP keeps the nodes that accumulate gradients, and they run on the stream where it made them."""
    env = ShardingEnv.from_process_group(world_of_one)
    model = DistributedModelParallel(nn.Linear(2, 3), env, CPU, ShardingPlan({}))
    inner: Any = model.module
    names, node = list(model.state_dict()), lambda: cast(Any, get_gradient_edge(inner.weight).node)
    node().metadata["kept by"] = "DDP"
    leave_ddp(model)
    assert model._dmp_wrapped_module is inner
    assert node().metadata == {}
    leave_ddp(model)
    assert list(model.state_dict()) == names
    return_to_ddp(model)
    assert isinstance(model._dmp_wrapped_module, nn.parallel.DistributedDataParallel)
    assert model.module is inner


@pytest.mark.parametrize(("losses", "expected"), [(torch.tensor([1.0, 2.5]), 3.5), (torch.tensor(1.5), 1.5)])
def test_several_losses_of_a_model_are_added_up(losses: torch.Tensor, expected: float) -> None:
    """As in TorchRec's pipelines."""
    pipeline: Any = Mock(_model_fwd=lambda batch: (losses, batch))
    loss, output = GraphTrainPipeline._forward(pipeline, "batch")
    assert (loss.item(), loss.dim(), output) == (expected, 0, "batch")


@pytest.mark.parametrize(("interval", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (None, [])])
def test_replicas_are_averaged_after_every_interval_from_the_first_step_on(
    interval: int | None, expected: list[int]
) -> None:
    """As in TorchRec's pipelines."""
    pipeline: Any = Mock(_sync_interval=interval)
    pipeline._ids.id_tables, averaged = [], []
    for pipeline._steps in range(5):
        GraphTrainPipeline._take_step(pipeline, PlannedStep(StepKind.EAGER, 0))
        averaged += [pipeline._steps] * pipeline._replicas.sync.call_count
        pipeline._replicas.sync.reset_mock()
    assert averaged == expected


def test_an_evaluation_between_steps_grows_the_capacity_to_its_batch() -> None:
    """Ids that were sent ahead are forgotten. Before the first step there is no capacity."""
    for steps in (0, 3):
        pipeline: Any = Mock(_steps=steps)
        GraphTrainPipeline.prepare_evaluation(pipeline, Mock())
        pipeline._ids.forget.assert_called_once()
        sizes = pipeline._capacity.ask.return_value.wait.return_value
        assert [call.args for call in pipeline._grow.call_args_list] == [(sizes,)] * (steps > 0)


class _SummedBehind(torch.autograd.Function):
    """The tensor itself; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradients[0])
        return gradients[0]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: _SummedBehind.apply(x).sum().backward(), "allreduce"),
        (lambda x: dist.all_gather([torch.empty_like(x)], x), "allgather"),
        (lambda x: dist.barrier(), "barrier"),
        (lambda x: dist_functional.all_reduce(x), "allreduce"),
        (lambda x: _functional_collectives.all_reduce(x, "sum", [0]), "all_reduce"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_collective_of_the_model_is_found(
    world_of_one: dist.ProcessGroup, call: Callable[[torch.Tensor], Any], name: str
) -> None:
    x = torch.ones(3, requires_grad=True)
    with ModelCollectives() as collectives:
        call(x * 2)
    assert re.fullmatch(rf"{name} at {__file__}:\d+", collectives.called)


def test_our_collectives_and_compiled_functions_are_as_without(world_of_one: dist.ProcessGroup) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend="eager")
    with ModelCollectives() as collectives:
        assert max_over_ranks([2.0], CPU) == [2.0]
        assert_same(compiled(torch.zeros(3)), torch.ones(3), "compiled")
    assert collectives.called == ""


@pytest.mark.parametrize("where", ["post_lookup", "post_odist"])
def test_trackers_are_not_captured(world_of_one: dist.ProcessGroup, where: str) -> None:
    module = _shard(OverlapEmbeddingBagCollectionSharder(), world_of_one, FUSED)
    getattr(module, f"register_{where}_tracker_fn")(lambda *_: None)
    assert capture_blockers(module) == "a tracker is registered"


@pytest.mark.parametrize(
    ("kind", "device_type", "reason", "taken"),
    [
        ("torchrec", "cuda", None, False),
        ("torchrec", "cpu", None, False),
        ("graph", "cpu", None, True),
        ("graph", "cuda", None, True),
        ("graph", "cuda", "of this", False),
        ("auto", "cpu", None, False),
        ("auto", "cuda", None, True),
        ("auto", "cuda", "of this", False),
    ],
)
def test_which_pipeline_a_run_takes(
    world_of_one: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    device_type: str,
    reason: str | None,
    taken: bool,
) -> None:
    monkeypatch.setattr(assembly, "capture_blockers", lambda model: reason)
    model: Any = nn.Linear(2, 2)
    assert takes_graph(kind, "torchrec", model, torch.device(device_type)) == taken
    told = kind == "graph" and reason is not None
    assert caplog.messages == ["train.pipeline: torchrec, since the steps cannot be captured: of this"] * told


@pytest.mark.parametrize(
    ("backend", "arguments", "reason"),
    [
        ("nccl", {}, "backend nccl waits for the host"),
        ("pgas", {"execute_all_batches": False}, "execute_all_batches is False"),
    ],
)
def test_what_cannot_be_captured_is_told_by_rank_0_alone(
    world_of_one: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    sharded = _shard(OverlapEmbeddingBagCollectionSharder(backend=backend), world_of_one, FUSED)
    model: Any = nn.ModuleList([sharded, nn.Linear(1, 1)])
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for rank, told in ((1, []), (0, [f"train pipeline: TorchRec's, since the step cannot be captured: {reason}"])):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        GraphTrainPipeline(model, optimizer, CPU, **arguments)
        assert [record.getMessage() for record in caplog.records if record.name == "dlrm_overlap"] == told


@pytest.mark.parametrize("unknown", ["nccl", "stores"])
def test_an_unknown_way_to_reduce_is_refused(unknown: str) -> None:
    nothing: Any = None
    with refuses(f"dense_reduce: '{unknown}' on cpu must be auto, collective or, on GPUs, st"):
        GraphTrainPipeline(nothing, nothing, CPU, dense_reduce=unknown)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("capacity", 8192, "8192 must be a BatchCapacity; leave it out to learn it"),
        ("bound", {"samples": 8}, "{'samples': 8} must be a BatchCapacity; leave it out to learn it"),
        ("casts", torch.bfloat16, "torch.bfloat16 must be a CastWeights; leave it out and use torch.autocast"),
        ("gradient_dtype", torch.float16, "torch.float16 must be torch.float32 or torch.bfloat16; leave it out"),
        ("gradient_dtype", "bf16", "'bf16' must be torch.float32 or torch.bfloat16; leave it out"),
    ],
)
@pytest.mark.filterwarnings("ignore:GraphTrainPipeline. bound is deprecated")
def test_an_argument_of_another_type_is_refused(name: str, value: Any, told: str) -> None:
    nothing: Any = None
    with refuses(f"{'capacity' if name == 'bound' else name}: {told}"):
        GraphTrainPipeline(nothing, nothing, CPU, **{name: value})


def test_an_unknown_way_to_update_is_refused() -> None:
    nothing: Any = None
    with refuses("dense_update: 'owners' must be auto, all, owner or owner_deferred; leave it out"):
        GraphTrainPipeline(nothing, nothing, CPU, dense_update="owners")
