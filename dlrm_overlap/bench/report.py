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

from dlrm_overlap.bench.rows import Measured, Row, hardware, read_measured
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.result_files import write_atomically

Rows = Sequence[Row]

_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8}
_BARS = {"busy_ms": "the GPU's own time", "median_ms": "by the clock"}
_AXES = {"tables_per_rank": "tables a GPU", "pooling_factor": "pooling factor", "dim": "dim", "global_batch": "batch"}
_TIMES = {"gpu_ms": "the GPU's time alone", "median_ms": "as the host issues it"}


def run(argv: Sequence[str]) -> int:
    """Draw the rows of a folder, on no GPU, and name the files that have no plot.

    Raises:
        InputError: for a mistake in `argv`, or if a file cannot be drawn.
    """
    parser = Parser("dlrm-overlap bench report", "Draw each file of steps or of a sweep in a folder as an SVG.")
    parser.add_argument("folder", metavar="DIR", help="folder of the CSV files that bench has written")
    parser.add_argument("--output", help="folder to write to (default DIR/report)")
    values = parser.read(argv)
    folder = Path(values.folder)
    output = Path(values.output or folder / "report")
    files = [read_measured(path) for path in sorted(folder.glob("*.csv"))]
    pictures = {each.name: draw(each) for each in files if each.kind in PLOTS}
    if not pictures:
        raise InputError(f"{folder}: no CSV file of a figure in it; give the folder that `bench` has written rows to")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_atomically(output / f"{name}.svg", picture)
    except (OSError, InputError) as error:
        raise InputError(f"--output: {output} cannot be written ({error}); give another folder") from None
    print(f"plots: {output}")
    return 0


def draw(measured: Measured) -> bytes:
    """Return the plot of a file as SVG, its text as text, above its hardware, versions and first command.

    Raises:
        InputError: naming the file, if a column that the plot needs is missing or no number.
    """
    commands = [command for row in measured.rows if (command := row.get("command"))]
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        try:
            figure = PLOTS[measured.kind](measured.rows)
        except (KeyError, ValueError, IndexError) as error:
            raise InputError(f"{measured.name}.csv: {error!r} in a row; repair it, or measure again") from None
        lines = [line for each in (hardware(measured.rows), *commands[:1]) for line in textwrap.wrap(each, 150)]
        figure.supxlabel("\n".join(lines), fontsize=6.5, family="monospace")
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def draw_steps(rows: Rows) -> Figure:
    """Draw the contenders by both times, above a line at their floor; one whose losses disagree is left out."""
    drawn, first = [row for row in rows if row.get("agrees") != "False"], rows[0]
    figure = Figure(figsize=(max(9.0, 0.5 * len(drawn)), 4.0), layout="constrained")
    axes = figure.subplots()
    for offset, (column, label) in zip((-0.21, 0.21), _BARS.items(), strict=True):
        ms = [float(row.get(column) or "nan") for row in drawn]  # rows of CPUs have no time of the GPU's own
        axes.bar_label(axes.bar(np.arange(len(drawn)) + offset, ms, 0.42, label=label), fmt="%.3g", fontsize=6)
    axes.axhline(float(first["floor_ms"] or "nan"), color="black", label="floor_ms")
    axes.set_xticks(range(len(drawn)), [row["contender"].replace("_", "\n") for row in drawn], fontsize=6)
    shape = f"{first['arch']}, {first['tables']} tables, {first['precision']}"
    axes.set_ylabel(f"ms, {shape}\n{first['world_size']} ranks, {first['global_batch']} samples")
    axes.legend()
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
    """Draw the speedups over the strongest baseline, by both times; darker is faster."""
    names = [_AXES[axis] for axis in map_axes(rows)]
    speedups = {label: map_speedups(rows, time) for time, label in _TIMES.items()}
    keys = list(next(iter(speedups.values())))
    xs, ys, rest = sorted({key[0] for key in keys}), sorted({key[1:2] for key in keys}), sorted({k[2:] for k in keys})
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    panels = figure.subplots(len(_TIMES), len(rest), squeeze=False).flat
    for axes, (label, others) in zip(panels, product(speedups, rest), strict=True):
        grid = np.array([[speedups[label].get((x, *y, *others), math.nan) for x in xs] for y in ys])
        axes.imshow(grid, cmap="Greys", vmin=1.0, vmax=3.0, origin="lower", aspect="auto")
        for (j, i), value in np.ndenumerate(grid):
            axes.text(i, j, f"{value:.2f}", ha="center", va="center", color="white" if value > 2.2 else "black")
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axes.set_yticks(range(len(ys)), [f"{y[0]:g}" if y else "" for y in ys])
        axes.set(xlabel=names[0], ylabel=names[1] if len(names) > 1 else "")
        title = [label, *(f"{name} {value:g}" for name, value in zip(names[2:], others, strict=True))]
        axes.set_title(", ".join(title), fontsize=8, loc="left")
    return figure


PLOTS: dict[str, Callable[[Rows], Figure]] = {
    "step": draw_steps,
    "sweep": draw_map,
    "grid": draw_map,  # of earlier rows: a sweep of tables and batches
}
"""The figure that rows of `dlrm-overlap bench KIND` are drawn as."""
