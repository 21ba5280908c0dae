"""The forward of the embedding stage: what every way to run it shares, and the way between processes of one host."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena, Region
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.protocol.layout import FeatureShard, Layout
from dlrm_overlap.embedding.protocol.windows import OutputWindows
from dlrm_overlap.embedding.tables import LocalTables, UpdateRule
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.schedule import TaskGrid, resolve_schedule

log = logging.getLogger("dlrm_overlap")

BACKENDS = ("nccl", "pgas", "fused")


@dataclass(frozen=True)
class ExchangeOptions:
    """How a backend runs: keys of the configuration's section `embedding`."""

    backend: str = "pgas"
    """nccl | pgas | fused"""
    schedule: str = "auto"
    """order of the tasks: linear | remote_first | balanced | auto"""
    slice_bags: int = EmbeddingConfig.slice_bags
    """fused: bags a slice"""
    programs_per_sm: int | None = None
    """fused: programs a multiprocessor; None takes as many as fit"""
    wire_dtype: torch.dtype = torch.float32
    """of pooled embeddings and their gradients between ranks"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s
    """bound of a wait for a peer"""
    trace: bool = False
    """fused on GPUs: record every task"""
    backward: str = "push"
    """collective | push | atomic; nccl has the first alone"""
    copy_output: bool = False
    """pgas, fused: return a copy of the pooled embeddings, not the window they lie in, which must be let go of before
    the next forward"""


@dataclass(frozen=True, eq=False)
class BatchSizes:
    """Samples of each rank in one step."""

    per_rank: tuple[int, ...]
    first_sample: tuple[int, ...]
    """of each rank, and B"""
    total: int
    """B"""
    most: int
    """of a rank"""

    @staticmethod
    @lru_cache(maxsize=64)  # they rarely change
    def of(per_rank: tuple[int, ...]) -> "BatchSizes":
        """Return the sizes with what follows from them."""
        first = (0, *accumulate(per_rank))
        return BatchSizes(per_rank, first, first[-1], max(per_rank))


class Step:
    """One pass through the stage: what its parts hand on."""

    work: Any = None
    """the collective under way"""
    received: torch.Tensor | None = None
    """what it fills"""
    set_aside: torch.Tensor | None = None
    """the pooled embeddings, if the next step began before they were asked for"""
    set_aside_event: Any = None
    """on GPUs: from which on they may be read"""
    looked_up: Any = None
    """on GPUs: the event from which on the ids may be read for the backward"""
    number: int = 0
    """of the steps that have a backward, counted from the run's first"""
    rules: Sequence[UpdateRule] = ()
    """how each of this rank's fused lookups updates its rows, as it was at the forward"""
    runs: Sequence[Any] = ()
    """the ids of each input, ready for the update of their rows"""
    gradient: torch.Tensor | None = None
    """of the pooled embeddings, from when it is there until the rows are updated"""
    sent: bool = False
    """whether it is on its way to the owners of the rows"""

    def __init__(self, inputs: Sequence[KeyedJaggedTensor], batch: BatchSizes) -> None:
        """Take the ids of this rank's tables, one tensor a source, with B bags a feature."""
        self.inputs, self.batch = inputs, batch


class Side:
    """One rank's side of an exchange, forward or backward."""

    def __init__(
        self,
        layout: Layout,
        tables: LocalTables,
        options: ExchangeOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take what does not change from step to step.

        Args:
            layout: of all ranks' shards.
            tables: of this rank.
        """
        self.layout, self.tables, self.options = layout, tables, options
        self.group, self.device, self.rank, self.world_size = group, device, group.rank(), group.size()
        self.schedule = resolve_schedule(options.schedule, load_store_peers=True)

    def check(self) -> None:
        """Raise what a kernel has recorded since; never waits for the device."""

    def close(self) -> None:
        """Release what outlives Python references."""


class Forward(Side, ABC):
    """One rank's side of the forward. `launch` and `collect` take turns, the same steps on every rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bounds_check = self.tables.bounds_check
        self._warned_of_bad_id = False
        self._on_gpu = self.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream = -1

    def join_stream(self) -> None:
        """Make the current stream wait for the one of the last launch or collection, if that is another.

        So a collection finds what was launched elsewhere; and a launch, whose flags tell the peers that they may write
        the window of the step before, comes after all that has been issued to read it where it was collected.
        """
        if not self._on_gpu:
            return
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)  # in a tenth of what a Stream takes
        if raw != self._raw_stream:
            current = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream, self._raw_stream = current, raw

    def warn_of_bad_id(self, message: str) -> None:
        """Log the first id outside its table, in whose place row 0 was taken."""
        if not self._warned_of_bad_id:
            log.warning("%s; row 0 was taken. Later ones are not reported", message)
        self._warned_of_bad_id = True

    @abstractmethod
    def launch(self, step: Step) -> None:
        """Start to pool and to send."""

    @abstractmethod
    def collect(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] of this rank's samples, of the wire's type, once all are here.

        What is returned is valid until the next `launch`, unless `copy`.
        """


def lengths_and_ids(ids: KeyedJaggedTensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of the bags [first, end) and, as a view, their ids."""
    offsets = ids.offsets()
    return ids.lengths()[first:end], ids.values()[int(offsets[first]) : int(offsets[end])]


