"""The limits of the embedding stage: the bytes that memory and links must carry, and how fast they carry any.

The bytes are counted from the ids; the rates are measured on the devices at hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.communications import Payload, by_collective
from dlrm_overlap.bench.harness.timing import Timing, Turns, gather
from dlrm_overlap.bench.harness.workload import BATCHES, Workload
from dlrm_overlap.config import CRITEO_TABLES, Config, TablesConfig
from dlrm_overlap.embedding.backends.cpu import lengths_and_ids
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.embedding.traffic import ShardTraffic, pooling_bytes, update_bytes

_CALLS, _REPEATS = 8, 5  # calls follow each other, so that no moment in which ranks differ counts
_HBM_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_LINK_BYTES = {"cuda": 192 << 20, "cpu": 4 << 20}  # to each peer; a container's shared memory may be small


@dataclass(frozen=True)
class Limit:
    """One rank's bytes of a step, and the rates at which memory and links carry bytes on the slowest rank."""

    hbm_bytes: int
    """into and out of this GPU's memory"""
    link_bytes: int
    """out of this GPU to its peers"""
    hbm_gb_per_s: float
    """of a GPU's memory, read and written"""
    link_gb_per_s: float
    """of a GPU's links, out to all peers; 0 if it has no peer"""

    @property
    def hbm_ms(self) -> float:
        """The time that memory needs if every byte is carried at its measured rate."""
        return self.hbm_bytes / self.hbm_gb_per_s / 1e6

    @property
    def link_ms(self) -> float:
        """The same of the links."""
        return self.link_bytes / self.link_gb_per_s / 1e6 if self.link_bytes else 0.0

    @property
    def ms(self) -> float:
        """The longer of both."""
        return max(self.hbm_ms, self.link_ms)


@dataclass(frozen=True)
class RankIds:
    """A batch on one rank: the ids of its tables, as the bytes that it moves depend on them."""

    layout: Layout
    """which rank owns what"""
    rank: int
    batch_sizes: Sequence[int]
    """samples of each rank"""
    inputs: Sequence[KeyedJaggedTensor]
    """the ids of the rank's tables, one for each source of the layout"""

    @cached_property
    def tables(self) -> list[ShardTraffic]:
        """The load on each of the rank's tables."""
        samples, found = sum(self.batch_sizes), []
        for together in self.layout.tables(self.rank):
            firsts = [(self.inputs[shard.input], shard.feature * samples) for shard in together]
            bags = [lengths_and_ids(ids_of_all, bag, bag + samples) for ids_of_all, bag in firsts]
            rows = torch.cat([values for _, values in bags]).unique().numel()
            named = sum(values.numel() for _, values in bags)
            filled = sum(int((lengths > 0).sum()) for lengths, _ in bags)
            found.append(ShardTraffic(named, rows, filled, together[0].dim, together[0].dtype.itemsize))
        return found

    @property
    def repeated_row_bytes(self) -> int:
        """Bytes of rows that `count_bytes` counts again, since a table's ids name them again."""
        return int(sum((each.ids - each.touched_rows) * each.dim * each.element_bytes for each in self.tables))

    @cached_property
    def travelling_columns(self) -> tuple[float, float]:
        """The columns that arrive of each of the rank's samples, and those that it sends of each, on average.

        Of a table that is cut by rows a partial sum travels only for a bag that has ids of its rows. Other owners are
        taken to send as many as this one.

        Example: a table of dim 4 on each of two ranks, and one of dim 8 that is cut by rows; 3 of 4 bags have ids of
        rank 0's rows. Of each sample rank 0 sends 4 + 6 columns, and 4 + 4 + 2 * 6 arrive.
        """
        layout, samples = self.layout, sum(self.batch_sizes)
        arriving, sent = float(layout.total_dim), float(layout.owner_dims[self.rank])
        for shard in layout.by_owner[self.rank]:
            if shard.rows == (0, 0):
                continue
            first = shard.feature * samples
            lengths, _ = lengths_and_ids(self.inputs[shard.input], first, first + samples)
            columns = shard.dim * int((lengths > 0).sum()) / samples
            place = shard.name, shard.first_column
            owners = sum((each.name, each.first_column) == place for shards in layout.by_owner for each in shards)
            arriving, sent = arriving + owners * columns - shard.dim, sent + columns - shard.dim
        return arriving, sent


