"""`fused` with `put: dma` on GPUs: the persistent kernel stages and counts slices, and copy engines move them.

No multiprocessor sends anything. The kernel pools the next rank's samples first, then those of the one after it, so
ranks start on different peers. It counts the slices of each region in device memory. Copies are issued after waits for
these counts, and move a region once it is whole, while the kernel pools the next ones. A region is some features of one
destination, all its samples: neighbours in the kernel's order, and in the rows of the destination's window. One flag
follows the last copy to a peer.

Example: 2 features of dim 4 side by side in the window, 3 samples a rank. For rank 1 they are staged as [3, 2, 4]; one
copy takes three rows of 8 elements to three rows of its window.

Source: track and trigger, T3 (Pati et al., ASPLOS 2024), in software: counters in device memory, and copies already
issued after a wait for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dlrm_overlap.comm.copy_engine import Copy2D, CopyEngine
from dlrm_overlap.embedding.backends.fused import PreparedPut, SlicedForward
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Tuning
from dlrm_overlap.kernels.forward.slices import COPIED, Regions, SliceState
from dlrm_overlap.kernels.schedule import staggered_peers

_REGION_BYTES = 4 << 20  # a copy's fixed cost is a fifth of its time then (docs/results/collectives.md)
_MOST_REGIONS = 8  # of a destination: so the first copy starts early, and the CPU issues few


class Region(NamedTuple):
    """Features [first, first + count) of a launch, whose columns of the window begin at `column` and are adjacent."""

    first: int
    count: int
    column: int


def cut(columns: Sequence[int], dim: int, feature_bytes: int) -> list[Region]:
    """Cut the features of a launch into regions of some megabytes, some eight of equal size where columns allow it.

    Args:
        columns: of the window, where each feature's pooled embeddings begin.
        dim: of each.
        feature_bytes: of a feature's pooled embeddings for one destination.

    Example:
        columns 0, 4, 12, 16 of dim 4, few bytes: two regions of two features, since column 8 is another rank's.
    """
    most = max(1, _REGION_BYTES // max(1, feature_bytes), -(-len(columns) // _MOST_REGIONS))
    regions: list[Region] = []
    for feature, column in enumerate(columns):
        last = regions[-1] if regions else None
        if last is not None and column == last.column + last.count * dim and last.count < most:
            regions[-1] = last._replace(count=last.count + 1)
        else:
            regions.append(Region(feature, 1, column))
    return regions


class _Awaited(NamedTuple):
    """A region's copy to one peer, and the counter that releases it."""

    counter: torch.Tensor
    """[1] int64: slices of the region that are staged"""
    features: int
    copy: Copy2D


