"""Training programs as a user of TorchRec writes them, each trained by TorchRec's pipeline and by captured steps.

What they do with a batch, with its ids and with their optimizers is theirs, and the captured step must give stock's
losses all the same. Imports no pytest.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tensordict import TensorDict
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.train.explain import explain
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.agreement import LOSS_TOLERANCE, assert_all_near
from tests.distributed.models import local_tensors

STEPS = 9  # three before the capture, two captured, and four replays
SAMPLES = 6
ROWS, DIM = 40, 8
KEYS = ["f", "g", "h", "k"]
MOST = {"f": (1, 1), "g": (0, 2), "h": (0, 5), "k": (0, 3)}
FIXED = {"f": (1, 1), "g": (2, 2), "h": (4, 4), "k": (3, 3)}


def _parts(value: Any) -> Sequence[Any]:
    """Return the parts of a tensor or of ids for which a stream can be recorded."""
    if isinstance(value, TensorDict):  # takes one stream only
        return [part for each in value.values() for part in _parts(each)]
    if isinstance(value, torch.Tensor) and value.is_nested:
        nested: Any = value
        return [nested.values(), nested.offsets()]
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return [value._indices(), value._values()]
    return [value]


class _Movable(Pipelineable):
    """What TorchRec's pipelines ask of a batch."""

    __slots__ = ()

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        return type(self)(*(each.to(device, non_blocking=non_blocking) for each in self._tensors()))

    def record_stream(self, stream: Any) -> None:
        for each in self._tensors():
            for part in _parts(each):
                part.record_stream(stream)

    def _tensors(self) -> list[Any]:
        return [getattr(self, name) for name in ("dense", "ids", "others")]


@dataclass
class Batch(_Movable):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    others: KeyedJaggedTensor


@dataclass(frozen=True)
class FrozenBatch(_Movable):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    others: KeyedJaggedTensor


@dataclass(slots=True)
class SlottedBatch(_Movable):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    others: KeyedJaggedTensor


@dataclass
class PartBatch(Batch):
    """Has a part besides tensors, or a tensor, that differs from step to step."""

    part: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        part = self.part.to(device) if isinstance(self.part, torch.Tensor) else self.part
        return replace(super().to(device, non_blocking=non_blocking), part=part)


