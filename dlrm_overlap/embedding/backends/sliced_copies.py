"""`fused` with `put: dma` on GPUs: the persistent kernel stages and counts slices, and copy engines move them.

No multiprocessor sends anything. The kernel pools the next rank's samples first, then those of the one after it, so
ranks start on different peers. It counts the slices of each region in device memory; copies are issued behind waits for
these counts, and move a region once it is whole, beside the kernel. One flag follows what goes to a peer.

Source: the persistent kernel of arXiv 2305.06942; track and trigger, T3 (Pati et al., ASPLOS 2024), in software.
"""

from dataclasses import replace
from typing import Any

import torch

from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.embedding.backends.sliced import PreparedPut, SlicedForward
from dlrm_overlap.embedding.device.copied_regions import CopiedLaunch
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.protocol.step import Step
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Tuning
from dlrm_overlap.kernels.forward.slices import COPIED, SliceState


class CopiedSlicesForward(SlicedForward):
    """The kernels on the current stream, the copies of their regions on the engine's, a flag a peer behind them."""

    ends_with_wait = False

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._engine = CopyEngine(self.device, priority=-2)
        self._launches: dict[int, CopiedLaunch] = {}
        arena = windows.arena
        self._flags_at = [arena.view(windows.flags, rank)[self.rank, :1] for rank in range(self.world_size)]

    @property
    def put(self) -> Any:
        """What the kernel is told of puts: it puts nothing, since copy engines bring the slices."""
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
        """Return what the programs of kernel i share, with the counters of its regions."""
        launch = self._launches.get(i)
        if launch is None or launch.samples < bags.samples_per_rank:
            columns = [self.column(shard) for shard in self.lookup.pooled_together[i]]
            size = bags.samples_per_rank, self.world_size
            launch = CopiedLaunch(columns, table.dim, *size, self.options.wire_dtype, self.device)
            self._launches[i] = launch
            self._puts.clear()
        return replace(super().state(i, bags, table, tuning), regions=launch.regions)

    def launch(self, i: int, put: PreparedPut, step: Step, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Launch kernel i and issue its copies; behind those of the last kernel the peers' flags."""
        self._launches[i].begin()
        self._engine.follow()  # a wait that did not come behind `begin` would find the counts of the step before
        put.launch(values, offsets, self.windows.counter.argument)
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
        """Forget the windows and what has a view of them."""
        self._flags_at = []
        super().close()
