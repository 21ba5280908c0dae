"""The plots of all figures: each is drawn of the rows of `dlrm-overlap bench KIND` as bars, lines or a map.

A drawing returns the figure and the table of its numbers.
"""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.measured import Row, milliseconds, runs, shape, trusted

Frame = Any
"""a DataFrame, of whose methods pandas' types say too little"""
Drawing = tuple[Figure, Frame]
Rows = Sequence[Row]

PAYS = 1.05
"""the speedup over the strongest baseline from which on a cell of a map is not in brackets"""
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8, "hatch.linewidth": 0.5}
# In grey, any two that are near each other differ in lightness or in hatch. A hatch is black, so its bar is light.
_LOOKS = (("#d4d9df", ""), ("#9aa5b1", "////"), ("#f2f2f2", "----"), ("#1f6f8b", ""), ("#f0b27a", "xxxx"))
_LOOKS += (("#252525", ""), ("#c6dbef", "...."), ("#fdd0a2", "||||"), ("#bdbdbd", "++++"))
_AXES = {"tables_per_rank": "tables a GPU", "pooling_factor": "pooling factor", "dim": "dim", "global_batch": "batch"}
_TIMES = {"gpu_ms": "the GPU's time alone", "median_ms": "as the host issues it"}


def frame_of(rows: Iterable[Row], *columns: str) -> Frame:
    """Return the rows, with numbers in `columns`; NaN where a cell is empty.

    Raises:
        KeyError: if a column is not there.
        ValueError: if a cell is no number.
    """
    frame = pd.DataFrame([*rows])
    return frame.assign(**{column: pd.to_numeric(frame[column].replace("", None)) for column in columns})


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


def svg(figure: Figure, *captions: str) -> bytes:
    """Return the figure as SVG with captions below it; text is text, and the same figure gives the same bytes."""
    text = "\n".join(line for each in captions for line in textwrap.wrap(each, 150))
    figure.supxlabel(text, fontsize=6.5, family="monospace")
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def draw_bars(
    rows: Rows,
    label: Callable[[Row], str],
    *,
    groups: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    limit: str | None = None,
    over: str | None = None,
    unit: str = "ms, median",
) -> Drawing:
    """Draw a group of bars for each run, a bar a contender; one whose results were not the reference's has none.

    Args:
        rows: in the order in which they were measured.
        label: names a group by its first row.
        groups: columns in which the rows of a group agree; where none are given, a group is a run (`measured.runs`).
        values: column -> name of a bar; instead of contenders, a group is a row and its bars are these columns.
        limit: column of the line across the bars of a group.
        over: contender whose time the others' are divided by.
        unit: of the axis, where nothing is divided.
    """
    found: Sequence[Mapping[str, Row]]
    if values:
        found = [{name: {**row, "median_ms": row[column]} for column, name in values.items()} for row in rows]
    elif groups:
        by_key: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in rows:
            by_key.setdefault(tuple(row[each] for each in groups), {})[row["contender"]] = row
        found = [*by_key.values()]
    else:
        found = runs(rows)
    firsts = [next(iter(run.values())) for run in found]
    kept = [{name: row["median_ms"] for name, row in run.items() if trusted(row)} for run in found]
    table = frame_of(kept, *dict.fromkeys(name for run in kept for name in run))
    names = [label(first) for first in firsts]
    table.index = pd.Index([name.replace("\n", ", ") for name in names], name="shape")
    base: Any = table[over] if over else 1.0
    figure, (axes,) = _panels(1, 3.2, width=max(9.0, 0.16 * table.size))
    drawn = table.div(base, axis=0).reset_index(drop=True)
    drawn.plot.bar(ax=axes, width=0.84, edgecolor="black", linewidth=0.5, legend=False, rot=0)
    for bars, (colour, hatch) in zip(axes.containers, cycle(_LOOKS), strict=False):
        for bar in bars:
            bar.set(facecolor=colour, hatch=hatch)
        text = ["" if value != value else milliseconds(value) for value in drawn[bars.get_label()]]
        axes.bar_label(bars, text, fontsize=6, rotation=90 if table.size > 31 else 0, padding=1.5)
    if limit:
        bounds = frame_of(firsts, limit)[limit].to_numpy() / (base.to_numpy() if over else 1.0)
        axes.hlines(bounds, drawn.index - 0.42, drawn.index + 0.42, color="black", linewidth=1.4, label=limit)
    if over:
        names = [f"{name}\n{over} {milliseconds(ms)} ms" for name, ms in zip(names, table[over], strict=True)]
    axes.set_xticklabels(names, fontsize=6)
    axes.set(ylabel=f"time / {over}'s" if over else unit, xlabel="")
    _legend(figure, axes)
    return figure, table.reset_index()


