"""The drawings of figures: bars for most, and stacks, lines, lanes and areas for those whose rows are no bars."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlrm_overlap.bench.report.measured import Measured, Row, Run, contenders, milliseconds, need, number, trusted
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, looks
from dlrm_overlap.bench.request import CollectivesRequest

Groups = Callable[[Sequence[Row]], Sequence[Run]]
"""makes groups of bars of rows"""
Label = Callable[[Row], str]
"""names a group of bars by its first row"""

_MOST_GROUPS = 8  # of a panel
_SPAN = 0.84  # of the room of a group of bars
_LEAST_BARS = 3  # of a group, whose room fewer bars do not fill
_FEW_GROUPS, _FEW_BARS = 6, 31  # of a panel: beyond, numbers stand upright
_CUT = 1.6  # of NCCL's time, where the plot of collectives ends
_MEDIAN = {"median_ms": "ms, median"}


def each_row(rows: Sequence[Row]) -> list[Run]:
    """Return a group for each row."""
    return [{row["contender"]: row} for row in rows]


def each_column(columns: Mapping[str, str]) -> Groups:
    """Return the function that makes a group of each row, with a bar for each of `columns`, column -> name."""
    return lambda rows: [{name: {**row, "median_ms": row[column]} for column, name in columns.items()} for row in rows]


def draw_bars(
    measured: Measured,
    groups: Groups,
    label: Label,
    columns: Mapping[str, str] = _MEDIAN,
    limit: str | None = None,
    over: str | None = None,
    limit_name: str = "limit of the hardware",
    cut: float = math.inf,
) -> Picture:
    """Draw groups of bars, of many groups some below the others.

    Args:
        measured: the rows.
        groups: makes the groups of them.
        label: names a group.
        columns: column -> label of its axis; each has panels of its own.
        limit: column of the line across the bars of the first of `columns`.
        over: contender whose value the others are divided by.
        limit_name: of the line across.
        cut: height at which a bar ends, with an arrow.
    """
    found = groups(measured.rows)
    lines = math.ceil(len(found) / _MOST_GROUPS)
    size = math.ceil(len(found) / lines)
    panels = [(column, found[i : i + size]) for column in columns for i in range(0, len(found), size)]
    picture = Picture(0.8 + 2.6 * len(panels), rows=len(panels))
    for axes, (column, part) in zip(picture.panels, panels, strict=True):
        line = limit if column == next(iter(columns)) else None
        bars(axes, part, [label(next(iter(group.values()))) for group in part], column, line, over, limit_name, cut)
        axes.set_ylabel(f"time / {over}'s" if over else columns[column])
    picture.legend(picture.panels[0])
    return picture


def bars(
    axes: Any,
    groups: Sequence[Run],
    labels: Sequence[str],
    column: str = "median_ms",
    limit: str | None = None,
    over: str | None = None,
    limit_name: str = "limit of the hardware",
    cut: float = math.inf,
) -> None:
    """Draw each group's values side by side, with the numbers above the bars: see `draw_bars`.

    With `over` the ms of that contender are below each group's label. A bar of dots is of a contender whose results
    were not the reference's.
    """
    names = contenders(groups)
    alone = all(len(group) == 1 for group in groups)
    width = _SPAN / (2 if alone else max(len(names), _LEAST_BARS))
    upright = not alone and (len(groups) > _FEW_GROUPS or len(groups) * len(names) > _FEW_BARS)
    text: dict[str, Any] = {
        "fontsize": 5.5 if upright else 6.5,
        "rotation": 90 if upright else 0,
        "padding": 1.5,
        "zorder": 4,
    }
    text["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}  # readable where the limit crosses it
    rows = [row for group in groups for row in group.values()]
    if all(number(row, column) is None for row in rows):
        need(rows[0], column)
    bases = [need(group[over], column) if over else 1.0 for group in groups]
    for name, look in looks(names).items():
        aside = 0.0 if alone else (names.index(name) - (len(names) - 1) / 2) * width
        for place, (group, base) in enumerate(zip(groups, bases, strict=True)):
            if name not in group or (value := number(group[name], column)) is None:
                continue
            height = value / base
            dotted = {} if trusted(group[name]) else {"linestyle": ":", "alpha": 0.5}
            style = {"color": look.colour, "hatch": look.hatch, **EDGE, **dotted}
            drawn = axes.bar(place + aside, min(height, cut), width * 0.94, **style)
            written = f"{height:.2f}" if over else milliseconds(height)
            axes.bar_label(drawn, [f"{written} \u2191" if height > cut else written], **text)
            _name_once(axes, drawn, name)
    for place, (group, base) in enumerate(zip(groups, bases, strict=True)):
        if limit and (bound := number(next(iter(group.values())), limit)) is not None:
            across = axes.hlines(bound / base, place - _SPAN / 2, place + _SPAN / 2, zorder=3, **LIMIT)
            _name_once(axes, across, limit_name)
    if not all(map(trusted, rows)):
        axes.bar(0, 0, color="white", **EDGE, linestyle=":", label="dotted: results differ")
    if over:
        labels = [f"{each}\n{over} {milliseconds(base)} ms" for each, base in zip(labels, bases, strict=True)]
    axes.set_xticks(range(len(groups)), labels, fontsize=6 if len(groups) > 6 else 7)


def _name_once(axes: Any, drawn: Any, name: str) -> None:
    """Name the drawn thing in the legend, once."""
    if name not in axes.get_legend_handles_labels()[1]:
        drawn.set_label(name)


_TIMELINE = {"compute": "#c6dbef", "exposed": "#fd8d3c", "copying": "#525252", "idle": "#ffffff"}


def draw_timeline(measured: Measured) -> Picture:
    """Draw a stack of the parts of a traced step for each contender and rank."""
    picture = Picture(3.4)
    (axes,) = picture.panels
    below = [0.0] * len(measured.rows)
    for part, colour in _TIMELINE.items():
        heights = [need(row, f"{part}_ms") for row in measured.rows]
        axes.bar(range(len(below)), heights, 0.65, bottom=below, color=colour, label=part, **EDGE)
        below = [one + other for one, other in zip(below, heights, strict=True)]
    labels = [f"{row['contender'].replace('_', chr(10))}\nrank {row['rank']}" for row in measured.rows]
    axes.set_xticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylabel("ms a traced step")
    picture.legend(axes)
    return picture


_PHASES = {
    "pools for a peer": ("#1f6f8b", ""),
    "pools for this rank": ("#d4d9df", ""),
    "counts, puts, raises a flag": ("#000000", ""),
    "waits for peers": ("#ffffff", "////"),
}


def draw_programs(measured: Measured) -> Picture:
    """Draw a lane a program: its tasks, by whether they are for another rank, their ends, and its wait."""
    picture = Picture(5.0)
    (axes,) = picture.panels
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _PHASES}
    for row in measured.rows:
        lane, begin, end = need(row, "program"), need(row, "begin_us"), need(row, "end_us")
        put_us, wait_us = need(row, "put_us"), need(row, "wait_us")
        pooling = "pools for this rank" if row["local"] == "True" else "pools for a peer"
        found[pooling].append((lane, begin, end - put_us - begin))
        found["counts, puts, raises a flag"].append((lane, end - put_us, put_us))
        found["waits for peers"].append((lane, end, wait_us))
    for name, (colour, hatch) in _PHASES.items():
        lanes, lefts, widths = zip(*found[name], strict=True) if found[name] else ((), (), ())
        axes.barh(lanes, widths, 0.8, left=lefts, color=colour, hatch=hatch, label=name, edgecolor="black", lw=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("us since the first task began")
    axes.set_ylabel("programs shown, by their begin")
    picture.legend(axes)
    return picture


def last_by_contender(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return contender -> its rows of `bench volume`; of one that was measured twice those of the last measurement."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if need(row, "begin_us") == 0.0:
            found[row["contender"]] = []
        found[row["contender"]].append(row)
    return found


def draw_volume(measured: Measured) -> Picture:
    """Draw the rate of each contender over time, the rate of the links, and where the stage ends."""
    found = last_by_contender(measured.rows)
    picture = Picture(0.9 + 1.0 * len(found), rows=len(found))
    shown = looks(found)
    longest = max(need(rows[0], "stage_us") for rows in found.values())
    top = max(need(row, column) for row in measured.rows for column in ("gb_per_s", "link_gb_per_s"))
    for axes, (name, rows) in zip(picture.panels, found.items(), strict=True):
        begins = [need(row, "begin_us") for row in rows]
        widths = [need(row, "end_us") - begin for row, begin in zip(rows, begins, strict=True)]
        rates = [need(row, "gb_per_s") for row in rows]
        axes.bar(begins, rates, widths, align="edge", color=shown[name].colour, **EDGE)
        end = need(rows[0], "stage_us")
        axes.axvline(end, color="black", ls="--", lw=1, label="end of the stage")
        axes.axhline(need(rows[0], "link_gb_per_s"), label="rate of the links, measured", **LIMIT)
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(0, top * 1.1)
        axes.set_title(f"{name}: {end:.0f} us", loc="left", fontsize=8)
        axes.set_ylabel("GB/s")
    picture.panels[-1].set_xlabel("us since the stage began on rank 0")
    picture.legend(picture.panels[0])
    return picture


def todays(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `bench collectives` but those of stores by another number of programs than is launched."""
    programs = str(CollectivesRequest.store_programs)
    return [row for row in rows if row["contender"] != "stores" or row["store_programs"] == programs]


