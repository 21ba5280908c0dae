"""The drawings of figures: bars for most; stacks, areas, lines and maps for those whose rows are no bars."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from dlrm_overlap.bench.report.measured import Measured, Row, Run, contenders, milliseconds, need, number, trusted

Groups = Callable[[Sequence[Row]], Sequence[Run]]
"""makes groups of bars of rows"""
Label = Callable[[Row], str]
"""names a group of bars by its first row"""

# In grey, any two that are near each other differ in lightness or in hatch. A hatch is black, so its bar is light.
_LOOKS = [
    *(("#d4d9df", ""), ("#9aa5b1", "////"), ("#f2f2f2", "----"), ("#1f6f8b", ""), ("#f0b27a", "xxxx"), ("#252525", "")),
    *(("#c6dbef", "...."), ("#fdd0a2", "||||"), ("#bdbdbd", "++++"), ("#9ecae1", "oo"), ("#7fb3a8", "\\\\\\\\")),
]
_EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
_LIMIT: dict[str, Any] = {"color": "black", "linewidth": 1.4}
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8, "hatch.linewidth": 0.5}
_MOST_GROUPS = 8  # of a panel
_SPAN = 0.84  # of the room of a group of bars
_MEDIAN = {"median_ms": "ms, median"}


def panels(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Any]]:
    """Return a figure of `height` inches and its panels, without lines at the top and on the right."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        made = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for each in made:
        each.spines[["top", "right"]].set_visible(False)
    return figure, made


def legend(figure: Figure, axes: Any) -> None:
    """Put the names of what `axes` holds above the figure."""
    handles, names = axes.get_legend_handles_labels()
    columns = min(len(names), 7, 130 // max(map(len, names)))
    figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=7)


def svg(figure: Figure, *captions: str) -> bytes:
    """Return the figure as SVG with captions below it; text is text, and the same figure gives the same bytes."""
    text = "\n".join(line for each in captions for line in textwrap.wrap(each, 150))
    figure.supxlabel(text, fontsize=6.5, family="monospace")
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def draw_bars(
    measured: Measured,
    groups: Groups,
    label: Label,
    columns: Mapping[str, str] = _MEDIAN,
    limit: str | None = None,
    over: str | None = None,
) -> Figure:
    """Draw groups of bars with their numbers, of many groups some below the others.

    A contender whose results were not the reference's has no bar.

    Args:
        measured: the rows.
        groups: makes the groups of them.
        label: names a group.
        columns: column -> label of its axis; each has panels of its own.
        limit: column of the line across the bars of the first of `columns`.
        over: contender whose value the others are divided by.
    """
    found = groups(measured.rows)
    size = math.ceil(len(found) / math.ceil(len(found) / _MOST_GROUPS))
    parts = [(column, found[i : i + size]) for column in columns for i in range(0, len(found), size)]
    figure, every = panels(0.8 + 2.6 * len(parts), len(parts))
    names = contenders({name: row for name, row in group.items() if trusted(row)} for group in found)
    for axes, (column, part) in zip(every, parts, strict=True):
        bases = [need(group[over], column) if over else 1.0 for group in part]
        _draw_part(axes, part, names, column, bases)
        firsts = [next(iter(group.values())) for group in part]
        labels = [label(first) for first in firsts]
        if over:
            labels = [f"{each}\n{over} {milliseconds(base)} ms" for each, base in zip(labels, bases, strict=True)]
        bounds = [number(first, limit) for first in firsts] if limit and column == next(iter(columns)) else []
        for place, (bound, base) in enumerate(zip(bounds, bases, strict=False)):
            if bound is not None:
                axes.hlines(bound / base, place - _SPAN / 2, place + _SPAN / 2, label="" if place else limit, **_LIMIT)
        axes.set_xticks(range(len(part)), labels, fontsize=6)
        axes.set_ylabel(f"time / {over}'s" if over else columns[column])
    legend(figure, every[0])
    return figure


