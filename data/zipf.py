"""Draws the rows of a table by their popularity: a Zipf distribution, in operations whose bits no processor changes."""

import math

import numpy as np

_MAX_ALPHA = 32.0  # above, all but 3e-10 of the ids are the first row, and rows**alpha would overflow
_HEAD_BITS = 7  # ranks below 128 are items of their own
_LEAST_MASS = 2.0**-80  # of an item; no run draws so many ids that it misses one of less
_WITHIN = 1 - 2.0**-48  # keeps a position below its item's width, whatever its rounding


class ZipfRanks:
    """Ranks in the order of popularity, P(rank r) = (r + 1)**-alpha / Z for r = 0 .. rows - 1, any alpha >= 0.

    Walker's alias method (Vose, A linear algorithm for generating random numbers with a given distribution, IEEE TSE
    1991): a draw's high bits choose one of 2**bits cells of equal probability. A cell is split at a threshold between
    two items, each a rank or a stretch of ranks. How far the draw lies into the item's part of the cell says which of
    its ranks it is. So a draw costs four look-ups, however many rows there are.

    Each of the first 128 ranks is an item. Beyond them, an octave of ranks has 16 items of one width, or 64 where alpha
    is above 4. Within an item, the rank is a quadratic function of the draw, with the density's own ratio between the
    item's ends. The relative error of a row's probability is below 0.04% at alpha 1.05, 0.2% at alpha 2, 0.9% at any;
    items less likely than 2**-80 are left out.

    The look-ups are made on the host, once. A draw then takes integers and single float64 sums, products and
    conversions, which round alike everywhere, as long as no product and sum are fused into one.

    Example: rows 3, alpha 0, so 4 cells, and each item's mass is that of 4/3 cells. Cell 0 is all item 0's, cell 1 to
    2/3 item 1's and then item 0's, cell 2 to 1/3 item 2's and then item 1's, cell 3 all item 2's.
    """

    def __init__(self, rows: int, alpha: float):
        self.rows = rows
        # The formulas below divide by alpha - 1, and at alpha 1 their limit holds; 1e-9 comes within 2e-8 of it.
        self._excess = (min(alpha, _MAX_ALPHA) - 1) or 1e-9
        first, width, mass, skew = self._items()
        self._total = float(mass.sum())
        self.bits = max(1, (len(mass) - 1).bit_length())
        """a draw's high bits that choose its cell"""
        share, other = _alias(mass / self._total, 1 << self.bits)
        # Below 2**63, for the sake of signed integers: a whole cell's last draw is of its second item, the same one.
        self.thresholds = np.array([min(int(kept * 2.0**63), 2**63 - 1) for kept in share], dtype=np.uint64)
        """[cells] uint64: from here on, counted in 2**63rds of the cell, a draw is of its second item"""
        items = np.stack([np.arange(len(other)), other], axis=1).reshape(-1)
        items[items >= len(first)] = 0  # cells beyond the items hold none of their own, and are never asked for it
        sizes = np.stack([self.thresholds, np.uint64(2**63) - self.thresholds], axis=1).reshape(-1).astype(np.float64)
        per_draw = np.where(width[items] > 1, _WITHIN / np.maximum(sizes, 1.0), 0.0)
        self.first_ranks = first[items]
        """[cells * 2] int64: the first rank of each cell's two items"""
        self.slopes = width[items] * (1 - skew[items]) * per_draw
        """[cells * 2] float64: a draw's rank is first + y (slope + curve y), if it is y into its part of the cell"""
        self.curves = width[items] * skew[items] * per_draw**2
        """[cells * 2] float64"""

    def _items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return each item's first rank, width, mass (of a total of Z) and skew, by which its density falls.

        Beyond the head, the mass of rank r is the integral of t**-alpha over [r + .5, r + 1.5] (midpoint rule), whose
        relative error is alpha (alpha + 1) / (24 r**2): below 6e-6 at alpha 1.05, below 2e-4 at alpha 8.
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
        # (1 + skew) / (1 - skew) is the density at the item's beginning over that at its end.
        skew = np.append(np.zeros(head), np.tanh((excess + 1) * np.log(end / begin) / 2))
        kept = mass > _LEAST_MASS * mass.sum()
        return first[kept], width[kept], mass[kept], skew[kept]

    def probability(self, ranks: np.ndarray) -> np.ndarray:
        """Return P(rank), float64, of each of `ranks`."""
        return (ranks + 1.0) ** -(self._excess + 1) / self._total

    def draw(self, draws: np.ndarray) -> np.ndarray:
        """Return a rank, int64, for each of `draws` [n], uint64 and uniform."""
        item = (draws >> np.uint64(64 - self.bits)).view(np.int64)
        within = draws << np.uint64(self.bits)
        within >>= np.uint64(1)  # a signed integer from here on, which processors convert to float64 at once
        threshold = self.thresholds.take(item)
        item += item
        item += (within >= threshold).astype(np.int64)
        threshold = within - threshold  # wraps around, and so is the greater one, below the threshold
        y = np.minimum(within, threshold, out=within).view(np.int64).astype(np.float64)
        position = self.curves.take(item)
        position *= y
        position += self.slopes.take(item)
        position *= y
        return position.astype(np.int64) + self.first_ranks.take(item)


class ZipfTable:
    """A table's rows, each with the popularity of one rank."""

    def __init__(self, ranks: ZipfRanks, offset: int):
        """Take the ranks, and an offset in [0, rows) by which the rows of the ranks of equal tables differ."""
        self.ranks, self.rows = ranks, ranks.rows
        rows = self.rows
        self.multiplier = next(m for m in range(int(0.618 * rows), rows + 1) if math.gcd(m, rows) == 1)
        self.offset = offset

    def row_ids(self, ranks: np.ndarray) -> np.ndarray:
        """Return the row, int32 in [0, rows), of each of `ranks`, by a bijection that scatters the popular rows."""
        ids = ranks * self.multiplier
        ids += self.offset
        # The remainder, written out because numpy vectorises the division by a scalar, but not `%`.
        ids -= ids // self.rows * self.rows
        return ids.astype(np.int32)


def _alias(mass: np.ndarray, cells: int) -> tuple[list[float], np.ndarray]:
    """Fill `cells` cells with items of `mass`, which sums to 1, at most two a cell.

    Return each cell's share of the item of its own number, and the number of the item that has the rest.
    """
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
