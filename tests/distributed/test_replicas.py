"""2D parallelism on four CPU ranks: two sharding groups of two, whose rows `DMPCollection.sync` averages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingPlan, ShardingStrategy
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.unsupported import unsupported_by_exchange
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near
from tests.distributed.models import CPU, MEAN, SUM, Model, Tables, draw_ids, make_plan, open_pipeline, world
from tests.distributed.workers import logged_messages, run_ranks

RANKS, GROUP, STEPS, SAMPLES = 4, 2, 4, 5
TABLES: Tables = {
    "whole": (30, 8, ["f0"], SUM),
    "columns": (20, 16, ["f1"], MEAN),
    "rows": (25, 8, ["f0", "f2"], SUM),
    "everywhere": (10, 8, ["f3"], SUM),
}
SHARDS: dict[str, Any] = {"whole": [1], "columns": [0, 1], "rows": row_wise(compute_kernel="fused"), "everywhere": []}
WAYS = {
    "nccl": "sparse_dist",
    "pgas": "sparse_dist",
    "fused": "none",
    "pgas_graph": "graph",
    "fused_graph_hook": "graph",
}
"""way, which begins with its backend -> pipeline"""
ADAGRAD: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "eps": 1e-3}
SGD: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1024.0}
"""a power of two so large that rows before and after a step give their gradient almost exactly"""


class CpuCollection(DMPCollection):
    """A `DMPCollection` of CPU ranks. TorchRec's needs other devices, and means, which gloo does not compute."""

    device: Any = property(lambda _: CPU, lambda *_: None)
    _device: Any = device

    taken_by_hook = 0
    """number of tensors that a hook has averaged"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, device=torch.device("mtia"), custom_all_reduce=self._average, **kwargs)

    def average_by_hook(self) -> None:
        """Average by `set_all_reduce_hook`, whose hook gets the process group as well since TorchRec 1.9."""

        def hook(*given: Any) -> None:
            *group, tensors = given
            assert group == ([self._default_ctx.replica_pg] if hasattr(self, "_all_reduce_hook") else [])
            self.taken_by_hook += len(tensors)
            self._average(tensors)

        self.set_all_reduce_hook(hook)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **kwargs)
        specs = [each.sharding_spec for module in plan.plan.values() for each in dict(module).values()]  # type: ignore
        for shard in [shard for spec in specs if spec is not None for shard in spec.shards]:
            shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")  # CPUs have no number

    def _average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._default_ctx.replica_pg)
            tensor /= RANKS // GROUP


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (4, SAMPLES), generator=generator)
        sparse = draw_ids(generator, dict.fromkeys(["f0", "f1", "f2", "f3"], 10), [*lengths], torch.int64)
        batches.append(Batch(torch.rand(SAMPLES, 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _shard(sharder: Any) -> CpuCollection:
    model = Model(TABLES, {"other": (25, 8, ["f1"], SUM)})
    plan = make_plan(model, SHARDS, {"other": [0]}, sharder, world_size=GROUP)
    return CpuCollection(
        module=model, plan=plan, world_size=RANKS, sharding_group_size=GROUP, global_pg=world(), sharders=[sharder]
    )


def _lookups(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    modules = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", [])]
    return [m for lookup in modules for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


class ScaledAdagrad:
    """Row-wise Adagrad whose sum of squares is divided by the number of groups (arXiv 2508.03854), written out.

    Called after each step of plain SGD, it finds the gradients by it, and updates the rows as they were before.
    """

    def __init__(self, model: CpuCollection) -> None:
        self._average = model._average
        self._rows = [rows for lookup in _lookups(model) for rows in lookup.split_embedding_weights()]
        self.sums = [torch.zeros(len(rows)) for rows in self._rows]
        self._note()

    def _note(self) -> None:
        self._before = [rows.clone() for rows in self._rows]

    def __call__(self) -> None:
        """Update the rows, and average them and the sums over the groups."""
        for rows, before, sums in zip(self._rows, self._before, self.sums, strict=True):
            gradient = (before - rows) / SGD["learning_rate"]
            sums += gradient.square().mean(1)
            root = (sums / (RANKS // GROUP)).sqrt() + ADAGRAD["eps"]
            rows.copy_(before - ADAGRAD["learning_rate"] * gradient / root[:, None])
        self._average([*self._rows, *self.sums])
        self._note()


def _train(
    sharder: Any,
    pipeline: str,
    after_step: Callable[[CpuCollection], ScaledAdagrad] | None = None,
    by_hook: bool = False,
) -> dict[str, Any]:
    model = _shard(sharder)
    if by_hook:
        model.average_by_hook()
    generator = torch.Generator().manual_seed(0)
    for lookup in _lookups(model):
        for rows in lookup.split_embedding_weights():
            nn.init.uniform_(rows, -1, 1, generator=generator)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    for parameter in dense.values():
        nn.init.uniform_(parameter.data, 0.5, 1.0, generator=torch.Generator().manual_seed(0))
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", keyed)])
    batches = _batches()
    steps, remaining = open_pipeline(pipeline, model, optimizer), iter(batches)
    written_out = after_step(model) if after_step is not None else None
    outputs = []
    for _ in batches:
        outputs.append(steps.progress(remaining))
        if pipeline == "none":
            (written_out or model.sync)()
    taken_by_hook = model.taken_by_hook
    rows = [rows.clone() for lookup in _lookups(model) for rows in lookup.split_embedding_weights()]
    if written_out is not None:
        states = written_out.sums
    else:
        states = [state["sum"].clone() for lookup in _lookups(model) for state in lookup.get_optimizer_state()]
    every = rows + states + [parameter.detach().clone() for parameter in dense.values()]
    used = [exchange.options.backend for exchange in exchanges(model)]
    for exchange in exchanges(model):
        exchange.close()
    return {"outputs": outputs, "trained": dict(enumerate(every)), "used": used, "taken_by_hook": taken_by_hook}


def _train_all(folder: Path) -> None:
    messages = logged_messages()
    saved = {"torchrec": _train(EmbeddingBagCollectionSharder(dict(ADAGRAD)), "sparse_dist")}
    for way, pipeline in WAYS.items():
        sharder = OverlapEmbeddingBagCollectionSharder(dict(ADAGRAD), backend=way.partition("_")[0], slice_bags=4)
        saved[way] = _train(sharder, pipeline, by_hook=way.endswith("hook"))
    root = (RANKS // GROUP) ** 0.5
    scaled = ADAGRAD | {name: ADAGRAD[name] * root for name in ("learning_rate", "eps")}
    saved["scaled"] = _train(OverlapEmbeddingBagCollectionSharder(scaled), WAYS["pgas_graph"])
    saved["written out"] = _train(EmbeddingBagCollectionSharder(dict(SGD)), "none", ScaledAdagrad)
    saved["log"] = {"messages": messages}
    sharded: Any = _shard(OverlapEmbeddingBagCollectionSharder()).module.embedding
    sharded._env.sharding_strategy = ShardingStrategy.FULLY_SHARDED  # whose lookups can be made on GPUs alone
    shardings = dict(zip(sharded._sharding_types, sharded._embedding_shardings, strict=True))
    reasons = unsupported_by_exchange(shardings, sharded._env, torch.float32)
    saved["refused"] = {"reasons": list(reasons.values())}
    torch.save(saved, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("replicas")
    run_ranks(_train_all, RANKS, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
def test_outputs_rows_and_states(saved: list[dict[str, Any]], way: str) -> None:
    tolerance = WEIGHT_TOLERANCE["fp32"]
    for rank in range(RANKS):
        ours, torchrec = saved[rank][way], saved[rank]["torchrec"]
        for step, (outputs, expected) in enumerate(zip(ours["outputs"], torchrec["outputs"], strict=True)):
            assert_all_near(outputs, expected, tolerance, f"rank {rank}, step {step}, output")
        assert_all_near(ours["trained"], torchrec["trained"], tolerance, f"rank {rank}, trained")
        assert ours["used"] == [way.partition("_")[0]] * 2
        assert (ours["taken_by_hook"] > 0) == way.endswith("hook")
        assert not saved[rank]["log"]["messages"], "everything is exchanged, and taken by the pipeline"


def test_adagrad_scaled_by_the_number_of_groups(saved: list[dict[str, Any]]) -> None:
    """TorchRec's, with the learning rate and epsilon times the square root of that number, is the paper's."""
    for rank in range(RANKS):
        scaled, expected, other = (saved[rank][name]["trained"] for name in ("scaled", "written out", "torchrec"))
        assert_all_near(scaled, expected, WEIGHT_TOLERANCE["fp32"], f"rank {rank}, trained")
        assert not torch.allclose(scaled[0], other[0], rtol=1e-2), "the factor makes a difference"


def test_fully_sharded_rows_stay_with_torchrec(saved: list[dict[str, Any]]) -> None:
    told = "2D parallelism with fully sharded rows"
    assert saved[0]["refused"]["reasons"].count(told) == 3, "of those that are not data-parallel"
