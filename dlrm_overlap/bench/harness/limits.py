"""The limits of the embedding stage: the bytes that memory and links must carry, and how fast they carry any.

The bytes are counted from the ids; the rates are measured on the devices at hand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.communications import Payload, by_collective
from dlrm_overlap.bench.harness.timing import Timing, greatest, time_alone
from dlrm_overlap.bench.harness.workload import BATCHES, Workload
from dlrm_overlap.config import CRITEO_TABLES, Config
from dlrm_overlap.embedding.backends.cpu import lengths_and_ids
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.embedding.traffic import ShardTraffic, pooling_bytes, update_bytes

_CALLS, _REPEATS = 8, 5  # calls follow each other, so that no moment in which ranks differ counts
_HBM_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_LINK_BYTES = {"cuda": 192 << 20, "cpu": 4 << 20}  # to each peer; a container's shared memory may be small


@dataclass(frozen=True)
class Limit:
    """The most bytes of a step on a rank, and the rates at which memory and links carry bytes on the slowest one."""

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

    @classmethod
    def of_workload(cls, workload: Workload) -> list["RankIds"]:
        """Return the batches of `workload` on this rank."""
        about = workload.layout, workload.rank, workload.batch_sizes
        return [cls(*about, list(ids.inputs)) for ids in workload.batches]

    @cached_property
    def tables(self) -> list[ShardTraffic]:
        """The load on each of the rank's tables."""
        found = []
        for together in self.layout.tables(self.rank):
            bags = [self._bags(shard) for shard in together]
            rows = torch.cat([values for _, values in bags]).unique().numel()
            named = sum(values.numel() for _, values in bags)
            filled = sum(int((lengths > 0).sum()) for lengths, _ in bags)
            found.append(ShardTraffic(named, rows, filled, together[0].dim, together[0].dtype.itemsize))
        return found

    def _bags(self, shard: FeatureShard) -> tuple[torch.Tensor, torch.Tensor]:
        samples = sum(self.batch_sizes)
        return lengths_and_ids(self.inputs[shard.input], shard.feature * samples, (shard.feature + 1) * samples)

    @cached_property
    def _travelling_columns(self) -> tuple[float, float]:
        """The columns that arrive of each of the rank's samples, and those that it sends of each, on average.

        Of a table that is cut by rows a partial sum travels only for a bag that has ids of its rows. Other owners are
        taken to send as many as this one.

        Example: a table of dim 4 on each of two ranks, and one of dim 8 that is cut by rows; 3 of 4 bags have ids of
        rank 0's rows. Of each sample rank 0 sends 4 + 6 columns, and 4 + 4 + 2 * 6 arrive.
        """
        layout = self.layout
        arriving, sent = float(layout.total_dim), float(layout.owner_dims[self.rank])
        for shard in layout.by_owner[self.rank]:
            if shard.rows == (0, 0):
                continue
            columns = shard.dim * float((self._bags(shard)[0] > 0).double().mean())
            place = shard.name, shard.first_column
            owners = sum((each.name, each.first_column) == place for shards in layout.by_owner for each in shards)
            arriving, sent = arriving + owners * columns - shard.dim, sent + columns - shard.dim
        return arriving, sent

    @property
    def _shared(self) -> dict[str, Any]:
        """The arguments that both functions of `embedding.traffic` take."""
        arriving, sent = self._travelling_columns
        own_samples = self.batch_sizes[self.rank]
        about = {"samples": sum(self.batch_sizes), "own_samples": own_samples, "total_dim": arriving}
        return {"shards": self.tables, "owner_dim": sent} | about

    def forward_bytes(self, wire_dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes that the rank's memory and its links must carry in one forward.

        Its memory carries the rows, ids and offsets that it reads, and the pooled embeddings of its own samples, which
        all ranks write into it. Its links carry the pooled embeddings that it makes of other ranks' samples. A row
        counts as often as an id names it; where rows are read again from the cache, a step can be faster than this
        allows. `wire_dtype` is of the pooled embeddings between ranks.
        """
        # Inputs may have ids of different types.
        hbm_bytes, link_bytes = pooling_bytes(**self._shared, id_bytes=0, wire_bytes=wire_dtype.itemsize)
        hbm_bytes += sum(ids.values().nbytes + ids.offsets().nbytes for ids in self.inputs)
        return int(hbm_bytes), int(link_bytes)

    def update_bytes(
        self, wire_dtype: torch.dtype, optimizer: str, gradient_dtype: torch.dtype = torch.float32
    ) -> tuple[int, int, int]:
        """Return the bytes that the rank's memory and its links must carry in one backward, and the compulsory ones.

        Its memory carries the touched rows and their optimizer state, read and written; for each id its bag's gradient,
        and 4 bytes that say where that gradient is; for each touched row 16 bytes that name the row and its ids; the
        gradient of the rank's own samples, read to be sent; and the gradient of its own columns, written where it
        arrives. Its links carry the gradient of the columns that other ranks own. A bag's gradient counts as often as
        the bag has ids; where it is read again from the cache, a step can be faster than this allows. The compulsory
        bytes are those of memory that would remain if no gradient were read twice.

        Args:
            wire_dtype: of the gradients between ranks.
            optimizer: sgd | rowwise_adagrad | adagrad.
            gradient_dtype: of the gradient that the model gives.

        Example:
            Two ranks of 2 samples, one table of dim 4 each, fp32 rows and wire, SGD. Rank 0 has 6 ids of 5 rows in 3 of
            its 4 bags: 2 * 5 * 16 (rows) + 6 * 16 (gradients) + 6 * 4 (their places) + 5 * 16 (runs) + 2 * 8 * 4 (its
            samples' gradient) + 4 * 4 * 4 (its columns' gradient) = 488 bytes of memory, 3 * 16 in place of 6 * 16 if
            no gradient were read twice, 2 * 4 * 4 = 32 over the links.
        """
        sizes: dict[str, Any] = {"wire_bytes": wire_dtype.itemsize, "gradient_bytes": gradient_dtype.itemsize}
        found = update_bytes(**self._shared, **sizes, optimizer=optimizer)
        return int(found.hbm), int(found.link), int(found.compulsory)


def find_limit(
    counts: Sequence[Sequence[int]], ceilings: tuple[float, float], group: dist.ProcessGroup, device: torch.device
) -> tuple[Limit, list[int]]:
    """Return the limit of the ranks' greatest bytes, and the greatest of further counts. All ranks call this.

    Args:
        counts: for each batch this rank's bytes of memory, its bytes of links, and further counts to report. The mean
            over the batches is taken of each.
        ceilings: from `measure_ceilings`.
    """
    means = [sum(column) / len(counts) for column in zip(*counts, strict=True)]
    hbm_bytes, link_bytes, *rest = map(round, greatest(means, device, group))
    return Limit(hbm_bytes, link_bytes, *ceilings), rest


def measure_ceilings(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the GB/s of the slowest rank's memory, read and written, and links, out to all peers; 0 without peers.

    The memory is measured by a copy within the device, the links by the All-to-All of `bench collectives`, by copy
    engines and by a kernel's stores, of which the faster one counts; on CPUs by gloo. All ranks of `group` call this.
    """

    def call_ms(calls: Sequence[Callable[[], object]]) -> float:
        pieces = [partial(_repeat, call) for call in calls]
        return min(each.median_ms for each in time_alone(pieces, _REPEATS, device, group)) / _CALLS

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
    rows, most = tables.rows, tables.max_rows or math.inf
    return {
        "tables": tables.number(CRITEO_TABLES),
        "rows": str([min(each, most) for each in rows] if isinstance(rows, list) else rows and min(rows, most)),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot),
        "zipf_alpha": str(tables.zipf_alpha),
    }


def times(timing: Timing, baseline: Timing, limit: Limit) -> dict[str, Any]:
    """Return the columns of a contender's times, and of how they compare with the limit and with the baseline's."""
    return {
        **asdict(timing),
        **asdict(limit),
        "limit_ms": limit.ms,
        "fraction_of_limit": limit.ms / timing.median_ms,
        "speedup": baseline.median_ms / timing.median_ms,
    }