class CopiedLaunch:
    """The regions of one kernel, for batches of up to `samples` samples a rank."""

    def __init__(
        self, columns: Sequence[int], dim: int, samples: int, world_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.samples, self._dim, self._features = samples, dim, len(columns)
        self.cut = cut(columns, dim, samples * dim * dtype.itemsize)
        of = [number for number, region in enumerate(self.cut) for _ in range(region.count)]
        finished = torch.zeros(world_size, len(self.cut), dtype=torch.int64, device=device)
        self.regions = Regions(torch.tensor(of, dtype=torch.int32, device=device), finished)
        self._copies = StepCache[tuple[str, int, BatchSizes, int], list[tuple[int, list[_Awaited]]]]()

    def begin(self) -> None:
        """Set the counters back, on the kernel's stream and before it.

        The copies of the step before are done by then. The engine is to follow before it awaits them again.
        """
        self.regions.finished.zero_()

    def issue(
        self, engine: CopyEngine, windows: WindowPair, staging: torch.Tensor, batch: BatchSizes, rows: int, slices: int
    ) -> Iterator[int]:
        """Issue the copies to each peer, from the next rank on, and yield the peer after its last copy.

        To be called when the kernel has been launched: until it is loaded, which its first launch does, a stream that
        waits may keep back the loading, which waits for the device.

        Args:
            engine: on whose stream.
            windows: whose current window takes the regions.
            staging: from which, [W, rows, F, D] from its beginning on.
            batch: samples of each rank.
            rows: of each rank in `staging`; launches of other tasks may have others, of the same samples.
            slices: of a feature for a destination.
        """
        key = windows.name, staging.data_ptr(), batch, rows
        for peer, copies in self._copies.get(key, self._prepare, windows, staging, batch, rows):
            for counter, features, copy in copies:
                engine.wait_counter(counter, features * slices)
                engine.issue(copy)
            yield peer

    def _prepare(
        self, windows: WindowPair, staging: torch.Tensor, batch: BatchSizes, rows: int
    ) -> list[tuple[int, list[_Awaited]]]:
        """Return each peer, in the order in which it is sent to, and the copies of its regions."""
        rank, world_size = windows.arena.rank, windows.arena.world_size
        width = self._features * self._dim
        staged = staging[: world_size * rows * width].view(world_size, rows, width)
        prepared = []
        for peer in staggered_peers(rank, world_size):
            samples, window = batch.per_rank[peer], windows.arena.view(windows.name, peer)
            copies = []
            for number, region in enumerate(self.cut):
                begin, columns = region.first * self._dim, region.count * self._dim
                into = window[:samples, region.column : region.column + columns]
                copy = Copy2D.of(into, staged[peer, :samples, begin : begin + columns])
                copies.append(_Awaited(self.regions.finished[peer, number : number + 1], region.count, copy))
            prepared.append((peer, copies))
        return prepared


class CopiedSlicesForward(SlicedForward):
    """The kernels on the current stream, the copies of their regions on the engine's, then a flag a peer."""

    ends_with_wait = False

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._engine = CopyEngine(self.device, priority=-2)
        self._launches: dict[int, CopiedLaunch] = {}
        arena = windows.arena
        self._flags_at = [arena.view(windows.flags, rank)[self.rank, :1] for rank in range(self.world_size)]

    @property
    def put(self) -> Any:
        """The put of the kernel, which puts nothing, since copy engines bring the slices."""
        return COPIED

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return 0: no slice has a flag of its own."""
        return 0

    def pooling_options(self, table: FeatureTable, bags: Bags) -> PoolingOptions:
        """Return how to cut a launch: one destination after the other, so that the first copies start early."""
        options = super().pooling_options(table, bags)
        return options._replace(schedule="remote_first") if self.options.schedule == "auto" else options

    def state(self, i: int, bags: Bags, table: FeatureTable, tuning: Tuning) -> SliceState:
        """Return the memory that the programs of kernel i share, with the counters of its regions."""
        launch = self._launches.get(i)
        if launch is None or launch.samples < bags.samples_per_rank:
            columns = [self.column(shard) for shard in self.lookup.pooled_together[i]]
            size = bags.samples_per_rank, self.world_size
            launch = CopiedLaunch(columns, table.dim, *size, self.options.wire_dtype, self.device)
            self._launches[i] = launch
            self._puts.forget()
        return replace(super().state(i, bags, table, tuning), regions=launch.regions)

    def launch(self, i: int, put: PreparedPut, step: Step, tensors: Sequence[torch.Tensor]) -> None:
        """Launch kernel i and issue its copies; after those of the last kernel the peers' flags."""
        self._launches[i].begin()
        self._engine.follow()  # a wait issued before `begin` would find the counts of the step before
        put.launch(*tensors, self.windows.counter.argument)
        last = i == len(self.lookup.pooled_together) - 1
        most = step.batch.most
        rows = -(-most // put.task_bags) * put.task_bags
        slices = -(-most // self.options.slice_bags)
        with torch.cuda.stream(self._engine.stream), self.order:
            self.windows.counter.settle()
            sent = self._launches[i].issue(self._engine, self.windows, put.staging, step.batch, rows, slices)
            for peer in sent:
                if last:
                    self._engine.write_flag(self._flags_at[peer], self.windows.counter.number)

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the peers' flags and for this rank's copies, and lend the window or copy it."""
        self.join_stream()
        self._engine.join()
        return super().finish(step, copy)

    def close(self) -> None:
        """Forget the windows and their views."""
        self._flags_at = []
        super().close()
