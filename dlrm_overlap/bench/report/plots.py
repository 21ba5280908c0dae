"""`dlrm-overlap bench report`: an SVG of each CSV file of steps, as bars, or of a sweep, as a map."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Run,
    hardware,
    milliseconds,
    read_measured,
    runs,
    trusted,
)
from dlrm_overlap.config import InputError
from dlrm_overlap.observe.result_files import write_atomically

Rows = Sequence[Row]

PAYS = 1.05
"""the speedup over the strongest baseline from which on a cell of a map is not in brackets"""
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8, "hatch.linewidth": 0.5}
# In grey, any two that are near each other differ in lightness or in hatch. A hatch is black, so its bar is light.
_LOOKS = (("#d4d9df", ""), ("#9aa5b1", "////"), ("#f2f2f2", "----"), ("#1f6f8b", ""), ("#f0b27a", "xxxx"))
_LOOKS += (("#252525", ""), ("#c6dbef", "...."), ("#fdd0a2", "||||"), ("#bdbdbd", "++++"))
_AXES = {"tables_per_rank": "tables a GPU", "pooling_factor": "pooling factor", "dim": "dim", "global_batch": "batch"}
_TIMES = {"gpu_ms": "the GPU's time alone", "median_ms": "as the host issues it"}


def write_plots(folder: Path, output: Path) -> list[str]:
    """Write a plot of each CSV file of `folder` to `output`, made if it is not there; return the files without one.

    Raises:
        InputError: if `folder` has no rows that can be drawn, or `output` cannot be written.
    """
    files = [read_measured(path) for path in sorted(folder.glob("*.csv"))]
    known = [each for each in files if each.kind in PLOTS]
    if not known:
        raise InputError(f"{folder}: no CSV file of a figure in it; give the folder that `bench` has written rows to")
    pictures = {each.name: draw(each) for each in known}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_atomically(output / f"{name}.svg", picture)
    except (OSError, InputError) as error:
        raise InputError(f"--output: {output} cannot be written ({error}); give another folder") from None
    return [each.name for each in files if each not in known]


def draw(measured: Measured) -> bytes:
    """Return the plot of a file as SVG, its text as text, above its hardware, versions and first command.

    Raises:
        InputError: naming the file, if a column that the plot needs is missing or no number.
    """
    commands = [command for row in measured.rows if (command := row.get("command"))]
    try:
        figure = PLOTS[measured.kind](measured.rows)
    except KeyError as error:
        raise InputError(f"{measured.name}.csv: no column or contender {error}, which the plot needs") from None
    except (ValueError, IndexError) as error:
        raise InputError(f"{measured.name}.csv: {error}; repair the row, or measure again") from None
    lines = [line for each in (hardware(measured.rows), *commands[:1]) for line in textwrap.wrap(each, 150)]
    figure.supxlabel("\n".join(lines), fontsize=6.5, family="monospace")
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _panels(rows: int, height: float, columns: int = 1, width: float = 9.0, **shared: Any) -> tuple[Figure, list[Any]]:
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, 0.8 + height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel().tolist()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 6), frameon=False, fontsize=7)


def draw_bars(
    groups: Sequence[Run],
    label: Callable[[Row], str],
    *,
    value: str = "median_ms",
    unit: str = "ms, median",
) -> Figure:
    """Draw a group of bars for each run, a bar a contender; one whose results were not the reference's has none.

    A line across a group is the floor of its times.

    Args:
        groups: the runs.
        label: names a group by its first row.
        value: column of a bar's height.
        unit: of the axis.
    """
    firsts = [next(iter(run.values())) for run in groups]
    heights = [{name: float(row[value]) for name, row in run.items() if trusted(row) and row[value]} for run in groups]
    contenders = list(dict.fromkeys(name for run in heights for name in run))
    bars, width = len(groups) * len(contenders), 0.84 / len(contenders)
    figure, (axes,) = _panels(1, 3.2, width=max(9.0, 0.16 * bars))
    places = np.arange(len(groups))
    for i, (name, (colour, hatch)) in enumerate(zip(contenders, cycle(_LOOKS), strict=False)):
        drawn = np.array([each.get(name, math.nan) for each in heights])
        look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        own = axes.bar(places - 0.42 + (i + 0.5) * width, drawn, width, label=name, **look)
        text = ["" if math.isnan(each) else milliseconds(each) for each in drawn]
        axes.bar_label(own, text, fontsize=6, rotation=90 if bars > 31 else 0, padding=1.5)
    floors = [float(first["floor_ms"] or "nan") for first in firsts]
    axes.hlines(floors, places - 0.42, places + 0.42, color="black", linewidth=1.4, label="floor_ms")
    axes.set_xticks(places, [label(first) for first in firsts], fontsize=6)
    axes.set_ylabel(unit)
    _legend(figure, axes)
    return figure


def _columns_as_bars(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> list[Run]:
    """Return each row as a run whose contenders are columns, by name -> column."""
    text = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    return [{name: {**row, "value": row[column]} for name, column in columns.items()} for row in text]


def map_axes(rows: Iterable[Row]) -> list[str]:
    """Return the columns in which the shapes of a sweep differ: those of x, of y, and of the panel if there is one."""
    rows = list(rows)
    return [name for name in _AXES if len({row[name] for row in rows if row.get(name)}) > 1]


def map_speedups(rows: Rows, time: str) -> dict[tuple[float, ...], float]:
    """Return the fastest of ours over the strongest baseline by shape, a value of each of `map_axes`."""
    axes, fastest = map_axes(rows), dict[tuple[float, ...], dict[str, float]]()
    for row in rows:
        ms = fastest.setdefault(tuple(float(row[name]) for name in axes), {})
        kind = row["is_baseline"]
        ms[kind] = min(ms.get(kind, math.inf), float(row[time]))
    return {key: ms["True"] / ms["False"] for key, ms in sorted(fastest.items())}


def draw_map(rows: Rows) -> Figure:
    """Draw the speedups over the strongest baseline, by both times; darker is faster, brackets are below `PAYS`."""
    names = [_AXES[axis] for axis in map_axes(rows)]
    speedups = {label: map_speedups(rows, time) for time, label in _TIMES.items()}
    keys = list(next(iter(speedups.values())))
    xs, ys, rest = sorted({key[0] for key in keys}), sorted({key[1:2] for key in keys}), sorted({k[2:] for k in keys})
    figure, every = _panels(len(_TIMES), 2.4, len(rest))
    for axes, (label, others) in zip(every, product(speedups, rest), strict=True):
        grid = np.array([[speedups[label].get((x, *y, *others), math.nan) for x in xs] for y in ys])
        axes.imshow(grid, cmap="Greys", vmin=1.0, vmax=3.0, origin="lower", aspect="auto")
        for (j, i), value in np.ndenumerate(grid):
            text = f"{value:.2f}" if value >= PAYS else f"({value:.2f})"
            axes.text(i, j, text, ha="center", va="center", color="white" if value > 2.2 else "black")
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axes.set_yticks(range(len(ys)), [f"{y[0]:g}" if y else "" for y in ys])
        axes.set(xlabel=names[0], ylabel=names[1] if len(names) > 1 else "")
        title = [label, *(f"{name} {value:g}" for name, value in zip(names[2:], others, strict=True))]
        axes.set_title(", ".join(title), fontsize=8, loc="left")
    return figure


def _step_label(row: Row) -> str:
    gpus, batch = int(row["world_size"]), int(row["global_batch"])
    pinned = "\nhost short of time" if row.get("pinned_host") == "True" else ""  # in earlier rows
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples{pinned}"


def _draw_step(rows: Rows) -> Figure:
    if not any(row.get("busy_ms") for row in rows):  # earlier rows, and those of CPUs
        return draw_bars(runs(rows), _step_label)
    every = [row for run in runs(rows) for row in run.values()]
    times = {"the GPU's own time": "busy_ms", "by the clock": "median_ms"}
    found = _columns_as_bars(every, times)
    unit = f"ms, {_step_label(every[0])}"
    return draw_bars(found, lambda row: row["contender"].replace("_", "\n"), value="value", unit=unit)


PLOTS: dict[str, Callable[[Rows], Figure]] = {
    "step": _draw_step,
    "sweep": draw_map,
    "grid": draw_map,  # of earlier rows: a sweep of tables and batches
}
"""The figure that rows of `dlrm-overlap bench KIND` are drawn as."""


def todays(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `bench collectives` but earlier ones of stores by another number of programs than now."""
    return [row for row in rows if row["contender"] != "stores" or row.get("store_programs", "64") == "64"]