def draw_lines(
    rows: Rows, x: str, y: str, panels: Sequence[str], *, over: str | None = None, level: str | None = None, **axes: Any
) -> Drawing:
    """Draw a line for each contender over x, a panel for each combination of the columns `panels`.

    Args:
        rows: the file's.
        x: column.
        y: column.
        panels: columns, whose values are the title.
        over: contender whose values the others' are divided by.
        level: column of a line straight across.
        axes: settings of every panel.
    """
    frame = frame_of(rows, x, y, *([level] if level else []))
    parts = frame.groupby([*panels], sort=False)
    figure, every = _panels(parts.ngroups, 1.3, sharex=True, sharey=True)
    tables = []
    for panel, (key, part) in zip(every, parts, strict=True):
        table = part.pivot_table(y, x, "contender", sort=False).sort_index()
        tables.append(table.reset_index().assign(**dict(zip(panels, key, strict=True))))
        drawn = table.div(table[over], axis=0) if over else table
        for (name, values), marker in zip(drawn.items(), "osDv^Px", strict=False):
            style: dict[str, Any] = {"marker": marker} if over else {"drawstyle": "steps-post"}
            panel.plot(
                values.index, values, label=name if over else None, color="black", markersize=4, linewidth=0.8, **style
            )
        if level:
            panel.axhline(part[level].iloc[0], color="black", linewidth=1.4, label=level)
        panel.set_title(", ".join(f"{name} {value}" for name, value in zip(panels, key, strict=True)), fontsize=7)
        panel.set(ylabel=f"{y} / {over}'s" if over else y, **axes)
    every[-1].set_xlabel(x)
    _legend(figure, every[0])
    return figure, pd.concat(tables)


def map_axes(rows: Iterable[Row]) -> list[str]:
    """Return the columns in which the shapes of a sweep differ: those of x, of y, and of the panel if there is one."""
    rows = list(rows)
    return [name for name in _AXES if len({row[name] for row in rows if row.get(name)}) > 1]


def map_times(rows: Rows, time: str) -> Frame:
    """Return the fastest of ours, the strongest baseline and the speedup of each shape, which is the index."""
    axes = map_axes(rows)
    frame = frame_of(rows, time, *axes)
    fastest = frame.groupby([*axes, "is_baseline"])[time].min().unstack()
    fastest = fastest.rename(columns={"False": "ours, ms", "True": "strongest baseline, ms"})
    return fastest.assign(speedup=fastest["strongest baseline, ms"] / fastest["ours, ms"])


