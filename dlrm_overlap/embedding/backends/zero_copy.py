"""`pgas` on GPUs: the kernel that pools stores straight into the peers' windows.

Source: Chen et al. 2024, and the zero-copy variant of arXiv 2305.06942.
"""

from typing import NamedTuple

import torch

from dlrm_overlap.embedding.backends.base import WindowForward
from dlrm_overlap.embedding.device.lookup import DeviceLookup
from dlrm_overlap.embedding.device.peers import peer_windows, ready_flags, skip_epoch
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.step import Step
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.flags import Flags, awaiting_flags, raising_flags
from dlrm_overlap.kernels.launches import Launch


class OwnFlags(NamedTuple):
    """The flags of the steps whose shards have as many slices: of all ranks awaited, to be raised at those reached."""

    flags: Flags
    raising: Launch
    """of this rank's own flag, called with the epoch"""
    awaiting: Launch
    """of the wait for the others', called with the epoch"""


class ZeroCopyForward(WindowForward):
    """Pools into the peers' windows, then raises one flag at each rank; `finish` awaits the peers' flags."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        columns = {shard: self.column(shard) for shard in self.layout.by_owner[self.rank]}
        self.lookup = DeviceLookup(context, columns, self.bad_ids)
        self.peers = peer_windows(windows, self.stride, self.options)
        """the windows of the ranks reached: of even epochs, of odd ones"""
        self.reached = windows.arena.reached
        self._flags: dict[int, OwnFlags] = {}
        """by slices of a shard"""

    def flags_of(self, step: Step) -> OwnFlags:
        """Return the flags that this rank raises and awaits in `step`."""
        slices = self.slices(self.options, step.batch.most)
        found = self._flags.get(slices)
        if found is None:
            status = self.lookup.record.status
            flags = ready_flags(self.windows, self.awaited_flags(step), status, self.options)
            found = OwnFlags(flags, raising_flags(flags, self.rank, 0), awaiting_flags(flags, self.rank))
            self._flags[slices] = found
        return found

    def begin(self, step: Step) -> int:
        """Begin the step on the current stream and return its epoch; what goes to other hosts is sent behind that."""
        epoch = self.windows.begin()
        self.join_stream()
        return epoch

    def start(self, step: Step) -> None:
        """Launch the kernels that pool, and behind them the one that raises the flags."""
        self.check()
        flags, tables = self.flags_of(step), self.lookup.tables()  # which may fail: before the step has begun
        epoch = self.begin(step)
        self.lookup.store(self.peers[epoch % 2], step, tables, self.reached)
        with self.order:
            flags.raising(self.windows.counter.argument)

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the flags, and lend the window or copy it."""
        self.join_stream()
        with self.order:
            self.flags_of(step).awaiting(self.windows.counter.argument)
        return self.output(step, copy)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        self.join_stream()
        skip_epoch(self.windows, self.lookup.record.status, self.options)

    def check(self) -> None:
        """Raise what a kernel has recorded, see `DeviceLookup.check`."""
        self.lookup.check()

    def close(self) -> None:
        """Forget the windows and what has a view of them."""
        self._flags, self.peers = {}, []
        super().close()
