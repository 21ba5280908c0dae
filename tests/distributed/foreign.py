"""Training programs as users of TorchRec write them, each trained by TorchRec's pipeline and by captured steps.

They use batches, ids and optimizers in their own ways, and both must give the same losses. Imports no pytest.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, islice
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
    """Return the parts of a tensor or of ids that support `record_stream`."""
    if isinstance(value, TensorDict):
        return [part for each in value.values() for part in _parts(each)]
    if isinstance(value, torch.Tensor) and value.is_nested:
        nested: Any = value
        return [nested.values(), nested.offsets()]
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return [value._indices(), value._values()]
    return [value]


class _Movable(Pipelineable):
    """The methods that TorchRec's pipelines call."""

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
    """Has another part, a tensor or not, that differs from step to step."""

    part: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        part = self.part.to(device) if isinstance(self.part, torch.Tensor) else self.part
        return replace(super().to(device, non_blocking=non_blocking), part=part)

    def record_stream(self, stream: Any) -> None:
        super().record_stream(stream)
        if isinstance(self.part, torch.Tensor):
            self.part.record_stream(stream)


def with_tensor_dict(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch whose ids are a TensorDict of nested tensors, in another order than the model's."""
    nested = {
        key: torch.nested.nested_tensor_from_jagged(each.values(), each.offsets())
        for key, each in reversed(ids.to_dict().items())
    }
    return Batch(dense, TensorDict(nested), others)  # type: ignore[arg-type]


def _with_jagged(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch with a JaggedTensor, which caches its offsets in some batches."""
    jagged = others.to_dict()["f"]
    if len(dense) and dense[0, 0] > 0.5:
        jagged.offsets()
    else:
        jagged = JaggedTensor(jagged.values(), lengths=jagged.lengths())
    return Batch(dense, ids, jagged)  # type: ignore[arg-type]


def _with_caches(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    """Return a batch whose ids have all of their caches filled, and with a KeyedTensor."""
    for ask in (ids.length_per_key, ids.offset_per_key, ids.to_dict, ids.offsets):
        ask()
    keyed = KeyedTensor(["f", "g"], [1, 1], torch.stack([others.lengths() + dense[:, 0], dense[:, 1]], dim=1))
    keyed.to_dict()
    return Batch(dense, ids, keyed)  # type: ignore[arg-type]


def _with_sparse(dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Batch:
    return Batch(dense, ids, dense.gt(0.5).float().to_sparse())  # type: ignore[arg-type]


def collection(keys: Sequence[str], weighted: bool = False) -> EmbeddingBagCollection:
    """Return a collection with a table per key."""
    configs = []
    for key in keys:
        # FBGEMM on a CPU does not divide the gradient of weighted means.
        pooling = PoolingType.MEAN if key == "h" and not weighted else PoolingType.SUM
        configs.append(EmbeddingBagConfig(ROWS, DIM, name=f"t_{key}", feature_names=[key], pooling=pooling))
    return EmbeddingBagCollection(configs, is_weighted=weighted, device=torch.device("meta"))


def sequences(keys: Sequence[str]) -> EmbeddingCollection:
    """Return an unpooled collection with a table per key."""
    configs = [EmbeddingConfig(ROWS, DIM, name=f"s_{key}", feature_names=[key]) for key in keys]
    return EmbeddingCollection(configs, device=torch.device("meta"))


def _in_order(by_key: Any) -> torch.Tensor:
    """Return pooled embeddings in order of `KEYS`; TorchRec's pipeline traces this."""
    return torch.cat([by_key[key] for key in KEYS], dim=1)


class Plain(nn.Module):
    """One collection and a layer, which the other models change a little."""

    kernels: ClassVar[Mapping[str, str]] = {}
    """feature -> compute kernel of its table; dense for data-parallel tables, and fused by default"""
    weighted = False
    """whether ids have weights"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = collection(KEYS, self.weighted)
        self.bottom = nn.Linear(3, 4 * DIM)
        self.over = nn.Linear(4 * DIM, 2)

    def pooled(self, batch: Any) -> torch.Tensor:
        """Return [b, 4 * DIM], with the features in order of `KEYS`."""
        return _in_order(self.embedding(batch.ids).to_dict())

    def hidden(self, batch: Any) -> torch.Tensor:
        """Return [b, 4 * DIM] of the dense features."""
        return self.bottom(batch.dense)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the output."""
        output = self.over(torch.tanh(self.pooled(batch)) * self.hidden(batch))
        return (output - 1).square().mean(), output.detach()


class Split(Plain):
    """Two collections, each with half of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.second = collection(KEYS[:2]), collection(KEYS[2:])

    def pooled(self, batch: Any) -> torch.Tensor:
        left, right = batch.ids.split([2, 2])
        return _in_order(self.embedding(left).to_dict() | self.second(right).to_dict())


class TwoSets(Split):
    def pooled(self, batch: Any) -> torch.Tensor:
        return _in_order(self.embedding(batch.ids).to_dict() | self.second(batch.others).to_dict())


class Permuted(Plain):
    def pooled(self, batch: Any) -> torch.Tensor:
        return _in_order(self.embedding(batch.ids.permute([3, 1, 0, 2])).to_dict())


class Jagged(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        lengths, ends = batch.others.lengths()[:, None], batch.others.offsets()[1:, None]
        return super().hidden(batch) * (lengths + ends)


class Keyed(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * batch.others["f"] + batch.others.to_dict()["g"]


class Sparse(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) + torch.sparse.mm(batch.others, torch.ones(3, 4 * DIM, device=batch.dense.device))


class Weighted(Permuted):
    weighted = True


class ByKeyword(Plain):
    def pooled(self, batch: Any) -> torch.Tensor:
        return _in_order(self.embedding(features=batch.ids).to_dict())


class Offsets(Plain):
    """Uses the sizes of bags as features."""

    def hidden(self, batch: Any) -> torch.Tensor:
        lengths = batch.ids.offsets().diff().view(len(KEYS), -1).T.float()
        return self.bottom(batch.dense) * (1 + lengths.repeat_interleave(DIM, dim=1) / 4)


class OneFeature(Plain):
    """Looks a feature up in its own small table."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Embedding(ROWS, 4 * DIM)

    def hidden(self, batch: Any) -> torch.Tensor:
        one, several = batch.ids["f"], batch.ids["k"]
        padded = several.to_padded_dense(desired_length=3, padding_value=0.0)
        return self.bottom(batch.dense) + self.own(padded.long()).sum(1) + self.own(one.values())


class UnusedTower(Plain):
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
    """Has a norm over the samples of all ranks, on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            self.norm = nn.SyncBatchNorm(4 * DIM)


class Dropping(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def hidden(self, batch: Any) -> torch.Tensor:
        return self.drop(super().hidden(batch))


class Scaling(OptimizerWrapper):
    """Unscales the gradients and takes a step."""

    scaler: ClassVar[torch.amp.GradScaler]

    def step(self, closure: Any = None) -> None:
        Scaling.scaler.step(self._optimizer)
        Scaling.scaler.update()


class FailsAtFirst(Plain):
    """Fails in the first captured forward, which its caller repeats."""

    fails = False

    def hidden(self, batch: Any) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise ArithmeticError
        return super().hidden(batch)


class InHostMemory(Plain):  # TorchRec keeps such tables
    kernels: ClassVar = {"h": "fused_uvm"}


class CollectionInHostMemory(TwoSets):
    kernels: ClassVar = {"h": "fused_uvm", "k": "fused_uvm"}


class DataParallelCollection(Split):
    kernels: ClassVar = {"h": "dense", "k": "dense"}


class Sequences(Plain):
    """Has a data-parallel table, and an unpooled collection whose rows count by their order."""

    kernels: ClassVar = {"f": "dense"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.sequences = collection(KEYS[:2]), sequences(KEYS[2:])

    def pooled(self, batch: Any) -> torch.Tensor:
        by_key, unpooled = self.embedding(batch.ids).to_dict(), self.sequences(batch.ids)
        parts = [by_key[key] for key in KEYS[:2]]
        for key in KEYS[2:]:
            rows = unpooled[key]
            padded = torch.ops.fbgemm.jagged_to_padded_dense(rows.values(), [rows.offsets()], [4 * MOST[key][1]])
            parts.append(padded.cumsum(1).square().sum(1))
        return torch.cat(parts, dim=1)


class Parted(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        part = batch.part["scale"] if isinstance(batch.part, dict) else batch.part
        return super().hidden(batch) * part


class Rows(Plain):
    """Reads all rows of an unpooled table, without their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = sequences("k")
        self.head = nn.Linear(DIM, 1, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(4 * DIM), nn.Dropout(0.3)

    def hidden(self, batch: Any) -> torch.Tensor:
        rows = self.head(self.sequences(batch.ids)["k"].values()).square().mean()
        return self.drop(self.norm(super().hidden(batch))) * (1 + rows)


class IdsAsNumbers(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (1 + batch.ids["k"].values().float().mean() / ROWS)


@torch.fx.wrap  # TorchRec's pipeline does not trace loops
def _from_parts(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids of features together again, with padding between features if they are padded."""
    return KeyedJaggedTensor.from_jt_dict(ids.to_dict())


class IdsFromParts(Plain):
    def pooled(self, batch: Any) -> torch.Tensor:
        return _in_order(self.embedding(_from_parts(batch.ids)).to_dict())


class WeightsFromParts(Plain):
    """Keeps the ids in their places, but not their weights."""

    weighted = True

    def pooled(self, batch: Any) -> torch.Tensor:
        ids = batch.ids
        made = KeyedJaggedTensor(ids.keys(), ids.values(), _from_parts(ids).weights(), lengths=ids.lengths())
        return _in_order(self.embedding(made).to_dict())


class ChangedIds(Plain):
    weighted = True

    def pooled(self, batch: Any) -> torch.Tensor:
        ids = batch.ids
        made = KeyedJaggedTensor(ids.keys(), ids.values() * 3 % ROWS, ids.weights() / 2, lengths=ids.lengths())
        return _in_order(self.embedding(made).to_dict())


class CountedIds(Plain):
    """Reads the number of ids of a batch, which padded ids do not have."""

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (batch.ids["h"].values().numel() / 10)


class NumbersOfIds(Plain):
    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * (batch.ids.length_per_key()[2] / 10)


class WeightsOfIds(Plain):
    weighted = True

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) * batch.ids.weights().square().mean()


class RowsAsOutput(Rows):
    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, _ = Plain.forward(self, batch)
        return loss, self.rows

    def hidden(self, batch: Any) -> torch.Tensor:
        found = self.sequences(batch.ids)["k"]
        self.rows = found.values().detach()
        padded = torch.ops.fbgemm.jagged_to_padded_dense(found.values(), [found.offsets()], [MOST["k"][1]])
        return Plain.hidden(self, batch) * (1 + padded.square().mean())


class InputAsOutput(Plain):
    """Returns its input, as models return labels for metrics."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, _ = super().forward(batch)
        return loss, batch.dense


class WeightedInHostMemory(InHostMemory):
    weighted = True


class Summed(Plain):
    """Sums over its samples, so that the loss is finite without samples, too."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(torch.tanh(self.pooled(batch)) * self.hidden(batch))
        return (output - 1).square().sum() / SAMPLES, output.detach()


class SummedSets(Summed, TwoSets): ...


class SummedSequences(Summed, Sequences): ...


class SummedWeighted(Summed, WeightedInHostMemory): ...


def _keyed(kind: Any, decay: float | None = None, **options: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes TorchRec's wrapper of torch's optimizer `kind`, with `decay` of the weights."""

    def make(parameters: Mapping[str, Any]) -> Any:
        groups = (lambda each: each) if decay is None else partial(_groups, decay=decay)
        return KeyedOptimizerWrapper(dict(parameters), lambda each: kind(groups(each), **options))

    return make


_sgd, _rmsprop = _keyed(torch.optim.SGD, lr=0.5), _keyed(torch.optim.RMSprop, lr=0.01)


def _warm_clipped_adamw(parameters: Mapping[str, Any]) -> Any:
    adamw = _keyed(torch.optim.AdamW, 0.1, lr=0.05)(parameters)
    clipped = GradientClippingOptimizer(adamw, clipping=GradientClipping.NORM, max_gradient=0.05)
    return WarmupOptimizer(clipped, [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.2)], lr=0.05)


def _momentum(parameters: Mapping[str, Any]) -> Any:
    keyed = _keyed(torch.optim.SGD, 0.05, lr=0.5, momentum=0.9, dampening=0.5)(parameters)
    return GradientClippingOptimizer(keyed, clipping=GradientClipping.VALUE, max_gradient=0.01)


def _scaling(parameters: Mapping[str, Any]) -> Any:
    return Scaling(_keyed(torch.optim.SGD, lr=0.1)(parameters))


def _clipped_by_hook(parameters: Mapping[str, Any]) -> Any:
    """Return an optimizer with a hook before its step that clips by torch.nn.utils."""
    keyed = _keyed(torch.optim.SGD, lr=0.5, momentum=0.9)(parameters)
    every = list(parameters.values())
    keyed._optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(every, 0.01))
    return keyed


def _accumulated(pipeline: Any, optimizer: Any, model: nn.Module) -> Any:
    """Return TorchRec's wrapper of a pipeline, which steps after every other batch and after the last one.

    TorchRec's pipeline gets `is_last_batch`, without which its ranks would step apart from each other.
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


def _with_forwards(pipeline: Any, _: Any, model: Any) -> Any:
    """Call the model between steps: between both captures, and before replays, by odd and even numbers of calls."""
    progress, steps, calls = pipeline.progress, count(), {4: 1, 6: 1, 7: 2}

    def call_and_progress(batches: Iterator[Any]) -> Any:
        for _ in range(calls.get(next(steps), 0)):
            called = model if isinstance(pipeline, GraphTrainPipeline) else pipeline.detach()
            with torch.no_grad():
                called(next(_batches(Program(ChangedIds), 2)).to(model.device))
        return progress(batches)

    pipeline.progress = call_and_progress
    return pipeline


def then_torchrec(pipeline: Any, optimizer: Any, model: Any) -> Any:
    """Let TorchRec's pipeline take the last steps, after 6 by ours."""
    if isinstance(pipeline, TrainPipelineSparseDist):
        return pipeline
    progress, steps, first, second = pipeline.progress, count(), [], []

    def progress_in_turn(batches: Iterator[Any]) -> Any:
        if (step := next(steps)) == 0:
            first.append(islice(batches, 6))
        elif step == 6:
            pipeline.close()
            second.append(TrainPipelineSparseDist(model, optimizer, model.device))
        return second[0].progress(batches) if second else progress(first[0])

    pipeline.progress = progress_in_turn
    return pipeline


def _rebound(pipeline: Any, _: Any, model: nn.Module) -> Any:
    """Give weights other memory between steps, as averages of weights are taken over."""
    progress, steps = pipeline.progress, count()

    def progress_and_rebind(batches: Iterator[Any]) -> Any:
        output = progress(batches)
        if next(steps) in (1, 6):
            weights = [each for name, each in model.named_parameters() if "over." in name]
            torch.nn.utils.vector_to_parameters(0.5 * torch.nn.utils.parameters_to_vector(weights), weights)
        return output

    pipeline.progress = progress_and_rebind
    return pipeline


def _groups(parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Return a group of parameters that decays, and another one."""
    biases, weights = ([each for each in parameters if (each.ndim == 1) == flat] for flat in (True, False))
    return [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}]


def _halved(model: nn.Module) -> Mapping[str, Any]:
    """Return a custom forward whose losses are half of the model's."""

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, output = model(batch)
        return loss / 2, output

    return {"custom_model_fwd": forward, "enqueue_batch_after_forward": True}


def _scaled(model: nn.Module) -> Mapping[str, Any]:
    """Return a custom forward that scales the losses for `Scaling`."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    Scaling.scaler = torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=4)

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, output = model(batch)
        return Scaling.scaler.scale(loss), output

    return {"custom_model_fwd": forward}


class Program(NamedTuple):
    """A training program: its model, batches, and dense optimizer."""

    model: type[Plain] = Plain
    batch: Callable[..., Any] = Batch
    optimizer: Callable[[Mapping[str, Any]], Any] = _sgd
    bags: Mapping[str, tuple[int, int]] = MOST
    scheduled: Callable[[Any, Any], Any] = lambda every, dense: None
    """returns the optimizer that torch's scheduler drives: all together, the dense one, or None"""
    why_after: str = ""
    """why the dense optimizer steps after the graph"""
    steps: int = STEPS
    longer: Mapping[tuple[int, int], int] = {}
    """(step, rank) -> factor of the sizes of its bags"""
    samples: Callable[[int, int], int] = lambda step, rank: SAMPLES
    """samples of a step and a rank"""
    part: Callable[[int, int], Any] | None = None
    """`PartBatch.part` of a step and a rank"""
    why_eager: str = ""
    """why the first steps find that the others cannot be captured"""
    evaluated: Mapping[int, int] = {}
    """step -> samples of rank 0 to evaluate before it; rank 1 has one less, if any"""
    arguments: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {}
    """arguments of the pipeline, for a model"""
    wrap: Callable[[Any, Any, nn.Module], Any] = lambda pipeline, *_: pipeline
    """wraps a pipeline, given its optimizer and its model"""
    captured: tuple[int, int] = (2, STEPS - 3 - 2)
    """numbers of captured steps and of replays"""
    ends_without_graphs: bool = False
    """whether the graphs are gone at the end, as with windows that are too small for the last batch"""
    falls_back: bool = False
    """whether the steps fall back to TorchRec's pipeline"""
    ours_alone: Collection[int] = ()
    """steps that change nothing, in which TorchRec fails"""


_SHORT = lambda step, rank: SAMPLES if step < STEPS - 1 else max(2, 3 - rank)  # noqa: E731
_EMPTY_LAST = lambda step, rank: SAMPLES if step < STEPS - 1 or rank == 0 else 0  # noqa: E731
# Step 6 exceeds the capacity, for which 7 was padded; after three warm-up steps, 11 and 12 are captured again.
_LONGER = {(6, 0): 4, (13, 1): 3}
# No rank has samples in steps 7 and 14, and rank 1 has none in step 10.
_EMPTY = lambda step, rank: 0 if step in (7, 14) or (step, rank) == (10, 1) else SAMPLES  # noqa: E731
_DENSE = lambda every, dense: dense  # noqa: E731
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
    "momentum": Program(optimizer=_momentum, scheduled=_DENSE),
    "rmsprop": Program(optimizer=_rmsprop, why_after=f"RMSprop {_NONE}", scheduled=_DENSE),
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
    # Not evaluated: TorchRec's unpooled collections fail if ranks evaluate different numbers of samples.
    "longer_sequences": Program(Sequences, steps=15, longer=_LONGER, captured=(4, 3)),
    "longer_bags": Program(Offsets, steps=15, longer=_LONGER, evaluated={0: 4, 5: SAMPLES + 3, 14: 4}, captured=(4, 2)),
    "longer_bags_in_host_memory": Program(InHostMemory, steps=15, longer=_LONGER, evaluated={5: 4}, captured=(4, 3)),
    "longer_bags_than_fixed": Program(Split, bags=FIXED, steps=13, longer={(5, 1): 2}, captured=(3, 1)),
    "short_last_batch": Program(Weighted, samples=_SHORT, captured=(2, 3)),
    "short_last_batch_fixed": Program(TwoSets, bags=FIXED, samples=_SHORT, captured=(2, 3)),
    "empty_last_batch": Program(Weighted, samples=_EMPTY_LAST, captured=(2, 3)),
    # A rank without samples makes the sizes of bags unknown, see `CapacityTracker`.
    "empty_last_batch_fixed": Program(
        TwoSets, bags=FIXED, samples=_EMPTY_LAST, captured=(2, 3), ends_without_graphs=True
    ),
    "unlike_samples": Program(Offsets, samples=lambda step, rank: SAMPLES - rank),
    "unlike_samples_fixed": Program(Weighted, bags=FIXED, samples=lambda step, rank: SAMPLES - rank),
    "fewer_samples_once": Program(
        InputAsOutput, samples=lambda step, rank: SAMPLES - ((step, rank) == (6, 1)), captured=(2, 3)
    ),
    "other_samples": Program(steps=14, samples=lambda step, rank: SAMPLES - 2 * (step > 2), captured=(2, 2)),
    "no_samples": Program(Summed, samples=_EMPTY, steps=15, evaluated={0: 0, 5: 0, 11: 1}, captured=(2, 7)),
    "no_samples_fixed": Program(SummedSets, bags=FIXED, samples=_EMPTY, steps=22, evaluated={5: 0}, captured=(4, 4)),
    "no_samples_at_first": Program(Summed, samples=_EMPTY_FIRST, captured=(2, 1)),
    "no_samples_fixed_at_first": Program(SummedSets, bags=FIXED, samples=_EMPTY_FIRST, captured=(2, 1)),
    "tensor_dict": Program(batch=with_tensor_dict, falls_back=True, evaluated={5: 4}, captured=(0, 0)),
    "tensor_dict_of_sequences": Program(Sequences, batch=with_tensor_dict, falls_back=True, captured=(0, 0)),
    "sparse_batch": Program(Sparse, batch=_with_sparse, falls_back=True, captured=(0, 0)),
    "cached_ids": Program(Keyed, batch=_with_caches),
    "jagged_batch": Program(Jagged, batch=_with_jagged, captured=(0, 0)),
    # TorchRec's unpooled collections take no batch without samples.
    "no_samples_of_sequences": Program(
        SummedSequences,
        samples=lambda step, _: 0 if step in (7, 14) else SAMPLES,
        steps=15,
        captured=(2, 8),
        ours_alone=(7, 14),
    ),
    "no_samples_with_weights": Program(SummedWeighted, samples=_EMPTY, steps=15, captured=(2, 7)),
    "own_forward": Program(arguments=_halved),
    # Parts that are not tensors: another one in the last batch of rank 1, then one in every batch.
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
    "rows": Program(Rows, captured=(0, 0), why_eager="the loss becomes NaN if ids are padded with NaN"),
    "rows_as_output": Program(RowsAsOutput, captured=(0, 0), why_eager="an output has another size"),
    "ids_as_numbers": Program(IdsAsNumbers, captured=(0, 0), why_eager="differs with padded ids"),
    "counted_ids": Program(CountedIds, captured=(0, 0), why_eager="differs with padded ids"),
    "numbers_of_ids": Program(NumbersOfIds, captured=(0, 0), why_eager="it fails (InputError: "),
    "ids_from_parts": Program(IdsFromParts, captured=(0, 0), why_eager="the ids that it makes"),
    "weights_from_parts": Program(WeightsFromParts, captured=(0, 0), why_eager="the ids that it makes"),
    "changed_ids": Program(ChangedIds),
    "own_forwards": Program(ChangedIds, wrap=_with_forwards),
    "rebound_weights": Program(optimizer=_momentum, wrap=_rebound),
    "then_torchrec": Program(wrap=then_torchrec, captured=(2, 1), ends_without_graphs=True),
    "weights_of_ids": Program(WeightsOfIds, captured=(0, 0), why_eager="differs with padded ids"),
}
if find_spec("torchrec.distributed.train_pipeline.gradient_accumulation"):  # not in every release
    accumulated = Program(
        wrap=_accumulated, why_after=f"_GAOptimizerWrapper {_NONE}", scheduled=lambda every, dense: every
    )
    PROGRAMS["accumulated"] = accumulated


def _batches(program: Program, rank: int, only: int | None = None, skipped: Collection[int] = ()) -> Iterator[Any]:
    """Yield the batches of all steps but `skipped`, or one to evaluate before the step `only`."""
    generator = torch.Generator().manual_seed(rank + 100 * (only or 0))

    def ids(keys: Sequence[str], step: int, samples: int) -> KeyedJaggedTensor:
        lengths, times = [], program.longer.get((step, rank), 1)
        for least, most in (program.bags[key] for key in keys):
            some = torch.randint(least, most + 1, (samples,), generator=generator)
            if step == 0 and samples:  # from which the capacity is learnt
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
    """Place tables on ranks in turn, cut those of h by columns and unpooled ones of k by rows."""
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
    """Return this rank's outputs by step, dense parameters and rows, of TorchRec's pipeline or of captured steps."""
    torch.manual_seed(0)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    torchrecs: list[Any] = [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder]
    ours: list[Any] = [OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder]
    sharders: Any = [kind(dict(params)) for kind in (ours if captured else torchrecs)]
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
            # At the end, TorchRec's wrapper takes the step of an accumulation that the end cuts short.
            if scheduler is not None and step < program.steps - 1:
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
        # That model calls collectives on GPUs.
        is_eager = isinstance(model, NormalisedOverRanks) and device.type == "cuda"
        if captures and program.captured != (0, 0):
            has_graphs = all(pipeline._graphs.each)
            assert has_graphs != (is_eager or program.ends_without_graphs), (
                f"at the end, that there are graphs is {has_graphs}"
            )
        assert (program.why_eager if captures else "") in str(explain(sharded)), explain(sharded)
    if captured:
        pipeline.close()
    return given


def _evaluate(pipeline: Any, sharded: DistributedModelParallel, program: Program, step: int) -> torch.Tensor:
    """Return the output of a batch of another size, while training batches are prefetched."""
    batches = _batches(program, sharded._env.rank, only=step)
    sharded.eval()
    is_ours = isinstance(pipeline, GraphTrainPipeline) and not program.falls_back
    # FBGEMM's lookups on a CPU do not support inference mode.
    with torch.inference_mode() if is_ours and program.model is not InHostMemory else torch.no_grad():
        if is_ours:
            output = pipeline.progress(batches).clone()
        else:
            output = pipeline.detach()(next(batches).to(sharded.device))[1]
    sharded.train()
    return output


def compare(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that captured steps give what TorchRec's pipeline gives, step for step."""
    torchrec, ours = (train(PROGRAMS[name], captured, group, device) for captured in (False, True))
    for step in PROGRAMS[name].ours_alone:
        assert not ours.pop(f"output of step {step}").numel()
    assert_all_near(ours, torchrec, LOSS_TOLERANCE["sgd"], f"{name}:")
