"""The table that `comm.choose` chooses by, fitted to the rows of `bench concurrent`.

Everything is a least-squares fit of logarithms, so that a case of 0.1 ms counts as much as one of 5.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlrm_overlap.comm import choose
from dlrm_overlap.comm.choose import Communication, Computation, Table

Row = Mapping[str, Any]

_CASE = ("computation", "calls", "communication", "megabytes")
_ENVIRONMENT = ("gpu", "torch", "cuda", "nccl", "commit")
_SERIAL = "serial"
_ALONE = "_alone_ms"
_SLOWDOWNS = [1.0 + 0.05 * step for step in range(61)]
_EXTRAS_MS = [0.0, 0.005, 0.01, 0.02, 0.03, 0.05]
_DIGITS = 4


def fit_table(rows: Sequence[Row]) -> Table:
    """Return the table of the rows of one run, numbers as text or not, as a CSV file or the figure gives them."""
    cases = {tuple(row[key] for key in _CASE): row for row in rows}
    table: Table = {
        "measured_on": {key: rows[0][key] for key in _ENVIRONMENT if rows[0].get(key)},
        "world_size": int(rows[0]["world_size"]),
        "computations": _fit_computations(cases.values()),
        "communications": _fit_communications(cases.values()),
    }
    table["strategies"] = {
        label: _fit_strategy([row for row in rows if row["strategy"] == label], table)
        for label in dict.fromkeys(row["strategy"] for row in rows)
    }
    return table


def computation_of(row: Row) -> Computation:
    """Return what the computation of a row does."""
    return Computation(float(row["flop"]), float(row["hbm_bytes"]), int(row["calls"]))


def communication_of(row: Row) -> Communication:
    """Return what the communication of a row moves."""
    return Communication(str(row["communication"]), float(row["megabytes"]) * 1e6)


def _fit_computations(cases: Iterable[Row]) -> dict[str, Any]:
    """Return the rates of products and of memory, and a call's latency: the three that fit the times alone best."""
    cases = list(cases)

    def error(tflop_per_s: float, gb_per_s: float, call_us: float) -> float:
        rates = {"products": {"tflop_per_s": tflop_per_s}, "memory": {"gb_per_s": gb_per_s}, "call_us": call_us}
        table = {"computations": rates}
        return _misfit((choose.computation_ms(computation_of(row), table), row["computation_ms"]) for row in cases)

    best = _descend(error, [500.0, 3000.0, 2.0], least=[1e-3, 1e-3, 0.0])
    return {
        "products": {"tflop_per_s": _round(best[0])},
        "memory": {"gb_per_s": _round(best[1])},
        "call_us": _round(best[2]),
    }


def _fit_communications(cases: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return latency and rate of each implementation of each kind of communication."""
    found: dict[str, dict[str, Any]] = {}
    for row in (cases := list(cases)):
        found.setdefault(row["communication"], {})
    for kind, implementations in found.items():
        own = [row for row in cases if row["communication"] == kind]
        for column in own[0]:
            if column.endswith(_ALONE) and all(row[column] not in (None, "") for row in own):
                implementations[column.removesuffix(_ALONE)] = _fit_line(own, column)
    return found


def _fit_line(cases: Sequence[Row], column: str) -> dict[str, float]:
    def error(latency_us: float, gb_per_s: float) -> float:
        rates = {"latency_us": latency_us, "gb_per_s": gb_per_s}
        pairs = []
        for row in cases:
            communication = communication_of(row)
            table = {"communications": {communication.kind: {"": rates}}}
            predicted = choose.communication_ms(communication, int(row["world_size"]), table, "")
            pairs.append((predicted, row[column]))
        return _misfit(pairs)

    latency_us, gb_per_s = _descend(error, [20.0, 300.0], least=[0.0, 1e-3])
    return {"latency_us": _round(latency_us), "gb_per_s": _round(gb_per_s)}


def _fit_strategy(rows: Sequence[Row], table: Table) -> dict[str, Any]:
    """Return what the table has of a strategy, from its rows."""
    name, _, share = rows[0]["strategy"].rpartition("_")
    name, share = (name, int(share)) if share.isdigit() else (rows[0]["strategy"], None)
    if name == _SERIAL:
        return {"strategy": name, "share": share, "implementation": None}
    slowdowns: dict[str, list[float]] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = f"{choose.bound(computation_of(row), table)} {row['communication']}"
        groups.setdefault(key, []).append(row)
    implementation = rows[0]["implementation"]
    for key, own in groups.items():
        slowdowns[key] = _fit_slowdowns(own, f"{implementation}{_ALONE}")
    return {"strategy": name, "share": share, "implementation": implementation, "slowdowns": slowdowns}


def _fit_slowdowns(rows: Sequence[Row], alone: str) -> list[float]:
    """Return a, b and what is spent in any case in ms, by all that may be tried."""
    times = [(float(row["computation_ms"]), float(row[alone]), row["together_ms"]) for row in rows]

    def error(a: float, b: float, extra_ms: float) -> float:
        return _misfit((choose.together_ms(c, m, a, b, extra_ms), both) for c, m, both in times)

    tried = ((a, b, extra) for a in _SLOWDOWNS for b in _SLOWDOWNS for extra in _EXTRAS_MS)
    return [_round(each) for each in min(tried, key=lambda each: (error(*each), each))]


def _misfit(pairs: Iterable[tuple[float, Any]]) -> float:
    """Return the sum of the squared logarithms of predicted over measured."""
    return sum(math.log(max(predicted, 1e-6) / float(measured)) ** 2 for predicted, measured in pairs)


def _descend(error: Callable[..., float], start: Sequence[float], least: Sequence[float]) -> list[float]:
    """Return the numbers of least error that are found by changing one after the other by ever smaller factors."""
    best, factor = list(start), 2.0
    lowest = error(*best)
    while factor > 1.001:
        better = False
        for index, floor in enumerate(least):
            for value in (best[index] * factor, best[index] / factor, floor):
                tried = [*best[:index], max(floor, value), *best[index + 1 :]]
                if (found := error(*tried)) < lowest:
                    best, lowest, better = tried, found, True
        if not better:
            factor = math.sqrt(factor)
    return best


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