def _draw_part(axes: Any, groups: Sequence[Run], names: Sequence[str], column: str, bases: Sequence[float]) -> None:
    width = _SPAN / max(len(names), 3)
    upright = len(groups) * len(names) > 31
    for i, name in enumerate(names):
        shown = [
            (place + (i - (len(names) - 1) / 2) * width, value / base)
            for place, (group, base) in enumerate(zip(groups, bases, strict=True))
            if name in group and trusted(group[name]) and (value := number(group[name], column)) is not None
        ]
        if not shown:
            continue
        colour, hatch = _LOOKS[i % len(_LOOKS)]
        places, heights = zip(*shown, strict=True)
        drawn = axes.bar(places, heights, width * 0.94, color=colour, hatch=hatch, label=name, **_EDGE)
        text = [milliseconds(height) for height in heights]
        axes.bar_label(drawn, text, fontsize=6, rotation=90 if upright else 0, padding=1.5)


def draw_volume(measured: Measured) -> Figure:
    """Draw the rate of each contender over time, the rate of the links, and where the stage ends."""
    found: dict[str, list[Row]] = {}
    for row in measured.rows:
        found.setdefault(row["contender"], []).append(row)
    figure, every = panels(0.9 + 1.0 * len(found), len(found))
    longest = max(need(row, "stage_us") for row in measured.rows)
    top = max(need(row, column) for row in measured.rows for column in ("gb_per_s", "link_gb_per_s"))
    for axes, (name, rows) in zip(every, found.items(), strict=True):
        begins = [need(row, "begin_us") for row in rows]
        widths = [need(row, "end_us") - begin for row, begin in zip(rows, begins, strict=True)]
        axes.bar(begins, [need(row, "gb_per_s") for row in rows], widths, align="edge", color="#9ecae1", **_EDGE)
        end = need(rows[0], "stage_us")
        axes.axvline(end, color="black", ls="--", lw=1, label="end of the stage")
        axes.axhline(need(rows[0], "link_gb_per_s"), label="rate of the links, measured", **_LIMIT)
        axes.set(xlim=(0, longest * 1.02), ylim=(0, top * 1.1), ylabel="GB/s")
        axes.set_title(f"{name}: {end:.0f} us", loc="left", fontsize=8)
    every[-1].set_xlabel("us since the stage began on rank 0")
    legend(figure, every[0])
    return figure


