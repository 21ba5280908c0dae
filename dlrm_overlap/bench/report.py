"""`dlrm-overlap bench report`: an SVG of each CSV file of steps or of a sweep, as bars."""

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dlrm_overlap.bench.rows import Measured, Row, hardware, read_measured
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.result_files import write_atomically

_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8}
_STEP_TIMES = {"busy_ms": "the GPU's own time", "median_ms": "by the clock"}
_AXES = {"tables_per_rank": "tables a GPU", "pooling_factor": "pooling factor", "dim": "dim", "global_batch": "batch"}
_STAGE_TIMES = {"gpu_ms": "the GPU's time alone", "median_ms": "as the host issues it"}


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
    lines = [line for each in (hardware(measured.rows), *commands[:1]) for line in textwrap.wrap(each, 150)]
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        try:
            figure = PLOTS[measured.kind](measured.rows)
        except (KeyError, ValueError, IndexError) as error:
            raise InputError(f"{measured.name}.csv: {error!r} in a row; repair it, or measure again") from None
        figure.supxlabel("\n".join(lines), fontsize=6.5, family="monospace")
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def draw_steps(rows: Sequence[Row]) -> Figure:
    """Draw the contenders by both times, and a line at their floor; one whose losses disagree is left out."""
    drawn, first = [row for row in rows if row.get("agrees") != "False"], rows[0]
    # Rows of CPUs have no time of the GPU's own.
    bars = {label: [float(row.get(time) or "nan") for row in drawn] for time, label in _STEP_TIMES.items()}
    names = [row["contender"].replace("_", "\n") for row in drawn]
    floor = {"floor_ms": float(first["floor_ms"] or "nan")}
    shape = f"{first['arch']}, {first['tables']} tables, {first['precision']}"
    return _bars(names, bars, floor, f"ms, {shape}\n{first['world_size']} ranks, {first['global_batch']} samples")


def map_speedups(rows: Sequence[Row], time: str) -> dict[tuple[float, ...], float]:
    """Return the fastest of ours over the strongest baseline by shape: a value of each of `map_axes`, ascending."""
    axes, fastest = map_axes(rows), dict[tuple[float, ...], dict[str, float]]()
    for row in rows:
        ms = fastest.setdefault(tuple(float(row[name]) for name in axes), {})
        kind = row["is_baseline"]
        ms[kind] = min(ms.get(kind, math.inf), float(row[time]))
    return {key: ms["True"] / ms["False"] for key, ms in sorted(fastest.items())}


def map_axes(rows: Sequence[Row]) -> list[str]:
    """Return the columns in which the shapes of a sweep differ."""
    return [name for name in _AXES if len({row[name] for row in rows if row.get(name)}) > 1]


def draw_map(rows: Sequence[Row]) -> Figure:
    """Draw the speedups over the strongest baseline of each shape, by both times, and a line where there is none."""
    found = {label: map_speedups(rows, time) for time, label in _STAGE_TIMES.items()}
    shapes = ["\n".join(f"{value:g}" for value in shape) for shape in next(iter(found.values()))]
    bars = {label: list(speedups.values()) for label, speedups in found.items()}
    label = ", ".join(_AXES[axis] for axis in map_axes(rows))
    return _bars(shapes, bars, {"as fast": 1.0}, f"times as fast as the strongest baseline\nby {label}")


def _bars(names: Sequence[str], bars: Mapping[str, Sequence[float]], line: Mapping[str, float], label: str) -> Figure:
    """Draw a group of bars for each of `names`, and a line across."""
    figure = Figure(figsize=(max(9.0, 0.5 * len(names)), 4.0), layout="constrained")
    axes = figure.subplots()
    for offset, (name, heights) in zip((-0.21, 0.21), bars.items(), strict=True):
        drawn = axes.bar([place + offset for place in range(len(names))], heights, 0.42, label=name)
        axes.bar_label(drawn, fmt="%.3g", fontsize=6, rotation=90 if len(names) > 15 else 0, padding=1.5)
    for name, height in line.items():
        axes.axhline(height, color="black", label=name)
    axes.set_xticks(range(len(names)), names, fontsize=6)
    axes.set_ylabel(label)
    axes.legend()
    return figure


# A grid was a sweep of tables and batches.
PLOTS: dict[str, Callable[[Sequence[Row]], Figure]] = {"step": draw_steps, "sweep": draw_map, "grid": draw_map}
"""The figure that rows of `dlrm-overlap bench KIND` are drawn as."""
