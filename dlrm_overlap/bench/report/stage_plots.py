"""The plots of the embedding stage: shapes, backward, scaling, settings of fused, programs, schedule, volume."""

from collections.abc import Callable
from typing import Any

from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Run,
    Table,
    contenders,
    milliseconds,
    ms,
    need,
    number,
    runs,
    shape,
)
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, bars, line, looks, stack

_CHUNKED = "nccl_chunked"
_BASELINES = ("baseline", "torchrec", _CHUNKED, "nccl_registered", "nccl_copy_engines")
_CUT = 1.6  # of the baseline's time, where bars of the backward end


def draw_stage(measured: Measured) -> Picture:
    """Draw the plot of `bench stage`; of the baselines in chunks the fastest of each shape."""
    groups = [_best_chunked(group) for group in runs(measured.rows)]
    picture = Picture(3.6)
    (axes,) = picture.panels
    bars(axes, groups, [shape(group["baseline"]) for group in groups], "limit_ms", "baseline")
    axes.set_ylabel("time / baseline's")
    axes.set_xlabel("tables a GPU x rows x dim; global batch, ids a bag")
    picture.legend(axes)
    return picture


def _best_chunked(group: Run) -> Run:
    """Return the run with the fastest of its baselines in chunks alone, without their number in the name."""
    chunked = [name for name in group if name.startswith(_CHUNKED)]
    best = min(chunked, key=lambda name: need(group[name], "median_ms"), default=None)
    return {
        _CHUNKED if name == best else name: row for name, row in group.items() if name not in chunked or name == best
    }


def stage_table(measured: Measured) -> Table:
    """Return a line a shape, the speedups first, since a page cuts wide tables."""
    groups = runs(measured.rows)
    has_chunks = any(name.startswith(_CHUNKED) for name in contenders(groups))
    table: Table = []
    for group in groups:
        speedups = {name: found for name, row in group.items() if (found := number(row, "speedup")) is not None}
        best = max(speedups, key=lambda name: speedups[name])
        cells = {"shape": shape(group["baseline"]).replace("\n", ", ")}
        cells["best speedup over baseline"] = f"{speedups[best]:.2f}x ({best})"
        if has_chunks:
            known = {name: need(row, "median_ms") for name, row in group.items() if name.startswith(_BASELINES)}
            strongest = min(known, key=lambda name: known[name])
            least = known[strongest] / need(group[best], "median_ms")
            cells["over the strongest baseline"] = f"{least:.2f}x ({strongest})"
        cells |= ms(group["baseline"], "limit_ms")
        table.append(cells | {f"{name}, ms": milliseconds(number(row, "median_ms")) for name, row in group.items()})
    return table


def draw_backward(measured: Measured) -> Picture:
    """Draw the plot of `bench backward`, half of the runs in each of two panels."""
    groups = runs(measured.rows)
    picture = Picture(5.6, rows=2)
    half = (len(groups) + 1) // 2
    for axes, part in zip(picture.panels, (groups[:half], groups[half:]), strict=True):
        firsts = [group["baseline"] for group in part]
        labels = [f"{shape(first)}\n{first['optimizer']}".replace(", zipf", "\nzipf") for first in firsts]
        if not part:
            axes.set_axis_off()
            continue
        bars(axes, part, labels, "limit_ms", "baseline", cut=_CUT)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_ylim(0, _CUT)
        axes.set_ylabel("time / baseline's")
    picture.panels[-1].set_xlabel("tables a GPU x rows x dim; global batch, ids a bag, skew of the ids; optimizer")
    picture.legend(picture.panels[0])
    return picture


_PARTS = {
    "lookup": ("#c6dbef", ""),
    "all-to-all": ("#fd8d3c", "////"),
    "sync": ("#fdd0a2", "\\\\\\\\"),
    "unpack": ("#525252", ""),
}


def _baseline_part(row: Row, part: str) -> float:
    """Return the baseline's time for one of `_PARTS`, in ms; the time of its All-to-All without bytes is sync."""
    sync_ms = number(row, "sync_ms") or 0.0
    if part == "all-to-all":
        return max(0.0, need(row, "all_to_all_ms") - sync_ms)
    return sync_ms if part == "sync" else need(row, f"{part}_ms")


