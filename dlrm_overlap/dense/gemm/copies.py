"""Products whose rows travel by copy engines, part by part, while cuBLAS has every multiprocessor.

All-gather: each rank copies its rows to its window and multiplies them; meanwhile its copy engine reads the peers'
rows, from one peer after the other, and each part's product waits for its copy, by an event of the stream:

    current stream | rows to the window, READY, await it of all | own rows | rows of r^1 | rows of r^2 and r^3
    copy engine    |                                            | read r^1 | read r^2 | read r^3 | DONE

Rows are read, not sent, since they then lie in ordinary memory, which autograd may keep as long as it likes, and no
flag has to follow them. Reduce-scatter: the rows that peers own come first; each part is sent to its owner's window as
soon as it is multiplied, a flag behind it, and the owner adds up the parts that have arrived:

    current stream | await DONE | rows of r^2 and r^3 | rows of r^1 | own rows | await, add up a part | another | DONE
    copy engine    |                                  | send r^2, flag | send r^3, flag | send r^1, flag

Nothing but the products runs on multiprocessors meanwhile. Where links bound, all products are hidden but the first or
the last, so parts are small there, see `plan`; where the product bounds, all copies are, and parts are large, for
cuBLAS's sake.

Source: T3 (Pati et al., ASPLOS 2024): chunks in an order that is staggered by rank, moved by DMA when they are
complete; here each chunk is a product of its own, so the stream says when it is.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_overlap.comm.record import settle
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.gathering import Gathering
from dlrm_overlap.dense.gemm.linear import Layer, linear_into
from dlrm_overlap.dense.gemm.plan import WHOLE, gathered_parts, halve, head, scattered_parts, turns
from dlrm_overlap.dense.gemm.scattering import Scattering, lines_of
from dlrm_overlap.dense.gemm.ways import Finish, Problem, Products
from dlrm_overlap.dense.gemm.window import SLOTS, Window
from dlrm_overlap.kernels.dense.arguments import LINE

_GRANULE_BYTES = 1 << 21  # of GPU memory that is mapped between ranks


class Copies(Products):
    """See the module. A window is made for problems that do not fit into those that there are."""

    name = "copies"
    parts = (WHOLE, 1, 2, 4, SLOTS)

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Take the bound of a wait for a peer."""
        super().__init__(group, device)
        self._timeout_s, self._turns = timeout_s, turns(self.rank, self.world_size)
        self._windows: list[Window] = []
        self._under_way = False
        self._last: torch.cuda.Stream | None = None

    def fault(self, problem: Problem) -> str:
        """Return why copies cannot run a problem, or an empty text."""
        if self.device.type != "cuda" or self.world_size == 1:
            return "copies run between GPUs; take serial"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"{problem.dtype}: copies take float16 and bfloat16; cast, or take serial"
        if 0 in (problem.rows, problem.columns, problem.inner):
            return "there is nothing to multiply; take serial"
        return ""

    def prepare(self, problem: Problem, parts: int) -> None:
        """Make a window if those that there are do not suffice, and load all kernels by calls with zeros."""
        needed = self._needed_bytes(problem)
        if not any(window.capacity_bytes >= needed for window in self._windows):
            capacity = -(-needed // _GRANULE_BYTES) * _GRANULE_BYTES
            self._windows.append(Window(self.group, self.device, capacity, self._timeout_s))
        self._rehearse(problem, parts, lambda weight: weight)

    def _rehearse(self, problem: Problem, parts: int, lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Load all kernels by calls with zeros, of a weight that `lay` has laid out."""
        rows = problem.rows // self.world_size
        x = torch.zeros(problem.rows, problem.inner, dtype=problem.dtype, device=self.device)
        weight = lay(x.new_zeros(problem.columns, problem.inner))
        bias = weight.new_zeros(problem.columns) if problem.bias else None
        layer = Layer(weight, bias, "relu" if problem.activation == "relu" else "none")
        if problem.operator == "reduce_scatter":
            self.begin_reduce_scatter(x, layer, parts)()
            return
        for keep in (False, True):
            self.all_gather_matmul(x[:rows], layer, parts, keep)

    def _needed_bytes(self, problem: Problem) -> int:
        """Return how much of the window a call takes."""
        if problem.operator == "all_gather":
            return problem.rows // self.world_size * problem.inner * problem.dtype.itemsize
        return self._summed_bytes(problem.rows, problem.columns, problem.dtype)

    def _summed_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return how much of the window all ranks' partial products of a rank's rows take."""
        return self.world_size * lines_of(rows // self.world_size, columns) * LINE * dtype.itemsize

    def _window(self, needed_bytes: int) -> Window:
        """Return the first window that is large enough, which is the same one on all ranks."""
        return next(window for window in self._windows if window.capacity_bytes >= needed_bytes)

    def _join_last(self) -> None:
        """Come behind the call before, if that was on another stream; captures are the caller's."""
        if self._under_way:
            raise InputError("a product and its reduce-scatter is under way; finish it before another one begins")
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._last)
        self._last = current

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply this rank's rows, then the peers' as they come."""
        self._join_last()
        window = self._window(x_shard.numel() * x_shard.dtype.itemsize)
        gathering = Gathering(window, x_shard, layer.columns, head(x_shard.shape[0], parts), keep)
        rows, engine, x, out = gathering.rows, window.engine, gathering.x, gathering.out
        linear_into(out[gathering.own], gathering.x_shard, layer)
        for part, event in zip(gathered_parts(self.rank, self.world_size, rows, parts), window.events, strict=False):
            for peer in sorted(part.ranks, key=self._turns.index):
                gathering.read(peer, part.begin, part.end)
            event.record(engine.stream)
            torch.cuda.current_stream(self.device).wait_event(event)
            linear_into(out[part.rows(rows)], x[part.rows(rows)], layer)
        engine.copy_each((window.done_at[peer], window.word) for peer in self._turns)
        engine.join()
        return out, x if keep else None

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply the peers' rows and send them, then this rank's."""
        self._join_last()
        partial = x.new_empty(x.shape[0], layer.columns)
        scattering = Scattering(self._window(self._summed_bytes(x.shape[0], layer.columns, x.dtype)), x, layer)
        window, rows = scattering.window, scattering.rows
        engine, product = window.engine, Layer(layer.weight)
        targets = [scattering.target(owner) for owner in range(self.world_size)]
        pieces = [(0, rows)] if parts == WHOLE else halve(rows, parts)
        sent = window.events[-len(pieces) :]
        for part, event in zip(scattered_parts(self.rank, self.world_size, rows, parts), window.events, strict=False):
            linear_into(partial[part.rows(rows)], x[part.rows(rows)], product)
            event.record(torch.cuda.current_stream(self.device))
            engine.stream.wait_event(event)
            for peer in sorted(part.ranks, key=self._turns.index):
                rows_of_peer = slice(peer * rows + part.begin, peer * rows + part.end)
                engine.copy(targets[peer][part.begin : part.end], partial[rows_of_peer])
                if peer == self._turns[-1]:
                    slot = pieces.index((part.begin, part.end))
                elif part.end == rows:
                    slot = 0  # it is awaited with the first part of the last sender's
                else:
                    continue
                engine.write_flag(window.ready_at[peer][slot : slot + 1], window.word)
                sent[slot].record(engine.stream)
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        linear_into(targets[self.rank], x[own], product)
        self._under_way = True
        return functools.partial(self._finish, scattering, pieces, sent, partial)

    def _finish(
        self,
        scattering: Scattering,
        pieces: list[tuple[int, int]],
        sent: list[torch.cuda.Event],
        partial: torch.Tensor,
    ) -> torch.Tensor:
        """Add up the parts as they arrive; `partial` must live until the engine has been joined, which reads it."""
        self._under_way = False
        window = scattering.window
        for event, arrived, rows in zip(sent, window.arrived, pieces, strict=False):
            # Behind what this rank sends of it: a graph that runs its branches one by one must not wait first.
            torch.cuda.current_stream(self.device).wait_event(event)
            scattering.add_up(arrived, *rows)
        window.engine.join()
        del partial
        return scattering.sums()

    def check(self) -> None:
        """Raise what a wait has recorded."""
        for window in self._windows:
            window.check()

    def close(self) -> None:
        """Give the windows back, once all that was issued is done."""
        if not self._windows:
            return  # the others need not have made this object
        settle(self.group, self.device, self.check)
        for window in self._windows:
            window.close()
        self._windows, self._last = [], None
