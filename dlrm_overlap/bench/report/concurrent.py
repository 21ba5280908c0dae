"""A summary of the rows of `bench concurrent`: a line for each strategy."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from dlrm_overlap.bench.two_roofs import Communication, Computation, preferred

CLASSES = ("G-long", "GC-equal", "C-long")
_CASE = ("computation", "calls", "communication", "megabytes")
_NUMBERS = ("fraction_of_ideal", "speedup", "together_ms")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each strategy: its mean fraction of the ideal speedup by class and in all, and its speedups.

    `best` counts the cases in which no strategy is faster. Of the last lines, `by_rule` takes in each case what
    `bench.two_roofs` prefers, or `serial`, and `best_of_all` the fastest.
    """
    rows = [{**row, **{name: float(row[name]) for name in _NUMBERS}} for row in rows]  # text, of a file's rows
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    chosen: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[column] for column in _CASE), []).append(row)
        chosen.setdefault(row["strategy"], []).append(row)
    best = {key: min(case, key=lambda row: row["together_ms"])["strategy"] for key, case in cases.items()}
    chosen["by_rule"] = [_preferred(case) for case in cases.values()]
    chosen["best_of_all"] = [row for row in rows if row["strategy"] == best[tuple(row[column] for column in _CASE)]]
    return [
        {"strategy": name, **_averages(own)}
        | {"best": sum(row["strategy"] == best[tuple(row[column] for column in _CASE)] for row in own)}
        for name, own in chosen.items()
    ]


def _preferred(case: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of the strategy that the rule prefers among those of a case."""
    by_strategy, row = {row["strategy"]: row for row in case}, case[0]
    computation = Computation(row["computation_kind"], float(row["flop"]), float(row["hbm_bytes"]))
    communication = Communication(row["communication"], float(row["megabytes"]) * 1e6)
    names = (*preferred(computation, communication, int(row["world_size"])), "serial")
    return next(by_strategy[name] for name in names if name in by_strategy)


def _averages(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CLASSES:
        fractions = [row["fraction_of_ideal"] for row in rows if row["class"] == name]
        found[name] = mean(fractions) if fractions else None
    found["all"] = mean(row["fraction_of_ideal"] for row in rows)
    speedups = [row["speedup"] for row in rows]
    return found | {"mean_speedup": mean(speedups), "greatest_speedup": max(speedups)}


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on the pairs that were measured."""
    cases = {(row["computation"], row["calls"], row["communication"], row["megabytes"]): row["class"] for row in rows}
    counts = ", ".join(f"{sum(found == name for found in cases.values())} {name}" for name in CLASSES)
    return f"{len(cases)} cases on {rows[0]['world_size']} ranks ({counts}); fraction of the ideal speedup:"
