"""The plots of the embedding stage: shapes, backward, scaling, slice size, occupancy, schedule."""

from collections.abc import Callable
from typing import Any

from dlrm_overlap.bench.report.bars import bars, line
from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Run,
    Table,
    cells,
    contenders,
    milliseconds,
    need,
    number,
    runs,
    shape,
)
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, looks

_CHUNKED = "nccl_chunked"
_BASELINES = ("baseline", "torchrec", _CHUNKED, "nccl_registered", "nccl_copy_engines")
_CUT = 1.6  # of the baseline's time, where bars of the backward end


def draw_stage(measured: Measured) -> Picture:
    """Draw the plot of `bench stage`; of the baselines in chunks the fastest of each shape."""
    groups = [_best_chunked(group) for group in runs(measured.rows)]
    picture = Picture(measured.name, 3.6)
    (axes,) = picture.panels()
    labels = [shape(group["baseline"]) for group in groups]
    bars(axes, groups, labels, "limit_ms", "baseline")
    axes.set_ylabel("time / baseline's")
    axes.set_xlabel("tables a GPU x rows x dim; global batch, ids a bag")
    picture.legend(axes)
    return picture


def _best_chunked(group: Run) -> Run:
    """Return the run with the fastest of its baselines in chunks alone, without their number in the name."""
    chunked = [name for name in group if name.startswith(_CHUNKED)]
    if not chunked:
        return group
    best = min(chunked, key=lambda name: need(group[name], "median_ms"))
    return {
        _CHUNKED if name == best else name: row for name, row in group.items() if name not in chunked or name == best
    }


