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

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dlrm_overlap.simulate.config import ProductConfig, SimulateConfig
from dlrm_overlap.simulate.engine import Engine, Timeline

_SUMS, _USUAL, _COPIES_LAST = 1, 0, -1  # priorities: programs that sum hold their multiprocessors
_PRODUCTS, _MEMORY, _LINK = 0, 1, 2  # the resources of a rank
_ELEMENT_BYTES = 2  # of inputs and results
_K_STEP = 64  # terms of the sums that a tile's program has loaded before it computes
_GROUP_ROWS = 8  # rows of tiles that are computed column by column before the next ones
# What `software` takes, assumed: from the end of a part's last tile to the begin of its copy; the kernel that sums, in
# part of the multiprocessors and in GB/s that it reads and writes.
_TRIGGER_S, _SUM_SHARE, _SUM_GB_PER_S = 5e-6, 0.25, 750.0


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
    order = _order(len(rows), len(columns), _GROUP_ROWS)
    part_of = np.arange(len(order)) * parts // len(order)
    panel_bytes = np.concatenate([rows, columns]) * terms * _ELEMENT_BYTES
    tile_bytes = rows[order[:, 0]] * columns[order[:, 1]] * _ELEMENT_BYTES
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


class ProductGraph:
    """Activities of one rank, which has its products, its memory (in seconds at full rate) and its link.

    Add the product, then the reduce-scatter of its results, then the all-gather of the sums, and run `engine`.
    """

    def __init__(self, config: SimulateConfig, product_first: bool = False) -> None:
        self.parts = config.network.world_size
        self.product, self.gpu = config.product, config.gpu
        phases = (f"{phase}_{way}" for phase in ("product", "scatter", "gather") for way in ("read", "written"))
        self.memory_bytes = dict.fromkeys(phases, 0.0)
        self.last_store = 0
        self.engine = Engine(np.array([1.0, 1.0, self.gpu.link_gb_per_s * 1e9]))
        self.part_bytes = self.product.m * self.product.n * _ELEMENT_BYTES / self.parts
        self.near_memory = self.product.way in ("near_memory", "arbitrated")
        self.copies = _COPIES_LAST if product_first else _USUAL

    def _add(
        self, name: str, phase: str, after: list[int], *, read: float = 0.0, written: float = 0.0, moved: float = 0.0,
        added: bool = False, collective: bool = False, products_s: float = 0.0, wait_s: float = 0.0,
        least_s: float = 0.0, lane: str = "link", priority: int = _USUAL,
    ) -> int:  # fmt: skip
        """Add an activity of `phase` whose bytes this rank's memory reads and writes, and its link moves.

        A transfer is one to another rank, for which this one reads and that one writes; all ranks do the same. If
        `added`, the memory adds what is written. A collective takes the link at a rate of its own.
        """
        self.memory_bytes[f"{phase}_read"] += read
        self.memory_bytes[f"{phase}_written"] += written
        written *= self.product.update_factor if added else 1.0
        slower = self.gpu.link_gb_per_s / self.gpu.collective_gb_per_s if collective else 1.0
        memory_s = (read + written) / self.gpu.memory_gb_per_s / 1e9
        demands = {_PRODUCTS: products_s, _MEMORY: memory_s, _LINK: moved * slower}
        latency_s = self.gpu.peer_us / 1e6 if moved else 0.0
        return self.engine.add(
            name, demands, max(moved or read + written, 1.0), after, lane=lane, delay_s=wait_s + latency_s,
            least_s=least_s, priority=priority,
        )  # fmt: skip

    def add_product(self) -> list[list[int]]:
        """Add the product; return for each part the activities with whose ends it is there, or has left."""
        serial = self.product.way == "serial"
        terms = self.product.terms // self.parts
        waves = tile_waves(self.product, terms, 1 if serial else self.parts, cached_results=not self.near_memory)
        per_s = self.gpu.tflop_per_s * 1e12 * self.gpu.dense_efficiency
        computes_s = 2.0 * self.product.tile_m * self.product.tile_n * terms * self.product.programs / per_s
        first, lane = min(1.0, _K_STEP / terms), "product"
        done: list[list[int]] = [[] for _ in range(len(waves[0].stored_bytes))]
        last: list[int] = []
        sent: list[int] = []  # to the next rank, of the wave before; the programs are one wave ahead
        for wave in waves:
            loaded = wave.read_bytes * first
            begun = self._add("load", "product", last, read=loaded, lane=lane)
            rest = wave.read_bytes - loaded
            last = [self._add("compute", "product", [begun], read=rest, products_s=computes_s, lane=lane)]
            away = float(wave.stored_bytes[0]) if self.near_memory else 0.0
            here = float(wave.stored_bytes.sum()) - away
            before, computed = sent, last
            if here:
                last = [self._add("store", "product", computed, written=here, added=self.near_memory, lane=lane)]
            if away:
                after = [*computed, *before]
                sent = [self._add(
                    "store to next", "product", after, written=away, moved=away, added=True, priority=self.copies
                )]  # fmt: skip
            for part in np.nonzero(wave.stored_bytes)[0]:
                done[part] = sent if away and part == 0 else last
            last = [*last, *before]
        self.last_store = last[0]
        return done if len(done) > 1 else [done[0]] * self.parts

    def add_scatter(self, done: list[list[int]]) -> int:
        """Add the reduce-scatter; return the activity with whose end the rank's sums are there."""
        ways = {"serial": self._ring_by_kernel, "software": self._ring_by_copies}
        return self.engine.add("sums are there", {}, after=ways.get(self.product.way, self._ring_in_memory)(done))

    def _collective_s(self, step: int) -> float:
        """Return what a step of a collective takes on top: all that a collective takes, in the first."""
        return self.gpu.collective_us / 1e6 if step == 1 else 0.0

    def _ring_by_kernel(self, done: list[list[int]]) -> list[int]:
        """Send a part in each of W - 1 steps: the first as it is, the others summed with the part that has come."""
        last, b = done[-1], self.part_bytes
        for step in range(1, self.parts):
            # The part that arrives at the end is summed at once: two are read, and the sum is written.
            at_end = step == self.parts - 1
            read, written = b * ((1 if step == 1 else 2) + 2 * at_end), b * (1 + at_end)
            last = [self._add(
                "reduce-scatter", "scatter", last, read=read, written=written, moved=b, collective=True,
                wait_s=self._collective_s(step),
            )]  # fmt: skip
        return last

    def _ring_by_copies(self, done: list[list[int]]) -> list[int]:
        """Copy parts, each of which a kernel then sums with this rank's, on a share of the multiprocessors."""
        ready, b = done[0], self.part_bytes
        sum_s = 3 * b / min(_SUM_GB_PER_S, self.gpu.memory_gb_per_s) / 1e9
        for part in range(1, self.parts):
            sent = self._add("copy", "scatter", ready, read=b, written=b, moved=b, wait_s=_TRIGGER_S)
            ready = [self._add(
                "sum", "scatter", [sent, *done[part]], read=2 * b, written=b, products_s=sum_s * _SUM_SHARE,
                least_s=sum_s, lane="sum", priority=_SUMS,
            )]  # fmt: skip
        return ready

    def _ring_in_memory(self, done: list[list[int]]) -> list[int]:
        arrived, b = done[0], self.part_bytes
        for part in range(1, self.parts - 1):
            after = [*arrived, *done[part]]
            arrived = [self._add(
                "triggered copy", "scatter", after, read=b, written=b, moved=b, added=True, priority=self.copies
            )]  # fmt: skip
        return [*arrived, *done[-1]]

    def add_gather(self, sums: int) -> None:
        """Add the all-gather, by a kernel, along the ring."""
        last, b = [sums], self.part_bytes
        for step in range(1, self.parts):
            last = [self._add(
                "all-gather", "gather", last, read=b, written=b, moved=b, collective=True,
                wait_s=self._collective_s(step),
            )]  # fmt: skip


