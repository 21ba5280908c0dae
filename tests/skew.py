"""The command `python -m tests.skew FILE`: the Zipf exponents of the columns of Criteo's text.

If a column has fewer values than a tenth of the rows, this is the most likely exponent for the counts, in descending
order. Otherwise too few rows show the ranks, and it is the exponent at which the expected number of values seen is the
observed one. This needs the number of all values of the column: those of Criteo Kaggle are given.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np

KAGGLE_VALUES = [
    *[1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10],
    *[5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572],
]


def _surplus(alpha: float, counts: np.ndarray, values: int) -> float:
    """Return a number that is positive if `alpha` is too small, and negative if it is too large."""
    seen, drawn = len(counts), counts.sum()
    if seen < drawn / 10:
        ranks = np.log(np.arange(1, seen + 1))
        mass = np.exp(-alpha * ranks)
        return float((mass * ranks).sum() / mass.sum() - (counts * ranks).sum() / drawn)
    mass = np.arange(1.0, values + 1) ** -alpha
    return float(-np.expm1(drawn * np.log1p(-np.minimum(mass / mass.sum(), 1 - 1e-12))).sum() - seen)


def exponent(counts: np.ndarray, values: int) -> float:
    """Return the exponent of a column with `values` values; counts: [values seen], in descending order."""
    low, high = 0.0, 5.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _surplus(middle, counts, values) > 0 else (low, middle)
    return low


def main() -> None:
    """Print the exponent of each column, and the medians of columns with more and fewer than 1,000 values."""
    rows = [line.split("\t")[14:] for line in Path(sys.argv[1]).read_text().splitlines()]
    found = []
    for column, values in zip(zip(*rows, strict=True), KAGGLE_VALUES, strict=True):
        counts = np.array(sorted(Counter(value for value in column if value).values(), reverse=True))
        found.append(exponent(counts, values))
        print(f"{values:9} values, {len(counts):5} seen: {found[-1]:.2f}")
    large = np.array(KAGGLE_VALUES) >= 1000
    for name, wanted in (("1,000 values and more", large), ("fewer", ~large)):
        print(f"median of the columns with {name}: {np.median(np.array(found)[wanted]):.2f}")


if __name__ == "__main__":
    main()
