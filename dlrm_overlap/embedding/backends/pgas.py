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
    step: Step
    signals: Signals | None
    """the flags that `finish` waits for; None if a kernel has waited for them"""


class ZeroCopyForward(Forward[ZeroCopyState], Generic[Rows]):
    """Pools into the windows [b, leading + D_total] of the samples' ranks, first for other nodes, then signals."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, platform: Platform[Rows]) -> None:
        super().__init__(context, windows)
        self.windows, self.leading = windows, context.options.leading_columns
        self.stride = self.leading + self.layout.arrival_dim
        """elements of a window's row"""
        columns = {shard: self.column(shard) for shard in self.layout.by_owner[self.rank]}
        self.lookup = platform.lookup(context, columns, self.bad_ids)
        self.peers = self.lookup.peers(windows, self.stride)
        """the windows of the ranks reached, for even epochs and for odd ones"""
        self.reached = windows.arena.reached
        self.transport: PooledTransport[Rows] | None = None
        """sends pooled embeddings to other nodes; None if there are none"""
        if context.internode is not None:
            pooled = windows, self.lookup, self.column, self.stride
            self.transport = PooledTransport(context, context.internode, *pooled)
        self._signals_type = platform.signals
        self._signals: dict[int, Signals] = {}
        """by number of slices of a shard"""

    def column(self, shard: FeatureShard) -> int:
        return self.leading + self.layout.column(shard)

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec:
        """Return windows with a row for each sample, and as many flags as the rank with the most shards sets."""
        layout, samples = context.layout, context.samples_per_rank
        most = max(len(shards) for shards in layout.by_owner)
        slots = max(1, most * cls.slices(context.options, samples))
        columns = context.options.leading_columns + layout.arrival_dim
        return WindowSpec("outputs", Region((samples, columns), context.options.wire_dtype), slots)

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return the number of slices, each with a flag, of a shard's bags; 0 for one flag a rank."""
        return 0

    def signals_of(self, step: Step) -> Signals:
        """Return the flags of `step`: at least one from each peer, which also signals that its last window is free."""
        slices = self.slices(self.options, step.batch.most)
        if slices not in self._signals:
            # A rank of another node sends one message, for which a rank of this node sets one flag.
            owners = enumerate(self.layout.by_owner)
            counts = [max(1, slices * len(shards)) if owner in self.reached else 1 for owner, shards in owners]
            counts[self.rank] = 0  # ordered by the stream
            awaited = torch.tensor(counts, dtype=torch.int32, device="cpu")
            how = self.options.wait_timeout_s, self.lookup.record.status
            self._signals[slices] = self._signals_type(self.windows, awaited, *how)
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
        signals = self.signals_of(step)
        self.lookup.store(self.begin(step, signals), step, self.reached)
        with self.order:
            signals.signal()
        return ZeroCopyState(step, signals)

    def finish(self, state: ZeroCopyState, copy: bool = False) -> torch.Tensor:
        self.join_stream()
        if state.signals is not None:
            with self.order:
                state.signals.wait()
        samples = state.step.batch.per_rank[self.rank]
        if self._partials:
            self.add_partials(state.step, self.windows.local[:samples])
        if copy:  # without a view that counts as in use, which takes longer than the copy's launch
            columns = self.windows.local[:samples, self.leading : self.leading + self.layout.total_dim]
            pooled = columns.clone(memory_format=torch.contiguous_format)
        else:
            pooled = self.windows.acquire(samples, self.leading, self.layout.total_dim)
        if self.transport is not None:
            self.transport.finish()
        return pooled

    def skip(self) -> None:
        self.join_stream()
        if self.transport is not None and self.transport.puts is not None:
            self.transport.puts.skip()
        else:  # without a collective: each node skips the epoch alone
            skip_epoch(self.windows, self._signals_type, self.options.wait_timeout_s, self.lookup.record.status)

    def check(self) -> None:
        self.lookup.check()
        if self.transport is not None:
            self.transport.check()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