def count_bytes(own: RankIds, wire_dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a rank's memory and its links must carry in one forward.

    Its memory carries the rows, ids and offsets that it reads, and the pooled embeddings of its own samples, which all
    ranks write into it. Its links carry the pooled embeddings that it makes of other ranks' samples. A row counts as
    often as an id names it; where rows are read again from the cache, a step can be faster than this allows.
    `wire_dtype` is of the pooled embeddings between ranks.

    Example:
        Two ranks of 2 samples, one table of dim 4 each, fp32 rows and wire, int64 ids. Rank 0 has 6 ids in its 4 bags:
        6 * 16 (rows) + 6 * 8 (ids) + 5 * 8 (offsets) + 2 * 8 * 4 (its samples, both tables) = 248 bytes of memory,
        2 * 4 * 4 = 32 (rank 1's samples, its own table) over the links.
    """
    arriving, sent = own.travelling_columns
    hbm_bytes, link_bytes = pooling_bytes(
        own.tables,
        samples=sum(own.batch_sizes),
        own_samples=own.batch_sizes[own.rank],
        total_dim=arriving,
        owner_dim=sent,
        id_bytes=0,  # inputs may have ids of different types
        wire_bytes=wire_dtype.itemsize,
    )
    hbm_bytes += sum(ids.values().nbytes + ids.offsets().nbytes for ids in own.inputs)
    return int(hbm_bytes), int(link_bytes)


def forward_limit(workload: Workload, ceilings: tuple[float, float]) -> Limit:
    """Return the limit of the embedding stage's forward, given `measure_ceilings`. All ranks call this."""
    counts = [count_bytes(own, workload.wire_dtype) for own in rank_ids(workload)]
    return find_limit(counts, ceilings, workload.group, workload.device)[0]


def rank_ids(workload: Workload) -> list[RankIds]:
    """Return the batches of `workload` on this rank."""
    about = workload.layout, workload.rank, workload.batch_sizes
    return [RankIds(*about, list(ids.inputs)) for ids in workload.batches]


class UpdateCounts(NamedTuple):
    """The bytes that one rank's memory and links must carry in a backward, and the counts that they come from."""

    hbm_bytes: int
    """into and out of this GPU's memory"""
    link_bytes: int
    """out of this GPU to its peers"""
    compulsory_bytes: int
    """the part of `hbm_bytes` that would remain with a cache without bounds, so that no gradient is read twice"""
    ids: int
    """of the batch, in this rank's tables"""
    touched_rows: int
    """distinct rows that the ids name"""


def count_update(
    own: RankIds, wire_dtype: torch.dtype, optimizer: str, gradient_dtype: torch.dtype = torch.float32
) -> UpdateCounts:
    """Return what a rank's memory and its links must carry in one backward.

    Its memory carries the touched rows and their optimizer state, read and written; for each id its bag's gradient, and
    4 bytes that say where that gradient is; for each touched row 16 bytes that name the row and its ids; the gradient
    of the rank's own samples, read to be sent; and the gradient of its own columns, written where it arrives. Its links
    carry the gradient of the columns that other ranks own. A bag's gradient counts as often as the bag has ids; where
    it is read again from the cache, a step can be faster than this allows.

    Args:
        own: the ids.
        wire_dtype: of the gradients between ranks.
        optimizer: sgd | rowwise_adagrad | adagrad.
        gradient_dtype: of the gradient that the model gives.

    Example:
        Two ranks of 2 samples, one table of dim 4 each, fp32 rows and wire, SGD. Rank 0 has 6 ids of 5 rows in 3 of its
        4 bags: 2 * 5 * 16 (rows) + 6 * 16 (gradients) + 6 * 4 (their places) + 5 * 16 (runs) + 2 * 8 * 4 (its samples'
        gradient) + 4 * 4 * 4 (its columns' gradient) = 488 bytes of memory, 3 * 16 in place of 6 * 16 if no gradient
        were read twice, 2 * 4 * 4 = 32 over the links.
    """
    arriving, sent = own.travelling_columns
    counted = update_bytes(
        own.tables,
        samples=sum(own.batch_sizes),
        own_samples=own.batch_sizes[own.rank],
        total_dim=arriving,
        owner_dim=sent,
        wire_bytes=wire_dtype.itemsize,
        gradient_bytes=gradient_dtype.itemsize,
        optimizer=optimizer,
    )
    ids, touched = sum(each.ids for each in own.tables), sum(each.touched_rows for each in own.tables)
    return UpdateCounts(int(counted.hbm), int(counted.link), int(counted.compulsory), int(ids), int(touched))


def find_limit(
    counts: Sequence[Sequence[int]], ceilings: tuple[float, float], group: dist.ProcessGroup, device: torch.device
) -> tuple[Limit, list[int]]:
    """Return the limit of the rank whose limit is the greatest, and the rest of its counts. All ranks call this.

    Args:
        counts: for each batch this rank's bytes of memory, its bytes of links, and further counts to report. The mean
            over the batches is taken of each.
        ceilings: from `measure_ceilings`.
    """
    means = [sum(column) / len(counts) for column in zip(*counts, strict=True)]
    by_rank = [list(map(round, row)) for row in gather(means, device, group)]
    return max(((Limit(hbm, link, *ceilings), rest) for hbm, link, *rest in by_rank), key=lambda limit: limit[0].ms)


def measure_ceilings(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the GB/s of the slowest rank's memory, read and written, and links, out to all peers; 0 without peers.

    The memory is measured by a copy within the device, the links by the All-to-All of `bench collectives`, by copy
    engines and by a kernel's stores, of which the faster one counts; on CPUs by gloo. All ranks of `group` call this.
    """

    def call_ms(calls: Sequence[Callable[[], object]]) -> float:
        pieces = [partial(_repeat, call) for call in calls]
        return min(each.median_ms for each in Turns(group, device).time(pieces, _REPEATS)) / _CALLS

    source = torch.zeros(_HBM_BYTES[device.type], dtype=torch.uint8, device=device)
    hbm_gb_per_s = 2 * source.numel() / call_ms([partial(torch.empty_like(source).copy_, source)]) / 1e6
    if group.size() == 1:
        return hbm_gb_per_s, 0.0
    payload = Payload("all_to_all", _LINK_BYTES[device.type] // 4, group, device)
    if device.type == "cpu":
        return hbm_gb_per_s, payload.link_bytes / call_ms([by_collective(payload).run]) / 1e6
    from dlrm_overlap.bench.harness.peer_memory import PeerMemory

    memory = PeerMemory(group, device, payload.part * group.size())
    ms = call_ms([memory.call(payload, way).run for way in memory.ways])
    memory.close()
    return hbm_gb_per_s, payload.link_bytes / ms / 1e6


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        call()


def describe(config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns of the embedding stage's shape."""
    names = {dtype: name for name, dtype in WIRE_DTYPES.items()}
    return {
        "world_size": workload.group.size(),
        **describe_tables(config),
        "global_batch": sum(workload.batch_sizes),
        "batches": BATCHES,
        "id_dtype": "int64",
        "weight_dtype": config.embedding.weight_dtype,
        "wire_dtype": names[workload.wire_dtype],
        "output_dtype": names[workload.output_dtype],
    }


def describe_tables(config: Config) -> dict[str, Any]:
    """Return the columns of the tables. A list in the configuration is written as one value."""
    tables = config.data.tables
    return {
        "tables": tables.number(CRITEO_TABLES),
        "rows": str(_capped_rows(tables)),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot),
        "zipf_alpha": str(tables.zipf_alpha),
    }


def _capped_rows(tables: TablesConfig) -> int | Sequence[int] | None:
    """Return the rows of the tables, at most `max_rows` each."""
    if tables.max_rows is None or tables.rows is None:
        return tables.rows
    most = tables.max_rows
    return [min(rows, most) for rows in tables.rows] if isinstance(tables.rows, list) else min(tables.rows, most)


def times(timing: Timing, baseline: Timing, limit: Limit) -> dict[str, Any]:
    """Return the columns of a contender's times, and of how they compare with the limit and with the baseline's."""
    return {
        **asdict(timing),
        **asdict(limit),
        "limit_ms": limit.ms,
        "fraction_of_limit": limit.ms / timing.median_ms,
        "speedup": baseline.median_ms / timing.median_ms,
    }
