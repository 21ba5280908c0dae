"""A summary of the rows of `bench concurrent`: a line for each strategy."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

CLASSES = ("G-long", "GC-equal", "C-long")
_CASE = ("computation", "calls", "communication", "megabytes")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each strategy: its mean fraction of the ideal speedup by class and in all, and its speedup.

    `best` counts the cases in which no strategy is faster; of the last line, `best_of_all`, the fastest is taken.
    """
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    chosen: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[column] for column in _CASE), []).append(row)
        chosen.setdefault(row["strategy"], []).append(row)
    best = [min(case, key=lambda row: float(row["together_ms"])) for case in cases.values()]
    chosen["best_of_all"] = best
    return [
        {"strategy": name, **_averages(own), "best": sum(any(row is each for each in best) for row in own)}
        for name, own in chosen.items()
    ]


def _averages(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def average(own: Sequence[Mapping[str, Any]], column: str) -> float | None:
        return mean(float(row[column]) for row in own) if own else None

    found = {name: average([row for row in rows if row["class"] == name], "fraction_of_ideal") for name in CLASSES}
    return found | {"all": average(rows, "fraction_of_ideal"), "mean_speedup": average(rows, "speedup")}
