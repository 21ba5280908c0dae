"""The plot of products with their communication inside."""

from typing import Any

from dlrm_overlap.bench.report.bars import bars
from dlrm_overlap.bench.report.measured import Measured, Row, Table, cells, need, number
from dlrm_overlap.bench.report.style import Picture

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
    picture = Picture(measured.name, 1.2 + 2.4 * len(shapes))
    panels = picture.panels(rows=len(shapes))
    for axes, (operator, of_shape) in zip(panels, shapes.items(), strict=True):
        groups = list(of_shape.values())
        bars(axes, groups, list(of_shape), "floor_ms", "serial", "product or links alone")
        axes.set_ylabel("time / serial's")
        axes.set_title(_OPERATORS.get(operator, operator), fontsize=7)
    picture.legend(panels[0])
    return picture


def gemm_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench gemm`."""
    names = list(dict.fromkeys(row["contender"] for row in measured.rows))
    parts = ("gemm_ms", "triton_gemm_ms", "communication_ms", "floor_ms")
    lines: list[list[Any]] = [["operator", "M, K, N", *parts]]
    for name in names:
        lines[0] += [f"{name}, ms", f"{name}, overlap efficiency"]
    for operator, of_shape in _shapes(measured).items():
        for row in of_shape.values():
            first = next(iter(row.values()))
            own: list[Any] = [operator, ", ".join(first[name] for name in ("m", "k", "n"))]
            own += [number(first, part) for part in parts]
            for name in names:
                own += (
                    [need(row[name], "median_ms"), number(row[name], "overlap_efficiency")]
                    if name in row
                    else [None] * 2
                )
            lines.append(own)
    return cells(lines)
