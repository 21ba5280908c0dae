"""A matrix product and the sum of its results over the ranks, as activities: T3's hardware (Pati et al. 2024).

Each rank multiplies [m, k / W] x [k / W, n]; the results are summed over the ranks, each of which keeps a part of the
sums, and gathered where they are needed on all. There are W parts, equal runs of tiles. Every rank computes them in an
order of its own, one further than the rank before, so that a part which rank r computes i-th is computed (i + 1)-th by
rank r + 1: there the sum goes next. All ranks do the same at the same time, one part apart. So one rank is
simulated for all of them: its transfers to the next rank take its own memory, as if they came from the rank before.

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

from dataclasses import astuple, dataclass, replace

import numpy as np

from dlrm_overlap.simulate.config import ProductConfig, SimulateConfig
from dlrm_overlap.simulate.engine import Engine, Timeline

_SUMS, _USUAL, _COPIES_LAST = 1, 0, -1  # priorities: programs that sum hold their multiprocessors
_PRODUCTS, _MEMORY, _LINK = 0, 1, 2  # the resources of a rank


@dataclass(frozen=True)
class Wave:
    """Tiles that are computed at a time."""

    read_bytes: float
    """of the inputs, from the memory"""
    stored_bytes: np.ndarray
    """[parts] float64, of the result, for each part"""


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
    """Activities of one rank, which has its products, its memory (in seconds at full rate) and its link.

    Add the product, then the reduce-scatter of its results, then the all-gather of the sums, and run `engine`.
    """

    def __init__(self, config: SimulateConfig, product_first: bool = False) -> None:
        self.parts = config.network.world_size
        self.product, self.gpu = config.product, config.gpu
        self.memory = MemoryBytes()
        self.last_store = 0
        self.link = self.gpu.link_gb_per_s * 1e9
        self.engine = Engine(np.array([1.0, 1.0, self.link]))
        self.part_bytes = self.product.m * self.product.n * self.product.element_bytes / self.parts
        self.near_memory = self.product.way in ("near_memory", "arbitrated")
        self.copies = _COPIES_LAST if product_first else _USUAL
        self.latency_s = self.gpu.peer_us / 1e6

    def _memory_s(self, nbytes: float, added: bool = False) -> float:
        factor = self.product.update_factor if added else 1.0
        return nbytes * factor / self.gpu.memory_gb_per_s / 1e9

    def _move(
        self, name: str, nbytes: float, read: float, written: float, after: list[int],
        wait_s: float = 0.0, link_factor: float = 1.0, added: bool = False, priority: int = _USUAL,
    ) -> int:  # fmt: skip
        """Add a transfer of `nbytes` to another rank, for which this one reads and that one writes so many bytes."""
        demands = {_LINK: nbytes * link_factor, _MEMORY: self._memory_s(read) + self._memory_s(written, added)}
        return self.engine.add(
            name, demands, nbytes, after, lane="link", delay_s=wait_s + self.latency_s, priority=priority
        )

    def add_product(self) -> list[list[int]]:
        """Add the product; return for each part the activities with whose ends it is there, or has left."""
        serial = self.product.way == "serial"
        terms = self.product.terms // self.parts
        waves = tile_waves(self.product, terms, 1 if serial else self.parts, cached_results=not self.near_memory)
        per_s = self.gpu.tflop_per_s * 1e12 * self.gpu.dense_efficiency
        flop = 2.0 * self.product.tile_m * self.product.tile_n * terms * self.product.programs
        return self._add_waves(waves, flop / per_s, min(1.0, self.product.k_step / terms))

    def _add_waves(self, waves: list[Wave], computes_s: float, first: float) -> list[list[int]]:
        add, memory = self.engine.add, self._memory_s
        done: list[list[int]] = [[] for _ in range(len(waves[0].stored_bytes))]
        last: list[int] = []
        sent: list[int] = []  # to the next rank, of the wave before; the programs are one wave ahead
        for wave in waves:
            loaded, rest = wave.read_bytes * first, wave.read_bytes * (1 - first)
            begun = add("load", {_MEMORY: memory(loaded)}, max(loaded, 1.0), last, lane="product")
            demands = {_PRODUCTS: computes_s, _MEMORY: memory(rest)}
            last = [add("compute", demands, max(rest, 1.0), [begun], lane="product")]
            away = float(wave.stored_bytes[0]) if self.near_memory else 0.0
            here = float(wave.stored_bytes.sum()) - away
            before, computed = sent, last
            if here:
                last = [add("store", {_MEMORY: memory(here, self.near_memory)}, here, computed, lane="product")]
            if away:
                after = [*computed, *before]
                sent = [self._move("store to next", away, 0.0, away, after, added=True, priority=self.copies)]
            for part in np.nonzero(wave.stored_bytes)[0]:
                done[part] = sent if away and part == 0 else last
            last = [*last, *before]
            self.memory.product_read += wave.read_bytes
            self.memory.product_written += away + here
        self.last_store = last[0]
        return done if len(done) > 1 else [done[0]] * self.parts

    def add_scatter(self, done: list[list[int]]) -> int:
        """Add the reduce-scatter; return the activity with whose end the rank's sums are there."""
        if self.product.way == "serial":
            ends = self._ring_by_kernel(done)
        elif self.product.way == "software":
            ends = self._ring_by_copies(done)
        else:
            ends = self._ring_in_memory(done)
        return self.engine.add("sums are there", {}, after=ends)

    def _count(self, read: float, written: float) -> None:
        self.memory.scatter_read += read * self.part_bytes
        self.memory.scatter_written += written * self.part_bytes

    def _ring_by_kernel(self, done: list[list[int]]) -> list[int]:
        """Send a part in each of W - 1 steps: the first as it is, the others summed with the part that has come."""
        last, b = done[-1], self.part_bytes
        for step in range(1, self.parts):
            read, ends = (1 if step == 1 else 2), step == self.parts - 1
            # The part that arrives at the end is summed at once: two are read, and the sum is written.
            self._count(read + (2 if ends else 0), 2 if ends else 1)
            written = 4 if ends else 1
            wait_s, factor = self._collective_s(step), self._collective_factor
            last = [self._move("reduce-scatter", b, read * b, written * b, last, wait_s, factor)]
        return last

    def _collective_s(self, step: int) -> float:
        """Return what a step of a collective takes on top: all that a collective takes, in the first."""
        return self.gpu.collective_us / 1e6 if step == 1 else 0.0

    @property
    def _collective_factor(self) -> float:
        """How much longer than at their rate a collective takes the links."""
        return self.link / self.gpu.collective_gb_per_s / 1e9

    def _sum(self, after: list[int]) -> int:
        """Add a kernel that reads two parts and writes their sum, on a share of the multiprocessors."""
        nbytes = 3 * self.part_bytes
        least_s = nbytes / min(self.product.sum_gb_per_s, self.gpu.memory_gb_per_s) / 1e9
        demands = {_PRODUCTS: least_s * self.product.sum_share, _MEMORY: self._memory_s(nbytes)}
        self._count(2, 1)
        return self.engine.add("sum", demands, nbytes, after, lane="sum", least_s=least_s, priority=_SUMS)

    def _ring_by_copies(self, done: list[list[int]]) -> list[int]:
        ready, b = done[0], self.part_bytes
        for part in range(1, self.parts):
            self._count(1, 1)
            sent = self._move("copy", b, b, b, ready, self.product.trigger_us / 1e6)
            ready = [self._sum([sent, *done[part]])]
        return ready

    def _ring_in_memory(self, done: list[list[int]]) -> list[int]:
        arrived, b = done[0], self.part_bytes
        for part in range(1, self.parts - 1):
            self._count(1, 1)
            after = [*arrived, *done[part]]
            arrived = [self._move("triggered copy", b, b, b, after, added=True, priority=self.copies)]
        return [*arrived, *done[-1]]

    def add_gather(self, sums: int) -> None:
        """Add the all-gather, by a kernel, along the ring."""
        last, b = [sums], self.part_bytes
        for step in range(1, self.parts):
            last = [self._move("all-gather", b, b, b, last, self._collective_s(step), self._collective_factor)]
            self.memory.gather_read += b
            self.memory.gather_written += b


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


