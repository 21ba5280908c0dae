"""The backward `dma` on GPUs: gradients copied to the owners' windows by copy engines, rows updated as by `push`.

A cuBLAS product takes every multiprocessor, and a kernel that becomes ready beside one waits until it ends, or makes it
end late. Copy engines need none. Each shard's columns leave as one copy of rows, [b, D] out of [b, D_total], for their
rows in the shard's [B, D] at its owner, while the bottom MLP's backward runs. One copy is under way at a time, to the
next rank first, then to the one after it, so that no two ranks send to one peer. The flag of a part follows at each
peer as a copy of the epoch. This rank's own shards are stored by a kernel, in front of the update that reads them.

Source: copies beside kernels from ConCCL (Agrawal et al.), ranks that start at different peers from T3 (Pati et al.,
ASPLOS 2024).
"""

import torch

from dlrm_overlap.comm.copy_engine import Copy2D, CopyEngine
from dlrm_overlap.embedding.backends.push import Push
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.backward.push_gradients import PartFlags
from dlrm_overlap.kernels.schedule import staggered_peers


class CopyPush(Push):
    """Gradients by copies, and rows updated as by `Push`. A gradient of another type than the wire's is cast first."""

    awaits_itself = False  # its own gradient is stored in front of the update, on the same stream

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._engine = CopyEngine(self.device, priority=-2)
        self._push_stream = self._engine.stream
        arena, flags = windows.arena, self.own.flags
        ranks = range(self.world_size)
        self._windows = [[arena.view(name, rank).data_ptr() for rank in ranks] for name in windows.names]
        self._peer_flags = [arena.view(windows.flags, rank)[self.rank] for rank in ranks]
        # The kernel knows one list of addresses; this rank's own, W times over, spares the peers a flag too early.
        self.own.flags = PartFlags(flags.addresses[self.rank].repeat(self.world_size), flags.done, flags.clock)

    @property
    def sent_scale(self) -> float:
        """1: a copy multiplies nothing."""
        return 1.0

    @property
    def programs(self) -> int:
        """Programs that store this rank's own: an odd number, so that each has its share of every W-th task."""
        return 33

    def is_stored(self, owner: int) -> bool:
        """Return whether the kernel stores the gradients for `owner`: only to this rank itself."""
        return owner == self.rank

    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Send the gradient, and update the rows as gradients arrive, all beside the current stream."""
        super().start(step, gradient.to(self.options.wire_dtype))

    def push(self, step: Step, gradient: torch.Tensor, first: int, end: int) -> None:
        """Send the parts [first, end) of the gradient to the peers, on the engine's stream."""
        self.windows.counter.settle()
        for part in range(first, end):
            for owner in staggered_peers(self.rank, self.world_size):
                self._copy(step, gradient, part, owner)
                self._engine.write_flag(self._peer_flags[owner][part : part + 1], self.windows.counter.number)

    def _copy(self, step: Step, gradient: torch.Tensor, part: int, owner: int) -> None:
        """Copy the shards of a part that `owner` has, each [b, D] to the rows of this rank's samples in its [B, D]."""
        size, pitch, base = gradient.element_size(), gradient.stride(0), gradient.data_ptr()
        window = self._windows[self.windows.epoch % 2][owner]
        begin, total = step.batch.first_sample[self.rank], step.batch.total
        for shard in self.gradients.shards[part][owner]:
            into = window + (self.gradients.starts[shard] * total + begin * shard.dim) * size
            source, width = base + self.layout.output_column(shard) * size, shard.dim * size
            self._engine.issue(Copy2D(into, width, source, pitch * size, width, gradient.shape[0]))

    def store_own(self, step: Step, gradient: torch.Tensor) -> None:
        """Store this rank's own shards, on the stream of the updates."""
        gradient.record_stream(self._update_stream)
        self.store(step, gradient, 0, self.gradients.parts)
