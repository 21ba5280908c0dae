"""The DLRM: bottom MLP, embedding tables, interaction, top MLP, before sharding."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_configs import EmbeddingConfig as RowConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.config import EmbeddingConfig, IdTablesConfig, ModelConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.schema import table_keys
from dlrm_overlap.embedding.id_tables.module import collection_of_any_id, sequences_of_any_id
from dlrm_overlap.train.attention import TargetAttention
from dlrm_overlap.train.interaction import DotInteraction

_DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}
_ACTIVATIONS = {"relu": torch.relu, "gelu": nn.functional.gelu}


class Part(nn.Module):
    """A module of the dense part that may train in another form, such as compiled."""

    in_training: Callable[..., torch.Tensor] | None = None
    """replaces `compute` in training; set by `train.dense_part`"""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        trains = self.training and self.in_training is not None
        return self.in_training(*inputs) if trains else self.compute(*inputs)  # type: ignore[misc]

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class BottomMLP(Part, MLP):
    """Maps dense features [b, F] to [b, D]."""

    compute = MLP.forward  # type: ignore[assignment]


class Loss(Part, nn.BCEWithLogitsLoss):
    """Binary cross-entropy [] of logits and labels [b]; for [b, L], the weighted sum over L labels."""

    def __init__(self, weights: Sequence[float] = (1.0,)) -> None:
        super().__init__()
        # The base class averages over labels too, so scale by their number.
        if tuple(weights) != (1.0,):
            self.register_buffer("weight", len(weights) * torch.tensor(weights), persistent=False)

    compute = nn.BCEWithLogitsLoss.forward  # type: ignore[assignment]


class Head(Part):
    def __init__(self, config: ModelConfig, tables: int) -> None:
        super().__init__()
        features = tables + 1
        if config.arch == "dot":
            self.interaction: nn.Module = DotInteraction(features, config.dim)
            width = self.interaction.out_features
        else:  # DCNv2's low-rank cross network (Wang et al., DCN V2, arXiv 2008.13535, section 3.3)
            width = features * config.dim
            self.interaction = LowRankCrossNet(width, config.cross_layers, config.cross_rank)
        self.top = MLP(width, config.top_mlp[:-1], activation=_ACTIVATIONS[config.activation])
        self.logit = nn.Linear(config.top_mlp[-2], config.top_mlp[-1])

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Map one tensor [b, (T + 1) * D], or two tensors that `concatenated` joins, to logits [b] or [b, L]."""
        embeddings = inputs[0] if len(inputs) == 1 else concatenated(*inputs)
        return self.logit(self.top(self.interaction(embeddings))).squeeze(1)


class DLRM(nn.Module):
    """The Deep Learning Recommendation Model (arXiv 1906.00091), or MLPerf's variant with DCNv2.

    Tables are on the meta device until they are sharded. `TargetAttention` reduces a history table to one more input of
    the interaction, after the bottom MLP's output.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: Sequence[int],
        dense_features: int,
        weight_dtype: str,
        any_id: Collection[int] = (),
        id_tables: IdTablesConfig | None = None,
    ) -> None:
        """Make the model; the tables whose numbers are in `any_id` take any id, by the rules of `id_tables`."""
        super().__init__()
        self.keys, self.dim, self.dense_features = table_keys(len(rows)), config.dim, dense_features
        number, meta = config.sequence.history, torch.device("meta")
        self.history_key = None if number is None else self.keys[number]
        self.candidate_key = "" if number is None else self.keys[config.sequence.candidate]
        self.pooled_keys = [key for key in self.keys if key != self.history_key]
        described = {
            key: {
                "name": key,
                "feature_names": [key],
                "num_embeddings": n,
                "embedding_dim": config.dim,
                "data_type": _DATA_TYPES[weight_dtype],
            }
            for key, n in zip(self.keys, rows, strict=True)
        }
        pooled = {key: EmbeddingBagConfig(**described[key], pooling=PoolingType.SUM) for key in self.pooled_keys}
        taking_any = [pooled.pop(self.keys[each]) for each in sorted(any_id) if each != number]
        collections: list[nn.Module] = (
            [EmbeddingBagCollection(tables=list(pooled.values()), device=meta)] if pooled else []
        )
        assert id_tables is not None or not any_id, "tables of any id have rules"
        if taking_any and id_tables is not None:
            collections.append(collection_of_any_id(taking_any, id_tables, meta))
        self.embedding: Any = collections[0]
        """the pooled tables; tables of any id are in `id_embedding` if there are others"""
        self.id_embedding: Any = collections[1] if len(collections) > 1 else None
        self.bottom = BottomMLP(dense_features, config.bottom_mlp, activation=_ACTIVATIONS[config.activation])
        self.head = Head(config, len(rows))
        if self.history_key is not None:
            table = RowConfig(**described[self.history_key])
            self.history: Any = EmbeddingCollection(tables=[table], device=meta)
            if number in any_id and id_tables is not None:
                self.history = sequences_of_any_id([table], id_tables, meta)
            self.attention = TargetAttention(config.sequence, config.dim)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Map dense features [b, F] float32 and bags of T tables to logits [b], or [b, L] for several labels."""
        pooled = embeddings_of(self.embedding(sparse))  # returns at once: the exchange overlaps with the bottom MLP
        others = None if self.id_embedding is None else embeddings_of(self.id_embedding(sparse))
        histories = None if self.history_key is None else embeddings_of(self.history(sparse))
        front = self.bottom(dense)
        if self.history_key is not None:
            history, candidate_bD = (
                history_of(histories, self.history_key),
                in_order(pooled, [self.candidate_key], others),
            )
            front = torch.cat((front, self.attention(candidate_bD, history.values(), history.lengths())), dim=1)
        if self.joins_in_place:
            return self.head(joined(front, pooled, self.pooled_keys, others))
        return self.head(front, in_order(pooled, self.pooled_keys, others))

    @property
    def front_columns(self) -> int:
        """Number of columns of the bottom MLP's output and, if the model has histories, of attention's output."""
        return self.dim if self.history_key is None else 2 * self.dim

    @property
    def joins_in_place(self) -> bool:
        """True if the embedding's output has room for `front_columns` in front of each row."""
        return self.id_embedding is None and getattr(self.embedding, "leading_columns", 0) == self.front_columns


