"""The activities of a matrix product and its communication, way by way; `product` has the table of the ways."""

from dataclasses import dataclass

import numpy as np

from dlrm_overlap.dense.gemm.plan import WHOLE, Part, halve, scattered_parts, turns
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.tiles import Wave, tile_waves, waves_of_products

_SUMS, _USUAL, _COPIES_LAST = 1, 0, -1  # priorities: programs that sum hold their multiprocessors


@dataclass
class MemoryBytes:
    """What one rank's memory reads and writes, by whom; an update counts as a write."""

    product_read: float = 0.0
    product_written: float = 0.0
    scatter_read: float = 0.0
    scatter_written: float = 0.0
    gather_read: float = 0.0
    gather_written: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        scattered = self.scatter_read + self.scatter_written
        return self.product_read + self.product_written + scattered + self.gather_read + self.gather_written


class ProductGraph:
    """Activities of some ranks, each of which has its products, its memory (in seconds at full rate) and its link.

    Add the product, then the reduce-scatter of what it gives, then the all-gather of the sums, and run `engine`.
    """

    def __init__(self, config: SimulateConfig, ranks: int, product_first: bool = False) -> None:
        self.ranks, self.parts = ranks, config.network.world_size
        self.product, self.gpu = config.product, config.gpu
        self.memory = MemoryBytes()
        self.last_stores: list[int] = []
        self.link = self.gpu.link_gb_per_s * 1e9
        self.engine = Engine(np.concatenate([np.ones(2 * ranks), np.full(ranks, self.link)]))
        self.part_bytes = self.product.m * self.product.n * self.product.element_bytes / self.parts
        self.near_memory = self.product.way in ("near_memory", "arbitrated")
        self.copies = _COPIES_LAST if product_first else _USUAL
        self.latency_s = self.gpu.peer_us / 1e6

    def _memory_s(self, nbytes: float, added: bool = False) -> float:
        factor = self.product.update_factor if added else 1.0
        return nbytes * factor / self.gpu.memory_gb_per_s / 1e9

    def _move(
        self, rank: int, to: int, name: str, nbytes: float, read: float, written: float, after: list[int],
        wait_s: float = 0.0, link_factor: float = 1.0, added: bool = False, priority: int = _USUAL,
    ) -> int:  # fmt: skip
        """Add a transfer of `nbytes` to a rank, for which this one reads and that one writes so many bytes."""
        demands = {2 * self.ranks + rank: nbytes * link_factor}
        for of, seconds in ((rank, self._memory_s(read)), (to, self._memory_s(written, added))):
            demands[self.ranks + of] = demands.get(self.ranks + of, 0.0) + seconds
        return self.engine.add(
            name, demands, nbytes, after, rank=rank, lane="link", delay_s=wait_s + self.latency_s, priority=priority
        )

    def add_product(self) -> list[list[list[int]]]:
        """Add the product; return for each rank and part the activities with whose ends it is there, or has left."""
        serial = self.product.way == "serial"
        terms = self.product.terms // self.parts
        if self.product.way == "software" and self.product.pattern == "direct":
            rows = [len(part.ranks) * (part.end - part.begin) for part in self._direct_parts()]
            waves = waves_of_products(self.product, terms, rows)
        else:
            waves = tile_waves(self.product, terms, 1 if serial else self.parts, cached_results=not self.near_memory)
        per_s = self.gpu.tflop_per_s * 1e12 * self.gpu.dense_efficiency
        flop = 2.0 * self.product.tile_m * self.product.tile_n * terms * self.product.programs
        first = min(1.0, self.product.k_step / terms)
        return [self._add_waves(rank, waves, flop / per_s, first) for rank in range(self.ranks)]

    def _add_waves(self, rank: int, waves: list[Wave], computes_s: float, first: float) -> list[list[int]]:
        add, of, memory = self.engine.add, self.ranks + rank, self._memory_s
        done: list[list[int]] = [[] for _ in range(len(waves[0].stored_bytes))]
        last: list[int] = []
        sent: list[int] = []  # what goes to the next rank, of the wave before; the programs are one wave ahead of it
        for wave in waves:
            if wave.opens:
                last = [self._after(rank, last, self.gpu.kernel_us)]
            loaded, rest = wave.read_bytes * first, wave.read_bytes * (1 - first)
            begun = add("load", {of: memory(loaded)}, max(loaded, 1.0), last, rank=rank, lane="product")
            demands = {rank: computes_s * wave.size, of: memory(rest)}
            last = [add("compute", demands, max(rest, 1.0), [begun], rank=rank, lane="product")]
            away = float(wave.stored_bytes[0]) if self.near_memory else 0.0
            here = float(wave.stored_bytes.sum()) - away
            before, computed = sent, last
            if here:
                seconds = memory(here, self.near_memory)
                last = [add("store", {of: seconds}, here, computed, rank=rank, lane="product")]
            if away:
                to = (rank + 1) % self.ranks
                name, after = "store to next", [*computed, *before]
                sent = [self._move(rank, to, name, away, 0.0, away, after, added=True, priority=self.copies)]
            for part in np.nonzero(wave.stored_bytes)[0]:
                done[part] = sent if away and part == 0 else last
            last = [*last, *before]
            if rank == 0:
                self.memory.product_read += wave.read_bytes
                self.memory.product_written += away + here
        self.last_stores.append(last[0])
        return done if len(done) > 1 else [done[0]] * self.parts

    def add_scatter(self, done: list[list[list[int]]]) -> list[int]:
        """Add the reduce-scatter; return for each rank the activity with whose end its sums are there."""
        if self.product.way == "serial":
            return self._ring_by_kernel(done)
        if self.product.way == "software":
            return self._direct_by_copies(done) if self.product.pattern == "direct" else self._ring_by_copies(done)
        return self._ring_in_memory(done)

    def _ended(self, after: list[list[int]]) -> list[int]:
        return [self.engine.add("sums are there", {}, after=each, rank=rank) for rank, each in enumerate(after)]

    def _after(self, rank: int, before: list[int], wait_us: float) -> int:
        """Add an activity that ends so long after others."""
        return self.engine.add("waits", {}, after=before, rank=rank, delay_s=wait_us / 1e6)

    def _count(self, read: float, written: float) -> None:
        self.memory.scatter_read += read * self.part_bytes
        self.memory.scatter_written += written * self.part_bytes

    def _ring_by_kernel(self, done: list[list[list[int]]]) -> list[int]:
        """Send a part in each of W - 1 steps: the first as it is, the others summed with what has come."""
        last = [each[-1] for each in done]
        factor = self.link / self.gpu.collective_gb_per_s / 1e9
        for step in range(1, self.parts):
            read, written = (1 if step == 1 else 2), 1
            if step == self.parts - 1:  # what arrives is summed at once: both are read, the sum is written
                written += 3
            self._count(read + (2 if step == self.parts - 1 else 0), 2 if step == self.parts - 1 else 1)
            wait_s = self.gpu.collective_us / 1e6 if step == 1 else 0.0
            b = self.part_bytes
            sent = [
                self._move(r, (r + 1) % self.ranks, "reduce-scatter", b, read * b, written * b, last[r], wait_s, factor)
                for r in range(self.ranks)
            ]
            last = [[sent[r], sent[r - 1]] for r in range(self.ranks)]
        return self._ended(last)

    def _sum(self, rank: int, read: float, after: list[int], share: float = 1.0) -> int:
        """Add a kernel that reads a share of so many parts and writes it, on a share of the multiprocessors."""
        nbytes = (read + 1) * share * self.part_bytes
        least_s = nbytes / min(self.product.sum_gb_per_s, self.gpu.memory_gb_per_s) / 1e9
        demands = {rank: least_s * self.product.sum_share, self.ranks + rank: self._memory_s(nbytes)}
        if rank == 0:
            self._count(read * share, share)
        return self.engine.add("sum", demands, nbytes, after, rank=rank, lane="sum", least_s=least_s, priority=_SUMS)

    def _copy(self, rank: int, to: int, after: list[int], share: float = 1.0, wait_us: float = 0.0) -> int:
        b = self.part_bytes * share
        if rank == 0:
            self._count(share, share)
        return self._move(rank, to, "copy", b, b, b, after, wait_us / 1e6)

    def _ring_by_copies(self, done: list[list[list[int]]]) -> list[int]:
        ready = [each[0] for each in done]
        for part in range(1, self.parts):
            wait_us = self.product.trigger_us
            sent = [self._copy(r, (r + 1) % self.ranks, ready[r], wait_us=wait_us) for r in range(self.ranks)]
            ready = [[self._sum(r, 2, [sent[r - 1], *done[r][part]])] for r in range(self.ranks)]
        return self._ended(ready)

    def _direct_parts(self) -> list[Part]:
        """Return the parts of rank 0's rows in the order of their products, its own last; other ranks' are as large."""
        rows = self.product.m // self.parts
        return [*scattered_parts(0, self.parts, rows, self.product.parts), Part(range(1), 0, rows)]

    def _direct_by_copies(self, done: list[list[list[int]]]) -> list[int]:
        """Copy each part when it is multiplied; add up the last sender's parts of each rank as they come."""
        rows, last_turn = self.product.m // self.parts, self.parts - 1
        order = turns(0, self.parts)
        pieces = [(0, rows)] if self.product.parts == WHOLE else halve(rows, self.product.parts)
        copied: list[list[int]] = [[] for _ in range(self.ranks)]  # to a rank, by all but its last sender
        arrived: list[list[int]] = [[] for _ in range(self.ranks)]  # by its last sender, in the order of `pieces`
        last: list[list[int]] = [[] for _ in range(self.ranks)]  # one after the other
        for number, part in enumerate(self._direct_parts()[:-1]):
            ready = [self._after(r, done[r][number], self.product.trigger_us) for r in range(self.ranks)]
            for turn in sorted(1 + order.index(peer) for peer in part.ranks):
                for r in range(self.ranks):
                    to = (r + turn) % self.ranks
                    last[r] = [self._copy(r, to, [ready[r], *last[r]], (part.end - part.begin) / rows)]
                    (arrived if turn == last_turn else copied)[to] += last[r]
        sums = [each[-1] for each in done]
        for number, (begin, end) in enumerate(pieces):
            for r in range(self.ranks):
                seen = self._after(r, [*sums[r], *copied[r], arrived[r][number]], self.gpu.kernel_us)
                sums[r] = [self._sum(r, self.parts, [seen], (end - begin) / rows)]
        return self._ended(sums)

    def _ring_in_memory(self, done: list[list[list[int]]]) -> list[int]:
        arrived, b = [done[r - 1][0] for r in range(self.ranks)], self.part_bytes
        for part in range(1, self.parts - 1):
            self._count(1, 1)
            sent = [
                self._move(
                    r, (r + 1) % self.ranks, "triggered copy", b, b, b, [*arrived[r], *done[r][part]],
                    added=True, priority=self.copies,
                )
                for r in range(self.ranks)
            ]  # fmt: skip
            arrived = [[sent[r - 1]] for r in range(self.ranks)]
        return self._ended([[*arrived[r], *done[r][-1]] for r in range(self.ranks)])

    def add_gather(self, sums: list[int]) -> list[int]:
        """Add the all-gather, by a kernel, along the ring."""
        last, b = [[number] for number in sums], self.part_bytes
        factor = self.link / self.gpu.collective_gb_per_s / 1e9
        for step in range(1, self.parts):
            wait_s = self.gpu.collective_us / 1e6 if step == 1 else 0.0
            sent = [
                self._move(r, (r + 1) % self.ranks, "all-gather", b, b, b, last[r], wait_s, factor)
                for r in range(self.ranks)
            ]
            last = [[sent[r], sent[r - 1]] for r in range(self.ranks)]
            self.memory.gather_read += b
            self.memory.gather_written += b
        return [each[0] for each in last]
