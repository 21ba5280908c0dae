"""`dlrm-overlap bench report`: an SVG of each CSV file of steps, as bars, or of a sweep, as a map."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dlrm_overlap.bench.report.measured import Measured, Row, hardware, milliseconds, read_measured, runs, trusted
from dlrm_overlap.config import InputError
from dlrm_overlap.observe.result_files import write_atomically

Rows = Sequence[Row]

PAYS = 1.05
"""the speedup over the strongest baseline from which on a cell of a map is not in brackets"""
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8}
_BARS = {"busy_ms": ("the GPU's own time", "#1f6f8b"), "median_ms": ("by the clock", "#d4d9df")}
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
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(f"{measured.name}.csv: {error!r} in a row; repair it, or measure again") from None
    lines = [line for each in (hardware(measured.rows), *commands[:1]) for line in textwrap.wrap(each, 150)]
    figure.supxlabel("\n".join(lines), fontsize=6.5, family="monospace")
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _panels(rows: int, height: float, columns: int = 1, width: float = 9.0) -> tuple[Figure, list[Any]]:
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, 0.8 + height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_steps(rows: Rows) -> Figure:
    """Draw each run's contenders, by both times, above a line at their floor; one whose losses disagree is left out."""
    every = runs(rows)
    most = max(map(len, every))
    figure, panels = _panels(len(every), 3.2, width=max(9.0, 0.5 * most))
    for axes, run in zip(panels, every, strict=True):
        drawn, first = [row for row in run.values() if trusted(row)], next(iter(run.values()))
        places = np.arange(len(drawn))
        for offset, (column, (label, colour)) in zip((-0.21, 0.21), _BARS.items(), strict=True):
            # Rows of CPUs and earlier ones have no time of the GPU's own.
            ms = np.array([float(row.get(column) or "nan") for row in drawn])
            bars = axes.bar(places + offset, ms, 0.42, label=label, facecolor=colour, edgecolor="black", linewidth=0.5)
            text = ["" if math.isnan(each) else milliseconds(each) for each in ms]
            axes.bar_label(bars, text, fontsize=6, rotation=90 if most > 15 else 0, padding=1.5)
        axes.axhline(float(first["floor_ms"] or "nan"), color="black", linewidth=1.4, label="floor_ms")
        axes.set_xticks(places, [row["contender"].replace("_", "\n") for row in drawn], fontsize=6)
        axes.set_ylabel(f"ms, {_step_label(first)}")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False, fontsize=7)
    return figure


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
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples"


PLOTS: dict[str, Callable[[Rows], Figure]] = {
    "step": draw_steps,
    "sweep": draw_map,
    "grid": draw_map,  # of earlier rows: a sweep of tables and batches
}
"""The figure that rows of `dlrm-overlap bench KIND` are drawn as."""
