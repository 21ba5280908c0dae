"""The forward of the embedding stage: what every way to run it shares, and the ways of a CPU and of the collective."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena, Region
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.layout import Layout, Piece
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.windows import OutputWindows
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.schedule import TaskGrid, resolve_schedule

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


@dataclass
class Step:
    """One pass through the stage: what its parts hand on."""

    inputs: Sequence[KeyedJaggedTensor]
    """the ids of this rank's tables, one a source: B bags a feature"""
    batch: BatchSizes
    work: Any = None
    """the collective under way"""
    received: torch.Tensor | None = None
    """what it fills"""
    looked_up: Any = None
    """on GPUs: the event from which on the ids may be read for the backward"""
    runs: list[Any] = field(default_factory=list)
    """the ids of each input, ready for the update of their rows"""


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
            layout: of all ranks' pieces.
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

    @abstractmethod
    def launch(self, step: Step) -> None:
        """Start to pool and to send."""

    @abstractmethod
    def collect(self, step: Step) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] of this rank's samples, of the wire's type, once all are here."""


def lengths_and_ids(ids: KeyedJaggedTensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of the bags [first, end) and, as a view, their ids."""
    offsets = ids.offsets()
    return ids.lengths()[first:end], ids.values()[int(offsets[first]) : int(offsets[end])]


def pool_on_host(piece: Piece, weight: torch.Tensor, step: Step, first: int, end: int) -> torch.Tensor:
    """Return the pooled embeddings [end - first, D] float32 of samples first .. end - 1 of the global batch."""
    bag = piece.position * step.batch.total
    return reference.pool(weight, *lengths_and_ids(step.inputs[piece.source], bag + first, bag + end), piece.mean)


def check_on_host(piece: Piece, rows: int, step: Step, mode: BoundsCheckMode) -> None:
    """Look for ids outside the piece's table of `rows` rows; FBGEMM's modes: stop, or take row 0 instead.

    Raises:
        ValueError: under mode FATAL.
    """
    if mode == BoundsCheckMode.NONE:
        return
    bag = piece.position * step.batch.total
    _, here = lengths_and_ids(step.inputs[piece.source], bag, bag + step.batch.total)
    outside = (here < 0) | (here >= rows)
    if outside.any():
        if mode == BoundsCheckMode.FATAL:
            raise ValueError(bad_id_message(piece.name, int(here[outside][0]), rows))
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
        most = max(len(pieces) for pieces in self.layout.by_owner)
        slots = max(1, most * self._slices(samples_per_rank))
        columns, wire = self.layout.total_dim, self.options.wire_dtype
        self.windows = OutputWindows(samples_per_rank, columns, wire, slots, self.group, self.device, beside)

    def _slices(self, samples: int) -> int:
        """Return the slices of a piece for one destination of `samples` samples; `pgas` sends all in one."""
        return -(-samples // self.options.slice_bags) if self._fused else 1

    def _awaited(self, step: Step) -> torch.Tensor:
        """Return [W] int32: the flags that this rank awaits of each rank; its own work is ordered by the stream.

        At least one of each, since a peer's flag also tells that the peer is through with the window before.
        """
        slices = self._slices(step.batch.most) if self._fused else 0
        counts = [max(1, slices * len(pieces)) for pieces in self.layout.by_owner]
        counts[self.rank] = 0
        return torch.tensor(counts, dtype=torch.int32)

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
        epoch, arena = self.windows.begin(), self._arena
        pieces = self.layout.by_owner[self.rank]
        weights = [self.tables.weight(piece) for piece in pieces]
        for piece, weight in zip(pieces, weights, strict=True):
            check_on_host(piece, weight.shape[0], step, self.bounds_check)
        bags = self.options.slice_bags if self._fused else max(1, step.batch.most)
        grid = TaskGrid(self.rank, self.world_size, len(pieces), step.batch.most, task_bags=bags, slice_bags=bags)
        for task in grid.order(self.schedule):
            piece, first = pieces[task.feature], step.batch.first_sample[task.destination]
            begin = min(task.block * bags, step.batch.per_rank[task.destination])
            end = min(begin + bags, step.batch.per_rank[task.destination])
            column = self.layout.column(piece)
            window = arena.view(self.windows.name, task.destination)
            pooled = pool_on_host(piece, weights[task.feature], step, first + begin, first + end)
            window[begin:end, column : column + piece.dim] = pooled
            if self._fused and task.destination != self.rank:
                arena.raise_flag("ready", task.destination, grid.slice_of(task), epoch)
        if not self._fused or len(grid) == 0:
            for peer in range(self.world_size):
                arena.raise_flag("ready", peer, 0, epoch)

    def collect(self, step: Step) -> torch.Tensor:
        """Wait for the flags and lend the window."""
        self._arena.wait("ready", self._awaited(step), self.windows.epoch, self.options.wait_timeout_s)
        return self.windows.lend(step.batch.per_rank[self.rank])
