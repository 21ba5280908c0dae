"""The table that `comm.choose` chooses by, fitted to the rows of `bench concurrent`, and how well it chooses.

Every fit is one of least squares of logarithms, so that a case of 0.1 ms counts as much as one of 5. Of the strategies
the table keeps those alone without which choices would lose more.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.comm import choose
from dlrm_overlap.comm.choose import Communication, Computation, Slowdown, Table
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import environment

Row = Mapping[str, Any]
Cases = Mapping[tuple[Any, ...], Mapping[str, Row]]

RIGHT = 0.02
"""a choice is right if it takes at most so much longer, relatively, than the best strategy"""

_CASE = ("computation", "calls", "communication", "megabytes")
_ENVIRONMENT = ("gpu", "torch", "cuda", "nccl", "commit")
_SERIAL = "serial"
_ALONE = "_alone_ms"
_NONE = (None, "")  # in a row's column of what did not take part
_STARTS = ((1.05, 1.05, 0.01, 0.05), (1.5, 1.05, 0.01, 0.05), (1.5, 1.5, 0.01, 0.05))
_LEAST = (1.0, 0.5, 0.0, 0.0)
_USUAL, _WEIGHT = 1.3, 0.002  # where few cases leave a and b undecided, they are about so much
_PARTS = 5
_ADDS = 0.0005
_FINEST = 1.002  # the last factor by which a fit changes a number
_DIGITS = 4


class Replay(NamedTuple):
    """What a choice costs in a case that has been measured."""

    case: tuple[Any, ...]
    chosen: str
    best: str
    lost: float
    """(time of the chosen strategy - time of the best) / time of the best"""


def write_table(path: Path, rows: Sequence[Row]) -> str:
    """Write the table of `rows` to `path` as JSON; return a line on how well it chooses.

    Raises:
        InputError: if the file cannot be written.
    """
    rows = [{**environment(), **row} for row in rows]
    table = fit_table(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_as_text(table))
    except OSError as error:
        raise InputError(
            f"--write_table: {path} cannot be written ({error.strerror}); free it, or give another"
        ) from None
    text = f"slowdowns in {path}: {_tell(replay(rows, table))}"
    if unknown := cross_validate(rows):
        text += f". Of cases that were left out when a table was fitted to the others: {_tell(unknown)}"
    if strange := leave_products_out(rows):
        text += f". Of products that were left out with all their cases: {_tell(strange)}"
    return text


def _as_text(table: Table) -> str:
    """Return the table as JSON, with a line for each case."""
    cases = ",\n".join(f"  {json.dumps(case)}" for case in table["cases"])
    return json.dumps(table | {"cases": []}, indent=1).replace('"cases": []', f'"cases": [\n{cases}\n ]') + "\n"


def _tell(found: Sequence[Replay]) -> str:
    right = sum(each.lost <= RIGHT for each in found)
    most, average = max(each.lost for each in found), sum(each.lost for each in found) / len(found)
    return (
        f"{right} of {len(found)} choices within {RIGHT:.0%} of the best strategy, {average:.1%} lost on average, "
        f"{most:.1%} at most"
    )


def fit_table(rows: Sequence[Row]) -> Table:
    """Return the table of the rows of one run, numbers as text or not, as a CSV file or the figure gives them."""
    cases = _by_case(rows)
    firsts = [next(iter(case.values())) for case in cases.values()]
    table: Table = {
        "measured_on": {key: rows[0][key] for key in _ENVIRONMENT if rows[0].get(key)},
        "world_size": int(rows[0]["world_size"]),
        "computations": _fit_computations(firsts),
        "communications": _fit_communications(firsts),
    }
    kept = _worthwhile(cases)
    strategies = {label: _fit_strategy([row for row in rows if row["strategy"] == label], table) for label in kept}
    known = [_known_case(case, kept, table) for case in cases.values()]
    return table | {"strategies": strategies, "cases": known}


def _known_case(by_label: Mapping[str, Row], labels: Sequence[str], table: Table) -> dict[str, Any]:
    """Return what the table keeps of a case: by what it is told apart, and the times of the strategies `labels`."""
    row = next(iter(by_label.values()))
    case = choose.Case.of(computation_of(row), communication_of(row), int(row["world_size"]), table)
    times = {label: _round(float(by_label[label]["together_ms"])) for label in labels if label in by_label}
    return {"case": [_round(each) if isinstance(each, float) else each for each in case], "together_ms": times}


def replay(rows: Sequence[Row], table: Table) -> list[Replay]:
    """Choose by `table` in each case of `rows`, by its shapes alone, and compare with what was measured."""
    found = []
    for case, by_label in _by_case(rows).items():
        row = next(iter(by_label.values()))
        choice = choose.choose(computation_of(row), communication_of(row), int(row["world_size"]), table)
        taken = {label: float(each["together_ms"]) for label, each in by_label.items()}
        best = min(taken, key=lambda label: taken[label])
        found.append(Replay(case, choice.label, best, taken[choice.label] / taken[best] - 1))
    return found


def cross_validate(rows: Sequence[Row]) -> list[Replay]:
    """Cut the cases into parts, and choose in each part by a table that is fitted to the other parts."""
    cases = list(_by_case(rows))
    return _choose_for(rows, [cases[part::_PARTS] for part in range(_PARTS)])


def leave_products_out(rows: Sequence[Row]) -> list[Replay]:
    """Choose for each product by a table that is fitted without it, but knows another one that is bound alike."""
    table = fit_table(rows)
    products: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
    for case, by_label in _by_case(rows).items():
        work = computation_of(next(iter(by_label.values())))
        if work.flop:
            products.setdefault(choose.bound(work, table), {}).setdefault(case[0], []).append(case)
    return _choose_for(rows, [cases for alike in products.values() if len(alike) > 1 for cases in alike.values()])


def _choose_for(rows: Sequence[Row], parts: Sequence[Sequence[tuple[Any, ...]]]) -> list[Replay]:
    """Choose for the cases of each of `parts` by a table that is fitted to all others."""
    cases, found = _by_case(rows), []
    for part in map(set, parts):
        tested, fitted = (
            [row for case, by_label in cases.items() if (case in part) == inside for row in by_label.values()]
            for inside in (True, False)
        )
        if tested and fitted:
            found += replay(tested, fit_table(fitted))
    return found


def computation_of(row: Row) -> Computation:
    """Return what the computation of a row does."""
    return Computation(row["computation_kind"], float(row["flop"]), float(row["hbm_bytes"]), int(row["calls"]))


def communication_of(row: Row) -> Communication:
    """Return what the communication of a row moves."""
    return Communication(str(row["communication"]), float(row["megabytes"]) * 1e6)


def _by_case(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the rows of each case, by strategy."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in _CASE), {})[row["strategy"]] = row
    return cases


def _fit_computations(cases: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the rates of each kind of computation, and a call's latency, that fit the times alone best."""
    found = {}
    for kind in dict.fromkeys(row["computation_kind"] for row in cases):
        own = [row for row in cases if row["computation_kind"] == kind]

        def error(*rates: float, own: Sequence[Row] = own, kind: str = kind) -> float:
            table = {"computations": {kind: dict(zip(("gb_per_s", "call_us", "tflop_per_s"), rates, strict=False))}}
            return _misfit((choose.computation_ms(computation_of(row), table), row["computation_ms"]) for row in own)

        count = 3 if any(float(row["flop"]) for row in own) else 2
        best = _descend(error, [3000.0, 2.0, 500.0][:count], [1e-3, 0.0, 1e-3][:count])
        found[kind] = dict(zip(("gb_per_s", "call_us", "tflop_per_s"), map(_round, best), strict=False))
    return found