def pool_on_host(shard: FeatureShard, weight: torch.Tensor, step: Step, first: int, end: int) -> torch.Tensor:
    """Return the pooled embeddings [end - first, D] float32 of samples first .. end - 1 of the global batch."""
    bag = shard.position * step.batch.total
    return reference.pool(weight, *lengths_and_ids(step.inputs[shard.source], bag + first, bag + end), shard.mean)


def check_on_host(forward: Forward, step: Step) -> None:
    """Look for ids outside their tables; as FBGEMM on a CPU, take row 0 instead or, by its mode, stop.

    The id -1, FBGEMM's mark of a pruned row, stops in every mode there, and so does any such id without bounds check.

    Raises:
        ValueError: if the run must stop.
    """
    mode = forward.bounds_check
    for shard in forward.layout.by_owner[forward.rank]:
        rows, bag = forward.tables.weight(shard).shape[0], shard.position * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.source], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            continue
        worst = int(here[outside].min())
        message = bad_id_message(shard.name, worst, rows)
        if mode in (BoundsCheckMode.FATAL, BoundsCheckMode.NONE) or (here == -1).any():
            raise ValueError(message)
        if mode == BoundsCheckMode.WARNING:
            forward.warn_of_bad_id(message)
        here.masked_fill_(outside, 0)


def bad_id_message(name: str, value: int | None, rows: int) -> str:
    """Return what to say of an id outside its table."""
    what = "an id" if value is None else f"id {value}"
    return f"{name}: {what} is outside its table of {rows} rows; map ids into 0 .. {rows - 1} where they are read"


class WindowForward(Forward):
    """`pgas` and `fused`: what stores into the peers' windows, on any device."""

    def __init__(self, *args: Any, samples_per_rank: int, beside: Mapping[str, Region] | None = None) -> None:
        """Make windows for up to `samples_per_rank` samples, and the regions `beside` them; a collective."""
        super().__init__(*args)
        self._fused = self.options.backend == "fused"
        most = max(len(shards) for shards in self.layout.by_owner)
        slots = max(1, most * self._slices(samples_per_rank))
        columns, wire = self.layout.total_dim, self.options.wire_dtype
        self.windows = OutputWindows(samples_per_rank, columns, wire, slots, self.group, self.device, beside)

    def _slices(self, samples: int) -> int:
        """Return the slices of a shard for one destination of `samples` samples; `pgas` sends all in one."""
        return -(-samples // self.options.slice_bags) if self._fused else 1

    def _awaited(self, step: Step) -> torch.Tensor:
        """Return [W] int32: the flags that this rank awaits of each rank; its own work is ordered by the stream.

        At least one of each, since a peer's flag also tells that the peer is through with the window before.
        """
        slices = self._slices(step.batch.most) if self._fused else 0
        counts = [max(1, slices * len(shards)) for shards in self.layout.by_owner]
        counts[self.rank] = 0
        return torch.tensor(counts, dtype=torch.int32)

    def _output(self, step: Step, copy: bool) -> torch.Tensor:
        """Return the pooled embeddings that have come: the window, lent, or a copy of it."""
        pooled = self.windows.lend(step.batch.per_rank[self.rank])
        return pooled.clone() if copy else pooled

    def close(self) -> None:
        """Give the windows back."""
        self.windows.close()


class HostForward(WindowForward):
    """Between processes of one host: the kernels' order and protocol, the reference's maths."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.windows.arena, HostArena)
        self._arena = self.windows.arena

    def launch(self, step: Step) -> None:
        """Pool in the order of the schedule; each slice, or the whole, is stored and then flagged."""
        check_on_host(self, step)
        epoch, arena = self.windows.begin(), self._arena
        shards = self.layout.by_owner[self.rank]
        weights = [self.tables.weight(shard) for shard in shards]
        bags = self.options.slice_bags if self._fused else max(1, step.batch.most)
        grid = TaskGrid(self.rank, self.world_size, len(shards), step.batch.most, task_bags=bags, slice_bags=bags)
        for task in grid.order(self.schedule):
            shard, first = shards[task.feature], step.batch.first_sample[task.destination]
            begin = min(task.block * bags, step.batch.per_rank[task.destination])
            end = min(begin + bags, step.batch.per_rank[task.destination])
            column = self.layout.column(shard)
            window = arena.view(self.windows.name, task.destination)
            pooled = pool_on_host(shard, weights[task.feature], step, first + begin, first + end)
            window[begin:end, column : column + shard.dim] = pooled
            if self._fused and task.destination != self.rank:
                arena.raise_flag("ready", task.destination, grid.slice_of(task), epoch)
        if not self._fused or len(grid) == 0:
            for peer in range(self.world_size):
                arena.raise_flag("ready", peer, 0, epoch)

    def collect(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Wait for the flags and lend the window, or copy it."""
        self._arena.wait("ready", self._awaited(step), self.windows.epoch, self.options.wait_timeout_s)
        return self._output(step, copy)
