"""`pgas`: pooled rows are stored straight into the peers' windows.

Source: Chen et al. 2024, and the zero-copy variant of arXiv 2305.06942.
"""

from typing import Generic, NamedTuple

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.backends.internode import PooledTransport
from dlrm_overlap.embedding.backends.lookup import Platform, Rows
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import Signals, WindowPair, WindowSpec, skip_epoch


class ZeroCopyState(NamedTuple):
    """A forward under way."""

    step: Step
    signals: Signals | None
    """those that `finish` waits for; None if a kernel has waited for them"""


class ZeroCopyForward(Forward[ZeroCopyState], Generic[Rows]):
    """Pools into the windows [b, leading + D_total] of the samples' ranks, then signals each rank.

    `finish` waits for the peers' flags. Between nodes, pooled embeddings of the other nodes come first, and are sent
    while this rank pools for its own node.
    """

    def __init__(self, context: ExchangeContext, windows: WindowPair, platform: Platform[Rows]) -> None:
        super().__init__(context, windows, platform)
        self.windows, self.leading = windows, context.options.leading_columns
        self.stride = self.leading + self.layout.arrival_dim
        """elements of a window's row"""
        columns = {shard: self.column(shard) for shard in self.layout.by_owner[self.rank]}
        self.lookup = platform.lookup(context, columns, self.bad_ids)
        self.peers = self.lookup.peers(windows, self.stride)
        """the windows of the ranks reached: of even epochs, of odd ones"""
        self.reached = windows.arena.reached
        self.transport: PooledTransport[Rows] | None = None
        """to other nodes"""
        if context.internode is not None:
            windows_of = self.lookup, self.peers, self.column, self.stride
            self.transport = PooledTransport(context, context.internode, windows, *windows_of, self.bad_ids)
        self._signals_type = platform.signals
        self._signals: dict[int, Signals] = {}
        """by slices of a shard"""

    def column(self, shard: FeatureShard) -> int:
        """Return the first of a window's columns that the shard fills."""
        return self.leading + self.layout.column(shard)

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec:
        """Return the windows of the pooled embeddings: a row a sample, and the flags of the rank that sends most."""
        layout, samples = context.layout, context.samples_per_rank
        most = max(len(shards) for shards in layout.by_owner)
        slots = max(1, most * cls.slices(context.options, samples))
        columns = context.options.leading_columns + layout.arrival_dim
        return WindowSpec("outputs", Region((samples, columns), context.options.wire_dtype), slots)

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return how many slices with a ready flag of their own a shard's bags for a destination of `samples` make.

        0 where one flag of a rank covers all that it sends.
        """
        return 0

    def awaited_flags(self, step: Step) -> torch.Tensor:
        """Return [W] int32: the number of flags to wait for from each rank; the stream orders this rank's own work.

        There is at least one flag from each peer, which also signals that the peer has released its previous window. A
        rank of another node sends one message, for which a rank of this node signals one flag.
        """
        slices, reached = self.slices(self.options, step.batch.most), self.windows.arena.reached
        counts = [
            max(1, slices * len(shards)) if owner in reached else 1 for owner, shards in enumerate(self.layout.by_owner)
        ]
        counts[self.rank] = 0
        return torch.tensor(counts, dtype=torch.int32, device="cpu")

    def output(self, step: Step, copy: bool) -> torch.Tensor:
        """Return the pooled embeddings that have arrived: the window itself, lent, or a copy of it."""
        samples = step.batch.per_rank[self.rank]
        if self._partials:
            self.add_partials(step, self.windows.local[:samples])
        pooled = self.windows.acquire(samples, self.leading, self.layout.total_dim)
        return pooled.clone(memory_format=torch.contiguous_format) if copy else pooled

    def signals_of(self, step: Step) -> Signals:
        """Return the flags that this rank sets and waits for in `step`."""
        slices = self.slices(self.options, step.batch.most)
        if slices not in self._signals:
            counts, status = self.awaited_flags(step), self.lookup.record.status
            self._signals[slices] = self._signals_type(self.windows, counts, self.options.wait_timeout_s, status)
        return self._signals[slices]

    def begin(self, step: Step, signals: Signals) -> Rows:
        """Begin the step on the current stream, send to other nodes, and return the windows of the ranks reached."""
        # All that may fail comes before the step has begun.
        if self.transport is not None:
            self.transport.prepare(step)
        self.check()
        self.lookup.refresh()
        epoch = self.windows.begin()
        self.join_stream()
        if self.transport is not None:
            self.transport.send(step, signals)
        return self.peers[epoch % 2]

    def start(self, step: Step) -> ZeroCopyState:
        """Launch the kernels that pool, and after them the one that signals."""
        signals = self.signals_of(step)
        self.lookup.store(self.begin(step, signals), step, self.reached)
        with self.order:
            signals.signal()
        return ZeroCopyState(step, signals)

    def finish(self, state: ZeroCopyState, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the flags, and return a view of the window, or a copy."""
        self.join_stream()
        if state.signals is not None:
            with self.order:
                state.signals.wait()
        pooled = self.output(state.step, copy)
        if self.transport is not None:
            self.transport.finish()
        return pooled

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        self.join_stream()
        if self.transport is not None and self.transport.puts is not None:
            self.transport.puts.skip()
        else:  # without a collective: each node skips the epoch alone
            skip_epoch(self.windows, self._signals_type, self.options.wait_timeout_s, self.lookup.record.status)

    def check(self) -> None:
        """Raise the faults that kernels have recorded, see `DeviceLookup.check`."""
        self.lookup.check()
        if self.transport is not None:
            self.transport.check()

    def close(self) -> None:
        """Give the memory of messages back."""
        if self.transport is not None:
            self.transport.close()
