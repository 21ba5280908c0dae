"""Draws rows of a table from a Zipf distribution, with the same bits on every processor."""

import math

import numpy as np

_MAX_ALPHA = 32.0  # above, all but 3e-10 of the ids are the first row, and rows**alpha would overflow
_HEAD_BITS = 7  # each rank below 128 is its own item
_LEAST_MASS = 2.0**-80  # items of less probability are dropped, which no run is long enough to notice
_WITHIN = 1 - 2.0**-48  # keeps a rounded position below its item's width


class ZipfRanks:
    """Ranks in the order of popularity, P(rank r) = (r + 1)**-alpha / Z for r = 0 .. rows - 1, alpha >= 0.

    Walker's alias method: a draw's high bits choose one of 2**bits cells of equal probability. A threshold divides a
    cell between two items, each a rank or a range of ranks, and the position in the item's part selects the rank.

    Each of the first 128 ranks is an item; each later octave of ranks has 16 items of the same width, or 64 if alpha is
    above 4. Within an item, the rank is a quadratic function of the draw that preserves the ratio of densities at the
    item's ends. The relative error of a row's probability is below 0.04% at alpha 1.05, 0.2% at 2, and 0.9% at any.

    Products and sums of float64 must not be fused, so that they round identically everywhere.

    Example: rows 3 and alpha 0 give 4 cells and items of the mass of 4/3 cells. Cell 0 is item 0's, the first 2/3 of
    cell 1 item 1's and the rest item 0's, the first 1/3 of cell 2 item 2's and the rest item 1's, cell 3 item 2's.

    Source: Vose, A linear algorithm for generating random numbers with a given distribution, IEEE TSE 1991.
    """

    def __init__(self, rows: int, alpha: float):
        self.rows = rows
        # The formulas below divide by alpha - 1. For alpha 1, 1e-9 comes within 2e-8 of their limit.
        self._excess = (min(alpha, _MAX_ALPHA) - 1) or 1e-9
        first, width, mass, skew = self._items()
        self._total = float(mass.sum())
        self.bits = max(1, (len(mass) - 1).bit_length())
        """number of high bits of a draw that choose its cell"""
        share, other = _alias(mass / self._total, 1 << self.bits)
        # At most 2**63 - 1, to fit signed integers. The last draw of a whole cell belongs to its second item, the same.
        self.thresholds = np.array([min(int(kept * 2.0**63), 2**63 - 1) for kept in share], dtype=np.uint64)
        """[cells] uint64, start of the second item's part, in 2**-63 of the cell"""
        items = np.stack([np.arange(len(other)), other], axis=1).reshape(-1)
        items[items >= len(first)] = 0  # cells beyond the number of items have no first item; it is never read
        sizes = np.stack([self.thresholds, np.uint64(2**63) - self.thresholds], axis=1).reshape(-1).astype(np.float64)
        per_draw = np.where(width[items] > 1, _WITHIN / np.maximum(sizes, 1.0), 0.0)
        self.first_ranks = first[items]
        """[cells * 2] int64, first rank of each cell's two items"""
        self.slopes = width[items] * (1 - skew[items]) * per_draw
        """[cells * 2] float64: the rank is first + y (slope + curve y) for a draw at y in its part of the cell"""
        self.curves = width[items] * skew[items] * per_draw**2
        """[cells * 2] float64"""

    def _items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return each item's first rank, width, mass (Z in total) and skew.

        After the head, the mass of rank r is the integral of t**-alpha over [r + .5, r + 1.5] (midpoint rule), with a
        relative error of alpha (alpha + 1) / (24 r**2).
        """
        excess, head = self._excess, min(self.rows, 1 << _HEAD_BITS)
        step_bits = 4 if excess <= 3 else 6
        octaves = np.arange(_HEAD_BITS, 31)[:, None]
        tail = (((1 << step_bits) + np.arange(1 << step_bits)) << (octaves - step_bits)).reshape(-1)
        first = np.append(np.arange(head), tail[tail < self.rows])
        width = np.diff(first, append=self.rows)
        begin, end = first[head:] + 0.5, first[head:] + width[head:] + 0.5
        fall = excess * np.log(end / begin)
        mass = np.append(np.arange(1.0, head + 1) ** -(excess + 1), begin**-excess * -np.expm1(-fall) / excess)
        # (1 + skew) / (1 - skew) is the ratio of the densities at the item's beginning and end.
        skew = np.append(np.zeros(head), np.tanh((excess + 1) * np.log(end / begin) / 2))
        kept = mass > _LEAST_MASS * mass.sum()
        return first[kept], width[kept], mass[kept], skew[kept]

    def probability(self, ranks: np.ndarray) -> np.ndarray:
        return (ranks + 1.0) ** -(self._excess + 1) / self._total

    def chance_of_equal(self) -> float:
        """Return the probability that two draws are the same rank, without ranks from 4096 on, which add little."""
        return float((self.probability(np.arange(min(self.rows, 4096))) ** 2).sum())

    def draw(self, draws: np.ndarray) -> np.ndarray:
        """Return ranks [n] int64 for uniform `draws` [n] uint64."""
        item = (draws >> np.uint64(64 - self.bits)).view(np.int64)
        within = draws << np.uint64(self.bits)
        within >>= np.uint64(1)  # fits a signed integer, which processors convert to float64 in one instruction
        threshold = self.thresholds.take(item)
        item += item
        item += (within >= threshold).astype(np.int64)
        threshold = within - threshold  # below the threshold it wraps around to the greater number
        y = np.minimum(within, threshold, out=within).view(np.int64).astype(np.float64)
        position = self.curves.take(item)
        position *= y
        position += self.slopes.take(item)
        position *= y
        return position.astype(np.int64) + self.first_ranks.take(item)


class ZipfTable:
    def __init__(self, ranks: ZipfRanks, offset: int):
        """`offset` in [0, rows) shifts the rows, so that tables of the same size have different popular rows."""
        self.ranks, self.rows = ranks, ranks.rows
        rows = self.rows
        self.multiplier = next(m for m in range(int(0.618 * rows), rows + 1) if math.gcd(m, rows) == 1)
        self.offset = offset

    def row_ids(self, ranks: np.ndarray) -> np.ndarray:
        """Map ranks of popularity to rows, int32 in [0, rows), by a bijection that scatters the popular rows."""
        ids = ranks * self.multiplier
        ids += self.offset
        # The remainder; numpy vectorises division by a scalar, but not `%`.
        ids -= ids // self.rows * self.rows
        return ids.astype(np.int32)


def _alias(mass: np.ndarray, cells: int) -> tuple[list[float], np.ndarray]:
    """Return for each cell i the share of it that item i has, and the item that has the rest of the cell."""
    left = (np.append(mass, np.zeros(cells - len(mass))) * cells).tolist()
    share, other = [1.0] * cells, np.arange(cells)
    small = [item for item in range(cells) if left[item] < 1]
    large = [item for item in range(cells) if left[item] >= 1]
    while small and large:
        item, donor = small.pop(), large[-1]
        share[item], other[item] = left[item], donor
        left[donor] -= 1 - left[item]
        if left[donor] < 1:
            small.append(large.pop())
    return share, other
