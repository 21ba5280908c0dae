"""The table that `comm.choose` chooses by, fitted to the rows of `bench concurrent`.

Everything is a least-squares fit of logarithms, so that a case of 0.1 ms counts as much as one of 5.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.comm import choose
from dlrm_overlap.comm.choose import Communication, Computation, Table
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.doctor import environment

Row = Mapping[str, Any]

RIGHT = 0.02
"""a choice is right if it takes at most so much longer, relatively, than the best strategy"""

_CASE = ("computation", "calls", "communication", "megabytes")
_ENVIRONMENT = ("gpu", "torch", "cuda", "nccl", "commit")
_SERIAL = "serial"
_ALONE = "_alone_ms"
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


def write_table(path: Path, rows: Sequence[Row]) -> str:
    """Write the table of `rows` to `path` as JSON; return a line on how well it chooses in these very cases.

    Raises:
        InputError: if the file cannot be written.
    """
    table = fit_table([{**environment(), **row} for row in rows])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"--write_table: {path} cannot be written ({error.strerror}); free it, or give another"
        ) from None
    losses = [each.lost for each in replay(rows, table)]
    right = sum(lost <= RIGHT for lost in losses)
    return (
        f"slowdowns in {path}: within {RIGHT:.0%} of the best strategy in {right} of {len(losses)} cases, at most "
        f"{max(losses):.1%} lost"
    )


class Replay(NamedTuple):
    """What the table's choice costs in a case that has been measured."""

    case: tuple[Any, ...]
    chosen: str
    best: str
    lost: float
    """(time of the chosen strategy - time of the best) / time of the best"""


def replay(rows: Sequence[Row], table: Table) -> list[Replay]:
    """Choose by `table` in each case of `rows`, by its shapes alone, and compare with what was measured."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in _CASE), {})[row["strategy"]] = row
    found = []
    for case, by_label in cases.items():
        row = next(iter(by_label.values()))
        world_size = int(row["world_size"])
        choice = choose.choose(computation_of(row), communication_of(row), world_size, table)
        taken = {label: float(each["together_ms"]) for label, each in by_label.items()}
        best = min(taken, key=lambda label: taken[label])
        found.append(Replay(case, choice.label, best, taken[choice.label] / taken[best] - 1))
    return found


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
    """Return a, b and what is spent in any case in ms."""
    times = [(float(row["computation_ms"]), float(row[alone]), row["together_ms"]) for row in rows]

    def error(a: float, b: float, extra_ms: float) -> float:
        return _misfit((choose.together_ms(c, m, a, b, extra_ms), both) for c, m, both in times)

    starts = [[a, b, 0.01] for a in (1.05, 1.3, 2.0) for b in (1.05, 1.3, 2.0)]
    found = [_descend(error, start, least=[1.0, 1.0, 0.0]) for start in starts]
    return [_round(each) for each in min(found, key=lambda each: error(*each))]


def _misfit(pairs: Iterable[tuple[float, Any]]) -> float:
    """Return the sum of the squared logarithms of predicted over measured."""
    return sum(math.log(max(predicted, 1e-6) / float(measured)) ** 2 for predicted, measured in pairs)


def _descend(error: Callable[..., float], start: Sequence[float], least: Sequence[float]) -> list[float]:
    """Return the numbers of least error that are found by changing one after the other by ever smaller factors."""
    best, factor = list(start), 2.0
    lowest = error(*best)
    while factor > 1.0002:
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
