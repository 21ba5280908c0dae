"""Models that use other features of TorchRec train under our sharders as under TorchRec's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,  # pyright: ignore[reportPrivateImportUsage]
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.sharding_plan import get_default_sharders as get_torchrec_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules import embedding_modules, mc_modules
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import GraphTrainPipeline, explain, get_default_sharders
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.replicated import data_parallel_weights
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near
from tests.distributed import models
from tests.distributed.captured import captures
from tests.distributed.models import CPU, SUM, Tables, local_tensors, make_plan
from tests.distributed.workers import cases_on_ranks, logged_messages

# Arguments and functions of TorchRec 1.9.
_COPY_THREAD, _FORCE_STRIDE = "async_inplace_copy", "force_variable_stride"
_SKIP_GRAD_SYNC = "mark_data_parallel_skip_grad_sync"
STEPS, SAMPLES, KEYS = 9, 4, ["g", "h", "f"]
SGD = {"learning_rate": 0.5}
TABLES: Tables = {"a": (20, 8, ["f"], SUM), "b": (9, 4, ["g"], SUM)}
OTHERS: Tables = {"c": (12, 8, ["h"], SUM)}
SHARDS: Mapping[str, Sequence[int]] = {"a": [1], "b": []}
Found = dict[str, Any]
Ids = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]


def _batches(change: Ids = lambda ids: ids, samples: Sequence[int] = (SAMPLES, SAMPLES), least: int = 0) -> list[Batch]:
    """Return this rank's batches with their ids changed; the first, from which the capacity is learnt, has the most."""
    rank, batches = dist.get_rank(), []
    generator, bags = torch.Generator().manual_seed(rank), 3 * samples[rank]
    for step in range(STEPS):
        lengths = torch.randint(least if step else 3, 4, (bags,), generator=generator)
        ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
        sparse = change(KeyedJaggedTensor(list(KEYS), ids, lengths=lengths))
        batches.append(Batch(torch.rand(samples[rank], 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _train_model(sharder: Any, pipeline: Any, batches: Sequence[Batch], mark: Any = None) -> Found:
    model, before = models.Model(TABLES, OTHERS), _leave_as_they_are
    if mark is not None:
        mark(model.embedding)
        before = _start_by_rank
    plan = make_plan(model, SHARDS, {"c": [0]}, sharder)
    return models.train(model, plan, sharder, batches, pipeline, before=before)


def _leave_as_they_are(*_: Any) -> None: ...


def _start_by_rank(sharded: DistributedModelParallel, _: Any) -> None:
    for weight in data_parallel_weights(sharded).values():
        weight.data.mul_(1 + dist.get_rank())


def _assert_as_torchrec(
    *pipelines: Any, batches: Sequence[Batch], plain: Sequence[Batch] | None = None, mark: Any = None
) -> Found:
    """Check what each of `pipelines` gives with our sharder, and return what TorchRec gives.

    `plain` are the batches as TorchRec takes them. `mark` is called with the first module before it is sharded. Its
    data-parallel tables then begin with other rows on each rank.
    """
    theirs = _train_model(EmbeddingBagCollectionSharder(dict(SGD)), "none", plain or batches, mark)
    for pipeline in (each for each in pipelines if each != "captured" or INTERPRETED):
        captured, messages = pipeline == "captured", logged_messages()
        with captures() if captured else nullcontext() as taken:
            sharder = OverlapEmbeddingBagCollectionSharder(dict(SGD))
            ours = _train_model(sharder, "graph" if captured else pipeline, batches, mark)
        assert taken is None or taken["replayed"] > 0, "steps are captured"
        assert not [message for message in messages if "TorchRec" in message], messages
        for step, pair in enumerate(zip(ours["outputs"], theirs["outputs"], strict=True)):
            assert_all_near(*pair, WEIGHT_TOLERANCE["fp32"], f"{pipeline}, step {step}, output")
        assert_all_near(ours["weights"], theirs["weights"], WEIGHT_TOLERANCE["fp32"], f"{pipeline}, weights")
    return theirs


def _check_unsynchronized() -> None:
    """Each rank trains its data-parallel tables alone."""
    mark = getattr(embedding_modules, _SKIP_GRAD_SYNC)
    theirs = _assert_as_torchrec("sparse_dist", "graph", "captured", batches=_batches(), mark=mark)
    (mine,) = (weight for name, weight in theirs["weights"].items() if ".b.weight" in name)
    ranks = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(ranks, mine)
    assert not torch.equal(*ranks), "the ranks' gradients differ"


def _check_forced_stride() -> None:
    """Every feature has its own stride, although all are equal."""
    make: Any = partial(KeyedJaggedTensor.from_jt_dict, **{_FORCE_STRIDE: True})
    batches = _batches(lambda ids: make(ids.to_dict()))
    assert batches[0].sparse.variable_stride_per_key()
    _assert_as_torchrec("sparse_dist", "captured", batches=batches, plain=_batches())


def _check_no_samples() -> None:
    """A rank has no samples, and all bags have the same number of ids."""
    _assert_as_torchrec("graph", "captured", batches=_batches(samples=(SAMPLES, 0), least=3))


def _check_empty() -> None:
    """A rank without samples makes its ids of JaggedTensors with offsets [0]."""
    batches = _batches(lambda ids: KeyedJaggedTensor.from_jt_dict(ids.to_dict()), samples=(SAMPLES, 0))
    _assert_as_torchrec("sparse_dist", "graph", batches=batches)


def _splits_empty() -> bool:
    """Return whether ids without samples can be split by key; TorchRec 1.8 raises an IndexError."""
    try:
        return bool(KeyedJaggedTensor(["f"], torch.empty(0), lengths=torch.empty(0).int()).to_dict())
    except IndexError:
        return False


def _with_copy_thread(model: Any, optimizer: Any, _: Any) -> TrainPipelineSparseDist[Any, Any]:
    """Return TorchRec's pipeline with its thread, which TorchRec starts on accelerators only."""
    options: Any = {"enable_inplace_copy_batch": True, _COPY_THREAD: True}
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU, **options)
    pipeline._setup_async_inplace_copy(True, torch.device("mtia"))
    assert pipeline._async_inplace_copy
    return pipeline


def _graph_with_copy_thread(model: Any, optimizer: Any, _: Any) -> GraphTrainPipeline:
    options: Any = {"enable_inplace_copy_batch": True, _COPY_THREAD: True}
    pipeline = GraphTrainPipeline(model, optimizer, CPU, **options)
    assert pipeline._fallback is None
    return pipeline


def _check_copy_thread() -> None:
    _assert_as_torchrec(_with_copy_thread, _graph_with_copy_thread, batches=_batches())


class Beside(nn.Module):
    """A pooled collection and another module of tables, whose output is a KeyedTensor or a dictionary."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        bags = [EmbeddingBagConfig(20, 8, name=f"t_{key}", feature_names=[key]) for key in "fg"]
        self.pooled = EmbeddingBagCollection(bags, device=torch.device("meta"))
        self.other = other
        self.dense = nn.Linear(1, 8)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, other, scale = self.pooled(batch.sparse), self.other(batch.sparse), self.dense(batch.dense)
        sums = _sums(pooled, other, scale)
        return sums.square().mean(), sums.detach().clone()


@torch.fx.wrap
def _sums(pooled: Any, other: Any, scale: torch.Tensor) -> torch.Tensor:
    """Return [b, 8] of both modules."""
    pooled = pooled.to_dict()
    other = other[0] if isinstance(other, tuple) else other  # with remapped ids
    every = other.to_dict() if hasattr(other, "to_dict") else other
    found = every["h"]
    if not isinstance(found, torch.Tensor):
        samples = torch.repeat_interleave(found.lengths().long())
        found = torch.zeros_like(scale).index_add(0, samples, found.values())
    return (pooled["f"] + pooled["g"] * found) * scale


class _OwnMch(mc_modules.MCHManagedCollisionModule):
    """A user's module, which our sharder leaves to TorchRec."""


def _managed_collisions() -> nn.Module:
    config = EmbeddingBagConfig(12, 8, name="t_h", feature_names=["h"])
    policy = mc_modules.DistanceLFU_EvictionPolicy()
    remap = _OwnMch(12, CPU, policy, eviction_interval=2, input_hash_size=1000, buckets=2)
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection([config], device=torch.device("meta")),
        mc_modules.ManagedCollisionCollection({"t_h": remap}, [config]),
    )


def _prioritized() -> nn.Module:
    """Return a collection that sends rows first which the batch before does not update."""
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    config = EmbeddingConfig(12, 8, name="t_h", feature_names=["h"])
    return PECEmbeddingCollection(EmbeddingCollection([config], device=torch.device("meta")))


def _train_beside(make: Callable[[], nn.Module], ours: bool, kind: Any) -> Found:
    """Train by the default sharders, with optimizers in the backward."""
    torch.manual_seed(0)
    model = Beside(make())
    tables = [each for each in model.modules() if isinstance(each, EmbeddingBagCollection | EmbeddingCollection)]
    for collection in tables:
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    sharders = get_default_sharders() if ours else get_torchrec_sharders()
    ways = {
        "pooled": {"t_f": table_wise(1, compute_kernel="fused"), "t_g": row_wise(compute_kernel="fused")},
        "other": {"t_h": row_wise(compute_kernel="fused")},
    }
    plans = {}
    for name, of_tables in ways.items():
        module = model.get_submodule(name)
        sharder = next(each for each in sharders if each.module_type is type(module))
        plans[name] = construct_module_sharding_plan(module, of_tables, sharder, 2, 2, "cpu")
    plan = ShardingPlan(plans)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for module in sharded.modules():
        for lookup in getattr(module, "_lookups", []):
            for _, rows in sorted(lookup.named_parameters()):
                nn.init.uniform_(rows.data, -1, 1, generator=generator)
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    messages = logged_messages()
    pipeline = kind(sharded, dense, CPU)
    remaining = iter(_batches())
    outputs = {f"output of step {step}": pipeline.progress(remaining).clone() for step in range(STEPS)}
    found = outputs | dict(local_tensors(sharded.state_dict()))
    reasons = {table.table: table.why_not for table in explain(sharded).tables}
    for exchange in exchanges(sharded):
        exchange.close()
    return {"found": found, "log": messages, "reasons": reasons, "sharded": sharded.module.other}


def _check_beside(make: Callable[[], nn.Module], kept: str) -> None:
    """A module that stays with TorchRec keeps steps from being captured, but other tables are exchanged."""
    theirs = _train_beside(make, False, TrainPipelineSparseDist)
    told = f"{kept} other stays with TorchRec, which waits for the host"
    reasons = {"t_f": told, "t_g": told, "t_h": f"{kept} stays with TorchRec"}
    lines = [f"train pipeline: TorchRec's, since the step cannot be captured: {told}"]
    for pipeline, expected in ((TrainPipelineSparseDist, []), (GraphTrainPipeline, lines)):
        ours = _train_beside(make, True, pipeline)
        assert_all_near(ours["found"], theirs["found"], WEIGHT_TOLERANCE["fp32"], f"{pipeline.__name__}:")
        assert ours["log"] == (expected if dist.get_rank() == 0 else [])
        assert ours["reasons"] == theirs["reasons"] == reasons


class _NoStream:
    """Stands in for the streams and events of a GPU, where a CPU finishes each operation before the next."""

    def record(self, *_: Any) -> None: ...

    wait_event = wait_stream = record


def _check_prioritized_pipeline() -> None:
    """TorchRec's pipeline for such collections, which needs a GPU's streams, looks up our tables one step ahead."""
    from torchrec.distributed.train_pipeline.pec_train_pipeline import TrainPipelinePEC

    device_module = SimpleNamespace(current_stream=lambda *_: _NoStream())
    with (
        patch.object(torch, "get_device_module", lambda *_: device_module),
        patch.object(torch.cuda, "Event", _NoStream),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        ours, theirs = (_train_beside(_prioritized, with_ours, TrainPipelinePEC) for with_ours in (True, False))
    assert_all_near(ours["found"], theirs["found"], WEIGHT_TOLERANCE["fp32"], "TrainPipelinePEC:")
    assert not ours["log"]


def _sorted_select() -> nn.Module:
    config = EmbeddingConfig(12, 8, name="t_h", feature_names=["h"])
    collection: Any = EmbeddingCollection([config], device=torch.device("meta"))
    collection.set_use_sorted_select(True)
    return collection


def _check_sorted_select() -> None:
    theirs = _train_beside(_sorted_select, False, TrainPipelineSparseDist)
    for pipeline in (TrainPipelineSparseDist, GraphTrainPipeline):
        ours = _train_beside(_sorted_select, True, pipeline)
        assert_all_near(ours["found"], theirs["found"], WEIGHT_TOLERANCE["fp32"], f"{pipeline.__name__}:")
        assert ours["sharded"]._use_sorted_select, "where steps stay with TorchRec"
    assert not ours["log"], "all steps of the last pipeline are exchanged"


CASES: dict[str, Callable[[], None]] = {
    "managed collisions": partial(_check_beside, _managed_collisions, "ManagedCollisionEmbeddingBagCollection"),
    "prioritized": partial(_check_beside, _prioritized, "PECEmbeddingCollection"),
    "prioritized pipeline": _check_prioritized_pipeline,
    "sorted select": _check_sorted_select,
    "unsynchronized": _check_unsynchronized,
    "copy thread": _check_copy_thread,
    "forced stride": _check_forced_stride,
    "no samples": _check_no_samples,
    "empty": _check_empty,
}
_PRIORITIZED = (
    "a default sharder of PECEmbeddingCollection",
    any(type(each).__name__ == "PECEmbeddingCollectionSharder" for each in get_torchrec_sharders()),
)
# Case -> what it needs of TorchRec, and whether the installed one has it.
_NEEDED: dict[str, tuple[str, bool]] = {
    "prioritized": _PRIORITIZED,
    "prioritized pipeline": _PRIORITIZED,
    "sorted select": (
        "EmbeddingCollection.set_use_sorted_select",
        hasattr(EmbeddingCollection, "set_use_sorted_select"),
    ),
    "unsynchronized": (_SKIP_GRAD_SYNC, hasattr(embedding_modules, _SKIP_GRAD_SYNC)),
    "copy thread": (_COPY_THREAD, _COPY_THREAD in signature(TrainPipelineSparseDist).parameters),
    "forced stride": (_FORCE_STRIDE, _FORCE_STRIDE in signature(KeyedJaggedTensor.from_jt_dict).parameters),
    "empty": ("KeyedJaggedTensor.to_dict of ids without samples", _splits_empty()),
}


def _run_case(case: str) -> None:
    CASES[case]()


def _params() -> Iterator[Any]:
    for case in CASES:
        what, has_it = _NEEDED.get(case, ("", True))
        yield pytest.param(case, marks=[] if has_it else pytest.mark.skip(reason=f"this TorchRec lacks {what}"))


ended = cases_on_ranks(2, _run_case, [case for case in CASES if _NEEDED.get(case, ("", True))[1]])


@pytest.mark.parametrize("case", _params())
def test_trains_as_under_torchrec(ended: Callable[[str], None], case: str) -> None:
    ended(case)