def draw_collectives(measured: Measured) -> Picture:
    """Draw the time over NCCL's by size: a panel for each operation, alone or beside a product, captured or not."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in todays(measured.rows):
        found.setdefault((row["operation"], row["beside"], row["captured"]), []).append(row)
    picture = Picture(0.8 + 1.6 * len(found), rows=len(found))
    measured_here = {row["contender"] for row in measured.rows}
    shown = looks(name for name in CollectivesRequest.contenders if name in measured_here and name != "auto")
    for axes, ((operation, beside, captured), rows) in zip(picture.panels, found.items(), strict=True):
        nccl = {row["mb_per_peer"]: need(row, "median_ms") for row in rows if row["contender"] == "nccl"}
        times = {
            name: {row["mb_per_peer"]: need(row, "median_ms") for row in rows if row["contender"] == name}
            for name in shown
        }
        product = {row["mb_per_peer"]: ms for row in rows if (ms := number(row, "product_ms")) is not None}
        lines: list[tuple[str, dict[str, float], dict[str, Any]]] = [("the product alone", product, LIMIT)]
        for name, look in shown.items():
            style = {"marker": look.marker, "markerfacecolor": look.colour, "color": "black", "ls": look.line, "ms": 4}
            lines.append((name, times[name], style))
        for name, by_size, style in lines:
            points = sorted((float(size), ms / nccl[size]) for size, ms in by_size.items() if size in nccl)
            if points:
                axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.set_ylim(0, _CUT)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("time / NCCL's")
        beside = "alone" if beside == "nothing" else "beside a matrix product"
        axes.set_title(f"{operation}, {beside}, {'captured' if captured == 'True' else 'not captured'}", fontsize=7)
    picture.panels[-1].set_xlabel("MB to each peer")
    picture.legend(picture.panels[-1])
    return picture
