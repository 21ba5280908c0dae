"""The plots of communication alone and beside a computation."""

from typing import Any

from dlrm_overlap.bench.report.bars import line
from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Table,
    cells,
    need,
    number,
)
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, looks
from dlrm_overlap.bench.request import CollectivesRequest

_CUT = 1.6  # of NCCL's time, where the plot ends
_COLLECTIVES = ("nccl", "nccl_registered", "nccl_copy_engines", "dma", "stores")


def _collective_name(row: Row) -> str:
    programs = row.get("store_programs")
    return f"{row['contender']}_{programs}" if programs else row["contender"]


def _collective_kinds(measured: Measured) -> list[tuple[str, str, str]]:
    return list(dict.fromkeys((row["operation"], row["beside"], row["captured"]) for row in measured.rows))


def draw_collectives(measured: Measured) -> Picture:
    """Draw the plot of `bench collectives`."""
    kinds = _collective_kinds(measured)
    usual = str(CollectivesRequest.store_programs)
    drawn = [row for row in measured.rows if row["contender"] in _COLLECTIVES and row["store_programs"] in ("", usual)]
    picture = Picture(measured.name, 1.4 + 2.2 * ((len(kinds) + 1) // 2))
    panels = picture.panels(2, (len(kinds) + 1) // 2)
    for axes, kind in zip(panels, kinds, strict=False):
        own = [row for row in drawn if (row["operation"], row["beside"], row["captured"]) == kind]
        nccl = {row["mb_per_peer"]: need(row, "median_ms") for row in own if row["contender"] == "nccl"}
        for name, look in looks(_COLLECTIVES).items():
            points = [
                (need(row, "mb_per_peer"), need(row, "median_ms") / nccl[row["mb_per_peer"]])
                for row in own
                if row["contender"] == name and row["mb_per_peer"] in nccl
            ]
            line(axes, name, [x for x, _ in sorted(points)], [y for _, y in sorted(points)], look, ms=4)
        alone = sorted(
            (need(row, "mb_per_peer"), product / need(row, "median_ms"))
            for row in own
            if row["contender"] == "nccl" and (product := number(row, "product_ms")) is not None
        )
        if alone:
            axes.plot([x for x, _ in alone], [y for _, y in alone], label="the product alone", **LIMIT)
        axes.set_ylim(0, _CUT)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("MB to each peer")
        axes.set_ylabel("time / NCCL's")
        beside = "alone" if kind[1] == "nothing" else "beside a matrix product"
        axes.set_title(f"{kind[0]}, {beside}, {'captured' if kind[2] == 'True' else 'not captured'}", fontsize=7)
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    picture.legend(panels[-1] if panels[-1].axison else panels[0])
    return picture


def collectives_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench collectives`."""
    names = list(dict.fromkeys(_collective_name(row) for row in measured.rows))
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in measured.rows:
        key = (row["operation"], row["beside"], row["captured"], row["mb_per_peer"])
        found.setdefault(key, {})[_collective_name(row)] = row
    lines: list[list[Any]] = [["operation", "beside", "captured", "MB to a peer", *(f"{name}, us" for name in names)]]
    for key, row in found.items():
        lines.append([*key, *(need(row[name], "median_ms") * 1e3 if name in row else None for name in names)])
    return cells(lines)


def _summary(measured: Measured) -> list[dict[str, Any]]:
    """Return what the rows of each strategy show together, see `summarise`."""
    numbers = ("fraction_of_ideal", "speedup", "together_ms")
    *lines, _ = summarise([{**row, **{name: need(row, name) for name in numbers}} for row in measured.rows])
    return lines


def draw_concurrent(measured: Measured) -> Picture:
    """Draw the plot of `bench concurrent`."""
    lines = _summary(measured)
    picture = Picture(measured.name, 3.4)
    (axes,) = picture.panels()
    shades = (("#d4d9df", ""), ("#1f6f8b", ""), ("#f0b27a", "////"))
    for i, (name, (colour, hatch)) in enumerate(zip(CLASSES, shades, strict=True)):
        heights = [line[name] or 0.0 for line in lines]
        places = [place + (i - 1) * 0.27 for place in range(len(lines))]
        axes.bar(places, heights, 0.25, color=colour, hatch=hatch, label=name, **EDGE)
    axes.axhline(1, label="ideal: the shorter of the two is hidden", **LIMIT)
    axes.axhline(0, color="black", lw=0.5)
    axes.set_xticks(range(len(lines)), [line["strategy"] for line in lines], rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("mean fraction of the ideal speedup")
    picture.legend(axes)
    return picture


def concurrent_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench concurrent`."""
    shown = [[line[name] for name in ("strategy", *CLASSES, "mean_speedup")] for line in _summary(measured)]
    return cells([["strategy", *CLASSES, "mean speedup of all cases"], *shown])