@dataclass(frozen=True)
class SimulatedProduct:
    """One simulated product with its communication."""

    config: SimulateConfig
    timeline: Timeline
    memory_bytes: Mapping[str, float]
    """that one rank's memory reads and writes, by phase; an update counts as a write"""
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
        config, timeline, made.memory_bytes, timeline.seconds * 1e3, product_s * 1e3, (sums_s - product_s) * 1e3
    )


def _ideal(config: SimulateConfig) -> SimulatedProduct:
    """Return the serial way less the shorter of product and reduce-scatter."""
    serial = simulate_product(replace(config, product=replace(config.product, way="serial")))
    hidden = min(serial.product_ms, serial.scatter_ms)
    return replace(serial, config=config, ms=serial.ms - hidden, scatter_ms=serial.scatter_ms - hidden)


def _product_is_longer(config: SimulateConfig) -> bool:
    """Return whether the product alone takes longer than the links need for the reduce-scatter."""
    product, W = config.product, config.network.world_size
    sent_bytes = (W - 1) / W * product.m * product.n * _ELEMENT_BYTES
    return product_alone_ms(config) > sent_bytes / config.gpu.link_gb_per_s / 1e6


def product_alone_ms(config: SimulateConfig) -> float:
    """Return the time of the product without any communication, in the serial order of its tiles."""
    made = ProductGraph(replace(config, product=replace(config.product, way="serial")))
    made.add_product()
    return made.engine.run().seconds * 1e3