def simulate_product(config: SimulateConfig) -> SimulatedProduct:
    """Simulate a product with its communication, on one rank for all."""
    if config.product.way == "ideal":
        return _ideal(config)
    made = ProductGraph(config, config.product.way == "arbitrated" and _product_is_longer(config))
    sums = made.add_scatter(made.add_product())
    if config.product.gather:
        made.add_gather(sums)
    timeline = made.engine.run()
    product_s, sums_s = (float(timeline.end_s[number]) for number in (made.last_store, sums))
    return SimulatedProduct(
        config, timeline, made.memory, timeline.seconds * 1e3, product_s * 1e3, (sums_s - product_s) * 1e3
    )


def _ideal(config: SimulateConfig) -> SimulatedProduct:
    """Return the serial way less the shorter of product and reduce-scatter."""
    serial = simulate_product(replace(config, product=replace(config.product, way="serial")))
    hidden = min(serial.product_ms, serial.scatter_ms)
    return replace(serial, config=config, ms=serial.ms - hidden, scatter_ms=serial.scatter_ms - hidden)


def _product_is_longer(config: SimulateConfig) -> bool:
    """Return whether the product alone takes longer than the links need for the reduce-scatter."""
    product, W = config.product, config.network.world_size
    sent_bytes = (W - 1) / W * product.m * product.n * product.element_bytes
    return product_alone_ms(config) > sent_bytes / config.gpu.link_gb_per_s / 1e6


def product_alone_ms(config: SimulateConfig) -> float:
    """Return the time of the product without any communication, in the serial order of its tiles."""
    made = ProductGraph(replace(config, product=replace(config.product, way="serial")))
    made.add_product()
    return made.engine.run().seconds * 1e3
