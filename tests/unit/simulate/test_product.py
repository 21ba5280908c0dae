"""A product with its reduce-scatter: tiles, bytes and times that can be found by hand, and what the ways share."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlrm_overlap.simulate.config import GpuConfig, NetworkConfig, ProductConfig, SimulateConfig
from dlrm_overlap.simulate.product import (
    SimulatedProduct,
    product_alone_ms,
    simulate_product,
    tile_waves,
)

WAYS = ["serial", "software", "near_memory", "arbitrated", "ideal"]
W = 4


def _simulate(**product: Any) -> SimulatedProduct:
    gpu = GpuConfig(
        memory_gb_per_s=1000, link_gb_per_s=75, collective_gb_per_s=75, collective_us=0, peer_us=0.5, tflop_per_s=100
    )
    shape = replace(ProductConfig(m=2048, n=1024, k=4096, programs=24), **product)
    network = NetworkConfig(gpus_per_host=W)
    return simulate_product(SimulateConfig("product", gpu, network, product=shape))


def test_a_panel_stays_in_the_cache_by_what_was_used_since() -> None:
    """Tiles (0, 0), (1, 0), (0, 1), (1, 1), one at a time; panels of 4 MB."""
    shape = ProductConfig(m=2, n=2, tile_m=1, tile_n=1, programs=1, cache_mb=6.0)
    waves = tile_waves(shape, terms=2_000_000, parts=2, cached_results=False)
    reads = [wave.read_bytes / 4e6 for wave in waves]
    # (1, 0) finds 3/4 of column 0, used 8 MB ago; so does (1, 1) of column 1. Rows come back after 12 and 16 MB.
    assert reads == pytest.approx([2.0, 1 + 0.25, 1 + 0.5, 0.25 + 0.625])
    assert [wave.stored_bytes.tolist() for wave in waves] == [[2, 0], [2, 0], [0, 2], [0, 2]]


def test_a_cache_that_holds_all_reads_the_inputs_once_and_all_results_are_stored() -> None:
    shape = ProductConfig(m=1000, n=700, cache_mb=1e3)  # neither a multiple of a tile
    waves = tile_waves(shape, terms=512, parts=W, cached_results=True)
    assert sum(wave.read_bytes for wave in waves) == pytest.approx((1000 + 700) * 512 * 2)
    stored = sum(wave.stored_bytes for wave in waves)
    assert isinstance(stored, np.ndarray)
    assert stored.sum() == pytest.approx(1000 * 700 * 2)
    assert (stored > 0).all()


def test_serial_is_the_product_then_two_rings() -> None:
    serial = _simulate(way="serial")
    ring_ms = 1e3 * (W - 1) * (2048 * 1024 * 2 / W / 75e9 + 0.5e-6)
    assert serial.product_ms == pytest.approx(product_alone_ms(serial.config))
    assert serial.scatter_ms == pytest.approx(ring_ms)
    assert serial.ms == pytest.approx(serial.product_ms + 2 * ring_ms)


@pytest.mark.parametrize(
    ("way", "read", "written"),
    [
        ("serial", 2 * W - 1, W),
        ("software", 3 * (W - 1), 2 * (W - 1)),
        ("near_memory", W - 2, W - 2),
        ("arbitrated", W - 2, W - 2),
    ],
)
def test_the_memory_moves_the_parts_that_a_way_needs(way: str, read: int, written: int) -> None:
    """And the engine takes as much memory time as these bytes need, sums in the memory twice as long."""
    found = _simulate(way=way)
    part, memory = 2048 * 1024 * 2 / W, found.memory_bytes
    assert memory["product_written"] == pytest.approx(W * part)
    assert (memory["scatter_read"], memory["scatter_written"]) == pytest.approx((read * part, written * part))
    assert (memory["gather_read"], memory["gather_written"]) == pytest.approx(((W - 1) * part, (W - 1) * part))
    added = memory["product_written"] + memory["scatter_written"] if way in ("near_memory", "arbitrated") else 0.0
    assert found.timeline.carried[1] == pytest.approx((sum(memory.values()) + added) / 1e12)
    assert found.timeline.carried[2] == pytest.approx(2 * (W - 1) * part)


def test_sums_in_memory_gain_and_nothing_beats_the_longer_of_both() -> None:
    times = {way: _simulate(way=way).ms for way in WAYS}
    assert times["ideal"] < times["near_memory"] < times["software"] < times["serial"]
    assert times["ideal"] <= times["arbitrated"] < times["software"]


def test_slow_sums_in_memory_hold_the_product_up_unless_it_comes_first() -> None:
    k = 16384  # the product is the longer of both
    free, arbitrated = (_simulate(way=way, k=k, update_factor=8.0) for way in ("near_memory", "arbitrated"))
    assert arbitrated.product_ms < free.product_ms
    easy = _simulate(way="near_memory", k=k, update_factor=1.0)
    assert easy.product_ms < arbitrated.product_ms


def test_without_a_gather_the_sums_are_the_end() -> None:
    with_gather, without = _simulate(way="near_memory"), _simulate(way="near_memory", gather=False)
    assert without.ms == pytest.approx(without.product_ms + without.scatter_ms)
    assert without.memory_bytes["gather_read"] == without.memory_bytes["gather_written"] == 0
    assert without.ms < with_gather.ms
