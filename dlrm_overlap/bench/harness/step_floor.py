"""The floor of a training step: the time that its products, its bytes of memory and its bytes of links must take.

All are counted from the layers' sizes and the batches' ids, each thing once, as if caches had no bounds: no step of
this model on these GPUs can be faster than the longest of the three.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.limits import Limit, RankIds, find_limit
from dlrm_overlap.bench.harness.workload import exchange_options
from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.shardings import build_layout, model_order, names_of
from dlrm_overlap.embedding.traffic import DenseCounts, count_dense
from dlrm_overlap.train.trainer import Trainer


def floor_columns(dense_flop: int, limit: Limit, uncached_hbm_bytes: int, dense_tflop_per_s: float) -> dict[str, Any]:
    """Return the floor's columns: the counts, the rates, the times, the longest of them and their sum.

    Args:
        dense_flop: of the matrix products of a rank.
        limit: the most bytes of a rank, each touched row and each gradient once, and the rates.
        uncached_hbm_bytes: those of memory, a row and a bag's gradient as often as ids name them.
        dense_tflop_per_s: rate of the matrix products.
    """
    dense_ms = dense_flop / dense_tflop_per_s / 1e9
    times = {"dense_ms": dense_ms, "hbm_ms": limit.hbm_ms, "link_ms": limit.link_ms}
    counts = {
        "dense_flop": dense_flop,
        "uncached_hbm_bytes": uncached_hbm_bytes,
        "dense_tflop_per_s": dense_tflop_per_s,
    }
    return counts | vars(limit) | times | {"floor_ms": max(times.values()), "floor_sum_ms": sum(times.values())}


def find_floor(
    trainer: Trainer, batches: Sequence[Batch], ceilings: tuple[float, float], dense_tflop_per_s: float
) -> dict[str, Any]:
    """Return the columns of the floor of a trainer's step, its bytes the mean over `batches`. All ranks call this.

    It must come before the trainer's first step, in which TorchRec's pipeline takes the collective of the ids apart.
    Bytes of data-parallel tables and of histories are left out, and dense layers count as whole on every rank.

    Args:
        trainer: a contender's, whose tables are where all contenders have them.
        batches: this rank's, on the CPU.
        ceilings: from `limits.measure_ceilings`.
        dense_tflop_per_s: rate of the matrix products.
    """
    group, device, config = dist.group.WORLD, trainer.device, trainer.config
    assert isinstance(group, dist.ProcessGroup)
    (module,) = [each for each in trainer.model.modules() if isinstance(each, ShardedEmbeddingBagCollection)]
    every: list[Any] = list(module._embedding_shardings)
    exchanged = [i for i, sharding in enumerate(every) if type(sharding) is not DpPooledEmbeddingSharding]
    brought = names_of([every[i] for i in exchanged])
    names = [name for name in model_order(module._embedding_bag_configs) if name in brought]
    layout = build_layout([every[i] for i in exchanged], names, group.size())
    samples = trainer.samples_per_rank
    dense = count_dense(config.model, len(trainer.train_data.rows), trainer.train_data.dense_features, samples)
    dense_hbm, dense_link = _count_dense_bytes(dense, group.size(), config)
    counts = []
    for batch in batches:
        sparse = batch.sparse.to(device)
        inputs = list(module.input_dist(module.create_context(), sparse).wait().wait())
        own = RankIds(layout, group.rank(), [samples] * group.size(), [inputs[i] for i in exchanged])
        hbm, link, uncached = _count_tables(own, sparse, config)
        counts.append((hbm + dense_hbm, link + dense_link, uncached + dense_hbm))
    limit, (uncached,) = find_limit(counts, ceilings, group, device)
    return floor_columns(dense.flop, limit, uncached, dense_tflop_per_s)


def _count_dense_bytes(dense: DenseCounts, world_size: int, config: Config) -> tuple[int, int]:
    """Return the bytes of a step's dense part on a rank: of its memory, and out over its links.

    From memory come the weights, read once, and the layers' outputs, written once. Over the links go the gradients,
    summed by a ring in which each rank sends 2 (W - 1) / W of them.
    """
    number_bytes = 2 if config.train.precision == "bf16" else 4
    gradient_bytes = 2 if config.train.gradient_dtype == "bf16" else 4
    ring = 2 * (world_size - 1) * gradient_bytes * dense.parameters // world_size
    return 4 * dense.parameters + number_bytes * dense.outputs, ring


def _count_tables(own: RankIds, sparse: KeyedJaggedTensor, config: Config) -> tuple[int, int, int]:
    """Return the bytes of a step's tables on a rank: memory, links, and memory if nothing were read from a cache.

    To the embedding stage's own bytes, forward and back, come over the links the ids of other ranks' tables.

    Args:
        own: the ids of the rank's tables.
        sparse: the ids of the rank's samples.
        config: the wire's type, and the rows' optimizer.
    """
    ours = exchange_options(config.embedding, "pgas", config.train.precision)
    hbm_bytes, link_bytes = own.forward_bytes(ours.wire_dtype)
    optimizer, output_dtype = config.embedding.optimizer, ours.output_dtype
    update_hbm, update_link, compulsory = own.update_bytes(ours.wire_dtype, optimizer, output_dtype)
    read_again = sum((each.ids - each.touched_rows) * each.dim * each.element_bytes for each in own.tables)
    return (
        hbm_bytes - int(read_again) + compulsory,
        link_bytes + update_link + _sent_id_bytes(own.layout, own.rank, sparse),
        hbm_bytes + update_hbm,
    )


def _sent_id_bytes(layout: Layout, rank: int, sparse: KeyedJaggedTensor) -> int:
    """Return the bytes of ids and lengths that `rank` sends: to every other rank with a shard, those of its rows."""
    ids, lengths_bytes = sparse.to_dict(), sparse.stride() * sparse.lengths().element_size()
    sent = 0
    for owner, shards in enumerate(layout.by_owner):
        for name, (first, end) in {(shard.name, shard.rows) for shard in shards} if owner != rank else ():
            values = ids[name].values()
            count = int(((values >= first) & (values < end)).sum()) if end else values.numel()
            sent += count * values.element_size() + lengths_bytes
    return sent
