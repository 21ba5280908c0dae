"""What the rows of `bench concurrent` show together: a line for each strategy."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

CLASSES = ("G-long", "GC-equal", "C-long")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each strategy: its mean fraction of the ideal speedup by class and in all, and its speedups.

    `best` counts the cases in which no strategy is faster. A last line, `best_of_all`, takes in each case the fastest.
    """
    by_case: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[column] for column in ("computation", "calls", "communication", "megabytes"))
        by_case.setdefault(key, []).append(row)
    best = [min(case, key=lambda row: row["together_ms"]) for case in by_case.values()]
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        line = {"strategy": strategy, **_averages(own), "best": sum(row["strategy"] == strategy for row in best)}
        lines.append(line)
    return [*lines, {"strategy": "best_of_all", **_averages(best), "best": len(best)}]


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
