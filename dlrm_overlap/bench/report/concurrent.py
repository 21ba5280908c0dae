"""What the rows of `bench concurrent` show together: a line for each strategy."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

CLASSES = ("G-long", "GC-equal", "C-long")
_CASE = ("computation", "calls", "communication", "megabytes")
_COPY_GB_PER_S = 4200.0  # read and written by a copy on an H200
_BOUND = 0.8


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each strategy: its mean fraction of the ideal speedup by class and in all, and its speedups.

    `best` counts the cases in which no strategy is faster. A last line, `best_of_all`, takes in each case the fastest.
    """
    by_case: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[column] for column in _CASE)
        by_case.setdefault(key, []).append(row)
    best = [min(case, key=lambda row: row["together_ms"]) for case in by_case.values()]
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        line = {"strategy": strategy, **_averages(own), "best": sum(row["strategy"] == strategy for row in best)}
        lines.append(line)
    return [*lines, {"strategy": "best_of_all", **_averages(best), "best": len(best)}]


def limit_by_memory(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean fraction of the ideal that the bandwidth of the GPU's memory allows, over all cases.

    A computation that moves more than `_BOUND` of what a copy does is taken to be bound by memory: beside it, the bytes
    that the communication must read and write take time of their own. Any other hides as many as it leaves room for. An
    all-to-all reads and writes the row of the rank for itself, too; the other two may find it in place.

    Example: c = 2 ms of a lookup and m = 1 ms of an all-gather that must move 0.84 GB: 2.2 ms at least at 4200 GB/s,
    speedup 3 / 2.2 of an ideal 3 / 2: 0.73.
    """
    found = []
    for row in {tuple(row[column] for column in _CASE): row for row in rows}.values():
        c, m = float(row["computation_ms"]), float(row["communication_ms"])
        moved_bytes = 2 * float(row["link_bytes"])  # read here, and as many written by the peers
        if row["communication"] == "all_to_all":
            moved_bytes *= int(row["world_size"]) / (int(row["world_size"]) - 1)
        moved_ms = moved_bytes / _COPY_GB_PER_S / 1e6
        computed_ms = float(row["hbm_bytes"]) / _COPY_GB_PER_S / 1e6
        bound = computed_ms > _BOUND * c
        least = max(c, m, (c if bound else computed_ms) + moved_ms)
        found.append(((c + m) / least - 1) / ((c + m) / max(c, m) - 1))
    return mean(found)


def _averages(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CLASSES:
        fractions = [row["fraction_of_ideal"] for row in rows if row["class"] == name]
        found[name] = mean(fractions) if fractions else None
    found["all"] = mean(row["fraction_of_ideal"] for row in rows)
    speedups = [row["speedup"] for row in rows]
    return found | {"mean_speedup": mean(speedups), "greatest_speedup": max(speedups)}


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on what was measured."""
    cases = {(row["computation"], row["calls"], row["communication"], row["megabytes"]): row["class"] for row in rows}
    counts = ", ".join(f"{sum(found == name for found in cases.values())} {name}" for name in CLASSES)
    return f"{len(cases)} cases on {rows[0]['world_size']} ranks ({counts}); fraction of the ideal speedup:"
