"""How many bytes memory and links must carry in the embedding stage and the dense part, counted from numbers alone.

`bench` puts in the numbers of a batch at hand, the simulator those that a batch has on average. Pure Python.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.kernels.optimizer_params import state_bytes

_RUN_BYTES, _PLACE_BYTES = 16, 4  # an update reads them to find a touched row's ids, and an id's gradient


def partial_sums(bag_ids: float, row_shards: int) -> float:
    """Return how many partial sums of a bag travel, one from each of `row_shards` with an id of the bag, on average.

    Args:
        bag_ids: ids of a bag, which name all rows as often; a mean will do.
        row_shards: into which the rows are cut, alike; of 1 the whole bag travels, ids or none.

    Example: 8 shards, 1 id a bag: 1. 3 ids: 2.6. 32 ids: 7.9.
    """
    return 1.0 if row_shards == 1 else row_shards * (1 - (1 - 1 / row_shards) ** bag_ids)


class ShardTraffic(NamedTuple):
    """The load of a batch on one table shard, or its mean; all ranks' samples together."""

    ids: float
    touched_rows: float
    """distinct rows that the ids name"""
    filled_bags: float
    """bags that have an id"""
    dim: float
    """columns of the shard"""
    element_bytes: int
    """of a row's element"""


def pooling_bytes(
    shards: Iterable[ShardTraffic],
    samples: int,
    own_samples: int,
    total_dim: float,
    owner_dim: float,
    id_bytes: int,
    wire_bytes: int,
) -> tuple[float, float]:
    """Return the bytes of a forward on one rank: of its memory but for offsets, and out over its links.

    Args:
        shards: of the rank.
        samples: of all ranks.
        own_samples: of this rank, whose pooled embeddings all ranks write into its memory.
        total_dim: columns of all shards of all ranks.
        owner_dim: columns of this rank's shards.
        id_bytes: of an id.
        wire_bytes: of an element of the pooled embeddings.

    Example:
        One shard of 6 ids and dim 4, fp32, int64 ids; 2 of 4 samples are the rank's, two such shards in all:
        6 * 16 + 6 * 8 + 2 * 8 * 4 = 208 bytes of memory, 2 * 4 * 4 = 32 over the links.
    """
    rows = sum(shard.ids * (shard.dim * shard.element_bytes + id_bytes) for shard in shards)
    return rows + own_samples * total_dim * wire_bytes, (samples - own_samples) * owner_dim * wire_bytes


class UpdateBytes(NamedTuple):
    """The bytes of a backward on one rank."""

    hbm: float
    """into and out of its memory"""
    compulsory: float
    """the part of `hbm` that would remain with a cache without bounds, so that no gradient is read twice"""
    link: float
    """out over its links"""


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
    """Return the bytes of a backward on one rank.

    Its memory carries the touched rows and their optimizer state, read and written; for each id its bag's gradient, and
    4 bytes that say where that is; for each touched row 16 bytes that name the row and its ids; the gradient of the
    rank's own samples, read to be sent; and that of its own columns, written where it arrives. Its links carry the
    gradient of the columns that other ranks own.

    Args, beside those of `pooling_bytes`:
        wire_bytes: of an element of the gradients between ranks.
        gradient_bytes: of an element of the gradient that the model gives.
        optimizer: a key of `STATES`.

    Example:
        Two ranks of 2 samples, one table of dim 4 each, fp32 rows and wire, SGD; 6 ids of 5 rows in 3 of 4 bags:
        2 * 5 * 16 (rows) + 6 * 16 (gradients) + 6 * 4 (their places) + 5 * 16 (runs) + 2 * 8 * 4 (the samples'
        gradient) + 4 * 4 * 4 (the columns' gradient) = 488 bytes of memory, 2 * 4 * 4 = 32 over the links.
    """
    hbm = own_samples * total_dim * gradient_bytes + samples * owner_dim * wire_bytes
    named = once = 0.0  # of gradients read for each id, and once
    for shard in shards:
        row_bytes = shard.dim * shard.element_bytes + state_bytes(optimizer, shard.dim)
        hbm += shard.touched_rows * (2 * row_bytes + _RUN_BYTES) + shard.ids * _PLACE_BYTES
        named += shard.ids * shard.dim * wire_bytes
        once += shard.filled_bags * shard.dim * wire_bytes
    return UpdateBytes(hbm + named, hbm + once, own_samples * (total_dim - owner_dim) * wire_bytes)


class DenseCounts(NamedTuple):
    """The cost of a step of the dense part on each rank."""

    flop: int
    """of its matrix products: forward, gradients of the weights and of the inputs"""
    parameters: int
    """weights and biases"""
    outputs: int
    """numbers that its layers put out in the forward"""


def count_dense(model: ModelConfig, tables: int, dense_features: int, samples: int) -> DenseCounts:
    """Return the cost of the dense part for `samples` of a rank.

    A multiplication and an addition are two operations. The first layer needs no gradient of its input. Of the dot
    interaction each pair counts once. Attention to a history reads all positions.

    Example:
        One sample, 3 dense features, bottom MLP [4], top MLP [2, 1], arch dot, one table: the layers are 3 x 4, 5 x 2
        (4 numbers of the bottom MLP, one pair) and 2 x 1, the pair takes 4 products. Forward 2 * (12 + 10 + 2 + 4) =
        56 operations, gradients twice as many less 2 * 12: 144 in all. 16 + 12 + 3 = 31 parameters, 4 + 1 + 2 + 1 = 8
        outputs.
    """
    features = tables + 1
    pairs = features * (features - 1) // 2
    width = model.dim + pairs if model.arch == "dot" else features * model.dim  # numbers that the top MLP gets
    bottom = list(pairwise([dense_features, *model.bottom_mlp]))
    if model.arch == "dot":
        products, parameters, outputs = pairs * model.dim, 0, pairs
    else:  # each cross layer: to the rank and back, with a bias there
        products = parameters = model.cross_layers * 2 * width * model.cross_rank
        parameters += model.cross_layers * width
        outputs = model.cross_layers * (model.cross_rank + width)
    layers = [*bottom, *pairwise([width, *model.top_mlp])]
    if model.sequence.history is not None:
        queries, keys = model.sequence.heads * model.dim, (model.sequence.positions + 1) * model.dim
        layers += [(model.dim, queries), (queries, model.dim)]
        products, parameters = products + 2 * model.sequence.heads * keys, parameters + keys
        outputs += queries
    products += sum(inputs * neurons for inputs, neurons in layers)
    first_inputs, first_neurons = bottom[0]
    return DenseCounts(
        flop=(6 * products - 2 * first_inputs * first_neurons) * samples,
        parameters=parameters + sum((inputs + 1) * neurons for inputs, neurons in layers),
        outputs=(outputs + sum(neurons for _, neurons in layers)) * samples,
    )
