"""A matrix product and the sum of its results over the ranks, as activities: T3's hardware (Pati et al. 2024).

Each rank multiplies [m, k / W] x [k / W, n]; the results are summed over the ranks, each of which keeps a part of the
sums, and gathered where they are needed on all. There are W parts, equal runs of tiles. Every rank computes them in an
order of its own, one further than the rank before, so that a part which rank r computes i-th is computed (i + 1)-th by
rank r + 1: there the sum goes next. All ranks do the same at the same time, one part apart. So one rank stands for all,
with what it sends arriving at itself; `ranks` simulates more of them, to the same times.

| way | result of a part | on its way | summed by |
|---|---|---|---|
| serial | stored | ring by a kernel, behind the product | that kernel: reads both, writes the sum |
| software | stored, counted | a copy engine's copy, when it is complete | a kernel beside the product |
| near_memory | added by the memory; the first part straight to the next rank | a triggered copy | the memory |
| arbitrated | the same; if the product is the longer of both, its accesses come first | the same | the memory |
| ideal | product and reduce-scatter of `serial`, each alone; the longer of both counts | | |

A wave of tiles loads the first of its inputs, then computes while it loads the others, then stores; the next wave's
programs begin when its stores are taken. Memory is shared fairly by whatever asks for it, save under `arbitrated`,
which leaves copies what the product does not take, unless the links need longer than the product: copies do not starve.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.engine import Timeline
from dlrm_overlap.simulate.product_graph import MemoryBytes, ProductGraph


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
    """Simulate what the configuration says; `ranks` of them one by one, the others are like them."""
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


def with_product_ms(config: SimulateConfig, ms: float) -> SimulateConfig:
    """Return the configuration with that part of the GPU's greatest rate with which the product alone takes `ms`.

    Where the loads and stores of the tiles alone take longer, they set the time.
    """
    few, many = 0.01, 100.0
    for _ in range(16):  # to 1 in 7000
        middle = (few * many) ** 0.5
        tried = replace(config, gpu=replace(config.gpu, dense_efficiency=middle))
        few, many = (middle, many) if product_alone_ms(tried) > ms else (few, middle)
    return replace(config, gpu=replace(config.gpu, dense_efficiency=few))
