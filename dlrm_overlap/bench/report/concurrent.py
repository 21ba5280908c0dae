"""A summary of the rows of `bench concurrent`: a line for each strategy."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from dlrm_overlap.bench.two_roofs import Communication, Computation, preferred

CLASSES = ("G-long", "GC-equal", "C-long")
_CASE = ("computation", "calls", "communication", "megabytes")
_COPY_GB_PER_S = 4200.0  # read and written by a copy on an H200
_BOUND = 0.8


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each strategy: its mean fraction of the ideal speedup by class and in all, and its speedups.

    `best` counts the cases in which no strategy is faster. Of the last lines, `by_rule` takes in each case what
    `bench.two_roofs` prefers, or `serial`, and `best_of_all` the fastest.
    """
    by_case: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[column] for column in _CASE)
        by_case.setdefault(key, []).append(row)
    best = [min(case, key=lambda row: row["together_ms"]) for case in by_case.values()]
    ruled = [_preferred(case) for case in by_case.values()]
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        line = {"strategy": strategy, **_averages(own), "best": sum(row["strategy"] == strategy for row in best)}
        lines.append(line)
    for name, chosen in (("by_rule", ruled), ("best_of_all", best)):
        lines.append({"strategy": name, **_averages(chosen), "best": sum(map(_same, chosen, best))})
    return lines


def _preferred(case: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of the strategy that the rule prefers among those of a case."""
    by_strategy, row = {row["strategy"]: row for row in case}, case[0]
    computation = Computation(row["computation_kind"], float(row["flop"]), float(row["hbm_bytes"]))
    communication = Communication(row["communication"], float(row["megabytes"]) * 1e6)
    names = (*preferred(computation, communication, int(row["world_size"])), "serial")
    return next(by_strategy[name] for name in names if name in by_strategy)


def _same(chosen: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    return chosen["strategy"] == best["strategy"]


def limit_by_memory(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean fraction of the ideal that the bandwidth of the GPU's memory allows, over all cases.

    A computation that moves bytes at more than `_BOUND` of a copy's rate counts as bound by memory: beside it, the
    bytes that the communication must read and write take time of their own. Any other hides as many as it leaves room
    for. An all-to-all reads and writes the row of the rank for itself, too; the other two may find it in place.

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
    """Return a line on the pairs that were measured."""
    cases = {(row["computation"], row["calls"], row["communication"], row["megabytes"]): row["class"] for row in rows}
    counts = ", ".join(f"{sum(found == name for found in cases.values())} {name}" for name in CLASSES)
    return f"{len(cases)} cases on {rows[0]['world_size']} ranks ({counts}); fraction of the ideal speedup:"
