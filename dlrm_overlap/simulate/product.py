"""A matrix product and the sum of its results over the ranks, as activities: T3's hardware (Pati et al. 2024).

Each rank multiplies [m, k / W] x [k / W, n]; the results are summed over the ranks, each of which keeps a part of the
sums, and gathered where they are needed on all. There are W parts, equal runs of tiles. Every rank computes them in an
order of its own, one further than the rank before, so that a part which rank r computes i-th is computed (i + 1)-th by
rank r + 1: there the sum goes next. All ranks do the same at the same time, one part apart. So one rank stands for all,
and sends to itself; `ranks` simulates more of them, to the same times.

| way | result of a part | on its way | summed by |
|---|---|---|---|
| serial | stored | ring by a kernel, after the product | that kernel: reads both, writes the sum |
| software | stored, counted | a copy engine's copy, when it is complete | a kernel beside the product |
| near_memory | added by the memory; the first part straight to the next rank | a triggered copy | the memory |
| arbitrated | the same; if the product is the longer of both, its accesses come first | the same | the memory |
| ideal | product and reduce-scatter of `serial`, each alone; the longer of both counts | | |

A wave of tiles loads the first of its inputs, then computes while it loads the others, then stores; the next wave's
programs begin when its stores are taken. Memory is shared fairly by whatever asks for it, save under `arbitrated`,
which serves the product before the copies, unless the links need longer than the product: copies do not starve.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from dlrm_overlap.dense.gemm.plan import WHOLE, Part, halve, scattered_parts, turns
from dlrm_overlap.simulate.config import ProductConfig, SimulateConfig
from dlrm_overlap.simulate.engine import Engine, Timeline

_SUMS, _USUAL, _COPIES_LAST = 1, 0, -1  # priorities: programs that sum hold their multiprocessors


@dataclass(frozen=True)
class Wave:
    """Tiles that are computed at a time."""

    read_bytes: float
    """of the inputs, from the memory"""
    stored_bytes: np.ndarray
    """[parts] float64, of the result, for each part"""
    size: float = 1.0
    """of its tiles, over those that the product is said to have"""
    opens: bool = False
    """whether it is the first of a kernel that follows another one"""


def tile_waves(product: ProductConfig, terms: int, parts: int, cached_results: bool) -> list[Wave]:
    """Return the waves of a product [m, terms] x [terms, n].

    Args:
        product: gives m, n, the sizes of tiles and of the cache.
        terms: of each sum.
        parts: in which the tiles are divided, equal numbers of those that follow each other.
        cached_results: whether results are stored through the cache, where they take the place of inputs.
    """
    rows, columns = _sizes(product.m, product.tile_m), _sizes(product.n, product.tile_n)
    order = _order(len(rows), len(columns), product.group_rows)
    part_of = np.arange(len(order)) * parts // len(order)
    panel_bytes = np.concatenate([rows, columns]) * terms * product.element_bytes
    tile_bytes = rows[order[:, 0]] * columns[order[:, 1]] * product.element_bytes
    cache, found = product.cache_mb * 1e6, []
    used = np.full(len(panel_bytes), -1)  # the wave that used each panel last
    results = [0.0]  # bytes stored by all waves before each
    for number, begin in enumerate(range(0, len(order), product.programs)):
        tiles = order[begin : begin + product.programs]
        panels = np.unique(np.concatenate([tiles[:, 0], len(rows) + tiles[:, 1]]))
        since = np.append(np.cumsum(np.bincount(used + 1, panel_bytes, minlength=number + 1)[::-1])[::-1], 0.0)
        last = used[panels]
        passed = since[last + 1] + (results[-1] - np.array(results)[last] if cached_results else 0.0)
        kept = np.where(last >= 0, np.minimum(1.0, cache / np.maximum(passed, 1.0)), 0.0)
        used[panels] = number
        chosen = slice(begin, begin + product.programs)
        stored = np.bincount(part_of[chosen], tile_bytes[chosen], minlength=parts)
        results.append(results[-1] + float(stored.sum()))
        read = float((panel_bytes[panels] * (1.0 - kept)).sum())
        found.append(Wave(read, stored))
    return found


def waves_of_products(product: ProductConfig, terms: int, rows: Sequence[int]) -> list[Wave]:
    """Return the waves of several products, one kernel after the other, each with so many rows; each makes a part.

    Each reads the right input anew, and has the tiles that suit it best, as a library chooses them: as wide as those of
    `product`, three quarters or half of that, whichever computes the fewest columns of tiles one after the other.
    """
    found: list[Wave] = []
    for part, count in enumerate(rows):
        widths = (max(product.tile_n * quarters // 4, 1) for quarters in (4, 3, 2))
        each = min((replace(product, m=count, tile_n=width) for width in widths), key=_columns_in_turn)
        for number, wave in enumerate(tile_waves(each, terms, 1, cached_results=True)):
            stored = np.zeros(len(rows))
            stored[part] = wave.stored_bytes[0]
            found.append(Wave(wave.read_bytes, stored, each.tile_n / product.tile_n, opens=number == 0))
    return found


def _columns_in_turn(product: ProductConfig) -> int:
    """Return how many columns of tiles' results each program computes, one tile after the other."""
    tiles = -(-product.m // product.tile_m) * -(-product.n // product.tile_n)
    return -(-tiles // product.programs) * product.tile_n


def _sizes(length: int, tile: int) -> np.ndarray:
    """Return the lengths of the tiles of a side; the last may be shorter."""
    starts = np.arange(0, length, tile)
    return np.minimum(tile, length - starts).astype(np.float64)


def _order(rows: int, columns: int, group_rows: int) -> np.ndarray:
    """Return [rows * columns, 2]: the row and the column of each tile, some rows at a time, column by column.

    Example, 3 rows, 2 columns, 2 rows at a time: rows 0, 1, 0, 1, 2, 2 and columns 0, 0, 1, 1, 0, 1.
    """
    order = [
        (row, column)
        for first in range(0, rows, group_rows)
        for column in range(columns)
        for row in range(first, min(first + group_rows, rows))
    ]
    return np.array(order, np.int64)


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
        return sum(astuple(self))


class ProductGraph:
    """Activities of some ranks, each of which has its products, its memory (in seconds at full rate) and its link.

    Add the product, then the reduce-scatter of its results, then the all-gather of the sums, and run `engine`.
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
        sent: list[int] = []  # to the next rank, of the wave before; the programs are one wave ahead
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
        """Send a part in each of W - 1 steps: the first as it is, the others summed with the part that has come."""
        last = [each[-1] for each in done]
        factor = self.link / self.gpu.collective_gb_per_s / 1e9
        for step in range(1, self.parts):
            read, written = (1 if step == 1 else 2), 1
            if step == self.parts - 1:  # the part that arrives is summed at once: two are read, the sum is written
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


@dataclass(frozen=True)
class SimulatedProduct:
    """One simulated product with its communication."""

    config: SimulateConfig
    timeline: Timeline
    memory: MemoryBytes
    ms: float
    product_ms: float
    """until the product has ended, whatever runs beside it"""
    scatter_ms: float
    """from the end of the product until the sums are there"""


def simulate_product(
    config: SimulateConfig, progress: Callable[[int, int], None] | None = None, ranks: int = 1
) -> SimulatedProduct:
    """Simulate a product; `ranks` of them one by one, the others are like them."""
    if config.product.way == "ideal":
        return _ideal(config, progress)
    made = ProductGraph(config, ranks, config.product.way == "arbitrated" and _product_is_longer(config))
    products = made.add_product()
    sums = made.add_scatter(products)
    ends = made.add_gather(sums) if config.product.gather else sums
    timeline = made.engine.run(progress)
    assert len(ends) == ranks, "every rank has an end"
    product_s, sums_s = (float(timeline.end_s[numbers].max()) for numbers in (made.last_stores, sums))
    return SimulatedProduct(
        config, timeline, made.memory, timeline.seconds * 1e3, product_s * 1e3, (sums_s - product_s) * 1e3
    )


def _ideal(config: SimulateConfig, progress: Callable[[int, int], None] | None) -> SimulatedProduct:
    """Return the serial way less the shorter of product and reduce-scatter."""
    serial = simulate_product(replace(config, product=replace(config.product, way="serial")), progress)
    hidden = min(serial.product_ms, serial.scatter_ms)
    return replace(serial, config=config, ms=serial.ms - hidden, scatter_ms=serial.scatter_ms - hidden)


def _product_is_longer(config: SimulateConfig) -> bool:
    """Return whether the product alone takes longer than the links need for the reduce-scatter."""
    product, W = config.product, config.network.world_size
    sent_bytes = (W - 1) / W * product.m * product.n * product.element_bytes
    return product_alone_ms(config) > sent_bytes / config.gpu.link_gb_per_s / 1e6


def product_alone_ms(config: SimulateConfig) -> float:
    """Return the time of the product without any communication, in the serial order of its tiles."""
    made = ProductGraph(replace(config, product=replace(config.product, way="serial")), 1)
    made.add_product()
    return made.engine.run().seconds * 1e3