def stage_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench stage`, the speedups first: a page cuts wide tables."""
    groups = runs(measured.rows)
    names = contenders(groups)
    has_chunks = any(name.startswith(_CHUNKED) for name in names)
    over = ["best speedup over baseline", *(["over the strongest baseline"] if has_chunks else [])]
    lines: list[list[Any]] = [["shape", *over, "limit, ms", *(f"{name}, ms" for name in names)]]
    for group in groups:
        speedups = {name: found for name, row in group.items() if (found := number(row, "speedup")) is not None}
        best = max(speedups, key=lambda name: speedups[name])
        line = [shape(group["baseline"]).replace("\n", ", "), f"{speedups[best]:.2f}x ({best})"]
        if has_chunks:
            known = {name: row for name, row in group.items() if name.startswith(_BASELINES)}
            strongest = min(known, key=lambda name: need(known[name], "median_ms"))
            least = need(known[strongest], "median_ms") / need(group[best], "median_ms")
            line.append(f"{least:.2f}x ({strongest})")
        times = [milliseconds(number(group[name], "median_ms")) if name in group else "-" for name in names]
        lines.append([*line, milliseconds(number(group["baseline"], "limit_ms")), *times])
    return cells(lines)


def draw_backward(measured: Measured) -> Picture:
    """Draw the plot of `bench backward`."""
    groups = runs(measured.rows)
    picture = Picture(measured.name, 5.6)
    half = (len(groups) + 1) // 2
    panels = picture.panels(1, 2)
    for axes, part in zip(panels, (groups[:half], groups[half:]), strict=True):
        labels = [
            f"{shape(group['baseline'])}\n{group['baseline']['optimizer']}".replace(", zipf", "\nzipf")
            for group in part
        ]
        if not part:
            axes.set_axis_off()
            continue
        bars(axes, part, labels, "limit_ms", "baseline", cut=_CUT)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_ylim(0, _CUT)
        axes.set_ylabel("time / baseline's")
    panels[-1].set_xlabel("tables a GPU x rows x dim; global batch, ids a bag, skew of the ids; optimizer")
    picture.legend(panels[0])
    return picture


_PARTS = [
    ("lookup", "#c6dbef", ""),
    ("all-to-all", "#fd8d3c", "////"),
    ("sync", "#fdd0a2", "\\\\\\\\"),
    ("unpack", "#525252", ""),
]


def _baseline_part(row: Row, part: str) -> float:
    """Return what the baseline takes for one of `_PARTS`, in ms; what its All-to-All takes without bytes is sync."""
    sync_ms = number(row, "sync_ms") or 0.0
    if part == "all-to-all":
        return max(0.0, need(row, "all_to_all_ms") - sync_ms)
    return sync_ms if part == "sync" else need(row, f"{part}_ms")


def draw_scaling(measured: Measured) -> Picture:
    """Draw the plot of `bench weak` and `bench strong`."""
    rows = [row for row in measured.rows if number(row, "scaling_factor") is not None]
    picture = Picture(measured.name, 3.6)
    times, factors, breakdown = picture.panels(3)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for name, look in looks(names).items():
        own = [row for row in rows if row["contender"] == name]
        gpus = [need(row, "world_size") for row in own]
        line(times, name, gpus, [need(row, "median_ms") for row in own], look)
        line(factors, name, gpus, [need(row, "scaling_factor") for row in own], look)
    base = [row for row in rows if row["contender"] == "baseline"]
    gpus = [need(row, "world_size") for row in base]
    times.plot(gpus, [need(row, "limit_ms") for row in base], label="limit of the hardware", **LIMIT)
    times.set_ylabel("ms, median")
    factors.set_ylabel("scaling factor")
    below = [0.0] * len(base)
    for label, colour, hatch in _PARTS:
        heights = [_baseline_part(row, label) for row in base]
        if not any(heights):  # of rows that do not tell it
            continue
        breakdown.bar(range(len(base)), heights, 0.6, bottom=below, color=colour, hatch=hatch, label=label, **EDGE)
        below = [one + other for one, other in zip(below, heights, strict=True)]
    breakdown.set_xticks(range(len(base)), [row["world_size"] for row in base])
    breakdown.set_ylabel("baseline's parts, ms")
    breakdown.legend(frameon=False, fontsize=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    for axes in (times, factors):
        axes.set_xticks(gpus)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    for axes in (times, factors, breakdown):
        axes.set_xlabel("GPUs")
    picture.legend(times)
    return picture


def scaling_table(measured: Measured) -> Table:
    """Return the table of the numbers behind that plot."""
    lines: list[list[Any]] = [
        ["GPUs", "contender", "median, ms", "scaling factor", "speedup", "lookup, ms", "All-to-All, ms", "unpack, ms"]
    ]
    columns = ["lookup_ms", "all_to_all_ms", "unpack_ms"]
    if any(number(row, "sync_ms") is not None for row in measured.rows):
        columns.append("sync_ms")
        lines[0].append("All-to-All of one number, ms")
    for row in measured.rows:
        times = [milliseconds(number(row, column)) for column in columns]
        figures = [number(row, "scaling_factor"), number(row, "speedup")]
        lines.append([row["world_size"], row["contender"], milliseconds(number(row, "median_ms")), *figures, *times])
    return cells(lines)


_PHASES = {
    "pools for a peer": ("#1f6f8b", ""),
    "pools for this rank": ("#d4d9df", ""),
    "counts, puts, raises a flag": ("#000000", ""),
    "waits for peers": ("#ffffff", "////"),
}
_ACROSS: dict[str, dict[str, Any]] = {
    "baseline": {"color": "black", "lw": 0.8, "ls": "--"},
    "pgas": {"color": looks(["pgas"])["pgas"].colour, "lw": 5},  # to be seen below the limit, which it may reach
}


def draw_sweep(column: str, label: str) -> Callable[[Measured], Picture]:
    """Return what draws fused's time over `column`, with the other contenders as lines across."""

    def draw(measured: Measured) -> Picture:
        picture = Picture(measured.name, 3.2)
        (axes,) = picture.panels()
        swept = sorted((need(row, column), need(row, "median_ms")) for row in measured.rows if row.get(column))
        name = next((row["contender"] for row in measured.rows if row.get(column)), "fused")
        line(axes, name, [x for x, _ in swept], [ms for _, ms in swept], looks(["fused"])["fused"])
        for x, ms in swept:
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
            axes.annotate(milliseconds(ms), (x, ms), **above)
        for row in (row for row in measured.rows if not row.get(column)):
            ms, name = need(row, "median_ms"), row["contender"]
            told = f"{name}, as many as fit" if name.startswith("fused") else name
            look = _ACROSS.get(name, {"color": "black", "lw": 0.8, "ls": "-."})
            axes.axhline(ms, label=f"{told}: {milliseconds(ms)} ms", zorder=1, **look)
        bound = need(measured.rows[0], "limit_ms")
        axes.axhline(bound, label=f"limit of the hardware: {milliseconds(bound)} ms", **LIMIT)
        axes.set_xscale("log", base=2)
        axes.set_xticks([x for x, _ in swept], [f"{x:g}" for x, _ in swept])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel("ms, median")
        picture.legend(axes)
        return picture

    return draw


def sweep_table(column: str, label: str) -> Callable[[Measured], Table]:
    """Return what makes the table of the numbers behind that plot."""

    def table(measured: Measured) -> Table:
        lines: list[list[Any]] = [["contender", label, "p10, ms", "median, ms", "p90, ms", "of the limit", "speedup"]]
        for row in measured.rows:
            times = [milliseconds(number(row, each)) for each in ("p10_ms", "median_ms", "p90_ms")]
            figures = [number(row, "fraction_of_limit"), number(row, "speedup")]
            lines.append([row["contender"], row.get(column) or "-", *times, *figures])
        return cells(lines)

    return table


def draw_programs(measured: Measured) -> Picture:
    """Draw a lane a program: its tasks, by whether they are for another rank, what ends them, and its wait."""
    picture = Picture(measured.name, 5.0)
    (axes,) = picture.panels()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _PHASES}
    for row in measured.rows:
        lane, begin, end = need(row, "program"), need(row, "begin_us"), need(row, "end_us")
        put_from = end - need(row, "put_us")
        found["pools for this rank" if row["local"] == "True" else "pools for a peer"].append((lane, begin, put_from))
        found["counts, puts, raises a flag"].append((lane, put_from, end))
        found["waits for peers"].append((lane, end, end + need(row, "wait_us")))
    for name, (colour, hatch) in _PHASES.items():
        lanes, lefts, ends = zip(*found[name], strict=True) if found[name] else ((), (), ())
        widths = [end - begin for begin, end in zip(lefts, ends, strict=True)]
        axes.barh(lanes, widths, 0.8, left=lefts, color=colour, hatch=hatch, label=name, edgecolor="black", lw=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("us since the first task began")
    axes.set_ylabel("programs shown, by their begin")
    picture.legend(axes)
    return picture


def programs_table(measured: Measured) -> Table:
    """Return what each program did in all: tasks, pooling, the ends of its tasks, its wait."""
    lines: list[list[Any]] = [["program", "tasks", "for peers", "pools, us", "counts and puts, us", "waits, us"]]
    for program in dict.fromkeys(row["program"] for row in measured.rows):
        own = [row for row in measured.rows if row["program"] == program]
        put, wait = (sum(need(row, column) for row in own) for column in ("put_us", "wait_us"))
        pooled = sum(need(row, "end_us") - need(row, "begin_us") for row in own) - put
        lines.append([program, len(own), sum(row["local"] == "False" for row in own), pooled, put, wait])
    return cells(lines)


def draw_schedule(measured: Measured) -> Picture:
    """Draw the plot of `bench schedule`."""
    rows = {f"{row['contender']}\n{row['schedule'] or '-'}": row for row in measured.rows}
    picture = Picture(measured.name, 3.2)
    times, skews = picture.panels(2)
    groups = [{row["contender"]: row} for row in rows.values()]
    bars(times, groups, list(rows), "limit_ms")
    times.set_ylabel("ms, median")
    known = {label: skew * 100 for label, row in rows.items() if (skew := number(row, "skew_fraction")) is not None}
    skews.bar(list(known), list(known.values()), 0.5, color="#9aa5b1", **EDGE)
    for label, skew in known.items():
        skews.text(label, skew, f"{skew:.2g}", ha="center", va="bottom", fontsize=6.5)
    skews.set_yscale("log")
    skews.set_ylabel("skew between ranks, % of the time")
    for axes in (times, skews):
        axes.tick_params(axis="x", labelsize=6)
    picture.legend(times)
    return picture


def schedule_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench schedule`."""
    lines: list[list[Any]] = [
        ["contender", "schedule", "median, ms", "skew, ms", "skew of the time", "put, us", "wait, us"]
    ]
    for row in measured.rows:
        figures = [number(row, column) for column in ("skew_ms", "skew_fraction", "put_us", "wait_us")]
        lines.append([row["contender"], row["schedule"] or "-", milliseconds(number(row, "median_ms")), *figures])
    return cells(lines)