@torch.fx.wrap  # a dictionary of results has no keys before the wait
def history_of(histories: Any, key: str) -> JaggedTensor:
    """Wait for the exchange and return the histories' rows, sample by sample, newest id first."""
    return histories.get(key)


@torch.fx.wrap  # TorchRec's pipeline traces the model, but cannot trace this function, which depends on values
def in_order(pooled: KeyedTensor, keys: list[str], others: KeyedTensor | None = None) -> torch.Tensor:
    """Wait for the exchange and return pooled embeddings [b, T * D] in the order of `keys`."""
    if pooled.keys() == keys:
        return pooled.values()
    by_table = pooled.to_dict() | ({} if others is None else others.to_dict())
    return torch.cat([by_table[key] for key in keys], dim=1)


@torch.fx.wrap
def joined(
    front: torch.Tensor, pooled: KeyedTensor, keys: list[str], others: KeyedTensor | None = None
) -> torch.Tensor:
    """Wait for the exchange and concatenate `front` and the pooled embeddings by columns.

    `front` is written in front of the pooled embeddings in place, unless TorchRec exchanged them or they were copied.
    """
    values, dim = in_order(pooled, keys, others), front.shape[1]
    width = dim + values.shape[1]
    has_room = values.stride() == (width, 1) and values.storage_offset() == dim
    if not has_room or values.dtype != front.dtype:
        return concatenated(front, values)
    return JoinInPlace.apply(front, values)


def concatenated(front: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    """Concatenate [b, D or 2 D] and pooled embeddings [b, T * D] by columns, in the dtype of `front`."""
    return torch.cat((front, pooled.to(front.dtype)), dim=1)


class JoinInPlace(torch.autograd.Function):
    """Writes [b, n D] in front of each row of the pooled embeddings [b, T * D]; returns both as one tensor.

    The result shares the embeddings' storage, so their buffer counts as in use.

    Example: D = 2, T = 1, b = 2, storage _ _ 3 4 _ _ 7 8. [[1, 2], [5, 6]] and [[3, 4], [7, 8]] become [[1, 2, 3, 4],
    [5, 6, 7, 8]].
    """

    @staticmethod
    def forward(ctx: Any, front: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        ctx.dim = front.shape[1]
        shape, first = (pooled.shape[0], ctx.dim + pooled.shape[1]), pooled.storage_offset() - ctx.dim
        embeddings = pooled.new_empty(0).set_(pooled.untyped_storage(), first, shape, pooled.stride())
        embeddings[:, : ctx.dim].copy_(front)
        return embeddings

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        return gradient[:, : ctx.dim], gradient[:, ctx.dim :]


class TrainTask(nn.Module):
    def __init__(self, dlrm: DLRM, device_type: str, bf16: bool, label_weights: Sequence[float] = (1.0,)) -> None:
        super().__init__()
        self.dlrm, self.computes_in_bf16 = dlrm, bf16
        # Each weight is cast once a step, so a cache would save nothing, and CUDA graphs cannot capture it.
        self.autocast = partial(torch.autocast, device_type, torch.bfloat16, enabled=bf16, cache_enabled=False)
        self.loss = Loss(label_weights)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the loss [] and, detached, (loss [], logits, labels); float32, logits and labels [b] or [b, L]."""
        with self.autocast():
            logits = self.dlrm(batch.dense, batch.sparse)
        logits = logits.float()
        loss = self.loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


@torch.fx.wrap
def embeddings_of(result: Any) -> Any:
    """Return the embeddings of what a collection returns; tables of any id return a pair."""
    return result[0] if isinstance(result, tuple) else result


def build_model(
    model: ModelConfig,
    embedding: EmbeddingConfig,
    rows: Sequence[int],
    dense_features: int,
    seed: int,
    any_id: Collection[int] = (),
) -> DLRM:
    """Build the DLRM; `seed` alone decides its initial dense weights. `rows` has the number of rows of each table.

    `any_id` has the numbers of the tables of any id.

    Raises:
        InputError: if `model.sequence` names a table that does not exist.
    """
    model.sequence.check_tables(len(rows))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DLRM(model, rows, dense_features, embedding.weight_dtype, any_id, embedding.id_tables)