def _fit_communications(cases: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return latency and rate of each implementation of each kind of communication."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in dict.fromkeys(row["communication"] for row in cases):
        own = [row for row in cases if row["communication"] == kind]
        columns = [each for each in own[0] if each.endswith(_ALONE) and any(row[each] not in _NONE for row in own)]
        found[kind] = {column.removesuffix(_ALONE): _fit_line(own, column) for column in columns}
    return found


def _fit_line(cases: Sequence[Row], column: str) -> dict[str, float]:
    cases = [row for row in cases if row[column] not in _NONE]
    name = column.removesuffix(_ALONE)
    sent = [choose.sent_bytes(communication_of(row), int(row["world_size"]), name) for row in cases]

    def error(latency_us: float, gb_per_s: float) -> float:
        predicted = (latency_us / 1e3 + each / gb_per_s / 1e6 for each in sent)
        return _misfit(zip(predicted, (row[column] for row in cases), strict=True))

    latency_us, gb_per_s = _descend(error, [20.0, 300.0], [0.0, 1e-3])
    return {"latency_us": _round(latency_us), "gb_per_s": _round(gb_per_s)}


def _fit_strategy(rows: Sequence[Row], table: Table) -> dict[str, Any]:
    """Return what the table has of a strategy, from its rows."""
    label, implementation = rows[0]["strategy"], rows[0]["implementation"]
    name, _, share = label.rpartition("_")
    found = {"strategy": name, "share": int(share)} if share.isdigit() else {"strategy": label, "share": None}
    if label == _SERIAL:
        return found | {"implementation": None}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{choose.bound(computation_of(row), table)}, {row['communication']}", []).append(row)
    column = f"{implementation}{_ALONE}"
    slowdowns = {key: list(map(_round, _fit_slowdown(own, column))) for key, own in groups.items()}
    return found | {"implementation": implementation, "slowdowns": slowdowns}


def _fit_slowdown(rows: Sequence[Row], alone: str) -> Slowdown:
    columns = ("computation_ms", alone, "together_ms")
    times = [(*(float(row[column]) for column in columns), int(row["calls"])) for row in rows]

    def error(*numbers: float) -> float:
        a, b, lost_ms, waited = numbers
        total = _WEIGHT * (math.log(a / _USUAL) ** 2 + math.log(b / _USUAL) ** 2)
        for c, m, both, calls in times:
            total += math.log(choose.together_ms(c, m, c / calls, (a, b, lost_ms, waited)) / both) ** 2
        return total

    found = [_descend(error, start, _LEAST) for start in _STARTS]
    return Slowdown(*min(found, key=lambda each: error(*each)))


def _worthwhile(cases: Cases) -> list[str]:
    """Return the strategies to choose from: each time the one with which the best of those kept loses least on average.

    Those that spare less than `_ADDS` on average over the cases are left out: few cases cannot say when they are right.
    """
    losses = list(_losses(cases).values())
    lost, kept = [choose.MOST_LOST] * len(losses), []
    while True:
        with_it = {
            label: [min(least, case.get(label, least)) for least, case in zip(lost, losses, strict=True)]
            for label in dict.fromkeys(label for case in losses for label in case)
        }
        best = min(with_it, key=lambda label: sum(with_it[label]))
        if kept and sum(lost) - sum(with_it[best]) < _ADDS * len(losses):
            return kept
        kept.append(best)
        lost = with_it[best]


def _losses(cases: Cases) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return by strategy what each loses in each case to the best one."""
    found = {}
    for case, rows in cases.items():
        taken = {label: float(row["together_ms"]) for label, row in rows.items()}
        found[case] = {label: ms / min(taken.values()) - 1 for label, ms in taken.items()}
    return found


def _misfit(pairs: Iterable[tuple[float, Any]]) -> float:
    """Return the sum of the squared logarithms of predicted over measured."""
    return sum(math.log(max(predicted, 1e-6) / float(measured)) ** 2 for predicted, measured in pairs)


def _descend(error: Callable[..., float], start: Sequence[float], least: Sequence[float]) -> list[float]:
    """Return the numbers of least error that are found by changing one or two at a time, by ever smaller factors.

    Args:
        error: of the numbers.
        start: begins there; a number that has come down to 0 can come back by a part of its start.
        least: bounds of the numbers.
    """
    indices = range(len(start))
    moves = [[(i, up)] for i in indices for up in (1, -1)]
    moves += [[(i, up), (j, down)] for i in indices for j in range(i) for up in (1, -1) for down in (1, -1)]
    best, lowest, factor = list(start), error(*start), 2.0
    while factor > _FINEST:
        better = False
        for move in moves:
            tried = list(best)
            for i, sign in move:
                stepped = best[i] * factor**sign
                if least[i] == 0.0:
                    stepped = stepped + start[i] * (factor - 1) / 10 * sign
                tried[i] = max(least[i], stepped)
            if (found := error(*tried)) < lowest:
                best, lowest, better = tried, found, True
        if not better:
            factor = math.sqrt(factor)
    return best


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
