"""In how many cases of `bench concurrent` would a choice be called right that knows what each strategy truly takes?

    python docs/results/concurrent_noise.py docs/results/concurrent_captured.csv
    python docs/results/concurrent_noise.py docs/results/concurrent_repeated.csv docs/results/concurrent_sizes.csv

Of two files it tells, for the cases that both have, how the fastest strategy of the one does in the other. Of one:
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
        cases[_name(row)].append(row)
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


def losses_of_the_other_run(chosen: Sequence[Sequence[Row]], judged: Sequence[Sequence[Row]]) -> list[float]:
    """Return what the fastest strategy of `chosen` loses in `judged`, in each case and of the strategies of both."""
    found = []
    times = [{row["strategy"]: float(row["together_ms"]) for row in rows} for rows in judged]
    by_name = {_name(rows[0]): each for rows, each in zip(judged, times, strict=True)}
    for rows in chosen:
        there = by_name.get(_name(rows[0]), {})
        if both := [row for row in rows if row["strategy"] in there]:
            fastest = min(both, key=lambda row: float(row["together_ms"]))["strategy"]
            found.append(there[fastest] / min(there[row["strategy"]] for row in both) - 1)
    return found


def _name(row: Row) -> tuple[str, ...]:
    return row["computation"], row["calls"], row["communication"], row["megabytes"]


def _compare(first: Sequence[Sequence[Row]], second: Sequence[Sequence[Row]]) -> None:
    """Print a line for each direction."""
    for chosen, judged in ((first, second), (second, first)):
        losses = losses_of_the_other_run(chosen, judged)
        right = sum(lost <= _RIGHT for lost in losses)
        print(
            f"the fastest of a run is right in {right} of {len(losses)} cases of the other, {mean(losses):.1%} lost on "
            f"average, {max(losses):.1%} at most"
        )


def main() -> None:
    """Print a line for each spread between cases, or for each of two runs."""
    cases, *others = (by_case(list(csv.DictReader(Path(each).read_text().splitlines()))) for each in sys.argv[1:])
    if others:
        _compare(cases, others[0])
        return
    print(f"the same work alone, over cases: {spread_between_cases(cases):.2%}")
    for between in _BETWEEN:
        generator = random.Random(0)
        right = [count_right(cases, between, generator) for _ in range(_TRIALS)]
        print(f"apart by {between:.1%}: {mean(right):.0f} of {len(cases)} right, {min(right)} to {max(right)}")


if __name__ == "__main__":
    main()
