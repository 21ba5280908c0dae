"""Products of one kernel each, whose tiles wait for their rows or go straight to the rank that owns their rows.

As `copies`, but there is one product, not one a part. All-gather: the copy engine reads the peers' rows and, behind
each part of them, a flag that the peer has raised for this rank at home; tiles of rows that have not come wait for the
part's flag, while those of other rows are multiplied:

    current stream | rows to the window, READY, await it of all | own rows, rows of r^1, rows of r^2, .. | DONE
    copy engine    |                                            | read r^1, flag | read r^2, flag | ..

Reduce-scatter: the kernel's tiles are stored in the owners' windows by the multiprocessors, so that links are busy as
long as the product runs, and no partial product is ever read again here; then the owner adds up what has arrived:

    current stream | await DONE | tiles of all ranks in turn, flags behind each part | await, add up a part | .. | DONE

Where the product bounds, what is exposed is the first part's copy, or the last tiles' and the sum. A part here costs a
flag, not a product, so there may be many. The first part of all ranks' rows is published before the others, so that
the links wait for that alone.

**What is assumed.** The kernel of an all-gather waits for copies of the same GPU, with no edge between them where a
CUDA graph holds both: an edge would end the overlap. So the branch of the copies has to run beside the kernel, which
CUDA does not promise. Where it does not, the kernel's bounded wait expires. Where it cannot, since there is one queue
for all streams, the way is refused.

Source: Flux (Chang et al., arXiv 2406.06858).
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from dlrm_overlap.dense.gemm.copies import Copies
from dlrm_overlap.dense.gemm.gathering import Gathering
from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.scattering import Scattering
from dlrm_overlap.dense.gemm.ways import Finish, Problem
from dlrm_overlap.dense.gemm.window import SLOTS, Window
from dlrm_overlap.kernels.gemm.arguments import Destinations, Signals
from dlrm_overlap.kernels.gemm.product import ALIGNED, TILING, gathered_product, scattered_product
from dlrm_overlap.launching.environment import one_queue


class Tiles(Copies):
    """See the module."""

    name = "tiles"
    parts = (4, 1, 2, SLOTS)
    tiling = TILING

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Take the bound of a wait for a peer."""
        super().__init__(group, device, timeout_s)
        make = lambda order: torch.tensor(order, dtype=torch.int32, device=device)  # noqa: E731
        self._own_first, self._own_last = make([self.rank, *self._turns]), make([*self._turns, self.rank])
        self._done = torch.zeros(self.world_size * SLOTS, dtype=torch.int32, device=device)
        self._arrived: dict[Window, torch.Tensor] = {}

    def fault(self, problem: Problem) -> str:
        """Return why tiles cannot run a problem, or an empty text."""
        if fault := super().fault(problem):
            return fault
        if one_queue():
            return (
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, so a kernel and the copies that it waits for, or that wait for it, "
                "need not run side by side; unset it, or take copies"
            )
        if problem.columns % ALIGNED or problem.inner % ALIGNED:
            return f"tiles take N and K that are multiples of {ALIGNED}; pad them, or take copies"
        return ""

    def prepare(self, problem: Problem, parts: int) -> None:
        """As `copies`; a weight that is a transpose takes another kernel."""
        super().prepare(problem, parts)
        self._rehearse(problem, parts, lambda weight: weight.t().contiguous().t())

    def _slot_rows(self, rows: int, parts: int) -> int:
        """Return how many of a rank's rows have one flag: whole tiles.

        Example: 1000 rows in 3 parts, tiles of 128 rows: 384.
        """
        return -(-rows // (parts * self.tiling.block_m)) * self.tiling.block_m

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply all rows, this rank's first, the peers' as they come."""
        self._join_last()
        window = self._window(x_shard.numel() * x_shard.dtype.itemsize)
        if window not in self._arrived:
            self._arrived[window] = torch.zeros_like(window.flags.ready[0].local)
        arrived, weight, slot_rows = self._arrived[window], laid_out(layer.weight), self._slot_rows(len(x_shard), parts)
        gathering = Gathering(window, x_shard, layer.columns, first=slot_rows, keep=True)
        rows = gathering.rows
        for peer in self._turns:
            for slot, begin in enumerate(range(0, rows, slot_rows)):
                gathering.read(peer, begin, min(begin + slot_rows, rows))
                # Read at the peer, where this rank has raised it: a copy within this GPU would be a kernel.
                window.engine.write_flag(arrived[peer, slot : slot + 1], window.ready_at[peer][:1])
        signals = Signals(replace(window.flags.ready[0], local=arrived), slot_rows)
        x, out, order = gathering.x, gathering.out, self._own_first
        gathered_product(x, weight, layer.bias, layer.activation, out, self.rank, order, signals, self.tiling)
        window.engine.copy_each((window.done_at[peer], window.word) for peer in self._turns)
        window.engine.join()
        return out, x if keep else None

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply all rows and store them at their owners."""
        self._join_last()
        weight = laid_out(layer.weight)
        scattering = Scattering(self._window(self._summed_bytes(x.shape[0], layer.columns, x.dtype)), x, layer)
        window, rows, slot_rows = scattering.window, scattering.rows, self._slot_rows(scattering.rows, parts)
        signals = Signals(window.flags.ready[0], slot_rows)
        destinations = Destinations(window.addresses + scattering.offset_bytes, self._done)
        scattered_product(x, weight, self.rank, self._own_last, signals, destinations, self.tiling)
        self._under_way = True

        def finish() -> torch.Tensor:
            self._under_way = False
            for arrived, begin in zip(window.flags.ready, range(0, rows, slot_rows), strict=False):
                scattering.add_up(arrived, begin, min(begin + slot_rows, rows))
            return scattering.sums()

        return finish

    def close(self) -> None:
        """Give the windows back, once all that was issued is done."""
        super().close()
        self._arrived.clear()


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that TMA can read: it or its transpose contiguous, at a multiple of 16 bytes."""
    if weight.data_ptr() % 16 == 0 and (weight.is_contiguous() or weight.t().is_contiguous()):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)
