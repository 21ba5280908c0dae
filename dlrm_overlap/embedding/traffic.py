"""Bytes that memory and links carry in a step, computed from numbers only."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.kernels.optimizer_params import state_bytes

_RUN_BYTES = 16  # locate the ids of a touched row
_POSITION_BYTES = 4  # locate the gradient of an id


def partial_sums(bag_ids: float, row_shards: int) -> float:
    """Return the mean number of partial sums sent for a bag, one from each row shard that has an id of the bag.

    With one row shard the result is 1, since empty bags are sent, too. Ids are uniform over the rows; `bag_ids` may be
    a mean.
    """
    return 1.0 if row_shards == 1 else row_shards * (1 - (1 - 1 / row_shards) ** bag_ids)


class ShardTraffic(NamedTuple):
    """What one batch of all ranks looks up in a table shard; the numbers may be means."""

    ids: float
    touched_rows: float
    """distinct rows"""
    filled_bags: float
    """bags with an id"""
    dim: float
    element_bytes: int


def pooling_bytes(
    shards: Iterable[ShardTraffic],
    samples: int,
    own_samples: int,
    total_dim: float,
    owner_dim: float,
    id_bytes: int,
    wire_bytes: int,
) -> tuple[float, float]:
    """Return the bytes of a forward on one rank: in its memory, without offsets, and out over its links.

    Args:
        shards: the shards of this rank.
        samples, own_samples: number of samples of all ranks, and of this rank.
        total_dim, owner_dim: columns of all ranks' shards, and of this rank's shards.
        id_bytes, wire_bytes: bytes of an id, and of an element of the pooled embeddings between ranks.
    """
    rows = sum(shard.ids * (shard.dim * shard.element_bytes + id_bytes) for shard in shards)
    return rows + own_samples * total_dim * wire_bytes, (samples - own_samples) * owner_dim * wire_bytes


class UpdateBytes(NamedTuple):
    hbm: float
    """bytes read from and written to the rank's memory"""
    compulsory: float
    """the part of `hbm` that an unlimited cache would leave"""
    link: float
    """bytes that leave the rank over its links"""


def update_bytes(
    shards: Iterable[ShardTraffic],
    samples: int,
    own_samples: int,
    total_dim: float,
    owner_dim: float,
    wire_bytes: int,
    gradient_bytes: int,
    optimizer: str,
) -> UpdateBytes:
    """Return the bytes of a backward on one rank; arguments as in `pooling_bytes`.

    Memory: touched rows and their optimizer state, read and written; for each id its bag's gradient and its position;
    for each touched row its run; the gradient of the rank's samples and of its columns. Links: the gradient of the
    columns that other ranks own.

    Args:
        wire_bytes, gradient_bytes: bytes of an element of the gradients between ranks, and of the model's gradients.
        optimizer: a key of `STATES`.
    """
    hbm = own_samples * total_dim * gradient_bytes + samples * owner_dim * wire_bytes
    named = once = 0.0  # bytes of gradients: read for each id, and read once
    for shard in shards:
        row_bytes = shard.dim * shard.element_bytes + state_bytes(optimizer, shard.dim)
        hbm += shard.touched_rows * (2 * row_bytes + _RUN_BYTES) + shard.ids * _POSITION_BYTES
        named += shard.ids * shard.dim * wire_bytes
        once += shard.filled_bags * shard.dim * wire_bytes
    return UpdateBytes(hbm + named, hbm + once, own_samples * (total_dim - owner_dim) * wire_bytes)


class DenseCounts(NamedTuple):
    flop: int
    """operations of matrix products, forward and backward"""
    parameters: int
    outputs: int
    """elements of all outputs of layers, in the forward"""


def dense_layers(model: ModelConfig, tables: int, dense_features: int) -> list[tuple[int, int]]:
    """Return the numbers of inputs and outputs of the dense part's linear layers, from the bottom to the top MLP.

    Each cross layer has two: it projects to `cross_rank` and back.
    """
    features = tables + 1
    width = model.dim + features * (features - 1) // 2 if model.arch == "dot" else features * model.dim
    layers = [*pairwise([dense_features, *model.bottom_mlp])]
    if model.arch != "dot":
        layers += [(width, model.cross_rank), (model.cross_rank, width)] * model.cross_layers
    if model.sequence.history is not None:
        queries = model.sequence.heads * model.dim
        layers += [(model.dim, queries), (queries, model.dim)]
    return [*layers, *pairwise([width, *model.top_mlp])]


def count_dense(model: ModelConfig, tables: int, dense_features: int, samples: int) -> DenseCounts:
    """Return the cost of a step of the dense part for `samples` samples of a rank.

    A multiplication and an addition are two operations. The first layer computes no gradient of its input. Each pair of
    the dot interaction counts once. Attention reads all positions of a history.
    """
    layers = dense_layers(model, tables, dense_features)
    products = sum(inputs * neurons for inputs, neurons in layers)
    outputs = sum(neurons for _, neurons in layers)
    # A pair of cross layers has one bias.
    parameters = products + outputs - (model.cross_layers * model.cross_rank if model.arch != "dot" else 0)
    if model.arch == "dot":
        pairs = tables * (tables + 1) // 2
        products, outputs = products + pairs * model.dim, outputs + pairs
    if model.sequence.history is not None:
        keys = (model.sequence.positions + 1) * model.dim
        products, parameters = products + 2 * model.sequence.heads * keys, parameters + keys
        outputs += model.sequence.heads * model.dim
    first_inputs, first_neurons = layers[0]
    return DenseCounts(
        flop=(6 * products - 2 * first_inputs * first_neurons) * samples,
        parameters=parameters,
        outputs=outputs * samples,
    )