def todays(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `bench collectives` but earlier ones of stores by another number of programs than now."""
    return [row for row in rows if row["contender"] != "stores" or row.get("store_programs", "64") == "64"]


def draw_collectives(measured: Measured) -> Figure:
    """Draw the time over NCCL's by size: a panel for each operation, alone or beside a product, captured or not."""
    found: dict[tuple[str, ...], dict[str, dict[float, Row]]] = {}
    for row in todays(measured.rows):
        panel = found.setdefault((row["operation"], row["beside"], row["captured"]), {})
        panel.setdefault(row["contender"], {})[need(row, "mb_per_peer")] = row
    figure, every = panels(0.8 + 1.6 * len(found), len(found))
    for axes, ((operation, beside, captured), by_name) in zip(every, found.items(), strict=True):
        nccl = {size: need(row, "median_ms") for size, row in by_name["nccl"].items()}
        for i, (name, by_size) in enumerate(by_name.items()):
            sizes = sorted(by_size.keys() & nccl.keys())
            ratios = [need(by_size[size], "median_ms") / nccl[size] for size in sizes]
            axes.plot(sizes, ratios, label=name, marker="osDv^Px"[i % 7], color="black", markersize=4, linewidth=0.8)
        axes.set_ylim(0, 1.6)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("time / NCCL's")
        beside = "alone" if beside == "nothing" else "beside a matrix product"
        axes.set_title(f"{operation}, {beside}, {'captured' if captured == 'True' else 'not captured'}", fontsize=7)
    every[-1].set_xlabel("MB to each peer")
    legend(figure, every[-1])
    return figure


PAYS = 1.05
"""the speedup over the strongest baseline from which on a cell of a map is not in brackets"""
_AXES = {"tables_per_rank": "tables a GPU", "pooling_factor": "pooling factor", "dim": "dim", "global_batch": "batch"}
_TIMES = {"median_ms": "as the host issues it", "gpu_ms": "the GPU's time alone"}


class Cell(NamedTuple):
    """The fastest of ours on a shape and the strongest baseline, by one of the two times."""

    ours: Row
    baseline: Row
    time: str

    @property
    def speedup(self) -> float:
        """The baseline's time over ours."""
        return need(self.baseline, self.time) / need(self.ours, self.time)


def map_axes(rows: Iterable[Row]) -> list[str]:
    """Return the columns in which the shapes of a sweep differ: those of x, of y, and of the panel if there is one."""
    rows = list(rows)
    return [name for name in _AXES if len({row[name] for row in rows if row.get(name)}) > 1]


def cells(rows: Sequence[Row], time: str) -> dict[tuple[float, ...], Cell]:
    """Return shape -> its cell by the column `time`; a shape is its values of `map_axes`."""
    axes = map_axes(rows)
    found: dict[tuple[float, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(need(row, axis) for axis in axes), {})[row["contender"]] = row

    def fastest(own: Iterable[Row], is_baseline: str) -> Row:
        return min((row for row in own if row["is_baseline"] == is_baseline), key=lambda row: need(row, time))

    return {
        shape: Cell(fastest(own.values(), "False"), fastest(own.values(), "True"), time)
        for shape, own in sorted(found.items())
    }


def draw_map(measured: Measured) -> Figure:
    """Draw the speedups over the strongest baseline, by both times; darker is faster, brackets are below `PAYS`."""
    axes_of = map_axes(measured.rows)
    shapes = list(cells(measured.rows, "gpu_ms"))
    xs = sorted({shape[0] for shape in shapes})
    ys = sorted({shape[1] for shape in shapes}) if len(axes_of) > 1 else [0.0]
    rest = sorted({shape[2:] for shape in shapes})
    figure, every = panels(2.4 * len(_TIMES) + 1.0, len(_TIMES), len(rest))
    for axes, (time, panel) in zip(every, [(time, panel) for time in _TIMES for panel in rest], strict=True):
        found = {shape: cell for shape, cell in cells(measured.rows, time).items() if shape[2:] == panel}
        grey = [[math.nan] * len(xs) for _ in ys]
        for shape, cell in found.items():
            x, y = xs.index(shape[0]), ys.index(shape[1]) if len(shape) > 1 else 0
            grey[y][x] = cell.speedup
            text = f"{cell.speedup:.2f}" if cell.speedup >= PAYS else f"({cell.speedup:.2f})"
            axes.text(x, y, text, ha="center", va="center", color="white" if cell.speedup > 2.2 else "black")
        axes.imshow(grey, cmap="Greys", vmin=1.0, vmax=3.0, origin="lower", aspect="auto")
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        axes.set_xlabel(_AXES[axes_of[0]])
        axes.set_ylabel(_AXES[axes_of[1]] if len(axes_of) > 1 else "")
        names = [f"{_AXES[axis]} {value:g}" for axis, value in zip(axes_of[2:], panel, strict=True)]
        axes.set_title(", ".join([_TIMES[time], *names]), fontsize=8, loc="left")
    return figure


def map_table(measured: Measured) -> list[dict[str, Any]]:
    """Return a line a shape: by both times the fastest of ours, the strongest baseline, and the speedup."""
    names = [_AXES[axis] for axis in map_axes(measured.rows)]
    lines: dict[tuple[float, ...], dict[str, Any]] = {}
    for time, label in _TIMES.items():
        for shape, cell in cells(measured.rows, time).items():
            line = lines.setdefault(shape, dict(zip(names, shape, strict=True)))
            for side, row in (("ours", cell.ours), ("strongest baseline", cell.baseline)):
                line[f"{side}, ms: {label}"] = f"{milliseconds(need(row, time))} ({row['contender']})"
            line[f"speedup: {label}"] = f"{cell.speedup:.2f}x"
    return [*lines.values()]
