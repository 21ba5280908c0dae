"""An all-gather whose rows are sent into the peers' windows, for products that the links bound.

As in `copies`, copy engines carry the rows and cuBLAS multiplies part by part. But a rank sends its rows from where
they are, with a flag behind, and a kernel of one program awaits the flag before the part's product:

    current stream | await DONE | own rows | await r^1 | its rows | await r^2 | its rows | .. | DONE
    copy engine    |            | send to r^1, flag | send to r^2, flag | send to r^3, flag, ..
    beside         |            | own rows, if kept |     | rows of r^1, if kept | ..

Nothing is copied into a window and announced before the links begin, and they carry what is sent faster than what is
read: 377 GB/s instead of 359 with 64 MB a peer, 333 instead of 319 with 16 (4 x H200). In return the gathered rows lie
in the window, which the next call overwrites. Where autograd is to keep them, they are copied out beside the products,
which takes memory's time, and multiprocessors; where the product bounds, `copies` is faster therefore.
"""

import torch
import torch.distributed as dist

from dlrm_overlap.dense.gemm.copies import Copies
from dlrm_overlap.dense.gemm.linear import Layer, linear_into
from dlrm_overlap.dense.gemm.plan import halve, senders
from dlrm_overlap.dense.gemm.ways import Problem
from dlrm_overlap.dense.gemm.window import SLOTS, Window
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags
from dlrm_overlap.kernels.gemm.publish import begin_call


class Pushes(Copies):
    """See the module."""

    name = "pushes"
    parts = (1, 2, 4, SLOTS)

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Take the bound of a wait for a peer."""
        super().__init__(group, device, timeout_s)
        self._early: dict[Window, list[Flags]] = {}

    def parts_for(self, problem: Problem) -> tuple[int, ...]:
        """Return what the tuner tries: nothing for a reduce-scatter, which is the one of `copies`."""
        return self.parts if problem.operator == "all_gather" else ()

    def _needed_bytes(self, problem: Problem) -> int:
        if problem.operator == "all_gather":
            return problem.rows * problem.inner * problem.dtype.itemsize
        return super()._needed_bytes(problem)

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send this rank's rows and multiply them, then the peers' as they come."""
        self._join_last()
        (rows, inner), ranks = x_shard.shape, self.world_size
        window = self._window(ranks * x_shard.numel() * x_shard.dtype.itemsize)
        size = ranks * rows * inner
        gathered = [window.at(rank, x_shard.dtype)[:size].view(-1, inner) for rank in range(ranks)]
        own, received = self.rank * rows, gathered[self.rank]
        out = x_shard.new_empty(ranks * rows, layer.columns)
        kept = x_shard.new_empty(ranks * rows, inner) if keep else None
        begin_call(window.flags, self.rank)
        window.engine.follow()
        pieces = halve(rows, parts)
        sent = window.events[: ranks - 2 + len(pieces)]
        self._send(window, [each[own : own + rows] for each in gathered], x_shard, pieces, sent)
        linear_into(out[own : own + rows], x_shard, layer)
        self._keep(window, kept, x_shard, own)
        for (begin, end, flags), event in zip(self._arrivals(window, rows, pieces), sent, strict=True):
            # Behind what this rank sends at that turn: a graph that runs its branches one by one must not wait first.
            torch.cuda.current_stream(self.device).wait_event(event)
            wait_flags(flags, self.rank, 0)
            self._keep(window, kept, received[begin:end], begin)
            linear_into(out[begin:end], received[begin:end], layer)
        if keep:
            window.beside.join()
        raise_flags(window.flags.done, self.rank, 0, 0)  # this rank has read; what it has sent, its peers wait for
        window.engine.join()
        return out, kept

    def _send(
        self,
        window: Window,
        targets: list[torch.Tensor],
        x_shard: torch.Tensor,
        pieces: list[tuple[int, int]],
        sent: list[torch.cuda.Event],
    ) -> None:
        """Send all rows to each peer, to the last one in pieces, a flag and an event behind each."""
        last, whole = self._turns[-1], [(0, x_shard.shape[0])]
        steps = [(peer, *slot_of) for peer in self._turns for slot_of in enumerate(pieces if peer == last else whole)]
        for (peer, slot, (begin, end)), event in zip(steps, sent, strict=True):
            window.engine.copy(targets[peer][begin:end], x_shard[begin:end])
            window.engine.write_flag(window.ready_at[peer][slot : slot + 1], window.word)
            event.record(window.engine.stream)

    def _arrivals(self, window: Window, rows: int, pieces: list[tuple[int, int]]) -> list[tuple[int, int, Flags]]:
        """Return the rows [begin, end) among all ranks' that arrive at each turn, and the flags that say so."""
        *early, last = senders(self.rank, self.world_size)
        if window not in self._early:
            self._early[window] = [window.awaiting("ready", {peer: 1}) for peer in early]
        arrivals = [
            (peer * rows, (peer + 1) * rows, flags) for peer, flags in zip(early, self._early[window], strict=True)
        ]
        return arrivals + [
            (last * rows + begin, last * rows + end, window.arrived[slot]) for slot, (begin, end) in enumerate(pieces)
        ]

    def close(self) -> None:
        """Give the windows back, once all that was issued is done."""
        super().close()
        self._early = {}

    def _keep(self, window: Window, kept: torch.Tensor | None, rows: torch.Tensor, begin: int) -> None:
        """Copy rows that are there to `kept`, from row `begin` on, beside the current stream."""
        if kept is not None:
            window.beside.follow()
            window.beside.copy(kept[begin : begin + rows.shape[0]], rows)
