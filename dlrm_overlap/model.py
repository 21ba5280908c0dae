"""The DLRM: bottom MLP, embedding tables, interaction, top MLP. Nothing here knows of ranks.

`pipeline.shard_model` replaces the embedding tables by their shards on the ranks, and leaves the rest as it is.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.config import EmbeddingConfig, ModelConfig
from dlrm_overlap.data.batch import Batch, table_keys

_DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}
_ACTIVATIONS = {"relu": torch.relu, "gelu": nn.functional.gelu}


class DotInteraction(nn.Module):
    """The bottom MLP's output d, then the dot products of all pairs among d and the T pooled embeddings of a sample.

    This is the interaction of arXiv 1906.00091, section 2.1. Example: T = 2, D = 4 gives, per sample, the 4 numbers of
    d, then d.e0, d.e1, e0.e1.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.features, self.dim = features, int(dim)  # torch.compile knows no other integers
        self.out_features = dim + features * (features - 1) // 2
        rows, columns = torch.triu_indices(features, features, offset=1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", rows * features + columns, persistent=False)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Map embeddings [b, (T + 1) * D], the bottom MLP's output first, to [b, D + (T + 1) * T / 2]."""
        each = embeddings.view(-1, self.features, self.dim)
        products = torch.bmm(each, each.transpose(1, 2)).flatten(1)
        # By one flat index, whose backward is a scatter; that of a pair of indices sorts.
        return torch.cat((embeddings[:, : self.dim], products.index_select(1, self.pairs)), dim=1)


class Head(nn.Module):
    """What follows the embeddings: interaction, top MLP, logit."""

    def __init__(self, config: ModelConfig, tables: int) -> None:
        super().__init__()
        features = tables + 1
        if config.arch == "dot":
            self.interaction: nn.Module = DotInteraction(features, config.dim)
            width = self.interaction.out_features
        else:  # DCNv2's low-rank cross network (Wang et al., DCN V2, arXiv 2008.13535, section 3.3)
            width = features * config.dim
            layers, rank = int(config.cross_layers), int(config.cross_rank)  # torch.compile knows no other integers
            self.interaction = LowRankCrossNet(width, layers, rank)
        self.top = MLP(width, config.top_mlp[:-1], activation=_ACTIVATIONS[config.activation])
        self.logit = nn.Linear(config.top_mlp[-2], 1)

    def forward(self, dense_bD: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Map the bottom MLP's output [b, D] and the pooled embeddings [b, T * D] to logits [b]."""
        return self.score(self.interaction(self.join(dense_bD, pooled)))

    def join(self, dense_bD: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return embeddings [b, (T + 1) * D], the bottom MLP's output first, in its type."""
        return torch.cat((dense_bD, pooled.to(dense_bD.dtype)), dim=1)

    def score(self, crossed: torch.Tensor) -> torch.Tensor:
        """Map the interaction's output to logits [b]."""
        return self.logit(self.top(crossed)).squeeze(1)


class DLRM(nn.Module):
    """Naumov et al., Deep Learning Recommendation Model (arXiv 1906.00091), or its DCNv2 variant of MLPerf.

    The tables are made on the meta device: sharding gives them storage, `initialise_tables` gives them values.
    """

    def __init__(self, config: ModelConfig, rows: Sequence[int], dense_features: int, weight_dtype: str) -> None:
        super().__init__()
        self.keys, self.dim, self.dense_features = table_keys(len(rows)), config.dim, dense_features
        self.embedding = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=key,
                    feature_names=[key],
                    num_embeddings=n,
                    embedding_dim=config.dim,
                    pooling=PoolingType.SUM,
                    data_type=_DATA_TYPES[weight_dtype],
                )
                for key, n in zip(self.keys, rows, strict=True)
            ],
            device=torch.device("meta"),
        )
        self.bottom = MLP(dense_features, config.bottom_mlp, activation=_ACTIVATIONS[config.activation])
        self.head = Head(config, len(rows))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Map dense features [b, F] float32 and the bags of T tables to logits [b]."""
        pooled = self.embedding(sparse)  # returns at once: the exchange runs while the bottom MLP does
        dense_bD = self.bottom(dense)
        return self.head(dense_bD, in_order(pooled, self.keys))


@torch.fx.wrap  # TorchRec's pipeline traces the model, but not through this function, which depends on values
def in_order(pooled: KeyedTensor, keys: list[str]) -> torch.Tensor:
    """Wait for the exchange and return pooled embeddings [b, T * D], the tables in the order of `keys`.

    Our exchange gives them in this order already; TorchRec gives them in that of the plan.
    """
    if pooled.keys() == keys:
        return pooled.values()
    by_table = pooled.to_dict()
    return torch.cat([by_table[key] for key in keys], dim=1)


class TrainTask(nn.Module):
    """A DLRM with its loss, the mean binary cross-entropy over this rank's samples of a batch."""

    def __init__(self, dlrm: DLRM, device_type: str, bf16: bool) -> None:
        super().__init__()
        self.dlrm = dlrm
        # Each weight is cast once a step, so the cache saves nothing, and CUDA graphs cannot hold it.
        self.autocast = partial(torch.autocast, device_type, torch.bfloat16, enabled=bf16, cache_enabled=False)
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the loss [] and, without gradient, (loss [], logits [b], labels [b]), all float32."""
        with self.autocast():
            logits = self.dlrm(batch.dense, batch.sparse)
        logits = logits.float()
        loss = self.loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def build_model(
    model: ModelConfig, embedding: EmbeddingConfig, rows: Sequence[int], dense_features: int, seed: int
) -> DLRM:
    """Build the DLRM: its dense weights depend on `seed` alone, its tables have no storage yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DLRM(model, rows, dense_features, embedding.weight_dtype)
