"""The tiles of a matrix product in the order of their computation: what each wave of them reads, computes and stores.

A wave is as many tiles as there are programs, all of which begin and end together. It needs panels: rows of the left
input for its rows of tiles, columns of the right input for its columns. A panel is read once for all tiles of a wave.
Of a panel that an earlier wave has read, the part min(1, cache / d) is still in the cache, where d is the bytes of all
panels that have been used since then, each counted once, and of all results that were stored through the cache since.

Example: two panels of 4 MB used in turns, a cache of 6 MB: d = 8 MB at each use, so 6 / 8 is found and 1 MB read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_overlap.simulate.product_config import ProductConfig


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
    """whether it is the first of a kernel, which comes behind another one"""


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
    """Return the waves of several products, one kernel behind the other, each with so many rows; each makes a part.

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