def draw_scaling(measured: Measured) -> Picture:
    """Draw the plot of `bench weak` and `bench strong`."""
    rows = [row for row in measured.rows if number(row, "scaling_factor") is not None]
    picture = Picture(3.6, columns=3)
    times, factors, breakdown = picture.panels
    for name, look in looks(dict.fromkeys(row["contender"] for row in rows)).items():
        own = [row for row in rows if row["contender"] == name]
        for axes, column in ((times, "median_ms"), (factors, "scaling_factor")):
            line(axes, name, [(need(row, "world_size"), need(row, column)) for row in own], look)
    base = [row for row in rows if row["contender"] == "baseline"]
    gpus = [need(row, "world_size") for row in base]
    times.plot(gpus, [need(row, "limit_ms") for row in base], label="limit of the hardware", **LIMIT)
    times.set_ylabel("ms, median")
    factors.set_ylabel("scaling factor")
    stack(breakdown, _PARTS, {part: [_baseline_part(row, part) for row in base] for part in _PARTS})
    breakdown.set_xticks(range(len(base)), [row["world_size"] for row in base])
    breakdown.set_ylabel("baseline's parts, ms")
    breakdown.legend(frameon=False, fontsize=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    for axes in (times, factors):
        axes.set_xticks(gpus)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    for axes in picture.panels:
        axes.set_xlabel("GPUs")
    picture.legend(times)
    return picture


def scaling_table(measured: Measured) -> Table:
    """Return a line a contender and number of GPUs."""
    has_sync = any(number(row, "sync_ms") is not None for row in measured.rows)
    parts = {"lookup_ms": "lookup, ms", "all_to_all_ms": "All-to-All, ms", "unpack_ms": "unpack, ms"}
    parts |= {"sync_ms": "All-to-All of one number, ms"} if has_sync else {}
    return [
        {"GPUs": row["world_size"], "contender": row["contender"]}
        | ms(row, "median_ms")
        | {"scaling factor": number(row, "scaling_factor"), "speedup": number(row, "speedup")}
        | {title: milliseconds(number(row, part)) for part, title in parts.items()}
        for row in measured.rows
    ]


_ACROSS: dict[str, dict[str, Any]] = {
    "baseline": {"color": "black", "lw": 0.8, "ls": "--"},
    "pgas": {"color": looks(["pgas"])["pgas"].colour, "lw": 5},  # to be seen below the limit, which it may reach
}


def draw_setting(column: str, label: str) -> Callable[[Measured], Picture]:
    """Return the function that draws fused's time over the setting `column`, other contenders as lines across."""

    def draw(measured: Measured) -> Picture:
        picture = Picture(3.2)
        (axes,) = picture.panels
        swept = sorted((need(row, column), need(row, "median_ms")) for row in measured.rows if row.get(column))
        name = next((row["contender"] for row in measured.rows if row.get(column)), "fused")
        line(axes, name, swept, looks(["fused"])["fused"])
        for point in swept:
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
            axes.annotate(milliseconds(point[1]), point, **above)
        for row in (row for row in measured.rows if not row.get(column)):
            median_ms, name = need(row, "median_ms"), row["contender"]
            title = f"{name}, as many as fit" if name.startswith("fused") else name
            look = _ACROSS.get(name, {"color": "black", "lw": 0.8, "ls": "-."})
            axes.axhline(median_ms, label=f"{title}: {milliseconds(median_ms)} ms", zorder=1, **look)
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


def setting_table(column: str, label: str) -> Callable[[Measured], Table]:
    """Return the function that makes the table of that plot."""
    return lambda measured: [
        {"contender": row["contender"], label: row.get(column) or "-"}
        | ms(row, "p10_ms", "median_ms", "p90_ms")
        | {"of the limit": number(row, "fraction_of_limit"), "speedup": number(row, "speedup")}
        for row in measured.rows
    ]


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


def draw_schedule(measured: Measured) -> Picture:
    """Draw the plot of `bench schedule`."""
    rows = {f"{row['contender']}\n{row['schedule'] or '-'}": row for row in measured.rows}
    picture = Picture(3.2, columns=2)
    times, skews = picture.panels
    bars(times, [{row["contender"]: row} for row in rows.values()], list(rows), "limit_ms")
    times.set_ylabel("ms, median")
    known = {label: skew * 100 for label, row in rows.items() if (skew := number(row, "skew_fraction")) is not None}
    drawn = skews.bar(list(known), list(known.values()), 0.5, color="#9aa5b1", **EDGE)
    skews.bar_label(drawn, [f"{skew:.2g}" for skew in known.values()], fontsize=6.5)
    skews.set_yscale("log")
    skews.set_ylabel("skew between ranks, % of the time")
    for axes in picture.panels:
        axes.tick_params(axis="x", labelsize=6)
    picture.legend(times)
    return picture


def schedule_table(measured: Measured) -> Table:
    """Return a line a contender and schedule."""
    columns = {"skew_ms": "skew, ms", "skew_fraction": "skew of the time", "put_us": "put, us", "wait_us": "wait, us"}
    return [
        {"contender": row["contender"], "schedule": row["schedule"] or "-"}
        | ms(row, "median_ms")
        | {title: number(row, column) for column, title in columns.items()}
        for row in measured.rows
    ]


def _by_contender(measured: Measured) -> dict[str, list[Row]]:
    """Return contender -> its rows; of one that was measured twice those of the last measurement."""
    found: dict[str, list[Row]] = {}
    for row in measured.rows:
        if need(row, "begin_us") == 0.0:
            found[row["contender"]] = []
        found[row["contender"]].append(row)
    return found


def draw_volume(measured: Measured) -> Picture:
    """Draw the rate of each contender over time, the rate of the links, and where the stage ends."""
    found = _by_contender(measured)
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
        for name, rows in _by_contender(measured).items()
    ]
