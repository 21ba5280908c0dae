"""The plots of communication: alone, beside a computation, and inside a product."""

from typing import Any

from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.measured import Measured, Row, Table, need, number
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, bars, line, looks
from dlrm_overlap.bench.request import CollectivesRequest

_CUT = 1.6  # of NCCL's time, where the plot ends
_COLLECTIVES = ("nccl", "nccl_registered", "nccl_copy_engines", "dma", "stores")


def draw_collectives(measured: Measured) -> Picture:
    """Draw the plot of `bench collectives`: a panel for each operation, alone or beside, captured or not."""
    kinds = list(dict.fromkeys((row["operation"], row["beside"], row["captured"]) for row in measured.rows))
    programs = ("", str(CollectivesRequest.store_programs))
    lines = (len(kinds) + 1) // 2
    picture = Picture(1.4 + 2.2 * lines, 2, lines)
    for axes, kind in zip(picture.panels, kinds, strict=False):
        own = [row for row in measured.rows if (row["operation"], row["beside"], row["captured"]) == kind]
        nccl = {row["mb_per_peer"]: need(row, "median_ms") for row in own if row["contender"] == "nccl"}
        for name, look in looks(_COLLECTIVES).items():
            points = [
                (need(row, "mb_per_peer"), need(row, "median_ms") / nccl[row["mb_per_peer"]])
                for row in own
                if row["contender"] == name and row["store_programs"] in programs and row["mb_per_peer"] in nccl
            ]
            line(axes, name, sorted(points), look, ms=4)
        alone = sorted(
            (need(row, "mb_per_peer"), product / need(row, "median_ms"))
            for row in own
            if row["contender"] == "nccl" and (product := number(row, "product_ms")) is not None
        )
        if alone:
            axes.plot(*zip(*alone, strict=True), label="the product alone", **LIMIT)
        axes.set_ylim(0, _CUT)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("MB to each peer")
        axes.set_ylabel("time / NCCL's")
        beside = "alone" if kind[1] == "nothing" else "beside a matrix product"
        axes.set_title(f"{kind[0]}, {beside}, {'captured' if kind[2] == 'True' else 'not captured'}", fontsize=7)
    for axes in picture.panels[len(kinds) :]:
        axes.set_axis_off()
    picture.legend(picture.panels[-1] if picture.panels[-1].axison else picture.panels[0])
    return picture


def collectives_table(measured: Measured) -> Table:
    """Return a line for each operation, setting and size, with the times of all contenders."""
    columns = {"operation": "operation", "beside": "beside", "captured": "captured", "mb_per_peer": "MB to a peer"}
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in measured.rows:
        cells = found.setdefault(
            tuple(row[column] for column in columns), {title: row[column] for column, title in columns.items()}
        )
        programs = row.get("store_programs")
        name = f"{row['contender']}_{programs}" if programs else row["contender"]
        cells[f"{name}, us"] = need(row, "median_ms") * 1e3
    return list(found.values())


def _summary(measured: Measured) -> Table:
    """Return the line of `summarise` of each strategy and of the rule."""
    numbers = ("fraction_of_ideal", "speedup", "together_ms")
    *lines, _ = summarise([{**row, **{name: need(row, name) for name in numbers}} for row in measured.rows])
    return lines


def draw_concurrent(measured: Measured) -> Picture:
    """Draw the plot of `bench concurrent`."""
    lines = _summary(measured)
    picture = Picture(3.4)
    (axes,) = picture.panels
    shades = (("#d4d9df", ""), ("#1f6f8b", ""), ("#f0b27a", "////"))
    for i, (name, (colour, hatch)) in enumerate(zip(CLASSES, shades, strict=True)):
        places = [place + (i - 1) * 0.27 for place in range(len(lines))]
        heights = [line[name] or 0.0 for line in lines]
        axes.bar(places, heights, 0.25, color=colour, hatch=hatch, label=name, **EDGE)
    axes.axhline(1, label="ideal: the shorter of the two is hidden", **LIMIT)
    axes.axhline(0, color="black", lw=0.5)
    axes.set_xticks(range(len(lines)), [line["strategy"] for line in lines], rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("mean fraction of the ideal speedup")
    picture.legend(axes)
    return picture


def concurrent_table(measured: Measured) -> Table:
    """Return a line a strategy."""
    return [
        {name: line[name] for name in ("strategy", *CLASSES)} | {"mean speedup of all cases": line["mean_speedup"]}
        for line in _summary(measured)
    ]


_OPERATORS = {"all_gather": "all-gather, then the product", "reduce_scatter": "the product, then reduce-scatter"}


def _shapes(measured: Measured) -> dict[str, dict[str, dict[str, Row]]]:
    """Return operator -> shape -> contender -> its row."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in measured.rows:
        shape = "\n".join(f"{name.upper()} {row[name]}" for name in ("m", "k", "n"))
        found.setdefault(row["operator"], {}).setdefault(shape, {})[row["contender"]] = row
    return found


def draw_gemm(measured: Measured) -> Picture:
    """Draw the plot of `bench gemm`."""
    shapes = _shapes(measured)
    picture = Picture(1.2 + 2.4 * len(shapes), rows=len(shapes))
    for axes, (operator, of_shape) in zip(picture.panels, shapes.items(), strict=True):
        bars(axes, list(of_shape.values()), list(of_shape), "floor_ms", "serial", "product or links alone")
        axes.set_ylabel("time / serial's")
        axes.set_title(_OPERATORS.get(operator, operator), fontsize=7)
    picture.legend(picture.panels[0])
    return picture


def gemm_table(measured: Measured) -> Table:
    """Return a line an operator and shape."""
    table: Table = []
    for operator, of_shape in _shapes(measured).items():
        for by_name in of_shape.values():
            first = next(iter(by_name.values()))
            cells: dict[str, Any] = {
                "operator": operator,
                "M, K, N": ", ".join(first[name] for name in ("m", "k", "n")),
            }
            for part in ("gemm_ms", "triton_gemm_ms", "communication_ms", "floor_ms"):
                cells[part] = number(first, part)
            for name, row in by_name.items():
                cells[f"{name}, ms"] = need(row, "median_ms")
                cells[f"{name}, overlap efficiency"] = number(row, "overlap_efficiency")
            table.append(cells)
    return table