def with_tensor_dict(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch whose ids are a TensorDict of nested tensors, in another order than the model's."""
    nested = {
        key: torch.nested.nested_tensor_from_jagged(each.values(), each.offsets())
        for key, each in reversed(ids.to_dict().items())
    }
    return Batch(dense, TensorDict(nested), others)  # type: ignore[arg-type]


def _with_jagged(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch with a JaggedTensor besides its ids, which remembers its offsets in some batches."""
    jagged = others.to_dict()["f"]
    if len(dense) and dense[0, 0] > 0.5:
        jagged.offsets()
    else:
        jagged = JaggedTensor(jagged.values(), lengths=jagged.lengths())
    return Batch(dense, ids, jagged)  # type: ignore[arg-type]


def _with_caches(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch whose ids remember all that can be asked of them, and with a KeyedTensor besides."""
    for ask in (ids.length_per_key, ids.offset_per_key, ids.to_dict, ids.offsets):
        ask()
    keyed = KeyedTensor(["f", "g"], [1, 1], torch.stack([others.lengths() + dense[:, 0], dense[:, 1]], dim=1))
    keyed.to_dict()
    return Batch(dense, ids, keyed)  # type: ignore[arg-type]


def _with_sparse(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch with a sparse tensor besides its ids."""
    return Batch(dense, ids, dense.gt(0.5).float().to_sparse())  # type: ignore[arg-type]


def collection(keys: Sequence[str], weighted: bool = False) -> EmbeddingBagCollection:
    """Return a collection of a table a key."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{key}",
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=[key],
            # FBGEMM on a CPU does not divide the gradient of weighted means.
            pooling=PoolingType.MEAN if key == "h" and not weighted else PoolingType.SUM,
        )
        for key in keys
    ]
    return EmbeddingBagCollection(configs, is_weighted=weighted, device=torch.device("meta"))


class Plain(nn.Module):
    """One collection and a layer; what the others change a little."""

    kernels: ClassVar[Mapping[str, str]] = {}
    """compute kernels of tables, by feature; fused of others, and dense is of data-parallel ones"""
    weighted = False
    """whether ids have weights"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = collection(KEYS, self.weighted)
        self.bottom = nn.Linear(3, 4 * DIM)
        self.over = nn.Linear(4 * DIM, 2)

    def pooled(self, batch: Any) -> torch.Tensor:
        """Return [b, 4 * DIM], with the features in order of `KEYS`."""
        by_key = self.embedding(batch.ids).to_dict()
        return torch.cat([by_key[key] for key in KEYS], dim=1)

    def hidden(self, batch: Any) -> torch.Tensor:
        """Return [b, 4 * DIM] of the dense features."""
        return self.bottom(batch.dense)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a loss, and what it is made of."""
        output = self.over(torch.tanh(self.pooled(batch)) * self.hidden(batch))
        return (output - 1).square().mean(), output.detach()


class Split(Plain):
    """Two collections, which get one half of the features each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.second = collection(KEYS[:2]), collection(KEYS[2:])

    def pooled(self, batch: Any) -> torch.Tensor:
        left, right = batch.ids.split([2, 2])
        by_key = self.embedding(left).to_dict() | self.second(right).to_dict()
        return torch.cat([by_key[key] for key in KEYS], dim=1)


class TwoSets(Split):
    """Two collections, which get the features of two KeyedJaggedTensors of the batch."""

    def pooled(self, batch: Any) -> torch.Tensor:
        by_key = self.embedding(batch.ids).to_dict() | self.second(batch.others).to_dict()
        return torch.cat([by_key[key] for key in KEYS], dim=1)


class Permuted(Plain):
    """Has another order of features than its batches."""

    def pooled(self, batch: Any) -> torch.Tensor:
        by_key = self.embedding(batch.ids.permute([3, 1, 0, 2])).to_dict()
        return torch.cat([by_key[key] for key in KEYS], dim=1)


class Jagged(Plain):
    """Reads a JaggedTensor of its batch, see `_with_jagged`."""

    def hidden(self, batch: Any) -> torch.Tensor:
        lengths, ends = batch.others.lengths()[:, None], batch.others.offsets()[1:, None]
        return super().hidden(batch) * (lengths + ends)


class Keyed(Plain):
    """Reads a KeyedTensor of its batch."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * batch.others["f"] + batch.others.to_dict()["g"]


class Sparse(Plain):
    """Reads a sparse tensor of its batch."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) + torch.sparse.mm(batch.others, torch.ones(3, 4 * DIM, device=batch.dense.device))


class Weighted(Permuted):
    """Has ids with weights."""

    weighted = True


class ByKeyword(Plain):
    """Calls the collection by keyword."""

    def pooled(self, batch: Any) -> torch.Tensor:
        by_key = self.embedding(features=batch.ids).to_dict()
        return torch.cat([by_key[key] for key in KEYS], dim=1)


class Offsets(Plain):
    """Takes the lengths of bags for features of their own."""

    def hidden(self, batch: Any) -> torch.Tensor:
        lengths = batch.ids.offsets().diff().view(len(KEYS), -1).T.float()
        return self.bottom(batch.dense) * (1 + lengths.repeat_interleave(DIM, dim=1) / 4)


class OneFeature(Plain):
    """Looks a feature up in a small table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Embedding(ROWS, 4 * DIM)

    def hidden(self, batch: Any) -> torch.Tensor:
        one, several = batch.ids["f"], batch.ids["k"]
        padded = several.to_padded_dense(desired_length=3, padding_value=0.0)
        return self.bottom(batch.dense) + self.own(padded.long()).sum(1) + self.own(one.values())


class UnusedTower(Plain):
    """Has a tower that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 3)


class Normalised(Plain):
    """Keeps running means, and computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * DIM)

    def hidden(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
            return self.norm(super().hidden(batch).float())


class NormalisedOverRanks(Normalised):
    """Has a norm whose means are of all ranks' samples, on GPUs, which it needs."""

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            self.norm = nn.SyncBatchNorm(4 * DIM)


class Dropping(Plain):
    """Drops other hidden numbers in every step, and none in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def hidden(self, batch: Any) -> torch.Tensor:
        return self.drop(super().hidden(batch))


class Scaling(OptimizerWrapper):
    """Takes a step with gradients that are no longer scaled."""

    scaler: ClassVar[torch.amp.GradScaler]

    def step(self, closure: Any = None) -> None:
        Scaling.scaler.step(self._optimizer)
        Scaling.scaler.update()


class FailsAtFirst(Plain):
    """Fails in the first captured forward, whose caller tries again."""

    fails = False

    def hidden(self, batch: Any) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise ArithmeticError
        return super().hidden(batch)


class InHostMemory(Plain):
    """Has a table in the CPU's memory, which TorchRec serves beside the captured steps."""

    kernels: ClassVar = {"h": "fused_uvm"}


class CollectionInHostMemory(TwoSets):
    """Has a second collection, all of whose tables TorchRec serves beside the captured steps."""

    kernels: ClassVar = {"h": "fused_uvm", "k": "fused_uvm"}


class DataParallelCollection(Split):
    """Has a second collection, all of whose tables are data-parallel."""

    kernels: ClassVar = {"h": "dense", "k": "dense"}


class Sequences(Plain):
    """Has a data-parallel table, and beside its collection one that is not pooled, of whose rows the order counts."""

    kernels: ClassVar = {"f": "dense"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = collection(KEYS[:2])
        configs = [
            EmbeddingConfig(name=f"s_{key}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[key])
            for key in KEYS[2:]
        ]
        self.sequences = EmbeddingCollection(configs, device=torch.device("meta"))

    def pooled(self, batch: Any) -> torch.Tensor:
        by_key, sequences = self.embedding(batch.ids).to_dict(), self.sequences(batch.ids)
        parts = [by_key[key] for key in KEYS[:2]]
        for key in KEYS[2:]:
            rows = sequences[key]
            padded = torch.ops.fbgemm.jagged_to_padded_dense(rows.values(), [rows.offsets()], [4 * MOST[key][1]])
            parts.append(padded.cumsum(1).square().sum(1))
        return torch.cat(parts, dim=1)


class Parted(Plain):
    """Computes with a part of its batches."""

    def hidden(self, batch: Any) -> torch.Tensor:
        part = batch.part["scale"] if isinstance(batch.part, dict) else batch.part
        return super().hidden(batch) * part


class Rows(Plain):
    """Has a table that is not pooled, of which it reads all rows, without their lengths."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="s_k", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["k"])
        self.sequences = EmbeddingCollection([config], device=torch.device("meta"))
        self.head = nn.Linear(DIM, 1, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(4 * DIM), nn.Dropout(0.3)

    def hidden(self, batch: Any) -> torch.Tensor:
        rows = self.head(self.sequences(batch.ids)["k"].values()).square().mean()
        return self.drop(self.norm(super().hidden(batch))) * (1 + rows)


class IdsAsNumbers(Plain):
    """Reads the mean id of a feature."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (1 + batch.ids["k"].values().float().mean() / ROWS)


class CountedIds(Plain):
    """Reads how many ids a batch has, which ids with room do not say."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (batch.ids["h"].values().numel() / 10)


class NumbersOfIds(Plain):
    """Reads how many ids each feature has."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (batch.ids.length_per_key()[2] / 10)


class WeightsOfIds(Plain):
    """Reads the weights of ids."""

    weighted = True

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * batch.ids.weights().square().mean()


class RowsAsOutput(Rows):
    """Returns rows that are not pooled."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, _ = Plain.forward(self, batch)
        return loss, self.rows

    def hidden(self, batch: Any) -> torch.Tensor:
        found = self.sequences(batch.ids)["k"]
        self.rows = found.values().detach()
        padded = torch.ops.fbgemm.jagged_to_padded_dense(found.values(), [found.offsets()], [MOST["k"][1]])
        return Plain.hidden(self, batch) * (1 + padded.square().mean())


class WeightedInHostMemory(InHostMemory):
    """Has ids with weights besides."""

    weighted = True


class Summed(Plain):
    """Sums over its samples, so that its loss is a number without samples, too."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(torch.tanh(self.pooled(batch)) * self.hidden(batch))
        return (output - 1).square().sum() / SAMPLES, output.detach()


class SummedSets(Summed, TwoSets): ...


class SummedSequences(Summed, Sequences): ...


class SummedWeighted(Summed, WeightedInHostMemory): ...


def _sgd(parameters: Mapping[str, Any]) -> Any:
    return KeyedOptimizerWrapper(dict(parameters), lambda each: torch.optim.SGD(each, lr=0.5))


def _warm_clipped_adamw(parameters: Mapping[str, Any]) -> Any:
    adamw = KeyedOptimizerWrapper(dict(parameters), lambda each: torch.optim.AdamW(_groups(each, 0.1), lr=0.05))
    clipped = GradientClippingOptimizer(adamw, clipping=GradientClipping.NORM, max_gradient=0.05)
    return WarmupOptimizer(clipped, [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.2)], lr=0.05)


def _momentum(parameters: Mapping[str, Any]) -> Any:
    def make(each: list[Any]) -> Any:
        return torch.optim.SGD(_groups(each, 0.05), lr=0.5, momentum=0.9, dampening=0.5)

    keyed = KeyedOptimizerWrapper(dict(parameters), make)
    return GradientClippingOptimizer(keyed, clipping=GradientClipping.VALUE, max_gradient=0.01)


def _rmsprop(parameters: Mapping[str, Any]) -> Any:
    return KeyedOptimizerWrapper(dict(parameters), lambda each: torch.optim.RMSprop(each, lr=0.01))


def _dense_one(every: Any, dense: Any) -> Any:
    return dense


def _all_of_them(every: Any, dense: Any) -> Any:
    return every


def _scaling(parameters: Mapping[str, Any]) -> Any:
    return Scaling(KeyedOptimizerWrapper(dict(parameters), lambda each: torch.optim.SGD(each, lr=0.1)))


def _clipped_by_hook(parameters: Mapping[str, Any]) -> Any:
    """Return an optimizer that a hook of its step precedes, by which torch.nn.utils clips."""
    keyed = KeyedOptimizerWrapper(dict(parameters), lambda each: torch.optim.SGD(each, lr=0.5, momentum=0.9))
    every = list(parameters.values())
    keyed._optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(every, 0.01))
    return keyed


def _accumulated(pipeline: Any, optimizer: Any, model: nn.Module) -> Any:
    """Return TorchRec's own wrapper around a pipeline, which steps after every other batch, and after the last one.

    TorchRec's pipeline gets `is_last_batch`, without which its ranks would each take a step of their own.
    """
    from torchrec.distributed.train_pipeline.gradient_accumulation import (
        GradientAccumulationConfig,
        GradientAccumulationWrapper,
    )

    class Wrapper(GradientAccumulationWrapper[Any, Any]):
        def progress(self, dataloader_iter: Iterator[Any], is_last_batch: bool | None = None) -> Any:
            is_ours = isinstance(self._pipeline, GraphTrainPipeline)
            return super().progress(dataloader_iter, not is_ours and self.current_step == STEPS - 1)

    return Wrapper(pipeline, optimizer, model, GradientAccumulationConfig(True, 2))


def _groups(parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters, one of which decays."""
    biases, weights = ([each for each in parameters if (each.ndim == 1) == flat] for flat in (True, False))
    return [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}]


def _halved(model: nn.Module) -> Mapping[str, Any]:
    """Return a forward of a user's own, whose losses are half of the model's."""

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, output = model(batch)
        return loss / 2, output

    return {"custom_model_fwd": forward, "enqueue_batch_after_forward": True}


def _scaled(model: nn.Module) -> Mapping[str, Any]:
    """Return a forward that scales the losses, as `Scaling` expects it."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    Scaling.scaler = torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=4)

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, output = model(batch)
        return Scaling.scaler.scale(loss), output

    return {"custom_model_fwd": forward}


class Program(NamedTuple):
    """A training program: its model, what its batches are, and its dense optimizer."""

    model: type[Plain] = Plain
    batch: Callable[..., Any] = Batch
    optimizer: Callable[[Mapping[str, Any]], Any] = _sgd
    bags: Mapping[str, tuple[int, int]] = MOST
    scheduled: Callable[[Any, Any], Any] = lambda every, dense: None
    """gives that optimizer, of all of them together and the dense one, whose learning rates torch's scheduler sets"""
    why_after: str = ""
    """why the dense optimizer steps after the graph, if it does"""
    steps: int = STEPS
    longer: Mapping[tuple[int, int], int] = {}
    """by step and rank: how many times as long its bags are"""
    samples: Callable[[int, int], int] = lambda step, rank: SAMPLES
    """of a step and a rank"""
    part: Callable[[int, int], Any] | None = None
    """of the batch of a step and a rank, a `PartBatch`"""
    why_eager: str = ""
    """what is found in the first steps, and keeps the others from being captured"""
    evaluated: Mapping[int, int] = {}
    """by step: samples of a batch of rank 0 that is evaluated before; that of rank 1 has one less, if any"""
    arguments: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {}
    """of the pipeline, for a model"""
    wrap: Callable[[Any, Any, nn.Module], Any] = lambda pipeline, *_: pipeline
    """gives what is progressed, for a pipeline, its optimizer and its model"""
    captured: tuple[int, int] = (2, STEPS - 3 - 2)
    """steps that are captured, and that are replayed"""
    falls_back: bool = False
    """whether TorchRec's pipeline takes the steps"""
    ours_alone: Collection[int] = ()
    """steps that change nothing, and at which stock TorchRec fails"""


_SHORT = lambda step, rank: SAMPLES if step < STEPS - 1 else max(2, 3 - rank)  # noqa: E731
_EMPTY_LAST = lambda step, rank: SAMPLES if step < STEPS - 1 or rank == 0 else 0  # noqa: E731
# Step 6 is beyond the bound and 7 was read for it; after three of the warm-up, 11 and 12 are captured anew.
_LONGER = {(6, 0): 4, (13, 1): 3}
# No rank has a sample in steps 7 and 14, and rank 1 has none in step 10.
_EMPTY = lambda step, rank: 0 if step in (7, 14) or (step, rank) == (10, 1) else SAMPLES  # noqa: E731
_EMPTY_FIRST = lambda step, rank: SAMPLES if step > rank else 0  # noqa: E731
_NONE = "is none of torch.optim's SGD, Adagrad, Adam and AdamW"
PROGRAMS: dict[str, Program] = {
    "split": Program(Split),
    "two_sets_fixed": Program(TwoSets, bags=FIXED),
    "permuted": Program(Permuted),
    "weighted": Program(Weighted),
    "weighted_in_host_memory": Program(WeightedInHostMemory),
    "by_keyword": Program(ByKeyword),
    "one_feature": Program(OneFeature),
    "frozen_batch": Program(batch=FrozenBatch),
    "slotted_batch": Program(batch=SlottedBatch),
    "clipped_adamw": Program(optimizer=_warm_clipped_adamw),
    "momentum": Program(optimizer=_momentum, scheduled=_dense_one),
    "rmsprop": Program(optimizer=_rmsprop, why_after=f"RMSprop {_NONE}", scheduled=_dense_one),
    "normalised": Program(Normalised, samples=_SHORT, captured=(2, 3)),
    "normalised_over_ranks": Program(NormalisedOverRanks),
    "dropping": Program(Dropping, steps=15, longer=_LONGER, evaluated={5: SAMPLES + 3, 14: 4}, captured=(4, 2)),
    "scaled": Program(optimizer=_scaling, arguments=_scaled, why_after=f"Scaling {_NONE}"),
    "clipped_by_hook": Program(optimizer=_clipped_by_hook, why_after="SGD has hooks of its steps"),
    "fails_at_first": Program(FailsAtFirst),
    "unused_tower": Program(UnusedTower, optimizer=_warm_clipped_adamw),
    "in_host_memory": Program(InHostMemory),
    "collection_in_host_memory": Program(CollectionInHostMemory),
    "data_parallel_collection": Program(DataParallelCollection),
    # Not evaluated: stock TorchRec's unpooled collections fail where ranks evaluate unlike samples.
    "longer_sequences": Program(Sequences, steps=15, longer=_LONGER, captured=(4, 3)),
    "longer_bags": Program(Offsets, steps=15, longer=_LONGER, evaluated={0: 4, 5: SAMPLES + 3, 14: 4}, captured=(4, 2)),
    "longer_bags_in_host_memory": Program(InHostMemory, steps=15, longer=_LONGER, evaluated={5: 4}, captured=(4, 3)),
    "longer_bags_than_fixed": Program(Split, bags=FIXED, steps=13, longer={(5, 1): 2}, captured=(3, 1)),
    "short_last_batch": Program(Weighted, samples=_SHORT, captured=(2, 3)),
    "short_last_batch_fixed": Program(TwoSets, bags=FIXED, samples=_SHORT, captured=(2, 3)),
    "empty_last_batch": Program(Weighted, samples=_EMPTY_LAST, captured=(2, 3)),
    "empty_last_batch_fixed": Program(TwoSets, bags=FIXED, samples=_EMPTY_LAST, captured=(2, 3)),
    "unlike_samples": Program(Offsets, samples=lambda step, rank: SAMPLES - rank),
    "unlike_samples_fixed": Program(Weighted, bags=FIXED, samples=lambda step, rank: SAMPLES - rank),
    "other_samples": Program(steps=14, samples=lambda step, rank: SAMPLES - 2 * (step > 2), captured=(2, 2)),
    "no_samples": Program(Summed, samples=_EMPTY, steps=15, evaluated={0: 0, 5: 0, 11: 1}, captured=(2, 7)),
    "no_samples_fixed": Program(SummedSets, bags=FIXED, samples=_EMPTY, steps=15, evaluated={5: 0}, captured=(2, 7)),
    "no_samples_at_first": Program(Summed, samples=_EMPTY_FIRST, captured=(2, 1)),
    "no_samples_fixed_at_first": Program(SummedSets, bags=FIXED, samples=_EMPTY_FIRST, captured=(2, 1)),
    "tensor_dict": Program(batch=with_tensor_dict, falls_back=True, evaluated={5: 4}, captured=(0, 0)),
    "tensor_dict_of_sequences": Program(Sequences, batch=with_tensor_dict, falls_back=True, captured=(0, 0)),
    "sparse_batch": Program(Sparse, batch=_with_sparse, falls_back=True, captured=(0, 0)),
    "cached_ids": Program(Keyed, batch=_with_caches),
    "jagged_batch": Program(Jagged, batch=_with_jagged, captured=(0, 0)),
    # Stock TorchRec's unpooled collections take no batch without samples.
    "no_samples_of_sequences": Program(
        SummedSequences,
        samples=lambda step, _: 0 if step in (7, 14) else SAMPLES,
        steps=15,
        captured=(2, 8),
        ours_alone=(7, 14),
    ),
    "no_samples_with_weights": Program(SummedWeighted, samples=_EMPTY, steps=15, captured=(2, 7)),
    "own_forward": Program(arguments=_halved),
    # Parts that are not tensors: of the last batch of rank 1, and of every batch.
    "valid_samples": Program(
        Parted, PartBatch, part=lambda step, rank: SAMPLES - 2 * (step == STEPS - 1) * rank, captured=(2, 3)
    ),
    "nested_scale": Program(
        Parted, PartBatch, part=lambda step, rank: {"scale": 1.0 + (step in (1, 6))}, steps=12, captured=(2, 4)
    ),
    "step_numbers": Program(Parted, PartBatch, part=lambda step, rank: np.float32(step % 5), steps=24, captured=(0, 0)),
    "other_types": Program(
        Parted,
        PartBatch,
        part=lambda step, rank: torch.tensor([[2]]) if step < STEPS - 1 else torch.tensor([[0.5]]),
        captured=(2, 3),
    ),
    "rows": Program(Rows, captured=(0, 0), why_eager="the loss becomes NaN with NaN"),
    "rows_as_output": Program(RowsAsOutput, captured=(0, 0), why_eager="an output has another size"),
    "ids_as_numbers": Program(IdsAsNumbers, captured=(0, 0), why_eager="differs with padded ids"),
    "counted_ids": Program(CountedIds, captured=(0, 0), why_eager="differs with padded ids"),
    "numbers_of_ids": Program(NumbersOfIds, captured=(0, 0), why_eager="it fails (InputError: "),
    "weights_of_ids": Program(WeightsOfIds, captured=(0, 0), why_eager="differs with padded ids"),
}
if find_spec("torchrec.distributed.train_pipeline.gradient_accumulation"):  # not in every release
    accumulated = Program(wrap=_accumulated, why_after=f"_GAOptimizerWrapper {_NONE}", scheduled=_all_of_them)
    PROGRAMS["accumulated"] = accumulated


def _batches(program: Program, rank: int, only: int | None = None, skipped: Collection[int] = ()) -> Iterator[Any]:
    """Yield the batches of all steps but some; or one to evaluate before the step `only`."""
    generator = torch.Generator().manual_seed(rank + 100 * (only or 0))

    def ids(keys: Sequence[str], step: int, samples: int) -> KeyedJaggedTensor:
        lengths, times = [], program.longer.get((step, rank), 1)
        for least, most in (program.bags[key] for key in keys):
            some = torch.randint(least, most + 1, (samples,), generator=generator)
            if step == 0 and samples:  # from which the bound is learnt
                some = torch.tensor([most] * (samples - 1) + [least])
            lengths.append(some * times)
        values = torch.randint(0, ROWS, (int(torch.cat(lengths).sum()),), generator=generator)
        weights = torch.randn(values.shape, generator=generator) if program.model.weighted else None
        return KeyedJaggedTensor(list(keys), values, weights, lengths=torch.cat(lengths))

    for step in range(program.steps) if only is None else [only]:
        samples = program.samples(step, rank) if only is None else max(0, program.evaluated[step] - rank)
        if step in skipped:
            continue
        dense = torch.rand(samples, 3, generator=generator)
        if program.part is not None:
            some = ids(KEYS, step, samples), ids(KEYS[:1], step, samples)
            yield program.batch(dense, *some, part=program.part(step, rank))
        elif issubclass(program.model, TwoSets):
            yield program.batch(dense, ids(KEYS[:2], step, samples), ids(KEYS[2:], step, samples))
        else:
            yield program.batch(dense, ids(KEYS, step, samples), ids(KEYS[:1], step, samples))


def _plan(model: Plain, sharders: Sequence[ModuleSharder], world_size: int, device: torch.device) -> ShardingPlan:
    """Tables on ranks in turn, those of h cut by columns, unpooled ones of k by rows."""
    plan = {}
    for name, module in model.named_children():
        pooled = isinstance(module, EmbeddingBagCollection)
        if not pooled and not isinstance(module, EmbeddingCollection):
            continue
        ways: dict[str, Any] = {}
        for config in module.embedding_bag_configs() if pooled else module.embedding_configs():
            (key,) = config.feature_names
            kernel = model.kernels.get(key, "fused")
            if kernel == "dense":
                ways[config.name] = data_parallel()
            elif key == "h":
                ways[config.name] = column_wise([i % world_size for i in range(2)], compute_kernel=kernel)
            elif key == "k" and not pooled:
                ways[config.name] = row_wise(compute_kernel=kernel)
            else:
                ways[config.name] = table_wise(KEYS.index(key) % world_size, compute_kernel=kernel)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # fewer where ranks share a GPU
        chosen = sharders[not pooled]
        plan[name] = construct_module_sharding_plan(module, ways, chosen, local_size, world_size, device.type)
    return ShardingPlan(plan)


def train(program: Program, captured: bool, group: dist.ProcessGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """Return this rank's outputs, by step, and its dense parameters and rows, of TorchRec's pipeline or ours."""
    torch.manual_seed(0)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    stock: list[Any] = [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder]
    ours: list[Any] = [OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder]
    sharders: Any = [kind(dict(params)) for kind in (ours if captured else stock)]
    model = program.model()
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=_plan(model, sharders, group.size(), device),
        sharders=sharders,
    )
    sharded.to(device)
    initialise_tables(sharded, seed=0)
    dense = {n: p for n, p in in_backward_optimizer_filter(sharded.named_parameters()) if p.requires_grad}
    own = program.optimizer(dense)
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", own)])
    scheduled = program.scheduled(optimizer, own)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.8) if scheduled else None
    kind: Any = GraphTrainPipeline if captured else TrainPipelineSparseDist
    pipeline = program.wrap(kind(sharded, optimizer, device, **program.arguments(sharded)), optimizer, sharded)
    captures = captured and pipeline._fallback is None and pipeline._captures
    skipped = () if captured else program.ours_alone
    batches = _batches(program, group.rank(), skipped=skipped)
    if captured and isinstance(model, FailsAtFirst):
        model.fails = True
        with suppress(ArithmeticError):
            pipeline.progress(batches)
    given: dict[str, torch.Tensor] = {}
    with suppress(StopIteration):
        for step in range(program.steps + 1):
            if step in skipped:
                continue
            if step in program.evaluated:
                given[f"evaluated before step {step}"] = _evaluate(pipeline, sharded, program, step)
            given[f"output of step {step}"] = pipeline.progress(batches).clone()
            if isinstance(pipeline, kind):  # a wrapper clears them itself
                optimizer.zero_grad()
            if (
                scheduler is not None and step < program.steps - 1
            ):  # of a sum that the end cuts short stock takes it now
                scheduler.step()
    assert len(given) > STEPS - 3, "steps were taken"
    given |= dict(local_tensors(sharded.state_dict()))
    given |= {
        f"{key} of {name}": torch.as_tensor(value)
        for name, state in own.state_dict()["state"].items()
        for key, value in state.items()
    }
    if captured and (pipeline._fallback is not None) != program.falls_back:
        raise AssertionError("TorchRec's pipeline takes the steps" if pipeline._fallback else "captured")
    if captured and not program.falls_back:
        assert pipeline._dense.why_after == program.why_after
        # On GPUs that model calls collectives.
        is_eager = isinstance(model, NormalisedOverRanks) and device.type == "cuda"
        if captures and program.captured != (0, 0):
            has_graphs = all(pipeline._graphs.each)
            assert has_graphs != is_eager, f"at the end, that there are graphs is {has_graphs}"
        assert (program.why_eager if captures else "") in str(explain(sharded)), explain(sharded)
    if captured:
        pipeline.close()
    return given


def _evaluate(pipeline: Any, sharded: DistributedModelParallel, program: Program, step: int) -> torch.Tensor:
    """Return the output of a batch of other sizes, while training batches wait for their steps."""
    batches = _batches(program, sharded._env.rank, only=step)
    sharded.eval()
    is_ours = isinstance(pipeline, GraphTrainPipeline) and not program.falls_back
    # FBGEMM's lookups on a CPU do without inference mode.
    with torch.inference_mode() if is_ours and program.model is not InHostMemory else torch.no_grad():
        output = (
            pipeline.progress(batches).clone() if is_ours else pipeline.detach()(next(batches).to(sharded.device))[1]
        )
    sharded.train()
    return output


def compare(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that captured steps give what TorchRec's pipeline gives, step for step."""
    stock, ours = (train(PROGRAMS[name], captured, group, device) for captured in (False, True))
    for step in PROGRAMS[name].ours_alone:
        assert not ours.pop(f"output of step {step}").numel()
    assert_all_near(ours, stock, LOSS_TOLERANCE["sgd"], f"{name}:")
