"""A reduce-scatter of one product whose rows leave by copy engines, each part when the kernel has counted its tiles.

As in `tiles` there is one product, whose kernel goes through the peers' rows first, one peer's after the other; but it
stores them in this GPU's memory, so that no store waits for a link. The program that completes a part writes a word,
for which the copy engine waits, and which sends the part to its owner:

    current stream | await DONE | tiles of r^1, of r^2, of r^3, own ones           | await, add up a part | .. | DONE
    copy engine    |                     | send r^1, flag | send r^2, flag | send r^3, flag

Where `copies` has a product a part, this has a word a part, so parts leave before a product of theirs would have ended,
and no multiprocessor is idle between two products. All-gathers are those of `tiles`. As there, copies and kernel have
to run side by side, also in a CUDA graph; here it is the copies that wait, and they have no bound of their own.

Source: T3 (Pati et al., ASPLOS 2024): the tracker counts the tiles of a region, and triggers its DMA; regions are
staggered by rank.
"""

import functools
from dataclasses import replace

import torch
import torch.distributed as dist

from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.scattering import Scattering
from dlrm_overlap.dense.gemm.tiles import Tiles, laid_out
from dlrm_overlap.dense.gemm.ways import Finish, Problem
from dlrm_overlap.dense.gemm.window import SLOTS
from dlrm_overlap.kernels.gemm.arguments import Destinations, Signals
from dlrm_overlap.kernels.gemm.product import scattered_product


class Triggered(Tiles):
    """See the module."""

    name = "triggered"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Take the bound of a wait for a peer."""
        super().__init__(group, device, timeout_s)
        self._words = torch.zeros(self.world_size, SLOTS, dtype=torch.int64, device=device)
        # The kernel writes element (rank, part) at the address of an owner: here that is element (owner, part).
        rows = torch.arange(self.world_size, dtype=torch.int64, device=device) - self.rank
        self._addresses = rows * SLOTS * self._words.itemsize + self._words.data_ptr()
        self._is_peer = (rows != 0).long()
        self._targets: dict[tuple[int, int, int], torch.Tensor] = {}

    def parts_for(self, problem: Problem) -> tuple[int, ...]:
        """Return what the tuner tries: nothing for an all-gather, which is the one of `tiles`."""
        return self.parts if problem.operator == "reduce_scatter" else ()

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply all rows, and send each part of the peers' when it is complete."""
        self._join_last()
        partial, weight = x.new_empty(x.shape[0], layer.columns), laid_out(layer.weight)
        scattering = Scattering(self._window(self._summed_bytes(x.shape[0], layer.columns, x.dtype)), x, layer)
        window, rows, slot_rows = scattering.window, scattering.rows, self._slot_rows(scattering.rows, parts)
        engine, pieces = window.engine, self._pieces(rows, slot_rows)
        self._words.zero_()
        engine.follow()
        flags = replace(window.flags.ready[0], addresses=self._addresses, local=self._words)
        destinations = Destinations(self._stored_at(scattering, partial), self._done, "remote_first")
        signals = Signals(flags, slot_rows)
        scattered_product(x, weight, self.rank, self._own_last, signals, destinations, self.tiling)
        sent = window.events[-len(pieces) :]
        for peer in self._turns:
            target, first = scattering.target(peer), peer * rows
            for part, (begin, end) in enumerate(pieces):
                engine.wait_counter(self._words[peer, part : part + 1], 1)
                engine.copy(target[begin:end], partial[first + begin : first + end])
                if peer == self._turns[-1]:
                    engine.write_flag(window.ready_at[peer][part : part + 1], window.word)
                    sent[part].record(engine.stream)
                elif end == rows:  # it is awaited with the first part of the last sender's
                    engine.write_flag(window.ready_at[peer][:1], window.word)
        self._under_way = True
        return functools.partial(self._finish, scattering, pieces, sent, partial)

    def _pieces(self, rows: int, slot_rows: int) -> list[tuple[int, int]]:
        return [(begin, min(begin + slot_rows, rows)) for begin in range(0, rows, slot_rows)]

    def _stored_at(self, scattering: Scattering, partial: torch.Tensor) -> torch.Tensor:
        """Return [W] int64: where the kernel stores the rows of each owner, in `partial` or this rank's own window."""
        own = scattering.target(self.rank).data_ptr()
        size = scattering.rows * scattering.columns * partial.itemsize
        key = own, scattering.rows, size
        if key not in self._targets:
            offsets = [own if rank == self.rank else rank * size for rank in range(self.world_size)]
            self._targets[key] = torch.tensor(offsets, dtype=torch.int64, device=self.device)
        return torch.add(self._targets[key], self._is_peer, alpha=partial.data_ptr())

    def close(self) -> None:
        """Give the windows back, once all that was issued is done."""
        super().close()
        self._targets = {}
