"""Maps of the speedup over shapes, of `bench sweep` and `bench grid`: heat maps in grey, a table, and words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrm_overlap.bench.report.measured import Measured, Row, Table, milliseconds, need
from dlrm_overlap.bench.report.style import Picture

PAYS = 1.05
"""the speedup over the strongest baseline from which the words say that it pays"""
_HOST = 0.9  # of a step's time: from there on a step takes as long as its CPU takes to issue it
_DARKEST = 3.0  # speedups beyond are as dark
_NUMBERS = f"speedup over the strongest baseline; hatched: below {PAYS}; in brackets: the host's time decides"
_TIMES = {"median_ms": "as the host issues it", "gpu_ms": "the GPU's time alone"}


class Cell(NamedTuple):
    """The fastest of ours on a shape and the strongest baseline, by one of the two times."""

    ours: Row
    baseline: Row
    time: str

    @property
    def speedup(self) -> float:
        """The baseline's time over ours."""
        return need(self.baseline, self.time) / need(self.ours, self.time)

    @property
    def host_bound(self) -> bool:
        """Whether the strongest baseline takes as long as its host takes to issue it."""
        return self.time == "median_ms" and need(self.baseline, "host_ms") >= _HOST * need(self.baseline, self.time)


@dataclass(frozen=True)
class Map:
    """How a figure's rows are laid out: a heat map of x and y for each value of the panel, if there is one, and time.

    Each axis is a column of the rows and its label.
    """

    x: tuple[str, str]
    y: tuple[str, str]
    panel: tuple[str, str] | None = None

    def cells(self, rows: Iterable[Row], time: str) -> dict[tuple[float, ...], Cell]:
        """Return shape -> its cell by the column `time`, of a shape that was measured twice the last.

        A shape is its values of panel, y and x, or of y and x.
        """
        found: dict[tuple[float, ...], dict[str, Row]] = {}
        for row in rows:
            place = tuple(need(row, axis[0]) for axis in (self.panel, self.y, self.x) if axis)
            found.setdefault(place, {})[row["contender"]] = row
        return {place: _cell([*by_name.values()], time) for place, by_name in sorted(found.items())}

    def draw(self, measured: Measured) -> Picture:
        """Draw the heat maps, numbers in the cells; a number in brackets is bound by the CPU."""
        by_time = {time: self.cells(measured.rows, time) for time in _TIMES}
        panels = sorted({place[:-2] for place in by_time["median_ms"]})
        picture = Picture(2.7 * len(_TIMES) + 1.0, len(panels), len(_TIMES))
        picture.figure.suptitle(_NUMBERS, fontsize=8.5)
        places = [(time, panel) for time in _TIMES for panel in panels]
        for axes, (time, panel) in zip(picture.panels, places, strict=True):
            self._draw_panel(axes, {place[-2:]: cell for place, cell in by_time[time].items() if place[:-2] == panel})
            title = f"{_TIMES[time]}, {self.panel[1]} {panel[0]:g}" if self.panel else _TIMES[time]
            axes.set_title(title, fontsize=8, loc="left")
        return picture

    def _draw_panel(self, axes: Any, own: Mapping[tuple[float, ...], Cell]) -> None:
        xs, ys = sorted({x for _, x in own}), sorted({y for y, _ in own})
        for (y, x), cell in own.items():
            dark = min(1.0, max(0.0, (cell.speedup - 1) / (_DARKEST - 1)))
            corner = xs.index(x), ys.index(y)
            looks = {"hatch": "////"} if cell.speedup < PAYS else {}
            grey = 1 - 0.75 * dark
            axes.bar(corner[0], 1, 1, bottom=corner[1] - 0.5, color=str(grey), edgecolor="black", lw=0.4, **looks)
            text = f"({cell.speedup:.2f})" if cell.host_bound else f"{cell.speedup:.2f}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if looks else None
            colour = "white" if grey < 0.45 else "black"
            axes.text(*corner, text, ha="center", va="center", fontsize=8, color=colour, bbox=box)
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        axes.set_xlim(-0.5, len(xs) - 0.5)
        axes.set_ylim(-0.5, len(ys) - 0.5)
        axes.set_xlabel(self.x[1])
        axes.set_ylabel(self.y[1])

    def table(self, measured: Measured) -> Table:
        """Return a line a shape: by both times the fastest of ours, the strongest baseline, and the speedup."""
        labels = [axis[1] for axis in (self.panel, self.y, self.x) if axis]
        by_time = {label: self.cells(measured.rows, time) for time, label in _TIMES.items()}
        table: Table = []
        for place in by_time[_TIMES["median_ms"]]:
            cells: dict[str, Any] = {label: f"{value:g}" for label, value in zip(labels, place, strict=True)}
            for label, found in by_time.items():
                cell = found[place]
                for name, row in (("ours", cell.ours), ("strongest baseline", cell.baseline)):
                    cells[f"{name}, ms: {label}"] = f"{milliseconds(need(row, cell.time))} ({row['contender']})"
                cells[f"speedup: {label}"] = f"{cell.speedup:.2f}x"
            table.append(cells)
        return table

    def words(self, measured: Measured) -> list[str]:
        """Return on how many shapes it pays, and from which to which speedup: a sentence for each time."""
        return [
            f"{label[0].upper()}{label[1:]}: {_in_all(self.cells(measured.rows, time))}"
            for time, label in _TIMES.items()
        ]


def _cell(rows: Sequence[Row], time: str) -> Cell:
    ours, baseline = (
        min((row for row in rows if row["is_baseline"] == side), key=lambda row: need(row, time))
        for side in ("False", "True")
    )
    return Cell(ours, baseline, time)


def _in_all(found: Mapping[Any, Cell]) -> str:
    """Return a sentence on all cells: how many pay, from which to which speedup, and where the CPU decides."""
    speedups = [cell.speedup for cell in found.values()]
    pays = sum(speedup >= PAYS for speedup in speedups)
    text = (
        f"the fastest of ours is {PAYS - 1:.0%} or more faster than the strongest baseline on {pays} of "
        f"{len(speedups)} shapes; speedups are {min(speedups):.2f}x to {max(speedups):.2f}x."
    )
    if bound := sum(cell.host_bound for cell in found.values()):
        text += f" On {bound} of them the baseline takes as long as its host takes to issue it."
    return text


MAPS = {
    "sweep": Map(("pooling_factor", "pooling factor"), ("dim", "dim"), ("global_batch", "global batch")),
    "grid": Map(("tables_per_rank", "tables a GPU"), ("global_batch", "global batch")),
}
