"""The tables of figures: some columns of each row, or a line for contenders that were measured against each other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlrm_overlap.bench.report.drawing import last_by_contender
from dlrm_overlap.bench.report.measured import Measured, Row, Run, Table, milliseconds, need, number, runs, shape

_BASELINES = ("baseline", "torchrec", "nccl_")
Cells = Mapping[str, Callable[[Row], Any]]
"""title -> the function that makes a row's cell"""


def columns(*names: str, cells: Cells | None = None) -> Callable[[Measured], Table]:
    """Return the function that makes a line a row: `cells`, then the columns `names` that some row has.

    A column of ms is shown as pages show times; others stand as they are in the file.
    """

    def table(measured: Measured) -> Table:
        there = [name for name in names if any(row.get(name) for row in measured.rows)]
        return [
            {title: make(row) for title, make in (cells or {}).items()}
            | {_title(name): _cell(row, name) for name in there}
            for row in measured.rows
        ]

    return table


def _title(column: str) -> str:
    for unit in ("ms", "us"):
        if column.endswith(f"_{unit}"):
            return f"{column.removesuffix(f'_{unit}').replace('_', ' ')}, {unit}"
    return column.replace("_", " ")


def _cell(row: Row, column: str) -> str | None:
    return milliseconds(number(row, column)) if column.endswith("_ms") else row.get(column)


def by_contender(groups: Callable[[Sequence[Row]], Sequence[Run]], *names: str) -> Callable[[Measured], Table]:
    """Return the function that makes a line a group: the columns `names` of its first row, and each contender's ms."""
    return lambda measured: [
        {_title(name): _cell(next(iter(group.values())), name) for name in names} | _medians(group)
        for group in groups(measured.rows)
    ]


def _medians(group: Run) -> dict[str, str]:
    return {f"{name}, ms": milliseconds(number(row, "median_ms")) for name, row in group.items()}


def stage_table(measured: Measured) -> Table:
    """Return a line a shape, the speedups first, since a page cuts wide tables."""
    table: Table = []
    for group in runs(measured.rows):
        speedups = {name: found for name, row in group.items() if (found := number(row, "speedup")) is not None}
        best = max(speedups, key=lambda name: speedups[name])
        known = {name: need(row, "median_ms") for name, row in group.items() if name.startswith(_BASELINES)}
        strongest = min(known, key=lambda name: known[name])
        over = known[strongest] / need(group[best], "median_ms")
        first = group["baseline"]
        cells = {"shape": shape(first).replace("\n", ", ")} | (
            {"optimizer": first["optimizer"]} if "optimizer" in first else {}
        )
        cells["best speedup over baseline"] = f"{speedups[best]:.2f}x ({best})"
        cells["over the strongest baseline"] = f"{over:.2f}x ({strongest})"
        table.append(cells | {"limit, ms": _cell(first, "limit_ms") or "-"} | _medians(group))
    return table


def programs_table(measured: Measured) -> Table:
    """Return a line a program: its tasks, and the times of all of them together."""
    table: Table = []
    for program in dict.fromkeys(row["program"] for row in measured.rows):
        own = [row for row in measured.rows if row["program"] == program]
        put, wait = (sum(need(row, column) for row in own) for column in ("put_us", "wait_us"))
        pooled = sum(need(row, "end_us") - need(row, "begin_us") for row in own) - put
        peers = sum(row["local"] == "False" for row in own)
        cells = {"program": program, "tasks": len(own), "for peers": peers, "pools, us": pooled}
        table.append(cells | {"counts and puts, us": put, "waits, us": wait})
    return table


def volume_table(measured: Measured) -> Table:
    """Return for each contender how long its stage is, for how much of it links are busy, and how busy at most."""
    return [
        {
            "contender": name,
            "stage, us": need(rows[0], "stage_us"),
            "sends within, us": sum(need(row, "end_us") - need(row, "begin_us") for row in rows if need(row, "bytes")),
            "bytes to peers, MB": sum(need(row, "bytes") for row in rows) / 1e6,
            "greatest rate, GB/s": max(need(row, "gb_per_s") for row in rows),
            "links can, GB/s": need(rows[0], "link_gb_per_s"),
        }
        for name, rows in last_by_contender(measured.rows).items()
    ]