def draw_map(rows: Rows) -> Drawing:
    """Draw the speedups over the strongest baseline, by both times; darker is faster, brackets are below `PAYS`."""
    names = [_AXES[axis] for axis in map_axes(rows)]
    times = {label: map_times(rows, time) for time, label in _TIMES.items()}
    rest = list(range(2, len(names)))
    grids: list[tuple[str, Frame]] = []
    for label, found in times.items():
        for key, part in found["speedup"].groupby(level=rest) if rest else [((), found["speedup"])]:
            title = ", ".join([label, *(f"{name} {value:g}" for name, value in zip(names[2:], key, strict=True))])
            grid = part.droplevel(rest) if rest else part
            grids.append((title, grid.unstack(0) if len(names) > 1 else grid.to_frame().T))
    figure, every = _panels(len(times), 2.4, len(grids) // len(times))
    for axes, (title, grid) in zip(every, grids, strict=True):
        axes.imshow(grid.astype(float), cmap="Greys", vmin=1.0, vmax=3.0, origin="lower", aspect="auto")
        for (y, x), value in ((place, grid.iat[place]) for place in product(*map(range, grid.shape))):
            text = f"{value:.2f}" if value >= PAYS else f"({value:.2f})"
            axes.text(x, y, text, ha="center", va="center", color="white" if value > 2.2 else "black")
        axes.set_xticks(range(grid.shape[1]), [f"{each:g}" for each in grid.columns])
        axes.set_yticks(range(grid.shape[0]), [f"{each:g}" for each in grid.index] if len(names) > 1 else [""])
        axes.set(xlabel=names[0], ylabel=names[1] if len(names) > 1 else "")
        axes.set_title(title, fontsize=8, loc="left")
    return figure, pd.concat(times, axis=1).rename_axis(index=names).reset_index()


def _step_label(row: Row) -> str:
    gpus, batch = int(row["world_size"]), int(row["global_batch"])
    pinned = "\nhost short of time" if row.get("pinned_host") == "True" else ""  # in earlier rows
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples{pinned}"


def _strategies(rows: Rows) -> Drawing:
    """Draw the mean fraction of the ideal of each strategy, by class."""
    lines = summarise(rows)
    shown: Rows = [{key: "" if value is None else str(value) for key, value in line.items()} for line in lines]
    figure, _ = draw_bars(
        shown, lambda row: row["strategy"].replace("_", "\n"), values={name: name for name in CLASSES},
        unit="mean fraction of the ideal speedup",
    )  # fmt: skip
    return figure, pd.DataFrame(lines)


class Plot(NamedTuple):
    """A figure in the report."""

    title: str
    reading: str
    """how to read it, in a sentence or two"""
    draw: Callable[[Rows], Drawing]


_SCALING = partial(draw_bars, label=lambda row: f"{row['world_size']} GPUs", limit="limit_ms")
_INPUT = {"cached_median_ms": "one cached batch", "loaded_median_ms": "fed by the loader"}

PLOTS = {
    "step": Plot(
        "The whole training step",
        "Median of a step by contender. The line is the floor: the longest of the dense products, the bytes of memory "
        "and the bytes of the links, under the first contender's plan. A contender whose losses were not the "
        "reference's has no bar.",
        partial(draw_bars, label=_step_label, limit="floor_ms"),
    ),
    "stage": Plot(
        "The embedding stage, forward",
        "Time over the baseline's, FBGEMM + NCCL + unpack: from the ids at the tables' ranks to the pooled embeddings "
        "at the samples' ranks. Outputs were equal before anything was timed. The limit is the bytes over the rate of "
        "copies in memory or over that of the links, the greater; a lookup mostly reads, so it may be a little faster.",
        partial(draw_bars, label=shape, limit="limit_ms", over="baseline"),
    ),
    "backward": Plot(
        "The backward",
        "From gradients to updated rows, over the time of NCCL with FBGEMM's update. A time may be below the limit, "
        "which counts every read of a gradient, also those that the cache saves.",
        partial(
            draw_bars, label=lambda row: f"{shape(row)}\n{row['optimizer']}", limit="limit_ms", over="baseline"
        ),
    ),
    "timeline": Plot(
        "Where a step's time goes",
        "Mean of the traced steps on each rank: something computes; only communication runs; only copies; nothing.",
        partial(
            draw_bars,
            label=lambda row: f"{row['contender'].replace('_', chr(10))}\nrank {row['rank']}",
            values={f"{part}_ms": part for part in ("compute", "exposed", "copying", "idle")},
            unit="ms a traced step",
        ),
    ),
    "weak": Plot(
        "Weak scaling of the embedding stage",
        "Tables of a GPU and global batch stay: as long on several GPUs as on one is ideal.",
        _SCALING,
    ),
    "strong": Plot(
        "Strong scaling of the embedding stage",
        "Tables in all and global batch stay.",
        _SCALING,
    ),
    "sweep": Plot(
        "Where it pays",
        "Speedup of the faster of pgas and fused over the strongest baseline: FBGEMM, NCCL and unpacking, at once or "
        f"in 2, 4 or 8 chunks; in brackets below {PAYS}.",
        draw_map,
    ),
    "volume": Plot(
        "Communication volume over time",
        "Bytes that leave rank 0 for its peers, by stretches of the stage's time. Of fused they are known task by "
        "task, by the kernel's own clock; those of a baseline are spread evenly over NCCL's kernels, by the profiler.",
        partial(draw_lines, x="begin_us", y="gb_per_s", panels=["contender", "stage_us"], level="link_gb_per_s"),
    ),
    "collectives": Plot(
        "All-to-all and all-gather by copy engines and by stores",
        "Time over that of NCCL by size. Beside a product it is the time until both are done.",
        lambda rows: draw_lines(
            todays(rows), "mb_per_peer", "median_ms", ["operation", "beside", "captured"],
            over="nccl", xscale="log", ylim=(0, 1.6),
        ),
    ),
    "concurrent": Plot(
        "A computation beside a communication",
        "Fraction of the ideal speedup by strategy, averaged over a class of cases: 1 hides the shorter of the two.",
        _strategies,
    ),
    "gemm": Plot(
        "Products with their all-gather or reduce-scatter inside",
        "Time over that of the collective and the product one after the other. The thick line is the longer of the "
        "product alone and of its bytes at the rate of the links.",
        partial(
            draw_bars,
            groups=("operator", "m", "k", "n"),
            label=lambda row: f"{row['operator']}\n{row['m']} x {row['k']} x {row['n']}",
            limit="floor_ms",
            over="serial",
        ),
    ),
    "input": Plot(
        "The step fed by the loader",
        "Median of a step on one cached batch and on batches that the loader brings.",
        partial(
            draw_bars,
            label=lambda row: f"{row['backend']}\n{row['data']}\n{row['workers']} workers",
            values=_INPUT,
        ),
    ),
}  # fmt: skip
PLOTS["grid"] = PLOTS["sweep"]  # of earlier rows: a sweep of tables and batches


def todays(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `bench collectives` but earlier ones of stores by another number of programs than now."""
    return [row for row in rows if row["contender"] != "stores" or row.get("store_programs", "64") == "64"]
