"""In how many cases of `bench concurrent` would a choice be called right that knows what each strategy truly takes?

    python docs/results/concurrent_noise.py docs/results/concurrent_captured.csv

The measured medians are taken for the truth, and measured again in thought: as medians of so many repetitions, each off
by a normal deviate as wide as the repetitions of its row were, and all of a strategy by one more, of `BETWEEN`. That is
how far the medians of the same work alone lie apart in different cases, which the first line tells. Right is what takes
at most 2% longer than the least of the new medians.
"""

import csv
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev

_RIGHT = 0.02
_TRIALS = 100
_BETWEEN = (0.0, 0.005, 0.01)  # relative
_DEVIATIONS = {5: 1.80, 15: 2.25}  # repetitions -> from the 10th to the 90th percentile, interpolated, of a normal law
_MOST = 0.05  # relative, of a row's deviation: one repetition that was disturbed is not how wide they are
_ALONE = "_alone_ms"

Row = Mapping[str, str]


def by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each case."""
    cases: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        cases[row["computation"], row["calls"], row["communication"], row["megabytes"]].append(row)
    return list(cases.values())


def spread_between_cases(cases: Sequence[Sequence[Row]]) -> float:
    """Return the median of the relative deviations of the same work's medians alone, over the cases that have it."""
    alone: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, *_ in cases:
        alone[row["computation"], row["calls"]].append(float(row["computation_ms"]))
        for name in row:
            if name.endswith(_ALONE) and row[name]:
                alone[name, row["communication"], row["megabytes"]].append(float(row[name]))
    return median(stdev(times) / mean(times) for times in alone.values() if len(times) > 2)


def count_right(cases: Sequence[Sequence[Row]], between: float, generator: random.Random) -> int:
    """Return in how many cases the strategy that is truly the fastest is right when all are measured again."""
    right = 0
    for rows in cases:
        times = [float(row["together_ms"]) for row in rows]
        again = [_measure(row, between, generator) for row in rows]
        right += again[times.index(min(times))] <= (1 + _RIGHT) * min(again)
    return right


def _measure(row: Row, between: float, generator: random.Random) -> float:
    time, repetitions = float(row["together_ms"]), int(row["repetitions"])
    if repetitions not in _DEVIATIONS:
        sys.exit(f"{repetitions} repetitions: measure with --repetitions 15, whose spread is known here")
    width = (float(row["p90_ms"]) - float(row["p10_ms"])) / _DEVIATIONS[repetitions] / time
    found = median(generator.gauss(1.0, min(width, _MOST)) for _ in range(repetitions))
    return time * found * generator.gauss(1.0, between)


def main() -> None:
    """Print a line for each spread between cases."""
    cases = by_case(list(csv.DictReader(Path(sys.argv[1]).read_text().splitlines())))
    print(f"the same work alone, over cases: {spread_between_cases(cases):.2%}")
    for between in _BETWEEN:
        generator = random.Random(0)
        right = [count_right(cases, between, generator) for _ in range(_TRIALS)]
        print(f"apart by {between:.1%}: {mean(right):.0f} of {len(cases)} right, {min(right)} to {max(right)}")


if __name__ == "__main__":
    main()
